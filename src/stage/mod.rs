//! What a run strings together: a list of stages, each an evaluation, rejection fine-tuning, reinforcement learning or a curriculum.
//!
//! ```text
//! list.rs        the stages of a run, and those of one that lists none
//! mod.rs         one stage after another, and going on from any of them
//! evaluation.rs  held-out tasks -> how often the policy solves them
//! rft.rs         demonstrations or the policy's own attempts -> what passes -> imitation steps
//! collection.rs  where those come from
//! rl/            groups of rollouts -> advantages -> policy steps
//! curriculum.rs  the attempts of an earlier stage -> the tasks of the stages after it
//! state.rs       what a checkpoint must remember
//! summary.rs     what the run found, for summary.json
//! ```
//!
//! A run is a pure function of its settings: it may be stopped and resumed at any point and ends with the same weights.
//!
//! On many ranks all run this same code with the same data and come to the same decisions: episodes, metrics and requests to
//! stop are shared before anything follows from them. What is written once is written by rank 0.

mod collection;
mod curriculum;
mod evaluation;
mod list;
mod rft;
mod rl;
mod state;
mod summary;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

pub use list::{CurriculumSettings, Stage, StageKind};
pub use rft::{Collect, RftSettings};
pub use rl::{RlProgress, RlSettings};
pub use state::{Attempts, RunState, StageRecord};
pub use summary::{StageSummary, Summary};

use crate::agent::{self, Rollout, RolloutError, Surroundings, Tally};
use crate::collectives::CollectiveError;
use crate::device::Device;
use crate::engine::{self, BuiltinEngine};
use crate::evaluate;
use crate::grader::{Counters, Grader};
use crate::model::{Model, RopeSettings};
use crate::parallel::Ranks;
use crate::sandbox::Tier;
use crate::text::{ChatFormat, Tokenizer};
use crate::train::{
    CheckpointError, CheckpointSettings, CheckpointWriter, FileError, MetricsLog, StepSettings, Trainer, write_atomically,
};
use crate::types::{Episode, Phase, Progress, Task};

/// Everything that decides what a stage computes.
#[derive(Clone, Debug)]
pub struct Settings {
    pub seed: u64,
    /// Rotary embeddings that the policy has from this stage on; those it has already if `None`.
    pub rope: Option<RopeSettings>,
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

/// What a run works with.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub ranks: &'a Ranks,
    /// The same one for all ranks.
    pub directory: &'a Path,
    /// Of the run.
    pub seed: u64,
    /// From [`Stage::in_order`].
    pub stages: &'a [Stage],
    /// Of the stage under way; before the first one those of the run as a whole.
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
    /// Each stage draws from them what it evaluates on.
    pub held_out: &'a [Task],
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
    /// The policy's own attempts to fine-tune on.
    pub const COLLECTION: u64 = 5;
    /// Plus the step.
    pub const EVALUATE_BETWEEN: u64 = 1000;

    /// Of a stage that evaluates, after `earlier` others.
    pub fn evaluate(earlier: usize) -> u64 {
        let first = [EVALUATE_BEFORE_RFT, EVALUATE_AFTER_RFT, EVALUATE_AFTER_RL];
        first.get(earlier).copied().unwrap_or(1 << 32 | earlier as u64)
    }
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
pub fn run<D: Device>(context: Context, learner: &mut Learner<D>, log: Option<MetricsLog>) -> Result<Summary, RunError> {
    let folder = context.directory.join(CHECKPOINTS);
    let checkpoints = CheckpointWriter::open(folder, context.settings.checkpoint.keep, context.ranks, context.progress)?;
    let mut run = Run { context, learner, checkpoints, log, pool: Vec::new(), counted: Instant::now() };
    match run.go_on() {
        Err(RunError::Rollout(RolloutError::Stopped)) => Err(run.save_and_stop()?),
        result => result,
    }
}

struct Run<'r, D: Device> {
    context: Context<'r>,
    learner: &'r mut Learner<D>,
    checkpoints: CheckpointWriter<'r>,
    /// Of rank 0.
    log: Option<MetricsLog>,
    /// Training tasks of the stage under way.
    pool: Vec<&'r Task>,
    /// Until when the time of the stage under way is counted.
    counted: Instant,
}

