//! `learner bench step`: the trainer alone.

use std::collections::BTreeMap;

use serde::Serialize;

use super::figures::{MemoryTable, Spread, percent, phase_line, timed, utilisation};
use super::trace::{self, OperationTime};
use super::{ModelArguments, Subject};
use crate::algorithm::ClipSettings;
use crate::cli::device::{self, Work};
use crate::cli::{CliError, OutputArguments, print_json, print_text, setup};
use crate::device::{Device, Traced};
use crate::model::{Model, StepFlops};
use crate::train::optimizer::AdamWSettings;
use crate::train::{Policy, PolicySettings, StepSettings, Trainer};
use crate::types::{Key, Purpose, Sample};

#[derive(clap::Args)]
pub struct StepArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Steps to time; one more comes before them and is not counted, one after them is traced
    #[arg(long, default_value_t = 5)]
    steps: usize,
}

/// Sequences are cut so that each is at least four tokens long.
const LEAST_CONTEXT: usize = 32;

/// Lengths of a step's sequences as divisors of the context, `2 x context` tokens in all: the long one makes a micro-batch of its
/// own, the others are packed into one of the same size.
const DIVISORS: [usize; 5] = [1, 2, 4, 8, 8];

/// Share of each sequence that is prompt and not trained on.
const PROMPT_SHARE: f64 = 0.25;

#[derive(Serialize)]
struct StepReport {
    benchmark: &'static str,
    device: String,
    devices: usize,
    model: String,
    parameters: usize,
    context: usize,
    sequence_lengths: Vec<usize>,
    micro_batch_tokens: usize,
    tokens: usize,
    trained_tokens: usize,
    steps: usize,
    step_ms: Spread,
    tokens_per_second_per_device: f64,
    flops: FlopsReport,
    mfu_c6: Option<f64>,
    mfu_c12: Option<f64>,
    memory: MemoryTable,
    /// Of one traced step, in which every operation is waited for.
    phases_ms: BTreeMap<&'static str, f64>,
    operations: Vec<OperationTime>,
    notes: Vec<&'static str>,
}

/// Of one step.
#[derive(Serialize)]
struct FlopsReport {
    matrices: f64,
    attention_c6: f64,
    attention_c12: f64,
    peak_per_second: Option<f64>,
}

const NOTES: [&str; 4] = [
    "MFU = FLOPs / (median step seconds x peak of dense bf16); n/a where the peak of the device is not known",
    "FLOPs = 6 x (layer matrices x tokens + head x trained tokens) + c x layers x query width x sum of length^2; c = 6 counts the \
     causal half of attention, c = 12 the whole square; what is computed again in the backward is not counted",
    "tokens per second count every token of a step, prompts too; the step is a policy step with its optimizer update",
    "phases and operations are of one more step in which each operation is waited for: their sum exceeds an untraced step",
];

