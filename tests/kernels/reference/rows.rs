//! What each row does by itself: norms, rotary embedding, SwiGLU; and AdamW, element by element.

use learner::device::{AdamWStep, Heads};

use super::{Precision, dot};

/// `y = weight * x / sqrt(mean(x^2) + epsilon)`
pub fn rms_norm(precision: Precision, x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let normed = normalised(precision, x, weight.len(), epsilon).0;
    precision.stored_all(normed.chunks_exact(weight.len()).flat_map(|row| row.iter().zip(weight).map(|(x, w)| x * w)))
}

/// Rows over their root mean square, and the inverse of that.
fn normalised(precision: Precision, x: &[f64], width: usize, epsilon: f64) -> (Vec<f64>, Vec<f64>) {
    let inverse = |row: &[f64]| 1.0 / (dot(row, row) / width as f64 + epsilon).sqrt();
    let inverses: Vec<f64> = x.chunks_exact(width).map(inverse).collect();
    let rows = x.chunks_exact(width).zip(&inverses);
    (precision.stored_all(rows.flat_map(|(row, &inverse)| row.iter().map(move |x| x * inverse))), inverses)
}

pub struct NormGradients {
    pub dx: Vec<f64>,
    pub dweight: Vec<f64>,
}

/// With `n = x / rms` and `g = dy * weight`: `dx = (g - n mean(g n)) / rms`, `dweight = sum over rows of dy n`.
pub fn rms_norm_backward(precision: Precision, dy: &[f64], x: &[f64], weight: &[f64], epsilon: f64) -> NormGradients {
    let width = weight.len();
    let (normed, inverses) = normalised(precision, x, width, epsilon);
    let mut gradients = NormGradients { dx: Vec::new(), dweight: vec![0.0; width] };
    for ((dy, normed), inverse) in dy.chunks_exact(width).zip(normed.chunks_exact(width)).zip(inverses) {
        let scaled = precision.stored_all(dy.iter().zip(weight).map(|(dy, w)| dy * w));
        let mean = dot(&scaled, normed) / width as f64;
        gradients.dx.extend(scaled.iter().zip(normed).map(|(g, n)| precision.stored(inverse * (g - n * mean))));
        gradients.dweight.iter_mut().zip(dy.iter().zip(normed)).for_each(|(sum, (dy, n))| *sum += dy * n);
    }
    gradients.dweight = precision.stored_all(gradients.dweight);
    gradients
}

/// `[positions, head_dim]`: cosines of the angles `position * base^(-2 i / head_dim)`, then their sines.
pub fn rotary_table(positions: usize, head_dim: usize, base: f64) -> Vec<f32> {
    let angle = |position: usize, i: usize| position as f64 * base.powf(-2.0 * i as f64 / head_dim as f64);
    let row = |position| {
        let angles = (0..head_dim / 2).map(move |i| angle(position, i));
        angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|value| value as f32)
    };
    (0..positions).flat_map(row).collect()
}

/// What [`rotate`] is given beside the rows; all of it as in [`learner::device::Rotation`].
#[derive(Clone, Copy)]
pub struct Rotated<'a> {
    pub heads: Heads,
    pub bias: Option<&'a [f64]>,
    pub query_key_norms: Option<(&'a [f64], &'a [f64])>,
    pub epsilon: f64,
    pub table: &'a [f64],
    pub positions: &'a [usize],
}

impl<'a> Rotated<'a> {
    /// Bias added: what norms, rotation and values see.
    fn biased(&self, precision: Precision, projected: &[f64]) -> Vec<f64> {
        let width = self.heads.projected_width();
        match self.bias {
            None => projected.to_vec(),
            Some(bias) => precision.stored_all(projected.iter().enumerate().map(|(index, x)| x + bias[index % width])),
        }
    }
    /// The norm's weights of head `head` of a row: queries first, then keys; none for values.
    fn norm(&self, head: usize) -> Option<&'a [f64]> {
        let (query, key) = self.query_key_norms?;
        (self.rotates(head)).then_some(if head < self.heads.query_heads { query } else { key })
    }
    fn rotates(&self, head: usize) -> bool {
        head < self.heads.query_heads + self.heads.key_value_heads
    }
    fn head_count(&self) -> usize {
        self.heads.query_heads + 2 * self.heads.key_value_heads
    }
    /// Calls `work(head within its row, cosines, sines, range of the head's elements)` for every head of every row.
    fn for_each_head(&self, mut work: impl FnMut(usize, &[f64], &[f64], std::ops::Range<usize>)) {
        let dim = self.heads.head_dim;
        for (row, &position) in self.positions.iter().enumerate() {
            let (cosines, sines) = self.table[position * dim..(position + 1) * dim].split_at(dim / 2);
            for head in 0..self.head_count() {
                let start = (row * self.head_count() + head) * dim;
                work(head, cosines, sines, start..start + dim);
            }
        }
    }
}

