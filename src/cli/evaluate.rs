//! `learner evaluate`: how often a policy solves tasks, how sure that is, and how its episodes go.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::closing::evaluation_rows;
use super::device::{self, Work};
use super::run_file::SettingArguments;
use super::setup::{self, Text};
use super::{CliError, OutputArguments, print_json, signals::StopSignal};
use crate::agent::{self, Rollout, Surroundings, Tally};
use crate::config::RunFile;
use crate::device::Device;
use crate::engine::BuiltinEngine;
use crate::evaluate::{self, Evaluation, HeldOut, Sampling, Stream};
use crate::grader::Grader;
use crate::parallel::Ranks;
use crate::report::Reporter;
use crate::stage::{Attempts, stream::EVALUATE_COMMAND};
use crate::types::{Episode, Progress, Task};

#[derive(clap::Args)]
pub struct EvaluateArguments {
    #[command(flatten)]
    settings: SettingArguments,
    /// Tasks to evaluate on: a task file; the run file's held-out tasks when left out
    #[arg(long = "on", value_name = "FILE")]
    on: Option<PathBuf>,
    /// Attempts at each task (evaluate.samples)
    #[arg(long)]
    samples: Option<usize>,
    /// Numbers of attempts k to report pass@k for, each at most --samples (evaluate.k)
    #[arg(long, value_delimiter = ',', value_name = "K,K")]
    k: Vec<usize>,
}

/// What is printed for machines.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    evaluation: &'a Evaluation,
    decoding: Decoding,
    seed: u64,
    /// By task: attempts not lost to infrastructure faults, and those that passed.
    attempts: BTreeMap<String, Attempts>,
    /// SHA-256 of the token ids of all episodes, in order: equal for equal weights, tasks, settings and seed.
    episodes_sha256: String,
}

/// How tokens were drawn. What the built-in engine does not have is named, so that nobody need ask.
#[derive(Serialize)]
struct Decoding {
    temperature: f64,
    /// Always 1: nothing is cut off.
    top_p: f32,
    /// Always 0: off.
    top_k: usize,
    min_p: f32,
    repetition_penalty: f32,
    max_turns: usize,
    max_tokens: usize,
    max_turn_tokens: usize,
}

impl Decoding {
    fn of(run_file: &RunFile) -> Decoding {
        let agent::Settings { max_turns, max_tokens, max_turn_tokens, .. } = run_file.agent;
        let temperature = run_file.engine.temperature;
        Decoding {
            temperature,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            max_turns,
            max_tokens,
            max_turn_tokens,
        }
    }

    fn describe(&self, seed: u64) -> String {
        let Decoding { temperature, max_turns, max_tokens, max_turn_tokens, .. } = self;
        let draw = match temperature {
            0.0 => "temperature 0 (the likeliest token: attempts at a task are equal)".to_owned(),
            _ => format!("temperature {temperature}, top_p 1, top_k off, min_p 0, no repetition penalty"),
        };
        format!("{draw}; at most {max_turns} turns of {max_turn_tokens} tokens, {max_tokens} tokens in all; seed {seed}")
    }
}

pub fn run(arguments: &EvaluateArguments, output: &OutputArguments) -> Result<(), CliError> {
    let mut run_file = arguments.settings.resolve()?;
    if let Some(samples) = arguments.samples {
        run_file.evaluate.samples = samples;
    }
    if !arguments.k.is_empty() {
        run_file.evaluate.k = arguments.k.clone();
    }
    run_file.check().map_err(CliError::refused)?;
    run_file.check_runs().map_err(CliError::refused)?;
    let pool = match &arguments.on {
        Some(path) => setup::read(&path.display().to_string())?,
        None => setup::Tasks::load(&run_file)?.held_out,
    };
    if pool.is_empty() {
        return Err(CliError::Refused("there are no tasks to evaluate on".into()));
    }
    let choice = run_file.device().map_err(CliError::Refused)?;
    device::run_on(choice, run_file.run.gemm, Evaluating { run_file, pool, output })
}

/// An evaluation that is about to start.
struct Evaluating<'a> {
    run_file: RunFile,
    /// What is evaluated on.
    pool: Vec<Task>,
    output: &'a OutputArguments,
}

impl Work for Evaluating<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        measure(device, &self.run_file, &self.pool, self.output)
    }
}

