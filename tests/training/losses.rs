//! Every policy loss on a real model: the step does not depend on how it is cut up, and what is masked changes nothing.

use learner::algorithm::{
    Aggregation, Beyond, CorrectionSettings, Level, LossSettings, Objective, OldPolicy, Over, RejectionSettings, Statistic,
    WeightSettings,
};
use learner::device::CpuDevice;
use learner::parallel::World;
use learner::train::{
    CheckpointWriter, OldLogProbs, PolicyBatch, PolicySettings, StepMetrics, StepSettings, Trainer, UpdatePlan,
};
use learner::types::{Key, Purpose, Sample, Silent};

use crate::support::{Tensors, largest_difference, on_ranks, samples, settings, tensors, trainer};

const LENGTHS: [usize; 6] = [9, 70, 24, 41, 7, 53];
const TEMPERATURE: f32 = 0.9;

/// Every objective with every aggregation that goes with it; every other one with KL and entropy terms.
fn all_losses() -> Vec<LossSettings> {
    let mut all = Vec::new();
    for objective in [Objective::Clip, Objective::Gspo, Objective::Cispo, Objective::Reinforce] {
        for aggregation in [
            Aggregation::TokenMean,
            Aggregation::SeqMeanTokenMean,
            Aggregation::SeqMeanTokenSum,
            Aggregation::SeqMeanTokenSumNorm,
            Aggregation::Constant,
        ] {
            let constant = aggregation.needs_constant().then_some(40.0);
            let mut settings = LossSettings { objective, aggregation, constant, ..LossSettings::default() };
            if all.len() % 2 == 1 {
                settings.kl.coefficient = 0.1;
                settings.entropy_coefficient = 0.05;
            }
            all.extend(settings.check().is_ok().then_some(settings));
        }
    }
    assert_eq!(all.len(), 16, "three objectives with five aggregations each, GSPO with one");
    all
}

/// Numbers near `center`, the same for the same sample and token wherever the sample stands.
fn near(samples: &[Sample], purpose: u64, center: impl Fn(usize, usize) -> f32) -> Vec<Vec<f32>> {
    let of = |(index, sample): (usize, &Sample)| {
        let number = |token: usize| {
            let key = &[purpose, sample.ids[0] as u64, sample.ids.len() as u64, token as u64];
            center(index, token) + 0.6 * Key::new(Purpose::Benchmark, key).uniform() as f32 - 0.3
        };
        (0..sample.ids.len()).map(number).collect()
    };
    samples.iter().enumerate().map(of).collect()
}

/// A batch with old policy, weights and reference that are all off the current policy, whose log-probabilities are `current`.
fn batch(samples: &[Sample], current: &[Vec<f32>]) -> PolicyBatch {
    PolicyBatch {
        samples: samples.to_vec(),
        old_log_probs: OldLogProbs::Recomputed(near(samples, 1, |index, token| current[index][token])),
        weights: Some(near(samples, 2, |_, _| 1.0)),
        reference_log_probs: Some(near(samples, 3, |index, token| current[index][token])),
    }
}

/// One step with each loss, each from the same weights: what it found and the weights after it.
fn steps(
    world: World<CpuDevice>,
    samples: &[Sample],
    losses: &[LossSettings],
    step: &StepSettings,
) -> Vec<(StepMetrics, Tensors)> {
    let of = |loss: &LossSettings| {
        let mut trainer = trainer(world.clone(), step);
        let current = trainer.recompute_log_probs(samples, TEMPERATURE, step).expect("all ranks are there");
        let policy = PolicySettings { temperature: TEMPERATURE, loss };
        let metrics =
            trainer.policy_step(&batch(samples, &current), 0..samples.len(), &policy, 1e-3, step).expect("all ranks are there");
        assert!(!metrics.skipped);
        (metrics, tensors(&mut trainer))
    };
    losses.iter().map(of).collect()
}