/// Elements `i` and `i + d / 2` turned by angle `i`, forwards (`sign` 1) or back (-1).
fn turned(precision: Precision, x: &[f64], cosines: &[f64], sines: &[f64], sign: f64) -> Vec<f64> {
    let (low, high) = x.split_at(x.len() / 2);
    let terms = |a: f64, b: f64| precision.stored(precision.stored(a) + precision.stored(b));
    let index = 0..low.len();
    let first = index.clone().map(|i| terms(low[i] * cosines[i], -sign * high[i] * sines[i]));
    first.chain(index.map(|i| terms(high[i] * cosines[i], sign * low[i] * sines[i]))).collect()
}

pub fn rotate(precision: Precision, projected: &[f64], rotation: Rotated) -> Vec<f64> {
    let mut values = rotation.biased(precision, projected);
    rotation.for_each_head(|head, cosines, sines, range| {
        if let Some(weight) = rotation.norm(head) {
            let normed = rms_norm(precision, &values[range.clone()], weight, rotation.epsilon);
            values[range.clone()].copy_from_slice(&normed);
        }
        if rotation.rotates(head) {
            let turned = turned(precision, &values[range.clone()], cosines, sines, 1.0);
            values[range].copy_from_slice(&turned);
        }
    });
    values
}

pub struct RotationGradients {
    pub dprojected: Vec<f64>,
    pub dbias: Vec<f64>,
    pub dquery_norm: Vec<f64>,
    pub dkey_norm: Vec<f64>,
}

pub fn rotate_backward(precision: Precision, projected: &[f64], rotation: Rotated, gradient: &[f64]) -> RotationGradients {
    let (width, dim) = (rotation.heads.projected_width(), rotation.heads.head_dim);
    let biased = rotation.biased(precision, projected);
    let mut dprojected = gradient.to_vec();
    let mut norms = [vec![0.0; dim], vec![0.0; dim]];
    rotation.for_each_head(|head, cosines, sines, range| {
        if rotation.rotates(head) {
            let turned = turned(precision, &dprojected[range.clone()], cosines, sines, -1.0);
            dprojected[range.clone()].copy_from_slice(&turned);
        }
        if let Some(weight) = rotation.norm(head) {
            let dy = &dprojected[range.clone()];
            let gradients = rms_norm_backward(precision, dy, &biased[range.clone()], weight, rotation.epsilon);
            let norm = &mut norms[usize::from(head >= rotation.heads.query_heads)];
            norm.iter_mut().zip(&gradients.dweight).for_each(|(sum, x)| *sum += x);
            dprojected[range].copy_from_slice(&gradients.dx);
        }
    });
    let mut dbias = vec![0.0; width];
    for row in dprojected.chunks_exact(width) {
        dbias.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    let [dquery_norm, dkey_norm] = norms.map(|norm| precision.stored_all(norm));
    RotationGradients { dprojected, dbias: precision.stored_all(dbias), dquery_norm, dkey_norm }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `y = silu(gate) * up`, `gate_up [rows, 2 width]`.
pub fn swiglu(precision: Precision, gate_up: &[f64], width: usize) -> Vec<f64> {
    let row = |row: &[f64]| {
        let (gate, up) = row.split_at(width);
        gate.iter().zip(up).map(|(g, u)| precision.stored(precision.stored(g * sigmoid(*g)) * u)).collect::<Vec<_>>()
    };
    gate_up.chunks_exact(2 * width).flat_map(row).collect()
}

/// Gradient by `gate_up`, in its place.
pub fn swiglu_backward(precision: Precision, dy: &[f64], gate_up: &[f64], width: usize) -> Vec<f64> {
    let mut gradient = Vec::new();
    for (row, dy) in gate_up.chunks_exact(2 * width).zip(dy.chunks_exact(width)) {
        let (gate, up) = row.split_at(width);
        gradient.extend(dy.iter().zip(gate.iter().zip(up)).map(|(dy, (g, u))| {
            let slope = sigmoid(*g) * (1.0 + g * (1.0 - sigmoid(*g)));
            precision.stored(precision.stored(dy * u) * slope)
        }));
        gradient.extend(dy.iter().zip(gate).map(|(dy, g)| precision.stored(dy * precision.stored(g * sigmoid(*g)))));
    }
    gradient
}

/// One step in f64 on `[weights, first, second]`.
pub fn adamw(state: &mut [Vec<f64>; 3], gradient: &[f64], step: AdamWStep) {
    let [weights, first, second] = state;
    let (beta1, beta2) = (f64::from(step.beta1), f64::from(step.beta2));
    let (correction1, correction2) = (1.0 - beta1.powf(step.step as f64), 1.0 - beta2.powf(step.step as f64));
    for (index, gradient) in gradient.iter().enumerate() {
        let gradient = gradient * f64::from(step.gradient_scale);
        first[index] = beta1 * first[index] + (1.0 - beta1) * gradient;
        second[index] = beta2 * second[index] + (1.0 - beta2) * gradient * gradient;
        let denominator = (second[index] / correction2).sqrt() + f64::from(step.epsilon);
        weights[index] *= 1.0 - f64::from(step.learning_rate) * f64::from(step.weight_decay);
        weights[index] -= f64::from(step.learning_rate) * (first[index] / correction1) / denominator;
    }
}
