//! Weights as servers get them: a directory on a file system that the server's node sees.

use std::path::{Path, PathBuf};

use super::ServersError;

/// A Hugging Face directory and the name of its weights' version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Absolute, since servers have working directories of their own.
    pub directory: PathBuf,
    /// Which weights these are, for example `step-12`; servers that can repeat it do.
    pub version: String,
    /// Of all safetensors files.
    pub bytes: u64,
}

impl Weights {
    /// Looks at a directory: config.json and at least one safetensors file must be there. It must stay until newer weights are loaded,
    /// because a server that is restarted starts from it.
    ///
    /// # Errors
    /// [`ServersError::Directory`] with what is missing.
    pub fn of(directory: &Path, version: impl Into<String>) -> Result<Weights, ServersError> {
        let problem = |reason: String| ServersError::Directory { directory: directory.to_path_buf(), reason };
        let absolute = directory.canonicalize().map_err(|error| problem(error.to_string()))?;
        if absolute.to_str().is_none() {
            return Err(problem("its path is not UTF-8, and servers are told paths as text".into()));
        }
        if !absolute.join("config.json").is_file() {
            return Err(problem("holds no config.json".into()));
        }
        let mut bytes = 0;
        let mut files = 0;
        for entry in std::fs::read_dir(&absolute).map_err(|error| problem(error.to_string()))? {
            let path = entry.map_err(|error| problem(error.to_string()))?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                bytes += std::fs::metadata(&path).map_err(|error| problem(error.to_string()))?.len();
                files += 1;
            }
        }
        if files == 0 {
            return Err(problem("holds no .safetensors file".into()));
        }
        Ok(Weights { directory: absolute, version: version.into(), bytes })
    }
}
