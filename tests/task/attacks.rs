//! Items 71 to 100 of the catalogue of hostile programs, those that are after the verdict. Each is a directory of
//! `attacks/`: what it tries, an attack that must fail and an honest neighbour that must pass, both as files laid over the
//! task's or as a patch. The task is `attacks/task.jsonl`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use learner::grader::{Graded, Grader, Settings};
use learner::sandbox::{self, Limits, Sandbox, Tier};
use learner::task::parse_tasks;
use learner::types::{Task, TestRunner, Verdict, Workspace};
use serde::Deserialize;

/// Items without a directory, and where they are shown.
const ELSEWHERE: [(u32, &str); 4] = [
    (88, "later commits in a .git directory are named by `tasks check`: task/check.rs, git_directories_and_compiled_code"),
    (90, "compiled or copied solutions are named by `tasks check`: task/check.rs, git_directories_and_compiled_code"),
    (
        96,
        "an episode that never ends is the agent's matter: src/agent/attempt.rs ends it by turns, tokens or time, and says which",
    ),
    (97, "calls that do not parse are the agent's matter: src/agent/tools.rs, every_malformed_call_is_refused_with_a_reason"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    item: u32,
    #[allow(dead_code, reason = "for whoever reads the file")]
    what: String,
    /// Always `failed`: an attack is never a fault of ours and never passes.
    verdict: String,
    /// Part of the reason.
    #[serde(default)]
    says: String,
    /// Test files that the attack brings and that are put back.
    #[serde(default)]
    overwritten: Vec<String>,
    #[serde(default)]
    honest_task: BTreeMap<String, serde_json::Value>,
}

enum Answer {
    Files(Workspace),
    Patch(String),
}

struct Attack {
    name: String,
    case: Case,
    attack: Answer,
    honest: Answer,
}

fn place() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/task/attacks")
}

fn task_with(fields: &BTreeMap<String, serde_json::Value>) -> Task {
    let text = fs::read_to_string(place().join("task.jsonl")).expect("the task file");
    let mut task: serde_json::Value = serde_json::from_str(text.trim()).expect("JSON");
    for (name, value) in fields {
        task[name] = value.clone();
    }
    parse_tasks(&task.to_string(), "task.jsonl").expect("a valid task").remove(0)
}

fn task() -> Task {
    task_with(&BTreeMap::new())
}

fn attacks() -> Vec<Attack> {
    let mut directories: Vec<PathBuf> = fs::read_dir(place())
        .expect("listed")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.is_dir())
        .collect();
    directories.sort();
    directories
        .into_iter()
        .map(|directory| {
            let text = fs::read_to_string(directory.join("case.json")).expect("case.json");
            let case: Case = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
            Attack {
                name: directory.file_name().expect("a name").to_string_lossy().into_owned(),
                case,
                attack: answer(&directory, "attack"),
                honest: answer(&directory, "honest"),
            }
        })
        .collect()
}

fn answer(directory: &Path, kind: &str) -> Answer {
    if let Ok(patch) = fs::read_to_string(directory.join(format!("{kind}.patch"))) {
        return Answer::Patch(patch);
    }
    let mut files = task().files;
    let top = directory.join(kind);
    let mut waiting = vec![top.clone()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next).unwrap_or_else(|error| panic!("{}: {error}", next.display())) {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                waiting.push(path);
            } else {
                let name = path.strip_prefix(&top).expect("inside").to_string_lossy().into_owned();
                files.insert(name, fs::read_to_string(&path).expect("text"));
            }
        }
    }
    Answer::Files(files)
}

fn grade(grader: &Grader, task: &Task, answer: &Answer) -> Graded {
    match answer {
        Answer::Files(files) => grader.grade(task, files),
        Answer::Patch(patch) => grader.grade_patch(task, patch),
    }
}

/// Limits that a bomb reaches soon, and times that a crowded machine does not.
fn grader(tier: Tier, warm_interpreter: bool, parallel: usize) -> Option<Grader> {
    sandbox::set_helper(env!("CARGO_BIN_EXE_learner"));
    let limits = Limits {
        wall_seconds: 600.0,
        cpu_seconds: 60.0,
        memory_bytes: 256 << 20,
        processes: 32,
        workspace_bytes: 16 << 20,
        ..Limits::default()
    };
    let settings =
        sandbox::Settings { tier: Some(tier), minimum_tier: Tier::B, parallel, warm_interpreter, limits, ..Default::default() };
    match Sandbox::start(&settings) {
        Ok(sandbox) => Some(Grader::new(sandbox, Settings::default())),
        Err(error) => {
            println!("left out: {error}");
            None
        }
    }
}

/// What is wrong with how an attack or its neighbour was graded.
fn complaint(attack: &Attack, graded: &Graded, is_attack: bool) -> Option<String> {
    let case = &attack.case;
    let wrong = match &graded.verdict {
        Verdict::Failed(reason) if is_attack => {
            !reason.contains(&case.says) || graded.report.overwritten != case.overwritten && graded.report.refused.is_none()
        }
        Verdict::Passed => is_attack,
        _ => true,
    };
    let (kind, report) = (if is_attack { "attack" } else { "honest" }, &graded.report);
    wrong.then(|| {
        format!("{} ({kind}): {:?}, put back {:?}, output {:?}", attack.name, graded.verdict, report.overwritten, report.output)
    })
}

