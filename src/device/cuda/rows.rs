//! What each token does by itself: embedding, RMSNorm, rotation, SwiGLU; forward and backward.
//!
//! The gradient of a vector of weights sums over all rows: blocks sum a fixed number of rows each, a second kernel adds the blocks'
//! parts in a fixed order. How many there are depends on the number of rows alone, never on the card.

use super::allocator::{Memory, Purpose};
use super::arguments::{
    Address, Embed, EmbedBackward, NORM_WIDTH, RmsNorm, RmsNormBackward, Rotate, RotateBackward, SumParts, SwiGlu, SwiGluBackward,
};
use super::buffers::Buffer;
use super::indices::{Table, narrow};
use super::{CudaDevice, PackedWeights};
use crate::device::ops::{Rotation, RotationGradients};

/// Partial sums of the gradient of a vector of weights.
const MOST_PARTS: usize = 256;
const LEAST_ROWS_PER_PART: usize = 16;

/// Parts, and the rows that each of them sums.
pub(super) fn parts_of(rows: usize) -> (usize, usize) {
    let rows_per_part = rows.div_ceil(MOST_PARTS).max(LEAST_ROWS_PER_PART);
    (rows.div_ceil(rows_per_part), rows_per_part)
}

fn address(buffer: Option<&Buffer>, length: usize) -> Address {
    buffer.map_or(0, |buffer| buffer.f32(length))
}

impl CudaDevice {
    /// From the f32 table, or from the bf16 copy of one that was received: the stream is bf16, so the bits are the same.
    pub(super) fn embed_rows(&self, table: &Buffer, packed: Option<&PackedWeights>, ids: &[u32], width: usize, x: &mut Buffer) {
        let needed = ids.iter().max().map_or(0, |&last| (last as usize + 1) * width);
        let x = x.bf16(ids.len() * width);
        let numbers = narrow(ids.iter().map(|&id| id as usize));
        if let Some(packed) = packed.filter(|_| table.length() == 0) {
            self.move_rows("gather_rows", Table::Ids, packed.holding_at_least(needed), x, &numbers, width);
            return;
        }
        let arguments = Embed {
            table: table.f32(needed),
            ids: self.tables().upload(Table::Ids, &numbers),
            x,
            rows: ids.len() as i64,
            width: width as i64,
        };
        self.kernels().launch_striding("embed", ids.len() * width / 8, &arguments);
    }

