//! Checkpoints that survive kill -9 at any moment.
//!
//! ```text
//! checkpoints/step-00000120/
//!   config.json model.safetensors tokenizer.json   a Hugging Face directory: load it anywhere
//!   optimizer.safetensors                          Adam's moments
//!   state.json                                     where the run is
//!   DONE                                           written last: without it the folder does not count
//! ```
//!
//! A checkpoint is written under a temporary name, synced, renamed, and only then marked; an older one loses its mark
//! before it loses its files. So the newest marked folder is always whole.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, View};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::files::{FileError, sync_folder, write_atomically};
use super::optimizer::AdamW;
use crate::device::Device;
use crate::model::{Model, ModelError};

/// When checkpoints are written and how many stay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSettings {
    /// Steps of fine-tuning between checkpoints. The end of a stage and a stop by signal always write one.
    pub every_rft_steps: usize,
    /// Steps of reinforcement learning between checkpoints.
    pub every_rl_steps: usize,
    /// Newest checkpoints kept.
    pub keep: usize,
}

impl Default for CheckpointSettings {
    fn default() -> Self {
        CheckpointSettings { every_rft_steps: 200, every_rl_steps: 8, keep: 2 }
    }
}

impl CheckpointSettings {
    /// # Errors
    /// Names the first setting that makes no sense.
    pub fn check(&self) -> Result<(), String> {
        for (name, value) in
            [("every_rft_steps", self.every_rft_steps), ("every_rl_steps", self.every_rl_steps), ("keep", self.keep)]
        {
            if value == 0 {
                return Err(format!("checkpoint.{name} = 0: must be at least 1"));
            }
        }
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{}: {reason}", path.display())]
    Broken { path: PathBuf, reason: String },
}

/// The `checkpoints` folder of a run.
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

const MARK: &str = "DONE";
const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Key in the optimizer file's header: steps taken.
const STEPS: &str = "steps";

impl Checkpoints {
    pub fn new(folder: PathBuf, keep: usize) -> Checkpoints {
        Checkpoints { folder, keep: keep.max(1) }
    }

    /// The newest whole checkpoint: its folder and step.
    pub fn latest(&self) -> Result<Option<(PathBuf, usize)>, CheckpointError> {
        Ok(self.list()?.into_iter().rfind(|(path, _)| path.join(MARK).exists()))
    }

    /// Writes checkpoint `step` and removes those that are no longer kept. `step` must be beyond every checkpoint there is:
    /// a whole one is never replaced.
    ///
    /// # Errors
    /// When something cannot be written. Earlier checkpoints are then untouched.
    pub fn save<D: Device>(
        &self,
        step: usize,
        model: &Model<D>,
        optimizer: &AdamW<D>,
        tokenizer_json: &[u8],
        state: &impl Serialize,
    ) -> Result<PathBuf, CheckpointError> {
        let path = self.folder.join(format!("step-{step:08}"));
        let partial = self.folder.join(format!("step-{step:08}.partial"));
        let file_error = |path: &Path| {
            let path = path.to_path_buf();
            move |source| FileError { path, source }
        };
        if path.join(MARK).exists() {
            return Err(CheckpointError::Broken { path, reason: "is already a whole checkpoint".into() });
        }
        for leftover in [&partial, &path] {
            remove_folder(leftover).map_err(file_error(leftover))?;
        }
        let fill = || -> Result<(), CheckpointError> {
            fs::create_dir_all(&partial).map_err(file_error(&partial))?;
            model.save(&partial)?;
            write_atomically(&partial.join("tokenizer.json"), tokenizer_json)?;
            save_optimizer(&partial.join(OPTIMIZER), model, optimizer)?;
            let state = serde_json::to_vec_pretty(state).map_err(io::Error::from).map_err(file_error(&partial))?;
            write_atomically(&partial.join(STATE), &state)?;
            fs::rename(&partial, &path).and_then(|()| sync_folder(&self.folder)).map_err(file_error(&path))?;
            write_atomically(&path.join(MARK), b"")?;
            Ok(())
        };
        if let Err(error) = fill() {
            // Half a checkpoint is of no use and may be what fills the disk.
            let _ = remove_folder(&partial);
            return Err(error);
        }
        self.prune()?;
        Ok(path)
    }

