//! The recipes that come with the program: shown with their sources, refused where a part is missing, and made small.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::harness::{run, succeed, text};

const PUBLISHED: [&str; 6] = ["deepswe", "nebius", "nebius-rft", "nebius-stage1", "nebius-stage2", "dapo"];

fn json(arguments: &[&str]) -> Value {
    serde_json::from_slice(&succeed(arguments).stdout).unwrap()
}

/// A recipe's settings by name, as TOML.
fn settings(recipe: &str) -> BTreeMap<String, String> {
    let shown = json(&["recipe", "show", recipe, "--json"]);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    shown["settings"].as_array().unwrap().iter().map(|setting| (text(&setting["key"]), text(&setting["value"]))).collect()
}

#[test]
fn recipes_are_listed_and_shown_with_their_sources() {
    let list = text(&succeed(&["recipe", "list"]).stdout);
    for name in PUBLISHED.into_iter().chain(["quickstart", "smoke"]) {
        assert!(list.lines().any(|line| line.split_whitespace().next() == Some(name)), "{name} is not in {list}");
    }
    let said = text(&succeed(&["recipe", "show", "nebius-stage1"]).stdout);
    let line = |key: &str| {
        said.lines().find(|line| line.split_whitespace().any(|word| word == key)).unwrap_or_else(|| panic!("{key}: {said}"))
    };
    assert!(line("agent.max_turns").contains("paper table 3"));
    assert!(line("rl.advantage.ddof").starts_with("?"));
    assert!(line("evaluate.structure_tasks").starts_with("*"));
    for words in ["that the publication does not state (?)", "--scale tiny", "Cannot run yet"] {
        assert!(said.contains(words), "{said}");
    }
    let output = run(&["recipe", "show", "nonesuch"]);
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("deepswe"));
}

/// Every value that the reference of the two systems gives.
#[test]
fn published_values_are_those_of_the_publications() {
    for (recipe, values) in [
        (
            "deepswe",
            &[
                ("agent.max_turns", "50"),
                ("agent.max_tokens", "36864"),
                ("rl.group_size", "8"),
                ("rl.advantage.estimator", "\"leave_one_out\""),
                ("rl.filter.masked_endings", "[\"token_limit\", \"turn_limit\", \"timeout\"]"),
                ("rl.filter.masked_attempts", "\"in_baseline\""),
                ("rl.loss.aggregation", "\"seq_mean_token_sum_norm\""),
                ("rl.loss.constant", "32768"),
                ("rl.loss.clip.epsilon_low", "0.2"),
                ("rl.loss.clip.epsilon_high", "0.28"),
                ("rl.loss.clip.dual_clip", "3.0"),
                ("rl.loss.kl.coefficient", "0.0"),
                ("rl.optimizer.weight_decay", "0.01"),
                ("rl.schedule.peak", "1e-6"),
                ("step.skip_norm", "100000.0"),
                ("evaluate.samples", "16"),
                ("evaluate.k", "[16]"),
                ("sandbox.limits.memory_bytes", "1073741824"),
            ][..],
        ),
        (
            "nebius-stage1",
            &[
                ("agent.max_turns", "40"),
                ("agent.max_tokens", "65536"),
                ("rl.tasks_per_step", "300"),
                ("rl.group_size", "10"),
                ("rl.sequences_per_update", "128"),
                ("rl.reward.step_penalty.free_turns", "10"),
                ("rl.reward.step_penalty.turn_limit", "40"),
                ("rl.loss.clip.epsilon_high", "0.3"),
                ("rl.filter.drop_zero_advantage", "true"),
                ("rl.optimizer.beta2", "0.999"),
                ("evaluate.samples", "10"),
                ("sandbox.limits.memory_bytes", "2147483648"),
                ("rl.optimizer.weight_decay", "0.1"),
            ],
        ),
        (
            "nebius-stage2",
            &[
                ("agent.max_turns", "80"),
                ("agent.max_tokens", "131072"),
                ("model.rope.factor", "4.0"),
                ("rl.tasks_per_step", "100"),
                ("rl.sequences_per_update", "256"),
                ("rl.reward.step_penalty.turn_limit", "80"),
                ("rl.loss.clip.epsilon_high", "0.26"),
            ],
        ),
        (
            "nebius-rft",
            &[
                ("rft.attempts_per_task", "10"),
                ("rft.passes", "1"),
                ("rft.train_on_bad_turns", "false"),
                ("rft.schedule.peak", "5e-6"),
                ("rft.schedule.warmup_steps", "10"),
                ("rft.schedule.decay", "\"cosine\""),
                ("rft.optimizer.weight_decay", "0.1"),
            ],
        ),
        (
            "dapo",
            &[
                ("rl.tasks_per_step", "512"),
                ("rl.group_size", "16"),
                ("rl.reward.failed", "-1.0"),
                ("rl.reward.overlong_penalty.token_limit", "20480"),
                ("rl.reward.overlong_penalty.buffer_tokens", "4096"),
                ("rl.dynamic_sampling.tasks_per_batch", "1536"),
                ("rl.dynamic_sampling.most_batches", "10"),
                ("rl.loss.aggregation", "\"token_mean\""),
                ("rl.loss.clip.epsilon_high", "0.28"),
            ],
        ),
    ] {
        let settings = settings(recipe);
        for (key, value) in values {
            let found = settings.get(*key).unwrap_or_else(|| panic!("{recipe}: {key} is not given"));
            let number = |text: &str| text.parse::<f64>().ok();
            assert!(
                found == value || number(found).is_some_and(|found| Some(found) == number(value)),
                "{recipe}: {key} = {found}"
            );
        }
    }
}

