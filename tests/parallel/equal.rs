//! N ranks against one on the same global batch: scores bit for bit, loss, gradients and ten steps of training but for the order
//! of sums.

use std::collections::BTreeMap;
use std::path::Path;

use learner::device::{AdamWStep, CpuDevice, Device, Role};
use learner::model::{Gradients, Model, ModelConfig, PassSettings, Piece, Scores};
use learner::parallel::{Mesh, Ranks, ShardedModel, World, deal};
use learner::types::Batch;

use crate::support::{cotangents, global_batch, local, mesh, noisy_model, on_ranks, qwen2, qwen3, tcp};

const SETTINGS: PassSettings = PassSettings { temperature: 0.8, recompute: false };
const STEPS: usize = 10;

/// What is compared.
struct Outcome {
    /// By micro-batch, from a pass without and one with a backward.
    scores: BTreeMap<usize, [Scores; 2]>,
    loss: f64,
    gradients: BTreeMap<String, Vec<f32>>,
    norm: f64,
    /// Of each step, before it.
    losses: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
}

fn named(tensors: impl Iterator<Item = (String, Vec<usize>, Vec<f32>)>) -> BTreeMap<String, Vec<f32>> {
    tensors.map(|(name, _, values)| (name, values)).collect()
}

/// AdamW, as plain as can be.
#[derive(Default)]
struct Optimizer {
    moments: Vec<[Vec<f32>; 2]>,
    steps: u64,
}

impl Optimizer {
    fn step<'a>(&mut self, device: &CpuDevice, pieces: impl Iterator<Item = Piece<'a, CpuDevice>>) {
        self.steps += 1;
        let constants = AdamWStep {
            learning_rate: 2e-3,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-6,
            weight_decay: 0.01,
            step: self.steps,
            gradient_scale: 1.0,
        };
        for (index, piece) in pieces.enumerate() {
            if self.moments.len() == index {
                let zeros = || device.zeros(Role::Optimizer, device.length(piece.values));
                self.moments.push([zeros(), zeros()]);
            }
            let [first, second] = &mut self.moments[index];
            device.adamw(piece.values, piece.packed, piece.gradient, first, second, constants);
        }
    }
}

fn one_rank(mut model: Model<CpuDevice>, batches: &[Batch], steps: usize) -> Outcome {
    let mut gradients = model.new_gradients();
    let pass = |model: &Model<CpuDevice>, gradients: &mut Gradients<CpuDevice>, batch: &Batch| {
        let mut loss = 0.0;
        let scores = model.forward_backward(gradients, batch, SETTINGS.temperature, |scores| {
            let (cotangents, sum) = cotangents(scores);
            loss = sum;
            cotangents
        });
        (scores, loss)
    };
    let mut outcome = Outcome {
        scores: BTreeMap::new(),
        loss: 0.0,
        gradients: BTreeMap::new(),
        norm: 0.0,
        losses: vec![],
        weights: BTreeMap::new(),
    };
    for (index, batch) in batches.iter().enumerate() {
        let alone = model.score(batch, SETTINGS.temperature);
        let (scores, loss) = pass(&model, &mut gradients, batch);
        outcome.scores.insert(index, [alone, scores]);
        outcome.loss += loss;
    }
    outcome.gradients = named(gradients.tensors());
    outcome.norm = squares(&model.device().clone(), model.pieces(&gradients)).sqrt();
    let mut optimizer = Optimizer::default();
    for _ in 0..steps {
        gradients.clear();
        outcome.losses.push(batches.iter().map(|batch| pass(&model, &mut gradients, batch).1).sum());
        let device = model.device().clone();
        optimizer.step(&device, model.pieces(&gradients));
    }
    outcome.weights = named(model.tensors());
    outcome
}

/// Of the gradients of one rank's pieces.
fn squares<'a>(device: &CpuDevice, pieces: impl Iterator<Item = Piece<'a, CpuDevice>>) -> f64 {
    pieces.map(|piece| device.sum_of_squares(piece.gradient)).fold(0.0, |sum, square| sum + square)
}

/// One rank of many. Every rank sees the losses of all and gathers all tensors; it has the scores of its own micro-batches.
fn one_of_many(ranks: Ranks, mesh: Mesh, directory: &Path, batches: &[Batch], settings: PassSettings, steps: usize) -> Outcome {
    let device = CpuDevice::new();
    let world = World::over_hosts(&device, ranks, mesh).expect("a world");
    let mut model = ShardedModel::load(device.clone(), directory, &world).expect("a model");
    let at = mesh.coordinates(world.ranks.rank());
    let dealt = deal(batches, mesh.data(), 10)[at.data].clone();
    let empty = Batch::default();
    let pass = |model: &mut ShardedModel<CpuDevice>, index: Option<usize>| {
        let mut loss = 0.0;
        let scores = model.forward_backward(index.map_or(&empty, |index| &batches[index]), settings, |scores| {
            let (cotangents, sum) = cotangents(scores);
            loss = sum;
            cotangents
        });
        (scores, if at.context == 0 { loss } else { 0.0 })
    };
    let sum = |loss: f64| {
        let mut sum = [loss];
        world.ranks.sum(&mut sum).expect("a sum");
        sum[0]
    };
    let mut scores = BTreeMap::new();
    let mut loss = 0.0;
    for index in dealt.iter().copied() {
        let alone = model.score(index.map_or(&empty, |index| &batches[index]), settings.temperature);
        let (with_backward, of_batch) = pass(&mut model, index);
        loss += of_batch;
        scores.extend(index.map(|index| (index, [alone, with_backward])));
    }
    let loss = sum(loss);
    let norm = sum(squares(&device, model.pieces())).sqrt();
    let mut gradients = BTreeMap::new();
    model.gather_gradients(|_| true, |name, _, values| drop(gradients.insert(name.to_owned(), values))).expect("gradients");
    let mut losses = Vec::new();
    let mut optimizer = Optimizer::default();
    for _ in 0..steps {
        model.clear_gradients();
        let of_step = dealt.iter().map(|&index| pass(&mut model, index).1).sum();
        losses.push(sum(of_step));
        optimizer.step(&device, model.pieces());
        model.after_step();
    }
    let mut weights = BTreeMap::new();
    model.gather_tensors(|_| true, |name, _, values| drop(weights.insert(name.to_owned(), values))).expect("weights");
    world.ranks.barrier().expect("all ranks");
    Outcome { scores, loss, gradients, norm, losses, weights }
}

