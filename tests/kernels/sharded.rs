//! A model cut over emulated devices, one to a rank, with links over NCCL, against the whole model on one device and the same global
//! batch: scores bit for bit, loss, gradients and steps of training but for the order of sums.

use std::collections::BTreeMap;
use std::path::Path;

use learner::collectives::CollectiveError;
use learner::device::{CpuDevice, CudaDevice, Device};
use learner::model::{Cotangents, Family, Model, ModelConfig, PassSettings, Scores};
use learner::parallel::{Mesh, Ranks, ShardedModel, World, deal};
use learner::train::Policy;
use learner::train::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits};
use learner::types::Batch;

use crate::accept::assert_same_bits;
use crate::inputs::Inputs;
use crate::nccl::{NEVER, liveness, on_ranks};
use crate::subject::{Emulated, settings};

const VOCABULARY: usize = 61;
/// The last ids of the vocabulary, each of which one token looks up.
const LOOKED_UP_ONCE: usize = 8;
const STEPS: usize = 10;
/// Twenty times that of the recipes. Here the losses of ten steps come out the same to the bit. AdamW's first steps are little more than
/// signs of gradients, and those near 0 change theirs with the order of sums over tokens: at 2e-4 a weight may then be rounded to another bf16,
/// which moves a loss by as much as bf16 rounds, up to 1.3e-4.
const LEARNING_RATE: f32 = 2e-5;

/// A number of ids that no degree divides, so that shards are padded. A head of its own where there are several layers.
fn qwen3(layers: usize) -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocabulary: VOCABULARY,
        hidden: 48,
        intermediate: 40,
        layers,
        query_heads: 3,
        key_value_heads: 3,
        head_dim: 32,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        yarn: None,
        max_positions: 512,
        tied_embeddings: layers == 1,
        attention_bias: false,
        other: Default::default(),
    }
}

/// One layer, biases, and a head of its own.
fn qwen2() -> ModelConfig {
    let heads = ModelConfig { query_heads: 2, key_value_heads: 1, ..qwen3(1) };
    ModelConfig { family: Family::Qwen2, tied_embeddings: false, attention_bias: true, ..heads }
}

/// Weights among which norms and biases matter, as a directory.
fn noisy_model(config: ModelConfig) -> tempfile::TempDir {
    let mut model = Model::initialise(CpuDevice::new(), config, 3);
    let mut inputs = Inputs::new("noise of weights");
    for (name, _, values) in model.tensors().collect::<Vec<_>>() {
        let noise = inputs.normal(values.len(), 0.1);
        let values: Vec<f32> = values.iter().zip(noise).map(|(value, noise)| value + noise).collect();
        model.set_tensor(&name, &values).expect("a tensor of the model itself");
    }
    let directory = tempfile::tempdir().expect("a directory");
    model.save(directory.path()).expect("a model is saved");
    directory
}

/// Three micro-batches: a document that is shared beside some that are not, and one of a single token; so few tokens that some ranks
/// have none; and a document of which only the end is trained.
fn global_batch() -> Vec<Batch> {
    let mut inputs = Inputs::new("a global batch");
    let mut batch = |lengths: &[usize], scored: fn(usize) -> bool| {
        let documents: Vec<Vec<u32>> = lengths.iter().map(|&length| inputs.ids(length, VOCABULARY - LOOKED_UP_ONCE)).collect();
        Batch::pack(&documents.iter().map(Vec::as_slice).collect::<Vec<_>>(), |_, token| scored(token))
    };
    let mut batches =
        vec![batch(&[40, 530, 1, 65], |token| token % 4 != 0), batch(&[30, 20], |_| true), batch(&[290], |token| token >= 270)];
    for id in 0..LOOKED_UP_ONCE {
        batches[0].ids[40 + 66 * id] = (VOCABULARY - LOOKED_UP_ONCE + id) as u32;
    }
    batches
}

