//! `learner bench`: the promised keys are there, whatever the numbers.

use learner::model::ModelConfig;
use learner::parallel::{Collective, ContextPlan, Mesh, micro_batch_schedule, pairs_per_token};
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
fn two_ranks_are_measured_against_one() {
    let report = report(&[
        "bench",
        "step",
        "--model",
        "tiny",
        "--context",
        "512",
        "--steps",
        "1",
        "--gpus-per-node",
        "2",
        "--context-parallel",
        "2",
        "--recompute",
        "--json",
    ]);
    has(&report, &["step_ms", "tokens_per_second", "tokens_per_second_per_device", "collective_ms", "exposed_ms", "notes"]);
    let told = |key: &str| report[key].clone();
    assert_eq!((told("devices"), told("data_parallel"), told("context_parallel")), (2.into(), 1.into(), 2.into()));
    assert_eq!((told("tokens"), told("trained_tokens"), told("mfu_c6")), (1024.into(), 768.into(), Value::Null));
    assert_eq!(report["flops"]["matrices"], 2_675_441_664.0, "of all ranks together");

    // Two micro-batches. Matrices and norms travel in f32 here: each rank hands in its half of them, and all of the gradients.
    let tiny = ModelConfig::named("tiny").unwrap();
    let mesh = Mesh::new(1, 2, 2).unwrap();
    let planned = |lengths: &[usize], collective: Collective| -> u64 {
        let plan = ContextPlan::new(lengths, 2, pairs_per_token(&tiny));
        let stages = micro_batch_schedule(&tiny, &mesh, &plan, size_of::<f32>());
        let transfers = stages.into_iter().flat_map(|stage| stage.transfers);
        transfers.filter(|transfer| transfer.collective == collective).map(|transfer| transfer.payload_bytes(&mesh)).sum()
    };
    for (group, operation, collectives) in [
        ("world", "all_gather", &[Collective::GatherWeights][..]),
        ("world", "reduce_scatter", &[Collective::ScatterGradients]),
        ("context", "all_gather", &[Collective::GatherKeysValues, Collective::GatherQueries, Collective::GatherScores]),
    ] {
        let row =
            report["collectives"].as_array().unwrap().iter().find(|row| row["group"] == group && row["operation"] == operation);
        let row = row.unwrap_or_else(|| panic!("{group} {operation} is missing from {report}"));
        let of_step = |collective: &Collective| {
            let bytes = planned(&[512], *collective) + planned(&[64, 64, 128, 256], *collective);
            assert!(bytes > 0, "nothing is planned for {collective:?}");
            bytes
        };
        assert_eq!(row["bytes"], collectives.iter().map(of_step).sum::<u64>() as f64, "{group} {operation}");
        assert!(row["exposed_milliseconds"].as_f64() <= row["milliseconds"].as_f64());
    }

    assert_eq!(report["memory"]["source"], "process");
    assert_eq!(report["memory"]["bytes_by_rank"].as_array().unwrap().len(), 2);
    let speed = |key: &str| report["tokens_per_second_per_device"].as_f64().unwrap() / report["scaling"][key].as_f64().unwrap();
    assert_eq!(report["scaling"]["source"], "measured");
    assert_eq!(report["scaling"]["share"], speed("one_rank_tokens_per_second"));
}

#[test]
fn a_shape_of_ones_own_is_measured_against_what_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shape.json");
    let mut shape: Value = serde_json::from_str(&ModelConfig::named("tiny").unwrap().to_json()).unwrap();
    shape["vocab_size"] = 100.into();
    std::fs::write(&file, shape.to_string()).unwrap();
    let arguments =
        ["bench", "step", "--model", file.to_str().unwrap(), "--context", "64", "--steps", "1", "--gpus-per-node", "2"];
    let known = report(&[&arguments[..], &["--one-rank-tokens-per-second", "1e9", "--json"]].concat());
    assert_eq!((&known["parameters"], &known["data_parallel"]), (&(450_304 - 340 * 128).into(), &2.into()));
    assert_eq!((&known["tokens"], &known["scaling"]["source"]), (&256.into(), &"given".into()));
    assert_eq!(known["scaling"]["share"], known["tokens_per_second_per_device"].as_f64().unwrap() / 1e9);
    let unknown = succeed(&[&arguments[..], &["--one-rank-tokens-per-second", "none"]].concat());
    assert!(text(&unknown.stdout).contains("one rank        n/a") && text(&unknown.stdout).contains("share its cores"));
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
        (&["step", "--model", "Cargo.toml", "--context", "256"], &["--model Cargo.toml", "JSON"]),
        (
            &["step", "--model", "tiny", "--context", "256", "--context-parallel", "2"],
            &["parallel.context = 2", "--gpus-per-node"],
        ),
        (
            &["step", "--model", "tiny", "--context", "256", "--one-rank-tokens-per-second", "5"],
            &["--one-rank-tokens-per-second", "one rank"],
        ),
        (
            &["step", "--model", "tiny", "--context", "256", "--gpus-per-node", "2", "--context-parallel", "3"],
            &["parallel.context = 3", "does not divide the 2 ranks"],
        ),
        (
            &["step", "--model", "tiny", "--context", "256", "--gpus-per-node", "2", "--context-parallel", "0"],
            &["--context-parallel 0"],
        ),
        (
            &["step", "--model", "tiny", "--context", "256", "--gpus-per-node", "2", "--trace", "/tmp/trace.json"],
            &["--trace", "one rank"],
        ),
        (
            &["step", "--model", "tiny", "--context", "256", "--gpus-per-node", "2", "--gemm", "cublaslt"],
            &["cublaslt", "only with a GPU"],
        ),
        (
            &["step", "--model", "tiny", "--context", "256", "--device", "emulated:2", "--gpus-per-node", "3"],
            &["--gpus-per-node 3", "emulated:2"],
        ),
        (&["step", "--model", "tiny", "--context", "256", "--nodes", "2", "--node-rank", "0"], &["--coordinator"]),
    ] {
        let output = run(&[&["bench"], arguments].concat());
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(2), 1), "{arguments:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{arguments:?}: {said}");
    }
}
