//! `learner tasks`, as it is called from a shell.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn learner(arguments: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_learner")).args(arguments).current_dir(directory).output().expect("learner starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn made_tasks_are_shown_and_checked() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let make = [
        "tasks",
        "make",
        "--level",
        "large",
        "--split",
        "held-out",
        "--count",
        "14",
        "--seed",
        "3",
        "--out",
        "tasks.jsonl",
        "--json",
    ];
    let made = learner(&make, directory.path());
    assert!(made.status.success(), "{}", text(&made.stderr));
    let report: Value = serde_json::from_slice(&made.stdout).expect("one JSON object");
    assert_eq!((report["tasks"].as_u64(), report["files"][0].as_str()), (Some(14), Some("tasks.jsonl")));
    let first = fs::read(directory.path().join("tasks.jsonl")).expect("written");
    assert_eq!(text(&first).matches("\"split\":\"structure\"").count(), 2);
    learner(&make, directory.path());
    assert!(fs::read(directory.path().join("tasks.jsonl")).expect("written") == first, "the same seed gives the same bytes");

    let shown = learner(&["tasks", "show", "tasks.jsonl", "--id", "large-names-3-00002"], directory.path());
    let page = text(&shown.stdout);
    for part in ["task large-names-3-00002", "hidden test hidden.py", "   1  ", "gold patch", "FAIL_TO_PASS: hidden.py::test_"] {
        assert!(page.contains(part), "{page}");
    }
    let unknown = learner(&["tasks", "show", "tasks.jsonl", "--id", "none"], directory.path());
    assert_eq!((unknown.status.code(), text(&unknown.stderr).lines().count()), (Some(2), 1));

    // One task whose gold patch mends nothing: named, and exit code 1.
    let lines = text(&first);
    let mut task: Value = serde_json::from_str(lines.lines().next().expect("a line")).expect("JSON");
    let file = task["files"].as_object().expect("files").keys().next().expect("a file").clone();
    let header = task["files"][&file].as_str().expect("text").lines().next().expect("a line").to_string();
    task["gold_patch"] = format!("--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-{header}\n+{header} # unchanged in effect\n").into();
    let spoiled = format!("{task}\n{}\n", lines.lines().nth(1).expect("a line"));
    fs::write(directory.path().join("spoiled.jsonl"), spoiled).expect("writes");
    let checked = learner(&["tasks", "check", "spoiled.jsonl", "--repeats", "1", "--json"], directory.path());
    let report: Value = serde_json::from_slice(&checked.stdout).expect("one JSON object");
    assert_eq!((checked.status.code(), report["tasks"].as_u64(), report["passed"].as_u64()), (Some(1), Some(2), Some(1)));
    assert_eq!(report["failed"][0]["id"], task["id"]);
    assert!(report["failed"][0]["problems"][0].as_str().expect("text").contains("fails with the gold patch"));
}

#[test]
fn a_bad_line_is_refused_before_anything_runs() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    fs::write(directory.path().join("tasks.jsonl"), "\n{\"id\": \"a\"}\n").expect("writes");
    let checked = learner(&["tasks", "check", "tasks.jsonl"], directory.path());
    assert_eq!(checked.status.code(), Some(2));
    assert_eq!(text(&checked.stderr), "learner: tasks.jsonl:2: field \"issue\" is missing\n");
    let made = learner(&["tasks", "make", "--count", "1", "--out", "absent/tasks.jsonl"], directory.path());
    assert_eq!((made.status.code(), text(&made.stderr).lines().count()), (Some(1), 1), "{}", text(&made.stderr));
}
