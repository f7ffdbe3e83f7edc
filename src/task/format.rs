//! The JSONL task format: one [`Task`] a line, checked before anything else sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{TaskError, apply_gold, file_as_found, repository, touched_paths};
use crate::types::{Task, Workspace, write_atomically};

const REQUIRED: [&str; 5] = ["id", "issue", "hidden_tests", "FAIL_TO_PASS", "gold_patch"];

/// Reads and checks a task file. Empty lines are skipped; the first thing wrong is the error.
pub fn read_tasks(path: &Path) -> Result<Vec<Task>, TaskError> {
    let shown = path.display().to_string();
    let text = fs::read_to_string(path).map_err(|error| TaskError::Read { path: shown.clone(), reason: error.to_string() })?;
    parse_tasks(&text, &shown)
}

/// Checks the text of a task file; `path` names it in errors, and directories of repositories are looked for beside it.
pub fn parse_tasks(text: &str, path: &str) -> Result<Vec<Task>, TaskError> {
    let mut tasks = Vec::new();
    let mut line_of: BTreeMap<String, usize> = BTreeMap::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = index + 1;
        let wrong = |reason: String| TaskError::Line { path: path.to_string(), line: number, reason };
        let mut task = parse_task(line).map_err(wrong)?;
        if let Some(repository) = &task.repository {
            task.repository = Some(repository::resolve(Path::new(path), repository).map_err(wrong)?);
        }
        check_task(&task).map_err(wrong)?;
        if let Some(first) = line_of.insert(task.id.clone(), number) {
            return Err(wrong(format!("id \"{}\" was already used on line {first}; ids must be unique", task.id)));
        }
        tasks.push(task);
    }
    if tasks.is_empty() {
        return Err(TaskError::Read { path: path.to_string(), reason: "it holds no task".into() });
    }
    Ok(tasks)
}

/// One line per task, in the order given.
pub fn render_tasks(tasks: &[Task]) -> String {
    let mut text = String::new();
    for task in tasks {
        // Strings, lists and maps with string keys: nothing here can fail to become JSON.
        text.push_str(&serde_json::to_string(task).unwrap_or_default());
        text.push('\n');
    }
    text
}

/// Writes a task file so that the name always holds either the old file or the whole new one.
pub fn write_tasks(path: &Path, tasks: &[Task]) -> Result<(), TaskError> {
    write_atomically(path, render_tasks(tasks).as_bytes())
        .map_err(|error| TaskError::Write { path: path.display().to_string(), reason: error.to_string() })
}

fn parse_task(line: &str) -> Result<Task, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("is not valid JSON: {error}"))?;
    let object = value.as_object().ok_or("is not a JSON object")?;
    if let Some(field) = REQUIRED.iter().find(|field| !object.contains_key(**field)) {
        return Err(format!("field \"{field}\" is missing"));
    }
    for (field, value) in object {
        let fits = match field.as_str() {
            "id" | "issue" | "gold_patch" | "repository" => value.is_string(),
            "files" | "visible_tests" | "hidden_tests" => {
                value.as_object().is_some_and(|files| files.values().all(Value::is_string))
            }
            "FAIL_TO_PASS" | "PASS_TO_PASS" | "allow_infrastructure" => {
                value.as_array().is_some_and(|names| names.iter().all(Value::is_string))
            }
            "deterministic" => value.is_boolean(),
            "runner" => matches!(value.as_str(), Some("separate" | "in_process")),
            "origin" => value.is_object() || value.is_null(),
            _ => return Err(format!("field \"{field}\" is unknown")),
        };
        if !fits {
            return Err(format!("field \"{field}\" has the wrong type; expected {}", expected(field)));
        }
    }
    // Only the inside of `origin` can still be wrong.
    serde_json::from_value(value).map_err(|error| format!("field \"origin\": {error}"))
}

fn expected(field: &str) -> &'static str {
    match field {
        "files" | "visible_tests" | "hidden_tests" => "an object from path to text",
        "FAIL_TO_PASS" | "PASS_TO_PASS" => "a list of \"file.py::test_name\"",
        "allow_infrastructure" => "a list of paths",
        "deterministic" => "true or false",
        "runner" => "\"separate\" or \"in_process\"",
        "origin" => "an object",
        _ => "a string",
    }
}

