//! What an answer is worth: real runs in the sandbox, and faults that only a stand-in for it can have.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use learner::grader::{Counters, Grader, Settings, visible_tests};
use learner::sandbox::{self, RunResult, RunVerdict, Sandbox, TestRun, Tier};
use learner::task::bugfix::{Level, Split, generate};
use learner::task::{apply_gold, parse_tasks};
use learner::types::{Task, Verdict, Workspace};
use serde_json::json;

fn task() -> Task {
    let line = json!({
        "id": "t-1", "issue": "off by one",
        "files": {"count.py": "def count():\n    return 1\n", "setup.cfg": "[x]\n"},
        "visible_tests": {"test_seen.py": "from count import count\n\ndef test_two():\n    assert count() == 2\n\ndef test_int():\n    assert type(count()) is int\n"},
        "hidden_tests": {"test_count.py": "from count import count\n\ndef test_two():\n    assert count() == 2\n\ndef test_int():\n    assert type(count()) is int\n"},
        "FAIL_TO_PASS": ["test_count.py::test_two"], "PASS_TO_PASS": ["test_count.py::test_int"],
        "gold_patch": "--- a/count.py\n+++ b/count.py\n@@ -1,2 +1,2 @@\n def count():\n-    return 1\n+    return 2\n",
        "deterministic": true
    });
    parse_tasks(&line.to_string(), "test").expect("a valid task").remove(0)
}

fn with(path: &str, text: &str) -> Workspace {
    let mut files = task().files;
    files.insert(path.into(), text.into());
    files
}

/// One sandbox for all tests of this program.
fn grader() -> Grader {
    static SANDBOX: OnceLock<Sandbox> = OnceLock::new();
    let sandbox = SANDBOX.get_or_init(|| {
        sandbox::set_helper(env!("CARGO_BIN_EXE_learner"));
        Sandbox::start(&sandbox::Settings::default()).expect("a sandbox in tier A or B")
    });
    Grader::new(sandbox.clone(), Settings::default())
}

fn reason(verdict: &Verdict) -> &str {
    match verdict {
        Verdict::Failed(reason) => reason,
        other => panic!("expected a failure, got {other:?}"),
    }
}

#[test]
fn gold_passes_the_files_as_found_fail_and_verdicts_are_remembered() {
    let (grader, task) = (grader(), task());
    let gold = apply_gold(&task).expect("applies");
    let graded = grader.grade(&task, &gold);
    assert_eq!((graded.verdict, graded.remembered, graded.wall_limit_hit), (Verdict::Passed, false, false));
    assert_eq!(reason(&grader.grade(&task, &task.files).verdict), "1 of 2 tests failed");
    assert!(grader.grade(&task, &gold).remembered && grader.grade(&task, &task.files).remembered);
    assert_eq!(grader.counters(), Counters { executed: 2, remembered: 2 });

    let seen = grader.run_visible(&task, &task.files);
    assert_eq!((seen.failed, seen.total, seen.remembered), (1, 2, false));
    assert!(seen.output.contains("AssertionError"), "{}", seen.output);
    assert_eq!(grader.run_visible(&task, &gold).failed, 0);
    // An agent's workspace may show the visible tests, unchanged.
    let shown: Workspace = gold.into_iter().chain(task.visible_tests.clone()).collect();
    assert!(grader.grade(&task, &shown).remembered);
}

#[test]
fn answers_that_cheat_fail_and_none_is_a_fault_of_ours() {
    let (grader, task) = (grader(), task());
    let cases = [
        // Leaves before a test can fail, with the code of success.
        with("count.py", "import os\nos._exit(0)\n"),
        with("count.py", "import sys\nprint('{\"infrastructure\": 1}', file=sys.stderr)\nsys.exit(0)\n"),
        // Speaks the language of reports on every descriptor it can reach.
        with(
            "count.py",
            "import os\nfor d in range(64):\n    try:\n        os.write(d, b'0 1\\ninfrastructure\\n')\n    except OSError:\n        pass\ndef count():\n    return 1\n",
        ),
        with("count.py", "class Two(int):\n    def __eq__(self, other):\n        return True\ndef count():\n    return Two(1)\n"),
        with("count.py", "def count():\n    raise SystemExit(0)\n"),
        with("count.py", "not python"),
        Workspace::new(),
    ];
    for mut answer in cases {
        answer.entry("setup.cfg".into()).or_insert_with(|| "[x]\n".into());
        let graded = grader.grade(&task, &answer);
        assert!(matches!(graded.verdict, Verdict::Failed(_)), "{answer:?}: {graded:?}");
    }
}