/// L2 of the difference over L2.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let differences = square(&mut a.iter().zip(b).map(|(a, b)| *a as f64 - *b as f64));
    (differences / square(&mut b.iter().map(|value| *value as f64)).max(1e-300)).sqrt()
}

fn bits(scores: &Scores) -> [Vec<u32>; 2] {
    [&scores.log_probs, &scores.entropies].map(|values| values.iter().map(|value| value.to_bits()).collect())
}

fn check(of_rank: &Outcome, one: &Outcome, what: &str) {
    for (index, scores) in &of_rank.scores {
        for (scores, expected) in scores.iter().zip(&one.scores[index]) {
            assert_eq!(bits(scores), bits(expected), "{what}: scores of micro-batch {index}");
        }
    }
    assert!((of_rank.loss - one.loss).abs() < 1e-6 * one.loss.abs(), "{what}: loss {} for {}", of_rank.loss, one.loss);
    assert_eq!(of_rank.gradients.keys().collect::<Vec<_>>(), one.gradients.keys().collect::<Vec<_>>(), "{what}");
    for (name, gradient) in &of_rank.gradients {
        let difference = difference(gradient, &one.gradients[name]);
        assert!(difference < 1e-5, "{what}: the gradient of {name} is off by {difference:.1e}");
    }
    assert!((of_rank.norm - one.norm).abs() < 1e-5 * one.norm, "{what}: norm {} for {}", of_rank.norm, one.norm);
    assert_eq!(of_rank.losses.len(), one.losses.len());
    for (step, (loss, expected)) in of_rank.losses.iter().zip(&one.losses).enumerate() {
        assert!((loss - expected).abs() < 1e-4 * expected.abs(), "{what}: step {step} has loss {loss} for {expected}");
    }
    for (name, values) in &of_rank.weights {
        let difference = difference(values, &one.weights[name]);
        assert!(difference < 1e-3, "{what}: {name} is off by {difference:.1e} after {STEPS} steps");
    }
}

/// All of a mesh's ranks against one rank.
fn compare(config: ModelConfig, worlds: &[(Vec<Ranks>, Mesh)], settings: PassSettings, steps: usize) {
    let (model, directory) = noisy_model(config);
    let batches = global_batch();
    let one = one_rank(model, &batches, steps);
    assert!(steps == 0 || one.losses[steps - 1] < one.losses[0], "training lowers the loss: {:?}", one.losses);
    for (ranks, mesh) in worlds {
        let what = format!("{} x {}", mesh.data(), mesh.context());
        let work = |ranks| one_of_many(ranks, *mesh, directory.path(), &batches, settings, steps);
        let outcomes = on_ranks(ranks.clone(), work);
        for (rank, outcome) in outcomes.iter().enumerate() {
            check(outcome, &one, &format!("{what}, rank {rank}"));
        }
        let scored: usize = outcomes.iter().map(|outcome| outcome.scores.len()).sum();
        assert_eq!(scored, batches.len() * mesh.context(), "{what}: every micro-batch, on every rank of a context group");
    }
}

fn threads(data: usize, context: usize) -> (Vec<Ranks>, Mesh) {
    (local(data * context), mesh(data, context))
}

/// Five key/value heads: none of these degrees but 1 divides them.
#[test]
fn every_context_degree_trains_as_one_rank_does() {
    let worlds: Vec<_> = [1, 2, 3, 4, 8].into_iter().map(|degree| threads(1, degree)).collect();
    compare(qwen3(true), &worlds, SETTINGS, STEPS);
}

#[test]
fn data_and_context_ranks_mix() {
    let worlds = [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)].map(|(data, context)| threads(data, context));
    compare(qwen3(false), &worlds, SETTINGS, STEPS);
}

#[test]
fn layers_run_again_give_the_same() {
    compare(qwen3(true), &[threads(2, 2)], PassSettings { recompute: true, ..SETTINGS }, 0);
}

#[test]
fn one_layer_with_biases_trains_as_on_one_rank() {
    compare(qwen2(), &[threads(1, 2), threads(2, 3)], SETTINGS, STEPS);
}

#[test]
fn ranks_over_tcp_train_as_one_rank_does() {
    compare(qwen3(true), &[(tcp(4), mesh(2, 2))], SETTINGS, 2);
}
