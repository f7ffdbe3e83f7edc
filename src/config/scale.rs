//! `--scale tiny`: any recipe on a model of half a million parameters and the built-in tasks, with the quick start's scaffold, in
//! minutes on two cores. This file is the whole of the rules.
//!
//! What a recipe is stays: rewards, advantages, filters, losses, clips, aggregation, corrections, dynamic sampling, group sizes, passes,
//! temperature, optimizer constants, decay, stages, curriculum, and how context and turn limit grow from stage to stage. Sizes become those
//! below. Learning rates are chosen: 1e-6 would not move a model this small.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use super::RunFile;
use super::recipes;
use super::text::{at, each_value, element_name, join, written};
use crate::stage::RftSettings;

/// A key that has another value than the recipe gives it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Change {
    pub key: String,
    /// In TOML; absent where the recipe has no such key.
    pub from: Option<String>,
    pub to: Option<String>,
    /// Why so.
    pub rule: &'static str,
}

/// Turns of an episode at the recipe's smallest turn limit: a penalty on length that begins at a quarter of it must spare an attempt that
/// looks, edits, tests, and does the last two again. Measured on the first stage of nebius (18 steps, 512 tokens, 200 held-out tasks): from
/// 0.57 to 0.62 with 20 turns, from 0.59 to 0.69 with 32.
const TURNS: f64 = 32.0;
/// Tokens of an episode at the recipe's smallest limit: some 16 turns, so that an attempt that gets nowhere ends soon, and that a later
/// stage with twice as many has more to gain.
const TOKENS: f64 = 384.0;
/// Attempts of a step of reinforcement learning.
const ATTEMPTS: f64 = 160.0;
/// Optimizer steps on one rollout at most.
const MOST_UPDATES: f64 = 8.0;
/// Held-out tasks of an evaluation, and attempts at each.
const EVALUATE_TASKS: f64 = 50.0;
const SAMPLES: f64 = 10.0;
/// Tasks that the policy attempts to fine-tune on, and sequences of a batch of that.
const RFT_TASKS: f64 = 200.0;
const RFT_BATCH: f64 = 8.0;
/// Steps of reinforcement learning, all stages of a run together.
const STEPS: f64 = 24.0;
/// A learning rate of reinforcement learning is multiplied by this and divided by the root of the updates that a rollout is cut into:
/// 1e-6 becomes 5.6e-4 with one, 2e-4 with eight. Measured likewise: 0.69 with 560, 0.57 with 790, where attempts get short.
const RL_RATE: f64 = 560.0;
/// One of fine-tuning by this: 5e-6 becomes 1e-3.
const RFT_RATE: f64 = 200.0;
/// Scripted demonstrations that stand in for what a real model knows before the recipe begins.
/// With 3000 of them, and 120 tasks to fine-tune on, reinforcement learning drove the policy to ever shorter attempts.
const WARM_UP_CANDIDATES: usize = 4500;
/// The stage that learns from them.
const WARM_UP: &str = "warm_up";
const QUICKSTART_MODEL: &str = "0.5 million parameters";

const TURNS_RULE: &str =
    "turns are scaled so that the smallest limit is 32: a penalty from a quarter of it on spares two rounds of edit and test";
const TOKENS_RULE: &str = "tokens are scaled so that the smallest limit is 384, some 16 turns";
const TURN_TOKENS_RULE: &str = "a call of the quick start's tools is short";
const ROLLOUT_RULE: &str = "a step makes 160 attempts, in groups as large as the recipe's";
const UPDATES_RULE: &str = "a rollout is cut into as many updates as the recipe's, at most 8";
const BATCH_RULE: &str = "as many times the tasks of a step as in the recipe";
const STEPS_RULE: &str = "24 steps in all, shared by the stages as in the recipe";
const RL_RATE_RULE: &str =
    "chosen: 560 times the recipe's, which would not move a model this small, over the root of the updates of a rollout";
const RFT_RATE_RULE: &str = "chosen: 200 times the recipe's, which would not move a model this small";
const RFT_RULE: &str = "200 tasks and batches of 8 give some 100 updates";
const MODEL_RULE: &str = "the quick start's model, drawn at random";
const TASKS_RULE: &str = "the built-in tasks";
const SCAFFOLD_RULE: &str = "the quick start's scaffold";
const MACHINE_RULE: &str = "one machine: no servers, no context parallelism, memory to spare, the program's own limits";
const EVALUATE_RULE: &str = "between stages only, 10 attempts at each of 50 tasks";
const WARM_UP_RULE: &str = "stands in for pre-training: the drawn model learns the tools from scripted demonstrations";

