//! Made-up numbers, on the grid of bf16 so that every device and the reference start from the same.

use learner::device::{Heads, Span};
use learner::types::{Key, Purpose};

use crate::reference::{Precision, wide};

/// A stream of random numbers that depends on the name of the test alone.
pub struct Inputs {
    key: Key,
}

impl Inputs {
    pub fn new(test: &str) -> Inputs {
        let indices: Vec<u64> = test.bytes().map(u64::from).collect();
        Inputs { key: Key::new(Purpose::GenerateTask, &indices) }
    }

    /// Normal with this deviation, rounded to bf16.
    pub fn normal(&mut self, length: usize, deviation: f64) -> Vec<f32> {
        (0..length).map(|_| on_grid(deviation * self.key.normal())).collect()
    }

    /// Weights of a norm: around 1, rounded to bf16.
    pub fn norm_weight(&mut self, width: usize) -> Vec<f32> {
        (0..width).map(|_| on_grid(1.0 + 0.3 * self.key.normal())).collect()
    }

    /// The same as [`Inputs::normal`], in f64.
    pub fn wide(&mut self, length: usize, deviation: f64) -> Vec<f64> {
        wide(&self.normal(length, deviation))
    }

    pub fn ids(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.key.below(vocabulary) as u32).collect()
    }

    pub fn uniform(&mut self) -> f64 {
        self.key.uniform()
    }
}

pub fn on_grid(value: f64) -> f32 {
    Precision::Bf16.stored(value) as f32
}

pub fn heads(query_heads: usize, key_value_heads: usize, head_dim: usize) -> Heads {
    Heads { query_heads, key_value_heads, head_dim }
}

/// Sequences of these lengths packed end to end.
pub fn spans(lengths: &[usize]) -> Vec<Span> {
    let mut start = 0;
    let next = |&length: &usize| {
        start += length;
        Span { start: start - length, length }
    };
    lengths.iter().map(next).collect()
}

/// Rotated rows whose queries are so long that almost every one sees one key alone.
pub fn peaked(heads: Heads, rows: usize) -> Vec<f32> {
    let mut rotated = Inputs::new("peaked").normal(rows * heads.projected_width(), 1.0);
    for row in rotated.chunks_exact_mut(heads.projected_width()) {
        row[..heads.query_width()].iter_mut().for_each(|x| *x *= 32.0);
    }
    rotated
}

/// Rotated rows with keys along one direction and queries against it: a maximum that starts at zero would be wrong.
pub fn far_below_zero(heads: Heads, rows: usize) -> Vec<f32> {
    let mut rotated = Inputs::new("below zero").normal(rows * heads.projected_width(), 0.5);
    for row in rotated.chunks_exact_mut(heads.projected_width()) {
        let (queries, rest) = row.split_at_mut(heads.query_width());
        queries.iter_mut().for_each(|x| *x = on_grid(f64::from(*x) - 4.0));
        rest[..heads.key_value_width()].iter_mut().for_each(|x| *x = on_grid(f64::from(*x) + 4.0));
    }
    rotated
}
