//! The smoke recipe goes through every room; equal settings give equal results, for any number of threads.

use crate::harness::{json, result, succeed, text};

#[test]
fn equal_seeds_give_equal_weights_and_metrics_with_one_and_two_threads_and_seeds_matter() {
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    for (name, seed, threads) in [("one", "5", "1"), ("two", "5", "2"), ("other", "6", "2")] {
        let threads = format!("run.threads={threads}");
        let path = out(name);
        succeed(&["--recipe", "smoke", "--out", path.to_str().unwrap(), "--seed", seed, "--set", &threads]);
    }
    let (one, two) = (result(&out("one")), result(&out("two")));
    assert_eq!(one, two);
    assert_ne!(json(&out("other").join("summary.json"))["weights_sha256"], one.0["weights_sha256"]);

    let (summary, metrics) = one;
    assert_eq!(summary["mismatch_max"], 0.0);
    for name in ["before_rft", "after_rft", "rl_step_3", "after_rl"] {
        let evaluation = &summary["evaluation"][name];
        for field in ["pass_at_1", "ci95", "tasks", "samples", "ran_tests", "edited_after_failure"] {
            assert!(!evaluation[field].is_null(), "{name}.{field}: {evaluation}");
        }
    }
    assert!(summary["evaluation"]["after_rl"]["pass_at_8"].is_f64());
    let kinds: Vec<&str> = metrics.iter().filter_map(|line| line["kind"].as_str()).collect();
    for (kind, lines) in [("demonstrations", 1), ("rft", 240), ("rl", 6), ("evaluation", 4)] {
        assert_eq!(kinds.iter().filter(|name| **name == kind).count(), lines, "{kind}");
    }
    for line in metrics.iter().filter(|line| line["kind"] == "rl") {
        assert_eq!(line["mismatch"], 0.0);
        let endings: u64 = line["endings"].as_object().unwrap().values().filter_map(|count| count.as_u64()).sum();
        assert_eq!(endings, 24);
    }
    for file in ["run.toml", "report.html", "episodes/rft-kept.jsonl", "episodes/rl-00006.jsonl", "episodes/after_rl.jsonl"] {
        assert!(out("one").join(file).is_file(), "{file}");
    }
    let checkpoints: Vec<_> = std::fs::read_dir(out("one").join("checkpoints")).unwrap().flatten().collect();
    assert_eq!(checkpoints.len(), 2, "checkpoint.keep");
    assert!(checkpoints.iter().all(|entry| entry.path().join("DONE").exists()));
    assert!(std::fs::read_dir(out("one").join("tensorboard")).unwrap().next().is_some());
}

#[test]
fn json_is_one_object_on_standard_output_and_people_read_standard_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let short = ["--set", "rft.steps=3", "--set", "rl.steps=1", "--set", "rft.candidates=40"];
    let mut arguments = vec!["--recipe", "smoke", "--json", "--out", path.to_str().unwrap()];
    arguments.extend(short);
    let output = succeed(&arguments);
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(printed, json(&path.join("summary.json")));
    assert!(text(&output.stderr).contains("held-out tasks"));
    assert!(!output.stderr.contains(&0x1b), "no control characters without a terminal");

    let checkpoint = std::fs::read_dir(path.join("checkpoints")).unwrap().flatten().map(|entry| entry.path()).max().unwrap();
    let model = checkpoint.to_str().unwrap();
    let output = succeed(&["evaluate", "--recipe", "smoke", "--model", model, "--samples", "2", "--json"]);
    let evaluation: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(evaluation["samples"], 2);
    let output = succeed(&["generate", "--model", model, "--prompt", "make(nums, b): sum", "--max-tokens", "5", "--json"]);
    let generated: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let ids: Vec<u64> =
        ["prompt_ids", "ids"].iter().flat_map(|name| generated[*name].as_array().unwrap()).filter_map(|id| id.as_u64()).collect();
    let list = folder.path().join("ids.json");
    std::fs::write(&list, serde_json::to_string(&[&ids]).unwrap()).unwrap();
    let output = succeed(&["score", "--model", model, "--ids", list.to_str().unwrap(), "--json"]);
    let scores: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let scored = scores["log_probs"][0].as_array().unwrap();
    assert_eq!(scored.len() + 1, ids.len());
    let sampled = generated["log_probs"].as_array().unwrap();
    assert_eq!(&scored[scored.len() - sampled.len()..], sampled.as_slice(), "score gives what sampling noted, to the last bit");
}

#[test]
fn a_batch_that_is_all_masked_leaves_the_weights_alone_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    // A model that has learned nothing makes no valid call: its attempts end there, or where a turn has no more tokens.
    let untrained = ["rft.candidates=0", "rl.steps=1", "rl.filter.groups=\"off\"", "rl.filter.drop_zero_advantage=false"];
    for (name, masked, skips) in [("masked", "[\"bad_call\", \"token_limit\"]", true), ("trained", "[\"timeout\"]", false)] {
        let path = folder.path().join(name);
        let masked = format!("rl.filter.masked_endings={masked}");
        let mut arguments = vec!["--recipe", "smoke", "--out", path.to_str().unwrap()];
        arguments.extend(untrained.into_iter().chain([masked.as_str()]).flat_map(|setting| ["--set", setting]));
        let said = text(&succeed(&arguments).stdout);
        let warned = said.contains("step 1: the weights were left alone: no attempt is left to train on");
        let metrics = std::fs::read_to_string(path.join("metrics.jsonl")).unwrap();
        let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let steps: Vec<_> = lines.filter(|line| line["kind"] == "rl").collect();
        assert_eq!(steps.len(), 1);
        assert_eq!((warned, &steps[0]["skipped"], steps[0]["tokens_trained"] == 0), (skips, &skips.into(), skips), "{said}");
    }
}
