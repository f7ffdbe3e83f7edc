//! Tiny models and token sequences.

use learner::device::CpuDevice;
use learner::model::{Family, Model, ModelConfig};
use learner::types::{Key, Purpose};

/// A Qwen3 with odd sizes: head_dim other than hidden / heads, a vocabulary that is no multiple of 16.
pub fn qwen3(tied: bool) -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocabulary: 53,
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
        tied_embeddings: tied,
        attention_bias: false,
        other: Default::default(),
    }
}

/// A Qwen2 with three query heads per key/value head.
pub fn qwen2() -> ModelConfig {
    ModelConfig { family: Family::Qwen2, query_heads: 3, key_value_heads: 1, head_dim: 16, attention_bias: true, ..qwen3(true) }
}

/// A model in which norms, biases and embeddings matter: every tensor gets noise on top of its initial values.
pub fn noisy_model(device: CpuDevice, config: ModelConfig, seed: u64) -> Model<CpuDevice> {
    let mut model = Model::initialise(device, config, seed);
    let tensors: Vec<_> = model.tensors().collect();
    for (index, (name, _, mut values)) in tensors.into_iter().enumerate() {
        let mut key = Key::new(Purpose::Weights, &[seed, 1000 + index as u64]);
        values.iter_mut().for_each(|value| *value += 0.2 * key.normal() as f32);
        model.set_tensor(&name, &values).expect("a tensor of the model itself");
    }
    model
}

pub fn tokens(count: usize, vocabulary: usize, seed: u64) -> Vec<u32> {
    let mut key = Key::new(Purpose::GenerateTask, &[seed]);
    (0..count).map(|_| key.below(vocabulary) as u32).collect()
}

pub fn with_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads").install(work)
}
