//! The studies of `studies/`, cut to seconds: whether they run, for what they find means nothing then.

use std::path::Path;
use std::process::{Command, Output};

use crate::harness::text;

fn ablations(out: &Path) -> Output {
    let mut command = Command::new("python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/studies/ablations.py"));
    command.args(["--smoke", "--jobs", "2", "--learner", env!("CARGO_BIN_EXE_learner"), "--out"]).arg(out);
    command.output().expect("python3 starts")
}

#[test]
fn the_ablation_study_runs_repeats_nothing_and_names_the_log_of_what_fails() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("study");

    let first = ablations(&out);
    let said = text(&first.stdout);
    assert!(first.status.success(), "{said}\n{}", text(&first.stderr));
    assert_eq!(said.lines().count(), 4, "a line for each of three runs and the place of the tables: {said}");
    let tables = std::fs::read_to_string(out.join("tables.md")).expect("the study wrote its tables");
    let rows = |name: &str| tables.lines().filter(|line| line.starts_with(&format!("| {name} |"))).count();
    assert_eq!((rows("base"), rows("no length penalty")), (2, 3), "the base is not compared with itself: {tables}");

    let again = ablations(&out);
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(text(&again.stdout).lines().count(), 1, "all runs were complete");

    let base = out.join("base-seed-0");
    std::fs::remove_file(base.join("summary.json")).expect("a complete run has a summary");
    std::fs::write(base.join("run.toml"), "rl.stepps = 1\n").unwrap();
    let broken = ablations(&out);
    assert_eq!(broken.status.code(), Some(1));
    assert!(text(&broken.stderr).contains("base-seed-0.log"), "{}", text(&broken.stderr));
}
