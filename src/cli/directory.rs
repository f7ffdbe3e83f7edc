//! The directory of a run: found, checked against the settings given, entered and locked.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::CliError;
use super::train::TrainArguments;
use crate::config::{Layers, RunFile};
use crate::stage::{CHECKPOINTS, Settings, Stage, StageKind};
use crate::train::{Checkpoints, write_atomically};
use crate::types::bytes;

/// The directory of a run and how it is entered.
pub struct RunDirectory {
    pub path: PathBuf,
    pub resumes: bool,
}

/// Every setting of a run, written last: a directory without it is no run.
pub const RUN_FILE: &str = "run.toml";

/// The run file and the directory, checked against each other. Nothing is written.
pub fn open(arguments: &TrainArguments) -> Result<(RunFile, RunDirectory), CliError> {
    let given = arguments.settings.resolve()?;
    let path = arguments.out.clone().unwrap_or_else(|| Path::new("runs").join(&given.run.name));
    let run_file_path = path.join(RUN_FILE);
    if run_file_path.exists() {
        if !arguments.resume {
            return Err(CliError::Refused(format!(
                "{} already holds a run: add --resume to go on with it, or --out DIR to start another",
                path.display()
            )));
        }
        let stored = Layers::from_file(&run_file_path).finish().map_err(CliError::refused)?;
        let value = |run_file: &RunFile| serde_json::to_value(run_file).unwrap_or(Value::Null);
        let difference = first_difference(&value(&stored), &value(&given)).filter(|_| !arguments.settings.none_given());
        if let Some((key, was, is)) = difference {
            return Err(CliError::Refused(format!(
                "{} differs from the settings given: {key} was {was}, given is {is}; --resume goes on with a run as it was, so leave them out or choose another --out",
                run_file_path.display(),
            )));
        }
        return Ok((stored, RunDirectory { path, resumes: true }));
    }
    // What a start that was killed at once left of its run.toml is nobody's.
    let unfinished = |name: &str| name.starts_with(RUN_FILE) && name.ends_with(".partial");
    let holds_other = |name: &std::ffi::OsStr| !name.to_str().is_some_and(unfinished);
    match std::fs::read_dir(&path) {
        Ok(entries) => {
            if entries.flatten().any(|entry| holds_other(&entry.file_name())) {
                return Err(CliError::Refused(format!("{} is not empty and holds no run: choose another --out", path.display())));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(CliError::Refused(format!("{}: {error} (choose another --out)", path.display()))),
    }
    Ok((given, RunDirectory { path, resumes: false }))
}

/// The first key on which two run files differ, with its value in each.
pub fn first_difference(left: &Value, right: &Value) -> Option<(String, Value, Value)> {
    fn walk(prefix: &str, left: &Value, right: &Value) -> Option<(String, Value, Value)> {
        match (left, right) {
            (Value::Object(left), Value::Object(right)) => {
                let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
                keys.into_iter().find_map(|key| {
                    let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&name, left.get(key).unwrap_or(&Value::Null), right.get(key).unwrap_or(&Value::Null))
                })
            }
            (left, right) if left == right => None,
            (left, right) => Some((prefix.to_owned(), left.clone(), right.clone())),
        }
    }
    walk("", left, right)
}

/// Locks a run that is gone on with, then finds its newest whole checkpoint: while another learner is at work there may soon be a newer
/// one. The lock holds as long as the file is open.
pub fn lock_and_choose(run_file: &RunFile, directory: &RunDirectory) -> Result<(Option<File>, Option<PathBuf>), CliError> {
    if !directory.resumes {
        return Ok((None, None));
    }
    let lock = lock(&directory.path)?;
    let checkpoints = Checkpoints::new(directory.path.join(CHECKPOINTS), run_file.checkpoint.keep);
    let newest = checkpoints.latest().map_err(CliError::failed)?.map(|(path, _)| path);
    Ok((Some(lock), newest))
}

/// Checks the disk. Creates the directory of a run that starts, its run file last (a directory without one is no run), and locks it for
/// as long as the returned file is open; one that is gone on with has been locked already.
pub fn enter(directory: &RunDirectory, run_file: &RunFile, disk: u64) -> Result<Option<File>, CliError> {
    let path = &directory.path;
    if directory.resumes {
        check_disk(path, disk.saturating_sub(bytes_in(&path.join(CHECKPOINTS))))?;
        return Ok(None);
    }
    check_disk(path, disk)?;
    std::fs::create_dir_all(path)
        .map_err(|error| CliError::Refused(format!("{}: {error} (choose another --out)", path.display())))?;
    let text = run_file.to_toml().map_err(CliError::Failed)?;
    write_atomically(&path.join(RUN_FILE), text.as_bytes()).map_err(CliError::refused)?;
    lock(path).map(Some)
}

/// Two learners in one directory would undo each other's work.
fn lock(path: &Path) -> Result<File, CliError> {
    let run_file_path = path.join(RUN_FILE);
    let refused = |error: &dyn std::fmt::Display| CliError::Refused(format!("{}: {error}", run_file_path.display()));
    let lock = File::open(&run_file_path).map_err(|error| refused(&error))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(CliError::Refused(format!("{}: another learner is at work on this run", path.display())))
        }
        Err(std::fs::TryLockError::Error(error)) => Err(refused(&error)),
    }
}

/// Bytes of all files below a folder; what cannot be read counts as nothing.
fn bytes_in(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_in(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Bytes the run directory will take at most: kept checkpoints and one being written, and some room for logs.
pub fn disk_needed(run_file: &RunFile, stages: &[Stage], tasks: usize, parameters: usize) -> u64 {
    const METRICS: u64 = 4_000_000;
    // A token's id, mark, log-probability and text, as JSON.
    const TOKEN: u64 = 30;
    // Weights and two moments of Adam, f32.
    let checkpoint = parameters as u64 * 3 * 4;
    let episodes = |stage: &Stage| {
        let Settings { rft, rl, evaluate, agent, episodes_kept, .. } = &stage.settings;
        let episodes = match stage.kind {
            StageKind::Evaluate => *episodes_kept,
            StageKind::Rft => rft.attempts(tasks),
            StageKind::Rl => episodes_kept * (rl.steps + rl.steps / evaluate.every.max(1)),
            StageKind::Curriculum(_) => 0,
        };
        episodes as u64 * agent.max_tokens as u64 * TOKEN
    };
    let episodes: u64 = stages.iter().map(episodes).sum();
    // The weights that a KL term pulls towards.
    let pulled = |stage: &&Stage| stage.kind == StageKind::Rl && stage.settings.rl.loss.kl.coefficient != 0.0;
    let references = stages.iter().filter(pulled).count() as u64;
    checkpoint * (run_file.checkpoint.keep as u64 + 1 + references) + episodes + METRICS
}

/// Refuses a disk that will not hold the run.
fn check_disk(path: &Path, needed: u64) -> Result<(), CliError> {
    let Some(existing) =
        std::path::absolute(path).ok().and_then(|path| path.ancestors().find(|path| path.exists()).map(Path::to_path_buf))
    else {
        return Ok(());
    };
    #[cfg(unix)]
    {
        let statistics =
            rustix::fs::statvfs(&existing).map_err(|error| CliError::Refused(format!("{}: {error}", existing.display())))?;
        let free = statistics.f_bavail * statistics.f_frsize;
        if free < needed {
            return Err(CliError::Refused(format!(
                "{}: the run needs up to {}, only {} are free there (free some space, choose another --out or lower checkpoint.keep)",
                path.display(),
                bytes(needed),
                bytes(free)
            )));
        }
    }
    Ok(())
}
