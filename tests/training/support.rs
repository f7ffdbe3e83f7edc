//! A tiny model, samples for it, and worlds of threads.

use std::path::Path;

use learner::device::CpuDevice;
use learner::model::{Family, Model, ModelConfig};
use learner::parallel::{Mesh, Ranks, ShardedModel, World};
use learner::train::optimizer::AdamWSettings;
use learner::train::{Policy, StepSettings, Trainer};
use learner::types::{Key, Purpose, Sample};

pub const VOCABULARY: usize = 53;

pub fn tiny() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocabulary: VOCABULARY,
        hidden: 40,
        intermediate: 72,
        layers: 2,
        query_heads: 4,
        key_value_heads: 2,
        head_dim: 12,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        yarn: None,
        max_positions: 512,
        tied_embeddings: false,
        attention_bias: false,
        other: Default::default(),
    }
}

/// Sequences of these lengths, of which all but the first three tokens are trained, good and bad in turn.
pub fn samples(lengths: &[usize], seed: u64) -> Vec<Sample> {
    let sample = |(index, &length): (usize, &usize)| {
        let mut key = Key::new(Purpose::Benchmark, &[seed, index as u64]);
        Sample {
            ids: (0..length).map(|_| key.below(VOCABULARY) as u32).collect(),
            trained: (0..length).map(|token| token > 2).collect(),
            sampled_log_probs: (0..length).map(|_| -4.0 * key.uniform() as f32).collect(),
            advantage: if index % 2 == 0 { 1.0 } else { -0.5 },
        }
    };
    lengths.iter().enumerate().map(sample).collect()
}

pub fn settings(micro_batch_tokens: usize) -> StepSettings {
    StepSettings { micro_batch_tokens, ..StepSettings::default() }
}

pub fn optimizer() -> AdamWSettings {
    AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() }
}

/// Runs `body` on `ranks` threads, `context` of which share each sequence, and returns what each gives.
pub fn on_ranks<T: Send>(ranks: usize, context: usize, body: impl Fn(World<CpuDevice>) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let start = |ranks: Ranks| {
            scope.spawn(move || {
                let mesh = Mesh::new(1, ranks.ranks(), context).expect("a mesh");
                body(World::over_hosts(&CpuDevice::new(), ranks, mesh).expect("a world"))
            })
        };
        let threads: Vec<_> = Ranks::local(ranks, 120.0).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank ends well")).collect()
    })
}

/// A fresh policy: whole on one rank, in shards on more.
pub fn policy(world: &World<CpuDevice>, config: ModelConfig, seed: u64) -> Policy<CpuDevice> {
    match world.ranks.ranks() {
        1 => Policy::whole(Model::initialise(CpuDevice::new(), config, seed)),
        _ => Policy::sharded(ShardedModel::initialise(CpuDevice::new(), config, seed, world)),
    }
}

/// The policy of a checkpoint, likewise.
pub fn load(world: &World<CpuDevice>, checkpoint: &Path) -> Policy<CpuDevice> {
    match world.ranks.ranks() {
        1 => Policy::whole(Model::load(CpuDevice::new(), checkpoint).expect("weights")),
        _ => Policy::sharded(ShardedModel::load(CpuDevice::new(), checkpoint, world).expect("weights")),
    }
}

pub fn trainer(world: World<CpuDevice>, step: &StepSettings) -> Trainer<CpuDevice> {
    Trainer::new(policy(&world, tiny(), 1), world, optimizer(), step)
}

/// Name, shape and values.
pub type Tensor = (String, Vec<usize>, Vec<f32>);
pub type Tensors = Vec<Tensor>;

/// All of a policy's tensors by name, on every rank.
pub fn tensors(trainer: &mut Trainer<CpuDevice>) -> Tensors {
    let mut tensors = Vec::new();
    let accept = |name: &str, shape: &[usize], values| tensors.push((name.to_owned(), shape.to_vec(), values));
    trainer.policy_mut().gather_tensors(|_| true, accept).expect("all ranks are there");
    tensors.sort_by(|left, right| left.0.cmp(&right.0));
    tensors
}

/// The largest L2 of a tensor's difference over its L2.
pub fn largest_difference(left: &Tensors, right: &Tensors) -> f64 {
    let norm =
        |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).fold(0.0, |sum, value| sum + value).sqrt();
    let relative = |((name, shape, left), (other, other_shape, right)): (&Tensor, &Tensor)| {
        assert_eq!((name, shape), (other, other_shape));
        let difference = norm(&mut left.iter().zip(right).map(|(left, right)| (left - right) as f64));
        difference / norm(&mut right.iter().map(|&value| value as f64)).max(1e-12)
    };
    left.iter().zip(right).map(relative).fold(0.0, f64::max)
}
