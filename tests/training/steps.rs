//! A step does not depend on the ranks, on how samples are cut into micro-batches, or on their order.

use learner::algorithm::LossSettings;
use learner::device::CpuDevice;
use learner::parallel::World;
use learner::train::{OldLogProbs, PolicyBatch, PolicySettings, StepMetrics, StepSettings};
use learner::types::Sample;

use crate::support::{Tensors, largest_difference, on_ranks, samples, settings, tensors, trainer};

const LENGTHS: [usize; 7] = [9, 300, 24, 41, 7, 150, 66];

/// Two steps of imitation and two of reinforcement: what they found, the weights after them, and the log-probabilities before any.
fn four_steps(world: World<CpuDevice>, samples: &[Sample], step: &StepSettings) -> (Vec<StepMetrics>, Tensors, Vec<Vec<f32>>) {
    let mut trainer = trainer(world, step);
    let policy = PolicySettings { temperature: 0.9, loss: &LossSettings::default() };
    let before = trainer.recompute_log_probs(samples, 0.9, step).expect("all ranks are there");
    let mut metrics = vec![
        trainer.imitation_step(samples, 1e-3, step).expect("all ranks are there"),
        trainer.imitation_step(samples, 1e-3, step).expect("all ranks are there"),
    ];
    let old = trainer.recompute_log_probs(samples, 0.9, step).expect("all ranks are there");
    let mut batch = PolicyBatch::of(samples.to_vec());
    metrics.push(trainer.policy_step(&batch, batch.all(), &policy, 1e-3, step).expect("all ranks are there"));
    batch.old_log_probs = OldLogProbs::Recomputed(old);
    metrics.push(trainer.policy_step(&batch, batch.all(), &policy, 1e-3, step).expect("all ranks are there"));
    let tensors = tensors(&mut trainer);
    (metrics, tensors, before)
}

fn assert_alike(
    found: &(Vec<StepMetrics>, Tensors, Vec<Vec<f32>>),
    expected: &(Vec<StepMetrics>, Tensors, Vec<Vec<f32>>),
    what: &str,
) {
    for (found, expected) in found.0.iter().zip(&expected.0) {
        assert!((found.loss - expected.loss).abs() <= 1e-5 * expected.loss.abs().max(1.0), "{what}: {found:?} {expected:?}");
        assert!((found.entropy - expected.entropy).abs() <= 1e-5 * expected.entropy, "{what}");
        assert!((found.gradient_norm - expected.gradient_norm).abs() <= 1e-4 * expected.gradient_norm, "{what}");
        assert_eq!((found.tokens, found.tokens_trained), (expected.tokens, expected.tokens_trained), "{what}");
        assert_eq!(found.statistics.tokens, expected.statistics.tokens, "{what}");
        assert_eq!(found.mismatch.tokens, expected.mismatch.tokens, "{what}");
    }
    assert_eq!(found.2, expected.2, "{what}: a log-probability depends on its own prefix alone");
    let difference = largest_difference(&found.1, &expected.1);
    println!("{what}: weights differ by {difference:.1e}");
    assert!(difference <= 1e-4, "{what}: weights differ by {difference}");
}

#[test]
fn ranks_and_micro_batches_and_order_change_nothing() {
    let samples = samples(&LENGTHS, 1);
    let expected = on_ranks(1, 1, |world| four_steps(world, &samples, &settings(4096))).remove(0);
    for (ranks, context, tokens) in [(1, 1, 64), (2, 1, 100), (2, 2, 200), (3, 3, 64), (4, 2, 128), (3, 1, 4096)] {
        let found = on_ranks(ranks, context, |world| four_steps(world, &samples, &settings(tokens)));
        for (rank, found) in found.iter().enumerate() {
            assert_alike(found, &expected, &format!("rank {rank} of {ranks}, {context} share a sequence, {tokens} tokens"));
        }
    }
    let reversed: Vec<Sample> = samples.iter().rev().cloned().collect();
    let mut found = on_ranks(2, 1, |world| four_steps(world, &reversed, &settings(100))).remove(0);
    found.2.reverse();
    assert_alike(&found, &expected, "reversed");
}

#[test]
fn layers_run_again_and_moments_on_the_host_give_the_same_bits() {
    let samples = samples(&LENGTHS, 2);
    for ranks in [1, 2] {
        let run = |step: StepSettings| on_ranks(ranks, 1, |world| four_steps(world, &samples, &step).1).remove(0);
        let plain = run(settings(128));
        assert_eq!(plain, run(StepSettings { recompute: true, ..settings(128) }));
        assert_eq!(plain, run(StepSettings { offload_optimizer: true, ..settings(128) }));
    }
}