    /// Reads the state noted in a checkpoint.
    pub fn load_state<S: DeserializeOwned>(path: &Path) -> Result<S, CheckpointError> {
        let path = path.join(STATE);
        let text = fs::read(&path).map_err(|source| FileError::new(&path, source))?;
        serde_json::from_slice(&text).map_err(|error| CheckpointError::Broken { path, reason: error.to_string() })
    }

    /// Reads Adam's moments for `model` from a checkpoint.
    pub fn load_optimizer<D: Device>(path: &Path, model: &Model<D>, optimizer: &mut AdamW<D>) -> Result<(), CheckpointError> {
        load_optimizer(&path.join(OPTIMIZER), model, optimizer)
    }

    /// Removes what an interrupted save or removal left behind. Called once when a run starts.
    pub fn sweep(&self) -> Result<(), CheckpointError> {
        let unmarked = |path: &PathBuf| !path.join(MARK).exists();
        for (path, _) in self.list()?.into_iter().filter(|(path, _)| unmarked(path)) {
            remove_folder(&path).map_err(|source| FileError { path, source })?;
        }
        for entry in self.entries()?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "partial")) {
            remove_folder(&entry).map_err(|source| FileError { path: entry, source })?;
        }
        Ok(())
    }

    fn prune(&self) -> Result<(), CheckpointError> {
        let mut whole: Vec<_> = self.list()?.into_iter().filter(|(path, _)| path.join(MARK).exists()).collect();
        whole.truncate(whole.len().saturating_sub(self.keep));
        for (path, _) in whole {
            remove_folder(&path).map_err(|source| FileError { path, source })?;
        }
        Ok(())
    }

    /// Folders named `step-N`, marked or not, in order of N.
    fn list(&self) -> Result<Vec<(PathBuf, usize)>, CheckpointError> {
        let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse::<usize>().ok();
        let mut found: Vec<_> = self.entries()?.into_iter().filter_map(|path| step(&path).map(|step| (path, step))).collect();
        found.sort_by_key(|(_, step)| *step);
        Ok(found)
    }

    fn entries(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let error = |source| FileError::new(&self.folder, source);
        match fs::read_dir(&self.folder) {
            Ok(entries) => {
                Ok(entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>().map_err(error)?)
            }
            Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(error(source).into()),
        }
    }
}

/// A moment of one tensor, read from the device when its turn to be written comes.
struct Moment<'a, D: Device> {
    optimizer: &'a AdamW<D>,
    model: &'a Model<D>,
    name: String,
    shape: Vec<usize>,
}

impl<D: Device> View for Moment<'_, D> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let values = self.optimizer.read(self.model, &self.name);
        Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }
    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}

fn save_optimizer<D: Device>(path: &Path, model: &Model<D>, optimizer: &AdamW<D>) -> Result<(), CheckpointError> {
    let moments =
        optimizer.names(model).into_iter().map(|(name, shape)| (name.clone(), Moment { optimizer, model, name, shape }));
    let steps = HashMap::from([(STEPS.to_owned(), optimizer.steps().to_string())]);
    safetensors::serialize_to_file(moments, Some(steps), path).map_err(|error| FileError {
        path: path.to_path_buf(),
        source: match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => io::Error::other(other.to_string()),
        },
    })?;
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(|source| FileError::new(path, source))?;
    Ok(())
}

fn load_optimizer<D: Device>(path: &Path, model: &Model<D>, optimizer: &mut AdamW<D>) -> Result<(), CheckpointError> {
    let broken = |reason: String| CheckpointError::Broken { path: path.to_path_buf(), reason };
    let bytes = fs::read(path).map_err(|source| FileError::new(path, source))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| broken(error.to_string()))?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| broken(error.to_string()))?;
    let steps = header.metadata().as_ref().and_then(|metadata| metadata.get(STEPS)?.parse().ok());
    let steps = steps.ok_or_else(|| broken(format!("the header has no {STEPS}")))?;
    let values = |name: &str| {
        let data = tensors.tensor(name).ok()?.data();
        Some(data.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
    };
    Ok(optimizer.restore(model, steps, values)?)
}

/// Removes the mark first, so that no half-removed folder counts as a checkpoint.
fn remove_folder(path: &Path) -> io::Result<()> {
    let ignore_missing = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    };
    ignore_missing(fs::remove_file(path.join(MARK)))?;
    ignore_missing(fs::remove_dir_all(path))
}
