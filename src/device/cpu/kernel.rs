//! The innermost loops of every matrix product: a tile of a few rows by 16-column panels, held in registers.
//!
//! Every output is ONE chain of fused multiply-adds over the depth, ascending. Therefore its bits do not depend on how
//! many rows or columns are computed beside it, on the tile shape, or on the instruction set. Where a product is cut
//! along the depth, the chain is stored and reloaded ([`Mode::Continue`]), which is exact.

use super::simd::InstructionSet;

/// Columns of a panel: one cache line of f32.
pub const PANEL: usize = 16;

/// Rows of the largest tile.
const TILE_ROWS: usize = 6;

/// What happens to what `c` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `c = a b`
    Store,
    /// The chain of each output starts from `c`.
    Continue,
}

/// `c[rows, columns] (+)= a[rows, depth] * b[depth, columns]`, addressed by strides in elements.
///
/// `b` comes in panels of [`PANEL`] columns; every panel must be readable in full, also where `columns` ends inside it.
#[derive(Clone, Copy)]
pub struct Block {
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    /// Element `(row, k)` at `a + row * a_row + k * a_step`.
    pub a: *const f32,
    pub a_row: usize,
    pub a_step: usize,
    /// Element `(k, column)` at `b + column / 16 * b_panel + k * b_step + column % 16`.
    pub b: *const f32,
    pub b_panel: usize,
    pub b_step: usize,
    /// Element `(row, column)` at `c + row * c_row + column`.
    pub c: *mut f32,
    pub c_row: usize,
    pub mode: Mode,
}

