//! Task files and the built-in task families.
//!
//! ```text
//! tasks.jsonl -> read_tasks -> [Task]        every line checked, errors name file, line and field
//! bugfix::generate -> [Task] -> write_tasks  atomically
//! ```
//!
//! The format is described in `docs/tasks.md`.

pub mod bugfix;
mod builtin;
mod format;
mod patch;
mod repository;

pub use builtin::{BuiltinPools, builtin, builtin_tokenizer, builtin_tokenizer_json, make_builtin, make_builtin_tokenizer};
pub use format::{check_task, parse_tasks, read_tasks, render_tasks, write_tasks};
pub(crate) use format::{is_safe_path, paths_collide};
pub use patch::{apply_gold, apply_patch, touched_paths};
pub(crate) use repository::file_as_found;

/// What can be wrong with a task file. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    #[error("{path}: cannot read the task file: {reason}")]
    Read { path: String, reason: String },
    #[error("{path}:{line}: {reason}")]
    Line { path: String, line: usize, reason: String },
    #[error("{path}: cannot write the task file: {reason}")]
    Write { path: String, reason: String },
    #[error("task {id}: {reason}")]
    Invalid { id: String, reason: String },
    #[error(
        "the bugfix family has no more than {found} different tasks of level {level}, split {split}, but {asked} were asked for; \
         ask for fewer"
    )]
    Exhausted { level: &'static str, split: &'static str, found: usize, asked: usize },
}
