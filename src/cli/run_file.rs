//! The flags from which a run file is made.

use std::path::PathBuf;

use super::CliError;
use crate::config::{Change, Layers, RunFile};

/// How much smaller than given a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Scale {
    /// Half a million parameters, minutes on two cores
    Tiny,
}

/// The flags from which a run file is made.
#[derive(clap::Args, Clone, Debug)]
pub struct SettingArguments {
    /// Recipe to start from [default: quickstart]
    #[arg(long, value_name = "NAME")]
    recipe: Option<String>,
    /// Run file whose keys override the recipe's; may be given several times
    #[arg(long, value_name = "FILE")]
    config: Vec<PathBuf>,
    /// Run any recipe small, with the quick start's model, tasks and scaffold; `learner recipe show NAME --scale tiny` has the rules
    #[arg(long, value_name = "SCALE")]
    scale: Option<Scale>,
    /// Hugging Face directory of the model (model.directory)
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Training tasks; some are set apart for evaluation (tasks.train)
    #[arg(long, value_name = "FILE")]
    tasks: Option<PathBuf>,
    /// Where the model runs (run.device)
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Seed of all random numbers (run.seed)
    #[arg(long)]
    seed: Option<u64>,
    /// Override one key, for example --set rl.steps=32; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl SettingArguments {
    /// The run file these flags stand for.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub fn resolve(&self) -> Result<RunFile, CliError> {
        self.layers().finish().map_err(CliError::refused)
    }

    /// What `--scale` changes.
    pub fn changes(&self) -> Vec<Change> {
        if self.scale.is_some() { self.layers().changes().to_vec() } else { Vec::new() }
    }

    /// The recipe, the files and the flags on top of each other.
    pub fn layers(&self) -> Layers {
        let mut layers = Layers::from_recipe(self.recipe.as_deref().unwrap_or("quickstart"));
        for file in &self.config {
            layers.add_file(file);
        }
        if self.scale.is_some() {
            layers.scale_down();
        }
        if let Some(directory) = &self.model {
            layers.set_flag("--model", "model", "directory", directory.display().to_string());
        }
        if let Some(tasks) = &self.tasks {
            layers.set_flag("--tasks", "tasks", "train", tasks.display().to_string());
            layers.set_flag("--tasks", "tasks", "held_out", "");
        }
        if let Some(device) = &self.device {
            layers.set_flag("--device", "run", "device", device.as_str());
        }
        match self.seed.map(i64::try_from) {
            Some(Ok(seed)) => layers.set_flag("--seed", "run", "seed", seed),
            Some(Err(_)) => layers.unread(format!("--seed: give at most {}", i64::MAX)),
            None => {}
        }
        for assignment in &self.set {
            layers.set(assignment);
        }
        layers
    }

    pub fn none_given(&self) -> bool {
        let SettingArguments { recipe, config, scale, model, tasks, device, seed, set } = self;
        recipe.is_none()
            && config.is_empty()
            && scale.is_none()
            && model.is_none()
            && tasks.is_none()
            && device.is_none()
            && seed.is_none()
            && set.is_empty()
    }
}
