//! The language-model head: logits in bounded chunks of rows, reduced at once to a log-probability, an entropy or a sampled id.

use super::gemm::{self, PackedWeights};
use super::parallel::{Shared, for_each};
use super::simd::{InstructionSet, LANES, exp, fold_lanes, maximum, vectorised};
use crate::device::ops::{Cotangents, Scores, inverse_temperature};

/// Logits that exist at once: 8 Mi floats, 32 MiB.
const CHUNK_LOGITS: usize = 8 << 20;

fn chunk_rows(vocabulary: usize) -> usize {
    (CHUNK_LOGITS / vocabulary.max(1)).max(1)
}

/// What a row of scaled logits `x = logit / temperature` reduces to.
#[derive(Clone, Copy, Default)]
struct RowStatistics {
    maximum: f32,
    /// `ln(sum(exp(x - maximum)))`
    log_sum: f32,
    /// `log_sum - sum(p (x - maximum))`
    entropy: f32,
}

impl RowStatistics {
    fn log_prob(&self, scaled_logit: f32) -> f32 {
        (scaled_logit - self.maximum) - self.log_sum
    }
}

vectorised! {
    /// Scales the logits in place and reduces them, sums in lanes by id.
    fn reduce_row(logits: &mut [f32], inverse_temperature: f32) -> (f32, f32, f32) {
        for logit in logits.iter_mut() {
            *logit *= inverse_temperature;
        }
        let largest = maximum(logits);
        let mut sums = [0.0f32; LANES];
        let mut weighted = [0.0f32; LANES];
        let (blocks, tail) = logits.as_chunks::<LANES>();
        for block in blocks {
            for lane in 0..LANES {
                let shifted = block[lane] - largest;
                let e = exp(shifted);
                sums[lane] += e;
                weighted[lane] = e.mul_add(shifted, weighted[lane]);
            }
        }
        for (lane, &x) in tail.iter().enumerate() {
            let shifted = x - largest;
            let e = exp(shifted);
            sums[lane] += e;
            weighted[lane] = e.mul_add(shifted, weighted[lane]);
        }
        (largest, fold_lanes(sums), fold_lanes(weighted))
    }

    /// Turns scaled logits into the gradient of `a log_prob(target) + b entropy` with respect to the logits:
    /// `(a ([j = target] - p_j) - b p_j (log p_j + entropy)) / temperature`, for every `j` but the target.
    fn logit_gradient(logits: &mut [f32], maximum: f32, log_sum: f32, a: f32, b: f32, entropy: f32, inverse_temperature: f32) {
        let (a, b) = (a * inverse_temperature, b * inverse_temperature);
        for x in logits.iter_mut() {
            let log_p = (*x - maximum) - log_sum;
            let p = exp(log_p);
            *x = -p * b.mul_add(log_p + entropy, a);
        }
    }

    fn exponentials_of(logits: &mut [f32], largest: f32) {
        for x in logits.iter_mut() {
            *x = exp(*x - largest);
        }
    }
}

fn statistics(logits: &mut [f32], inverse_temperature: f32) -> RowStatistics {
    let (maximum, sum, weighted) = reduce_row(logits, inverse_temperature);
    let log_sum = sum.ln();
    RowStatistics { maximum, log_sum, entropy: log_sum - weighted / sum }
}

/// Calls `row(index, logits of that row)` for every row of `hidden`, logits being computed chunk by chunk into `scratch`;
/// after each chunk, `chunk(first, rows, logits)`.
fn for_each_row_of_logits(
    set: InstructionSet,
    scratch: &mut Vec<f32>,
    hidden: &[f32],
    weights: &PackedWeights,
    rows: usize,
    row: impl Fn(usize, &mut [f32]) + Sync + Send,
    mut chunk: impl FnMut(usize, usize, &[f32]),
) {
    let vocabulary = weights.outputs;
    let step = chunk_rows(vocabulary);
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        if scratch.len() < count * vocabulary {
            scratch.resize(count * vocabulary, 0.0);
        }
        let logits = &mut scratch[..count * vocabulary];
        gemm::forward(set, &hidden[first * weights.inputs..], weights, logits, count);
        let shared = Shared::new(logits);
        for_each(count, count * vocabulary * 4, |index| {
            // SAFETY: each piece owns its row of the chunk.
            row(first + index, unsafe { shared.slice(index * vocabulary, vocabulary) });
        });
        chunk(first, count, logits);
    }
}

/// One result per row, each written by its own piece.
fn collect_rows<T: Default + Clone + Send>(rows: usize, run: impl FnOnce(&(dyn Fn(usize, T) + Sync))) -> Vec<T> {
    let results: Vec<std::sync::Mutex<T>> = vec![T::default(); rows].into_iter().map(std::sync::Mutex::new).collect();
    run(&|index, value| {
        if let Ok(mut slot) = results[index].lock() {
            *slot = value;
        }
    });
    results.into_iter().map(|slot| slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())).collect()
}

