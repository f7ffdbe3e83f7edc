//! A run file that lists its stages, and a run that begins with the weights of another.

use std::path::Path;

use serde_json::Value;

use crate::harness::{json, result, run, succeed, text};

const LIST: &str = r#"
[rft]
candidates = 40
steps = 6
[rl]
steps = 1
[evaluate]
tasks = 3
samples = 2
structure_tasks = 0
every = 0
[[stages]]
name = "warm"
kind = "rft"
[[stages]]
name = "stage1"
kind = "rl"
[[stages]]
name = "harder"
kind = "curriculum"
from = "stage1"
drop_unsolved = false
[[stages]]
name = "stage2"
kind = "rl"
rl.tasks_per_step = 2
model.rope = { rope_type = "yarn", factor = 4.0 }
[[stages]]
name = "end"
kind = "evaluate"
"#;

fn write(folder: &Path, text: &str) -> String {
    let path = folder.join("list.toml");
    std::fs::write(&path, text).expect("a file");
    path.display().to_string()
}

#[test]
fn a_list_of_stages_runs_in_order_and_another_run_begins_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let (list, path) = (write(folder.path(), LIST), folder.path().join("run"));
    let output = succeed(&["--recipe", "smoke", "--config", &list, "--out", path.to_str().unwrap()]);
    let said = text(&output.stdout);
    for mention in ["stage 1 of 5: rft (warm)", "stage 3 of 5: curriculum (harder)", "tasks remain", "YaRN of factor 4"] {
        assert!(said.contains(mention), "{mention}: {said}");
    }
    let (summary, metrics) = result(&path);
    let stages: Vec<(&str, &str)> = summary["stages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|stage| (stage["name"].as_str().unwrap(), stage["kind"].as_str().unwrap()))
        .collect();
    assert_eq!(stages, [("warm", "rft"), ("stage1", "rl"), ("harder", "curriculum"), ("stage2", "rl"), ("end", "evaluate")]);
    let named: Vec<&Value> = metrics.iter().filter(|line| line["kind"] == "rl").map(|line| &line["stage"]).collect();
    assert_eq!(named, ["stage1", "stage2"]);
    assert!(path.join("episodes/stage2-00001.jsonl").is_file() && path.join("report.html").is_file());

    let checkpoints = std::fs::read_dir(path.join("checkpoints")).unwrap().flatten();
    let checkpoint = checkpoints.map(|entry| entry.path()).max().unwrap();
    let config = json(&checkpoint.join("config.json"));
    assert_eq!(config["max_position_embeddings"], 4096);
    assert_eq!((&config["rope_scaling"]["rope_type"], &config["rope_parameters"]["factor"]), (&"yarn".into(), &4.0.into()));

    // A run of nothing but an evaluation has the weights that it began with.
    let only = "[evaluate]\ntasks = 3\nsamples = 2\nstructure_tasks = 0\n[[stages]]\nname = \"end\"\nkind = \"evaluate\"\n";
    let (list, next) = (write(folder.path(), only), folder.path().join("next"));
    let model = checkpoint.to_str().unwrap();
    succeed(&["--recipe", "smoke", "--config", &list, "--model", model, "--out", next.to_str().unwrap()]);
    let begun = json(&next.join("summary.json"));
    assert_eq!(begun["weights_sha256"], summary["weights_sha256"]);
}

#[test]
fn stages_that_make_no_sense_are_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    for (wrong, mention) in [
        ("[[stages]]\nname = \"a\"\nkind = \"curriculum\"\nfrom = \"b\"\n", "no earlier stage"),
        ("[[stages]]\nname = \"a\"\nkind = \"rl\"\nagent.max_tokens = 3000\n", "agent.max_tokens of stage a"),
        (
            "[[stages]]\nname = \"a\"\nkind = \"rl\"\nagent.max_tokens = 5000\nmodel.rope = { rope_type = \"yarn\", factor = 4.0 }\n",
            "at most 4096",
        ),
    ] {
        let list = write(folder.path(), wrong);
        let output = run(&["--recipe", "smoke", "--config", &list, "--out", out.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(mention) && said.trim().lines().count() == 1, "{said}");
        assert!(!out.exists());
    }
}

#[test]
fn a_checkpoint_of_an_older_layout_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (list, path) = (write(folder.path(), LIST), folder.path().join("run"));
    let out = path.to_str().unwrap();
    succeed(&["--recipe", "smoke", "--config", &list, "--out", out]);
    let checkpoints = std::fs::read_dir(path.join("checkpoints")).unwrap().flatten();
    let state = checkpoints.map(|entry| entry.path()).max().unwrap().join("state.json");
    let mut older = json(&state);
    let run_state = older["run"].as_object_mut().unwrap();
    run_state.remove("stage");
    run_state.insert("point".into(), "rl".into());
    std::fs::write(&state, older.to_string()).unwrap();
    let output = run(&["--resume", "--out", out]);
    let said = text(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("state.json") && said.contains("older layout") && said.trim().lines().count() == 1, "{said}");
}
