//! `learner plan`: numbers worked out by hand, every key that others read, and refusals of one line.

use serde_json::Value;

use crate::harness::{run, succeed, text};

fn plan(model: &str, nodes: &str, context: &str, more: &[&str]) -> Value {
    let arguments =
        ["plan", "--model", model, "--nodes", nodes, "--gpus-per-node", "8", "--gpu", "h200", "--context", context, "--json"];
    let output = succeed(&[&arguments[..], more].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no whole number"))
}

#[test]
fn eight_billion_parameters_at_full_length() {
    let plan = plan("qwen3-8b", "16", "131072", &[]);
    let memory = &plan["per_gpu_bytes"];
    // 2 x 8 heads x 128 numbers of 2 bytes for each of 131,072 tokens, however many ranks share them.
    assert_eq!(number(&memory["keys_values"]), 512 << 20);
    assert_eq!(number(&memory["weights"]), 2 * (8_190_735_360 - 308_224) / 128);
    assert_eq!(number(&memory["moments"]), 2 * number(&memory["master"]));
    let purposes = memory.as_object().unwrap().iter().filter(|(purpose, _)| *purpose != "total");
    assert_eq!(purposes.map(|(_, bytes)| number(bytes)).sum::<u64>(), number(&memory["total"]));
    assert!(number(&memory["total"]) <= number(&plan["usable_bytes"]));

    let layout = &plan["layout"];
    assert_eq!(number(&layout["data_parallel"]) * number(&layout["context_parallel"]), 128);
    assert_eq!(plan["layouts"].as_array().unwrap().len(), 8, "one per divisor of 128");
    let best: Vec<&Value> = plan["layouts"].as_array().unwrap().iter().filter(|layout| layout["why_not"].is_null()).collect();
    assert_eq!(best.len(), 1);
    assert_eq!(best[0]["context_parallel"], layout["context_parallel"]);
    assert_eq!(best[0]["step_seconds"], plan["step_seconds"]);
    assert!(number(&plan["bytes_per_step"]["network"]) > 0 && number(&plan["bytes_per_step"]["nvlink"]) > 0);

    // By hand: FLOPs at c = 6 of 128 sequences over what 128 GPUs do at their peak in that time.
    let tokens = 131_072.0;
    let layer_and_head = 36.0 * 192_937_984.0 + 622_329_856.0;
    let squares = 36.0 * 4096.0 * tokens * tokens;
    let mfu = |c: f64| (6.0 * layer_and_head * tokens + c * squares) / 989e12 / plan["step_seconds"].as_f64().unwrap();
    for (key, c) in [("mfu_c6", 6.0), ("mfu_c12", 12.0)] {
        let found = plan[key].as_f64().unwrap();
        assert!((found / mfu(c) - 1.0).abs() < 1e-12, "{key}: {found} and {}", mfu(c));
    }
    assert!(plan["notes"].to_string().contains("--set step.recompute=true"));
    assert!(plan["notes"].to_string().contains("40960 positions"));
}

#[test]
fn seventy_two_billion_parameters_at_full_length() {
    let plan = plan("qwen2.5-72b", "16", "131072", &["--sequences", "16"]);
    assert_eq!(number(&plan["per_gpu_bytes"]["master"]), 4 * 72_706_203_648 / 128);
    assert_eq!(number(&plan["per_gpu_bytes"]["keys_values"]), 512 << 20);
    assert!(number(&plan["layout"]["context_parallel"]) >= 8, "16 sequences keep at most 16 replicas busy");
    let reasons = plan["layouts"].to_string();
    assert!(reasons.contains("replicas for 16 sequences"), "{reasons}");
}

/// 4 sequences of 1,000 tokens on each GPU: 16 pages of 64 keys, 2 x 2 heads of 32 in bf16, in two layers. Norms of 32 arrive in 8
/// parts of 8.
#[test]
fn the_engine_counts_when_asked_for() {
    let plan = plan("tiny", "1", "1000", &["--rollout-sequences", "4"]);
    assert_eq!(number(&plan["per_gpu_bytes"]["engine_caches"]), 4 * 2 * 1024 * 256);
    assert_eq!(number(&plan["per_gpu_bytes"]["engine_weights"]), 2 * 449_536 + 4 * (768 + 4 * 32));
    assert_eq!(number(&plan["bytes_per_step"]["network"]), 0, "one node");
}

/// 8 GPUs with `tiny` and 1,000 tokens each: another layer's activations and a half layer's input for each of 1,024 rows.
#[test]
fn layers_that_are_kept_take_memory_and_save_time() {
    let (again, kept) = (plan("tiny", "1", "1000", &[]), plan("tiny", "1", "1000", &["--no-recompute"]));
    let activations = |plan: &Value| number(&plan["per_gpu_bytes"]["activations"]);
    let layer = 2 * (2 * 256 + 128 + 2 * 384) + 4 * 4;
    assert_eq!(activations(&kept) - activations(&again), 1024 * (2 * 128 + layer));
    assert!(kept["seconds"]["compute"].as_f64() < again["seconds"]["compute"].as_f64());
    assert_eq!((&kept["recompute"], &again["recompute"]), (&false.into(), &true.into()));
    assert_eq!(kept["payload_bytes_per_step"], again["payload_bytes_per_step"]);
}

#[test]
fn a_directory_needs_nothing_but_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/transformers/qwen2/config.json");
    std::fs::copy(config, folder.path().join("config.json")).unwrap();
    let plan = plan(folder.path().to_str().unwrap(), "2", "4096", &[]);
    assert_eq!(number(&plan["tokens"]), 16 * 4096);
}

