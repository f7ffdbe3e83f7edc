//! `learner evaluate`: pass@1 and pass@8 of a policy on tasks it was not trained on.

use std::path::PathBuf;

use super::closing::evaluation_rows;
use super::device::{self, Work};
use super::run_file::SettingArguments;
use super::setup::{self, Text};
use super::{CliError, OutputArguments, print_json, signals::StopSignal};
use crate::agent::{Rollout, Surroundings, Tally};
use crate::config::RunFile;
use crate::device::Device;
use crate::engine::BuiltinEngine;
use crate::evaluate::{HeldOut, Stream, evaluate};
use crate::grader::Grader;
use crate::parallel::Ranks;
use crate::report::Reporter;
use crate::stage::stream::EVALUATE_COMMAND;
use crate::types::{Progress, Task};

#[derive(clap::Args)]
pub struct EvaluateArguments {
    #[command(flatten)]
    settings: SettingArguments,
    /// Tasks to evaluate on: a task file; the run file's held-out tasks when left out
    #[arg(long = "on", value_name = "FILE")]
    on: Option<PathBuf>,
    /// Attempts at each task
    #[arg(long)]
    samples: Option<usize>,
}

pub fn run(arguments: &EvaluateArguments, output: &OutputArguments) -> Result<(), CliError> {
    let mut run_file = arguments.settings.resolve()?;
    if let Some(samples) = arguments.samples {
        run_file.evaluate.samples = samples;
        run_file.check().map_err(CliError::refused)?;
    }
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
    let model = setup::load_model(device, run_file, &text)?;
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
    let samples = run_file.evaluate.samples;
    let (evaluation, _) =
        evaluate(&rollout, &mut engine, &held_out, samples, stream, &mut on_progress, &|| stop.raised()).map_err(|error| {
            if stop.raised() { CliError::Failed("stopped; nothing was kept".into()) } else { CliError::failed(error) }
        })?;
    phase.finish("");
    if evaluation.tasks == 0 {
        return Err(CliError::Failed("every episode was lost to infrastructure faults".into()));
    }
    if output.json {
        return print_json(&evaluation);
    }
    let (headers, rows) = evaluation_rows(&[("policy", &evaluation)]);
    reporter.table("held-out tasks", &headers, &rows);
    Ok(())
}
