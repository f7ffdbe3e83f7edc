//! Sampled and recomputed log-probabilities are equal bit for bit, and a nudge of one weight shows (DESIGN, rule 3).

use learner::algorithm::Mismatch;
use learner::device::CpuDevice;
use learner::engine::{BuiltinEngine, Engine, SampleKey, SampledTurn, Settings};
use learner::model::{Model, ModelConfig};
use learner::types::Batch;

const SHAPE: &str = r#"{"model_type": "qwen3", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": true}"#;

fn tiny() -> Model<CpuDevice> {
    Model::initialise(CpuDevice::new(), ModelConfig::from_json(SHAPE).unwrap(), 3)
}

/// Two turns of each of five sequences whose prompts have different lengths, read in pieces of at most `max_rows`.
fn sample(model: &Model<CpuDevice>, max_rows: usize) -> Vec<(Vec<u32>, Vec<bool>, Vec<f32>)> {
    let settings = Settings { max_rows, ..Settings::default() };
    let mut engine = BuiltinEngine::new(model, settings, 0, 97);
    let mut sequences = Vec::new();
    for task in 0..5u64 {
        let id = engine.open(SampleKey { seed: 1, stream: 0, step: 0, task, sample: 0 });
        let prompt: Vec<u32> = (0..3 + 11 * task as u32).map(|token| (token * 7 + task as u32) % 96 + 1).collect();
        engine.request_turn(id, &prompt, 12);
        sequences.push((id, prompt.clone(), vec![false; prompt.len()], vec![0.0; prompt.len()], 1));
    }
    while engine.busy() {
        for SampledTurn { sequence, ids, log_probs, .. } in engine.advance().unwrap() {
            let (id, tokens, sampled, noted, turns) = sequences.iter_mut().find(|(id, ..)| *id == sequence).unwrap();
            sampled.extend(vec![true; ids.len()]);
            tokens.extend(ids);
            noted.extend(log_probs);
            if *turns < 2 {
                *turns += 1;
                let observation = [5, 6, 7, 8];
                tokens.extend(observation);
                sampled.extend([false; 4]);
                noted.extend([0.0; 4]);
                engine.request_turn(*id, &observation, 9);
            }
        }
    }
    sequences.into_iter().map(|(_, tokens, sampled, noted, _)| (tokens, sampled, noted)).collect()
}

fn mismatch(model: &Model<CpuDevice>, episodes: &[(Vec<u32>, Vec<bool>, Vec<f32>)]) -> Mismatch {
    let ids: Vec<&[u32]> = episodes.iter().map(|(ids, ..)| ids.as_slice()).collect();
    let batch = Batch::pack(&ids, |sequence, token| episodes[sequence].1[token]);
    let noted: Vec<f32> = episodes
        .iter()
        .flat_map(|(_, sampled, noted)| noted.iter().zip(sampled).filter(|(_, sampled)| **sampled).map(|(noted, _)| *noted))
        .collect();
    Mismatch::measure(&noted, &model.score(&batch, 1.0).log_probs)
}

#[test]
fn recomputing_gives_the_sampled_log_probabilities_and_a_nudge_shows() {
    let mut model = tiny();
    let episodes = sample(&model, 2048);
    let before = mismatch(&model, &episodes);
    assert!(before.tokens > 60, "{before:?}");
    assert_eq!((before.max_absolute, before.differing), (0.0, 0), "{before:?}");

    let (name, _, values) = model
        .tensors()
        .find(|(name, ..)| name == "model.layers.0.mlp.down_proj.weight")
        .map(|(n, s, v)| (n, s, v.to_vec()))
        .unwrap();
    let mut nudged = values.clone();
    nudged[17] += 1e-2;
    model.set_tensor(&name, &nudged).unwrap();
    let after = mismatch(&model, &episodes);
    assert!(after.max_absolute > 0.0 && after.differing > 0, "{after:?}");
    model.set_tensor(&name, &values).unwrap();
    assert_eq!(mismatch(&model, &episodes).max_absolute, 0.0);
}

#[test]
fn what_is_sampled_does_not_depend_on_how_prompts_are_read() {
    let model = tiny();
    let whole = sample(&model, 2048);
    for max_rows in [1, 7, 64] {
        assert_eq!(sample(&model, max_rows), whole, "{max_rows} rows a pass");
    }
}
