//! Gradients against finite differences, accumulation, threads; a step of training lowers the loss.

use learner::device::CpuDevice;
use learner::model::{Cotangents, Gradients, Model, ModelConfig};
use learner::parallel::Ranks;
use learner::train::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits};
use learner::types::Batch;

use crate::support::{noisy_model, qwen2, qwen3, tokens, with_threads};

const TEMPERATURE: f32 = 0.8;

fn batch() -> Batch {
    let (a, b, c) = (tokens(19, 53, 1), tokens(7, 53, 2), tokens(34, 53, 3));
    Batch::pack(&[&a, &b, &c], |sequence, token| (sequence + token) % 4 != 0)
}

/// Weights of a loss `sum(a log_prob + b entropy)`, different for every row.
fn cotangents(rows: usize) -> Cotangents {
    let log_probs = (0..rows).map(|row| ((row * 7 % 11) as f32 - 4.0) * 0.1).collect();
    let entropies = Some((0..rows).map(|row| ((row * 5 % 7) as f32 - 2.0) * 0.1).collect());
    Cotangents { log_probs, entropies }
}

fn loss(model: &Model<CpuDevice>) -> f64 {
    let scores = model.score(&batch(), TEMPERATURE);
    let weights = cotangents(scores.log_probs.len());
    let entropies = weights.entropies.expect("cotangents of entropies");
    let log_prob_part: f64 = scores.log_probs.iter().zip(&weights.log_probs).map(|(x, a)| *x as f64 * *a as f64).sum();
    log_prob_part + scores.entropies.iter().zip(&entropies).map(|(x, b)| *x as f64 * *b as f64).sum::<f64>()
}

/// Along a random direction in each tensor: `(loss(w + h d) - loss(w - h d)) / 2h` against `gradient . d`. A direction over a
/// whole tensor makes the difference large against f32 rounding.
fn check(config: ModelConfig) {
    let mut model = noisy_model(CpuDevice::with_attention_segment(16), config, 3);
    let mut gradients = model.new_gradients();
    model.forward_backward(&mut gradients, &batch(), TEMPERATURE, |scores| cotangents(scores.log_probs.len()));
    let tensors: Vec<_> = model.tensors().zip(gradients.tensors()).collect();
    for ((name, _, values), (_, _, gradient)) in tensors {
        let norm = gradient.iter().map(|g| *g as f64 * *g as f64).sum::<f64>().sqrt();
        let direction: Vec<f64> = gradient.iter().map(|g| *g as f64 / norm).collect();
        let step = 1e-2;
        let mut moved = |sign: f64| {
            let shifted: Vec<f32> = values.iter().zip(&direction).map(|(w, d)| (*w as f64 + sign * step * d) as f32).collect();
            model.set_tensor(&name, &shifted).expect("a tensor of the model itself");
            loss(&model)
        };
        let numeric = (moved(1.0) - moved(-1.0)) / (2.0 * step);
        model.set_tensor(&name, &values).expect("a tensor of the model itself");
        assert!((numeric - norm).abs() < 5e-3 * norm + 2e-4, "{name}: numeric {numeric}, analytic {norm}");
    }
}

#[test]
fn finite_differences_agree_for_qwen3_tied() {
    check(qwen3(true));
}

#[test]
fn finite_differences_agree_for_qwen3_untied() {
    check(qwen3(false));
}

#[test]
fn finite_differences_agree_for_qwen2() {
    check(qwen2());
}

#[test]
fn gradients_do_not_depend_on_threads_and_accumulate() {
    let model = noisy_model(CpuDevice::new(), qwen3(true), 3);
    let run = |threads: usize, passes: usize| {
        with_threads(threads, || {
            let mut gradients = model.new_gradients();
            for _ in 0..passes {
                model.forward_backward(&mut gradients, &batch(), 1.0, |scores| cotangents(scores.log_probs.len()));
            }
            gradients
        })
    };
    let (one, two) = (run(1, 1), run(2, 1));
    for ((name, _, a), (_, _, b)) in one.tensors().zip(two.tensors()) {
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} depends on the number of threads");
    }
    let norm = |gradients: &Gradients<CpuDevice>| {
        let squares = gradients.tensors().flat_map(|(_, _, values)| values).map(|value| f64::from(value).powi(2));
        squares.fold(0.0, |sum, square| sum + square).sqrt()
    };
    let mut twice = run(2, 2);
    assert!((0.5 * norm(&twice) / norm(&one) - 1.0).abs() < 1e-5);
    twice.clear();
    assert_eq!(norm(&twice), 0.0);
}

#[test]
fn training_learns_and_a_broken_gradient_changes_nothing() {
    let batch = batch();
    let rows = batch.scored_rows.len();
    let settings = AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() };
    let optimizer = |model: &mut Model<CpuDevice>, place| {
        let gradients = model.new_gradients();
        AdamW::new(&CpuDevice::new(), model.pieces(&gradients), settings, place)
    };
    let train = |model: &mut Model<CpuDevice>, optimizer: &mut AdamW<CpuDevice>, steps: usize| {
        let mut last = 0.0;
        for _ in 0..steps {
            let mut gradients = model.new_gradients();
            let scores = model.forward_backward(&mut gradients, &batch, 1.0, |_| Cotangents {
                log_probs: vec![-1.0 / rows as f32; rows],
                entropies: None,
            });
            last = -scores.log_probs.iter().sum::<f32>() / rows as f32;
            optimizer.step(model.pieces(&gradients), &Ranks::one(), 1e-2, NormLimits::clip_at(1.0)).expect("one rank");
        }
        last
    };
    let mut model = Model::initialise(CpuDevice::new(), qwen3(true), 1);
    let mut on_device = optimizer(&mut model, MomentPlace::Device);
    let first = train(&mut model, &mut on_device, 1);
    let last = train(&mut model, &mut on_device, 11);
    assert!(last < 0.7 * first, "the loss went from {first} to {last}");

    let mut other = Model::initialise(CpuDevice::new(), qwen3(true), 1);
    let mut on_host = optimizer(&mut other, MomentPlace::Host);
    train(&mut other, &mut on_host, 12);
    assert_eq!(model.tensors().collect::<Vec<_>>(), other.tensors().collect::<Vec<_>>(), "moments in the host's memory");

    let mut gradients = model.new_gradients();
    model.forward_backward(&mut gradients, &batch, 1.0, |_| Cotangents { log_probs: vec![f32::NAN; rows], entropies: None });
    let before: Vec<_> = model.tensors().collect();
    let broken = on_device.step(model.pieces(&gradients), &Ranks::one(), 1e-2, NormLimits::clip_at(1.0)).expect("one rank");
    assert!(broken.skipped && !broken.norm.is_finite());
    assert_eq!(before, model.tensors().collect::<Vec<_>>());
    assert_eq!(on_device.steps(), 12);
}
