//! `learner bench rollout`: the built-in engine alone, reading prompts and then sampling from all of them at once.

use std::collections::BTreeMap;

use serde::Serialize;

use super::figures::{MemoryTable, Spread, phase_line, timed};
use super::trace::{self, OperationTime};
use super::{ModelArguments, Subject};
use crate::cli::device::{self, Work};
use crate::cli::{CliError, OutputArguments, print_json, print_text};
use crate::device::{Device, Traced};
use crate::engine::{self, BuiltinEngine, Engine, SampleKey};
use crate::model::Model;
use crate::types::{Key, Purpose};

#[derive(clap::Args)]
pub struct RolloutArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Sequences sampled together
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Decode steps to time: the last tokens of the context
    #[arg(long, default_value_t = 16)]
    steps: usize,
}

/// The token that the pass over the prompt samples, before those that are timed.
const TOKENS_NOT_TIMED: usize = 1;

#[derive(Serialize)]
struct RolloutReport {
    benchmark: &'static str,
    device: String,
    devices: usize,
    model: String,
    parameters: usize,
    context: usize,
    sequences: usize,
    prompt_tokens: usize,
    steps: usize,
    prefill_ms: f64,
    prefill_tokens_per_second: f64,
    decode_ms_per_step: Spread,
    decode_tokens_per_second: f64,
    cache_bytes: usize,
    memory: MemoryTable,
    /// Of one traced round of a prompt pass, and of one traced decode step.
    prefill_phases_ms: BTreeMap<&'static str, f64>,
    decode_phases_ms: BTreeMap<&'static str, f64>,
    decode_operations: Vec<OperationTime>,
    notes: Vec<&'static str>,
}

const NOTES: [&str; 3] = [
    "prefill: all prompts read in one advance, which also samples the first token of each sequence",
    "decode: one token for every sequence per step, at the end of the context, sampled over the whole vocabulary; tokens per second \
     at the median step",
    "the first round is a warm-up and is not counted, the last is traced with each operation waited for",
];

pub fn run(arguments: &RolloutArguments, output: &OutputArguments) -> Result<(), CliError> {
    if arguments.sequences == 0 || arguments.steps == 0 {
        return Err(CliError::Refused("--sequences and --steps: must be at least 1".into()));
    }
    let subject = arguments.model.subject(arguments.steps + TOKENS_NOT_TIMED + 1)?;
    device::run_on(arguments.model.device, arguments.model.gemm, Measuring { arguments, subject, output })
}

struct Measuring<'a> {
    arguments: &'a RolloutArguments,
    subject: Subject,
    output: &'a OutputArguments,
}

impl Work for Measuring<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        let Measuring { arguments, subject, output } = self;
        let report = measure(&subject.open(Traced::new(device))?, arguments)?;
        if output.json { print_json(&report) } else { print_text(&report.text()) }
    }
}

/// Milliseconds of one round.
struct Round {
    prefill: f64,
    decode: Vec<f64>,
}

fn measure<D: Device>(model: &Model<Traced<D>>, arguments: &RolloutArguments) -> Result<RolloutReport, CliError> {
    let (device, context, sequences) = (model.device(), arguments.model.context, arguments.sequences);
    let prompt_tokens = context - arguments.steps - TOKENS_NOT_TIMED;
    let round = |decode_steps: usize, after_prefill: &mut dyn FnMut()| -> Result<Round, CliError> {
        let settings = engine::Settings { max_rows: sequences * prompt_tokens, max_sequences: sequences, temperature: 1.0 };
        // No token stops a turn.
        let mut engine = BuiltinEngine::new(model, settings, u32::MAX, model.config().vocabulary);
        for index in 0..sequences as u64 {
            let mut key = Key::new(Purpose::Benchmark, &[context as u64, index]);
            let prompt: Vec<u32> = (0..prompt_tokens).map(|_| key.below(model.config().vocabulary) as u32).collect();
            let sequence = engine.open(SampleKey { seed: 0, stream: 0, step: 0, task: 0, sample: index });
            engine.request_turn(sequence, &prompt, context);
        }
        let mut advance = || engine.advance().map_err(CliError::failed);
        let (_, prefill) = timed(device, &mut advance)?;
        after_prefill();
        let decode = (0..decode_steps).map(|_| Ok(timed(device, &mut advance)?.1)).collect::<Result<_, CliError>>()?;
        Ok(Round { prefill, decode })
    };
    round(1, &mut || ())?;
    let measured = round(arguments.steps, &mut || ())?;
    device.start_recording();
    let mut prefill_spans = 0;
    let traced = round(1, &mut || prefill_spans = device.recorded())?;
    let spans = device.stop_recording();
    trace::write(arguments.model.trace.as_deref(), &spans, "learner bench rollout")?;

    let (prefill_spans, decode_spans) = spans.split_at(prefill_spans);
    let decode = Spread::of(measured.decode);
    Ok(RolloutReport {
        benchmark: "rollout",
        device: device.describe(),
        devices: 1,
        model: arguments.model.model.display().to_string(),
        parameters: model.parameter_count(),
        context,
        sequences,
        prompt_tokens,
        steps: arguments.steps,
        prefill_ms: measured.prefill,
        prefill_tokens_per_second: (sequences * prompt_tokens) as f64 / (measured.prefill / 1e3),
        decode_ms_per_step: decode,
        decode_tokens_per_second: sequences as f64 / (decode.median / 1e3),
        cache_bytes: model.memory_by_purpose(false).key_values_per_token * sequences * context,
        memory: MemoryTable::of(model, None, sequences * context),
        prefill_phases_ms: trace::phase_times(prefill_spans, traced.prefill),
        decode_phases_ms: trace::phase_times(decode_spans, traced.decode[0]),
        decode_operations: trace::operation_times(decode_spans),
        notes: NOTES.to_vec(),
    })
}

impl RolloutReport {
    fn text(&self) -> String {
        let lines = [
            format!("{}, {} parameters, on {}", self.model, self.parameters, self.device),
            format!(
                "  prefill         {:.0} tokens/s: {:.2} ms for {} prompts of {} tokens",
                self.prefill_tokens_per_second, self.prefill_ms, self.sequences, self.prompt_tokens
            ),
            format!(
                "  decode          {:.0} tokens/s: {:.2} ms a step, median ({:.2} to {:.2} over {} steps), {} sequences",
                self.decode_tokens_per_second,
                self.decode_ms_per_step.median,
                self.decode_ms_per_step.min,
                self.decode_ms_per_step.max,
                self.steps,
                self.sequences
            ),
            format!("  memory          {} ({})", self.memory.line(), self.memory.source),
            format!("  prefill phases  {}", phase_line(&self.prefill_phases_ms)),
            format!("  decode phases   {}", phase_line(&self.decode_phases_ms)),
        ];
        let notes = self.notes.iter().map(|note| format!("  note: {note}"));
        lines.into_iter().chain(notes).map(|line| line + "\n").collect()
    }
}
