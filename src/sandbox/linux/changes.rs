//! What a session has changed in its tree, read by us after hostile programs have written it.
//!
//! Every name is resolved beneath the tree and through no link (openat2(2)); its kind and sizes are known before anything is
//! opened for reading, and what is read is what was measured. Names are bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::sandbox::{Change, Now};

/// The changes of an overlay: what is in its upper directory, where a character device 0:0 stands for what is gone, and a mark
/// on a directory says that nothing below it shows through.
pub fn of_overlay(upper: &OwnedFd, tree: Option<&Path>, max_bytes: u64) -> Result<Vec<Change>, String> {
    let walk = Walk { root: upper, tree, layered: true };
    walk.changes(max_bytes)
}

/// The changes of a copy: where its names, kinds, permissions or contents are not those of the tree.
pub fn of_copy(work: &OwnedFd, tree: Option<&Path>, max_bytes: u64) -> Result<Vec<Change>, String> {
    let walk = Walk { root: work, tree, layered: false };
    walk.changes(max_bytes)
}

pub fn open_directory(place: &Path) -> Result<OwnedFd, String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(place, flags, Mode::empty()).map_err(|error| format!("{}: {error}", place.display()))
}

/// The longest name that can be resolved in one step, less a margin.
const LONGEST_NAME: usize = 4000;
/// Attributes that the overlay keeps for itself.
const OPAQUE: &str = "user.overlay.opaque";

struct Walk<'a> {
    root: &'a OwnedFd,
    tree: Option<&'a Path>,
    /// The root holds only what has changed.
    layered: bool,
}

/// By name, so that they come in order.
type Changes = BTreeMap<PathBuf, Now>;

