//! Lays files into a directory in which a program may have run before.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::wire::{SetUpError, Step};
use super::workdir;
use crate::types::Workspace;

/// Writes each file anew below `root`. They always win: no link is followed, and whatever else has one of their names, or stands
/// where one of their directories should be, is removed. Names were checked to be relative and plain.
pub fn files(root: &Path, files: &Workspace) -> Result<(), SetUpError> {
    if files.is_empty() {
        return Ok(());
    }
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty()).step(format!("open {}", root.display()))?;
    for (name, contents) in files {
        lay(&root, Path::new(name), contents.as_bytes()).step(format!("write {name}"))?;
    }
    Ok(())
}

fn lay(root: &OwnedFd, name: &Path, contents: &[u8]) -> io::Result<()> {
    let mut directory = None;
    let mut components = name.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let Some(mut next) = components.next() else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
    for after in components {
        let inside = enter(directory.as_ref().unwrap_or(root), next)?;
        directory = Some(inside);
        next = after;
    }
    let directory = directory.as_ref().unwrap_or(root);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let create = || rustix::fs::openat(directory, next, flags, Mode::from_raw_mode(0o644));
    let file = match create() {
        Err(Errno::EXIST) => {
            remove(directory, next)?;
            create()?
        }
        other => other?,
    };
    std::fs::File::from(file).write_all(contents)
}

/// Opens a directory, made if there is none.
fn enter(directory: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat(directory, name, flags, Mode::empty());
    let make = || rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(0o755));
    match open() {
        Err(Errno::NOENT) => make()?,
        Err(Errno::NOTDIR | Errno::LOOP) => {
            remove(directory, name)?;
            make()?;
        }
        other => return Ok(other?),
    }
    Ok(open()?)
}

/// Removes whatever has the name, links themselves instead of what they lead to.
fn remove(directory: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {
            // By way of the current directory: there may be no /proc through which a descriptor could be named.
            let before = rustix::fs::open(".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            rustix::process::fchdir(directory)?;
            let removed = workdir::remove_tree(Path::new(name));
            rustix::process::fchdir(before)?;
            removed
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_win_and_no_link_is_followed() {
        let place = tempfile::tempdir().unwrap();
        let (outside, work) = (place.path().join("outside"), place.path().join("work"));
        for directory in [&outside, &work] {
            fs::create_dir(directory).unwrap();
        }
        fs::write(outside.join("file"), "untouched").unwrap();
        symlink(outside.join("file"), work.join("a")).unwrap();
        symlink(&outside, work.join("b")).unwrap();
        fs::write(work.join("c"), "a file where a directory should be").unwrap();
        fs::create_dir_all(work.join("d/inner/deep")).unwrap();
        let names = ["a", "b/file", "c/file", "d", "e/f/g"];
        let laid: Workspace = names.iter().map(|name| (name.to_string(), name.to_uppercase())).collect();
        files(&work, &laid).unwrap();
        for name in names {
            let place = work.join(name);
            assert!(fs::symlink_metadata(&place).unwrap().is_file(), "{name}");
            assert_eq!(fs::read_to_string(&place).unwrap(), name.to_uppercase());
        }
        assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "untouched");
    }
}