#[test]
fn files_an_answer_may_not_write_are_refused_without_a_run() {
    let grader = stand_in(|_| panic!("nothing may be run"));
    let big = "x".repeat(17 << 20);
    for (path, text, expected) in [
        ("test_count.py", "def test_two(): pass", "the test file test_count.py"),
        ("test_seen.py", "def test_two(): pass", "the test file test_seen.py"),
        ("test_count.py/x.py", "", "the test file test_count.py"),
        ("conftest.py", "", "decides how tests run"),
        ("pkg/sitecustomize.py", "", "decides how tests run"),
        ("evil.pth", "import os", "decides how tests run"),
        ("pytest.ini", "", "decides how tests run"),
        ("setup.cfg", "[tool:pytest]", "decides how tests run"),
        ("json.py", "", "not among the files of the task"),
        ("../count.py", "", "not among the files of the task"),
        ("count.py", &big, "larger than 16 MiB"),
    ] {
        let graded = grader.grade(&task(), &with(path, text));
        assert!(reason(&graded.verdict).contains(expected), "{path}: {graded:?}");
        let seen = grader.run_visible(&task(), &with(path, text));
        assert!(seen.failed == 2 && seen.output.contains(expected), "{path}: {seen:?}");
    }
    let mut without = task().files;
    without.remove("setup.cfg");
    assert!(reason(&grader.grade(&task(), &without).verdict).contains("removes setup.cfg"));
    assert_eq!(grader.counters(), Counters::default());
}

#[test]
fn generated_tasks_are_proven_and_defects_are_named() {
    let grader = grader();
    for level in [Level::Small, Level::Large] {
        for task in generate(level, Split::Train, 12, 77).expect("enough tasks") {
            let check = grader.check(&task, 1);
            assert!(check.passed(), "{check:?}\n{:?}", task.files);
        }
    }
    let mut wrong = task();
    std::mem::swap(&mut wrong.fail_to_pass, &mut wrong.pass_to_pass);
    let check = grader.check(&wrong, 1);
    assert_eq!(
        check.problems,
        [
            "PASS_TO_PASS test_count.py::test_two fails on the files as found",
            "FAIL_TO_PASS test_count.py::test_int passes on the files as found"
        ]
        .map(String::from)
        .into_iter()
        .rev()
        .collect::<Vec<_>>()
    );
    let mut broken = task();
    broken.gold_patch = broken.gold_patch.replace("+    return 2", "+    return 3");
    let problems = grader.check(&broken, 1).problems;
    assert!(problems.contains(&"test_count.py::test_two fails with the gold patch".to_string()), "{problems:?}");
}

/// A run of tests that ended in `ended`, with these outcomes.
fn test_run(ended: RunVerdict, exit_code: Option<i32>, outcomes: &[(&str, bool)]) -> TestRun {
    TestRun {
        result: RunResult { exit_code, ..RunResult::empty(Tier::A, ended) },
        outcomes: outcomes.iter().map(|(name, passed)| (name.to_string(), *passed)).collect::<BTreeMap<_, _>>(),
        started_warm: false,
    }
}

fn stand_in(run: impl Fn(usize) -> TestRun + Send + Sync + 'static) -> Grader {
    let runs = AtomicUsize::new(0);
    Grader::with_runner(move |_| run(runs.fetch_add(1, Ordering::SeqCst)), Settings::default())
}

const BOTH: [(&str, bool); 2] = [("test_count.py::test_two", true), ("test_count.py::test_int", true)];

