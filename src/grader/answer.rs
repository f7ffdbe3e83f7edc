//! What may be an answer, and the tree it is graded in.

use crate::task::{is_safe_path, paths_collide, touched_paths};
use crate::types::{Task, Workspace};

/// More than any mended repository of a task weighs. Without it an answer could fill the sandbox's disk while it is being laid out,
/// which would look like a fault of ours.
const ANSWER_BYTES: usize = 16 << 20;

/// Files that decide how Python starts or how tests are collected.
const INFRASTRUCTURE: [&str; 10] = [
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "pyvenv.cfg",
    "__main__.py",
];

/// Refuses an answer that goes beyond changing or removing the task's files and creating those that the gold patch creates.
/// The reason names the file.
pub fn check(task: &Task, answer: &Workspace) -> Result<(), String> {
    if answer.iter().map(|(path, text)| path.len() + text.len()).sum::<usize>() > ANSWER_BYTES {
        return Err(format!("the answer is larger than {} MiB", ANSWER_BYTES >> 20));
    }
    let gold = touched_paths(&task.gold_patch).unwrap_or_default();
    for (path, text) in answer.iter().filter(|(path, text)| !is_unchanged_visible_test(task, path, text)) {
        if let Some(test) = task.hidden_tests.keys().chain(task.visible_tests.keys()).find(|test| paths_collide(path, test)) {
            return Err(format!("the answer touches {path}, which collides with the test file {test}"));
        }
        if is_infrastructure(path) && task.files.get(path) != Some(text) {
            return Err(format!("the answer changes {path}, which decides how tests run"));
        }
        if !task.files.contains_key(path) && !gold.contains(path) || !is_safe_path(path) {
            return Err(format!("the answer adds {path:?}, which is not among the files of the task"));
        }
    }
    match task.files.keys().find(|path| is_infrastructure(path) && !answer.contains_key(*path)) {
        Some(path) => Err(format!("the answer removes {path}, which decides how tests run")),
        None => Ok(()),
    }
}

/// The clean tree of a run: the answer without test files, and then `tests`.
pub fn laid_out(task: &Task, answer: &Workspace, tests: &Workspace) -> Workspace {
    let own = answer.iter().filter(|(path, text)| !is_unchanged_visible_test(task, path, text));
    own.chain(tests).map(|(path, text)| (path.clone(), text.clone())).collect()
}

/// An agent's workspace may show the visible tests.
fn is_unchanged_visible_test(task: &Task, path: &str, text: &str) -> bool {
    task.visible_tests.get(path).is_some_and(|visible| visible == text)
}

fn is_infrastructure(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    INFRASTRUCTURE.contains(&name) || name.ends_with(".pth") || name.ends_with(".pyc") || name.ends_with(".so")
}
