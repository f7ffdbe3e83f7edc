//! A whole run, cut to seconds: several ranks find what one finds.

use std::path::Path;

use learner::config::Layers;
use learner::device::CpuDevice;
use learner::evaluate::HeldOut;
use learner::grader::Grader;
use learner::model::ModelConfig;
use learner::parallel::{Ranks, World};
use learner::sandbox::Sandbox;
use learner::stage::{Context, Learner, RunError, RunState, Summary, run};
use learner::task::{builtin, builtin_tokenizer, builtin_tokenizer_json};
use learner::text::ChatFormat;
use learner::train::{MetricsLog, Trainer};
use learner::types::Silent;
use serde_json::Value;

use crate::support::{on_ranks, policy, tiny};

const SHORT: [&str; 12] = [
    "rft.candidates=30",
    "rft.steps=12",
    "rl.steps=2",
    "rl.tasks_per_step=5",
    "rl.group_size=2",
    "agent.max_turns=2",
    "agent.max_turn_tokens=12",
    "evaluate.tasks=5",
    "evaluate.samples=2",
    "evaluate.structure_tasks=1",
    "evaluate.every=1",
    "engine.max_sequences=4",
];

/// One rank's run. `stop` is asked as the run asks it.
fn run_rank(
    world: World<CpuDevice>,
    folder: &Path,
    sandbox: &Sandbox,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Summary, RunError> {
    let mut layers = Layers::from_recipe("smoke").expect("a recipe");
    SHORT.iter().for_each(|setting| layers.set(setting).expect("a setting"));
    let run_file = layers.finish().expect("a run file");
    let settings = run_file.stage_settings();
    let (pools, tokenizer) = (builtin().expect("pools"), builtin_tokenizer().expect("a tokenizer"));
    let config = ModelConfig { vocabulary: tokenizer.vocabulary_size(), max_positions: 1024, ..tiny() };
    let ranks: Ranks = world.ranks.clone();
    let trainer = Trainer::new(policy(&world, config, 3), world, settings.rft.optimizer, &settings.step);
    let mut learner = Learner { trainer, state: RunState::start("these".into()) };
    let log = ranks.first().then(|| MetricsLog::open(&folder.join("metrics.jsonl"), 0).expect("a log"));
    let grader = Grader::new(sandbox.clone(), run_file.grader.clone());
    let context = Context {
        ranks: &ranks,
        directory: folder,
        settings: &settings,
        tokenizer: &tokenizer,
        format: ChatFormat::new(&tokenizer).expect("a chat format"),
        tokenizer_json: builtin_tokenizer_json(),
        grader: &grader,
        workers: 2,
        sandbox_tier: sandbox.tier(),
        train_tasks: &pools.train,
        held_out: HeldOut::draw(&pools.held_out, &settings.evaluate, settings.seed),
        progress: &Silent,
        stop,
    };
    run(&context, &mut learner, log)
}

/// The metrics of a run, and how far two of them are apart: numbers by their difference over their size, all else must be equal.
fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect()
}

fn distance(left: &Value, right: &Value) -> f64 {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => {
            let (left, right) = (left.as_f64().expect("a float"), right.as_f64().expect("a float"));
            (left - right).abs() / right.abs().max(1.0)
        }
        (Value::Object(left), Value::Object(right)) => {
            assert!(left.keys().eq(right.keys()), "{left:?} {right:?}");
            let timeless = left.iter().filter(|(key, _)| *key != "seconds");
            timeless.map(|(key, left)| distance(left, &right[key])).fold(0.0, f64::max)
        }
        (left, right) => {
            assert_eq!(left, right);
            0.0
        }
    }
}

#[test]
fn several_ranks_find_what_one_finds() {
    let sandbox = Sandbox::start(&Default::default()).expect("a sandbox");
    let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let (one, many) = (folders[0].path(), folders[1].path());
    let alone = on_ranks(1, 1, |world| run_rank(world, one, &sandbox, &|| false).expect("a whole run")).remove(0);
    let together = on_ranks(3, 1, |world| run_rank(world, many, &sandbox, &|| false).expect("a whole run"));
    // The weights sample before anything is trained: equal bits, whoever sampled.
    let first = |folder: &Path| std::fs::read_to_string(folder.join("episodes/before_rft.jsonl")).expect("episodes");
    assert_eq!(first(one), first(many));
    let demonstrations = |folder: &Path| {
        let text = std::fs::read_to_string(folder.join("episodes/demonstrations.jsonl")).expect("demonstrations");
        text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(demonstrations(one), demonstrations(many));
    let (left, right) = (metrics(many), metrics(one));
    assert_eq!(left.len(), right.len());
    for (left, right) in left.iter().zip(&right) {
        assert!(distance(left, right) <= 1e-4, "{left}\n{right}");
    }
    for summary in &together {
        assert_eq!(summary.mismatch_max, 0.0, "sampled and recomputed log-probabilities are equal bit for bit");
        assert_eq!(summary.weights_sha256, together[0].weights_sha256);
        assert_eq!(summary.evaluation, together[0].evaluation);
        assert_eq!(
            (summary.verdicts_executed, summary.verdicts_remembered),
            (alone.verdicts_executed, alone.verdicts_remembered)
        );
    }
}

#[test]
fn a_rank_that_is_asked_to_stop_ends_all_with_a_checkpoint() {
    let sandbox = Sandbox::start(&Default::default()).expect("a sandbox");
    let folder = tempfile::tempdir().unwrap();
    let results = on_ranks(2, 1, |world| {
        let rank = world.ranks.rank();
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let stop = || {
            rank == 1 && folder.path().join("episodes/demonstrations.jsonl").exists() && {
                asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= 4
            }
        };
        run_rank(world, folder.path(), &sandbox, &stop)
    });
    for result in results {
        assert!(matches!(result, Err(RunError::Stopped { steps: 1.. })), "{result:?}");
    }
    assert!(folder.path().join("checkpoints").read_dir().unwrap().flatten().all(|entry| entry.path().join("DONE").exists()));
}