#[test]
fn only_evidence_for_every_test_in_a_run_that_ended_well_passes() {
    let grade = |run: TestRun| stand_in(move |_| run.clone()).grade(&task(), &task().files).verdict;
    assert_eq!(grade(test_run(RunVerdict::Exited, Some(0), &BOTH)), Verdict::Passed);
    let failing = [
        test_run(RunVerdict::Exited, Some(1), &BOTH),
        test_run(RunVerdict::Exited, Some(7), &BOTH),
        test_run(RunVerdict::Exited, None, &BOTH),
        test_run(RunVerdict::Exited, Some(0), &BOTH[..1]),
        test_run(RunVerdict::Exited, Some(0), &[BOTH[0], ("test_count.py::test_int", false)]),
        test_run(RunVerdict::Exited, Some(0), &[BOTH[0], ("test_other.py::test_int", true)]),
        test_run(RunVerdict::Signaled, None, &BOTH),
        test_run(RunVerdict::CpuTimeout, Some(0), &BOTH),
        test_run(RunVerdict::WallTimeout, Some(0), &BOTH),
        test_run(RunVerdict::MemoryLimit, Some(0), &BOTH),
    ];
    for run in failing {
        assert!(matches!(grade(run.clone()), Verdict::Failed(_)), "{run:?}");
    }
    let fault = grade(test_run(RunVerdict::Infrastructure("disk".into()), None, &BOTH));
    assert_eq!(fault, Verdict::Infrastructure("disk".into()));
}

#[test]
fn faults_wall_limits_and_undeclared_tasks_are_never_remembered() {
    let fault = RunVerdict::Infrastructure("no room".into());
    let grader = stand_in(move |run| match run {
        0 => test_run(fault.clone(), None, &[]),
        1 => test_run(RunVerdict::WallTimeout, None, &[]),
        _ => test_run(RunVerdict::Exited, Some(0), &BOTH),
    });
    let grade = || grader.grade(&task(), &task().files);
    assert!(grade().verdict.infrastructure());
    let second = grade();
    assert!(second.wall_limit_hit && !second.remembered);
    assert!(!grade().remembered);
    let fourth = grade();
    assert!(fourth.remembered && fourth.verdict.passed());

    let mut undeclared = task();
    undeclared.deterministic = false;
    let grader = stand_in(|_| test_run(RunVerdict::Exited, Some(0), &BOTH));
    assert!(!grader.grade(&undeclared, &undeclared.files).remembered && !grader.grade(&undeclared, &undeclared.files).remembered);
    assert_eq!(grader.counters(), Counters { executed: 2, remembered: 0 });
    let visible = stand_in(|_| test_run(RunVerdict::Infrastructure("no room".into()), None, &[]));
    assert_eq!(visible.run_visible(&task(), &task().files).infrastructure.as_deref(), Some("no room"));
}

#[test]
fn what_is_run_does_not_depend_on_how_many_ask_at_once() {
    let grader = Arc::new(stand_in(|_| test_run(RunVerdict::Exited, Some(0), &BOTH)));
    let answers: Vec<Workspace> = (0..5).map(|index| with("count.py", &format!("def count():\n    return {index}\n"))).collect();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| answers.iter().for_each(|answer| assert!(grader.grade(&task(), answer).verdict.passed())));
        }
    });
    assert_eq!(grader.counters(), Counters { executed: 5, remembered: 35 });
}

#[test]
fn flaky_tests_are_named() {
    // Rounds of three runs: files as found, mended, visible tests on the mended files.
    let grader = stand_in(|run| {
        let found = [("test_count.py::test_two", false), ("test_count.py::test_int", run != 3)];
        let visible = [("test_seen.py::test_two", true), ("test_seen.py::test_int", true)];
        match run % 3 {
            0 => test_run(RunVerdict::Exited, Some(1), &found),
            1 => test_run(RunVerdict::Exited, Some(0), &BOTH),
            _ => test_run(RunVerdict::Exited, Some(0), &visible),
        }
    });
    let check = grader.check(&task(), 2);
    assert_eq!((check.flaky, check.problems), (vec!["test_count.py::test_int".to_string()], vec![]));
}

#[test]
fn visible_tests_are_the_functions_at_the_left_margin() {
    assert_eq!(visible_tests(&task()), ["test_seen.py::test_two", "test_seen.py::test_int"]);
}
