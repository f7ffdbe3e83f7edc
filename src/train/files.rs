//! What went wrong with a file of a run, for people.

use std::io;
use std::path::{Path, PathBuf};

/// A file or folder that could not be written or read, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}{}", path.display(), hint(source))]
pub struct FileError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// What to do about the commonest reasons.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => " (free some space or choose another --out)",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => " (choose another --out)",
        _ => "",
    }
}

impl FileError {
    pub fn new(path: &Path, source: io::Error) -> FileError {
        FileError { path: path.to_path_buf(), source }
    }
}

/// [`crate::types::write_atomically`], with an error that names the file and says what to do.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), FileError> {
    crate::types::write_atomically(path, content).map_err(|source| FileError::new(path, source))
}