/// Computes a block with the given instruction set.
///
/// # Safety
/// All elements that `block` addresses must be readable (and those of `c` writable, by this call alone), and the
/// processor must support `set`.
pub unsafe fn multiply(set: InstructionSet, block: &Block) {
    match set {
        // SAFETY: the caller's promise.
        InstructionSet::Scalar => unsafe { scalar::block(block) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        InstructionSet::Avx2 => unsafe { avx2::block(block) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        InstructionSet::Avx512 => unsafe { avx512::block(block) },
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's promise; only the scalar body exists here.
        _ => unsafe { scalar::block(block) },
    }
}

/// Rows of the next tile when `left` remain: full tiles, with a last pair split evenly (8 = 4 + 4, not 6 + 2).
fn next_rows(left: usize) -> usize {
    match left {
        0..=TILE_ROWS => left,
        7..=11 => left.div_ceil(2),
        _ => TILE_ROWS,
    }
}

/// Defines a module `$name` with `block`, which walks panels (outside, so that a panel stays in the cache) and rows, and
/// `tile`, the register kernel, for vectors of type `$vector` holding `$width` floats. `$panels` gives, per number of tile rows 1 to 6,
/// how many panels a tile takes at once: enough independent chains to hide the latency of a fused multiply-add.
macro_rules! vector_kernel {
    ($name:ident, $features:literal, $vector:ty, $width:literal, $zero:ident, $load:ident, $store:ident, $broadcast:ident, $fma:ident,
     $panels:expr) => {
        #[cfg(target_arch = "x86_64")]
        mod $name {
            use super::{Block, Mode, PANEL, next_rows};
            use std::arch::x86_64::*;

            const VECTORS: usize = PANEL / $width;
            const PANELS: [usize; 7] = $panels;

            #[target_feature(enable = $features)]
            pub unsafe fn block(block: &Block) {
                let full_panels = block.columns / PANEL;
                let mut row = 0;
                // Tiles of equal height first, so that each pass over the panels keeps one shape.
                while row < block.rows {
                    let rows = next_rows(block.rows - row);
                    let same = if rows == 6 { (block.rows - row) / 6 * 6 } else { rows };
                    let same = if next_rows(block.rows - row - same) == 6 { rows } else { same };
                    let mut panel = 0;
                    while panel < full_panels {
                        let panels = PANELS[rows].min(full_panels - panel);
                        for first in (row..row + same).step_by(rows) {
                            // SAFETY: the tile lies inside the block, which the caller vouches for.
                            unsafe { dispatch(block, first, rows, panel, panels) };
                        }
                        panel += panels;
                    }
                    if block.columns % PANEL > 0 {
                        for first in (row..row + same).step_by(rows) {
                            // SAFETY: as above; the last panel is readable in full.
                            unsafe { narrow(block, first, rows, full_panels) };
                        }
                    }
                    row += same;
                }
            }

            /// The last, incomplete panel: computed whole in a scratch tile, so that it rounds like every other.
            #[target_feature(enable = $features)]
            unsafe fn narrow(block: &Block, row: usize, rows: usize, panel: usize) {
                let columns = block.columns - panel * PANEL;
                let mut scratch = [0.0f32; super::TILE_ROWS * PANEL];
                // SAFETY: the caller's block covers `rows` rows from `row` and `columns` columns of this panel.
                unsafe {
                    let c = block.c.add(row * block.c_row + panel * PANEL);
                    for r in 0..rows {
                        std::ptr::copy_nonoverlapping(c.add(r * block.c_row), scratch.as_mut_ptr().add(r * PANEL), columns);
                    }
                    let whole = Block {
                        a: block.a.add(row * block.a_row),
                        b: block.b.add(panel * block.b_panel),
                        c: scratch.as_mut_ptr(),
                        c_row: PANEL,
                        ..*block
                    };
                    dispatch(&whole, 0, rows, 0, 1);
                    for r in 0..rows {
                        std::ptr::copy_nonoverlapping(scratch.as_ptr().add(r * PANEL), c.add(r * block.c_row), columns);
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn dispatch(block: &Block, row: usize, rows: usize, panel: usize, panels: usize) {
                // SAFETY: each arm computes the tile it was asked for, which the caller vouches for.
                unsafe {
                    match (rows, panels) {
                        (1, _) if panels == PANELS[1] => tile::<1, { PANELS[1] }>(block, row, panel),
                        (2, _) if panels == PANELS[2] => tile::<2, { PANELS[2] }>(block, row, panel),
                        (3, _) if panels == PANELS[3] => tile::<3, { PANELS[3] }>(block, row, panel),
                        (4, _) if panels == PANELS[4] => tile::<4, { PANELS[4] }>(block, row, panel),
                        (5, _) if panels == PANELS[5] => tile::<5, { PANELS[5] }>(block, row, panel),
                        (6, _) if panels == PANELS[6] => tile::<6, { PANELS[6] }>(block, row, panel),
                        _ => {
                            for one in panel..panel + panels {
                                match rows {
                                    1 => tile::<1, 1>(block, row, one),
                                    2 => tile::<2, 1>(block, row, one),
                                    3 => tile::<3, 1>(block, row, one),
                                    4 => tile::<4, 1>(block, row, one),
                                    5 => tile::<5, 1>(block, row, one),
                                    _ => tile::<6, 1>(block, row, one),
                                }
                            }
                        }
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn tile<const ROWS: usize, const TILE_PANELS: usize>(block: &Block, row: usize, panel: usize) {
                // SAFETY: the caller's block covers `ROWS` rows from `row` and `TILE_PANELS` panels from `panel`, all readable.
                unsafe {
                    let c = block.c.add(row * block.c_row + panel * PANEL);
                    let mut sums = [[[$zero(); VECTORS]; TILE_PANELS]; ROWS];
                    if block.mode == Mode::Continue {
                        for r in 0..ROWS {
                            for p in 0..TILE_PANELS {
                                for v in 0..VECTORS {
                                    sums[r][p][v] = $load(c.add(r * block.c_row + p * PANEL + v * $width));
                                }
                            }
                        }
                    }
                    // Two row pointers, three rows apart: every row is then one address of the form base + {0, 1, 2} * stride.
                    let mut a = block.a.add(row * block.a_row);
                    let mut a_high = a.wrapping_add(3 * block.a_row);
                    let mut b = block.b.add(panel * block.b_panel);
                    for _ in 0..block.depth {
                        let mut columns = [[$zero(); VECTORS]; TILE_PANELS];
                        for p in 0..TILE_PANELS {
                            for v in 0..VECTORS {
                                columns[p][v] = $load(b.add(p * block.b_panel + v * $width));
                            }
                        }
                        for r in 0..ROWS {
                            let factor =
                                $broadcast(if r < 3 { *a.add(r * block.a_row) } else { *a_high.add((r - 3) * block.a_row) });
                            for p in 0..TILE_PANELS {
                                for v in 0..VECTORS {
                                    sums[r][p][v] = $fma(factor, columns[p][v], sums[r][p][v]);
                                }
                            }
                        }
                        a = a.wrapping_add(block.a_step);
                        a_high = a_high.wrapping_add(block.a_step);
                        b = b.wrapping_add(block.b_step);
                    }
                    for r in 0..ROWS {
                        for p in 0..TILE_PANELS {
                            for v in 0..VECTORS {
                                let target = c.add(r * block.c_row + p * PANEL + v * $width);
                                $store(target, sums[r][p][v]);
                            }
                        }
                    }
                }
            }
        }
    };
}

vector_kernel!(
    avx2,
    "avx2,fma",
    __m256,
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    [0, 4, 3, 2, 1, 1, 1]
);
vector_kernel!(
    avx512,
    "avx512f",
    __m512,
    16,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    [0, 8, 6, 4, 4, 4, 4]
);

mod scalar {
    use super::{Block, Mode, PANEL, next_rows};

    /// The same walk without vectors; `mul_add` rounds once, as the instruction does.
    pub unsafe fn block(block: &Block) {
        let mut row = 0;
        while row < block.rows {
            let rows = next_rows(block.rows - row);
            for column in (0..block.columns).step_by(PANEL) {
                let columns = PANEL.min(block.columns - column);
                for r in row..row + rows {
                    // SAFETY: row and column lie inside the block, which the caller vouches for.
                    unsafe { strip(block, r, column, columns) };
                }
            }
            row += rows;
        }
    }

    unsafe fn strip(block: &Block, row: usize, column: usize, columns: usize) {
        // SAFETY: the caller's block covers this row and `columns` columns from `column`, the panel readable in full.
        unsafe {
            let c = std::slice::from_raw_parts_mut(block.c.add(row * block.c_row + column), columns);
            let mut sums = [0.0f32; PANEL];
            if block.mode == Mode::Continue {
                sums[..columns].copy_from_slice(c);
            }
            let panel = block.b.add(column / PANEL * block.b_panel);
            for k in 0..block.depth {
                let factor = *block.a.add(row * block.a_row + k * block.a_step);
                let b = std::slice::from_raw_parts(panel.add(k * block.b_step), columns);
                for (sum, &value) in sums.iter_mut().zip(b) {
                    *sum = factor.mul_add(value, *sum);
                }
            }
            c.copy_from_slice(&sums[..columns]);
        }
    }
}
