//! Our row-invariant GEMM against `matrixmultiply` and a naive loop: `cargo bench --bench gemm`.
//!
//! Shapes are rows x outputs x inputs of a linear layer; speed is 2 x rows x outputs x inputs / time, in GFLOP/s, the best of
//! several runs (other work on the machine only ever slows a run down). `forward` reads weights packed beforehand, `dx` and `dw`
//! are the input and weight gradients. The peer computes the forward product from unpacked weights.

use std::hint::black_box;
use std::time::{Duration, Instant};

use learner::device::cpu::gemm::{PackedWeights, forward, input_gradient, weight_gradient};
use learner::device::cpu::simd::InstructionSet;

const SHAPES: [(usize, usize, usize); 14] = [
    (1000, 128, 128),
    (1000, 256, 128),
    (1000, 768, 128),
    (1000, 128, 384),
    (1000, 440, 128),
    (1000, 576, 576),
    (1000, 3072, 576),
    (1000, 576, 1536),
    (1, 576, 576),
    (1, 3072, 576),
    (16, 576, 576),
    (64, 576, 576),
    (192, 128, 128),
    (192, 768, 128),
];

/// Seconds of the fastest run within a quarter of a second.
fn fastest(mut run: impl FnMut()) -> f64 {
    run();
    let mut best = f64::INFINITY;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(250) {
        let begin = Instant::now();
        run();
        best = best.min(begin.elapsed().as_secs_f64());
    }
    best
}

fn naive(x: &[f32], w: &[f32], y: &mut [f32], inputs: usize, outputs: usize) {
    for (x, y) in x.chunks_exact(inputs).zip(y.chunks_exact_mut(outputs)) {
        for (y, w) in y.iter_mut().zip(w.chunks_exact(inputs)) {
            *y = x.iter().zip(w).map(|(x, w)| x * w).sum();
        }
    }
}

fn main() {
    let set = InstructionSet::detected();
    println!("{}, {} threads; GFLOP/s (f32, 2mnk), best of many runs", set.name(), rayon::current_num_threads());
    println!(
        "{:>18} {:>9} {:>9} {:>9} {:>15} {:>9} {:>12}",
        "rows x out x in", "forward", "dx", "dw", "matrixmultiply", "naive", "ours/peer"
    );
    for (rows, outputs, inputs) in SHAPES {
        let numbers = |count: usize| (0..count).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 504.0).collect::<Vec<f32>>();
        let (x, w, dy) = (numbers(rows * inputs), numbers(outputs * inputs), numbers(rows * outputs));
        let packed = PackedWeights::pack(&w, outputs, inputs);
        let (mut y, mut dx, mut dw) = (vec![0.0; rows * outputs], vec![0.0; rows * inputs], vec![0.0; outputs * inputs]);
        let operations = 2.0 * (rows * outputs * inputs) as f64 / 1e9;
        let shape = (rows, outputs, inputs);
        let ours = operations / fastest(|| forward(set, black_box(&x), &packed, &mut y, rows));
        let input = operations / fastest(|| input_gradient(set, black_box(&dy), &w, &mut dx, shape));
        let weight = operations / fastest(|| weight_gradient(set, black_box(&dy), &x, &mut dw, shape));
        let peer = operations
            / fastest(|| {
                let (x, w, y) = (black_box(&x).as_ptr(), w.as_ptr(), y.as_mut_ptr());
                let (m, k, n) = (rows, inputs, outputs);
                // SAFETY: strides describe x [m, k], w^T [k, n] and y [m, n], all allocated in full.
                unsafe { matrixmultiply::sgemm(m, k, n, 1.0, x, k as isize, 1, w, 1, k as isize, 0.0, y, n as isize, 1) }
            });
        let slow = operations / fastest(|| naive(black_box(&x), &w, &mut y, inputs, outputs));
        let name = format!("{rows} x {outputs} x {inputs}");
        println!("{name:>18} {ours:>9.1} {input:>9.1} {weight:>9.1} {peer:>15.1} {slow:>9.1} {:>12.2}", ours / peer);
    }
}
