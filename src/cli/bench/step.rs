//! `learner bench step`: the trainer alone, here on one rank; `step_ranks` has the others.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Serialize;

use super::figures::{MemoryTable, Spread, phase_line, timed};
use super::step_figures::{STEP_NOTES, StepFigures, tokens_per_second};
use super::trace::{self, OperationTime};
use super::{ModelArguments, Subject, step_ranks};
use crate::algorithm::LossSettings;
use crate::cli::device::{self, Work};
use crate::cli::launch::{self, LaunchArguments, Node};
use crate::cli::ranks::RankError;
use crate::cli::{CliError, OutputArguments, print_json, print_text, setup};
use crate::config::{RunFile, RunSettings};
use crate::device::{Device, Traced};
use crate::model::{Model, ModelConfig, StepFlops};
use crate::parallel::{self, Mesh, World};
use crate::train::optimizer::AdamWSettings;
use crate::train::{Policy, PolicyBatch, PolicySettings, StepSettings, Trainer};
use crate::types::{Key, Purpose, Sample};

#[derive(clap::Args)]
pub struct StepArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Steps to time; on one rank, one more after them is traced
    #[arg(long, default_value_t = 5)]
    pub(super) steps: usize,
    /// Steps before those, not counted
    #[arg(long, default_value_t = 1, value_name = "STEPS")]
    pub(super) warm_up: usize,
    /// Run each layer again before its backward instead of keeping its activations (step.recompute)
    #[arg(long)]
    pub(super) recompute: bool,
    /// Ranks that share each sequence (parallel.context)
    #[arg(long, value_name = "C", default_value_t = 1, help_heading = launch::HEADING)]
    context_parallel: usize,
    /// What one rank alone reaches, to compare several with; `none` where the model does not fit one [default: measured, on rank 0]
    #[arg(long, value_name = "R|none", help_heading = launch::HEADING)]
    pub(super) one_rank_tokens_per_second: Option<OneRank>,
    #[command(flatten)]
    launch: LaunchArguments,
}

/// What several ranks are compared with, where it is not measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OneRank {
    Given(f64),
    Unknown,
}

impl FromStr for OneRank {
    type Err = String;

    fn from_str(text: &str) -> Result<OneRank, String> {
        match text.parse::<f64>() {
            Ok(speed) if speed > 0.0 && speed.is_finite() => Ok(OneRank::Given(speed)),
            _ if text == "none" => Ok(OneRank::Unknown),
            _ => Err(format!("{text:?} is neither a number above 0 nor none")),
        }
    }
}

impl StepArguments {
    /// What many ranks need of a run file. A run that is measured waits longer for its ranks than one that trains: all but rank 0 wait
    /// while it works alone.
    fn run_file(&self) -> RunFile {
        let parallel =
            parallel::Settings { context: self.context_parallel, stall_seconds: 3600.0, ..parallel::Settings::default() };
        let run = RunSettings { gemm: self.model.gemm, ..RunSettings::default() };
        RunFile { run, parallel, ..RunFile::default() }
    }

    /// # Errors
    /// Names what one rank, or several, cannot do.
    fn check(&self, node: Option<&Node>) -> Result<(), CliError> {
        let refused = |problem: &str| Err(CliError::Refused(problem.into()));
        match node {
            Some(_) if self.model.trace.is_some() => {
                refused("--trace: only on one rank; operations that are waited for one by one hide no transfer")
            }
            None if self.one_rank_tokens_per_second.is_some() => {
                refused("--one-rank-tokens-per-second: there is one rank; give --gpus-per-node or --nodes to have several")
            }
            _ => Ok(()),
        }
    }
}

/// Sequences are cut so that each is at least four tokens long.
const LEAST_CONTEXT: usize = 32;

/// Lengths of a replica's sequences as divisors of the context, `2 x context` tokens in all: the long one makes a micro-batch of its
/// own, the others are packed into one of the same size.
const DIVISORS: [usize; 5] = [1, 2, 4, 8, 8];

/// Share of each sequence that is prompt and not trained on.
const PROMPT_SHARE: f64 = 0.25;

#[derive(Serialize)]
struct StepReport {
    #[serde(flatten)]
    step: StepFigures,
    memory: MemoryTable,
    /// Of one traced step, in which every operation is waited for.
    phases_ms: BTreeMap<&'static str, f64>,
    operations: Vec<OperationTime>,
    notes: Vec<&'static str>,
}

