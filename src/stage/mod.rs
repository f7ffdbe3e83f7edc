//! What a run strings together: evaluation, rejection fine-tuning, evaluation, reinforcement learning, evaluation.
//!
//! ```text
//! mod.rs     the order of the points of a run, and going on from any of them
//! rft.rs     scripted demonstrations -> what passes -> imitation steps
//! rl/        groups of rollouts -> advantages -> policy steps
//! state.rs   what a checkpoint must remember
//! summary.rs what the run found, for summary.json
//! ```
//!
//! A run is a pure function of its settings: it may be stopped and resumed at any point and ends with the same weights.
//!
//! On many ranks all run this same code with the same data and come to the same decisions: episodes, metrics and requests to
//! stop are shared before anything follows from them. What is written once is written by rank 0.

mod rft;
mod rl;
mod state;
mod summary;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

pub use rft::RftSettings;
pub use rl::{RlProgress, RlSettings};
pub use state::{Point, RunState};
pub use summary::Summary;

use crate::agent::{self, Rollout, RolloutError, Surroundings, Tally};
use crate::collectives::CollectiveError;
use crate::device::Device;
use crate::engine::{self, BuiltinEngine};
use crate::evaluate::{self, Evaluation, HeldOut, Stream};
use crate::grader::{Counters, Grader};
use crate::model::Model;
use crate::parallel::Ranks;
use crate::sandbox::Tier;
use crate::text::{ChatFormat, Tokenizer};
use crate::train::optimizer::AdamWSettings;
use crate::train::{
    CheckpointError, CheckpointSettings, CheckpointWriter, FileError, MetricsLog, StepSettings, Trainer, write_atomically,
};
use crate::types::{Episode, Phase, Progress, Task};

/// Everything that decides what a run computes.
#[derive(Clone, Debug)]
pub struct Settings {
    pub seed: u64,
    pub agent: agent::Settings,
    pub engine: engine::Settings,
    pub rft: RftSettings,
    pub rl: RlSettings,
    pub step: StepSettings,
    pub evaluate: evaluate::Settings,
    pub checkpoint: CheckpointSettings,
    /// Episodes of each rollout written to `episodes/` for people to read.
    pub episodes_kept: usize,
}

/// What a run works with and does not change.
pub struct Context<'a> {
    pub ranks: &'a Ranks,
    /// The same one for all ranks.
    pub directory: &'a Path,
    pub settings: &'a Settings,
    pub tokenizer: &'a Tokenizer,
    pub format: ChatFormat<'a>,
    pub tokenizer_json: &'a [u8],
    /// This rank's own: what it counts is summed over the ranks.
    pub grader: &'a Grader,
    /// Threads of this rank that run tests and grade.
    pub workers: usize,
    pub sandbox_tier: Tier,
    pub train_tasks: &'a [Task],
    pub held_out: HeldOut<'a>,
    /// Shows nothing on other ranks than 0.
    pub progress: &'a dyn Progress,
    /// True once the run has been asked to end its step, save and stop. One rank that is asked is enough.
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