#[track_caller]
fn assert_alike(found: &[(StepMetrics, Tensors)], expected: &[(StepMetrics, Tensors)], losses: &[LossSettings], what: &str) {
    for ((found, expected), loss) in found.iter().zip(expected).zip(losses) {
        let what = format!("{what}: {:?} {:?}", loss.objective, loss.aggregation);
        let close = |left: f64, right: f64| (left - right).abs() <= 1e-5 * right.abs().max(1.0);
        assert!(close(found.0.loss, expected.0.loss), "{what}: {} {}", found.0.loss, expected.0.loss);
        assert!(close(found.0.gradient_norm, expected.0.gradient_norm), "{what}");
        let counts = |metrics: &StepMetrics| {
            let statistics = &metrics.statistics;
            (statistics.tokens, statistics.clipped, statistics.clipped_high, statistics.not_finite, metrics.tokens_trained)
        };
        assert_eq!(counts(&found.0), counts(&expected.0), "{what}");
        let difference = largest_difference(&found.1, &expected.1);
        assert!(difference <= 1e-4, "{what}: weights differ by {difference}");
    }
}

#[test]
fn no_loss_depends_on_micro_batches_ranks_or_the_order_of_samples() {
    let (samples, losses) = (samples(&LENGTHS, 7), all_losses());
    let expected = on_ranks(1, 1, |world| steps(world, &samples, &losses, &settings(4096))).remove(0);
    assert!(expected.iter().any(|(metrics, _)| metrics.statistics.clipped > 0), "the clip holds something");
    for (ranks, context, tokens) in [(1, 1, 32), (2, 1, 60), (3, 1, 4096), (2, 2, 64)] {
        let found = on_ranks(ranks, context, |world| steps(world, &samples, &losses, &settings(tokens)));
        for found in found {
            assert_alike(&found, &expected, &losses, &format!("{ranks} ranks, {context} share, {tokens} tokens"));
        }
    }
    // Groups of two change places.
    let mut turned = samples.clone();
    turned.rotate_left(2);
    let found = on_ranks(1, 1, |world| steps(world, &turned, &losses, &settings(60))).remove(0);
    assert_alike(&found, &expected, &losses, "turned");
}

#[test]
fn whatever_stands_at_masked_tokens_changes_nothing_and_masked_sequences_only_count() {
    let (plain, losses) = (samples(&LENGTHS, 8), all_losses());
    let run = |wild: Option<f32>, masked: usize| {
        on_ranks(1, 1, |world| {
            let of = |loss: &LossSettings| {
                let mut trainer = trainer(world.clone(), &settings(60));
                let current = trainer.recompute_log_probs(&plain, TEMPERATURE, &settings(60)).expect("one rank");
                let mut batch = batch(&plain, &current);
                let PolicyBatch { samples, old_log_probs: OldLogProbs::Recomputed(old), weights, reference_log_probs } =
                    &mut batch
                else {
                    unreachable!("it is made so")
                };
                let lists = [old, weights.as_mut().expect("weights"), reference_log_probs.as_mut().expect("a reference")];
                for (list, (index, sample)) in
                    lists.into_iter().flat_map(|list| list.iter_mut().zip(samples.iter().enumerate()).collect::<Vec<_>>())
                {
                    for (token, value) in list.iter_mut().enumerate().filter(|(token, _)| !sample.trained[*token]) {
                        *value = wild.unwrap_or((index + token) as f32);
                    }
                }
                for sample in samples.iter_mut() {
                    for token in 0..sample.ids.len() {
                        if !sample.trained[token] {
                            sample.sampled_log_probs[token] = wild.unwrap_or(0.0);
                        }
                    }
                }
                for _ in 0..masked {
                    let mut sample = plain[0].clone();
                    sample.trained.fill(false);
                    sample.advantage = f32::NAN;
                    samples.push(sample);
                }
                let policy = PolicySettings { temperature: TEMPERATURE, loss };
                let metrics = trainer.policy_step(&batch, batch.all(), &policy, 1e-3, &settings(60)).expect("one rank");
                (metrics.gradient_norm, tensors(&mut trainer))
            };
            losses.iter().map(of).collect::<Vec<_>>()
        })
        .remove(0)
    };
    let expected = run(None, 0);
    for wild in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        assert_eq!(run(Some(wild), 0), expected, "{wild}");
    }
    for ((found, expected), loss) in run(None, 2).iter().zip(&expected).zip(&losses) {
        if matches!(loss.aggregation, Aggregation::TokenMean | Aggregation::Constant) {
            assert_eq!(found, expected, "{:?}", loss.aggregation);
        } else {
            let ratio = found.0 / expected.0;
            assert!(
                (ratio - 6.0 / 8.0).abs() < 1e-5,
                "{:?}: a mean over sequences counts those that are masked: {ratio}",
                loss.aggregation
            );
        }
    }
}