const TRACE_NOTE: &str =
    "phases and operations are of one more step in which each operation is waited for: their sum exceeds an untraced step";

pub fn run(arguments: &StepArguments, output: &OutputArguments) -> Result<(), CliError> {
    for (flag, number) in [("--steps", arguments.steps), ("--context-parallel", arguments.context_parallel)] {
        if number == 0 {
            return Err(CliError::Refused(format!("{flag} 0: must be at least 1")));
        }
    }
    let subject = arguments.model.subject(LEAST_CONTEXT)?;
    let run_file = arguments.run_file();
    let node = Node::find(&arguments.launch, &run_file, arguments.model.device)?;
    arguments.check(node.as_ref())?;
    match node {
        None => device::run_on(arguments.model.device, arguments.model.gemm, Measuring { arguments, subject, output }),
        Some(node) => step_ranks::run(arguments, &subject, &node, &run_file, output),
    }
}

/// A step that is done again and again: two micro-batches of the context for each replica.
pub struct RepeatedStep {
    batch: PolicyBatch,
    settings: StepSettings,
}

impl RepeatedStep {
    pub fn new(arguments: &StepArguments, vocabulary: usize, mesh: &Mesh) -> RepeatedStep {
        let context = arguments.model.context;
        let settings = StepSettings {
            micro_batch_tokens: context.div_ceil(mesh.context()),
            recompute: arguments.recompute,
            ..StepSettings::default()
        };
        RepeatedStep { batch: PolicyBatch::of(made_up_samples(context, vocabulary, mesh.data())), settings }
    }

    pub fn lengths(&self) -> Vec<usize> {
        self.batch.samples.iter().map(|sample| sample.ids.len()).collect()
    }

    pub fn tokens(&self) -> usize {
        self.lengths().iter().sum()
    }

    pub fn trained_tokens(&self) -> usize {
        self.batch.samples.iter().map(Sample::trained_count).sum()
    }

    /// Over all replicas.
    pub fn flops(&self, config: &ModelConfig) -> StepFlops {
        StepFlops::of(config, &self.lengths(), self.trained_tokens())
    }

    pub fn trainer<D: Device>(&self, policy: Policy<D>, world: World<D>) -> Trainer<D> {
        Trainer::new(policy, world, AdamWSettings::default(), &self.settings)
    }

    pub fn run<D: Device>(&self, trainer: &mut Trainer<D>) -> Result<(), RankError> {
        let policy = PolicySettings { temperature: 1.0, loss: &LossSettings::default() };
        let metrics = trainer.policy_step(&self.batch, self.batch.all(), &policy, 1e-6, &self.settings)?;
        if metrics.skipped {
            let problem = "a step had gradients that are not finite: the weights are broken";
            return Err(RankError::Agreed(CliError::Failed(problem.into())));
        }
        Ok(())
    }

    /// Milliseconds of each of so many steps.
    pub fn times<D: Device>(&self, trainer: &mut Trainer<D>, steps: usize) -> Result<Vec<f64>, RankError> {
        let device = trainer.policy().device().clone();
        (0..steps).map(|_| Ok(timed(&device, || self.run(trainer))?.1)).collect()
    }
}

/// What one rank alone does on this device, with the weights whole, in tokens per second at the median of the steps.
pub fn one_rank_speed<D: Device>(device: D, subject: &Subject, arguments: &StepArguments) -> Result<f64, RankError> {
    let world = setup::world_of_one(&device)?;
    let model = subject.open(device)?;
    let step = RepeatedStep::new(arguments, model.config().vocabulary, &world.mesh);
    let mut trainer = step.trainer(Policy::whole(model), world);
    step.times(&mut trainer, arguments.warm_up)?;
    Ok(tokens_per_second(step.tokens(), &Spread::of(step.times(&mut trainer, arguments.steps)?)))
}

struct Measuring<'a> {
    arguments: &'a StepArguments,
    subject: Subject,
    output: &'a OutputArguments,
}

impl Work for Measuring<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        let Measuring { arguments, subject, output } = self;
        let report = measure(subject.open(Traced::new(device))?, arguments)?;
        if output.json { print_json(&report) } else { print_text(&report.text()) }
    }
}

