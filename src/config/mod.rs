//! The run file: what a run does, in TOML, layered from a recipe, further files and the command line.
//!
//! Every room owns its settings and their defaults; this room composes and checks them. Keys that no room knows are
//! refused with the line that holds them.
//!
//! ```text
//! text.rs    a file -> keys with their lines and comments
//! shape.rs   what every key may hold, learned from the settings types
//! layers.rs  recipe, files, flags -> one run file, or everything that is wrong with them
//! keys.rs    every key explained
//! stages.rs  what a stage overrides
//! recipes.rs the run files that come with the program, and where their settings come from
//! scale.rs   any recipe, small
//! missing.rs what published recipes need that does not exist yet
//! ```

pub mod keys;
mod layers;
mod missing;
pub mod recipes;
mod scale;
pub mod shape;
mod stages;
mod text;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use layers::{ConfigError, Layers};
pub use missing::{Missing, TaskFormat};
pub use scale::Change;
pub use stages::{Kind, StageTable};

use crate::algorithm::{Problems, SettingErrors};
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
    /// The agent: its tools and the limits of one episode.
    pub agent: agent::Settings,
    pub engine: engine::Settings,
    pub rollout: engine::servers::Settings,
    /// Rejection fine-tuning: attempts are made, those that pass are imitated.
    pub rft: stage::RftSettings,
    /// Reinforcement learning: attempts at a task are compared with each other.
    pub rl: stage::RlSettings,
    /// What the optimizer steps of both need.
    pub step: StepSettings,
    pub parallel: parallel::Settings,
    /// Measuring the policy on held-out tasks.
    pub evaluate: evaluate::Settings,
    pub checkpoint: CheckpointSettings,
    /// Where programs run, and what they may use.
    pub sandbox: sandbox::Settings,
    /// How answers are graded.
    pub grader: grader::Settings,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageTable>,
}

/// More than any machine has cores.
const MOST_THREADS: usize = 4096;

/// The run as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunSettings {
    /// Names the run directory under `runs/` when `--out` does not.
    pub name: String,
    /// Of all random numbers: the same seed, the same run.
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
    /// The form that tasks come in.
    pub format: TaskFormat,
    /// Tasks to learn from.
    pub train: String,
    /// Tasks to measure on. Empty: `held_out_share` of the training tasks are set apart, chosen by their ids.
    pub held_out: String,
    /// Of the training tasks, where there are no held-out tasks.
    pub held_out_share: f64,
}

impl Default for TaskSettings {
    fn default() -> Self {
        TaskSettings {
            format: TaskFormat::Learner,
            train: "builtin:train".into(),
            held_out: "builtin:held_out".into(),
            held_out_share: 0.2,
        }
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
    /// All that makes no sense, alone or together.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.join(self.check_sections());
        problems.join(self.stages().map(|_| ()));
        problems.finish()
    }

    /// All but the list of stages.
    fn check_sections(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let name = &self.run.name;
        let plain = !name.is_empty() && !name.contains(['/', '\\']) && !name.contains(char::is_control) && !name.starts_with('.');
        problems.unless(plain, "run.name", format!("{name:?}"), "give a plain folder name");
        let threads = self.run.threads;
        problems.unless(
            threads <= MOST_THREADS,
            "run.threads",
            threads,
            &format!("give at most {MOST_THREADS}, or 0 for all cores"),
        );
        if let Err(problem) = self.device() {
            problems.unless(false, "run.device", format!("{:?}", self.run.device), &problem);
        }
        match (&self.model.directory, &self.model.initialise) {
            (Some(_), Some(_)) => problems.unless(false, "model.directory", "set", "leave it out, or model.initialise"),
            (None, None) => problems.unless(false, "model", "empty", "give --model DIR, model.directory or [model.initialise]"),
            _ => {}
        }
        let share = self.tasks.held_out_share;
        problems.unless((0.0..1.0).contains(&share), "tasks.held_out_share", share, "give at least 0 and less than 1");
        problems.within("agent", self.agent.check());
        problems.within("engine", self.engine.check());
        problems.within("rollout", self.rollout.check());
        problems.within("rft", self.rft.check());
        problems.within("rl", self.rl.check());
        problems.within("step", self.step.check());
        problems.within("parallel", self.parallel.check());
        problems.within("evaluate", self.evaluate.check());
        problems.within("checkpoint", self.checkpoint.check());
        problems.within("sandbox.limits", self.sandbox.limits.check());
        if let Some(rope) = &self.model.rope {
            problems.within("model.rope", rope.check());
        }
        problems.finish()
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

    /// Every key with its value in TOML, by its whole name.
    pub fn values(&self) -> Result<Vec<(String, String)>, String> {
        let value = toml::Value::try_from(self).map_err(|error| format!("the settings cannot be written as TOML: {error}"))?;
        let mut values = Vec::new();
        text::each_value("", &value, &mut |key, value| values.push((key.to_owned(), text::written(value))));
        Ok(values)
    }

    /// The run file as TOML, every key written out.
    pub fn to_toml(&self) -> Result<String, String> {
        toml::to_string_pretty(self).map_err(|error| format!("the settings cannot be written as TOML: {error}"))
    }
}
