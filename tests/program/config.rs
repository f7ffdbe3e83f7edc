//! `learner config`, and what a wrong run file is told before anything starts.

use std::path::Path;

use serde_json::Value;

use crate::harness::{run, succeed, text};

/// The lines that a wrong file is told, after the one that counts them. The run directory must not appear.
fn problems(content: &str, arguments: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("my.toml"), folder.path().join("out"));
    std::fs::write(&file, content).unwrap();
    let mut all = vec!["--config", file.to_str().unwrap(), "--out", out.to_str().unwrap()];
    all.extend(arguments);
    let output = run(&all);
    let said = text(&output.stderr).replace(folder.path().to_str().unwrap(), "DIR");
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(!out.exists(), "{said}");
    let lines: Vec<String> = said.trim_end().lines().map(str::to_owned).collect();
    match lines[0].strip_prefix("learner: ") {
        Some(only) if lines.len() == 1 => vec![only.to_owned()],
        _ => {
            assert_eq!(lines[0], format!("learner: {} problems in the settings", lines.len() - 1));
            lines[1..].to_vec()
        }
    }
}

#[test]
fn all_that_is_wrong_is_listed_at_once_before_anything_starts() {
    let file = "\
[run]
device = \"tpu\"
[rl]
stepps = 3
group_size = \"many\"
[rl.reward.step_penalty]
free_turns = 10
turn_limit = 10
[rl.loss]
objective = \"clip\"
[rl.loss.correction]
old_policy = \"sampler\"
weight = { upper = 2.0 }
[evaluate]
samples = 4
k = [1, 8]
[checkpoints]
keep = 1
";
    let found = problems(file, &["--set", "rl.loss.clip.epsilon_high=-1", "--set", "engine.temprature=1"]);
    let expected = [
        "checkpoints in DIR/my.toml line 17: no such key; did you mean checkpoint?",
        "rl.group_size in DIR/my.toml line 5: found text \"many\", expected whole number",
        "rl.stepps in DIR/my.toml line 4: no such key; did you mean rl.steps?",
        "engine.temprature in --set engine.temprature=1: no such key; did you mean engine.temperature?",
        "run.device is \"tpu\": ",
        "rl.reward.step_penalty.turn_limit is 10: give more than step_penalty.free_turns = 10",
        "rl.loss.clip.epsilon_high is -1: ",
        "rl.loss.correction.weight is set: ",
        "evaluate.k is [1, 8]: ",
    ];
    for start in expected {
        assert_eq!(found.iter().filter(|line| line.starts_with(start)).count(), 1, "{start}\n{}", found.join("\n"));
    }
    assert_eq!(found.len(), expected.len(), "{}", found.join("\n"));
}

#[test]
fn a_problem_says_where_its_value_was_given() {
    assert_eq!(
        problems("[rl]\ngroup_size = 1\n", &["--set", "agent.max_turns=0"]),
        ["agent.max_turns is 0: give at least 1 (--set agent.max_turns=0)", &problems("[rl]\ngroup_size = 1\n", &[])[0].clone(),]
    );
    assert!(problems("[rl]\ngroup_size = 1\n", &[])[0].ends_with("(DIR/my.toml line 2)"));
    assert!(problems("[rl]\nsteps = = 3\n", &["--set", "rl.group_size=1"])[0].starts_with("DIR/my.toml: line 2: "));
}

#[test]
fn check_says_ok_or_what_is_wrong() {
    assert_eq!(text(&succeed(&["config", "check"]).stdout), "ok\n");
    let output = run(&["config", "check", "--set", "rl.group_size=1", "--set", "rl.stepps=2"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).starts_with("learner: 2 problems in the settings\n"));
    let output = run(&["config", "check", "--json", "--set", "rl.stepps=2"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(2), String::new()));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["ok"], found["problems"].as_array().unwrap().len()), (&Value::Bool(false), 1));
    let said = text(&succeed(&["config", "check", "--recipe", "deepswe"]).stdout);
    assert!(said.starts_with("ok, but it cannot run yet:\nagent.scaffold is \"r2e_gym\": "), "{said}");
}

#[test]
fn what_show_prints_is_the_same_run_file_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.toml");
    for recipe in ["quickstart", "smoke", "deepswe", "nebius", "nebius-rft", "nebius-stage1", "nebius-stage2", "dapo"] {
        let shown = succeed(&["config", "show", "--recipe", recipe]).stdout;
        std::fs::write(&file, &shown).unwrap();
        let again = succeed(&["config", "show", "--config", file.to_str().unwrap()]).stdout;
        assert_eq!(text(&again), text(&shown), "{recipe}");
    }
    let json: Value = serde_json::from_slice(&succeed(&["config", "show", "--json"]).stdout).unwrap();
    assert_eq!(json["rl"]["group_size"], 8);
}

#[test]
fn diff_names_the_keys_that_differ_with_both_values() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    };
    let diff = |a: &Path, b: &str| text(&succeed(&["config", "diff", a.to_str().unwrap(), b]).stdout);
    let own = write("own.toml", b"[rl]\ngroup_size = 6\n");
    let said = diff(&own, "quickstart");
    let rows: Vec<Vec<&str>> = said.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows, [["rl.group_size", "6", "8"]]);
    // A run directory against the recipe it came from.
    let shown = succeed(&["config", "show", "--recipe", "smoke", "--set", "rl.steps=1"]).stdout;
    write("run/run.toml", &shown);
    let said = diff(&folder.path().join("run"), "smoke");
    assert!(said.lines().count() == 3 && said.contains("rl.steps"), "{said}");
    assert_eq!(text(&succeed(&["config", "diff", "smoke", "smoke"]).stdout), "no key differs\n");
    let json: Value = serde_json::from_slice(&succeed(&["config", "diff", "--json", "quickstart", "smoke"]).stdout).unwrap();
    assert!(json.as_array().unwrap().iter().any(|row| row["key"] == "rl.steps" && row["a"] == "56" && row["b"] == "6"));
    assert_eq!(run(&["config", "diff", "quickstart", "/nonexistent.toml"]).status.code(), Some(2));
}

#[test]
fn keys_are_explained_by_the_program_itself() {
    let said = text(&succeed(&["config", "keys", "rl.advantage"]).stdout);
    for word in ["rl.advantage.estimator", "\"grpo\"", "default \"leave_one_out\"", "`dr_grpo`: "] {
        assert!(said.contains(word), "{word} is not in {said}");
    }
    let said = text(&succeed(&["config", "show", "--explain", "rl.group_size", "--set", "rl.group_size=5"]).stdout);
    assert!(said.starts_with("rl.group_size = 5\n") && said.contains("default 8"), "{said}");
    let output = run(&["config", "show", "--explain", "rl.group_sise"]);
    assert!(text(&output.stderr).contains("did you mean rl.group_size?"));
    assert_eq!(run(&["config", "keys", "qqqqqqqqqq"]).status.code(), Some(2));
}
