//! Writing checkpoints beside training.
//!
//! ```text
//! thread of each rank   copy --> its files --> all have theirs? --> (rank 0) the mark --> all know it is whole
//! ```
//!
//! These threads speak through a group of their own. So a checkpoint counts as soon as it is whole, in the middle of a step that may
//! take an hour, and the calls of training keep their order whenever that is.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use serde::Serialize;

use super::snapshot::Snapshot;
use super::{CheckpointError, Checkpoints, Stored};
use crate::parallel::Ranks;
use crate::train::files::FileError;
use crate::types::Progress;

/// Writes the checkpoints of a run, one at a time. All ranks make the same calls.
pub struct CheckpointWriter<'a> {
    checkpoints: Checkpoints,
    /// All ranks of the run, in the group of the threads that write. As everywhere, one for which the others have waited
    /// `parallel.stall_seconds` is taken for hung: what ranks write is alike, so that is a disk that hangs.
    ranks: Ranks,
    progress: &'a dyn Progress,
    /// Names this start of the run in the names of unfinished checkpoints: one that was taken for dead may still write, on a node
    /// that was frozen or cut off, and must not meet the files of this one.
    start: String,
    /// The newest one that is whole or being written.
    newest: Option<usize>,
    pending: Option<JoinHandle<Written>>,
}

/// What could not be removed, once the checkpoint is whole.
type Written = Result<Vec<FileError>, CheckpointError>;

/// What is written once, by rank 0.
pub(super) struct Whole {
    pub tokenizer_json: Vec<u8>,
    pub state: Vec<u8>,
}

impl<'a> CheckpointWriter<'a> {
    /// Removes what an interrupted run left behind, and looks for the newest whole checkpoint of the folder.
    pub fn open(
        folder: PathBuf,
        keep: usize,
        ranks: &Ranks,
        progress: &'a dyn Progress,
    ) -> Result<CheckpointWriter<'a>, CheckpointError> {
        let checkpoints = Checkpoints::new(folder, keep);
        let mut found = None;
        if ranks.first() {
            checkpoints.create()?;
            warn(progress, &checkpoints.tidy()?);
            let newest = checkpoints.latest()?.map(|(_, step)| step);
            found = Some((newest, format!("{:016x}", RandomState::new().build_hasher().finish())));
        }
        let (newest, start) = ranks.broadcast(found.as_ref())?;
        Ok(CheckpointWriter { checkpoints, ranks: ranks.split(0)?, progress, start, newest, pending: None })
    }

    /// The step of the newest checkpoint, whole or being written.
    pub fn newest(&self) -> Option<usize> {
        self.newest
    }

    /// Where the files of checkpoint `step` are until all of them are whole.
    pub fn partial(&self, step: usize) -> PathBuf {
        let mut name = self.checkpoints.place(step).into_os_string();
        name.push(format!(".{}.partial", self.start));
        name.into()
    }

    /// Begins to write checkpoint `step`, once the one before is whole, and returns where it will be.
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
        let (place, partial) = (self.checkpoints.place(step), self.partial(step));
        let snapshot = snapshot()?;
        let state = serde_json::to_vec(&Stored { ranks: self.ranks.ranks(), run: state })
            .map_err(|error| CheckpointError::Broken { path: place.clone(), reason: error.to_string() })?;
        let whole = self.ranks.first().then(|| Whole { tokenizer_json: tokenizer_json.to_vec(), state });
        let (ranks, checkpoints) = (self.ranks.clone(), self.checkpoints.clone());
        let write = move || {
            let written = snapshot.write(&partial, whole.as_ref());
            drop(snapshot);
            make_whole(&ranks, &checkpoints, step, &partial, written.map_err(CheckpointError::from))
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(write);
        self.pending = Some(thread.map_err(|source| FileError::new(&place, source))?);
        self.newest = Some(step);
        Ok(place)
    }

    /// Keeps checkpoint `step` for good, once it is whole, and returns where it is.
    ///
    /// # Errors
    /// It could not be written, or its mark not.
    pub fn hold(&mut self, step: usize) -> Result<PathBuf, CheckpointError> {
        self.wait()?;
        let held = if self.ranks.first() { self.checkpoints.hold(step) } else { Ok(()) };
        agree(&self.ranks, held)?;
        Ok(self.checkpoints.place(step))
    }

    /// Looks whether writing has failed, without waiting for it: called now and then, on any rank.
    ///
    /// # Errors
    /// This rank's part or another's could not be written. Earlier checkpoints are untouched.
    pub fn check(&mut self) -> Result<(), CheckpointError> {
        if self.pending.as_ref().is_some_and(JoinHandle::is_finished) { self.wait() } else { Ok(()) }
    }

    /// Waits until the checkpoint that is being written is whole.
    ///
    /// # Errors
    /// As [`CheckpointWriter::check`].
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        let Some(thread) = self.pending.take() else { return Ok(()) };
        let written = thread.join().unwrap_or_else(|_| {
            let reason = "the thread that wrote a checkpoint panicked; this is a fault of the program".into();
            Err(CheckpointError::Broken { path: self.checkpoints.folder.clone(), reason })
        });
        warn(self.progress, &written?);
        Ok(())
    }
}

/// Once all ranks have `written`, rank 0 makes a checkpoint of it. All return whether it is one.
fn make_whole(
    ranks: &Ranks,
    checkpoints: &Checkpoints,
    step: usize,
    partial: &Path,
    written: Result<(), CheckpointError>,
) -> Written {
    agree(ranks, written)?;
    agree(ranks, if ranks.first() { checkpoints.commit(partial, step) } else { Ok(()) })?;
    if ranks.first() { checkpoints.tidy() } else { Ok(Vec::new()) }
}

/// This rank's own error, or that of the first rank that has one.
fn agree(ranks: &Ranks, own: Result<(), CheckpointError>) -> Result<(), CheckpointError> {
    let reasons = ranks.gather(&own.as_ref().err().map(CheckpointError::to_string));
    own?;
    match reasons?.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
        Some((rank, reason)) => Err(CheckpointError::Elsewhere { rank, reason }),
        None => Ok(()),
    }
}

fn warn(progress: &dyn Progress, left: &[FileError]) {
    for error in left {
        progress.warn(&format!("{error}; it is no longer needed and could not be removed, the next checkpoint will try again"));
    }
}
