//! Repositories that lie in a directory instead of in the task file.

use std::fs;
use std::path::{Path, PathBuf};

use super::is_safe_path;
use crate::types::Task;

/// Larger files are read by no one here.
const MOST_BYTES: u64 = 16 << 20;

/// The text of a file of the repository or of a visible test; `None` if there is no such file.
///
/// # Errors
/// Says why a file that is there cannot be read as text: a link on the way, no plain file, not UTF-8, too large.
pub(crate) fn file_as_found(task: &Task, path: &str) -> Result<Option<String>, String> {
    if let Some(text) = task.files.get(path).or_else(|| task.visible_tests.get(path)) {
        return Ok(Some(text.clone()));
    }
    match &task.repository {
        Some(repository) => read_beneath(repository, path),
        None => Ok(None),
    }
}

fn read_beneath(directory: &Path, path: &str) -> Result<Option<String>, String> {
    if !is_safe_path(path) {
        return Err(format!("touches the unsafe path {path:?}"));
    }
    let mut place = directory.to_path_buf();
    for part in path.split('/') {
        place.push(part);
        match fs::symlink_metadata(&place) {
            Ok(found) if found.file_type().is_symlink() => {
                return Err(format!("touches {path}, which leads through a symbolic link"));
            }
            Ok(_) => {}
            Err(_) => return Ok(None),
        }
    }
    let unreadable = |error: std::io::Error| format!("touches {path}, which cannot be read: {error}");
    let found = fs::metadata(&place).map_err(unreadable)?;
    if !found.is_file() || found.len() > MOST_BYTES {
        return Err(format!("touches {path}, which is no plain file of at most {} MiB", MOST_BYTES >> 20));
    }
    fs::read_to_string(&place).map(Some).map_err(unreadable)
}

/// The directory that a task file at `file` means by `repository`.
///
/// # Errors
/// If it is not a relative path, or no directory is there.
pub(super) fn resolve(file: &Path, repository: &Path) -> Result<PathBuf, String> {
    let name = repository.to_string_lossy();
    if !is_safe_path(&name) {
        return Err(format!("field \"repository\" is {name:?}; expected a relative path with \"/\" and without \"..\""));
    }
    let place = file.parent().unwrap_or(Path::new("")).join(repository);
    let place = fs::canonicalize(&place).map_err(|error| format!("field \"repository\": {}: {error}", place.display()))?;
    if place.is_dir() { Ok(place) } else { Err(format!("field \"repository\": {} is not a directory", place.display())) }
}
