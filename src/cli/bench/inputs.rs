//! What the cases of `learner bench kernels` work on.

use crate::device::cuda::{Buffer, PackedWeights};
use crate::device::{CudaDevice, Device, LinearWeights, Role};
use crate::types::{Key, Purpose};

/// Numbers in [-1, 1), a block of them over and over: kernels do not care, and the host has better things to do.
pub fn drawn(device: &CudaDevice, role: Role, count: usize) -> Buffer {
    let mut key = Key::new(Purpose::Benchmark, &[count as u64]);
    let block: Vec<f32> = (0..count.min(8191)).map(|_| (2.0 * key.uniform() - 1.0) as f32).collect();
    let values: Vec<f32> = block.iter().cycle().take(count).copied().collect();
    device.upload(role, &values)
}
pub fn active(device: &CudaDevice, count: usize) -> Buffer {
    drawn(device, Role::Activations, count)
}
pub fn empty(device: &CudaDevice, count: usize) -> Buffer {
    device.zeros(Role::Activations, count)
}
/// A permutation in which no row has its neighbours: rows are moved one by one, as real ones are.
pub fn scattered(rows: usize) -> Vec<usize> {
    let stride = (rows / 3) | 1;
    let stride = (stride..)
        .step_by(2)
        .find(|stride| (2..=*stride).all(|d| !rows.is_multiple_of(d) || !stride.is_multiple_of(d)))
        .unwrap_or(1);
    (0..rows).map(|row| row * stride % rows).collect()
}
pub fn ids(rows: usize, unique: usize) -> Vec<u32> {
    scattered(rows).into_iter().map(|row| (row % unique) as u32).collect()
}

/// A weight matrix with the copy that products read.
pub struct Matrix {
    pub values: Buffer,
    pub packed: PackedWeights,
    outputs: usize,
    inputs: usize,
}
impl Matrix {
    pub fn new(device: &CudaDevice, outputs: usize, inputs: usize) -> Matrix {
        let values = drawn(device, Role::Weights, outputs * inputs);
        Matrix { packed: device.pack(&values, outputs, inputs), values, outputs, inputs }
    }
    pub fn linear(&self) -> LinearWeights<'_, CudaDevice> {
        LinearWeights { values: &self.values, packed: &self.packed, outputs: self.outputs, inputs: self.inputs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_moved_in_an_order_that_is_a_permutation() {
        for rows in [2, 64, 2048, 8192] {
            let mut order = scattered(rows);
            order.sort();
            assert_eq!(order, (0..rows).collect::<Vec<_>>());
        }
        assert_eq!(ids(64, 32).iter().filter(|&&id| id == 7).count(), 2);
    }
}