/// What a run changes.
pub struct Learner<D: Device> {
    pub trainer: Trainer<D>,
    pub state: RunState,
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Saved and stopped as asked; `--resume` goes on from here.
    #[error("stopped; {steps} training steps are saved, an evaluation or a rollout that was cut short will be made again")]
    Stopped { steps: usize },
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Rollout(RolloutError),
    #[error(transparent)]
    Ranks(#[from] CollectiveError),
    #[error(transparent)]
    Checkpoint(CheckpointError),
    #[error(transparent)]
    File(#[from] FileError),
}

impl From<RolloutError> for RunError {
    fn from(error: RolloutError) -> RunError {
        match error {
            RolloutError::Ranks(error) => RunError::Ranks(error),
            error => RunError::Rollout(error),
        }
    }
}

impl From<CheckpointError> for RunError {
    fn from(error: CheckpointError) -> RunError {
        match error {
            CheckpointError::Ranks(error) => RunError::Ranks(error),
            error => RunError::Checkpoint(error),
        }
    }
}

/// Random streams of token sampling: training has one, every evaluation its own.
pub mod stream {
    pub const TRAINING: u64 = 0;
    pub const EVALUATE_BEFORE_RFT: u64 = 1;
    pub const EVALUATE_AFTER_RFT: u64 = 2;
    pub const EVALUATE_AFTER_RL: u64 = 3;
    /// `learner evaluate`.
    pub const EVALUATE_COMMAND: u64 = 4;
    /// Plus the step.
    pub const EVALUATE_BETWEEN: u64 = 1000;
}

/// The folder of a run's directory that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";

/// Runs from where `learner.state` is to the end.
///
/// # Errors
/// [`RunError::Stopped`] when `context.stop` said so and a checkpoint holds everything done so far; otherwise what failed. Other ranks
/// wait for one on which something failed until its caller tells them ([`Ranks::abort`](crate::parallel::Ranks::abort)); they then
/// get [`RunError::Ranks`].
///
/// `log` is the run's metrics, cut to the lines that `learner.state` counts; other ranks than 0 have none.
pub fn run<D: Device>(context: &Context, learner: &mut Learner<D>, log: Option<MetricsLog>) -> Result<Summary, RunError> {
    let folder = context.directory.join(CHECKPOINTS);
    let checkpoints = CheckpointWriter::open(folder, context.settings.checkpoint.keep, context.ranks, context.progress)?;
    let mut run = Run { context, learner, checkpoints, log };
    match run.go_on() {
        Err(RunError::Rollout(RolloutError::Stopped)) => Err(run.save_and_stop()?),
        result => result,
    }
}

struct Run<'r, D: Device> {
    context: &'r Context<'r>,
    learner: &'r mut Learner<D>,
    checkpoints: CheckpointWriter<'r>,
    /// Of rank 0.
    log: Option<MetricsLog>,
}

impl<D: Device> Run<'_, D> {
    /// From the point the run is at to the end.
    fn go_on(&mut self) -> Result<Summary, RunError> {
        loop {
            match self.learner.state.point {
                Point::EvaluateBefore => {
                    self.evaluate_fully("before_rft", stream::EVALUATE_BEFORE_RFT)?;
                    self.enter(Point::Rft, self.context.settings.rft.optimizer);
                }
                Point::Rft => {
                    self.fine_tune()?;
                    self.enter(Point::EvaluateAfterRft, self.context.settings.rl.optimizer);
                    self.save_now()?;
                }
                Point::EvaluateAfterRft => {
                    self.evaluate_fully("after_rft", stream::EVALUATE_AFTER_RFT)?;
                    self.enter(Point::Rl, self.context.settings.rl.optimizer);
                }
                Point::Rl => {
                    self.reinforce()?;
                    self.enter(Point::EvaluateAfterRl, self.context.settings.rl.optimizer);
                    self.save_now()?;
                }
                Point::EvaluateAfterRl => {
                    self.evaluate_fully("after_rl", stream::EVALUATE_AFTER_RL)?;
                    return self.summarise();
                }
            }
        }
    }

    /// Moves to the next point with a fresh optimizer.
    fn enter(&mut self, point: Point, optimizer: AdamWSettings) {
        self.learner.state.point = point;
        self.learner.state.step = 0;
        self.learner.state.rl = RlProgress::default();
        self.learner.trainer.reset_optimizer(optimizer);
    }

    /// Evaluates with all samples, unless the run already has this evaluation.
    fn evaluate_fully(&mut self, name: &str, stream: u64) -> Result<(), RunError> {
        self.evaluate(name, stream, self.context.settings.evaluate.samples)
    }

