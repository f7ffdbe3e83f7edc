//! Operations on each row by itself: embedding, RMSNorm, rotary embedding, SwiGLU. Forward beside backward.

use super::parallel::{ROW_BLOCK, Shared, for_each, for_row_blocks};
use super::simd::{dot, sigmoid, vectorised};
use crate::device::ops::Heads;

pub fn embed(table: &[f32], ids: &[u32], width: usize, x: &mut [f32]) {
    for_row_blocks(ids.len(), width, [(x, width)], |first, count, [x]| {
        for (row, &id) in x.chunks_exact_mut(width).zip(&ids[first..first + count]) {
            row.copy_from_slice(&table[id as usize * width..(id as usize + 1) * width]);
        }
    });
}

/// Every piece walks all tokens in order for its own columns, so a table row sums its tokens in ascending order.
pub fn embed_backward(dx: &[f32], ids: &[u32], width: usize, dtable: &mut [f32]) {
    const COLUMNS: usize = 64;
    let shared = Shared::new(dtable);
    let table_length = dtable.len();
    for_each(width.div_ceil(COLUMNS), ids.len() * width, |piece| {
        let column = piece * COLUMNS;
        let columns = COLUMNS.min(width - column);
        for (row, &id) in dx.chunks_exact(width).zip(ids) {
            let start = id as usize * width + column;
            assert!(start + columns <= table_length, "token id {id} is outside the embedding table");
            // SAFETY: inside the table by the assertion; each piece owns its columns.
            let target = unsafe { shared.slice(start, columns) };
            for (sum, &value) in target.iter_mut().zip(&row[column..column + columns]) {
                *sum += value;
            }
        }
    });
}

/// `target += ` the column sums of `partials: [blocks, width]`, blocks ascending.
fn add_partials(partials: &[f32], target: &mut [f32]) {
    for partial in partials.chunks_exact(target.len()) {
        for (sum, &value) in target.iter_mut().zip(partial) {
            *sum += value;
        }
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + epsilon).sqrt()
}

#[inline(always)]
fn norm_row(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
    let inverse = inverse_rms(x, epsilon);
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = weight * (x * inverse);
    }
}

vectorised! {
    fn norm_rows(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
        let width = weight.len();
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            norm_row(x, weight, epsilon, y);
        }
    }

    /// With `n = x * r`, `r = 1 / rms`, `g = dy * weight`: `dx += r (g - n mean(g n))`, `dweight += dy n`.
    fn norm_rows_backward(dy: &[f32], x: &[f32], weight: &[f32], epsilon: f32, dx: &mut [f32], dweight: &mut [f32]) {
        let width = weight.len();
        let rows = dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for ((dy, x), dx) in rows {
            let inverse = inverse_rms(x, epsilon);
            for ((sum, &dy), &x) in dweight.iter_mut().zip(dy).zip(x) {
                *sum = (x * inverse).mul_add(dy, *sum);
            }
            // The products are summed in dx's lanes' order by `weighted_dot`, which needs no temporary row.
            let projection = weighted_dot(dy, weight, x) * inverse * inverse / width as f32;
            for (((dx, &dy), &x), &weight) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                *dx += inverse * (dy * weight - x * projection);
            }
        }
    }
}

/// `sum(a w b)` in lane order.
#[inline(always)]
fn weighted_dot(a: &[f32], weight: &[f32], b: &[f32]) -> f32 {
    use super::simd::{LANES, fold_lanes};
    let mut lanes = [0.0f32; LANES];
    let blocks = a.chunks(LANES).zip(weight.chunks(LANES)).zip(b.chunks(LANES));
    for ((a, weight), b) in blocks {
        if let (Ok(a), Ok(weight), Ok(b)) =
            (<&[f32; LANES]>::try_from(a), <&[f32; LANES]>::try_from(weight), <&[f32; LANES]>::try_from(b))
        {
            for lane in 0..LANES {
                lanes[lane] = (a[lane] * weight[lane]).mul_add(b[lane], lanes[lane]);
            }
        } else {
            for lane in 0..a.len() {
                lanes[lane] = (a[lane] * weight[lane]).mul_add(b[lane], lanes[lane]);
            }
        }
    }
    fold_lanes(lanes)
}

pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, rows: usize, y: &mut [f32]) {
    let width = weight.len();
    for_row_blocks(rows, 4 * width, [(y, width)], |first, count, [y]| {
        norm_rows(&x[first * width..(first + count) * width], weight, epsilon, y);
    });
}

/// `sum = x + branch`, `y = norm(sum)`, row by row.
pub fn add_rms_norm(x: &[f32], branch: &[f32], weight: &[f32], epsilon: f32, rows: usize, sum: &mut [f32], y: &mut [f32]) {
    let width = weight.len();
    for_row_blocks(rows, 5 * width, [(sum, width), (y, width)], |first, count, [sum, y]| {
        let range = first * width..(first + count) * width;
        for ((sum, &x), &branch) in sum.iter_mut().zip(&x[range.clone()]).zip(&branch[range]) {
            *sum = x + branch;
        }
        norm_rows(sum, weight, epsilon, y);
    });
}

