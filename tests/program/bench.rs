//! `learner bench`: the promised keys are there, whatever the numbers.

use serde_json::Value;

use crate::harness::{run, succeed, text};

fn report(arguments: &[&str]) -> Value {
    let output = succeed(arguments);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

#[track_caller]
fn has(report: &Value, keys: &[&str]) {
    for key in keys {
        assert!(report.get(key).is_some(), "{key} is missing from {report}");
    }
}

#[test]
fn a_step_is_measured_and_traced() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let trace_argument = trace.to_str().unwrap();
    let report =
        report(&["bench", "step", "--model", "tiny", "--context", "256", "--steps", "2", "--json", "--trace", trace_argument]);
    has(
        &report,
        &["device", "step_ms", "tokens_per_second_per_device", "mfu_c6", "mfu_c12", "memory", "phases_ms", "operations"],
    );
    assert_eq!(
        (&report["tokens"], &report["trained_tokens"], &report["parameters"]),
        (&512.into(), &384.into(), &450_304.into())
    );
    assert_eq!((&report["mfu_c6"], &report["mfu_c12"]), (&Value::Null, &Value::Null), "a CPU has no known peak");
    // By hand: 6 (393,216 x 512 + 56,320 x 384) and 2 layers x 128 x (256^2 + 128^2 + 64^2 + 2 x 32^2).
    assert_eq!(report["flops"]["matrices"], 1_337_720_832.0);
    assert_eq!(report["flops"]["attention_c6"], 6.0 * 256.0 * 88_064.0);
    has(&report["phases_ms"], &["prepare", "forward", "head", "backward", "optimizer", "host"]);
    has(&report["memory"]["bytes"], &["weights", "gradients", "optimizer", "activations"]);

    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let operations: Vec<&str> =
        trace["traceEvents"].as_array().unwrap().iter().filter_map(|event| event["name"].as_str()).collect();
    for operation in ["forward", "block_attention", "block_attention_backward", "adamw"] {
        assert!(operations.contains(&operation), "{operation}: {operations:?}");
    }
}

#[test]
fn the_engine_is_measured() {
    let report =
        report(&["bench", "rollout", "--model", "tiny", "--context", "64", "--sequences", "3", "--steps", "4", "--json"]);
    has(&report, &["device", "prefill_tokens_per_second", "decode_tokens_per_second", "decode_ms_per_step", "memory"]);
    // 64 tokens of 3 sequences, keys and values of 2 layers x 2 heads x 32 numbers of 4 bytes.
    assert_eq!((&report["prompt_tokens"], &report["cache_bytes"]), (&59.into(), &(64 * 3 * 2 * 2 * 64 * 4).into()));
    has(&report["decode_phases_ms"], &["forward", "head"]);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (arguments, words) in [
        (&["step", "--model", "nonesuch", "--context", "256"][..], &["nonesuch", "qwen3-8b"][..]),
        (&["step", "--model", "tiny", "--context", "8"], &["--context", "32"]),
        (&["step", "--model", "tiny", "--context", "256", "--steps", "0"], &["--steps"]),
        (&["step", "--model", "tiny", "--context", "256", "--trace", "/nonexistent/trace.json"], &["--trace", "/nonexistent"]),
        (&["rollout", "--model", "tiny", "--context", "17"], &["--context", "18"]),
    ] {
        let output = run(&[&["bench"], arguments].concat());
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(2), 1), "{arguments:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{arguments:?}: {said}");
    }
}
