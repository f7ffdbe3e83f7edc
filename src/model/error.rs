//! What can be wrong with a model directory: one line each, naming the file and what was found.

use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A configuration that cannot be read or that this program does not run.
    #[error("{}: {problem}", path.display())]
    Config { path: PathBuf, problem: String },
    /// A weights file that is damaged or does not fit the configuration.
    #[error("{}: {problem}", path.display())]
    Weights { path: PathBuf, problem: String },
    /// A tensor given by name that the model lacks or that has another size.
    #[error("tensor {name}: {problem}")]
    Tensor { name: String, problem: String },
}

impl ModelError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> ModelError {
        ModelError::Io { path: path.to_path_buf(), source }
    }
    pub(crate) fn weights(path: &Path, problem: impl Into<String>) -> ModelError {
        ModelError::Weights { path: path.to_path_buf(), problem: problem.into() }
    }
}