    fn evaluate(&mut self, name: &str, stream: u64, samples: usize) -> Result<(), RunError> {
        if self.learner.state.evaluations.contains_key(name) {
            return Ok(());
        }
        let started = Instant::now();
        let context = self.context;
        context.grader.forget();
        let total = (context.held_out.main.len() + context.held_out.structure.len()) * samples;
        let phase = context.progress.phase(&format!("evaluate {}", name.replace('_', " ")), Some(total as u64));
        let stream = Stream { seed: context.settings.seed, stream, version: self.learner.state.version() };
        let rollout = rollout(context);
        let mut engine = builtin_engine(context, self.learner.trainer.sampler()?);
        let mut on_progress = show(&*phase, "pass");
        let (evaluation, episodes) =
            evaluate::evaluate(&rollout, &mut engine, &context.held_out, samples, stream, &mut on_progress, context.stop)?;
        drop(on_progress);
        if evaluation.tasks == 0 {
            return Err(RunError::Failed(format!("evaluation {name}: every episode was lost: {}", first_fault(&episodes))));
        }
        phase.finish(&format!("{}: {}", name.replace('_', " "), describe(&evaluation)));
        let counts = self.verdict_counts()?;
        self.learner.state.count_verdicts(counts);
        self.learner.state.count_faults(&episodes);
        self.keep_episodes(name, &episodes)?;
        self.note_evaluation(name, evaluation, started)
    }

    fn note_evaluation(&mut self, name: &str, evaluation: Evaluation, started: Instant) -> Result<(), RunError> {
        #[derive(Serialize)]
        struct Line<'a> {
            stage: &'static str,
            name: &'a str,
            step: u32,
            #[serde(flatten)]
            evaluation: &'a Evaluation,
            seconds: f64,
        }
        let seconds = started.elapsed().as_secs_f64();
        let step = self.learner.state.version();
        self.write_metrics(&Line { stage: "evaluation", name, step, evaluation: &evaluation, seconds })?;
        self.learner.state.add_seconds("evaluate", seconds);
        self.learner.state.evaluations.insert(name.to_owned(), evaluation);
        Ok(())
    }

    /// Adds a line to the run's metrics.
    fn write_metrics(&mut self, metrics: &impl Serialize) -> Result<(), RunError> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let value = serde_json::to_value(metrics).map_err(|error| RunError::Failed(format!("metrics: {error}")))?;
        log.append(&value)?;
        if let serde_json::Value::Object(record) = &value {
            self.context.progress.record(record);
        }
        Ok(())
    }

    /// What graders of all ranks counted since they last forgot.
    fn verdict_counts(&self) -> Result<Counters, RunError> {
        let Counters { executed, remembered } = self.context.grader.counters();
        let mut counts = [executed as f64, remembered as f64];
        self.context.ranks.sum(&mut counts)?;
        Ok(Counters { executed: counts[0] as u64, remembered: counts[1] as u64 })
    }

    /// Between two steps: ends the run if a checkpoint could not be written, or if it was asked to stop.
    fn pause(&mut self) -> Result<(), RunError> {
        self.checkpoints.check()?;
        match self.context.ranks.any((self.context.stop)())? {
            true => Err(RunError::Rollout(RolloutError::Stopped)),
            false => Ok(()),
        }
    }

    /// Begins to write a checkpoint of this moment, unless the newest already holds this step: what has been done since (an
    /// evaluation, a stage without steps) is done again on resume, with the same result.
    fn save(&mut self) -> Result<(), RunError> {
        let started = Instant::now();
        let step = self.learner.state.steps();
        if self.checkpoints.newest() == Some(step) {
            return Ok(());
        }
        if let Some(log) = &mut self.log {
            self.learner.state.metrics_lines = log.commit()?;
        }
        let Learner { trainer, state } = &mut *self.learner;
        let snapshot = || Ok(trainer.snapshot()?);
        let path = self.checkpoints.save(step, snapshot, self.context.tokenizer_json, state)?;
        self.context.progress.detail(&format!("checkpoint {}", path.display()));
        self.learner.state.add_seconds("checkpoint", started.elapsed().as_secs_f64());
        Ok(())
    }

    /// The same, and waits until it is whole.
    fn save_now(&mut self) -> Result<(), RunError> {
        self.save()?;
        Ok(self.checkpoints.wait()?)
    }

    /// Called when the run was asked to stop.
    fn save_and_stop(&mut self) -> Result<RunError, RunError> {
        self.save_now()?;
        Ok(RunError::Stopped { steps: self.learner.state.steps() })
    }

    /// Keeps some episodes of a rollout in a form that people can read.
    fn keep_episodes(&self, name: &str, episodes: &[Episode]) -> Result<(), RunError> {
        #[derive(Serialize)]
        struct Kept<'a> {
            task_id: &'a str,
            sample: u32,
            #[serde(flatten)]
            verdict: &'a crate::types::Verdict,
            ending: crate::types::Ending,
            counts: &'a crate::types::EpisodeCounts,
            text: String,
            ids: &'a [u32],
            sampled: Vec<u8>,
            log_probs: &'a [f32],
        }
        let kept = self.context.settings.episodes_kept.min(episodes.len());
        if kept == 0 || !self.context.ranks.first() {
            return Ok(());
        }
        let mut lines = Vec::new();
        for episode in episodes.iter().step_by(episodes.len().div_ceil(kept)) {
            let kept = Kept {
                task_id: &episode.task_id,
                sample: episode.sample_index,
                verdict: &episode.verdict,
                ending: episode.ending,
                counts: &episode.counts,
                text: self.context.tokenizer.decode(&episode.transcript.ids),
                ids: &episode.transcript.ids,
                sampled: episode.transcript.sampled.iter().map(|&sampled| sampled as u8).collect(),
                log_probs: &episode.transcript.log_probs,
            };
            serde_json::to_writer(&mut lines, &kept).map_err(|error| RunError::Failed(format!("episodes: {error}")))?;
            lines.push(b'\n');
        }
        let folder = self.episodes_folder()?;
        Ok(write_atomically(&folder.join(format!("{name}.jsonl")), &lines)?)
    }

    fn episodes_folder(&self) -> Result<PathBuf, RunError> {
        let folder = self.context.directory.join("episodes");
        std::fs::create_dir_all(&folder).map_err(|source| FileError::new(&folder, source))?;
        Ok(folder)
    }
}

