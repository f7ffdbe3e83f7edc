//! What a report of a step says first, on one rank or on many.

use serde::Serialize;

use super::figures::{Spread, percent, utilisation};
use super::step::{RepeatedStep, StepArguments};
use crate::device::Device;
use crate::model::{ModelConfig, StepFlops};

/// What holds of every step, on however many ranks.
pub const STEP_NOTES: [&str; 3] = [
    "MFU = FLOPs / (median step seconds x peak of dense bf16); n/a where the peak of the device is not known",
    "FLOPs = 6 x (layer matrices x tokens + head x trained tokens) + c x layers x query width x sum of length^2; c = 6 counts the \
     causal half of attention, c = 12 the whole square; what is computed again in the backward is not counted",
    "tokens per second count every token of a step, prompts too; the step is a policy step with its optimizer update",
];

/// Of all ranks, but for what is said to be of one device.
#[derive(Serialize)]
pub struct StepFigures {
    benchmark: &'static str,
    device: String,
    pub devices: usize,
    model: String,
    parameters: usize,
    context: usize,
    sequence_lengths: Vec<usize>,
    /// Over the ranks that share it.
    micro_batch_tokens: usize,
    tokens: usize,
    trained_tokens: usize,
    steps: usize,
    step_ms: Spread,
    pub tokens_per_second_per_device: f64,
    flops: FlopsReport,
    mfu_c6: Option<f64>,
    mfu_c12: Option<f64>,
}

/// Of one step.
#[derive(Serialize)]
struct FlopsReport {
    matrices: f64,
    attention_c6: f64,
    attention_c12: f64,
    /// Of one device.
    peak_per_second: Option<f64>,
}

impl FlopsReport {
    fn of(flops: &StepFlops, peak: Option<f64>) -> FlopsReport {
        FlopsReport {
            matrices: flops.matrices,
            attention_c6: StepFlops::CAUSAL * flops.attention_squares,
            attention_c12: StepFlops::FULL * flops.attention_squares,
            peak_per_second: peak,
        }
    }
}

/// At the median of the steps' milliseconds.
pub fn tokens_per_second(tokens: usize, step_ms: &Spread) -> f64 {
    tokens as f64 / (step_ms.median / 1e3)
}

impl StepFigures {
    /// `step` took `step_ms` on so many `devices` of this kind.
    pub fn of<D: Device>(
        step: &RepeatedStep,
        arguments: &StepArguments,
        config: &ModelConfig,
        parameters: usize,
        device: &D,
        devices: usize,
        step_ms: Spread,
    ) -> StepFigures {
        let peak = device.peaks().map(|peaks| peaks.tensor_flops);
        let flops = step.flops(config);
        let share = |c: f64| utilisation(flops.total(c) / devices as f64, step_ms.median, peak);
        let context = arguments.model.context;
        StepFigures {
            benchmark: "step",
            device: device.describe(),
            devices,
            model: arguments.model.model.display().to_string(),
            parameters,
            context,
            sequence_lengths: step.lengths(),
            micro_batch_tokens: context,
            tokens: step.tokens(),
            trained_tokens: step.trained_tokens(),
            steps: arguments.steps,
            step_ms,
            tokens_per_second_per_device: tokens_per_second(step.tokens(), &step_ms) / devices as f64,
            flops: FlopsReport::of(&flops, peak),
            mfu_c6: share(StepFlops::CAUSAL),
            mfu_c12: share(StepFlops::FULL),
        }
    }

    pub fn heading(&self) -> String {
        format!("{}, {} parameters, on {}", self.model, self.parameters, self.device)
    }

    pub fn line(&self) -> String {
        format!(
            "  step            {:.2} ms median ({:.2} to {:.2} over {} steps), {} tokens of which {} trained, context {}",
            self.step_ms.median, self.step_ms.min, self.step_ms.max, self.steps, self.tokens, self.trained_tokens, self.context
        )
    }

    pub fn utilisation_line(&self) -> String {
        format!("  MFU             {} at c=6, {} at c=12", percent(self.mfu_c6), percent(self.mfu_c12))
    }
}