pub fn run(arguments: &StepArguments, output: &OutputArguments) -> Result<(), CliError> {
    if arguments.steps == 0 {
        return Err(CliError::Refused("--steps 0: must be at least 1".into()));
    }
    let subject = arguments.model.subject(LEAST_CONTEXT)?;
    device::run_on(arguments.model.device, arguments.model.gemm, Measuring { arguments, subject, output })
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
    let samples = made_up_samples(context, model.config().vocabulary);
    let lengths: Vec<usize> = samples.iter().map(|sample| sample.ids.len()).collect();
    let trained_tokens = samples.iter().map(Sample::trained_count).sum();
    let flops = StepFlops::of(model.config(), &lengths, trained_tokens);

    let settings = StepSettings { micro_batch_tokens: context, ..StepSettings::default() };
    let clip = ClipSettings::default();
    let policy = PolicySettings { temperature: 1.0, clip: &clip };
    let world = setup::world_of_one(&device)?;
    let mut trainer = Trainer::new(Policy::whole(model), world, AdamWSettings::default(), &settings);
    let mut step = || match trainer.policy_step(&samples, None, &policy, 1e-6, &settings).map_err(CliError::failed)?.skipped {
        false => Ok(()),
        true => Err(CliError::Failed("a step had gradients that are not finite: the weights are broken".into())),
    };
    step()?;
    let times = (0..arguments.steps).map(|_| Ok(timed(&device, &mut step)?.1)).collect::<Result<_, CliError>>()?;
    device.start_recording();
    let ((), traced) = timed(&device, &mut step)?;
    let spans = device.stop_recording();
    trace::write(arguments.model.trace.as_deref(), &spans, "learner bench step")?;

    let step_ms = Spread::of(times);
    let model = trainer.sampler().map_err(CliError::failed)?;
    let peak = device.peaks().map(|peaks| peaks.tensor_flops);
    let tokens: usize = lengths.iter().sum();
    Ok(StepReport {
        benchmark: "step",
        device: device.describe(),
        devices: 1,
        model: arguments.model.model.display().to_string(),
        parameters: model.parameter_count(),
        context,
        sequence_lengths: lengths,
        micro_batch_tokens: context,
        tokens,
        trained_tokens,
        steps: arguments.steps,
        step_ms,
        tokens_per_second_per_device: tokens as f64 / (step_ms.median / 1e3),
        flops: FlopsReport {
            matrices: flops.matrices,
            attention_c6: StepFlops::CAUSAL * flops.attention_squares,
            attention_c12: StepFlops::FULL * flops.attention_squares,
            peak_per_second: peak,
        },
        mfu_c6: utilisation(flops.total(StepFlops::CAUSAL), step_ms.median, peak),
        mfu_c12: utilisation(flops.total(StepFlops::FULL), step_ms.median, peak),
        memory: MemoryTable::of(model, Some(context), 0),
        phases_ms: trace::phase_times(&spans, traced),
        operations: trace::operation_times(&spans),
        notes: NOTES.to_vec(),
    })
}

/// Sequences of random tokens with lengths in [`DIVISORS`], half of them with a bad advantage.
fn made_up_samples(context: usize, vocabulary: usize) -> Vec<Sample> {
    let mut key = Key::new(Purpose::Benchmark, &[context as u64]);
    let sample = |(index, divisor): (usize, &usize)| {
        let length = context / divisor;
        let prompt = ((length as f64 * PROMPT_SHARE) as usize).max(1);
        Sample {
            ids: (0..length).map(|_| key.below(vocabulary) as u32).collect(),
            trained: (0..length).map(|token| token >= prompt).collect(),
            sampled_log_probs: vec![0.0; length],
            advantage: if index % 2 == 0 { 1.0 } else { -1.0 },
        }
    };
    DIVISORS.iter().enumerate().map(sample).collect()
}

impl StepReport {
    fn text(&self) -> String {
        let lines = [
            format!("{}, {} parameters, on {}", self.model, self.parameters, self.device),
            format!(
                "  step            {:.2} ms median ({:.2} to {:.2} over {} steps), {} tokens of which {} trained, context {}",
                self.step_ms.median,
                self.step_ms.min,
                self.step_ms.max,
                self.steps,
                self.tokens,
                self.trained_tokens,
                self.context
            ),
            format!("  tokens/s        {:.0} per device", self.tokens_per_second_per_device),
            format!("  MFU             {} at c=6, {} at c=12", percent(self.mfu_c6), percent(self.mfu_c12)),
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
        let samples = made_up_samples(256, 440);
        let lengths: Vec<usize> = samples.iter().map(|sample| sample.ids.len()).collect();
        assert_eq!(lengths, [256, 128, 64, 32, 32]);
        let trained: Vec<usize> = samples.iter().map(Sample::trained_count).collect();
        assert_eq!(trained, [192, 96, 48, 24, 24]);
        let batches = micro_batches(&samples, 256);
        assert_eq!(batches.iter().map(|batch| batch.packed.ids.len()).collect::<Vec<_>>(), [256, 256]);
    }
}
