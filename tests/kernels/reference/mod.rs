//! Every operation in plain f64, forward and backward, the way a textbook writes it.
//!
//! Each is written once and computed in two precisions. [`Precision::Exact`] is the truth that kernels are held against.
//! [`Precision::Bf16`] is how far off a straightforward bf16 implementation would be (sums wide, but every intermediate tensor
//! that it would store rounded to bf16): the yardstick of [`crate::accept`].

mod attention;
mod differences;
mod head;
mod rows;

pub use attention::{attention, attention_backward};
pub use head::{head, head_backward, logits, sample_interval};
pub use rows::{Rotated, adamw, rms_norm, rms_norm_backward, rotary_table, rotate, rotate_backward, swiglu, swiglu_backward};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    Exact,
    Bf16,
}

impl Precision {
    /// What is read back after `value` was stored.
    pub fn stored(self, value: f64) -> f64 {
        match self {
            Precision::Exact => value,
            Precision::Bf16 => half::bf16::from_f64(value).to_f64(),
        }
    }
    fn stored_all(self, values: impl IntoIterator<Item = f64>) -> Vec<f64> {
        values.into_iter().map(|value| self.stored(value)).collect()
    }
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn transposed(matrix: &[f64], columns: usize) -> Vec<f64> {
    let rows = matrix.len() / columns;
    (0..matrix.len()).map(|index| matrix[index % rows * columns + index / rows]).collect()
}

/// `a [m, k]` times the transpose of `b [n, k]`.
pub fn product(precision: Precision, a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    a.chunks_exact(k).flat_map(|row| b.chunks_exact(k).map(move |column| precision.stored(dot(row, column)))).collect()
}

/// `dx = dy W` for `W [outputs, inputs]`.
pub fn linear_input_gradient(precision: Precision, dy: &[f64], weights: &[f64], outputs: usize) -> Vec<f64> {
    product(precision, dy, &transposed(weights, weights.len() / outputs), outputs)
}

/// `dW = dy^T x`: `[outputs, inputs]`.
pub fn linear_weight_gradient(precision: Precision, dy: &[f64], x: &[f64], outputs: usize, inputs: usize) -> Vec<f64> {
    let rows = dy.len() / outputs;
    if rows == 0 {
        return vec![0.0; outputs * inputs];
    }
    product(precision, &transposed(dy, outputs), &transposed(x, inputs), rows)
}

/// `dtable[ids[i]] += dx[i]`, from zero.
pub fn embed_backward(precision: Precision, dx: &[f64], ids: &[u32], width: usize, vocabulary: usize) -> Vec<f64> {
    let mut dtable = vec![0.0; vocabulary * width];
    for (row, &id) in dx.chunks_exact(width).zip(ids) {
        dtable[id as usize * width..][..width].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    precision.stored_all(dtable)
}