fn surroundings<'a>(context: &'a Context) -> Surroundings<'a> {
    Surroundings { tokenizer: context.tokenizer, format: context.format, settings: &context.settings.agent }
}

fn rollout<'a>(context: &'a Context) -> Rollout<'a> {
    Rollout {
        surroundings: surroundings(context),
        grader: context.grader,
        ranks: context.ranks,
        concurrent: context.settings.engine.max_sequences,
        workers: context.workers,
    }
}

fn builtin_engine<'a, D: Device>(context: &Context, model: &'a Model<D>) -> BuiltinEngine<'a, D> {
    let sampleable = context.tokenizer.vocabulary_size();
    BuiltinEngine::new(model, context.settings.engine.clone(), context.format.stop_token(), sampleable)
}

/// Shows the attempts that have ended as progress of `phase`, and the share of them that passed as `what`.
fn show<'p>(phase: &'p dyn Phase, what: &'p str) -> impl FnMut(Tally) + 'p {
    let mut shown = 0;
    move |tally| {
        phase.advance(tally.ended - shown, &format!("{what} {:.3}", tally.pass_rate()));
        shown = tally.ended;
    }
}

/// The line that sums up an evaluation.
fn describe(evaluation: &Evaluation) -> String {
    let Evaluation { pass_at_1, pass_at_8, ci95: [low, high], tasks, samples, .. } = evaluation;
    let pass_at_8 = pass_at_8.map(|value| format!("  pass@8 {value:.3}")).unwrap_or_default();
    format!(
        "pass@1 {pass_at_1:.3} [{low:.3}, {high:.3}]{pass_at_8}  runs tests {:.2}  edits again after a failure {:.2}  \
         ({tasks} tasks x {samples})",
        evaluation.ran_tests, evaluation.edited_after_failure
    )
}

/// Why an episode was lost, for people.
fn first_fault(episodes: &[Episode]) -> String {
    let fault = episodes.iter().find_map(|episode| match &episode.verdict {
        crate::types::Verdict::Infrastructure(reason) => Some(reason.clone()),
        _ => None,
    });
    fault.unwrap_or_else(|| "no reason was given".into())
}
