//! Row-invariant matrix products for linear layers `y = x W^T`, `W: [outputs, inputs]` as Hugging Face stores it.
//!
//! Work is cut over rows and columns of the result, never over the depth, so neither the number of rows nor the number of
//! threads can change a bit (see `kernel.rs`). The forward product reads weights packed once into panels; the two gradient
//! products pack what they need into thread-local scratch, which costs one pass over data that is then used hundreds of times.

use super::kernel::{Block, Mode, PANEL, multiply};
use super::parallel::{Shared, for_each, with_scratch};
use super::simd::InstructionSet;

/// A weight matrix laid out for the forward product: panel `p` holds outputs `16 p .. 16 p + 16` as `[inputs][16]`.
#[derive(Clone, Debug, Default)]
pub struct PackedWeights {
    pub outputs: usize,
    pub inputs: usize,
    /// `[ceil(outputs / 16), inputs, 16]`, zero beyond `outputs`
    panels: Vec<f32>,
}

impl PackedWeights {
    /// Packs `weights: [outputs, inputs]`.
    pub fn pack(weights: &[f32], outputs: usize, inputs: usize) -> PackedWeights {
        let panels = vec![0.0; outputs.div_ceil(PANEL) * inputs * PANEL];
        let mut packed = PackedWeights { outputs, inputs, panels };
        packed.repack(weights);
        packed
    }

    /// Packs new values of the same shape.
    pub fn repack(&mut self, weights: &[f32]) {
        let (outputs, inputs) = (self.outputs, self.inputs);
        assert_eq!(weights.len(), outputs * inputs, "weights of another shape");
        let shared = Shared::new(&mut self.panels);
        for_each(outputs.div_ceil(PANEL), outputs * inputs, |panel| {
            // SAFETY: each piece owns one panel.
            let target = unsafe { shared.slice(panel * inputs * PANEL, inputs * PANEL) };
            for (lane, output) in (panel * PANEL..outputs.min((panel + 1) * PANEL)).enumerate() {
                for (k, &value) in weights[output * inputs..(output + 1) * inputs].iter().enumerate() {
                    target[k * PANEL + lane] = value;
                }
            }
        });
    }

    pub fn bytes(&self) -> usize {
        self.panels.len() * size_of::<f32>()
    }
}

/// Cache budget, in floats, of the rows of `a` that a piece of work walks for every panel (half of a 512 KiB L2).
const ROWS_BUDGET: usize = 32 * 1024;

/// `y[rows, outputs] = x[rows, inputs] W^T`
pub fn forward(set: InstructionSet, x: &[f32], weights: &PackedWeights, y: &mut [f32], rows: usize) {
    let (outputs, inputs) = (weights.outputs, weights.inputs);
    assert!(x.len() >= rows * inputs && y.len() >= rows * outputs, "a buffer is too short for {rows} rows");
    let row_block = (ROWS_BUDGET / inputs.max(1)).clamp(24, 192) / 6 * 6;
    let row_blocks = rows.div_ceil(row_block).max(1);
    // Few rows: cut the columns, so that all threads have work.
    let panels = outputs.div_ceil(PANEL);
    let column_blocks = if row_blocks >= 8 { 1 } else { (16 / row_blocks).min(panels.div_ceil(4)).max(1) };
    let panel_block = panels.div_ceil(column_blocks);
    let column_blocks = panels.div_ceil(panel_block.max(1));
    let target = Shared::new(y);
    for_each(row_blocks * column_blocks, rows * outputs * inputs / 8, |piece| {
        let (row, panel) = (piece / column_blocks * row_block, piece % column_blocks * panel_block);
        let column = panel * PANEL;
        let block = Block {
            rows: row_block.min(rows - row),
            columns: (panel_block * PANEL).min(outputs - column),
            depth: inputs,
            a: x[row * inputs..].as_ptr(),
            a_row: inputs,
            a_step: 1,
            b: weights.panels[column * inputs..].as_ptr(),
            b_panel: inputs * PANEL,
            b_step: PANEL,
            c: target.pointer().wrapping_add(row * outputs + column),
            c_row: outputs,
            mode: Mode::Store,
        };
        // SAFETY: rows and columns lie inside x, panels and y by the assertion above; each piece writes its own part of y.
        unsafe { multiply(set, &block) };
    });
}

