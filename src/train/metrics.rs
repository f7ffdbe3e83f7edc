//! `metrics.jsonl`: one JSON object per step, appended as steps end and cut back to the checkpoint on resume.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::files::FileError;
use crate::types::sync_folder;

pub struct MetricsLog {
    path: PathBuf,
    file: File,
    lines: usize,
}

impl MetricsLog {
    /// Opens the log and cuts it to its first `keep` lines: what came after belongs to steps that are done again.
    ///
    /// # Errors
    /// When the file cannot be read or written, or holds fewer than `keep` lines.
    pub fn open(path: &Path, keep: usize) -> Result<MetricsLog, FileError> {
        let error = |source| FileError::new(path, source);
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(error)?;
        // A file that is new lasts only with its entry in the folder.
        sync_folder(path.parent().unwrap_or(Path::new("."))).map_err(error)?;
        let mut reader = BufReader::new(&mut file);
        let mut bytes = 0;
        for line in 0..keep {
            let mut text = Vec::new();
            bytes += reader.read_until(b'\n', &mut text).map_err(error)?;
            if text.last() != Some(&b'\n') {
                let reason = format!("the checkpoint counts {keep} lines, only {line} are here");
                return Err(error(std::io::Error::new(std::io::ErrorKind::InvalidData, reason)));
            }
        }
        file.set_len(bytes as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(error)?;
        Ok(MetricsLog { path: path.to_path_buf(), file, lines: keep })
    }

    pub fn append(&mut self, metrics: &impl Serialize) -> Result<(), FileError> {
        let write = |file: &mut File| -> std::io::Result<()> {
            let mut line = serde_json::to_vec(metrics)?;
            line.push(b'\n');
            file.write_all(&line)
        };
        write(&mut self.file).map_err(|source| FileError::new(&self.path, source))?;
        self.lines += 1;
        Ok(())
    }

    /// Lines written so far, and the file made to last: called before a checkpoint notes the number.
    pub fn commit(&mut self) -> Result<usize, FileError> {
        self.file.sync_data().map_err(|source| FileError::new(&self.path, source))?;
        Ok(self.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resuming_cuts_to_the_counted_lines_and_refuses_a_shorter_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::open(&path, 0).unwrap();
        for step in 0..3 {
            log.append(&serde_json::json!({ "step": step })).unwrap();
        }
        assert_eq!(log.commit().unwrap(), 3);
        log.append(&serde_json::json!({ "step": "lost" })).unwrap();
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"torn").unwrap();
        let mut log = MetricsLog::open(&path, 3).unwrap();
        log.append(&serde_json::json!({ "step": 3 })).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":0}\n{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        assert!(MetricsLog::open(&path, 5).is_err());
    }
}
