//! Causal grouped-query attention over whole packed sequences.

use learner::device::{Heads, Span};

use super::{Precision, dot};

pub struct Attended {
    /// `[rows, query_width]`
    pub output: Vec<f64>,
    /// `[rows, query_heads]`
    pub log_sum_exp: Vec<f64>,
}

/// One head of one sequence: queries `[length, head_dim]` and the keys and values they see.
struct Head {
    query: usize,
    key_value: usize,
    span: Span,
    queries: Vec<f64>,
    keys: Vec<f64>,
    values: Vec<f64>,
}

/// Columns `head * head_dim ..` of the rows of a span.
fn columns(matrix: &[f64], width: usize, span: Span, first: usize, count: usize) -> Vec<f64> {
    let rows = span.start..span.start + span.length;
    rows.flat_map(|row| matrix[row * width + first..][..count].iter().copied()).collect()
}

fn add_columns(matrix: &mut [f64], width: usize, span: Span, first: usize, values: &[f64]) {
    let count = values.len() / span.length.max(1);
    for (row, values) in values.chunks_exact(count.max(1)).enumerate() {
        let target = &mut matrix[(span.start + row) * width + first..][..count];
        target.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
    }
}

fn each_head(rotated: &[f64], heads: Heads, spans: &[Span]) -> Vec<Head> {
    let (dim, width) = (heads.head_dim, heads.projected_width());
    let head = |span: Span, query: usize| {
        let key_value = query / heads.group();
        let key_column = heads.query_width() + key_value * dim;
        Head {
            query,
            key_value,
            span,
            queries: columns(rotated, width, span, query * dim, dim),
            keys: columns(rotated, width, span, key_column, dim),
            values: columns(rotated, width, span, key_column + heads.key_value_width(), dim),
        }
    };
    spans.iter().flat_map(|&span| (0..heads.query_heads).map(move |query| head(span, query))).collect()
}

impl Head {
    /// Softmax over the keys up to each query's own, `[length, length]` with zeros beyond, and the log-sum-exp of each row.
    fn probabilities(&self, precision: Precision, dim: usize) -> (Vec<f64>, Vec<f64>) {
        let length = self.span.length;
        let mut probabilities = vec![0.0; length * length];
        let mut log_sum_exps = Vec::new();
        for (row, query) in self.queries.chunks_exact(dim).enumerate() {
            let score = |key: &[f64]| precision.stored(precision.stored(dot(query, key)) / (dim as f64).sqrt());
            let scores: Vec<f64> = self.keys.chunks_exact(dim).take(row + 1).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            log_sum_exps.push(largest + sum.ln());
            for (target, score) in probabilities[row * length..].iter_mut().zip(&scores) {
                *target = precision.stored((score - largest).exp() / sum);
            }
        }
        (probabilities, log_sum_exps)
    }
}

/// `[rows, columns]` times `[columns, dim]`.
fn mix(precision: Precision, weights: &[f64], vectors: &[f64], dim: usize) -> Vec<f64> {
    let count = vectors.len() / dim;
    let mut result = Vec::with_capacity(weights.len() / count.max(1) * dim);
    for weights in weights.chunks_exact(count.max(1)) {
        let mut sum = vec![0.0; dim];
        for (weight, vector) in weights.iter().zip(vectors.chunks_exact(dim)).filter(|(weight, _)| **weight != 0.0) {
            sum.iter_mut().zip(vector).for_each(|(sum, x)| *sum += weight * x);
        }
        result.extend(sum.into_iter().map(|x| precision.stored(x)));
    }
    result
}

fn rows_of(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.start + span.length).max().unwrap_or(0)
}

pub fn attention(precision: Precision, rotated: &[f64], heads: Heads, spans: &[Span]) -> Attended {
    let (rows, dim) = (rows_of(spans), heads.head_dim);
    let mut attended =
        Attended { output: vec![0.0; rows * heads.query_width()], log_sum_exp: vec![0.0; rows * heads.query_heads] };
    for head in each_head(rotated, heads, spans) {
        let (probabilities, log_sum_exps) = head.probabilities(precision, dim);
        let output = mix(precision, &probabilities, &head.values, dim);
        add_columns(&mut attended.output, heads.query_width(), head.span, head.query * dim, &output);
        add_columns(&mut attended.log_sum_exp, heads.query_heads, head.span, head.query, &log_sum_exps);
    }
    attended
}

/// `dV = P^T dO`, `dP = dO V^T`, `dS = P (dP - sum(P dP))`, `dQ = dS K / sqrt(d)`, `dK = dS^T Q / sqrt(d)`; the heads of a group
/// sum into their key/value head.
pub fn attention_backward(precision: Precision, doutput: &[f64], rotated: &[f64], heads: Heads, spans: &[Span]) -> Vec<f64> {
    let (dim, width) = (heads.head_dim, heads.projected_width());
    let mut drotated = vec![0.0; rows_of(spans) * width];
    for head in each_head(rotated, heads, spans) {
        let length = head.span.length;
        let doutput = columns(doutput, heads.query_width(), head.span, head.query * dim, dim);
        let (probabilities, _) = head.probabilities(precision, dim);
        let mut dscores = vec![0.0; length * length];
        for (row, doutput) in doutput.chunks_exact(dim).enumerate() {
            let probabilities = &probabilities[row * length..][..row + 1];
            let dprobability = |value: &[f64]| precision.stored(dot(doutput, value));
            let dprobabilities: Vec<f64> = head.values.chunks_exact(dim).take(row + 1).map(dprobability).collect();
            let correction = dot(probabilities, &dprobabilities);
            for (target, (p, dp)) in dscores[row * length..].iter_mut().zip(probabilities.iter().zip(&dprobabilities)) {
                *target = precision.stored(precision.stored(p * (dp - correction)) / (dim as f64).sqrt());
            }
        }
        let to_keys = super::transposed(&dscores, length.max(1));
        let to_values = super::transposed(&probabilities, length.max(1));
        let key_column = heads.query_width() + head.key_value * dim;
        let value_column = key_column + heads.key_value_width();
        add_columns(&mut drotated, width, head.span, head.query * dim, &mix(precision, &dscores, &head.keys, dim));
        add_columns(&mut drotated, width, head.span, key_column, &mix(precision, &to_keys, &head.queries, dim));
        add_columns(&mut drotated, width, head.span, value_column, &mix(precision, &to_values, &doutput, dim));
    }
    precision.stored_all(drotated)
}
