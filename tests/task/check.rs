//! `tasks check` and `grade` as they are called, repositories in directories, and what of a solution an agent could find.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use learner::task::{read_tasks, render_tasks};
use serde_json::{Value, json};

fn learner(arguments: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_learner")).args(arguments).current_dir(directory).output().expect("learner starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

const GOLD: &str = "--- a/shop/price.py\n+++ b/shop/price.py\n@@ -1,2 +1,2 @@\n def total(prices, tax):\n\
                    -    return sum(prices) - tax\n+    return sum(prices) + tax\n";

fn in_files() -> Value {
    json!({
        "id": "shop", "issue": "the tax is taken off",
        "files": {"shop/price.py": "def total(prices, tax):\n    return sum(prices) - tax\n", "notes.txt": "x\n"},
        "hidden_tests": {"test_price.py": "from shop.price import total\n\n\ndef test_tax():\n    assert total([1, 2], 3) == 6\n\n\ndef test_none():\n    assert total([1], 0) == 1\n"},
        "FAIL_TO_PASS": ["test_price.py::test_tax"], "PASS_TO_PASS": ["test_price.py::test_none"],
        "gold_patch": GOLD
    })
}

/// The same task with its repository in the directory `shop-1` beside the task file.
fn in_directory(place: &Path) -> Value {
    let mut task = in_files();
    let files = task.as_object_mut().expect("an object").remove("files").expect("files");
    for (name, text) in files.as_object().expect("an object") {
        let path = place.join("shop-1").join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text.as_str().expect("text")).expect("written");
    }
    task["repository"] = json!("shop-1");
    task
}

#[test]
fn grade_says_what_came_of_a_patch_and_how() {
    let place = tempfile::tempdir().expect("a directory for the test");
    fs::write(place.path().join("tasks.jsonl"), format!("{}\n", in_files())).expect("written");
    let grade = |patch: &str, more: &[&str]| {
        fs::write(place.path().join("answer.patch"), patch).expect("written");
        let arguments = ["grade", "--tasks", "tasks.jsonl", "--id", "shop", "--patch", "answer.patch"];
        learner(&[&arguments, more].concat(), place.path())
    };
    let passed = grade(GOLD, &[]);
    let page = text(&passed.stdout);
    assert!(passed.status.success(), "{}", text(&passed.stderr));
    assert!(page.contains("passed   test_price.py::test_tax\n") && page.ends_with("shop: passed\n"), "{page}");
    let failed = grade(&GOLD.replace("+    return sum(prices) + tax", "+    return tax"), &["--json"]);
    let report: Value = serde_json::from_slice(&failed.stdout).expect("one JSON object");
    assert_eq!(failed.status.code(), Some(1));
    assert_eq!((&report["verdict"], &report["tests_run"]), (&json!("failed"), &json!(2)));
    assert_eq!(report["report"]["tests"], json!({"test_price.py::test_tax": false, "test_price.py::test_none": false}));
    assert_eq!(report["report"]["runner"], "separate");
    assert_eq!(report["report"]["laid"]["shop/price.py"].as_str().map(str::len), Some(64));
    assert!(report["report"]["output"].as_str().expect("text").contains("FAILED test_price.py::test_tax"), "{report}");
    let refused = grade("--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x = 1\n", &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stdout).starts_with("refused without a run: the answer adds conftest.py"), "{}", text(&refused.stdout));
    let unknown = learner(&["grade", "--tasks", "tasks.jsonl", "--id", "none", "--patch", "answer.patch"], place.path());
    assert_eq!((unknown.status.code(), text(&unknown.stderr).lines().count()), (Some(2), 1));
}

#[test]
fn a_repository_may_lie_in_a_directory() {
    let place = tempfile::tempdir().expect("a directory for the test");
    let task = in_directory(place.path());
    fs::write(place.path().join("tasks.jsonl"), format!("{task}\n")).expect("written");
    let tasks = read_tasks(&place.path().join("tasks.jsonl")).expect("a valid task");
    assert!(tasks[0].files.is_empty() && tasks[0].repository.as_ref().is_some_and(|path| path.is_absolute()));
    let grade = |patch: &str| {
        fs::write(place.path().join("answer.patch"), patch).expect("written");
        let arguments = ["grade", "--tasks", "tasks.jsonl", "--id", "shop", "--patch", "answer.patch", "--json"];
        let graded = learner(&arguments, place.path());
        let report: Value = serde_json::from_slice(&graded.stdout).unwrap_or_else(|_| panic!("{}", text(&graded.stderr)));
        (report["verdict"].as_str().expect("a word").to_string(), report)
    };
    assert_eq!(grade(GOLD).0, "passed");
    assert_eq!(grade(&GOLD.replace("+ tax", "+ 0")).0, "failed");
    // A file of the directory is moved away: its old name is gone for the run, and there it stays.
    let moved = "diff --git a/notes.txt b/notes.md\nsimilarity index 100%\nrename from notes.txt\nrename to notes.md\n";
    let (verdict, report) = grade(&format!("{moved}{GOLD}"));
    assert_eq!(verdict, "passed", "{report}");
    let gone = "+    import os\n+    return sum(prices) + tax if os.path.exists('notes.md') and not os.path.exists('notes.txt') else 0\n";
    let looks = GOLD.replace("@@ -1,2 +1,2 @@", "@@ -1,2 +1,3 @@").replace("+    return sum(prices) + tax\n", gone);
    let (verdict, report) = grade(&format!("{moved}{looks}"));
    assert_eq!(verdict, "passed", "{report}");
    assert!(place.path().join("shop-1/notes.txt").exists() && !place.path().join("shop-1/notes.md").exists());
    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        let mut task = task.clone();
        change(&mut task);
        fs::write(place.path().join("bad.jsonl"), format!("{task}\n")).expect("written");
        let error = read_tasks(&place.path().join("bad.jsonl")).expect_err("refused").to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    };
    refused(&|task| task["repository"] = json!("../shop-1"), "expected a relative path");
    refused(&|task| task["repository"] = json!("absent"), "field \"repository\"");
    refused(&|task| task["files"] = json!({"a.py": ""}), "are both there");
    refused(&|task| task["hidden_tests"]["notes.txt"] = json!("x"), "where the agent would find it");
    refused(&|task| task["runner"] = json!("elsewhere"), "\"separate\" or \"in_process\"");
    refused(&|task| task["gold_patch"] = json!(GOLD.replace("- tax", "* tax")), "does not apply");
}