pub fn rms_norm_backward(dy: &[f32], x: &[f32], weight: &[f32], epsilon: f32, rows: usize, dx: &mut [f32], dweight: &mut [f32]) {
    let width = weight.len();
    let mut partials = vec![0.0; rows.div_ceil(ROW_BLOCK) * width];
    let shared = Shared::new(&mut partials);
    for_row_blocks(rows, 8 * width, [(dx, width)], |first, count, [dx]| {
        let range = first * width..(first + count) * width;
        // SAFETY: block `first / ROW_BLOCK` has its own partial sums.
        let partial = unsafe { shared.slice(first / ROW_BLOCK * width, width) };
        norm_rows_backward(&dy[range.clone()], &x[range], weight, epsilon, dx, partial);
    });
    add_partials(&partials, &mut dweight[..width]);
}

/// [`super::super::ops::Rotation`] with the device's buffers as slices.
#[derive(Clone, Copy)]
pub struct RotationSlices<'a> {
    pub heads: Heads,
    pub bias: Option<&'a [f32]>,
    pub query_key_norms: Option<(&'a [f32], &'a [f32])>,
    pub norm_epsilon: f32,
    pub table: &'a [f32],
    pub positions: &'a [usize],
}

impl<'a> RotationSlices<'a> {
    /// Norm weight of head `head` of a row, and whether the head is rotated (queries and keys) or not (values).
    #[inline(always)]
    fn head(&self, head: usize) -> (Option<&'a [f32]>, bool) {
        let keys = self.heads.query_heads;
        let values = keys + self.heads.key_value_heads;
        match self.query_key_norms {
            Some((query, _)) if head < keys => (Some(query), true),
            Some((_, key)) if head < values => (Some(key), true),
            _ => (None, head < values),
        }
    }
}

/// Rotates the pair `(x[i], x[i + half])` by the angle of cosine `table[i]`, sine `table[half + i]`; `direction` -1 turns back.
#[inline(always)]
fn rotate_head(x: &mut [f32], table: &[f32], direction: f32) {
    let half = x.len() / 2;
    let (low, high) = x.split_at_mut(half);
    let (cosines, sines) = table.split_at(half);
    for (((low, high), &cosine), &sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        let sine = sine * direction;
        let (a, b) = (*low, *high);
        *low = a.mul_add(cosine, -(b * sine));
        *high = b.mul_add(cosine, a * sine);
    }
}

vectorised! {
    fn rotate_rows(projected: &[f32], rotation: RotationSlices, first: usize, rotated: &mut [f32]) {
        let (width, dim) = (rotation.heads.projected_width(), rotation.heads.head_dim);
        for (row, (x, y)) in projected.chunks_exact(width).zip(rotated.chunks_exact_mut(width)).enumerate() {
            let position = rotation.positions[first + row];
            let table = &rotation.table[position * dim..(position + 1) * dim];
            y.copy_from_slice(x);
            if let Some(bias) = rotation.bias {
                for (y, &bias) in y.iter_mut().zip(bias) {
                    *y += bias;
                }
            }
            for (head, y) in y.chunks_exact_mut(dim).enumerate() {
                let (norm, rotates) = rotation.head(head);
                if let Some(weight) = norm {
                    let inverse = inverse_rms(y, rotation.norm_epsilon);
                    for (y, &weight) in y.iter_mut().zip(weight) {
                        *y = weight * (*y * inverse);
                    }
                }
                if rotates {
                    rotate_head(y, table, 1.0);
                }
            }
        }
    }

    /// `sums`: partial gradients `[projected_width]` of the bias, then `[head_dim]` of each norm. `scratch: [2, head_dim]`
    fn rotate_rows_backward(
        projected: &[f32], rotation: RotationSlices, first: usize, gradient: &mut [f32], sums: &mut [f32], scratch: &mut [f32],
    ) {
        let (width, dim) = (rotation.heads.projected_width(), rotation.heads.head_dim);
        let (bias_sums, norm_sums) = sums.split_at_mut(width);
        let (x, dx) = scratch.split_at_mut(dim);
        for (row, (projected, gradient)) in projected.chunks_exact(width).zip(gradient.chunks_exact_mut(width)).enumerate() {
            let position = rotation.positions[first + row];
            let table = &rotation.table[position * dim..(position + 1) * dim];
            for (head, dy) in gradient.chunks_exact_mut(dim).enumerate() {
                let (norm, rotates) = rotation.head(head);
                if rotates {
                    rotate_head(dy, table, -1.0);
                }
                if let Some(weight) = norm {
                    let columns = head * dim..(head + 1) * dim;
                    x.copy_from_slice(&projected[columns.clone()]);
                    if let Some(bias) = rotation.bias {
                        for (x, &bias) in x.iter_mut().zip(&bias[columns]) {
                            *x += bias;
                        }
                    }
                    let start = if head < rotation.heads.query_heads { 0 } else { dim };
                    dx.fill(0.0);
                    norm_head_backward(dy, x, weight, rotation.norm_epsilon, dx, &mut norm_sums[start..start + dim]);
                    dy.copy_from_slice(dx);
                }
            }
            if rotation.bias.is_some() {
                for (sum, &value) in bias_sums.iter_mut().zip(gradient.iter()) {
                    *sum += value;
                }
            }
        }
    }

    /// `y = silu(gate) * up`
    fn swiglu_rows(gate_up: &[f32], width: usize, y: &mut [f32]) {
        for (gate_up, y) in gate_up.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
            let (gate, up) = gate_up.split_at(width);
            for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                *y = gate * sigmoid(gate) * up;
            }
        }
    }

    /// With `s = sigmoid(gate)`: `dup = dy gate s`, `dgate = dy up s (1 + gate (1 - s))`.
    fn swiglu_rows_backward(dy: &[f32], gate_up: &mut [f32], width: usize, y: &mut [f32]) {
        for ((dy, gate_up), y) in dy.chunks_exact(width).zip(gate_up.chunks_exact_mut(2 * width)).zip(y.chunks_exact_mut(width)) {
            let (gates, ups) = gate_up.split_at_mut(width);
            for (((&dy, gate), up), y) in dy.iter().zip(gates).zip(ups).zip(y) {
                let (g, u) = (*gate, *up);
                let s = sigmoid(g);
                let silu = g * s;
                *y = silu * u;
                *gate = dy * u * (s * g.mul_add(1.0 - s, 1.0));
                *up = dy * silu;
            }
        }
    }
}