/// `dx[rows, inputs] = dy[rows, outputs] W`, `W: [outputs, inputs]`
pub fn input_gradient(
    set: InstructionSet,
    dy: &[f32],
    weights: &[f32],
    dx: &mut [f32],
    (rows, outputs, inputs): (usize, usize, usize),
) {
    assert!(
        weights.len() >= outputs * inputs && dy.len() >= rows * outputs && dx.len() >= rows * inputs,
        "a buffer is too short"
    );
    let panels = inputs.div_ceil(PANEL);
    let group = (ROWS_BUDGET * 2 / (outputs * PANEL).max(1)).clamp(1, 8).min(panels.div_ceil(4).max(1));
    let row_block = (ROWS_BUDGET / outputs.max(1)).clamp(24, 192) / 6 * 6;
    let target = Shared::new(dx);
    for_each(panels.div_ceil(group), rows * outputs * inputs / 8, |piece| {
        let first = piece * group;
        let count = group.min(panels - first);
        with_scratch(count * outputs * PANEL, |scratch| {
            for (panel, packed) in scratch.chunks_exact_mut(outputs * PANEL).enumerate() {
                pack_columns(weights, inputs, outputs, (first + panel) * PANEL, packed);
            }
            for row in (0..rows).step_by(row_block) {
                let block = Block {
                    rows: row_block.min(rows - row),
                    columns: (count * PANEL).min(inputs - first * PANEL),
                    depth: outputs,
                    a: dy[row * outputs..].as_ptr(),
                    a_row: outputs,
                    a_step: 1,
                    b: scratch.as_ptr(),
                    b_panel: outputs * PANEL,
                    b_step: PANEL,
                    c: target.pointer().wrapping_add(row * inputs + first * PANEL),
                    c_row: inputs,
                    mode: Mode::Store,
                };
                // SAFETY: inside dy, scratch and dx by the assertion above; each piece writes its own columns of dx.
                unsafe { multiply(set, &block) };
            }
        });
    });
}

/// Rows of `x` and `dy` per step of [`weight_gradient`]: two panels of this depth and the tile stay in the first-level cache.
const TOKEN_CHUNK: usize = 128;

/// `dw[outputs, inputs] += dy[rows, outputs]^T x[rows, inputs]`, each output one chain over all rows, ascending, from its old value.
pub fn weight_gradient(
    set: InstructionSet,
    dy: &[f32],
    x: &[f32],
    dw: &mut [f32],
    (rows, outputs, inputs): (usize, usize, usize),
) {
    assert!(dy.len() >= rows * outputs && x.len() >= rows * inputs && dw.len() >= outputs * inputs, "a buffer is too short");
    let output_block = (outputs.div_ceil(4).next_multiple_of(6)).clamp(6, 192);
    let target = Shared::new(dw);
    for_each(outputs.div_ceil(output_block), rows * outputs * inputs / 8, |piece| {
        let first = piece * output_block;
        let count = output_block.min(outputs - first);
        with_scratch(TOKEN_CHUNK * (count + PANEL), |scratch| {
            let (left, panel) = scratch.split_at_mut(TOKEN_CHUNK * count);
            for token in (0..rows).step_by(TOKEN_CHUNK) {
                let tokens = TOKEN_CHUNK.min(rows - token);
                for (index, row) in left.chunks_exact_mut(count).take(tokens).enumerate() {
                    let start = (token + index) * outputs + first;
                    row.copy_from_slice(&dy[start..start + count]);
                }
                for column in (0..inputs).step_by(PANEL) {
                    pack_columns(&x[token * inputs..], inputs, tokens, column, panel);
                    let block = Block {
                        rows: count,
                        columns: PANEL.min(inputs - column),
                        depth: tokens,
                        a: left.as_ptr(),
                        a_row: 1,
                        a_step: count,
                        b: panel.as_ptr(),
                        b_panel: 0,
                        b_step: PANEL,
                        c: target.pointer().wrapping_add(first * inputs + column),
                        c_row: inputs,
                        mode: Mode::Continue,
                    };
                    // SAFETY: inside scratch and dw by the assertion above; each piece writes its own rows of dw.
                    unsafe { multiply(set, &block) };
                }
            }
        });
    });
}