impl<'r, D: Device> Run<'r, D> {
    /// From the stage the run is at to the end.
    fn go_on(&mut self) -> Result<Summary, RunError> {
        self.enter()?;
        while self.learner.state.stage < self.context.stages.len() {
            let stage = self.stage()?;
            match &stage.kind {
                StageKind::Evaluate => self.evaluate_fully()?,
                StageKind::Rft => self.fine_tune()?,
                StageKind::Rl => self.reinforce()?,
                StageKind::Curriculum(settings) => self.choose_tasks(settings)?,
            }
            self.leave(stage)?;
        }
        self.summarise()
    }

    /// The stage under way.
    fn stage(&self) -> Result<&'r Stage, RunError> {
        let (stages, place) = (self.context.stages, self.learner.state.stage);
        let missing = || RunError::Failed(format!("the checkpoint is at stage {}, the run has {}", place + 1, stages.len()));
        stages.get(place).ok_or_else(missing)
    }

    /// Makes what depends on the stage under way that of this stage: at its beginning, and when it is gone on with.
    fn enter(&mut self) -> Result<(), RunError> {
        if self.learner.state.stage == self.context.stages.len() {
            return Ok(());
        }
        let stage = self.stage()?;
        self.context.settings = &stage.settings;
        self.pool = self.context.train_tasks.iter().filter(|task| !self.learner.state.left_out.contains(&task.id)).collect();
        self.counted = Instant::now();
        self.learner.state.of_stage(&stage.name).pool = self.pool.len();
        let (place, of) = (self.learner.state.stage + 1, self.context.stages.len());
        self.context.progress.line(&format!("stage {place} of {of}: {}", stage.title()));
        let Some(rope) = &stage.settings.rope else { return Ok(()) };
        let policy = self.learner.trainer.policy_mut();
        if policy.set_rope(rope).map_err(|problem| RunError::Failed(format!("model.rope: {problem}")))? {
            let most = policy.config().max_positions;
            self.context.progress.line(&format!("rotary embedding: {rope}; sequences of up to {most} tokens"));
        }
        Ok(())
    }

    /// Ends a stage and enters the next one, with a fresh optimizer. What was trained is saved.
    fn leave(&mut self, stage: &Stage) -> Result<(), RunError> {
        self.count_seconds();
        let state = &mut self.learner.state;
        state.of_stage(&stage.name).steps = state.step;
        (state.stage, state.step) = (state.stage + 1, 0);
        state.rl = RlProgress::default();
        self.enter()?;
        if let Some(next) = self.context.stages.get(self.learner.state.stage) {
            self.learner.trainer.reset_optimizer(next.optimizer());
        }
        if matches!(stage.kind, StageKind::Rft | StageKind::Rl) { self.save_now() } else { Ok(()) }
    }

    /// Adds the time since this was last done to that of the stage under way.
    fn count_seconds(&mut self) {
        if let Some(stage) = self.context.stages.get(self.learner.state.stage) {
            let seconds = self.counted.elapsed().as_secs_f64();
            self.learner.state.of_stage(&stage.name).seconds += seconds;
            self.counted = Instant::now();
        }
    }

    /// Adds a line to the run's metrics: an object that says its `kind`. The name of the stage under way is added to it as `stage`.
    fn write_metrics(&mut self, metrics: &impl Serialize) -> Result<(), RunError> {
        let stage = self.stage()?;
        let Some(log) = &mut self.log else { return Ok(()) };
        let mut value = serde_json::to_value(metrics).map_err(|error| RunError::Failed(format!("metrics: {error}")))?;
        if let serde_json::Value::Object(record) = &mut value {
            record.insert("stage".into(), stage.name.as_str().into());
        }
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
        self.count_seconds();
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

fn surroundings<'a>(context: Context<'a>) -> Surroundings<'a> {
    Surroundings { tokenizer: context.tokenizer, format: context.format, settings: &context.settings.agent }
}

fn rollout<'a>(context: Context<'a>) -> Rollout<'a> {
    Rollout {
        surroundings: surroundings(context),
        grader: context.grader,
        ranks: context.ranks,
        concurrent: context.settings.engine.max_sequences,
        workers: context.workers,
    }
}

fn builtin_engine<'a, D: Device>(context: Context<'a>, model: &'a Model<D>) -> BuiltinEngine<'a, D> {
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

/// Why an episode was lost, for people.
fn first_fault(episodes: &[Episode]) -> String {
    let fault = episodes.iter().find_map(|episode| match &episode.verdict {
        crate::types::Verdict::Infrastructure(reason) => Some(reason.clone()),
        _ => None,
    });
    fault.unwrap_or_else(|| "no reason was given".into())
}