/// Grades all attacks and neighbours, `at_once` at a time, and lists what went wrong.
fn grade_all(grader: &Grader, at_once: usize) -> Vec<String> {
    let attacks = attacks();
    let next = AtomicUsize::new(0);
    let complaints = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(attack) = attacks.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let graded = grade(grader, &task(), &attack.attack);
                    let neighbour = grade(grader, &task_with(&attack.case.honest_task), &attack.honest);
                    let found = [complaint(attack, &graded, true), complaint(attack, &neighbour, false)];
                    complaints.lock().expect("unpoisoned").extend(found.into_iter().flatten());
                }
            });
        }
    });
    complaints.into_inner().expect("unpoisoned")
}

#[test]
fn the_list_is_complete() {
    let attacks = attacks();
    let shown: Vec<u32> = attacks.iter().map(|attack| attack.case.item).chain(ELSEWHERE.map(|(item, _)| item)).collect();
    for item in 71..=100 {
        assert!(shown.contains(&item), "item {item} has neither a directory nor a line in the table");
    }
    assert!(attacks.iter().all(|attack| attack.case.verdict == "failed"));
    assert!(attacks.iter().all(|attack| attack.name.starts_with(&format!("{:03}-", attack.case.item))));
    assert!(ELSEWHERE.iter().all(|(item, _)| attacks.iter().all(|attack| attack.case.item != *item)));
}

#[test]
fn gold_passes_and_every_attack_fails_alone() {
    for tier in [Tier::A, Tier::B] {
        let Some(grader) = grader(tier, true, 4) else { continue };
        let (task, gold) = (task(), task().gold_patch);
        let graded = grader.grade_patch(&task, &gold);
        assert_eq!(graded.verdict, Verdict::Passed, "{graded:?}");
        assert_eq!((graded.report.tests.len(), graded.report.tier), (3, Some(tier)));
        assert_eq!(graded.report.laid.keys().collect::<Vec<_>>(), ["shop/price.py", "tests/rows.json", "tests/test_price.py"]);
        assert!(matches!(grader.grade(&task, &task.files).verdict, Verdict::Failed(_)));
        let complaints = grade_all(&grader, 1);
        assert!(complaints.is_empty(), "tier {tier}:\n{}", complaints.join("\n"));
    }
}

#[test]
fn every_attack_fails_among_fifteen_others() {
    for tier in [Tier::A, Tier::B] {
        let Some(grader) = grader(tier, true, 16) else { continue };
        let complaints = grade_all(&grader, 16);
        assert!(complaints.is_empty(), "tier {tier}:\n{}", complaints.join("\n"));
    }
}

#[test]
fn an_interpreter_of_its_own_gives_the_same_verdicts() {
    for tier in [Tier::A, Tier::B] {
        let Some(grader) = grader(tier, false, 4) else { continue };
        let complaints = grade_all(&grader, 4);
        assert!(complaints.is_empty(), "tier {tier}:\n{}", complaints.join("\n"));
    }
}

/// The doors that a process of its own closes are open in the process of the tests, or the attacks would prove nothing; and
/// tests that must fail find out whoever writes the report.
#[test]
fn in_the_process_of_the_tests_some_attacks_work_and_forged_reports_are_found_out() {
    let Some(grader) = [Tier::A, Tier::B].into_iter().find_map(|tier| grader(tier, true, 4)) else { return };
    let mut shared = task();
    shared.runner = TestRunner::InProcess;
    let gold = grader.grade_patch(&shared, &shared.gold_patch);
    assert_eq!((gold.verdict, gold.report.runner), (Verdict::Passed, TestRunner::InProcess));
    assert_eq!(gold.report.tests.len(), 3, "the test that must fail is not in the record: {:?}", gold.report.tests);
    let verdict = |name: &str| {
        let attack = attacks().into_iter().find(|attack| attack.name == name).unwrap_or_else(|| panic!("no {name}"));
        grade(&grader, &shared, &attack.attack).verdict
    };
    assert_eq!(verdict("082-frames-and-collector"), Verdict::Passed, "the expected values lie in the same process");
    assert_eq!(verdict("083-tests-on-disk"), Verdict::Passed, "the tests lie in the same directory");
    let forged = Verdict::Failed("a test that must fail did not: the report is forged".into());
    assert_eq!(verdict("080-runner-in-frames"), forged);
    assert_eq!(verdict("080-evidence"), forged);
    assert_eq!(verdict("075-exits"), forged);
}

#[test]
fn a_giant_patch_is_refused() {
    let Some(grader) = [Tier::A, Tier::B].into_iter().find_map(|tier| grader(tier, true, 1)) else { return };
    let giant = format!("--- /dev/null\n+++ b/big.py\n@@ -0,0 +1 @@\n+{}\n", "x".repeat(17 << 20));
    let graded = grader.grade_patch(&task(), &giant);
    assert_eq!(graded.verdict, Verdict::Failed("the patch is larger than 16 MiB".into()));
}
