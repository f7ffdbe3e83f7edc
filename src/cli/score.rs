//! `learner score`: the log-probability of every given token.

use std::path::PathBuf;

use super::device::{self, Work};
use super::{CliError, print_json, print_text};
use crate::device::{Device, DeviceChoice, GemmLibrary};
use crate::model::Model;
use crate::types::Batch;

/// Log-probability of every given token id under a model, and the entropy where it was predicted.
#[derive(Debug, clap::Args)]
pub struct ScoreArguments {
    /// Hugging Face model directory
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// JSON file with a list of lists of token ids
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Temperature of the distribution that is scored
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f32,
    /// Where the model runs: cpu, cuda[:N] or emulated
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: DeviceChoice,
}

/// What `--json` prints: for each list one number per id but the first, which has no prefix.
#[derive(Debug, PartialEq, serde::Serialize)]
struct ScoreReport {
    log_probs: Vec<Vec<f32>>,
    entropy: Vec<Vec<f32>>,
}

/// Tokens scored in one pass; a longer sequence goes alone.
const TOKENS_PER_PASS: usize = 2048;

pub fn run(arguments: &ScoreArguments, json: bool) -> Result<(), CliError> {
    if !(arguments.temperature.is_finite() && arguments.temperature > 0.0) {
        return Err(CliError::Refused(format!("--temperature is {}, expected a positive number", arguments.temperature)));
    }
    let lists = read_ids(arguments)?;
    device::run_on(arguments.device, GemmLibrary::Own, Scoring { arguments, lists: &lists, json })
}

/// A scoring that is about to start.
struct Scoring<'a> {
    arguments: &'a ScoreArguments,
    lists: &'a [Vec<u32>],
    json: bool,
}

impl Work for Scoring<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        score(device, self.arguments, self.lists, self.json)
    }
}

fn score<D: Device>(device: D, arguments: &ScoreArguments, lists: &[Vec<u32>], json: bool) -> Result<(), CliError> {
    let model = Model::load(device, &arguments.model).map_err(|error| CliError::Refused(error.to_string()))?;
    check_ids(arguments, lists, model.config().vocabulary, model.config().max_positions)?;
    let report = score_lists(&model, lists, arguments.temperature);
    if json {
        return print_json(&report);
    }
    let mut text = String::new();
    for (ids, (log_probs, entropy)) in lists.iter().zip(report.log_probs.iter().zip(&report.entropy)) {
        text.push_str(&format!("{:>8} {:>12} {:>10}\n", "id", "log_prob", "entropy"));
        for ((id, log_prob), entropy) in ids[1..].iter().zip(log_probs).zip(entropy) {
            text.push_str(&format!("{id:>8} {log_prob:>12.6} {entropy:>10.6}\n"));
        }
    }
    print_text(&text)
}

fn read_ids(arguments: &ScoreArguments) -> Result<Vec<Vec<u32>>, CliError> {
    let path = arguments.ids.display();
    let text = std::fs::read_to_string(&arguments.ids).map_err(|error| CliError::Refused(format!("{path}: {error}")))?;
    serde_json::from_str(&text)
        .map_err(|error| CliError::Refused(format!("{path}: expected a JSON list of lists of token ids: {error}")))
}

fn check_ids(arguments: &ScoreArguments, lists: &[Vec<u32>], vocabulary: usize, max_positions: usize) -> Result<(), CliError> {
    let refuse = |problem: String| Err(CliError::Refused(format!("{}: {problem}", arguments.ids.display())));
    for (index, ids) in lists.iter().enumerate() {
        if ids.is_empty() {
            return refuse(format!("list {index} is empty; every list needs at least one token id"));
        }
        if ids.len() > max_positions {
            return refuse(format!("list {index} has {} ids, the model's longest sequence is {max_positions}", ids.len()));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return refuse(format!("list {index} holds id {id}, the model's vocabulary ends at {}", vocabulary - 1));
        }
    }
    Ok(())
}

/// Scores consecutive lists together, up to [`TOKENS_PER_PASS`] tokens at a time; how they are grouped does not change a bit.
fn score_lists<D: Device>(model: &Model<D>, lists: &[Vec<u32>], temperature: f32) -> ScoreReport {
    let mut report = ScoreReport { log_probs: Vec::new(), entropy: Vec::new() };
    let mut rest = lists;
    while !rest.is_empty() {
        let mut tokens = 0;
        let fitting = rest.iter().take_while(|ids| {
            tokens += ids.len();
            tokens <= TOKENS_PER_PASS
        });
        let count = fitting.count().max(1);
        let sequences: Vec<&[u32]> = rest[..count].iter().map(Vec::as_slice).collect();
        let scores = model.score(&Batch::pack(&sequences, |_, _| true), temperature);
        let mut next = 0;
        for ids in sequences {
            let range = next..next + ids.len() - 1;
            next = range.end;
            report.log_probs.push(scores.log_probs[range.clone()].to_vec());
            report.entropy.push(scores.entropies[range].to_vec());
        }
        rest = &rest[count..];
    }
    report
}
