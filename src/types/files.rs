//! Replacing a file so that a reader finds the old content or the new, never half of it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Lets `content` write a temporary neighbour of `path`, syncs it and renames it into place. After an error `path` is as it was.
pub fn replace_file(path: &Path, content: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.file_name().ok_or_else(|| io::Error::other("the path names no file"))?.to_os_string();
    // Two processes that replace the same file do not write into each other's.
    name.push(format!(".{}.partial", std::process::id()));
    let partial = path.with_file_name(name);
    let write = || {
        let mut file = File::create(&partial)?;
        content(&mut file)?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        sync_folder(path.parent().unwrap_or(Path::new(".")))
    };
    write().inspect_err(|_| {
        // The error of the write is what matters; nobody reads what cannot be removed either.
        let _ = fs::remove_file(&partial);
    })
}

/// [`replace_file`] by these bytes.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_file(path, |file| file.write_all(bytes))
}

/// Makes renames inside `folder` last.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })?.sync_all()
}
