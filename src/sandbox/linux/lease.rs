//! Directories that belong to a running learner and are swept once it has gone, however it went.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, Mode, OFlags};

/// All leased directories are called this, a process number and a count.
const PREFIX: &str = "learner-run-";

static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Makes a directory below `parent` and leases it: the lease is a lock that the kernel frees when its holder ends. (A process
/// number alone would not do: it may be another's by now, or that of a process in another container.)
pub fn create(parent: &Path, make: impl Fn(&Path) -> io::Result<()>) -> io::Result<(PathBuf, OwnedFd)> {
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
        match make(&path) {
            Ok(()) => {}
            // Left behind by a process with our number that was killed, or of one in another container.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
        // Between these two steps somebody's sweep may have taken it for a leftover.
        if let Some(lease) = lock(&path)
            && path.exists()
        {
            return Ok((path, lease));
        }
    }
}

/// Calls `remove` for each directory below `parent` that is this user's and whose learner has gone.
pub fn sweep(parent: &Path, remove: impl Fn(&Path)) {
    use std::os::unix::fs::MetadataExt;
    let user = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let named = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        // Whoever else made it could change what it holds while it is removed.
        let own = named && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
        if own && let Some(_lease) = lock(&entry.path()) {
            remove(&entry.path());
        }
    }
}

fn lock(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leftovers_are_swept() {
        let place = tempfile::tempdir().unwrap();
        let make = |path: &Path| fs::create_dir(path);
        let ((alive, _lease), (left, dropped)) = (create(place.path(), make).unwrap(), create(place.path(), make).unwrap());
        drop(dropped); // as the kernel does when its process is killed
        let foreign = place.path().join("learner-running");
        fs::create_dir(&foreign).unwrap();
        sweep(place.path(), |path| fs::remove_dir(path).unwrap());
        assert_eq!((alive.exists(), left.exists(), foreign.exists()), (true, false, true));
    }
}
