//! `learner bench`: each part measured by itself, with its conventions printed beside the numbers. `docs/benchmarks.md` says how
//! to read them.

mod cases;
mod figures;
mod inputs;
mod kernels;
mod rollout;
mod step;
mod step_figures;
mod step_ranks;
mod trace;

use std::path::{Path, PathBuf};

use super::setup::no_such_model;
use super::{CliError, OutputArguments};
use crate::device::{Device, DeviceChoice, GemmLibrary};
use crate::model::{Model, ModelConfig};
use crate::parallel::{ShardedModel, World};

#[derive(clap::Args)]
pub struct BenchArguments {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(clap::Subcommand)]
enum BenchCommand {
    /// Every kernel by itself: counters on an emulated GPU, times on a real one, beside the least it must do
    Kernels(kernels::KernelsArguments),
    /// The trainer alone on made-up packed batches: no rollouts, no network, no sandbox
    Step(step::StepArguments),
    /// The built-in engine alone: reading prompts, then sampling
    Rollout(rollout::RolloutArguments),
}

/// What every benchmark of a model takes.
#[derive(clap::Args, Clone, Debug)]
struct ModelArguments {
    /// Hugging Face directory; or a shape whose weights are drawn at random: its name, or a config.json
    #[arg(long, value_name = "DIR|NAME|FILE")]
    model: PathBuf,
    /// Tokens of the longest sequence
    #[arg(long, value_name = "TOKENS")]
    context: usize,
    /// Where the model runs: cpu, cuda[:N] or emulated
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Whose matrix products a GPU runs: own, or cublaslt to measure against
    #[arg(long, default_value = "own", value_name = "LIBRARY")]
    gemm: GemmLibrary,
    /// Write the operations of a traced round as Chrome trace JSON (chrome://tracing, Perfetto)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

pub fn run(arguments: &BenchArguments, output: &OutputArguments) -> Result<(), CliError> {
    match &arguments.command {
        BenchCommand::Kernels(arguments) => kernels::run(arguments, output),
        BenchCommand::Step(arguments) => step::run(arguments, output),
        BenchCommand::Rollout(arguments) => rollout::run(arguments, output),
    }
}

/// The model to measure, before a device is opened for it.
enum Subject {
    Directory(PathBuf),
    Shape(Box<ModelConfig>),
}

impl ModelArguments {
    /// Checks everything that can be checked without a device.
    fn subject(&self, least_context: usize) -> Result<Subject, CliError> {
        if self.context < least_context {
            return Err(CliError::Refused(format!("--context {}: must be at least {least_context}", self.context)));
        }
        if let Some(folder) = self.trace.as_deref().and_then(Path::parent)
            && !folder.as_os_str().is_empty()
            && !folder.is_dir()
        {
            return Err(CliError::Refused(format!("--trace: {} is no folder", folder.display())));
        }
        if let Some(config) = self.model.to_str().and_then(ModelConfig::named) {
            return Ok(Subject::Shape(Box::new(config)));
        }
        if self.model.is_file() {
            let refused = |problem: String| CliError::Refused(format!("--model {}: {problem}", self.model.display()));
            let text = std::fs::read_to_string(&self.model).map_err(|error| refused(error.to_string()))?;
            return Ok(Subject::Shape(Box::new(ModelConfig::from_json(&text).map_err(refused)?)));
        }
        if self.model.is_dir() {
            return Ok(Subject::Directory(self.model.clone()));
        }
        Err(no_such_model(&self.model))
    }
}

impl Subject {
    fn open<D: Device>(&self, device: D) -> Result<Model<D>, CliError> {
        match self {
            Subject::Directory(directory) => Model::load(device, directory).map_err(CliError::refused),
            Subject::Shape(config) => {
                config.check_on(&device).map_err(CliError::Refused)?;
                Ok(Model::initialise(device, config.as_ref().clone(), 0))
            }
        }
    }

    /// The same weights in shards over all ranks.
    fn open_sharded<D: Device>(&self, device: D, world: &World<D>) -> Result<ShardedModel<D>, CliError> {
        match self {
            Subject::Directory(directory) => ShardedModel::load(device, directory, world).map_err(CliError::refused),
            Subject::Shape(config) => {
                config.check_on(&device).map_err(CliError::Refused)?;
                Ok(ShardedModel::initialise(device, config.as_ref().clone(), 0, world))
            }
        }
    }
}