fn on_one<T: Send>(body: impl Fn(Trainer<CpuDevice>) -> T + Sync) -> T {
    on_ranks(1, 1, |world| body(trainer(world, &settings(64)))).remove(0)
}

const ONE_UPDATE: UpdatePlan = UpdatePlan { sequences_per_update: 0, passes: 1 };

#[test]
fn a_step_with_nothing_to_train_on_or_with_gradients_too_large_leaves_the_weights_alone_and_says_so() {
    let good = samples(&LENGTHS, 9);
    let mut masked = good.clone();
    masked.iter_mut().for_each(|sample| sample.trained.fill(false));
    let mut broken = good.clone();
    broken.iter_mut().for_each(|sample| sample.advantage = f32::NAN);
    let rejections = vec![RejectionSettings { statistic: Statistic::K3, over: Over::Token, lower: None, upper: 1e-9 }];
    let reject = LossSettings {
        correction: CorrectionSettings { rejections, ..CorrectionSettings::default() },
        ..LossSettings::default()
    };
    let cautious = StepSettings { max_gradient_norm: 1e-7, skip_norm: Some(1e-6), ..settings(64) };
    let plain = LossSettings::default();
    for (what, samples, loss, step, tokens) in [
        ("nothing", &Vec::new(), &plain, settings(64), 0),
        ("masked", &masked, &plain, settings(64), 0),
        ("broken", &broken, &plain, settings(64), 186),
        ("rejected", &good, &reject, settings(64), 0),
        ("too large", &good, &plain, cautious, 186),
    ] {
        let (metrics, before, after, steps) = on_one(|mut trainer| {
            let before = tensors(&mut trainer);
            let policy = PolicySettings { temperature: TEMPERATURE, loss };
            let metrics = trainer.train_on_rollout(samples.clone(), &policy, ONE_UPDATE, 1e-3, &step).expect("one rank");
            (metrics, before, tensors(&mut trainer), trainer.optimizer_steps())
        });
        assert!(metrics.skipped && metrics.updates == metrics.updates_skipped, "{what}: {metrics:?}");
        assert_eq!((metrics.tokens_trained, steps), (tokens, 0), "{what}");
        assert_eq!(before, after, "{what}");
    }
}

/// As verl does: old log-probabilities and reference of the whole rollout first, then mini-batches in order, each a step of its own.
#[test]
fn several_updates_of_a_rollout_are_steps_against_policies_that_stand_still() {
    let samples = samples(&LENGTHS, 10);
    let mut loss = LossSettings { aggregation: Aggregation::SeqMeanTokenMean, ..LossSettings::default() };
    loss.kl.coefficient = 0.05;
    let folder = tempfile::tempdir().unwrap();
    on_ranks(1, 1, |world| {
        let mut writer = CheckpointWriter::open(folder.path().to_path_buf(), 1, &world.ranks, &Silent).expect("a folder");
        let mut trainer = trainer(world, &settings(64));
        let snapshot = || Ok(trainer.snapshot()?);
        writer.save(0, snapshot, b"{}", &0).expect("written");
        writer.wait().expect("written");
    });
    let reference = folder.path().join("step-00000000");
    let plan = UpdatePlan { sequences_per_update: 2, passes: 2 };
    for ranks in [1, 2] {
        let policy = PolicySettings { temperature: TEMPERATURE, loss: &loss };
        let ahead = |trainer: &mut Trainer<CpuDevice>| {
            trainer.load_reference(&reference).expect("weights");
            trainer.imitation_step(&samples, 1e-2, &settings(64)).expect("all ranks are there");
        };
        let found = on_ranks(ranks, 1, |world| {
            let mut trainer = trainer(world, &settings(64));
            ahead(&mut trainer);
            let metrics = trainer.train_on_rollout(samples.clone(), &policy, plan, 1e-3, &settings(64)).expect("ranks");
            assert_eq!((metrics.updates, metrics.updates_skipped, metrics.skipped), (6, 0, false));
            assert_eq!(metrics.statistics.tokens, 2 * 186);
            assert!(metrics.statistics.reference_kl() > 0.0 && metrics.statistics.ratio_max > 1.0);
            assert_eq!(metrics.mismatch.tokens, 186, "compared once, before the first update");
            tensors(&mut trainer)
        });
        let expected = on_ranks(ranks, 1, |world| {
            let mut trainer = trainer(world, &settings(64));
            ahead(&mut trainer);
            let old = trainer.recompute_log_probs(&samples, TEMPERATURE, &settings(64)).expect("ranks");
            let reference = trainer.reference_log_probs(&samples, TEMPERATURE, &settings(64)).expect("ranks");
            assert_ne!(old, reference);
            for _ in 0..plan.passes {
                for place in [0..2, 2..4, 4..6] {
                    let batch = PolicyBatch {
                        samples: samples[place.clone()].to_vec(),
                        old_log_probs: OldLogProbs::Recomputed(old[place.clone()].to_vec()),
                        weights: None,
                        reference_log_probs: Some(reference[place].to_vec()),
                    };
                    trainer.policy_step(&batch, batch.all(), &policy, 1e-3, &settings(64)).expect("ranks");
                }
            }
            tensors(&mut trainer)
        });
        assert_eq!(found, expected, "{ranks} ranks");
    }
}