#[test]
fn git_directories_and_compiled_code() {
    let place = tempfile::tempdir().expect("a directory for the test");
    let check = |task: &Value| {
        fs::write(place.path().join("tasks.jsonl"), format!("{task}\n")).expect("written");
        let checked = learner(&["tasks", "check", "tasks.jsonl", "--repeats", "1", "--json"], place.path());
        let report: Value = serde_json::from_slice(&checked.stdout).expect("one JSON object");
        let problems = report["failed"][0]["problems"].as_array().cloned().unwrap_or_default();
        problems.iter().map(|problem| problem.as_str().expect("text").to_string()).collect::<Vec<_>>()
    };
    assert_eq!(check(&in_files()), Vec::<String>::new());
    let mut task = in_files();
    task["files"]["shop/__pycache__/price.cpython-311.pyc"] = json!("x");
    task["files"][".git/packed-refs"] = json!("x");
    task["files"]["vendor/price.py"] = json!("def total(prices, tax):\n    return sum(prices) + tax\n");
    assert_eq!(
        check(&task),
        [
            "vendor/price.py holds the mended text of shop/price.py",
            ".git/packed-refs is a git directory, which may hold later commits",
            "shop/__pycache__/price.cpython-311.pyc is compiled code, which may be that of the mended files",
        ]
    );
}

#[test]
fn a_task_in_a_directory_is_written_as_it_was_read() {
    let place = tempfile::tempdir().expect("a directory for the test");
    let mut task = in_files();
    task["runner"] = json!("in_process");
    task["allow_infrastructure"] = json!(["pyproject.toml"]);
    fs::write(place.path().join("tasks.jsonl"), format!("{task}\n")).expect("written");
    let tasks = read_tasks(&place.path().join("tasks.jsonl")).expect("a valid task");
    let again: Value = serde_json::from_str(render_tasks(&tasks).trim()).expect("JSON");
    for field in ["runner", "allow_infrastructure", "files", "gold_patch"] {
        assert_eq!(again[field], task[field], "{field}");
    }
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// All processes below `ancestor`.
fn descendants(ancestor: u32) -> Vec<u32> {
    let all: Vec<u32> =
        fs::read_dir("/proc").expect("listed").flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut found = vec![ancestor];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(all.iter().filter(|&&child| parent_of(child) == Some(pid)));
        next += 1;
    }
    found.split_off(1)
}

/// Whoever kills our helper from outside has broken something of ours: that is told apart from a failed answer.
#[test]
fn a_helper_that_is_killed_from_outside_is_a_fault_of_ours() {
    let place = tempfile::tempdir().expect("a directory for the test");
    fs::write(place.path().join("tasks.jsonl"), format!("{}\n", in_files())).expect("written");
    let sleeps = GOLD.replace(
        "+    return sum(prices) + tax\n",
        "+    import ctypes, time; ctypes.CDLL(None).prctl(15, b'sleeper', 0, 0, 0); time.sleep(60)\n",
    );
    fs::write(place.path().join("answer.patch"), sleeps).expect("written");
    for tier in ["a", "b"] {
        let mut grade = Command::new(env!("CARGO_BIN_EXE_learner"))
            .args(["grade", "--tasks", "tasks.jsonl", "--id", "shop", "--patch", "answer.patch", "--tier", tier])
            .current_dir(place.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("learner starts");
        let comm = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let sleeper = loop {
            let sleeper = descendants(grade.id()).into_iter().find(|pid| comm(pid).trim() == "sleeper");
            if sleeper.is_some() || grade.try_wait().expect("waited").is_some() {
                break sleeper;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        let ended = sleeper.is_none();
        if let Some(code) = sleeper {
            // The code under test is a child of the process that runs the tests, which is one of who keeps the run.
            let keeper = parent_of(code).and_then(parent_of).expect("a keeper");
            assert!(Command::new("kill").args(["-KILL", &keeper.to_string()]).status().expect("kill runs").success());
        }
        let output = grade.wait_with_output().expect("it ends");
        let said = text(&output.stderr);
        // A machine without this tier refuses with exit code 2.
        assert_eq!((output.status.code(), ended), if ended { (Some(2), true) } else { (Some(4), false) }, "tier {tier}: {said}");
        assert!(ended || said.contains("shop: not graded: "), "{said}");
    }
}