#[inline(always)]
fn norm_head_backward(dy: &[f32], x: &[f32], weight: &[f32], epsilon: f32, dx: &mut [f32], dweight: &mut [f32]) {
    let inverse = inverse_rms(x, epsilon);
    let projection = weighted_dot(dy, weight, x) * inverse * inverse / x.len() as f32;
    for ((((dx, sum), &dy), &x), &weight) in dx.iter_mut().zip(dweight).zip(dy).zip(x).zip(weight) {
        *sum = (x * inverse).mul_add(dy, *sum);
        *dx = inverse * (dy * weight - x * projection);
    }
}

pub fn rotate(projected: &[f32], rotation: RotationSlices, rotated: &mut [f32]) {
    let width = rotation.heads.projected_width();
    for_row_blocks(rotation.positions.len(), 4 * width, [(rotated, width)], |first, count, [rotated]| {
        rotate_rows(&projected[first * width..(first + count) * width], rotation, first, rotated);
    });
}

pub fn rotate_backward(
    projected: &[f32],
    rotation: RotationSlices,
    gradient: &mut [f32],
    bias: Option<&mut [f32]>,
    query_key_norms: Option<(&mut [f32], &mut [f32])>,
) {
    let (width, dim) = (rotation.heads.projected_width(), rotation.heads.head_dim);
    let rows = rotation.positions.len();
    let sums_width = width + 4 * dim; // bias, two norms, and two rows of scratch
    let mut partials = vec![0.0; rows.div_ceil(ROW_BLOCK) * sums_width];
    let shared = Shared::new(&mut partials);
    for_row_blocks(rows, 8 * width, [(gradient, width)], |first, count, [gradient]| {
        // SAFETY: block `first / ROW_BLOCK` has its own partial sums.
        let partial = unsafe { shared.slice(first / ROW_BLOCK * sums_width, sums_width) };
        let (sums, scratch) = partial.split_at_mut(width + 2 * dim);
        rotate_rows_backward(&projected[first * width..(first + count) * width], rotation, first, gradient, sums, scratch);
    });
    let add = |start: usize, target: &mut [f32]| {
        for partial in partials.chunks_exact(sums_width) {
            add_partials(&partial[start..start + target.len()], target);
        }
    };
    if let Some(target) = bias {
        add(0, &mut target[..width]);
    }
    if let Some((query, key)) = query_key_norms {
        add(width, &mut query[..dim]);
        add(width + dim, &mut key[..dim]);
    }
}

pub fn swiglu(gate_up: &[f32], rows: usize, width: usize, y: &mut [f32]) {
    for_row_blocks(rows, 16 * width, [(y, width)], |first, count, [y]| {
        swiglu_rows(&gate_up[2 * first * width..2 * (first + count) * width], width, y);
    });
}

pub fn swiglu_backward(dy: &[f32], gate_up: &mut [f32], rows: usize, width: usize, y: &mut [f32]) {
    for_row_blocks(rows, 24 * width, [(gate_up, 2 * width), (y, width)], |first, count, [gate_up, y]| {
        swiglu_rows_backward(&dy[first * width..(first + count) * width], gate_up, width, y);
    });
}