/// Weights before the update or in the pass itself, of the trainer's probability over the sampler's.
#[test]
fn importance_weights_are_the_same_before_the_update_and_in_its_pass() {
    let samples = samples(&LENGTHS, 11);
    let weight = |normalise| {
        Some(WeightSettings { level: Level::Geometric, beyond: Beyond::Truncate, lower: None, upper: 1.05, normalise })
    };
    let run = |loss: &LossSettings, plan: UpdatePlan| {
        on_one(|mut trainer| {
            let mut samples = samples.clone();
            let current = trainer.recompute_log_probs(&samples, TEMPERATURE, &settings(64)).expect("one rank");
            let sampled = near(&samples, 4, |index, token| current[index][token]);
            samples.iter_mut().zip(sampled).for_each(|(sample, sampled)| sample.sampled_log_probs = sampled);
            let policy = PolicySettings { temperature: TEMPERATURE, loss };
            let metrics = trainer.train_on_rollout(samples, &policy, plan, 1e-3, &settings(64)).expect("one rank");
            (metrics, tensors(&mut trainer))
        })
    };
    let settings = |objective, old_policy, normalise, rejections| LossSettings {
        objective,
        correction: CorrectionSettings { old_policy, weight: weight(normalise), rejections },
        ..LossSettings::default()
    };
    // REINFORCE looks at no old policy, so both ways are one.
    let decoupled = run(&settings(Objective::Reinforce, OldPolicy::Recomputed, false, Vec::new()), ONE_UPDATE);
    let bypass = run(&settings(Objective::Reinforce, OldPolicy::Sampler, false, Vec::new()), ONE_UPDATE);
    assert_eq!(decoupled.1, bypass.1);
    assert_eq!(decoupled.0.weights, bypass.0.weights);
    assert!(decoupled.0.weights.max <= 1.05 && decoupled.0.weights.effective_sample_size() < 1.0);
    // All weights divided by their mean: the same direction at another size, which AdamW's first step does not show.
    let normalised = run(&settings(Objective::Clip, OldPolicy::Recomputed, true, Vec::new()), ONE_UPDATE);
    let plain = run(&settings(Objective::Clip, OldPolicy::Recomputed, false, Vec::new()), ONE_UPDATE);
    let ratio = normalised.0.gradient_norm / plain.0.gradient_norm;
    assert!((ratio * plain.0.weights.mean() - 1.0).abs() < 1e-5, "{ratio}");
    // What is rejected beforehand counts in no denominator; what is rejected in the pass does.
    let reject = vec![RejectionSettings { statistic: Statistic::K1, over: Over::Token, lower: None, upper: 1.2 }];
    let before = run(&settings(Objective::Reinforce, OldPolicy::Recomputed, false, reject.clone()), ONE_UPDATE).0;
    let within = run(&settings(Objective::Reinforce, OldPolicy::Sampler, false, reject), ONE_UPDATE).0;
    assert!(before.rejected > 0 && before.rejected == within.rejected);
    assert_eq!((before.tokens_trained, within.tokens_trained), (186 - before.rejected, 186));
    assert_eq!(before.statistics.tokens, within.statistics.tokens);
}
