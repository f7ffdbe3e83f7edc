//! The model on a device: training follows the CPU, and what was sampled is recomputed bit for bit.

use learner::device::CpuDevice;
use learner::model::{Cotangents, Extension, Family, Model, ModelConfig};
use learner::parallel::Ranks;
use learner::train::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits};
use learner::types::Batch;

use crate::accept::assert_same_bits;
use crate::inputs::Inputs;
use crate::subject::{Subject, Testable, on_every_device};

on_every_device!(ten_steps_follow_the_cpu, sampled_log_probabilities_are_recomputed_bit_for_bit);

const VOCABULARY: usize = 430;
const STEPS: usize = 10;

fn qwen3() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocabulary: VOCABULARY,
        hidden: 64,
        intermediate: 96,
        layers: 2,
        query_heads: 3,
        key_value_heads: 1,
        head_dim: 32,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        yarn: None,
        max_positions: 512,
        tied_embeddings: true,
        attention_bias: false,
        other: Default::default(),
    }
}

fn qwen2() -> ModelConfig {
    let heads = ModelConfig { query_heads: 2, key_value_heads: 2, ..qwen3() };
    ModelConfig { family: Family::Qwen2, tied_embeddings: false, attention_bias: true, ..heads }
}

/// The loss of each step, before it.
fn losses<D: Testable>(device: &D, config: ModelConfig) -> Vec<f32> {
    let mut model = Model::initialise(device.clone(), config, 1);
    let mut gradients = model.new_gradients();
    let settings = AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() };
    let mut optimizer = AdamW::new(device, model.pieces(&gradients), settings, MomentPlace::Device);
    let mut inputs = Inputs::new("recorded batches");
    let sequences: Vec<Vec<u32>> = [37, 1, 66, 20].iter().map(|&length| inputs.ids(length + 1, VOCABULARY)).collect();
    let step = |number: usize| {
        // Two batches in turn, so that steps repeat and the loss falls.
        let part: Vec<&[u32]> = sequences.iter().skip(number % 2 * 2).take(2).map(Vec::as_slice).collect();
        let batch = Batch::pack(&part, |_, _| true);
        let rows = batch.scored_rows.len();
        gradients.clear();
        let scores = model.forward_backward(&mut gradients, &batch, 1.0, |_| Cotangents {
            log_probs: vec![-1.0 / rows as f32; rows],
            entropies: None,
        });
        // Steps of 1e-2 make the losses jump, and then the last digits of two devices decide by how much.
        optimizer.step(model.pieces(&gradients), &Ranks::one(), 5e-3, NormLimits::clip_at(1.0)).expect("one rank");
        -scores.log_probs.iter().sum::<f32>() / rows as f32
    };
    (0..STEPS).map(step).collect()
}

fn ten_steps_follow_the_cpu<D: Testable>(subject: &Subject<D>) {
    for config in [qwen3(), qwen2()] {
        let expected = losses(&CpuDevice::new(), config.clone());
        let [found] = subject.run(|device| [losses(device, config.clone())]);
        let text = format!("{:?}: CPU {expected:?}, here {found:?}", config.family);
        assert!(expected[STEPS - 2] < 0.8 * expected[0], "nothing was learned: {text}");
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 0.02 * expected, "{text}");
        }
    }
}

fn sampled_log_probabilities_are_recomputed_bit_for_bit<D: Testable>(subject: &Subject<D>) {
    for (config, temperature) in [(qwen3(), 1.0), (qwen2(), 0.7)] {
        let mut inputs = Inputs::new("prompts");
        let prompts: Vec<Vec<u32>> = [70, 3, 1].iter().map(|&length| inputs.ids(length, VOCABULARY)).collect();
        let uniforms: Vec<Vec<f64>> = (0..8).map(|_| prompts.iter().map(|_| inputs.uniform()).collect()).collect();
        let [sampled, recomputed] = subject.with_segment(64).run(|device| {
            let model = Model::initialise(device.clone(), config.clone(), 2);
            let mut caches: Vec<_> = prompts.iter().map(|_| model.new_cache()).collect();
            let mut sequences = prompts.clone();
            let mut new: Vec<Vec<u32>> = prompts.clone();
            let mut log_probs: Vec<Vec<f32>> = vec![Vec::new(); prompts.len()];
            for uniforms in &uniforms {
                let mut extensions: Vec<_> =
                    caches.iter_mut().zip(&new).map(|(cache, tokens)| Extension { cache, tokens }).collect();
                let hidden = model.extend(&mut extensions);
                let drawn = model.sample(&hidden, temperature, uniforms, VOCABULARY - 3);
                for (index, (token, log_prob)) in drawn.into_iter().enumerate() {
                    sequences[index].push(token);
                    log_probs[index].push(log_prob);
                    new[index] = vec![token];
                }
            }
            let slices: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
            let batch = Batch::pack(&slices, |sequence, token| token >= prompts[sequence].len());
            [log_probs.concat(), model.score(&batch, temperature).log_probs]
        });
        assert_same_bits("log-probabilities", &recomputed, &sampled);
    }
}
