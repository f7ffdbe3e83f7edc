//! The JSONL format: what is refused, in which words, and what is written.

use std::fs;

use learner::task::bugfix::{Level, Split, generate};
use learner::task::{parse_tasks, read_tasks, render_tasks, write_tasks};
use serde_json::{Value, json};

fn valid() -> Value {
    json!({
        "id": "t-1", "issue": "off by one",
        "files": {"pkg/count.py": "def count():\n    return 1\n"},
        "hidden_tests": {"test_count.py": "from pkg.count import count\n\ndef test_two():\n    assert count() == 2\n"},
        "FAIL_TO_PASS": ["test_count.py::test_two"],
        "gold_patch": "--- a/pkg/count.py\n+++ b/pkg/count.py\n@@ -1,2 +1,2 @@\n def count():\n-    return 1\n+    return 2\n"
    })
}

fn error(line: &Value) -> String {
    let text = format!("{}\n\n{line}\n", json_with_id("first"));
    let error = parse_tasks(&text, "tasks.jsonl").expect_err("must be refused").to_string();
    assert!(!error.contains('\n'), "one line: {error}");
    error
}

fn json_with_id(id: &str) -> Value {
    let mut task = valid();
    task["id"] = json!(id);
    task
}

fn with(field: &str, value: Value) -> Value {
    let mut task = valid();
    task[field] = value;
    task
}

#[test]
fn a_minimal_task_is_read() {
    let tasks = parse_tasks(&valid().to_string(), "tasks.jsonl").expect("valid");
    assert_eq!((tasks[0].id.as_str(), tasks[0].deterministic), ("t-1", false));
    assert!(tasks[0].visible_tests.is_empty() && tasks[0].pass_to_pass.is_empty() && tasks[0].origin.is_none());
}

#[test]
fn every_defect_is_named_with_file_line_and_field() {
    let mut missing = valid();
    missing.as_object_mut().expect("an object").remove("issue");
    let hidden = |path: &str| with("hidden_tests", json!({path: "def test_two():\n    pass\n"}));
    let patch_of = |path: &str| format!("--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x\n+y\n");
    let cases = [
        (missing, "field \"issue\" is missing"),
        (with("colour", json!(1)), "field \"colour\" is unknown"),
        (with("files", json!(["a"])), "field \"files\" has the wrong type"),
        (with("origin", json!({"family": "x"})), "field \"origin\": missing field `skeleton`"),
        (with("id", json!("a b")), "field \"id\" is \"a b\""),
        (with("id", json!("first")), "id \"first\" was already used on line 1"),
        (with("files", json!({})), "field \"files\" is missing or empty"),
        (with("files", json!({"/etc/passwd": ""})), "unsafe path \"/etc/passwd\""),
        (with("files", json!({"a/../../b.py": ""})), "unsafe path"),
        (with("files", json!({"": ""})), "unsafe path \"\""),
        (with("files", json!({"a\\b.py": ""})), "unsafe path"),
        (with("files", json!({"a\u{0}b.py": ""})), "unsafe path"),
        (hidden("pkg/count.py"), "collides with pkg/count.py"),
        (hidden("pkg"), "collides with pkg/count.py"),
        (with("FAIL_TO_PASS", json!([])), "field \"FAIL_TO_PASS\" is empty"),
        (with("FAIL_TO_PASS", json!(["other.py::test_two"])), "other.py, which is not in \"hidden_tests\""),
        (with("FAIL_TO_PASS", json!(["test_two"])), "expected \"file.py::test_name\""),
        (with("PASS_TO_PASS", json!(["test_count.py::test_two"])), "twice, or both lists name it"),
        (with("gold_patch", json!("")), "field \"gold_patch\" is empty"),
        (with("gold_patch", json!(patch_of("pkg/count.py"))), "does not apply to pkg/count.py"),
        (with("gold_patch", json!(patch_of("test_count.py"))), "changes the test file test_count.py"),
    ];
    for (task, expected) in cases {
        let error = error(&task);
        assert!(error.starts_with("tasks.jsonl:3: ") && error.contains(expected), "{error:?} should say {expected:?}");
    }
    let error = parse_tasks("{\"id\": ", "tasks.jsonl").expect_err("bad JSON").to_string();
    assert!(error.starts_with("tasks.jsonl:1: is not valid JSON"), "{error}");
    let error = parse_tasks("\n", "tasks.jsonl").expect_err("empty").to_string();
    assert!(error.contains("holds no task"), "{error}");
}

#[test]
fn a_file_is_read_back_as_written_and_never_half_written() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let path = directory.path().join("tasks.jsonl");
    let tasks = generate(Level::Large, Split::Names, 20, 1).expect("enough tasks");
    write_tasks(&path, &tasks).expect("writes");
    assert_eq!(read_tasks(&path).expect("reads"), tasks);
    assert_eq!(fs::read_to_string(&path).expect("reads"), render_tasks(&tasks));
    assert_eq!(fs::read_dir(directory.path()).expect("lists").count(), 1, "nothing else is left behind");
    let error = write_tasks(&directory.path().join("absent/tasks.jsonl"), &tasks).expect_err("no such directory").to_string();
    assert!(error.contains("absent/tasks.jsonl: cannot write"), "{error}");
    let error = read_tasks(&directory.path().join("none.jsonl")).expect_err("no such file").to_string();
    assert!(error.contains("none.jsonl: cannot read"), "{error}");
}

#[test]
fn the_example_of_the_documentation_is_a_task() {
    let page = include_str!("../../docs/tasks.md");
    let (_, rest) = page.split_once("```json\n").expect("the page has an example");
    let (example, _) = rest.split_once("```").expect("the example ends");
    let value: Value = serde_json::from_str(example).expect("the example is JSON");
    parse_tasks(&value.to_string(), "docs/tasks.md").expect("the example is a task");
}