/// The whole pipeline in one file says the same as its three parts.
#[test]
fn nebius_is_the_sum_of_its_parts() {
    let (whole, parts) = (settings("nebius"), ["nebius-rft", "nebius-stage1", "nebius-stage2"].map(settings));
    for (part, stage) in parts.iter().zip(["rft", "stage1", "stage2"]) {
        for (key, value) in part.iter().filter(|(key, _)| {
            !key.starts_with("stages") && !["run.name", "model.directory", "tasks.train"].contains(&key.as_str())
        }) {
            let own = whole.get(&format!("stages.{stage}.{key}")).or_else(|| whole.get(key));
            assert_eq!(own, Some(value), "{stage}: {key}");
        }
    }
}

#[test]
fn a_recipe_at_full_scale_is_refused_naming_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    for (recipe, parts) in [
        ("deepswe", ["R2E-Gym scaffold", "container"]),
        ("nebius", ["SWE-agent", "SWE-rebench"]),
        ("dapo", ["one answer", "a number"]),
    ] {
        let output = run(&["--recipe", recipe, "--out", out.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(parts.iter().all(|part| said.contains(part)) && said.contains("--scale tiny"), "{said}");
        assert!(!out.exists());
    }
}

#[test]
fn tiny_keeps_what_a_recipe_is_and_changes_sizes_by_rule() {
    for recipe in PUBLISHED {
        assert_eq!(text(&succeed(&["config", "check", "--recipe", recipe, "--scale", "tiny"]).stdout), "ok\n", "{recipe}");
        let shown = json(&["recipe", "show", recipe, "--scale", "tiny", "--json"]);
        for change in shown["changes"].as_array().unwrap() {
            let (key, rule) = (change["key"].as_str().unwrap(), change["rule"].as_str().unwrap());
            assert!(!rule.is_empty(), "{recipe}: {key} changes by no rule");
            for kept in
                ["rl.filter", "rl.advantage", "rl.loss.clip", "rl.loss.aggregation", "rl.group_size", "rl.optimizer", "engine"]
            {
                assert!(!key.contains(kept), "{recipe}: {key} changes");
            }
        }
    }
    let tiny = json(&["config", "show", "--recipe", "nebius", "--scale", "tiny", "--json"]);
    let stage = |name: &str| tiny["stages"].as_array().unwrap().iter().find(|stage| stage["name"] == name).unwrap();
    assert_eq!((&tiny["agent"]["max_turns"], &stage("stage2")["agent"]["max_turns"]), (&32.into(), &64.into()));
    assert_eq!((&tiny["agent"]["max_tokens"], &stage("stage2")["agent"]["max_tokens"]), (&384.into(), &768.into()));
    assert_eq!(tiny["rl"]["reward"]["step_penalty"], serde_json::json!({ "free_turns": 8, "turn_limit": 32, "weight": 1.0 }));
    assert_eq!(stage("stage2")["rl"]["reward"]["step_penalty"]["turn_limit"], 64);
    // A flag lies on top of the scale.
    let more = json(&["config", "show", "--recipe", "dapo", "--scale", "tiny", "--set", "rl.steps=7", "--json"]);
    assert_eq!(more["rl"]["steps"], 7);
    let output = run(&["config", "check", "--scale", "tiny"]);
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("that small already"));
}