fn measure<D: Device>(device: D, run_file: &RunFile, pool: &[Task], output: &OutputArguments) -> Result<(), CliError> {
    let text = Text::load(run_file.model.directory.as_deref())?;
    setup::set_threads(run_file.run.threads)?;
    let mut model = setup::load_model(device, run_file, &text)?;
    if let Some(rope) = &run_file.model.rope {
        model.set_rope(rope).map_err(|problem| CliError::Refused(format!("model.rope.{problem}")))?;
    }
    setup::check_length(model.config(), run_file.agent.max_tokens, "agent.max_tokens")?;
    let sandbox = setup::start_sandbox(run_file)?;
    let workers = sandbox.parallel();
    let grader = Grader::new(sandbox, run_file.grader.clone());
    let stop = StopSignal::listen()?;
    let reporter = Reporter::new(output.verbosity(), output.json);

    let held_out = HeldOut::draw(pool, &run_file.evaluate, run_file.run.seed);
    let total = (held_out.main.len() + held_out.structure.len()) * run_file.evaluate.samples;
    let phase = reporter.phase("evaluate", Some(total as u64));
    let mut shown = 0;
    let mut on_progress = |tally: Tally| {
        phase.advance(tally.ended - shown, &format!("passed {}", tally.passed));
        shown = tally.ended;
    };
    let surroundings = Surroundings { tokenizer: &text.tokenizer, format: text.format()?, settings: &run_file.agent };
    let ranks = Ranks::one();
    let rollout = Rollout { surroundings, grader: &grader, ranks: &ranks, concurrent: run_file.engine.max_sequences, workers };
    let vocabulary = text.tokenizer.vocabulary_size();
    let mut engine = BuiltinEngine::new(&model, run_file.engine.clone(), text.format()?.stop_token(), vocabulary);
    let stream = Stream { seed: run_file.run.seed, stream: EVALUATE_COMMAND, version: 0 };
    let evaluate::Settings { samples, k, .. } = &run_file.evaluate;
    let sampling = Sampling { samples: *samples, k, stream };
    let (evaluation, episodes) =
        evaluate::evaluate(&rollout, &mut engine, &held_out, sampling, &mut on_progress, &|| stop.raised()).map_err(|error| {
            if stop.raised() { CliError::Failed("stopped; nothing was kept".into()) } else { CliError::failed(error) }
        })?;
    phase.finish("");
    if evaluation.tasks == 0 {
        return Err(CliError::Failed("every episode was lost to infrastructure faults".into()));
    }
    let (decoding, seed) = (Decoding::of(run_file), run_file.run.seed);
    if output.json {
        let (attempts, episodes_sha256) = (Attempts::count(&episodes), hash(&episodes));
        return print_json(&Report { evaluation: &evaluation, decoding, seed, attempts, episodes_sha256 });
    }
    let (headers, rows) = evaluation_rows(&[("policy", &evaluation)]);
    reporter.table("held-out tasks", &headers, &rows);
    let error = evaluation.standard_error.map_or("n/a with one task".into(), |error| format!("{error:.4}"));
    reporter
        .line(&format!("pass@1 {:.4}, standard error {error} ({} tasks x {samples})", evaluation.pass_at_1, evaluation.tasks));
    if !k.is_empty() {
        let shown = |k: &usize| {
            let value =
                evaluation.pass_at_k.get(k).map_or("n/a (too many attempts were lost)".into(), |value| format!("{value:.4}"));
            format!("pass@{k} {value}")
        };
        reporter.line(&k.iter().map(shown).collect::<Vec<_>>().join(", "));
    }
    let endings = evaluation.endings.iter().map(|(ending, count)| format!("{} {count}", ending.replace('_', " ")));
    reporter.line(&format!("endings: {}", endings.collect::<Vec<_>>().join(", ")));
    let Evaluation { turns_mean, turns_max, episode_tokens_mean, episode_tokens_max, .. } = &evaluation;
    reporter.line(&format!(
        "turns {turns_mean:.1} on average, {turns_max} at most; tokens {episode_tokens_mean:.0} on average, {episode_tokens_max} at most"
    ));
    reporter.line(&format!("decoding: {}", decoding.describe(seed)));
    Ok(())
}

fn hash(episodes: &[Episode]) -> String {
    let mut hash = Sha256::new();
    for episode in episodes {
        hash.update((episode.transcript.ids.len() as u64).to_le_bytes());
        episode.transcript.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