/// Everything about a task that can be judged without running it; the message names the field.
pub fn check_task(task: &Task) -> Result<(), String> {
    if task.id.is_empty() || !task.id.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        return Err(format!("field \"id\" is {:?}; expected letters, digits, \"-\", \"_\" and \".\"", task.id));
    }
    match &task.repository {
        None if task.files.is_empty() => return Err("field \"files\" is missing or empty, and there is no \"repository\"".into()),
        Some(_) if !task.files.is_empty() => return Err("fields \"files\" and \"repository\" are both there; give one".into()),
        _ => {}
    }
    for (field, files) in [("files", &task.files), ("visible_tests", &task.visible_tests), ("hidden_tests", &task.hidden_tests)] {
        if let Some(path) = files.keys().find(|path| !is_safe_path(path)) {
            return Err(format!(
                "field \"{field}\" has the unsafe path {path:?}; expected a relative path with \"/\" and without \"..\""
            ));
        }
    }
    check_collisions("hidden_tests", &task.hidden_tests, "files", &task.files)?;
    check_collisions("visible_tests", &task.visible_tests, "files", &task.files)?;
    check_collisions("hidden_tests", &task.hidden_tests, "visible_tests", &task.visible_tests)?;
    check_test_names(task)?;
    for path in touched_paths(&task.gold_patch).map_err(|reason| format!("field \"gold_patch\" {reason}"))? {
        if task.hidden_tests.contains_key(&path) || task.visible_tests.contains_key(&path) {
            return Err(format!("field \"gold_patch\" changes the test file {path}; it may only change other files"));
        }
        if !is_safe_path(&path) {
            return Err(format!("field \"gold_patch\" has the unsafe path {path:?}"));
        }
    }
    for path in task.hidden_tests.keys().filter(|_| task.repository.is_some()) {
        if file_as_found(task, path)?.is_some() {
            return Err(format!("field \"hidden_tests\" has {path}, which is in the repository, where the agent would find it"));
        }
    }
    apply_gold(task).map(|_| ()).map_err(|error| match error {
        TaskError::Invalid { reason, .. } => reason,
        other => other.to_string(),
    })
}

fn check_test_names(task: &Task) -> Result<(), String> {
    if task.fail_to_pass.is_empty() {
        return Err("field \"FAIL_TO_PASS\" is empty: a task without a failing test has nothing to mend".into());
    }
    let mut seen = BTreeSet::new();
    for (field, names) in [("FAIL_TO_PASS", &task.fail_to_pass), ("PASS_TO_PASS", &task.pass_to_pass)] {
        for name in names {
            let Some((file, test)) = name.split_once("::").filter(|(_, test)| !test.is_empty()) else {
                return Err(format!("field \"{field}\" names {name:?}; expected \"file.py::test_name\""));
            };
            if !task.hidden_tests.contains_key(file) {
                return Err(format!("field \"{field}\" names {test} of {file}, which is not in \"hidden_tests\""));
            }
            if !seen.insert(name) {
                return Err(format!("field \"{field}\" names {name} twice, or both lists name it"));
            }
        }
    }
    Ok(())
}

/// A relative path that stays inside the repository and means the same everywhere.
pub(crate) fn is_safe_path(path: &str) -> bool {
    !path.contains(['\\', '\0']) && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// No path of one list may equal a path of the other or be a directory of it.
fn check_collisions(field: &str, files: &Workspace, other_field: &str, others: &Workspace) -> Result<(), String> {
    for path in files.keys() {
        if let Some(other) = others.keys().find(|other| paths_collide(path, other)) {
            return Err(format!("field \"{field}\" has {path}, which collides with {other} in \"{other_field}\""));
        }
    }
    Ok(())
}

/// The same path, or one a directory of the other.
pub(crate) fn paths_collide(a: &str, b: &str) -> bool {
    let inside = |long: &str, short: &str| long.strip_prefix(short).is_some_and(|rest| rest.starts_with('/'));
    a == b || inside(a, b) || inside(b, a)
}
