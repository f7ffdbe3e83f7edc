//! The rotary embedding's angles.

use std::sync::{Arc, Mutex};

use super::config::ModelConfig;
use super::rope::frequencies;
use crate::device::{Device, Role};

/// Positions of the table that covers `positions`: it doubles when it must grow.
fn rotary_table_rows(positions: usize) -> usize {
    positions.next_power_of_two().max(512)
}

/// Bytes of the cosines and sines of sequences of up to `positions` tokens.
pub(crate) fn rotary_table_bytes(config: &ModelConfig, positions: usize) -> usize {
    rotary_table_rows(positions) * config.head_dim * size_of::<f32>()
}

/// Cosines and sines of every position met so far, as Transformers computes them (angles in f32).
pub(super) struct RotaryTable<D: Device> {
    head_dim: usize,
    /// `[head_dim / 2]` radians per position
    frequencies: Vec<f32>,
    /// Of cosines and sines: 1 unless the embedding is scaled.
    scale: f32,
    /// `[positions, head_dim]`, with the number of positions
    table: Mutex<(usize, Arc<D::Buffer>)>,
}

impl<D: Device> RotaryTable<D> {
    pub fn new(device: &D, config: &ModelConfig) -> Self {
        RotaryTable {
            head_dim: config.head_dim,
            frequencies: frequencies(config),
            scale: config.yarn.as_ref().map_or(1.0, |yarn| yarn.attention_scale() as f32),
            table: Mutex::new((0, Arc::new(device.zeros(Role::Statistics, 0)))),
        }
    }

    /// A table that covers these positions.
    pub fn covering(&self, device: &D, positions: &[usize]) -> Arc<D::Buffer> {
        let positions = positions.iter().max().map_or(0, |last| last + 1);
        let mut table = self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if table.0 < positions {
            let rows = rotary_table_rows(positions);
            let mut values = Vec::with_capacity(rows * self.head_dim);
            for position in 0..rows {
                let angles = self.frequencies.iter().map(|frequency| (position as f32 * frequency) as f64);
                values.extend(angles.clone().map(|angle| angle.cos() as f32 * self.scale));
                values.extend(angles.map(|angle| angle.sin() as f32 * self.scale));
            }
            *table = (rows, Arc::new(device.upload(Role::Statistics, &values)));
        }
        table.1.clone()
    }
}
