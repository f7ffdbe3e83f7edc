//! Tier B's directory of a run, on a file system of the machine.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::wire::Size;
use super::{copy, lease};
use crate::sandbox::Limits;

/// A directory with `work` and `tmp` in it, removed when dropped.
pub struct WorkDirectory {
    path: PathBuf,
    /// What its tree took when it was copied.
    tree: Size,
    _lease: OwnedFd,
}

impl WorkDirectory {
    /// Makes one whose contents belong to `owner` (absent: the caller), with a copy of `tree` to work in.
    pub fn create(owner: Option<u32>, tree: Option<&Path>) -> Result<WorkDirectory, String> {
        let failed = |error: io::Error| error.to_string();
        // The directory stays ours: nobody else may rename what is in it, and a sweep knows it by its owner.
        let make = |path: &Path| fs::DirBuilder::new().mode(0o711).create(path);
        let (path, lease) = lease::create(&std::env::temp_dir(), make).map_err(failed)?;
        let tree_size = tree.map(copy::size_of).transpose();
        let directory = WorkDirectory { path, tree: tree_size.clone().ok().flatten().unwrap_or_default(), _lease: lease };
        tree_size?;
        for name in ["work", "tmp"] {
            let place = directory.path.join(name);
            fs::DirBuilder::new().mode(0o700).create(&place).map_err(failed)?;
            if owner.is_some() {
                std::os::unix::fs::chown(place, owner, owner).map_err(failed)?;
            }
        }
        if let Some(tree) = tree {
            copy::copy_tree(tree, &directory.path.join("work"), owner)?;
        }
        Ok(directory)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it may grow to: its tree does not count against the limits.
    pub fn room(&self, limits: &Limits) -> Size {
        Size {
            bytes: limits.workspace_bytes.saturating_add(self.tree.bytes),
            entries: limits.workspace_entries().saturating_add(self.tree.entries),
        }
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        // What cannot be removed (a full or read-only disk) stays in the temporary directory, in nobody's way.
        let _ = remove_tree(&self.path);
    }
}

/// Removes the directories of a learner that was killed.
pub fn sweep() {
    lease::sweep(&std::env::temp_dir(), |path| drop(remove_tree(path)));
}

/// Whether the tree, with `unlinked_bytes` of files that it does not show any more, holds more bytes or entries than `most`.
/// Looks at no more entries than that. Below a path that is too long to be opened nothing can be counted: such a tree is too
/// large. A directory that its owner has closed is opened for the moment, since what the run keeps in it counts.
pub fn exceeds(directory: &Path, most: Size, unlinked_bytes: u64) -> bool {
    enum Step {
        Look(PathBuf),
        Close(PathBuf, fs::Permissions),
    }
    let (mut bytes, mut entries) = (unlinked_bytes, 0u64);
    let mut steps = vec![Step::Look(directory.to_path_buf())];
    while bytes <= most.bytes && entries <= most.entries {
        let next = match steps.pop() {
            None => return false,
            Some(Step::Close(path, permissions)) => {
                let _ = fs::set_permissions(path, permissions); // it may have gone by now
                continue;
            }
            Some(Step::Look(next)) => next,
        };
        let found = match fs::symlink_metadata(&next) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => return true,
            Err(_) => continue, // it has just gone
        };
        if found.permissions().mode() & 0o500 != 0o500 && !rustix::process::geteuid().is_root() {
            let _ = fs::set_permissions(&next, fs::Permissions::from_mode(0o700));
            steps.push(Step::Close(next.clone(), found.permissions()));
        }
        let Ok(listing) = fs::read_dir(&next) else { continue };
        for entry in listing.flatten() {
            let Ok(found) = entry.metadata() else { continue };
            entries += 1;
            bytes += found.blocks() * 512;
            if found.is_dir() {
                steps.push(Step::Look(entry.path()));
            }
            if entries > most.entries {
                break;
            }
        }
    }
    true
}

/// Removes a tree of any depth with few open descriptors, through directories that forbid entry: every directory met is
/// made enterable and moved up to the top before its contents are looked at, so that no path grows long.
pub fn remove_tree(top: &Path) -> io::Result<()> {
    let mut moved = 0u64;
    fs::set_permissions(top, fs::Permissions::from_mode(0o700))?;
    loop {
        let mut directories = Vec::new();
        for entry in fs::read_dir(top)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() { directories.push(entry.path()) } else { fs::remove_file(entry.path())? }
        }
        if directories.is_empty() {
            return fs::remove_dir(top);
        }
        for directory in directories {
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
            for entry in fs::read_dir(&directory)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    // Moving a directory rewrites its "..", for which it must be writable.
                    fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o700))?;
                    moved += 1;
                    fs::rename(entry.path(), top.join(format!(".moved-{}-{moved}", std::process::id())))?;
                } else {
                    fs::remove_file(entry.path())?;
                }
            }
            fs::remove_dir(&directory)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, OFlags};

    use super::*;

    #[test]
    fn removes_deep_and_closed_trees() {
        let directory = WorkDirectory::create(None, None).unwrap();
        let path = directory.path().to_path_buf();
        // Deeper than any path can name, and than there may be open files.
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut deep = rustix::fs::open(path.join("work"), flags, Mode::empty()).unwrap();
        for _ in 0..3_000 {
            rustix::fs::mkdirat(&deep, "d", Mode::from_raw_mode(0o700)).unwrap();
            deep = rustix::fs::openat(&deep, "d", flags, Mode::empty()).unwrap();
        }
        drop(deep);
        assert!(exceeds(&path, Size { bytes: u64::MAX, entries: u64::MAX }, 0), "what is too deep to be seen is too much");
        let closed = path.join("work/closed");
        fs::create_dir_all(closed.join("inner")).unwrap();
        fs::write(closed.join("file"), "x").unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        std::os::unix::fs::symlink("/", path.join("work/link")).unwrap();
        drop(directory);
        assert!(!path.exists());
    }

    #[test]
    fn size_is_watched() {
        let directory = WorkDirectory::create(None, None).unwrap();
        let most = Size { bytes: 1 << 20, entries: 1024 };
        fs::write(directory.path().join("work/small"), vec![1; 1 << 19]).unwrap();
        assert!(!exceeds(directory.path(), most, 0));
        assert!(exceeds(directory.path(), most, 1 << 20));
        fs::write(directory.path().join("work/large"), vec![1; 1 << 20]).unwrap();
        assert!(exceeds(directory.path(), most, 0));
    }

    #[test]
    fn what_cannot_be_counted_is_too_much() {
        let directory = WorkDirectory::create(None, None).unwrap();
        let most = Size { bytes: 1 << 20, entries: 1024 };
        let closed = directory.path().join("work/closed");
        fs::create_dir(&closed).unwrap();
        fs::write(closed.join("large"), vec![1; 2 << 20]).unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        assert!(exceeds(directory.path(), most, 0));
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_file(closed.join("large")).unwrap();
        assert!(!exceeds(directory.path(), most, 0));
    }
}
