//! Checkpoints that survive kill -9 at any moment.
//!
//! ```text
//! checkpoints/step-00000120/
//!   config.json tokenizer.json                     with the weights a Hugging Face directory: load it anywhere
//!   model.safetensors                              the weights; model-00001-of-00004.safetensors and so on with an index,
//!                                                  if several ranks wrote them
//!   optimizer-00001-of-00004.safetensors           Adam's moments of the parts that rank 0 of 4 changes, and so on
//!   state.json                                     where the run is, and how many ranks wrote this
//!   DONE                                           written last: without it the folder does not count
//!   KEEP                                           if there: it is not removed when newer ones have come
//! ```
//!
//! Training waits for a copy in the host's memory, no longer: a thread of each rank writes that rank's files under a temporary
//! name that no other start of the run has (`writer.rs`). When all ranks have written and synced theirs, rank 0 renames the folder
//! and only then marks it; an older one loses its mark before it loses its files. So the newest marked folder is always whole.
//!
//! The copy takes, per rank of `n`, 12 bytes for each `n`th of the parameters: the f32 weights it writes (whole tensors, so
//! somewhat more or less of them) and both moments of its own parts; while it is made, also the largest tensor.

mod moments;
mod snapshot;
mod writer;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(super) use moments::restore;
pub use snapshot::Snapshot;
pub use writer::CheckpointWriter;

use super::files::{FileError, write_atomically};
use crate::algorithm::{Problems, SettingErrors};
use crate::collectives::CollectiveError;
use crate::model::ModelError;
use crate::types::sync_folder;

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
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        for (name, value) in
            [("every_rft_steps", self.every_rft_steps), ("every_rl_steps", self.every_rl_steps), ("keep", self.keep)]
        {
            problems.unless(value > 0, name, value, "give at least 1");
        }
        problems.finish()
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
    /// Another rank could not write its part, or rank 0 not make a checkpoint of the parts.
    #[error("rank {rank}: {reason}")]
    Elsewhere { rank: usize, reason: String },
    #[error(transparent)]
    Ranks(#[from] CollectiveError),
}

/// The `checkpoints` folder of a run.
#[derive(Clone)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

const MARK: &str = "DONE";
const HOLD: &str = "KEEP";
const STATE: &str = "state.json";

/// The content of `state.json`.
#[derive(Serialize, Deserialize)]
struct Stored<S> {
    /// That wrote the checkpoint: says which files are of it.
    ranks: usize,
    run: S,
}

impl<S: DeserializeOwned> Stored<S> {
    fn read(checkpoint: &Path) -> Result<Stored<S>, CheckpointError> {
        let path = checkpoint.join(STATE);
        let text = fs::read(&path).map_err(|source| FileError::new(&path, source))?;
        serde_json::from_slice(&text).map_err(|error| {
            let reason = format!("{error}: damaged, or of an older layout; start another run from this folder with --model");
            CheckpointError::Broken { path, reason }
        })
    }
}

impl Checkpoints {
    pub fn new(folder: PathBuf, keep: usize) -> Checkpoints {
        Checkpoints { folder, keep: keep.max(1) }
    }

    /// The newest whole checkpoint: its folder and step.
    pub fn latest(&self) -> Result<Option<(PathBuf, usize)>, CheckpointError> {
        Ok(self.list()?.into_iter().rfind(|(path, _)| path.join(MARK).exists()))
    }

    /// Where checkpoint `step` is in the end.
    fn place(&self, step: usize) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    /// Creates the folder so that it lasts.
    fn create(&self) -> Result<(), FileError> {
        let parent = self.folder.parent().unwrap_or(Path::new("."));
        let create = || fs::create_dir_all(&self.folder).and_then(|()| sync_folder(parent));
        create().map_err(|source| FileError::new(&self.folder, source))
    }

    /// Makes checkpoint `step` of the files in `partial`, which are all written and synced.
    ///
    /// If it is there already, the new files are left to [`Checkpoints::tidy`]: an earlier start, frozen as it was about to do this
    /// and taken for dead, has done it after all. A run is a pure function of its settings, so either is as good.
    fn commit(&self, partial: &Path, step: usize) -> Result<(), CheckpointError> {
        let place = self.place(step);
        if place.join(MARK).exists() {
            return Ok(());
        }
        remove_folder(&place)
            .and_then(|()| sync_folder(partial))
            .and_then(|()| fs::rename(partial, &place))
            .and_then(|()| sync_folder(&self.folder))
            .map_err(|source| FileError::new(&place, source))?;
        Ok(write_atomically(&place.join(MARK), b"")?)
    }

    /// Reads the state noted in a checkpoint.
    pub fn load_state<S: DeserializeOwned>(path: &Path) -> Result<S, CheckpointError> {
        Ok(Stored::read(path)?.run)
    }

    /// Keeps a checkpoint for good.
    fn hold(&self, step: usize) -> Result<(), CheckpointError> {
        Ok(write_atomically(&self.place(step).join(HOLD), b"")?)
    }

    /// Removes all but the newest whole checkpoints that are kept, and those that are held: older ones, and what an interrupted save or removal left behind.
    /// No checkpoint is being written meanwhile. Returns what could not be removed and why: that takes room, but breaks nothing.
    fn tidy(&self) -> Result<Vec<FileError>, CheckpointError> {
        let (whole, broken): (Vec<_>, Vec<_>) = self.list()?.into_iter().partition(|(path, _)| path.join(MARK).exists());
        let old = whole.iter().rev().skip(self.keep).filter(|(path, _)| !path.join(HOLD).exists());
        let partial = self.entries()?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "partial"));
        let useless = old.chain(&broken).map(|(path, _)| path.clone()).chain(partial);
        Ok(useless.filter_map(|path| remove_folder(&path).err().map(|source| FileError { path, source })).collect())
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

/// Removes the mark first, so that no half-removed folder counts as a checkpoint.
fn remove_folder(path: &Path) -> io::Result<()> {
    let ignore_missing = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    };
    ignore_missing(fs::remove_file(path.join(MARK)))?;
    ignore_missing(fs::remove_dir_all(path))
}