    /// Rows are grouped by id on the host, so that each row of the table is written by one sum over tokens in ascending order.
    pub(super) fn embed_rows_backward(&self, dx: &Buffer, ids: &[u32], width: usize, dtable: &mut Buffer) {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|&row| ids[row]);
        let starts: Vec<usize> = (0..ids.len()).filter(|&at| at == 0 || ids[order[at]] != ids[order[at - 1]]).collect();
        let unique: Vec<usize> = starts.iter().map(|&start| ids[order[start]] as usize).collect();
        let needed = unique.last().map_or(0, |last| (last + 1) * width);
        let arguments = EmbedBackward {
            dx: dx.bf16(ids.len() * width),
            order: self.tables().upload(Table::GroupedRows, &narrow(order)),
            starts: self.tables().upload(Table::GroupStarts, &narrow(starts.into_iter().chain([ids.len()]))),
            ids: self.tables().upload(Table::GroupIds, &narrow(unique.iter().copied())),
            dtable: dtable.f32(needed),
            unique: unique.len() as i64,
            width: width as i64,
        };
        self.kernels().launch_striding("embed_backward", unique.len() * width / 8, &arguments);
    }

    /// `branch` with the sum that it makes with `x`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm(
        &self,
        x: &Buffer,
        branch: Option<(&Buffer, &mut Buffer)>,
        weight: &Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        y: &mut Buffer,
    ) {
        let (branch, sum) = branch.map_or((0, 0), |(branch, sum)| (branch.bf16(rows * width), sum.bf16(rows * width)));
        let arguments = RmsNorm {
            x: x.bf16(rows * width),
            branch,
            weight: weight.f32(width),
            sum,
            y: y.bf16(rows * width),
            rows: rows as i64,
            width: width as i64,
            epsilon,
            reserved: 0,
        };
        let kernel = if width <= NORM_WIDTH { "rms_norm" } else { "rms_norm_wide" };
        self.kernels().launch_striding(kernel, rows * width / 8, &arguments);
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_backward(
        &self,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        dx: &mut Buffer,
        dweight: &mut Buffer,
    ) {
        let (count, rows_per_part) = parts_of(rows);
        let parts = self.allocate(Purpose::Workspace, count * width * size_of::<f32>());
        let arguments = RmsNormBackward {
            dy: dy.bf16(rows * width),
            x: x.bf16(rows * width),
            weight: weight.f32(width),
            dx: dx.bf16(rows * width),
            parts: parts.address(),
            rows: rows as i64,
            width: width as i64,
            rows_per_part: rows_per_part as i64,
            epsilon,
            reserved: 0,
        };
        let kernel = if width <= NORM_WIDTH { "rms_norm_backward" } else { "rms_norm_backward_wide" };
        self.kernels().launch(kernel, [count, 1, 1], &arguments);
        self.sum_parts(&parts, 0, (count, width), dweight, width);
    }

    /// `into[..width] += ..` over the columns from `column` on of `parts: [count, pitch]`.
    fn sum_parts(&self, parts: &Memory, column: usize, (count, pitch): (usize, usize), into: &mut Buffer, width: usize) {
        if count == 0 {
            return;
        }
        let arguments = SumParts {
            parts: parts.address() + (column * size_of::<f32>()) as Address,
            into: into.f32(width),
            count: count as i64,
            width: width as i64,
            pitch: pitch as i64,
        };
        self.kernels().launch_striding("sum_parts", width * 8, &arguments);
    }

    fn positions(&self, positions: &[usize]) -> Address {
        self.tables().upload(Table::Positions, &narrow(positions.iter().copied()))
    }

    pub(super) fn rotated(&self, projected: &Buffer, rotation: &Rotation<'_, CudaDevice>, rotated: &mut Buffer) {
        let (heads, rows) = (rotation.heads, rotation.positions.len());
        let table_length = rotation.positions.iter().max().map_or(0, |last| (last + 1) * heads.head_dim);
        let norms = rotation.query_key_norms;
        let arguments = Rotate {
            projected: projected.bf16(rows * heads.projected_width()),
            bias: address(rotation.bias, heads.projected_width()),
            query_norm: address(norms.map(|(query, _)| query), heads.head_dim),
            key_norm: address(norms.map(|(_, key)| key), heads.head_dim),
            table: rotation.table.f32(table_length),
            positions: self.positions(rotation.positions),
            rotated: rotated.bf16(rows * heads.projected_width()),
            rows: rows as i64,
            query_heads: heads.query_heads as i32,
            key_value_heads: heads.key_value_heads as i32,
            epsilon: rotation.norm_epsilon,
            reserved: 0,
        };
        self.kernels().launch_striding(&format!("rotate_d{}", heads.head_dim), rows * 32, &arguments);
    }

    pub(super) fn rotated_backward(
        &self,
        projected: &Buffer,
        rotation: &Rotation<'_, CudaDevice>,
        gradient: &mut Buffer,
        weights: RotationGradients<'_, CudaDevice>,
    ) {
        let (heads, rows) = (rotation.heads, rotation.positions.len());
        let table_length = rotation.positions.iter().max().map_or(0, |last| (last + 1) * heads.head_dim);
        let (bias, norms) = (rotation.bias, rotation.query_key_norms);
        let bias_width = if bias.is_some() { heads.projected_width() } else { 0 };
        let part_width = bias_width + if norms.is_some() { 2 * heads.head_dim } else { 0 };
        let (count, rows_per_part) = parts_of(rows);
        let parts = self.allocate(Purpose::Workspace, count * part_width * size_of::<f32>());
        let arguments = RotateBackward {
            projected: if norms.is_some() { projected.bf16(rows * heads.projected_width()) } else { 0 },
            bias: address(bias, heads.projected_width()),
            query_norm: address(norms.map(|(query, _)| query), heads.head_dim),
            key_norm: address(norms.map(|(_, key)| key), heads.head_dim),
            table: rotation.table.f32(table_length),
            positions: self.positions(rotation.positions),
            gradient: gradient.bf16(rows * heads.projected_width()),
            parts: if part_width > 0 { parts.address() } else { 0 },
            rows: rows as i64,
            rows_per_part: rows_per_part as i64,
            part_width: part_width as i64,
            query_heads: heads.query_heads as i32,
            key_value_heads: heads.key_value_heads as i32,
            epsilon: rotation.norm_epsilon,
            reserved: 0,
        };
        self.kernels().launch(&format!("rotate_backward_d{}", heads.head_dim), [count, 1, 1], &arguments);
        let shape = (count, part_width);
        if let (Some(into), true) = (weights.bias, bias.is_some()) {
            self.sum_parts(&parts, 0, shape, into, bias_width);
        }
        if let (Some((query, key)), true) = (weights.query_key_norms, norms.is_some()) {
            self.sum_parts(&parts, bias_width, shape, query, heads.head_dim);
            self.sum_parts(&parts, bias_width + heads.head_dim, shape, key, heads.head_dim);
        }
    }

    pub(super) fn gated(&self, gate_up: &Buffer, rows: usize, width: usize, y: &mut Buffer) {
        let arguments =
            SwiGlu { gate_up: gate_up.bf16(rows * 2 * width), y: y.bf16(rows * width), rows: rows as i64, width: width as i64 };
        self.kernels().launch_striding("swiglu", rows * width / 8, &arguments);
    }

    pub(super) fn gated_backward(&self, dy: &Buffer, gate_up: &mut Buffer, rows: usize, width: usize, y: &mut Buffer) {
        let arguments = SwiGluBackward {
            dy: dy.bf16(rows * width),
            gate_up: gate_up.bf16(rows * 2 * width),
            y: y.bf16(rows * width),
            rows: rows as i64,
            width: width as i64,
        };
        self.kernels().launch_striding("swiglu_backward", rows * width / 8, &arguments);
    }
}

#[cfg(test)]
mod tests {
    use super::parts_of;

    #[test]
    fn parts_cover_all_rows_and_are_bounded() {
        for rows in [0, 1, 15, 16, 17, 129, 4096, 4097, 131_072, 1 << 20] {
            let (count, rows_per_part) = parts_of(rows);
            assert!(count * rows_per_part >= rows && count <= 256, "{rows}: {count} x {rows_per_part}");
            assert!(rows == 0 || (count - 1) * rows_per_part < rows, "{rows}: the last part is empty");
        }
    }
}
