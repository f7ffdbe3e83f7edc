//! Copies of snapshots, for tier B and for kernels that refuse an overlay.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::wire::Size;

/// What a copy of a tree takes.
///
/// # Errors
/// One line that names what cannot be read.
pub fn size_of(tree: &Path) -> Result<Size, String> {
    let mut size = Size::default();
    let mut waiting = vec![tree.to_path_buf()];
    while let Some(next) = waiting.pop() {
        let entries = fs::read_dir(&next).map_err(|error| format!("{}: {error}", next.display()))?;
        for entry in entries {
            let found = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)));
            let (place, found) = found.map_err(|error| format!("{}: {error}", next.display()))?;
            size.entries += 1;
            // Whole pages, of which a small file takes one.
            size.bytes += found.len().next_multiple_of(4096);
            if found.is_dir() {
                waiting.push(place);
            }
        }
    }
    Ok(size)
}

/// Copies a tree into an empty directory in which nothing runs yet. Blocks are shared where the file system can do that; times
/// and permissions are kept. `owner` (absent: the caller) gets everything.
///
/// # Errors
/// One line that names what cannot be copied: devices, sockets and pipes cannot.
pub fn copy_tree(tree: &Path, to: &Path, owner: Option<u32>) -> Result<(), String> {
    let mut waiting: Vec<(PathBuf, PathBuf)> = vec![(tree.to_path_buf(), to.to_path_buf())];
    let mut directories = Vec::new();
    while let Some((from, to)) = waiting.pop() {
        let failed = |error: io::Error| format!("copy of {}: {error}", from.display());
        for entry in fs::read_dir(&from).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            let failed = |error: io::Error| format!("copy of {}: {error}", from.display());
            let found = entry.metadata().map_err(failed)?;
            copy_one(&from, &to, &found, owner).map_err(failed)?;
            if found.is_dir() {
                directories.push((to.clone(), found.mode()));
                waiting.push((from, to));
            }
        }
    }
    // Only now: a directory that forbids writing could not have been filled.
    for (place, mode) in directories {
        fs::set_permissions(&place, fs::Permissions::from_mode(mode & 0o7777))
            .map_err(|error| format!("{}: {error}", place.display()))?;
    }
    Ok(())
}

fn copy_one(from: &Path, to: &Path, found: &fs::Metadata, owner: Option<u32>) -> io::Result<()> {
    let kind = found.file_type();
    if kind.is_symlink() {
        let target = fs::read_link(from)?;
        as_owner(owner, || symlink(target, to))
    } else if kind.is_dir() {
        as_owner(owner, || fs::DirBuilder::new().mode(0o700).create(to))
    } else if kind.is_file() {
        let source = fs::File::open(from)?;
        let copy = as_owner(owner, || fs::File::create_new(to))?;
        if rustix::fs::ioctl_ficlone(&copy, &source).is_err() {
            io::copy(&mut &source, &mut &copy)?; // no shared blocks between these two: byte by byte, in the kernel
        }
        copy.set_permissions(fs::Permissions::from_mode(found.mode() & 0o7777))?;
        copy.set_modified(found.modified()?)
    } else {
        Err(io::Error::other("is no file, directory or link"))
    }
}

/// Makes something that belongs to `owner` from the start: the file system of a run knows the ids of the run alone, and lets nobody
/// else make anything in it. Only this thread is somebody else for that moment.
fn as_owner<T>(owner: Option<u32>, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(owner) = owner else { return make() };
    let become_for_files = |user: u32, group: u32| {
        // SAFETY: these take numbers only and are the calling thread's own. What they could refuse, `make` meets.
        unsafe {
            libc::setfsgid(group);
            libc::setfsuid(user);
        }
    };
    become_for_files(owner, owner);
    let made = make();
    become_for_files(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_the_same() {
        let place = tempfile::tempdir().unwrap();
        let (tree, copy) = (place.path().join("tree"), place.path().join("copy"));
        fs::create_dir_all(tree.join("closed/inner")).unwrap();
        fs::create_dir(&copy).unwrap();
        fs::write(tree.join("closed/inner/file"), b"\0\xff".repeat(5000)).unwrap();
        symlink("/nowhere", tree.join("link")).unwrap();
        fs::set_permissions(tree.join("closed/inner/file"), fs::Permissions::from_mode(0o751)).unwrap();
        fs::set_permissions(tree.join("closed"), fs::Permissions::from_mode(0o555)).unwrap();
        assert_eq!(size_of(&tree).unwrap().entries, 4);
        copy_tree(&tree, &copy, None).unwrap();
        for name in ["closed", "closed/inner", "closed/inner/file"] {
            let (was, is) = (fs::metadata(tree.join(name)).unwrap(), fs::metadata(copy.join(name)).unwrap());
            assert_eq!(was.mode(), is.mode(), "{name}");
        }
        assert_eq!(fs::read(copy.join("closed/inner/file")).unwrap(), b"\0\xff".repeat(5000));
        assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("/nowhere"));
        rustix::fs::mknodat(rustix::fs::CWD, tree.join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        fs::remove_dir_all(&copy).unwrap_or_else(|_| super::super::workdir::remove_tree(&copy).unwrap());
        fs::create_dir(&copy).unwrap();
        assert!(copy_tree(&tree, &copy, None).unwrap_err().ends_with("pipe: is no file, directory or link"));
        fs::set_permissions(tree.join("closed"), fs::Permissions::from_mode(0o755)).unwrap();
    }
}