pub fn scores(
    set: InstructionSet,
    scratch: &mut Vec<f32>,
    hidden: &[f32],
    weights: &PackedWeights,
    targets: &[u32],
    temperature: f32,
) -> Scores {
    let scale = inverse_temperature(temperature);
    let pairs = collect_rows(targets.len(), |set_result| {
        let row = |index: usize, logits: &mut [f32]| {
            let statistics = statistics(logits, scale);
            set_result(index, (statistics.log_prob(logits[targets[index] as usize]), statistics.entropy));
        };
        for_each_row_of_logits(set, scratch, hidden, weights, targets.len(), row, |_, _, _| {});
    });
    let (log_probs, entropies) = pairs.into_iter().unzip();
    Scores { log_probs, entropies }
}

#[allow(clippy::too_many_arguments)]
pub fn backward(
    set: InstructionSet,
    scratch: &mut Vec<f32>,
    hidden: &[f32],
    packed: &PackedWeights,
    weights: &[f32],
    targets: &[u32],
    temperature: f32,
    cotangents: &Cotangents,
    dhidden: &mut [f32],
    dweights: &mut [f32],
) {
    let (vocabulary, inputs) = (packed.outputs, packed.inputs);
    let scale = inverse_temperature(temperature);
    let row = |index: usize, logits: &mut [f32]| {
        let (a, b) = (cotangents.log_probs[index], cotangents.entropies.as_ref().map_or(0.0, |entropies| entropies[index]));
        let statistics @ RowStatistics { maximum, log_sum, entropy } = statistics(logits, scale);
        let target = targets[index] as usize;
        let log_p = statistics.log_prob(logits[target]);
        logit_gradient(logits, maximum, log_sum, a, b, entropy, scale);
        // 1 - p keeps its digits where p is nearly 1, as it is for confident tokens.
        logits[target] = scale * (a * -log_p.exp_m1() - b * log_p.exp() * (log_p + entropy));
    };
    for_each_row_of_logits(set, scratch, hidden, packed, targets.len(), row, |first, count, dlogits| {
        let shape = (count, vocabulary, inputs);
        gemm::input_gradient(set, dlogits, weights, &mut dhidden[first * inputs..], shape);
        gemm::weight_gradient(set, dlogits, &hidden[first * inputs..], dweights, shape);
    });
}

pub fn sample(
    set: InstructionSet,
    scratch: &mut Vec<f32>,
    hidden: &[f32],
    weights: &PackedWeights,
    temperature: f32,
    uniforms: &[f64],
    sampleable: usize,
) -> Vec<(u32, f32)> {
    let scale = inverse_temperature(temperature);
    let sampleable = sampleable.clamp(1, weights.outputs.max(1));
    collect_rows(uniforms.len(), |set_result| {
        let row = |index: usize, logits: &mut [f32]| {
            let statistics = statistics(logits, scale);
            let logits = &mut logits[..sampleable];
            if temperature == 0.0 {
                let id = argmax(logits);
                return set_result(index, (id as u32, statistics.log_prob(logits[id])));
            }
            // The maximum of what may be sampled: the full maximum could belong to an excluded id and flush all others to 0.
            let largest = maximum(logits);
            let scaled: Vec<f32> = logits.to_vec();
            exponentials_of(logits, largest);
            let id = invert(logits, uniforms[index]);
            set_result(index, (id as u32, statistics.log_prob(scaled[id])));
        };
        for_each_row_of_logits(set, scratch, hidden, weights, uniforms.len(), row, |_, _, _| {});
    })
}

fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value > values[best] {
            best = index;
        }
    }
    best
}

/// The first id whose cumulative weight exceeds `uniform` of the total, in f64, ids ascending.
fn invert(weights: &[f32], uniform: f64) -> usize {
    let mut total = 0.0f64;
    for &weight in weights {
        total += weight as f64;
    }
    let threshold = uniform * total;
    let mut cumulative = 0.0f64;
    let mut last_possible = 0;
    for (id, &weight) in weights.iter().enumerate() {
        cumulative += weight as f64;
        if weight > 0.0 {
            if cumulative > threshold {
                return id;
            }
            last_possible = id;
        }
    }
    last_possible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inversion_takes_ids_in_ascending_order_and_never_an_impossible_one() {
        let weights = [0.0, 1.0, 0.0, 2.0, 1.0, 0.0];
        assert_eq!([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999_999].map(|uniform| invert(&weights, uniform)), [1, 1, 3, 3, 4, 4]);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