/// Minus the log-probabilities, each with a weight of its own, and a little entropy: the loss of a micro-batch and its derivatives.
fn loss_of(scores: &Scores) -> (Cotangents, f64) {
    let rows = scores.log_probs.len();
    let log_probs: Vec<f32> = (0..rows).map(|row| -0.002 * (1 + row % 3) as f32).collect();
    let entropies: Vec<f32> = (0..rows).map(|row| 0.001 * (row % 5) as f32).collect();
    let sum = |weights: &[f32], values: &[f32]| -> f64 {
        weights.iter().zip(values).map(|(weight, value)| f64::from(*weight) * f64::from(*value)).sum()
    };
    let loss = sum(&log_probs, &scores.log_probs) + sum(&entropies, &scores.entropies);
    (Cotangents { log_probs, entropies: Some(entropies) }, loss)
}

/// What is compared.
struct Outcome {
    /// By micro-batch, from a pass without and one with a backward.
    scores: BTreeMap<usize, [Scores; 2]>,
    /// Before the first step.
    gradients: BTreeMap<String, Vec<f32>>,
    /// Before each step.
    losses: Vec<f64>,
}

/// Trains one rank's part of a policy. Every rank sees the losses of all and gathers all gradients; it has the scores of its own
/// micro-batches.
fn train<D: Device>(policy: &mut Policy<D>, ranks: &Ranks, mesh: Mesh, recompute: bool) -> Result<Outcome, CollectiveError> {
    let (batches, nothing) = (global_batch(), Batch::default());
    let at = mesh.coordinates(ranks.rank());
    let own = deal(&batches, mesh.data(), 10).swap_remove(at.data);
    let pass = PassSettings { temperature: 0.8, recompute };
    let device = policy.device().clone();
    let mut optimizer = AdamW::new(&device, policy.pieces(), AdamWSettings::default(), MomentPlace::Device);
    let mut outcome = Outcome { scores: BTreeMap::new(), gradients: BTreeMap::new(), losses: Vec::new() };
    for step in 0..STEPS {
        policy.clear_gradients();
        let mut loss = 0.0;
        for place in own.iter().copied() {
            let batch = place.map_or(&nothing, |place| &batches[place]);
            let alone = (step == 0).then(|| policy.score(batch, pass.temperature));
            let scores = policy.forward_backward(batch, pass, |scores| {
                let (cotangents, of_batch) = loss_of(scores);
                // The ranks of a context group see the same scores.
                loss += if at.context == 0 { of_batch } else { 0.0 };
                cotangents
            });
            outcome.scores.extend(place.zip(alone).map(|(place, alone)| (place, [alone, scores])));
        }
        let mut sum = [loss];
        ranks.sum(&mut sum)?;
        outcome.losses.push(sum[0]);
        if step == 0 {
            outcome.gradients = gradients(policy)?;
        }
        optimizer.step(policy.pieces(), ranks, LEARNING_RATE, NormLimits::clip_at(f32::INFINITY))?;
        policy.after_step();
    }
    Ok(outcome)
}

fn gradients<D: Device>(policy: &mut Policy<D>) -> Result<BTreeMap<String, Vec<f32>>, CollectiveError> {
    let mut found = BTreeMap::new();
    match policy {
        Policy::Whole { gradients, .. } => found.extend(gradients.tensors().map(|(name, _, values)| (name, values))),
        Policy::Sharded { model, .. } => {
            model.gather_gradients(|_| true, |name, _, values| found.extend([(name.to_owned(), values)]))?;
        }
    }
    Ok(found)
}

fn on_one<D: Device>(device: D, directory: &Path) -> Outcome {
    let mut policy = Policy::whole(Model::load(device, directory).expect("a model"));
    train(&mut policy, &Ranks::one(), Mesh::new(1, 1, 1).expect("a mesh"), false).expect("one rank loses nobody")
}

