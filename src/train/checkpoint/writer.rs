//! Writing checkpoints beside training.

use std::path::PathBuf;
use std::thread::JoinHandle;

use serde::Serialize;

use super::snapshot::Snapshot;
use super::{CheckpointError, Checkpoints};
use crate::parallel::Ranks;
use crate::train::files::FileError;

/// Writes the checkpoints of a run, one at a time. All ranks make the same calls.
pub struct CheckpointWriter<'a> {
    checkpoints: Checkpoints,
    ranks: &'a Ranks,
    /// The newest one that is whole or being written.
    newest: Option<usize>,
    pending: Option<Pending>,
}

/// A checkpoint that not all ranks are known to have written.
struct Pending {
    step: usize,
    /// This rank's part; taken once it has ended.
    thread: Option<JoinHandle<Result<(), FileError>>>,
}

/// What is written once, by rank 0.
pub(super) struct Whole {
    pub tokenizer_json: Vec<u8>,
    pub state: Vec<u8>,
}

impl<'a> CheckpointWriter<'a> {
    /// Removes what an interrupted run left behind, and looks for the newest whole checkpoint of the folder.
    pub fn open(folder: PathBuf, keep: usize, ranks: &'a Ranks) -> Result<CheckpointWriter<'a>, CheckpointError> {
        let checkpoints = Checkpoints::new(folder, keep);
        let mut newest = None;
        if ranks.first() {
            checkpoints.sweep()?;
            newest = checkpoints.latest()?.map(|(_, step)| step);
        }
        let newest = ranks.broadcast(Some(&newest))?;
        Ok(CheckpointWriter { checkpoints, ranks, newest, pending: None })
    }

    /// The step of the newest checkpoint, whole or being written.
    pub fn newest(&self) -> Option<usize> {
        self.newest
    }

    /// Begins to write checkpoint `step`, once the one before is whole, and returns where it will be. `step` must be beyond every
    /// checkpoint there is: a whole one is never replaced.
    ///
    /// # Errors
    /// When the one before could not be written, or a rank is lost.
    pub fn save(
        &mut self,
        step: usize,
        snapshot: impl FnOnce() -> Result<Snapshot, CheckpointError>,
        tokenizer_json: &[u8],
        state: &impl Serialize,
    ) -> Result<PathBuf, CheckpointError> {
        self.wait()?;
        let (place, partial) = (self.checkpoints.place(step), self.checkpoints.partial(step));
        let snapshot = snapshot()?;
        let state = serde_json::to_vec_pretty(state)
            .map_err(|error| CheckpointError::Broken { path: place.clone(), reason: error.to_string() })?;
        let whole = self.ranks.first().then(|| Whole { tokenizer_json: tokenizer_json.to_vec(), state });
        let write = move || snapshot.write(&partial, whole.as_ref());
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(write);
        let thread = thread.map_err(|source| FileError::new(&place, source))?;
        self.pending = Some(Pending { step, thread: Some(thread) });
        self.newest = Some(step);
        Ok(place)
    }

    /// Makes a checkpoint of what has been written meanwhile, if all ranks have: called now and then.
    ///
    /// # Errors
    /// This rank's part could not be written. Earlier checkpoints are untouched.
    pub fn mark_if_written(&mut self) -> Result<(), CheckpointError> {
        let Some(pending) = &self.pending else { return Ok(()) };
        if pending.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.join()?;
        }
        let waits = self.pending.as_ref().is_some_and(|pending| pending.thread.is_some());
        if !self.ranks.any(waits)? {
            self.commit()?;
        }
        Ok(())
    }

    /// The same, and waits for all ranks.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        if self.pending.is_none() {
            return Ok(());
        }
        self.join()?;
        self.ranks.barrier()?;
        self.commit()
    }

    /// Waits for this rank's part. What could not be written is forgotten, so that no later call makes a checkpoint of it.
    fn join(&mut self) -> Result<(), CheckpointError> {
        let Some(Pending { step, thread }) = &mut self.pending else { return Ok(()) };
        let (step, written) = (*step, thread.take().map(JoinHandle::join));
        let problem = match written {
            None | Some(Ok(Ok(()))) => return Ok(()),
            Some(Ok(Err(problem))) => problem.into(),
            Some(Err(_)) => {
                let reason = "the thread that wrote it panicked; this is a fault of the program".into();
                CheckpointError::Broken { path: self.checkpoints.partial(step), reason }
            }
        };
        (self.pending, self.newest) = (None, None);
        Err(problem)
    }

    fn commit(&mut self) -> Result<(), CheckpointError> {
        match self.pending.take() {
            Some(Pending { step, .. }) if self.ranks.first() => self.checkpoints.commit(step),
            _ => Ok(()),
        }
    }
}
