//! Against Hugging Face Transformers: see tests/fixtures/make_transformers_fixtures.py for what the files hold.

use std::path::{Path, PathBuf};

use learner::device::CpuDevice;
use learner::model::{Cotangents, Model};
use learner::parallel::Ranks;
use learner::train::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits};
use learner::types::Batch;
use safetensors::SafeTensors;

struct Fixture {
    directory: PathBuf,
    bytes: Vec<u8>,
}

impl Fixture {
    fn open(name: &str) -> Fixture {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transformers").join(name);
        let bytes = std::fs::read(directory.join("expected.safetensors")).expect("a fixture file");
        Fixture { directory, bytes }
    }

    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("a whole fixture file");
        tensors.tensor(name).unwrap_or_else(|_| panic!("no {name} in the fixture")).data().as_chunks::<4>().0.to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name).into_iter().map(f32::from_le_bytes).collect()
    }

    fn batch(&self) -> Batch {
        let ids: Vec<u32> = self.words("ids").into_iter().map(u32::from_le_bytes).collect();
        let starts: Vec<usize> = self.words("starts").into_iter().map(|word| u32::from_le_bytes(word) as usize).collect();
        let sequences: Vec<&[u32]> = starts.windows(2).map(|bounds| &ids[bounds[0]..bounds[1]]).collect();
        Batch::pack(&sequences, |_, _| true)
    }

    fn model(&self) -> Model<CpuDevice> {
        Model::load(CpuDevice::new(), &self.directory).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// `max|a - b| / max|b|`
fn largest_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
    difference as f64 / b.iter().map(|b| b.abs()).fold(0.0f32, f32::max) as f64
}

/// `L2(a - b) / L2(b)`
fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squared = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    squared(&mut a.iter().zip(b).map(|(a, b)| *a as f64 - *b as f64)) / squared(&mut b.iter().map(|b| *b as f64))
}

fn check(name: &str) {
    let fixture = Fixture::open(name);
    let batch = fixture.batch();
    let mut model = fixture.model();

    let error = largest_error(&model.logits(&batch), &fixture.floats("logits"));
    println!("{name}: logits {error:.1e}");
    assert!(error <= 1e-5, "logits are off by {error}");

    let weights = fixture.floats("loss_weights");
    let (log_probs, entropies) = weights.split_at(weights.len() / 2);
    let mut gradients = model.new_gradients();
    let scores = model.forward_backward(&mut gradients, &batch, 1.0, |_| Cotangents {
        log_probs: log_probs.to_vec(),
        entropies: Some(entropies.to_vec()),
    });
    let (log_prob_error, entropy_error) = (
        largest_error(&scores.log_probs, &fixture.floats("log_probs")),
        largest_error(&scores.entropies, &fixture.floats("entropy")),
    );
    println!("{name}: log-probabilities {log_prob_error:.1e}, entropies {entropy_error:.1e}");
    assert!(log_prob_error <= 1e-5 && entropy_error <= 1e-5);
    let mut worst: f64 = 0.0;
    for (tensor, _, gradient) in gradients.tensors() {
        let error = relative_l2(&gradient, &fixture.floats(&format!("gradient.{tensor}")));
        // A key bias adds the same number to all scores of a query but for the rotation; its gradient is small, not zero.
        assert!(error <= 1e-4, "the gradient of {tensor} is off by {error}");
        worst = worst.max(error);
    }
    println!("{name}: worst gradient {worst:.1e}");

    let rows = batch.scored_rows.len();
    let settings = AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() };
    let mut optimizer = AdamW::new(&CpuDevice::new(), model.pieces(&gradients), settings, MomentPlace::Device);
    let mut losses = Vec::new();
    for step in 0..=5 {
        gradients.clear();
        let scores = model.forward_backward(&mut gradients, &batch, 1.0, |_| Cotangents {
            log_probs: vec![-1.0 / rows as f32; rows],
            entropies: None,
        });
        losses.push(-(scores.log_probs.iter().map(|x| *x as f64).sum::<f64>() / rows as f64) as f32);
        if step < 5 {
            optimizer.step(model.pieces(&gradients), &Ranks::one(), 1e-2, NormLimits::clip_at(1.0)).expect("one rank");
        }
    }
    let expected = fixture.floats("losses");
    println!("{name}: losses {losses:?}, expected {expected:?}");
    let error = losses.iter().zip(&expected).map(|(a, b)| ((a - b) / b).abs()).fold(0.0f32, f32::max);
    assert!(error <= 1e-5, "losses are off by {error}: {losses:?} against {expected:?}");
}

#[test]
fn qwen2_agrees() {
    check("qwen2");
}

#[test]
fn qwen3_tied_agrees() {
    check("qwen3-tied");
}

#[test]
fn qwen3_untied_agrees() {
    check("qwen3-untied");
}

#[test]
fn qwen2_with_scaled_rotary_embeddings_agrees() {
    check("qwen2-yarn");
}

#[test]
fn qwen3_with_a_ramp_and_an_attention_factor_of_its_own_agrees() {
    check("qwen3-yarn");
}
