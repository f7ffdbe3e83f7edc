//! `learner evaluate`: figures with their rules, and episodes that come again.

use serde_json::Value;

use crate::harness::{run, succeed, text};

const SMALL: [&str; 7] = ["evaluate", "--recipe", "smoke", "--set", "evaluate.tasks=3", "--set", "evaluate.structure_tasks=0"];

fn evaluate(more: &[&str]) -> Value {
    let output = succeed(&[&SMALL[..], &["--json"], more].concat());
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[test]
fn equal_seeds_give_equal_episodes_and_every_figure_is_there() {
    let (first, again) = (evaluate(&["--samples", "4", "--k", "1,2,4"]), evaluate(&["--samples", "4", "--k", "1,2,4"]));
    assert_eq!(first, again);
    let other = evaluate(&["--samples", "4", "--seed", "7"]);
    assert_ne!(other["episodes_sha256"], first["episodes_sha256"]);
    assert!(other["pass_at_k"].is_null(), "only what was asked for");

    assert_eq!(first["pass_at_k"]["1"], first["pass_at_1"]);
    for field in ["standard_error", "turns_mean", "turns_max", "episode_tokens_mean", "episode_tokens_max"] {
        assert!(first[field].is_number(), "{field}: {first}");
    }
    assert_eq!(first["decoding"]["temperature"], 1.0);
    assert_eq!((&first["decoding"]["top_p"], &first["decoding"]["top_k"]), (&Value::from(1.0), &Value::from(0)));
    let attempts = first["attempts"].as_object().expect("attempts by task");
    assert_eq!(attempts.len(), 3);
    assert!(attempts.values().all(|task| task["made"] == 4));
    let endings: u64 = first["endings"].as_object().expect("endings").values().filter_map(Value::as_u64).sum();
    assert_eq!(endings, 12);

    let said = text(&succeed(&[&SMALL[..], &["--samples", "2", "--k", "2"]].concat()).stdout);
    for mention in ["pass@1", "standard error", "pass@2", "endings:", "token limit", "decoding: temperature 1", "seed 0"] {
        assert!(said.contains(mention), "{mention}: {said}");
    }
}

#[test]
fn more_attempts_than_are_made_are_refused_with_the_rule() {
    let output = run(&[&SMALL[..], &["--samples", "4", "--k", "1,8"]].concat());
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("evaluate.k is 8") && said.contains("evaluate.samples = 4"), "{said}");
    assert_eq!(run(&[&SMALL[..], &["--k", "0"]].concat()).status.code(), Some(2));
}
