//! AdamW and the sum of squares.

use super::parallel::{Shared, for_each};
use super::simd::vectorised;
use crate::device::ops::AdamWStep;

/// Elements of one piece of work; also the unit of partial sums, so a constant.
const CHUNK: usize = 16 * 1024;

vectorised! {
    /// `denominator = sqrt(second / (1 - beta2^t)) + epsilon`, `weight -= rate / (1 - beta1^t) * first / denominator`, after the
    /// weight has decayed by `rate * weight_decay`.
    fn adamw_chunk(
        weights: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32],
        step: AdamWStep, step_size: f32, inverse_root_correction: f32,
    ) {
        let keep = 1.0 - step.learning_rate * step.weight_decay;
        for (((weight, &gradient), first), second) in weights.iter_mut().zip(gradient).zip(first).zip(second) {
            let gradient = gradient * step.gradient_scale;
            *first = step.beta1.mul_add(*first, (1.0 - step.beta1) * gradient);
            *second = step.beta2.mul_add(*second, (1.0 - step.beta2) * gradient * gradient);
            let denominator = second.sqrt().mul_add(inverse_root_correction, step.epsilon);
            *weight = *weight * keep - step_size * *first / denominator;
        }
    }
}

pub fn adamw(weights: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32], step: AdamWStep) {
    let length = weights.len();
    assert!(gradient.len() == length && first.len() == length && second.len() == length, "AdamW on tensors of different lengths");
    let time = step.step as f64;
    let step_size = step.learning_rate as f64 / (1.0 - (step.beta1 as f64).powf(time));
    let inverse_root_correction = 1.0 / (1.0 - (step.beta2 as f64).powf(time)).sqrt();
    let shared = [Shared::new(weights), Shared::new(first), Shared::new(second)];
    for_each(length.div_ceil(CHUNK), length * 8, |piece| {
        let start = piece * CHUNK;
        let count = CHUNK.min(length - start);
        // SAFETY: each piece owns its range of each of the three tensors.
        let [weights, first, second] = shared.map(|values| unsafe { values.slice(start, count) });
        adamw_chunk(
            weights,
            &gradient[start..start + count],
            first,
            second,
            step,
            step_size as f32,
            inverse_root_correction as f32,
        );
    });
}

/// Each chunk in f64, ascending; chunks added ascending.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    use rayon::iter::{IndexedParallelIterator, ParallelIterator};
    use rayon::slice::ParallelSlice;
    let mut partials = Vec::new();
    values.par_chunks(CHUNK).map(chunk_sum_of_squares).collect_into_vec(&mut partials);
    partials.iter().sum()
}

fn chunk_sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    for block in values.chunks(8) {
        for (lane, &value) in lanes.iter_mut().zip(block) {
            *lane += value as f64 * value as f64;
        }
    }
    lanes.iter().sum()
}