/// Sizes of the recipe that others are measured against.
struct Sizes {
    turns: f64,
    tokens: f64,
    steps: f64,
    /// Kinds of its stages.
    kinds: BTreeSet<String>,
}

/// The same recipe, small, and every key that changes.
///
/// # Errors
/// It is that small already.
pub fn tiny(run_file: &RunFile) -> Result<(RunFile, Vec<Change>), String> {
    if run_file.model.directory.is_none() {
        return Err("--scale tiny: this recipe is that small already".into());
    }
    let broken = |error: String| format!("--scale tiny: {error}");
    let root = Table::try_from(run_file).map_err(|error| broken(error.to_string()))?;
    let sizes = Sizes::of(&root);
    let mut rules = Vec::new();
    let mut scaled = root.clone();
    scale_machine(&mut scaled, &sizes, run_file, &mut rules)?;
    scale_scope(&mut scaled, "", &root, None, &sizes, &mut rules);
    if let Some(Value::Array(stages)) = scaled.get_mut("stages") {
        for (index, stage) in stages.iter_mut().enumerate() {
            let Value::Table(stage) = stage else { continue };
            let prefix = element_name("stages", index, stage.get("name").and_then(Value::as_str));
            let own = stage.clone();
            scale_scope(stage, &prefix, &own, Some(&root), &sizes, &mut rules);
        }
        stages.insert(0, Value::Table(warm_up()?));
        rules.push((join("stages", WARM_UP), WARM_UP_RULE));
    }
    let changes = changes(&root, &scaled, &rules);
    let run_file = scaled.try_into().map_err(|error: toml::de::Error| broken(error.message().to_owned()))?;
    Ok((run_file, changes))
}

impl Sizes {
    fn of(root: &Table) -> Sizes {
        let stages = || root.get("stages").and_then(Value::as_array).into_iter().flatten();
        let all = |section: &str, key: &str| -> Vec<f64> {
            let own = stages().filter_map(|stage| number(stage.get(section)?.get(key)?));
            own.chain(root.get(section).and_then(|table| number(table.get(key)?))).collect()
        };
        let smallest = |values: Vec<f64>| values.into_iter().fold(f64::INFINITY, f64::min).max(1.0);
        let reinforcing = |stage: &&Value| stage.get("kind").and_then(Value::as_str) == Some("rl");
        let usual = at(root, "rl.steps").and_then(number).unwrap_or(0.0);
        let of_stage = |stage: &Value| stage.get("rl").and_then(|rl| number(rl.get("steps")?)).unwrap_or(usual);
        let steps: Vec<f64> = stages().filter(reinforcing).map(of_stage).collect();
        let steps = if steps.is_empty() { usual } else { steps.into_iter().sum() };
        let kinds = stages().filter_map(|stage| stage.get("kind")?.as_str().map(str::to_owned)).collect();
        let (turns, tokens) = (smallest(all("agent", "max_turns")), smallest(all("agent", "max_tokens")));
        Sizes { turns, tokens, steps: steps.max(1.0), kinds }
    }

    fn turns(&self, turns: f64) -> f64 {
        (turns * TURNS / self.turns).ceil().max(1.0)
    }

    fn tokens(&self, tokens: f64) -> f64 {
        (tokens * TOKENS / self.tokens).round().max(1.0)
    }

    fn steps(&self, steps: f64) -> f64 {
        (steps * STEPS / self.steps).round()
    }
}

