//! Tiny models, global batches, and worlds of ranks to train them in.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use learner::collectives::{Liveness, Rendezvous, RendezvousError, join};
use learner::device::CpuDevice;
use learner::model::{Cotangents, Family, Model, ModelConfig, Scores};
use learner::parallel::{Mesh, Ranks};
use learner::types::{Batch, Key, Purpose};
use learner::wire::Token;

/// Longer than anything here takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Three layers, so that places for two are used again; odd sizes, so that shards are padded.
pub fn qwen3(tied: bool) -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocabulary: 53,
        hidden: 40,
        intermediate: 72,
        layers: 3,
        query_heads: 10,
        key_value_heads: 5,
        head_dim: 8,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        yarn: None,
        max_positions: 1024,
        tied_embeddings: tied,
        attention_bias: false,
        other: Default::default(),
    }
}

/// One layer, biases, and one key/value head.
pub fn qwen2() -> ModelConfig {
    let one_head = ModelConfig { query_heads: 3, key_value_heads: 1, head_dim: 16, ..qwen3(false) };
    ModelConfig { family: Family::Qwen2, layers: 1, attention_bias: true, ..one_head }
}

/// A model in which norms, biases and embeddings matter, with its directory.
pub fn noisy_model(config: ModelConfig) -> (Model<CpuDevice>, tempfile::TempDir) {
    let mut model = Model::initialise(CpuDevice::new(), config, 3);
    let tensors: Vec<_> = model.tensors().collect();
    for (index, (name, _, mut values)) in tensors.into_iter().enumerate() {
        let mut key = Key::new(Purpose::Weights, &[1000 + index as u64]);
        values.iter_mut().for_each(|value| *value += 0.1 * key.normal() as f32);
        model.set_tensor(&name, &values).expect("a tensor of the model itself");
    }
    let directory = tempfile::tempdir().expect("a directory");
    model.save(directory.path()).expect("a model is saved");
    (model, directory)
}

/// A batch of documents of these lengths; `scored(document, token)`.
pub fn batch(lengths: &[usize], scored: impl Fn(usize, usize) -> bool) -> Batch {
    let mut key = Key::new(Purpose::GenerateTask, &[lengths.len() as u64, lengths.iter().sum::<usize>() as u64]);
    let documents: Vec<Vec<u32>> = lengths.iter().map(|&length| (0..length).map(|_| key.below(53) as u32).collect()).collect();
    Batch::pack(&documents.iter().map(Vec::as_slice).collect::<Vec<_>>(), scored)
}

/// Three micro-batches: documents that are shared beside some that are not, and one of a single token; so few that some ranks have
/// no tokens; and a long one of which only the end is trained.
pub fn global_batch() -> Vec<Batch> {
    vec![
        batch(&[300, 40, 200, 1, 130], |document, token| (document + token) % 4 != 0),
        batch(&[64, 65], |_, token| token % 2 == 0),
        batch(&[420], |_, token| token >= 400),
    ]
}

/// Derivatives of `sum(a log_prob + b entropy)` over a micro-batch, different for every row, and the sum itself.
pub fn cotangents(scores: &Scores) -> (Cotangents, f64) {
    let rows = scores.log_probs.len();
    let log_probs: Vec<f32> = (0..rows).map(|row| ((row * 7 % 11) as f32 - 7.0) * 0.002).collect();
    let entropies: Vec<f32> = (0..rows).map(|row| ((row * 5 % 7) as f32 - 2.0) * 0.001).collect();
    let sum = |weights: &[f32], values: &[f32]| -> f64 { weights.iter().zip(values).map(|(w, v)| *w as f64 * *v as f64).sum() };
    let loss = sum(&log_probs, &scores.log_probs) + sum(&entropies, &scores.entropies);
    (Cotangents { log_probs, entropies: Some(entropies) }, loss)
}

/// `data x context` threads.
pub fn mesh(data: usize, context: usize) -> Mesh {
    Mesh::new(1, data * context, context).expect("a mesh")
}

/// Runs `work` on every rank at once; results by rank.
pub fn on_ranks<A: Send>(ranks: Vec<Ranks>, work: impl Fn(Ranks) -> A + Sync) -> Vec<A> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|place| scope.spawn(move || work(place))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

pub fn local(ranks: usize) -> Vec<Ranks> {
    Ranks::local(ranks, PATIENCE.as_secs_f64())
}

/// Ranks over TCP on loopback; ports that another program takes in between are left for others.
pub fn tcp(ranks: usize) -> Vec<Ranks> {
    for _ in 0..5 {
        let port = free_ports(ranks as u16);
        let settings: Vec<Rendezvous> = (0..ranks).map(|rank| rendezvous(port, rank, ranks)).collect();
        let joined = std::thread::scope(|scope| {
            let threads: Vec<_> = settings.iter().map(|settings| scope.spawn(|| join(settings))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect::<Result<Vec<_>, _>>()
        });
        match joined {
            Err(RendezvousError::Port { .. }) => {}
            joined => return joined.expect("a world").into_iter().map(Ranks::tcp).collect(),
        }
    }
    panic!("ports are taken again and again");
}

fn rendezvous(port: u16, rank: usize, world_size: usize) -> Rendezvous {
    Rendezvous {
        coordinator: format!("127.0.0.1:{port}"),
        rank,
        world_size,
        run_id: "parallel".into(),
        token: Token::new("the token of the tests").expect("a token"),
        host: format!("host-{rank}"),
        wait: PATIENCE,
        liveness: Liveness { heartbeat_seconds: 1.0, dead_after_seconds: 60.0, stall_seconds: PATIENCE.as_secs_f64() },
        notice: Arc::new(|_: &str| {}),
        given_up: Arc::default(),
    }
}

/// A port so that this many from it on are free, below those that the system hands out by itself.
fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = (std::process::id() % 41) as u16 * 250;
    for _ in 0..1000 {
        let first = 20_000 + (own + NEXT.fetch_add(count, Ordering::Relaxed)) % 11_000;
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}
