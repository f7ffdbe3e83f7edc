//! Training and sampling speed end to end: `cargo bench --bench model [-- large]`.
//!
//! Convention: 6 x parameters x tokens per training step (the tied embedding counted once, attention not counted), best of
//! several steps. `large` is a 135M-parameter shape (about 4 GB); without it, the quick start's 0.45M parameters.

use std::time::Instant;

use learner::device::{CpuDevice, Device};
use learner::model::{Cotangents, Extension, Family, Model, ModelConfig};
use learner::parallel::Ranks;
use learner::train::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits};
use learner::types::{Batch, Key, Purpose};

fn config(large: bool) -> ModelConfig {
    let small = ModelConfig {
        family: Family::Qwen3,
        vocabulary: 440,
        hidden: 128,
        intermediate: 384,
        layers: 2,
        query_heads: 4,
        key_value_heads: 2,
        head_dim: 32,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        yarn: None,
        max_positions: 4096,
        tied_embeddings: true,
        attention_bias: false,
        other: Default::default(),
    };
    if !large {
        return small;
    }
    ModelConfig {
        family: Family::Qwen2,
        vocabulary: 49_152,
        hidden: 576,
        intermediate: 1536,
        layers: 30,
        query_heads: 9,
        key_value_heads: 3,
        head_dim: 64,
        attention_bias: true,
        ..small
    }
}

fn sequences(lengths: &[usize], vocabulary: usize) -> Vec<Vec<u32>> {
    let mut key = Key::new(Purpose::GenerateTask, &[1]);
    lengths.iter().map(|&length| (0..length).map(|_| key.below(vocabulary) as u32).collect()).collect()
}

/// Milliseconds of the fastest of `runs`, by the wall clock, or with `RAYON_NUM_THREADS=1` in CPU time, which other work on
/// the machine hardly disturbs.
fn fastest(runs: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..runs).map(|_| {
        let (start, cpu_start) = (Instant::now(), cpu_milliseconds());
        run();
        let wall = start.elapsed().as_secs_f64() * 1e3;
        if rayon::current_num_threads() == 1 { cpu_milliseconds() - cpu_start } else { wall }
    });
    times.fold(f64::INFINITY, f64::min)
}

/// CPU time of this process so far.
fn cpu_milliseconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec to the given address.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn main() {
    let large = std::env::args().any(|argument| argument == "large");
    let runs = if large { 3 } else { 30 };
    let mut model = Model::initialise(CpuDevice::new(), config(large), 1);
    let parameters = model.parameter_count();
    println!("{} parameters on {}", parameters, model.device().describe());

    let lengths: &[usize] = if large { &[300, 280, 250, 120] } else { &[300, 280, 250, 220, 200, 170, 150, 120] };
    let sequences = sequences(lengths, model.config().vocabulary);
    let slices: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    let batch = Batch::pack(&slices, |_, token| token % 3 > 0);
    let (tokens, rows) = (batch.ids.len(), batch.scored_rows.len());
    let mut gradients = model.new_gradients();
    let training = fastest(runs, || {
        let weights = |_: &_| Cotangents { log_probs: vec![-1.0 / rows as f32; rows], entropies: None };
        model.forward_backward(&mut gradients, &batch, 1.0, weights);
    });
    let speed = 6.0 * parameters as f64 * tokens as f64 / training / 1e6;
    println!("forward and backward of {tokens} tokens, {rows} scored: {training:.2} ms, {speed:.1} GFLOP/s (6N)");
    let scoring = fastest(runs, || drop(model.score(&batch, 1.0)));
    println!("scoring the same: {scoring:.2} ms, {:.1} GFLOP/s (2N)", 2.0 * parameters as f64 * tokens as f64 / scoring / 1e6);
    let (settings, device) = (AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() }, model.device().clone());
    let mut optimizer = AdamW::new(&device, model.pieces(&gradients), settings, MomentPlace::Device);
    let ranks = Ranks::one();
    println!(
        "AdamW step: {:.2} ms",
        fastest(runs.min(5), || {
            optimizer.step(model.pieces(&gradients), &ranks, 1e-5, NormLimits::clip_at(1.0)).expect("one rank");
        })
    );

    for count in if large { [1, 16, 64] } else { [1, 64, 192] } {
        let prompts = self::sequences(&vec![150; count], model.config().vocabulary);
        let mut caches: Vec<_> = prompts.iter().map(|_| model.new_cache()).collect();
        let mut extensions: Vec<_> = caches.iter_mut().zip(&prompts).map(|(cache, tokens)| Extension { cache, tokens }).collect();
        let start = Instant::now();
        model.extend(&mut extensions);
        let prompt = start.elapsed().as_secs_f64() * 1e3;
        let uniforms = vec![0.5; count];
        let decode = fastest(runs, || {
            let mut extensions: Vec<_> = caches.iter_mut().map(|cache| Extension { cache, tokens: &[7] }).collect();
            let hidden = model.extend(&mut extensions);
            model.sample(&hidden, 1.0, &uniforms, model.config().vocabulary);
        });
        println!("{count} sequences: prompts of 150 tokens {prompt:.1} ms, then one token each {decode:.2} ms");
    }
}
