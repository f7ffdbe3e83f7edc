//! The program on devices other than the CPU: the emulated GPU does the whole job, a GPU that is not there is refused.

use std::path::Path;

use serde_json::Value;

use crate::harness::{result, run, succeed, text};

/// Enough of the smoke recipe for every kernel to run, in the engine and in both stages.
const SHORT: [&str; 4] = ["rft.candidates=60", "rft.steps=12", "rl.steps=2", "evaluate.tasks=2"];

fn smoke(out: &Path, device: &str, settings: &[&str], flags: &[&str]) -> (Value, Vec<Value>) {
    let mut arguments = vec!["--recipe", "smoke", "--device", device, "--out", out.to_str().unwrap()];
    settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
    arguments.extend(flags);
    let output = succeed(&arguments);
    let said = text(&output.stdout);
    assert!(said.contains("Emulated GPU") && said.contains("device memory before the first step"), "{said}");
    result(out)
}

#[test]
fn the_emulated_gpu_samples_what_it_recomputes_and_gives_the_same_bits_twice() {
    let folder = tempfile::tempdir().unwrap();
    let one = smoke(&folder.path().join("one"), "emulated", &SHORT, &[]);
    let two = smoke(&folder.path().join("two"), "emulated:8", &SHORT, &[]);
    assert_eq!(one.0["weights_sha256"], two.0["weights_sha256"]);
    for (summary, metrics) in [&one, &two] {
        assert_eq!(summary["mismatch_max"], 0.0);
        let steps: Vec<&Value> = metrics.iter().filter(|line| line["kind"] == "rl").collect();
        assert_eq!(steps.len(), 2);
        assert!(steps.iter().all(|step| step["mismatch"] == 0.0 && step["tokens_sampled"].as_u64() > Some(0)));
    }
}

/// Two ranks of one process: sharded weights, sequences that both share, and an engine on each, over the emulated NCCL.
#[test]
fn two_emulated_gpus_sample_what_they_recompute_together() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["rft.candidates=24", "rft.steps=3", "rl.steps=1", "evaluate.tasks=2", "parallel.context=2"];
    let (summary, metrics) = smoke(folder.path(), "emulated:2", &settings, &["--gpus-per-node", "2"]);
    assert_eq!(summary["mismatch_max"], 0.0);
    let steps: Vec<&Value> = metrics.iter().filter(|line| line["kind"] == "rl").collect();
    assert_eq!(steps.len(), 1);
    assert!(steps[0]["mismatch"] == 0.0 && steps[0]["tokens_sampled"].as_u64() > Some(0), "{}", steps[0]);
}

/// Rank 0 finds no room on the disk after the links are there, while the other waits for it.
#[test]
fn a_rank_that_cannot_begin_ends_the_others_with_its_reason() {
    let arguments = ["--recipe", "smoke", "--device", "emulated:2", "--nodes", "1", "--out", "/proc/nowhere/run"];
    let output = run(&arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    assert!(said.starts_with("learner: rank 0 (host ") && said.contains("/proc/nowhere/run: the run needs up to"), "{said}");
}

#[test]
fn a_gpu_that_is_not_there_is_refused_in_one_line() {
    if Path::new("/dev/nvidiactl").exists() {
        return; // there is one
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    for arguments in [
        vec!["--recipe", "smoke", "--device", "cuda", "--out", out.to_str().unwrap()],
        vec!["bench", "step", "--model", "tiny", "--context", "64", "--device", "cuda:3"],
        vec!["bench", "kernels", "--device", "cuda"],
    ] {
        let output = run(&arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.contains("libcuda.so") && said.contains("path"), "{arguments:?}: {said}");
    }
    assert!(!out.exists());
}

#[test]
fn a_model_that_no_kernel_runs_is_refused_by_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let output = run(&["--recipe", "smoke", "--device", "emulated", "--out", out, "--set", "model.initialise.head_dim=48"]);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("head_dim is 48"), "{said}");
}

/// The floors of `src/device/cuda/roofline.rs`, at the sizes of the benchmark.
#[test]
fn kernels_bound_by_memory_move_what_they_must_and_products_have_no_bank_conflicts() {
    let output = succeed(&["bench", "kernels", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let kernels = report["kernels"].as_array().unwrap();
    assert!(report["device"].as_str().unwrap().contains("Emulated") && kernels.len() >= 32, "{report}");
    for row in kernels {
        let name = row["kernel"].as_str().unwrap();
        assert_eq!(row["findings"].as_array().map(Vec::len), Some(0), "{row}");
        assert!(row["sectors_per_request"].is_number() && row["shape"].is_string(), "{row}");
        let [moved, minimum] = ["bytes_moved", "bytes_minimum"].map(|key| row[key].as_u64().unwrap());
        assert!(moved >= minimum, "{name} moved {moved} bytes, and its floor is {minimum}");
        let product = ["gemm", "attention_forward", "attention_decode", "attention_backward"];
        if product.iter().any(|product| name.starts_with(product)) {
            assert_eq!(row["bank_conflicts"], 0, "{name}");
        } else if minimum >= 1 << 16 {
            assert!(moved as f64 <= 1.05 * minimum as f64, "{name} moved {moved} bytes of {minimum}");
        }
        if name.starts_with("gemm") {
            assert!(row["tensor_core_ops"].as_u64() > Some(0), "{row}");
        }
    }
}