impl Walk<'_> {
    fn changes(&self, max_bytes: u64) -> Result<Vec<Change>, String> {
        let (mut changes, mut left) = (Changes::new(), max_bytes);
        let mut waiting = vec![PathBuf::new()];
        while let Some(directory) = waiting.pop() {
            let failed = |error: io::Error| format!("changes below {:?}: {error}", directory.display());
            let listed = self.open(&directory, OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
            // What the snapshot has here and may be gone.
            let mut missing = self.missing_candidates(&directory, &listed).map_err(failed)?;
            for entry in Dir::read_from(&listed).map_err(|error| failed(error.into()))? {
                let entry = entry.map_err(|error| failed(error.into()))?;
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name == "." || name == ".." {
                    continue;
                }
                missing.remove(name.as_bytes());
                let path = directory.join(name);
                if self.look(&path, &listed, name, &mut changes, &mut left).map_err(failed)? {
                    waiting.push(path);
                }
            }
            for name in missing {
                self.gone(&directory.join(OsStr::from_bytes(&name)), &mut changes).map_err(failed)?;
            }
        }
        Ok(changes.into_iter().map(|(name, now)| Change { name: name.as_os_str().as_bytes().to_vec(), now }).collect())
    }

    /// Notes how one entry has changed. True for a directory to look into.
    fn look(&self, path: &Path, parent: &OwnedFd, name: &OsStr, changes: &mut Changes, left: &mut u64) -> io::Result<bool> {
        let found = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let was = self.tree.and_then(|tree| fs::symlink_metadata(tree.join(path)).ok());
        let kind = FileType::from_raw_mode(found.st_mode);
        if self.layered && kind == FileType::CharacterDevice && found.st_rdev == 0 {
            self.gone(path, changes)?;
            return Ok(false);
        }
        let was_directory = was.as_ref().is_some_and(fs::Metadata::is_dir);
        if kind == FileType::Directory {
            if !was_directory {
                changes.insert(path.to_path_buf(), Now::Directory);
            }
            let reachable = path.as_os_str().len() <= LONGEST_NAME;
            if !reachable {
                changes.insert(path.to_path_buf(), Now::Other);
            }
            return Ok(reachable);
        }
        if was_directory {
            self.gone(path, changes)?; // what was in it; the name itself is noted below
        }
        let now = match kind {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new())?.into_bytes();
                let same =
                    || was.as_ref().is_some_and(fs::Metadata::is_symlink) && self.link_of_tree(path) == Some(target.clone());
                if !self.layered && same() { None } else { Some(Now::Link { target }) }
            }
            FileType::RegularFile => self.file(path, was.as_ref(), found.st_size as u64, found.st_blocks as u64 * 512, left)?,
            _ => Some(Now::Other),
        };
        if let Some(now) = now {
            changes.insert(path.to_path_buf(), now);
        }
        Ok(false)
    }

    /// A regular file; `None` if it is as in the tree.
    fn file(
        &self,
        path: &Path,
        was: Option<&fs::Metadata>,
        apparent: u64,
        allocated: u64,
        left: &mut u64,
    ) -> io::Result<Option<Now>> {
        let unread = Now::Unread { apparent_bytes: apparent, allocated_bytes: allocated };
        let file = match self.open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY) {
            Ok(file) => fs::File::from(file),
            Err(error) if path.as_os_str().len() > LONGEST_NAME => {
                let _ = error;
                return Ok(Some(unread));
            }
            Err(error) => return Err(error),
        };
        let opened = file.metadata()?;
        let executable = opened.permissions().mode() & 0o100 != 0;
        let same = |was: &fs::Metadata| {
            was.is_file() && was.len() == apparent && (was.mode() & 0o100 != 0) == executable && self.same_contents(path, &file)
        };
        if was.is_some_and(same) {
            return Ok(None);
        }
        if !opened.is_file() || apparent > *left {
            return Ok(Some(unread));
        }
        io::Seek::rewind(&mut &file)?;
        let mut contents = Vec::with_capacity(apparent as usize);
        (&file).take(apparent).read_to_end(&mut contents)?;
        *left -= contents.len() as u64;
        Ok(Some(Now::File { contents, executable }))
    }

    fn same_contents(&self, path: &Path, file: &fs::File) -> bool {
        let Some(Ok(was)) = self.tree.map(|tree| fs::File::open(tree.join(path))) else { return false };
        let (mut left, mut right) = (io::BufReader::new(was), io::BufReader::new(file));
        loop {
            let (Ok(one), Ok(two)) = (io::BufRead::fill_buf(&mut left), io::BufRead::fill_buf(&mut right)) else { return false };
            let length = one.len().min(two.len());
            if length == 0 {
                return one.len() == two.len();
            }
            if one[..length] != two[..length] {
                return false;
            }
            io::BufRead::consume(&mut left, length);
            io::BufRead::consume(&mut right, length);
        }
    }

    fn link_of_tree(&self, path: &Path) -> Option<Vec<u8>> {
        Some(fs::read_link(self.tree?.join(path)).ok()?.into_os_string().as_bytes().to_vec())
    }

    /// Notes that a name of the snapshot is gone, and everything below it.
    fn gone(&self, path: &Path, changes: &mut Changes) -> io::Result<()> {
        let Some(tree) = self.tree else { return Ok(()) };
        let mut waiting = vec![path.to_path_buf()];
        while let Some(path) = waiting.pop() {
            let Ok(was) = fs::symlink_metadata(tree.join(&path)) else { continue };
            if was.is_dir() {
                for entry in fs::read_dir(tree.join(&path))? {
                    waiting.push(path.join(entry?.file_name()));
                }
            }
            changes.insert(path, Now::Removed);
        }
        Ok(())
    }

    /// Names of the snapshot in a directory of which an overlay's layer shows nothing, or a copy should show all.
    fn missing_candidates(&self, directory: &Path, listed: &OwnedFd) -> io::Result<BTreeSet<Vec<u8>>> {
        let mut names = BTreeSet::new();
        let Some(tree) = self.tree else { return Ok(names) };
        if self.layered && !is_opaque(listed) {
            return Ok(names);
        }
        match fs::symlink_metadata(tree.join(directory)) {
            Ok(was) if was.is_dir() => {}
            _ => return Ok(names),
        }
        for entry in fs::read_dir(tree.join(directory))? {
            names.insert(entry?.file_name().as_bytes().to_vec());
        }
        Ok(names)
    }

    /// Opens a name beneath the root, through no link. As an ordinary user even a file of one's own may forbid it; then its
    /// permissions are lifted for the moment of opening.
    fn open(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let open = |flags| rustix::fs::openat2(self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
        match open(flags) {
            Err(Errno::ACCESS) => {
                let handle = open(OFlags::PATH | OFlags::NOFOLLOW)?;
                let place = format!("/proc/self/fd/{}", handle.as_raw_fd());
                let mode = Mode::from_raw_mode(rustix::fs::fstat(&handle)?.st_mode & 0o7777);
                rustix::fs::chmodat(CWD, &place, mode | Mode::RUSR | Mode::XUSR, AtFlags::empty())?;
                let opened = open(flags);
                rustix::fs::chmodat(CWD, &place, mode, AtFlags::empty())?;
                Ok(opened?)
            }
            other => Ok(other?),
        }
    }
}

fn is_opaque(directory: &OwnedFd) -> bool {
    let mut value = [0u8; 8];
    matches!(rustix::fs::fgetxattr(directory, OPAQUE, &mut value[..]), Ok(length) if value[..length] == *b"y")
}