fn measure<D: Device>(model: Model<Traced<D>>, arguments: &StepArguments) -> Result<StepReport, CliError> {
    let (device, context) = (model.device().clone(), arguments.model.context);
    let world = setup::world_of_one(&device)?;
    let repeated = RepeatedStep::new(arguments, model.config().vocabulary, &world.mesh);
    let mut trainer = repeated.trainer(Policy::whole(model), world);
    repeated.times(&mut trainer, arguments.warm_up)?;
    let times = repeated.times(&mut trainer, arguments.steps)?;
    device.start_recording();
    let traced = repeated.times(&mut trainer, 1)?[0];
    let spans = device.stop_recording();
    trace::write(arguments.model.trace.as_deref(), &spans, "learner bench step")?;

    let model = trainer.sampler().map_err(CliError::failed)?;
    Ok(StepReport {
        step: StepFigures::of(&repeated, arguments, model.config(), model.parameter_count(), &device, 1, Spread::of(times)),
        memory: MemoryTable::of(model, Some((context, arguments.recompute)), 0),
        phases_ms: trace::phase_times(&spans, traced),
        operations: trace::operation_times(&spans),
        notes: STEP_NOTES.into_iter().chain([TRACE_NOTE]).collect(),
    })
}

/// Sequences of random tokens with lengths in [`DIVISORS`] for each replica, half of them with a bad advantage.
fn made_up_samples(context: usize, vocabulary: usize, replicas: usize) -> Vec<Sample> {
    let mut key = Key::new(Purpose::Benchmark, &[context as u64]);
    let sample = |(index, divisor): (usize, usize)| {
        let length = context / divisor;
        let prompt = ((length as f64 * PROMPT_SHARE) as usize).max(1);
        Sample {
            ids: (0..length).map(|_| key.below(vocabulary) as u32).collect(),
            trained: (0..length).map(|token| token >= prompt).collect(),
            sampled_log_probs: vec![0.0; length],
            advantage: if index % 2 == 0 { 1.0 } else { -1.0 },
        }
    };
    let lengths = std::iter::repeat_n(DIVISORS, replicas).flatten();
    lengths.enumerate().map(sample).collect()
}

impl StepReport {
    fn text(&self) -> String {
        let lines = [
            self.step.heading(),
            self.step.line(),
            format!("  tokens/s        {:.0} per device", self.step.tokens_per_second_per_device),
            self.step.utilisation_line(),
            format!("  memory          {} ({})", self.memory.line(), self.memory.source),
            format!("  time by phase   {}", phase_line(&self.phases_ms)),
        ];
        let notes = self.notes.iter().map(|note| format!("  note: {note}"));
        lines.into_iter().chain(notes).map(|line| line + "\n").collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::micro_batches;

    #[test]
    fn a_step_is_two_micro_batches_of_the_context() {
        let samples = made_up_samples(256, 440, 1);
        let lengths: Vec<usize> = samples.iter().map(|sample| sample.ids.len()).collect();
        assert_eq!(lengths, [256, 128, 64, 32, 32]);
        let trained: Vec<usize> = samples.iter().map(Sample::trained_count).collect();
        assert_eq!(trained, [192, 96, 48, 24, 24]);
        let batches = micro_batches(&samples, 256);
        assert_eq!(batches.iter().map(|batch| batch.packed.ids.len()).collect::<Vec<_>>(), [256, 256]);
    }

    #[test]
    fn every_replica_has_two_micro_batches() {
        for replicas in [2, 3, 8] {
            let batches = micro_batches(&made_up_samples(256, 440, replicas), 256);
            let tokens: Vec<usize> = batches.iter().map(|batch| batch.packed.ids.len()).collect();
            assert_eq!(tokens, vec![256; 2 * replicas]);
        }
    }

    #[test]
    fn one_rank_is_a_number_or_none() {
        assert_eq!("none".parse(), Ok(OneRank::Unknown));
        assert_eq!("1234.5".parse(), Ok(OneRank::Given(1234.5)));
        for text in ["", "0", "-1", "nan", "inf", "all"] {
            assert!(text.parse::<OneRank>().is_err_and(|problem| problem.contains("none")), "{text}");
        }
    }
}