/// Copies columns `first .. first + 16` of `matrix: [rows, width]` to `packed: [rows][16]`, zero beyond `width`.
fn pack_columns(matrix: &[f32], width: usize, rows: usize, first: usize, packed: &mut [f32]) {
    let columns = PANEL.min(width - first);
    for (target, source) in packed.chunks_exact_mut(PANEL).zip(matrix.chunks_exact(width)).take(rows) {
        if columns == PANEL {
            target.copy_from_slice(&source[first..first + PANEL]);
        } else {
            target[..columns].copy_from_slice(&source[first..first + columns]);
            target[columns..].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    /// One chain of fused multiply-adds per output: what every body must give, bit for bit.
    fn chain(x: &[f32], w: &[f32], rows: usize, outputs: usize, inputs: usize) -> Vec<f32> {
        let mut y = vec![0.0f32; rows * outputs];
        for row in 0..rows {
            for output in 0..outputs {
                y[row * outputs + output] =
                    (0..inputs).fold(0.0f32, |sum, k| x[row * inputs + k].mul_add(w[output * inputs + k], sum));
            }
        }
        y
    }

    #[test]
    fn a_row_has_the_same_bits_among_any_number_of_rows_in_every_body() {
        for (outputs, inputs) in [(1, 1), (16, 16), (17, 5), (31, 129), (100, 67), (192, 128), (65, 33)] {
            let most = 40;
            let (x, w) = (numbers(most * inputs, 3), numbers(outputs * inputs, 5));
            let packed = PackedWeights::pack(&w, outputs, inputs);
            let expected = chain(&x, &w, most, outputs, inputs);
            for set in InstructionSet::available() {
                for rows in 1..=most {
                    let mut y = vec![f32::NAN; rows * outputs];
                    forward(set, &x, &packed, &mut y, rows);
                    assert_eq!(bits(&y), bits(&expected[..rows * outputs]), "{} {rows}x{outputs}x{inputs}", set.name());
                }
            }
        }
    }

    #[test]
    fn gradients_are_the_transposed_products_for_any_number_of_threads() {
        for (rows, outputs, inputs) in [(1, 1, 1), (7, 40, 24), (131, 50, 33), (300, 97, 130)] {
            let (x, w, dy) = (numbers(rows * inputs, 1), numbers(outputs * inputs, 2), numbers(rows * outputs, 3));
            let start = numbers(outputs * inputs, 4);
            let mut dx_expected = vec![0.0f32; rows * inputs];
            let mut dw_expected = start.clone();
            for row in 0..rows {
                for output in 0..outputs {
                    let d = dy[row * outputs + output];
                    for k in 0..inputs {
                        let dx = &mut dx_expected[row * inputs + k];
                        *dx = d.mul_add(w[output * inputs + k], *dx);
                        let dw = &mut dw_expected[output * inputs + k];
                        *dw = d.mul_add(x[row * inputs + k], *dw);
                    }
                }
            }
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
                for set in InstructionSet::available() {
                    let (mut dx, mut dw) = (vec![f32::NAN; rows * inputs], start.clone());
                    pool.install(|| {
                        input_gradient(set, &dy, &w, &mut dx, (rows, outputs, inputs));
                        weight_gradient(set, &dy, &x, &mut dw, (rows, outputs, inputs));
                    });
                    assert_eq!(bits(&dx), bits(&dx_expected), "input gradient, {}", set.name());
                    assert_eq!(bits(&dw), bits(&dw_expected), "weight gradient, {}", set.name());
                }
            }
        }
    }
}
