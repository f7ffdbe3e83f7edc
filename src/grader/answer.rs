//! What may be an answer, and what of it is laid down.

use std::path::Path;

use super::standard::shadowed;
use crate::task::{apply_patch, file_as_found, is_safe_path, paths_collide, touched_paths};
use crate::types::{Task, Workspace};

/// More than any mended repository of a task weighs. Without it an answer could fill the sandbox's disk while it is being laid out,
/// which would look like a fault of ours.
const ANSWER_BYTES: usize = 16 << 20;

/// Files that decide how Python starts or how tests are collected.
const INFRASTRUCTURE: [&str; 12] = [
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "pyvenv.cfg",
    "entry_points.txt",
    "__main__.py",
    ".coveragerc",
];
/// Compiled code and hooks of the interpreter's start.
const SUFFIXES: [&str; 6] = [".pth", ".pyc", ".pyo", ".so", ".pyd", ".egg-link"];

/// An answer that may be graded: how it differs from the repository as found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Files that the answer changes or creates.
    pub changed: Workspace,
    /// Files that it takes away.
    pub removed: Vec<String>,
    /// Test files that it had changed or created; the task's own are laid in their place.
    pub overwritten: Vec<String>,
}

/// The difference between all files of an agent's workspace and the task's own.
///
/// # Errors
/// Why it cannot be an answer; names the file.
pub fn of_workspace(task: &Task, workspace: &Workspace) -> Result<Answer, String> {
    let changed = workspace.iter().filter(|(path, text)| task.files.get(*path) != Some(text));
    // A workspace may show the visible tests.
    let changed = changed.filter(|(path, text)| task.visible_tests.get(*path) != Some(text));
    let removed = task.files.keys().filter(|path| !workspace.contains_key(*path)).cloned().collect();
    let found = |path: &str| task.files.contains_key(path);
    admit(task, changed.map(|(path, text)| (path.clone(), text.clone())).collect(), removed, found)
}

/// The difference that a unified diff makes to the repository and its visible tests.
///
/// # Errors
/// What is wrong with the patch, or why its outcome cannot be an answer.
pub fn of_patch(task: &Task, patch: &str) -> Result<Answer, String> {
    if patch.len() > ANSWER_BYTES {
        return Err(format!("the patch is larger than {} MiB", ANSWER_BYTES >> 20));
    }
    let touched = touched_paths(patch).map_err(|reason| format!("the patch {reason}"))?;
    let mut before = Workspace::new();
    for path in &touched {
        if !is_safe_path(path) {
            return Err(format!("the patch has the unsafe path {path:?}; expected a relative path inside the repository"));
        }
        if let Some(text) = file_as_found(task, path).map_err(|reason| format!("the patch {reason}"))? {
            before.insert(path.clone(), text);
        }
    }
    let after = apply_patch(&before, patch).map_err(|reason| format!("the patch {reason}"))?;
    // A test file that is removed comes back.
    let removed = before.keys().filter(|path| !after.contains_key(*path) && !is_test(task, path)).cloned().collect();
    let changed = after.into_iter().filter(|(path, text)| before.get(path) != Some(text)).collect();
    admit(task, changed, removed, |path| before.contains_key(path))
}

/// Sorts and judges the changes; `found`: whether the repository had a file before.
fn admit(task: &Task, changed: Workspace, removed: Vec<String>, found: impl Fn(&str) -> bool) -> Result<Answer, String> {
    if changed.iter().map(|(path, text)| path.len() + text.len()).sum::<usize>() > ANSWER_BYTES {
        return Err(format!("the answer is larger than {} MiB", ANSWER_BYTES >> 20));
    }
    let mut answer = Answer::default();
    for (path, text) in changed {
        if !is_safe_path(&path) {
            return Err(format!("the answer has the unsafe path {path:?}"));
        }
        if is_test(task, &path) {
            answer.overwritten.push(path);
            continue;
        }
        if let Some(test) = task.hidden_tests.keys().chain(task.visible_tests.keys()).find(|test| paths_collide(&path, test)) {
            return Err(format!("the answer has {path}, which collides with the test file {test}"));
        }
        check_change(task, &path, found(&path))?;
        answer.changed.insert(path, text);
    }
    for path in removed {
        if is_infrastructure(&path) && !allowed(task, &path) {
            return Err(format!("the answer removes {path}, which decides how tests run"));
        }
        answer.removed.push(path);
    }
    Ok(answer)
}

/// May an answer change or create this file?
fn check_change(task: &Task, path: &str, found: bool) -> Result<(), String> {
    if is_infrastructure(path) && !allowed(task, path) {
        let verb = if found { "changes" } else { "adds" };
        return Err(format!("the answer {verb} {path}, which decides how tests run"));
    }
    match shadowed(path) {
        Some(module) if !found && !has_module(task, module) => {
            Err(format!("the answer adds {path}, which would stand before the module {module} of Python or its test tools"))
        }
        _ => Ok(()),
    }
}

/// The task's own code has a module of this name: whoever adds to it shadows nothing more.
fn has_module(task: &Task, module: &str) -> bool {
    let in_repository = |repository: &Path| repository.join(module).is_dir() || repository.join(format!("{module}.py")).is_file();
    task.files.keys().any(|path| shadowed(path) == Some(module)) || task.repository.as_deref().is_some_and(in_repository)
}

fn is_test(task: &Task, path: &str) -> bool {
    task.hidden_tests.contains_key(path) || task.visible_tests.contains_key(path)
}

fn allowed(task: &Task, path: &str) -> bool {
    task.allow_infrastructure.iter().any(|allowed| allowed == path)
}

fn is_infrastructure(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let in_directory =
        |part: &str| part == "__pycache__" || part == ".git" || part.ends_with(".dist-info") || part.ends_with(".egg-info");
    INFRASTRUCTURE.contains(&name) || SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) || path.split('/').any(in_directory)
}
