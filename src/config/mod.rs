//! The run file: what a run does, in TOML, layered from a recipe, further files and the command line.
//!
//! Every room owns its settings and their defaults; this room composes and checks them. Keys that no room knows are
//! refused with the file that holds them.

mod layers;
mod recipes;
mod stages;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use layers::{ConfigError, Layers};
pub use recipes::{RECIPES, recipe};

use crate::algorithm::Problems;
use crate::device::{DeviceChoice, GemmLibrary};
use crate::model::RopeSettings;
use crate::train::{CheckpointSettings, StepSettings};
use crate::{agent, engine, evaluate, grader, parallel, sandbox, stage};

/// A whole run file. What is left out has the default of its room, which is the quick start's value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunFile {
    pub run: RunSettings,
    pub model: ModelSettings,
    pub tasks: TaskSettings,
    pub agent: agent::Settings,
    pub engine: engine::Settings,
    pub rollout: engine::servers::Settings,
    pub rft: stage::RftSettings,
    pub rl: stage::RlSettings,
    pub step: StepSettings,
    pub parallel: parallel::Settings,
    pub evaluate: evaluate::Settings,
    pub checkpoint: CheckpointSettings,
    pub sandbox: sandbox::Settings,
    pub grader: grader::Settings,
    /// What the run strings together, in order: each with `name` and `kind`, and keys of other sections that hold for it alone. The
    /// usual stages if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<toml::Table>,
}

/// The run as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunSettings {
    /// Names the run directory under `runs/` when `--out` does not.
    pub name: String,
    pub seed: u64,
    /// Where the model runs: `cpu`, `cuda`, `cuda:N` (the GPU numbered N), or `emulated:N` (N GPUs emulated on the CPU).
    pub device: String,
    /// Whose matrix products a GPU runs: `own`, or `cublaslt` to measure against; sampled and recomputed log-probabilities may then
    /// differ.
    pub gemm: GemmLibrary,
    /// Threads of the model; 0 takes all cores. The result does not depend on it.
    pub threads: usize,
    /// Episodes of each rollout kept in `episodes/` for people to read.
    pub episodes_kept: usize,
}

impl Default for RunSettings {
    fn default() -> Self {
        RunSettings { name: "run".into(), seed: 0, device: "cpu".into(), gemm: GemmLibrary::Own, threads: 0, episodes_kept: 16 }
    }
}

/// The policy that a run starts from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSettings {
    /// A Hugging Face directory: config.json, safetensors, tokenizer.json.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// Without a directory: the shape of a model drawn at random, in the keys of a Hugging Face config.json. The quick
    /// start's tokenizer goes with it and gives `vocab_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initialise: Option<toml::Table>,
    /// Rotary embeddings scaled for longer sequences; those of the model itself if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope: Option<RopeSettings>,
}

/// What there is to solve. A name is a file in the format of `docs/tasks.md`, or `builtin:train` and `builtin:held_out`
/// for the quick start's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TaskSettings {
    pub train: String,
    /// Empty: `held_out_share` of the training tasks are set apart, chosen by their ids.
    pub held_out: String,
    pub held_out_share: f64,
}

impl Default for TaskSettings {
    fn default() -> Self {
        TaskSettings { train: "builtin:train".into(), held_out: "builtin:held_out".into(), held_out_share: 0.2 }
    }
}

impl RunFile {
    /// Where the model runs.
    ///
    /// # Errors
    /// The name is none of a device.
    pub fn device(&self) -> Result<DeviceChoice, String> {
        self.run.device.parse()
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// One line for each problem of the first section that has any: the key, what was found and what would do.
    pub fn check(&self) -> Result<(), String> {
        self.check_sections()?;
        self.stages().map(|_| ())
    }

    /// All but the list of stages.
    fn check_sections(&self) -> Result<(), String> {
        let name = &self.run.name;
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name.starts_with('.') {
            return Err(format!("run.name = {name:?}: must be a plain folder name"));
        }
        self.device().map_err(|problem| format!("run.device: {problem}"))?;
        match (&self.model.directory, &self.model.initialise) {
            (Some(_), Some(_)) => return Err("model.directory and model.initialise: give one of them".into()),
            (None, None) => return Err("model: give --model DIR, model.directory or [model.initialise]".into()),
            _ => {}
        }
        if !(0.0..1.0).contains(&self.tasks.held_out_share) {
            return Err(format!("tasks.held_out_share = {}: must be at least 0 and below 1", self.tasks.held_out_share));
        }
        self.agent.check()?;
        self.engine.check()?;
        self.rollout.check()?;
        let mut problems = Problems::default();
        problems.within("rft", self.rft.check());
        problems.within("rl", self.rl.check());
        problems.finish().map_err(|errors| errors.to_string())?;
        self.step.check()?;
        self.parallel.check()?;
        self.evaluate.check()?;
        self.checkpoint.check()?;
        if let Some(rope) = &self.model.rope {
            rope.check().map_err(|problem| format!("model.rope.{problem}"))?;
        }
        self.sandbox.limits.check().map_err(|error| error.to_string())
    }

    /// What a stage that overrides nothing needs of it.
    pub fn stage_settings(&self) -> stage::Settings {
        stage::Settings {
            seed: self.run.seed,
            rope: self.model.rope.clone(),
            agent: self.agent.clone(),
            engine: self.engine.clone(),
            rft: self.rft.clone(),
            rl: self.rl.clone(),
            step: self.step.clone(),
            evaluate: self.evaluate.clone(),
            checkpoint: self.checkpoint.clone(),
            episodes_kept: self.run.episodes_kept,
        }
    }

    /// The run file as TOML, every key written out.
    pub fn to_toml(&self) -> Result<String, String> {
        toml::to_string_pretty(self).map_err(|error| format!("the settings cannot be written as TOML: {error}"))
    }
}
