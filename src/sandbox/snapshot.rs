//! Prepared trees of files that many runs start from.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::SandboxError;

/// A directory of the machine, such as a checkout of a repository with its dependencies, that runs share read-only: none gets
/// to change it, and in tier A none costs a copy. Cheap to clone. Whoever made the directory keeps it as it is for as long as
/// a run may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    directory: Arc<Directory>,
}

#[derive(Debug, PartialEq, Eq)]
struct Directory {
    path: PathBuf,
    user: u32,
    group: u32,
}

impl Snapshot {
    /// The directory as it is. Files that belong to the directory's own user and group appear as the run's own; those of
    /// others stay others' and cannot be changed.
    ///
    /// # Errors
    /// [`SandboxError::Tree`] if it cannot be read or is no directory.
    pub fn of_directory(path: impl AsRef<Path>) -> Result<Snapshot, SandboxError> {
        let path = path.as_ref();
        let failed = |found: String| SandboxError::Tree { path: path.to_path_buf(), found };
        // Resolved now: later it is opened from another process, with another current directory.
        let path = fs::canonicalize(path).map_err(|error| failed(error.to_string()))?;
        let found = fs::metadata(&path).map_err(|error| failed(error.to_string()))?;
        if !found.is_dir() {
            return Err(failed("is not a directory".to_string()));
        }
        fs::read_dir(&path).map_err(|error| failed(error.to_string()))?;
        Ok(Snapshot { directory: Arc::new(Directory { path, user: found.uid(), group: found.gid() }) })
    }

    /// Absolute, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.directory.path
    }

    /// The directory's user and group, whose files become the run's own.
    pub(super) fn owner(&self) -> (u32, u32) {
        (self.directory.user, self.directory.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, "x").unwrap();
        let line = |path: &Path| Snapshot::of_directory(path).unwrap_err().to_string();
        assert_eq!(
            line(&file),
            format!(
                "sandbox: {} cannot be a tree for runs: is not a directory; give a directory that can be read",
                file.display()
            )
        );
        assert!(line(&place.path().join("none")).contains("No such file"));
        let snapshot = Snapshot::of_directory(place.path()).unwrap();
        assert_eq!(snapshot, snapshot.clone());
        assert!(snapshot.path().is_absolute());
    }
}
