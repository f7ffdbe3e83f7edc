//! Writing a file so that a reader finds the old content or the new, never half of it.

use std::fs::{self, File};
use std::io::{self, Write};
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

/// Writes `content` to `path` through a temporary neighbour that is synced and renamed.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let temporary = temporary_name(path);
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder(path.parent().unwrap_or(Path::new(".")))
    };
    write().map_err(|source| {
        // The write error is what matters; a leftover that cannot be removed either is overwritten next time.
        let _ = fs::remove_file(&temporary);
        FileError::new(path, source)
    })
}

fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// Makes renames inside `folder` last.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })?.sync_all()
}
