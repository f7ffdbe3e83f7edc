//! AdamW, and the sum of squares that clipping needs.

use super::allocator::Purpose;
use super::arguments::{AdamW, SumOfSquares};
use super::buffers::Buffer;
use super::{CudaDevice, PackedWeights};
use crate::device::ops::AdamWStep;

/// Numbers that one block sums, until there are [`MOST_PARTS`] blocks: the order of the sum depends on the length alone.
const NUMBERS_PER_PART: usize = 16 * 1024;
const MOST_PARTS: usize = 1024;

fn parts_of(length: usize) -> usize {
    length.div_ceil(NUMBERS_PER_PART).min(MOST_PARTS)
}

impl CudaDevice {
    pub(super) fn squares(&self, buffer: &Buffer) -> f64 {
        let (length, count) = (buffer.length(), parts_of(buffer.length()));
        if length == 0 {
            return 0.0;
        }
        let memory = self.allocate(Purpose::Workspace, (count + 1) * size_of::<f64>());
        let total = memory.address() + (count * size_of::<f64>()) as u64;
        let arguments = SumOfSquares {
            values: buffer.f32(length),
            parts: memory.address(),
            total,
            length: length as i64,
            count: count as i64,
        };
        self.kernels().launch("sum_of_squares", [count, 1, 1], &arguments);
        self.kernels().launch("sum_of_parts", [1, 1, 1], &arguments);
        // SAFETY: one f64, which the second kernel has written.
        let totals = unsafe { self.gpu().read::<f64>(total, 1) };
        totals[0]
    }

    pub(super) fn adamw_step(
        &self,
        weights: &mut Buffer,
        packed: Option<&mut PackedWeights>,
        gradient: &Buffer,
        (first, second): (&mut Buffer, &mut Buffer),
        step: AdamWStep,
    ) {
        let length = weights.length();
        let correction = |beta: f32| (1.0 - (beta as f64).powf(step.step as f64)) as f32;
        let arguments = AdamW {
            weights: weights.f32(length),
            rounded: packed.map_or(0, |packed| packed.holding(length)),
            gradient: gradient.f32(length),
            first: first.f32(length),
            second: second.f32(length),
            length: length as i64,
            learning_rate: step.learning_rate,
            beta1: step.beta1,
            beta2: step.beta2,
            epsilon: step.epsilon,
            weight_decay: step.weight_decay,
            correction1: correction(step.beta1),
            correction2: correction(step.beta2),
            gradient_scale: step.gradient_scale,
        };
        self.kernels().launch_striding("adamw", length.div_ceil(4), &arguments);
    }
}