/// Maps the sizes in a table of the whole run (`prefix` empty) or of one stage, whose absent keys are those of `usual`.
fn scale_scope(
    table: &mut Table,
    prefix: &str,
    own: &Table,
    usual: Option<&Table>,
    sizes: &Sizes,
    rules: &mut Vec<(String, &'static str)>,
) {
    let given = |key: &str| at(own, key).or_else(|| at(usual?, key)).and_then(number);
    let mut map = |key: &str, rule: &'static str, value: &dyn Fn(f64) -> f64| {
        let unused = ["rft", "rl"].iter().any(|kind| within(key, kind) && !sizes.kinds.contains(*kind));
        if !unused
            && let Some(place) = at_mut(table, key)
            && let Some(old) = number(place)
        {
            *place = like(place, value(old));
            rules.push((join(prefix, key), rule));
        }
    };
    for key in ["agent.max_turns", "rl.reward.step_penalty.free_turns", "rl.reward.step_penalty.turn_limit"] {
        map(key, TURNS_RULE, &|turns| sizes.turns(turns));
    }
    for key in [
        "agent.max_tokens",
        "model.rope.original_max_position_embeddings",
        "rl.reward.overlong_penalty.token_limit",
        "rl.reward.overlong_penalty.buffer_tokens",
        "rl.loss.constant",
    ] {
        map(key, TOKENS_RULE, &|tokens| sizes.tokens(tokens));
    }
    map("agent.max_turn_tokens", TURN_TOKENS_RULE, &|_| 64.0);
    let (tasks, group) = (given("rl.tasks_per_step").unwrap_or(1.0), given("rl.group_size").unwrap_or(1.0));
    let new_tasks = (ATTEMPTS / group).round().max(1.0);
    map("rl.tasks_per_step", ROLLOUT_RULE, &|_| new_tasks);
    let updates = match given("rl.sequences_per_update") {
        None | Some(0.0) => 1.0,
        Some(sequences) => (tasks * group / sequences).round().clamp(1.0, MOST_UPDATES),
    };
    map("rl.sequences_per_update", UPDATES_RULE, &|sequences| match sequences {
        0.0 => 0.0,
        _ => (new_tasks * group / updates).ceil(),
    });
    map("rl.dynamic_sampling.tasks_per_batch", BATCH_RULE, &|batch| (batch * new_tasks / tasks).round());
    map("rl.steps", STEPS_RULE, &|steps| sizes.steps(steps));
    map("rl.schedule.warmup_steps", STEPS_RULE, &|steps| sizes.steps(steps));
    map("rl.schedule.peak", RL_RATE_RULE, &|rate| two_digits(rate * RL_RATE / updates.sqrt()));
    map("rft.schedule.peak", RFT_RATE_RULE, &|rate| rate * RFT_RATE);
    map("rft.tasks", RFT_RULE, &|_| RFT_TASKS);
    map("rft.batch_sequences", RFT_RULE, &|_| RFT_BATCH);
    map("evaluate.tasks", EVALUATE_RULE, &|_| EVALUATE_TASKS);
    map("evaluate.samples", EVALUATE_RULE, &|_| SAMPLES);
    map("evaluate.every", EVALUATE_RULE, &|_| 0.0);
    if let Some(Value::Array(numbers)) = at_mut(table, "evaluate.k") {
        numbers.iter_mut().for_each(|k| *k = like(k, number(k).unwrap_or(1.0).min(SAMPLES)));
        rules.push((join(prefix, "evaluate.k"), EVALUATE_RULE));
    }
}

/// Model, tasks, scaffold and machine.
fn scale_machine(
    root: &mut Table,
    sizes: &Sizes,
    run_file: &RunFile,
    rules: &mut Vec<(String, &'static str)>,
) -> Result<(), String> {
    let defaults = Table::try_from(RunFile::default()).map_err(|error| error.to_string())?;
    let mut usual = |key: &str, rule: &'static str| {
        if let (Some(value), Some(place)) = (at(&defaults, key), at_mut(root, key)) {
            *place = value.clone();
            rules.push((key.to_owned(), rule));
        }
    };
    usual("agent.scaffold", SCAFFOLD_RULE);
    for key in ["tasks.format", "tasks.train", "tasks.held_out"] {
        usual(key, TASKS_RULE);
    }
    for key in [
        "run.device",
        "agent.episode_seconds",
        "rollout.nodes",
        "rollout.tensor_parallel",
        "parallel.context",
        "step.recompute",
        "step.offload_optimizer",
        "sandbox.limits",
        "checkpoint",
    ] {
        usual(key, MACHINE_RULE);
    }
    let quickstart: Table = recipes::recipe("quickstart").unwrap_or_default().parse().map_err(|_| "no quick start")?;
    let mut shape = at(&quickstart, "model.initialise").cloned().ok_or("no model in the quick start")?;
    let original = at(root, "model.rope.original_max_position_embeddings").and_then(number);
    if let (Value::Table(shape), Some(original)) = (&mut shape, original) {
        // What the model is made for without scaling, so that scaling has as much to do as in the recipe.
        shape.insert("max_position_embeddings".into(), Value::Integer(sizes.tokens(original) as i64));
    }
    let Some(Value::Table(model)) = root.get_mut("model") else { return Err("no model".into()) };
    model.remove("directory");
    model.insert("initialise".into(), shape);
    for key in ["model.directory", "model.initialise"] {
        rules.push((key.to_owned(), MODEL_RULE));
    }
    let name = format!("{}-tiny", run_file.run.name);
    if let Some(place) = at_mut(root, "run.name") {
        *place = Value::String(name);
        rules.push(("run.name".into(), "a run directory of its own"));
    }
    Ok(())
}

