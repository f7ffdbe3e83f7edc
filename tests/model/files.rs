//! Model directories: what is written reads back, and what is wrong is refused with one line that names it.

use std::path::Path;

use learner::cli::score::{ScoreArguments, run};
use learner::device::{CpuDevice, DeviceChoice};
use learner::model::{Model, ModelConfig};
use learner::types::Batch;
use safetensors::tensor::TensorView;

use crate::support::{noisy_model, qwen2, qwen3, tokens};

fn refusal(directory: &Path) -> String {
    let error = Model::load(CpuDevice::new(), directory).err().expect("the directory should have been refused").to_string();
    assert!(!error.contains('\n'), "more than one line: {error}");
    error
}

fn score(model: &Model<CpuDevice>) -> Vec<u32> {
    let ids = tokens(30, 53, 1);
    model.score(&Batch::pack(&[&ids], |_, _| true), 1.0).log_probs.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_saved_model_loads_with_the_same_bits_also_when_cut_into_shards() {
    for config in [qwen2(), qwen3(true), qwen3(false)] {
        let model = noisy_model(CpuDevice::new(), config.clone(), 1);
        let directory = tempfile::tempdir().expect("a temporary directory");
        model.save(directory.path()).expect("a saved model");
        let loaded = Model::load(CpuDevice::new(), directory.path()).expect("the model just saved");
        assert_eq!(loaded.config().heads(), config.heads());
        assert_eq!(score(&loaded), score(&model));
        assert_eq!(std::fs::read_dir(directory.path()).expect("a directory").count(), 2, "nothing but the two files");

        let bytes = std::fs::read(directory.path().join("model.safetensors")).expect("the weights");
        let whole = safetensors::SafeTensors::deserialize(&bytes).expect("a whole file");
        let mut weight_map = serde_json::Map::new();
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for (index, (name, view)) in whole.tensors().into_iter().enumerate() {
            let (shard, file) = if index % 2 == 0 { (&mut left, "a.safetensors") } else { (&mut right, "b.safetensors") };
            weight_map.insert(name.clone(), file.into());
            shard.push((name, view));
        }
        safetensors::serialize_to_file(left, None, &directory.path().join("a.safetensors")).expect("a shard");
        safetensors::serialize_to_file(right, None, &directory.path().join("b.safetensors")).expect("a shard");
        let index = serde_json::json!({ "metadata": {}, "weight_map": weight_map }).to_string();
        std::fs::write(directory.path().join("model.safetensors.index.json"), index).expect("an index");
        std::fs::remove_file(directory.path().join("model.safetensors")).expect("the single file removed");
        let sharded = Model::load(CpuDevice::new(), directory.path()).expect("the shards");
        assert_eq!(score(&sharded), score(&model));
    }
}

#[test]
fn damaged_weights_are_refused_by_name() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    assert!(refusal(directory.path()).contains("config.json"));
    let model = noisy_model(CpuDevice::new(), qwen3(true), 1);
    model.save(directory.path()).expect("a saved model");
    let weights = directory.path().join("model.safetensors");
    let whole = std::fs::read(&weights).expect("the weights");

    std::fs::write(&weights, &whole[..whole.len() - 10]).expect("a truncated file");
    let error = refusal(directory.path());
    assert!(error.contains("model.safetensors") && error.contains("complete"), "{error}");
    std::fs::remove_file(&weights).expect("the file removed");
    assert!(refusal(directory.path()).contains("model.safetensors.index.json"));

    let zeros = vec![0u8; 4 * 5];
    let tensors = safetensors::SafeTensors::deserialize(&whole).expect("a whole file");
    let write =
        |list: Vec<(String, TensorView)>| safetensors::serialize_to_file(list, None, &weights).expect("a file of tensors");
    let replaced = |name: &str, dtype: safetensors::Dtype, shape: Vec<usize>| {
        let wrong = TensorView::new(dtype, shape, &zeros).expect("a small tensor");
        let mut list = tensors.tensors();
        list.iter_mut().filter(|(other, _)| other == name).for_each(|(_, view)| *view = wrong.clone());
        list
    };
    let missing = "model.layers.1.mlp.up_proj.weight";
    write(tensors.tensors().into_iter().filter(|(name, _)| name != missing).collect());
    let error = refusal(directory.path());
    assert!(error.contains("model.safetensors") && error.contains(missing) && error.contains("missing"), "{error}");
    let mut surplus = tensors.tensors();
    surplus.push(("surplus".to_string(), TensorView::new(safetensors::Dtype::F32, vec![5], &zeros).expect("a small tensor")));
    write(surplus);
    assert!(refusal(directory.path()).contains("surplus"));
    write(replaced(missing, safetensors::Dtype::F32, vec![5]));
    let error = refusal(directory.path());
    assert!(error.contains(missing) && error.contains("[5]") && error.contains("[72, 40]"), "{error}");
    write(replaced("model.norm.weight", safetensors::Dtype::U8, vec![20]));
    assert!(refusal(directory.path()).contains("model.norm.weight"));
}

