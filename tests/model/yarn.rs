//! YaRN: how it is spelled in a config.json, and that sampling, scoring and sharding see the same of it.

use learner::device::CpuDevice;
use learner::model::{Extension, Model, ModelConfig, RopeSettings, RopeType, Yarn};
use learner::types::Batch;
use serde_json::{Value, json};

use crate::support::{noisy_model, qwen2, qwen3, tokens};

fn with(fields: &[(&str, Value)]) -> Result<ModelConfig, String> {
    let mut config: Value = serde_json::from_str(&qwen3(true).to_json()).expect("JSON");
    for (name, value) in fields {
        config[name] = value.clone();
    }
    ModelConfig::from_json(&config.to_string())
}

fn scaling() -> Value {
    json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32 })
}

fn four_times() -> RopeSettings {
    RopeSettings { rope_type: RopeType::Yarn, factor: 4.0, original_max_position_embeddings: Some(32), ..RopeSettings::default() }
}

#[test]
fn both_spellings_of_both_generations_mean_the_same() {
    let plain = qwen3(true);
    let expected = plain.with_rope(&four_times()).expect("a scaled model");
    assert_eq!(expected.max_positions, 128);
    assert_eq!(
        expected.yarn,
        Some(Yarn { factor: 4.0, original_length: 32, beta_fast: 32.0, beta_slow: 1.0, attention_factor: None })
    );
    let mut older = scaling();
    older["type"] = older.as_object_mut().expect("an object").remove("rope_type").expect("a type");
    let mut both = scaling();
    both["type"] = "yarn".into();
    both["attention_factor"] = Value::Null;
    both["truncate"] = true.into();
    let mut newer = scaling();
    newer["rope_theta"] = plain.rope_theta.into();
    for fields in [
        vec![("rope_scaling", scaling())],
        vec![("rope_scaling", older.clone())],
        vec![("rope_scaling", both)],
        vec![("rope_parameters", newer.clone()), ("rope_theta", Value::Null)],
        vec![("rope_scaling", older), ("rope_parameters", newer)],
    ] {
        let found = with(&fields).unwrap_or_else(|error| panic!("{fields:?}: {error}"));
        assert_eq!((found.yarn, found.max_positions, found.rope_theta), (expected.yarn.clone(), 128, plain.rope_theta));
    }
    // What is written reads back, and back to no scaling is as it was.
    let factor = RopeSettings { attention_factor: Some(1.25), beta_fast: 16.0, ..four_times() };
    let scaled = plain.with_rope(&factor).expect("a scaled model");
    let read = ModelConfig::from_json(&scaled.to_json()).expect("a file of our own");
    assert_eq!((&read.yarn, read.max_positions), (&scaled.yarn, scaled.max_positions));
    let unscaled = read.with_rope(&RopeSettings::default()).expect("no scaling");
    assert_eq!((unscaled.yarn, unscaled.max_positions), (None, 32));
}

#[test]
fn other_scalings_and_broken_ones_are_refused_by_name() {
    let changed = |key: &str, value: Value| {
        let mut parameters = scaling();
        parameters[key] = value;
        parameters
    };
    let mut incomplete = scaling();
    incomplete.as_object_mut().expect("an object").remove("original_max_position_embeddings");
    let other = changed("factor", 2.0.into());
    for (fields, mention) in [
        (vec![("rope_scaling", json!({ "type": "linear", "factor": 2.0 }))], "linear"),
        (vec![("rope_scaling", json!({ "rope_type": "dynamic", "factor": 2.0 }))], "dynamic"),
        (vec![("rope_parameters", json!({ "rope_type": "longrope" }))], "longrope"),
        (vec![("rope_parameters", changed("rope_type", "llama3".into()))], "llama3"),
        (vec![("rope_scaling", incomplete)], "original_max_position_embeddings"),
        (vec![("rope_scaling", changed("mscale", 1.0.into()))], "mscale"),
        (vec![("rope_scaling", changed("truncate", false.into()))], "truncate"),
        (vec![("rope_scaling", changed("factor", 0.5.into()))], "rope_scaling.factor"),
        (vec![("rope_scaling", changed("factor", "four".into()))], "rope_scaling"),
        (vec![("rope_scaling", scaling()), ("rope_parameters", other)], "contradict"),
    ] {
        let error = with(&fields).expect_err(mention);
        assert!(error.contains(mention) && error.contains("rope_") && !error.contains('\n'), "{error}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_model_that_is_scaled_while_it_runs_is_one_that_was_loaded_so() {
    for config in [qwen2(), qwen3(false)] {
        let mut model = noisy_model(CpuDevice::new(), config, 3);
        let ids = tokens(90, 53, 1);
        let batch = Batch::pack(&[&ids], |_, _| true);
        let before = model.score(&batch, 1.0);
        assert_eq!(model.set_rope(&four_times()), Ok(true));
        assert_eq!(model.set_rope(&four_times()), Ok(false), "nothing changes the second time");
        let scaled = model.score(&batch, 1.0);
        assert_ne!(bits(&scaled.log_probs), bits(&before.log_probs));

        let folder = tempfile::tempdir().expect("a folder");
        model.save(folder.path()).expect("a saved model");
        let loaded = Model::load(CpuDevice::new(), folder.path()).expect("the model just saved");
        assert_eq!(bits(&loaded.score(&batch, 1.0).log_probs), bits(&scaled.log_probs));

        // Sampling sees the same: the log-probability it notes is the one that scoring gives.
        let mut cache = model.new_cache();
        let hidden = model.extend(&mut [Extension { cache: &mut cache, tokens: &ids }]);
        let (id, log_prob) = model.sample(&hidden, 1.0, &[0.7], 53)[0];
        let longer = [&ids[..], &[id]].concat();
        let scores = model.score(&Batch::pack(&[&longer], |_, token| token == ids.len()), 1.0);
        assert_eq!(bits(&scores.log_probs), bits(&[log_prob]));

        assert_eq!(
            model.set_rope(&RopeSettings { original_max_position_embeddings: Some(512), ..RopeSettings::default() }),
            Ok(true)
        );
        assert_eq!(bits(&model.score(&batch, 1.0).log_probs), bits(&before.log_probs));
    }
}