/// L2 of the difference over L2.
fn difference(found: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let differences = square(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (differences / square(&mut expected.iter().map(|value| f64::from(*value))).max(1e-300)).sqrt()
}

fn check(what: &str, found: &Outcome, one: &Outcome) {
    for (place, scores) in &found.scores {
        for (scores, expected) in scores.iter().zip(&one.scores[place]) {
            assert_same_bits(
                &format!("{what}: log-probabilities of micro-batch {place}"),
                &scores.log_probs,
                &expected.log_probs,
            );
            assert_same_bits(&format!("{what}: entropies of micro-batch {place}"), &scores.entropies, &expected.entropies);
        }
    }
    let (loss, expected) = (found.losses[0], one.losses[0]);
    assert!((loss - expected).abs() <= 1e-6 * expected.abs(), "{what}: loss {loss} for {expected}");
    assert_eq!(found.gradients.keys().collect::<Vec<_>>(), one.gradients.keys().collect::<Vec<_>>(), "{what}");
    for (name, gradient) in &found.gradients {
        let difference = difference(gradient, &one.gradients[name]);
        assert!(difference <= 1e-5, "{what}: the gradient of {name} is off by {difference:.1e}");
    }
    // The gradient of an embedding that one token looks up is what flowed back to that token, through all layers.
    if found.gradients.contains_key("lm_head.weight") {
        let [rows, expected] = [found, one].map(|outcome| {
            let gradient = &outcome.gradients["model.embed_tokens.weight"];
            &gradient[gradient.len() / VOCABULARY * (VOCABULARY - LOOKED_UP_ONCE)..]
        });
        assert!(expected.iter().all(|value| *value != 0.0), "nothing flows back");
        assert_same_bits(&format!("{what}: embeddings that are looked up once"), rows, expected);
    }
    for (step, (loss, expected)) in found.losses.iter().zip(&one.losses).enumerate() {
        assert!((loss - expected).abs() <= 1e-4 * expected.abs(), "{what}: step {step} has loss {loss} for {expected}");
    }
}

/// Every mesh of `(data, context)` ranks against one device, each under another schedule of the emulator.
fn compare(config: ModelConfig, meshes: &[(usize, usize)], recompute: bool) {
    let Some(emulated) = Emulated::take() else { return };
    let directory = noisy_model(config);
    emulated.configure(&settings(0));
    let one = on_one(CudaDevice::emulated(&settings(0), 0).expect("a device"), directory.path());
    assert!(one.losses[STEPS - 1] < one.losses[0], "nothing is learned: {:?}", one.losses);
    emulated.expect_no_findings();
    for (run, &(data, context)) in meshes.iter().enumerate() {
        emulated.configure(&settings(run));
        let mesh = Mesh::new(1, data * context, context).expect("a mesh");
        let outcomes = on_ranks(run, mesh.world(), |device, place| {
            let world = World::over_nccl(device, place, mesh, &liveness(NEVER))?;
            let model = ShardedModel::load(device.clone(), directory.path(), &world).expect("a model");
            let outcome = train(&mut Policy::sharded(model), &world.ranks, mesh, recompute)?;
            world.ranks.barrier()?;
            Ok(outcome)
        });
        let mut scored = 0;
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let what = format!("{data} x {context}, rank {rank}");
            let outcome = outcome.unwrap_or_else(|error: CollectiveError| panic!("{what}: {error}"));
            check(&what, &outcome, &one);
            scored += outcome.scores.len();
        }
        assert_eq!(scored, one.scores.len() * context, "{data} x {context}: every micro-batch, on every rank of a context group");
        emulated.expect_no_findings();
    }
}

/// Three key/value heads, each a group that is exchanged by itself. Two documents of one chunk leave most of eight ranks without tokens.
#[test]
fn every_context_degree_trains_as_one_device_does() {
    compare(qwen3(1), &[(1, 1), (1, 2), (1, 3), (1, 4), (1, 8)], false);
}

#[test]
fn data_and_context_ranks_mix() {
    compare(qwen2(), &[(2, 2), (3, 1), (2, 3)], false);
}

/// Three layers, so that the places of two are used again.
#[test]
fn layers_computed_again_give_the_same() {
    compare(qwen3(3), &[(2, 2), (1, 3)], true);
}