#[test]
fn configurations_that_are_not_run_are_refused_by_field() {
    let good = qwen3(true).to_json();
    assert!(ModelConfig::from_json(&good).is_ok());
    let with = |field: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = serde_json::from_str(&good).expect("JSON");
        json[field] = value;
        ModelConfig::from_json(&json.to_string())
    };
    for (field, value, mention) in [
        ("model_type", serde_json::json!("llama"), "model_type"),
        ("model_type", serde_json::json!("qwen3_moe"), "qwen3_moe"),
        ("rope_scaling", serde_json::json!({ "rope_type": "yarn", "factor": 4.0 }), "rope_scaling"),
        ("rope_parameters", serde_json::json!({ "rope_type": "llama3" }), "rope_parameters"),
        ("layer_types", serde_json::json!(["full_attention", "sliding_attention"]), "layer_types"),
        ("num_experts", serde_json::json!(8), "num_experts"),
        ("hidden_act", serde_json::json!("gelu"), "hidden_act"),
        ("hidden_size", serde_json::json!(-3), "hidden_size"),
        ("vocab_size", serde_json::json!(null), "vocab_size"),
        ("num_key_value_heads", serde_json::json!(3), "num_key_value_heads"),
        ("head_dim", serde_json::json!(7), "head_dim"),
        ("tie_word_embeddings", serde_json::json!("yes"), "tie_word_embeddings"),
    ] {
        let error = with(field, value).expect_err(field);
        assert!(error.contains(mention) && !error.contains('\n'), "{field}: {error}");
    }
    let windowed = with("sliding_window", serde_json::json!(4096));
    assert!(windowed.is_ok(), "a window that is not in use is no obstacle");
    let newer = with("rope_parameters", serde_json::json!({ "rope_type": "default", "rope_theta": 5e5 }));
    assert!(newer.is_ok());
    assert_eq!(with("eos_token_id", serde_json::json!(7)).expect("a field kept").other["eos_token_id"], 7);
    assert!(ModelConfig::from_json("[1").is_err());
}

#[test]
fn score_refuses_bad_input_with_one_line() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    noisy_model(CpuDevice::new(), qwen3(true), 1).save(directory.path()).expect("a saved model");
    let ids = directory.path().join("ids.json");
    let run_with = |text: &str, temperature: f32| {
        std::fs::write(&ids, text).expect("an id file");
        run(
            &ScoreArguments { model: directory.path().to_path_buf(), ids: ids.clone(), temperature, device: DeviceChoice::Cpu },
            true,
        )
    };
    assert!(run_with("[[1, 2, 3], [4]]", 1.0).is_ok());
    for (text, mention) in
        [("[[1, 2], []]", "list 1 is empty"), ("[[1, 53]]", "53"), ("[[1, -2]]", "JSON"), ("[[1", "JSON"), ("{}", "JSON")]
    {
        let error = run_with(text, 1.0).expect_err(text);
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(mention) && error.to_string().contains("ids.json"), "{error}");
    }
    assert_eq!(run_with("[[1, 2]]", 0.0).expect_err("temperature 0").exit_code(), 2);
}