fn warm_up_in_words() -> String {
    format!("rft on {WARM_UP_CANDIDATES} demonstrations")
}

/// The quick start's fine-tuning, shorter.
fn warm_up() -> Result<Table, String> {
    let settings = RftSettings { candidates: WARM_UP_CANDIDATES, ..RftSettings::default() };
    let settings = Table::try_from(settings).map_err(|error| error.to_string())?;
    Ok(Table::from_iter([
        ("name".to_owned(), Value::String(WARM_UP.into())),
        ("kind".to_owned(), Value::String("rft".into())),
        ("rft".to_owned(), Value::Table(settings)),
    ]))
}

/// Where the two differ, each key with the longest rule that is about it; what is new as a whole in one line.
fn changes(from: &Table, to: &Table, rules: &[(String, &'static str)]) -> Vec<Change> {
    let whole = [("model.initialise", QUICKSTART_MODEL.to_owned()), ("stages.warm_up", warm_up_in_words())];
    let values = |table: &Table| {
        let mut values = BTreeMap::new();
        each_value("", &Value::Table(table.clone()), &mut |key, value| {
            let about = whole.iter().find(|(about, _)| within(key, about));
            let (key, value) = about.map_or_else(|| (key, written(value)), |(about, words)| (*about, words.clone()));
            values.insert(key.to_owned(), value);
        });
        values
    };
    let (from, to) = (values(from), values(to));
    let keys: BTreeSet<&String> = from.keys().chain(to.keys()).collect();
    let change = |key: &String| {
        let rule = rules.iter().filter(|(about, _)| within(key, about)).max_by_key(|(about, _)| about.len());
        let rule = rule.map_or("", |(_, rule)| rule);
        Change { key: key.clone(), from: from.get(key).cloned(), to: to.get(key).cloned(), rule }
    };
    keys.into_iter().map(change).filter(|change| change.from != change.to).collect()
}

/// `key` is `about`, or part of it.
fn within(key: &str, about: &str) -> bool {
    key.strip_prefix(about).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|value| value as f64))
}

fn two_digits(number: f64) -> f64 {
    format!("{number:.1e}").parse().unwrap_or(number)
}

/// A number of the kind of `place`.
fn like(place: &Value, number: f64) -> Value {
    if place.is_integer() { Value::Integer(number as i64) } else { Value::Float(number) }
}

fn at_mut<'a>(table: &'a mut Table, path: &str) -> Option<&'a mut Value> {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let value = table.get_mut(first)?;
    if rest.is_empty() { Some(value) } else { at_mut(value.as_table_mut()?, rest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_say_the_numbers_they_are() {
        for (rule, numbers) in [
            (TURNS_RULE, &[TURNS][..]),
            (TOKENS_RULE, &[TOKENS]),
            (ROLLOUT_RULE, &[ATTEMPTS]),
            (UPDATES_RULE, &[MOST_UPDATES]),
            (STEPS_RULE, &[STEPS]),
            (RL_RATE_RULE, &[RL_RATE]),
            (RFT_RATE_RULE, &[RFT_RATE]),
            (RFT_RULE, &[RFT_TASKS, RFT_BATCH]),
            (EVALUATE_RULE, &[SAMPLES, EVALUATE_TASKS]),
        ] {
            let said: Vec<f64> = rule.split(|character: char| !character.is_ascii_digit()).flat_map(str::parse).collect();
            assert!(numbers.iter().all(|number| said.contains(number)), "{rule}: {numbers:?}");
        }
    }
}