#[test]
fn a_configuration_beyond_all_sizes_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let config = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/transformers/qwen2/config.json"));
    let mut config: Value = serde_json::from_str(&config.unwrap()).unwrap();
    for field in ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"] {
        let before = std::mem::replace(&mut config[field], 4_294_967_294u64.into());
        std::fs::write(&path, config.to_string()).unwrap();
        let model = folder.path().to_str().unwrap();
        let arguments = ["--model", model, "--nodes", "2", "--gpus-per-node", "8", "--gpu", "h200", "--context", "4194304"];
        let output = run(&[&["plan"][..], &arguments].concat());
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(2), 1), "{field}: {said}");
        assert!(said.contains("config.json") && said.contains(field), "{field}: {said}");
        config[field] = before;
    }
}

/// The largest numbers that are let through end with an answer, not with an overflow.
#[test]
fn the_largest_plan_has_an_answer() {
    let flags = ["--gpu", "h200", "--context", "4194304", "--sequences", "1048576", "--rollout-sequences", "4096"];
    let cluster = ["--model", "qwen2.5-72b", "--nodes", "8191", "--gpus-per-node", "8"];
    let output = run(&[&["plan"][..], &cluster, &flags].concat());
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("no layout fits"), "{said}");
}

/// 72B on 12 nodes that train, and on 4 with two servers of 4 GPUs each; the numbers of the training part are those of 12 nodes.
#[test]
fn servers_are_counted_beside_the_nodes_that_train() {
    let servers = ["--rollout-nodes", "4", "--tensor-parallel", "4", "--rollout-sequences", "2", "--file-system", "10"];
    let with = plan("qwen2.5-72b", "16", "131072", &servers);
    let without = plan("qwen2.5-72b", "12", "131072", &[]);
    for key in ["nodes", "sequences", "per_gpu_bytes", "bytes_per_step", "step_seconds", "layouts"] {
        assert_eq!(with[key], without[key], "{key}");
    }
    assert!(without["servers"].is_null());
    let servers = &with["servers"];
    assert_eq!((number(&servers["servers"]), number(&servers["nodes"])), (8, 4));
    let memory = &servers["per_gpu_bytes"];
    assert_eq!(number(&memory["caches"]), 2 * 80 * 131_072 * 2 * 2 * 128 * 2);
    assert_eq!(number(&memory["total"]), number(&memory["weights"]) + number(&memory["caches"]));
    assert_eq!(number(&servers["read_per_node"]), 4 * 72_706_203_648);
    assert!((servers["load_seconds"].as_f64().unwrap() - 29.08).abs() < 0.01);
}

#[test]
fn people_read_the_assumptions_too() {
    let arguments = ["--model", "qwen3-8b", "--nodes", "2", "--gpus-per-node", "8", "--gpu", "h100", "--context", "32768"];
    let output = succeed(&[&["plan"][..], &arguments, &["--network", "25"]].concat());
    let said = text(&output.stdout);
    for words in [
        "layout",
        "NVLink 400 GB/s, network 25 GB/s",
        "692 of 989 TFLOP/s",
        "memory per GPU",
        "best",
        "every layer computed again",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let base = |model: &'static str, nodes: &'static str, gpu: &'static str, context: &'static str| {
        ["plan", "--model", model, "--nodes", nodes, "--gpus-per-node", "8", "--gpu", gpu, "--context", context]
    };
    for (arguments, more, code, words) in [
        (base("nonesuch", "1", "h200", "4096"), &[][..], 2, &["nonesuch", "qwen3-8b"][..]),
        (base("/nonexistent", "1", "h200", "4096"), &[], 2, &["/nonexistent"]),
        (base("tiny", "1", "tpu", "4096"), &[], 2, &["tpu", "h200", "a100"]),
        (base("tiny", "0", "h200", "4096"), &[], 2, &["--nodes", "0 nodes of 8"]),
        (base("tiny", "18446744073709551615", "h200", "4096"), &[], 2, &["--nodes"]),
        (base("tiny", "1", "h200", "0"), &[], 2, &["--context 0"]),
        (base("tiny", "1", "h200", "18446744073709551615"), &[], 2, &["--context"]),
        (base("tiny", "1", "h200", "4096"), &["--sequences", "0"], 2, &["--sequences 0"]),
        (base("tiny", "1", "h200", "4096"), &["--network", "0"], 2, &["--network 0"]),
        (base("tiny", "1", "h200", "4096"), &["--nvlink", "nan"], 2, &["--nvlink NaN"]),
        (base("tiny", "2", "h200", "4096"), &["--rollout-nodes", "2"], 2, &["--rollout-nodes", "at least one"]),
        (
            base("tiny", "2", "h200", "4096"),
            &["--rollout-nodes", "1", "--tensor-parallel", "3"],
            2,
            &["--tensor-parallel", "8 GPUs"],
        ),
        (base("tiny", "2", "h200", "4096"), &["--rollout-nodes", "1", "--file-system", "0"], 2, &["--file-system 0"]),
        (
            base("qwen2.5-72b", "9", "a100-40gb", "131072"),
            &["--rollout-nodes", "1"],
            1,
            &["a server's GPU needs", "tensor-parallel"],
        ),
        (base("qwen2.5-72b", "1", "a100-40gb", "131072"), &[], 1, &["no layout fits", "needs", "GB"]),
    ] {
        let output = run(&[&arguments[..], more].concat());
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(code), 1), "{arguments:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty());
    }
}
