//! Training on a task file of one's own, several updates on each rollout, and run files that run again.

use crate::harness::{json, result, run, succeed, text};

const SHORT: [&str; 12] = [
    "--recipe",
    "smoke",
    "--set",
    "rft.candidates=40",
    "--set",
    "rft.steps=4",
    "--set",
    "rl.steps=2",
    "--set",
    "evaluate.tasks=4",
    "--set",
    "rl.sequences_per_update=3",
];

#[test]
fn a_task_file_is_split_trained_on_and_the_run_file_runs_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let tasks = path("tasks.jsonl");
    succeed(&["tasks", "make", "--level", "large", "--split", "train", "--count", "24", "--seed", "3", "--out", &tasks, "-q"]);
    let arguments = |out: &str| {
        let mut arguments: Vec<String> = SHORT.map(String::from).to_vec();
        // Issues and files of the large family are longer than the smoke recipe's episodes.
        arguments.extend(["--set", "agent.max_tokens=1000", "--tasks", &tasks, "--out", out].map(String::from));
        arguments
    };
    let first = path("first");
    succeed(&arguments(&first).iter().map(String::as_str).collect::<Vec<_>>());
    let summary = json(&folder.path().join("first/summary.json"));
    assert_eq!((summary["rl_steps"].as_u64(), summary["mismatch_max"].as_f64()), (Some(2), Some(0.0)));

    let (again, run_file) = (path("again"), path("first/run.toml"));
    succeed(&["--config", &run_file, "--out", &again]);
    assert_eq!(result(folder.path().join("again").as_ref()), result(folder.path().join("first").as_ref()));
}

#[test]
fn tasks_that_no_script_can_demonstrate_are_refused_before_work_starts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("two-lines.jsonl");
    let task = serde_json::json!({
        "id": "two-lines",
        "issue": "both are wrong",
        "files": {"solution.py": "def f():\n    return 1\ndef g():\n    return 1\n"},
        "hidden_tests": {"hidden.py": "from solution import f, g\ndef test_both():\n    assert f() == 2 and g() == 2\n"},
        "FAIL_TO_PASS": ["hidden.py::test_both"],
        "gold_patch": "--- a/solution.py\n+++ b/solution.py\n@@ -1,4 +1,4 @@\n def f():\n-    return 1\n+    return 2\n def g():\n-    return 1\n+    return 2\n",
    });
    let second = task.to_string().replace("\"two-lines\"", "\"two-more-lines\"");
    std::fs::write(&file, format!("{task}\n{second}\n")).unwrap();
    let out = folder.path().join("out");
    let output = run(&[
        "--recipe",
        "smoke",
        "--tasks",
        file.to_str().unwrap(),
        "--set",
        "tasks.held_out_share=0.5",
        "--out",
        out.to_str().unwrap(),
    ]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("rft.candidates=0") || said.contains("held_out"), "{said}");
    assert!(!out.exists());
}

#[test]
fn doctor_and_config_answer_for_people_and_machines() {
    let output = succeed(&["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(findings["ready"], true);
    assert!(text(&succeed(&["doctor"]).stdout).contains("sandbox tier"));
    let shown = text(&succeed(&["config", "show", "--set", "rl.steps=7"]).stdout);
    assert!(shown.contains("steps = 7"));
    let json: serde_json::Value =
        serde_json::from_slice(&succeed(&["--json", "config", "show"]).stdout).expect("one JSON object");
    assert_eq!(json["rl"]["steps"], 56);
}
