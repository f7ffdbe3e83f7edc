//! Backward of attention over blocks of keys, as two passes that each compute the scores again: one sums the gradients of queries,
//! the other those of keys and values. So every sum has one owner, which walks its terms in ascending order, and one long
//! document keeps all threads busy.

use super::attention::scaled_copy;
use super::kernel::{Block, Mode, PANEL, multiply};
use super::key_blocks::{self, BlockShape, Document, Part};
use super::parallel::{Shared, for_each, with_scratch};
use super::simd::{InstructionSet, dot, exp, vectorised};
use crate::device::ops::{Heads, KEYS_PER_BLOCK, KeyBlocks};

/// Keys of a tile of scores: whole blocks.
const TILE_KEYS: usize = 4 * KEYS_PER_BLOCK;

/// Rows of a tile (positions times heads of the group), unless a group has more heads: two tiles fit into a second-level cache.
const TILE_ROWS: usize = 96;

vectorised! {
    /// `P = exp(score - log_sum_exp)` and `dS = P (dP - correction)`, in place of scores and dP; 0 beyond `visible`.
    fn score_gradient(scores: &mut [f32], dscores: &mut [f32], visible: usize, log_sum_exp: f32, correction: f32) {
        for (score, dscore) in scores.iter_mut().zip(dscores.iter_mut()).take(visible) {
            *score = exp(*score - log_sum_exp);
            *dscore = *score * (*dscore - correction);
        }
        scores[visible..].fill(0.0);
        dscores[visible..].fill(0.0);
    }

    fn row_dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b)
    }
}

/// What both passes read.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[rows, query_width]`
    pub doutput: &'a [f32],
    /// `[rows, projected_width]`
    pub rotated: &'a [f32],
    /// `[rows, query_width]`
    pub output: &'a [f32],
    /// `[rows, query_heads]`
    pub log_sum_exp: &'a [f32],
}

/// A head's keys and values as the products want them.
struct Matrices {
    key_panels: Vec<f32>,   // [keys / 16, dim, 16]
    value_panels: Vec<f32>, // [keys / 16, dim, 16]
    key_rows: Vec<f32>,     // [keys, padded]
}

/// Overwrites the query columns of `shape`'s heads in `drotated` and all of `dblocks`.
pub fn backward(
    set: InstructionSet,
    inputs: Inputs<'_>,
    shape: &BlockShape,
    plan: &KeyBlocks,
    blocks: &[f32],
    drotated: &mut [f32],
    dblocks: &mut [f32],
) {
    let (heads, rows, numbers) = (shape.heads, plan.rows(), plan.blocks * shape.numbers());
    let long_enough = drotated.len() >= rows * heads.projected_width() && dblocks.len() >= numbers;
    assert!(long_enough, "a buffer is too short for {rows} rows or {} blocks", plan.blocks);
    dblocks[..numbers].fill(0.0);
    let documents = key_blocks::documents(plan);
    let matrices = key_blocks::bring(blocks, shape, &documents, |head| Matrices {
        key_panels: head.panels(Part::Keys),
        value_panels: head.panels(Part::Values),
        key_rows: head.rows(Part::Keys),
    });
    let of_documents = || documents.iter().zip(matrices.chunks_exact(shape.range.len()));
    let of_head = |(document, matrices)| {
        shape.range.clone().zip(matrices).map(move |(head, matrices)| Head { set, inputs, heads, head, document, matrices })
    };
    let every_head: Vec<Head<'_>> = of_documents().flat_map(of_head).collect();
    let positions = (TILE_ROWS / heads.group()).max(1);
    let mut queries = Vec::new(); // (head, first row, its position, positions)
    let mut keys = Vec::new(); // (head, first key)
    let mut operations = 0;
    for head in &every_head {
        for slice in &head.document.slices {
            operations += slice.length * (slice.first + slice.length) * heads.group() * heads.head_dim;
            let firsts = (0..slice.length).step_by(positions);
            queries
                .extend(firsts.map(|first| (head, slice.row + first, slice.first + first, positions.min(slice.length - first))));
        }
        keys.extend((0..head.document.keys).step_by(TILE_KEYS).map(|first| (head, first)));
    }
    let drotated = Shared::new(drotated);
    for_each(queries.len(), operations, |index| {
        let (head, row, position, count) = queries[index];
        head.query_gradients(row, position, count, drotated);
    });
    let dblocks = Shared::new(dblocks);
    for_each(keys.len(), operations, |index| {
        let (head, first) = keys[index];
        head.key_gradients(first, positions, shape, dblocks);
    });
}

/// One key/value head of one document.
struct Head<'a> {
    set: InstructionSet,
    inputs: Inputs<'a>,
    heads: Heads,
    head: usize,
    document: &'a Document<'a>,
    matrices: &'a Matrices,
}

/// Scratch of one tile.
struct Tile<'a> {
    queries: &'a mut [f32],     // [rows, padded], scaled, zero beyond `dim`
    doutputs: &'a mut [f32],    // [rows, padded], zero beyond `dim`
    scores: &'a mut [f32],      // [rows, TILE_KEYS], then their exponentials
    dscores: &'a mut [f32],     // [rows, TILE_KEYS]
    corrections: &'a mut [f32], // [rows] doutput . output
}

impl Head<'_> {
    fn padded(&self) -> usize {
        self.heads.head_dim.next_multiple_of(PANEL)
    }

    /// Lends a tile of `rows` rows and `more` numbers of scratch, all zero.
    fn with_tile(&self, rows: usize, more: usize, work: impl FnOnce(Tile<'_>, &mut [f32])) {
        let padded = self.padded();
        with_scratch(more + rows * (2 * padded + 2 * TILE_KEYS + 1), |scratch| {
            let (more, scratch) = scratch.split_at_mut(more);
            let (queries, scratch) = scratch.split_at_mut(rows * padded);
            let (doutputs, scratch) = scratch.split_at_mut(rows * padded);
            let (scores, scratch) = scratch.split_at_mut(rows * TILE_KEYS);
            let (dscores, corrections) = scratch.split_at_mut(rows * TILE_KEYS);
            for buffer in [&mut *more, &mut *queries, &mut *doutputs] {
                buffer.fill(0.0);
            }
            work(Tile { queries, doutputs, scores, dscores, corrections }, more);
        });
    }

    /// Brings `count` positions from `row` on into the tile.
    fn load(&self, tile: &mut Tile<'_>, row: usize, count: usize) {
        let Heads { head_dim: dim, .. } = self.heads;
        let (group, padded, scale) = (self.heads.group(), self.padded(), 1.0 / (dim as f32).sqrt());
        let Inputs { doutput, rotated, output, .. } = self.inputs;
        for index in 0..count * group {
            let (token, column) = (row + index / group, (self.head * group + index % group) * dim);
            let query = &rotated[token * self.heads.projected_width() + column..][..dim];
            scaled_copy(query, scale, &mut tile.queries[index * padded..][..dim]);
            let columns = token * self.heads.query_width() + column;
            let doutput = &doutput[columns..columns + dim];
            tile.doutputs[index * padded..][..dim].copy_from_slice(doutput);
            tile.corrections[index] = row_dot(doutput, &output[columns..columns + dim]);
        }
    }

    /// Turns the tile's `scores` into probabilities and its `dscores` into their gradients, between `count` positions from `position` (row
    /// `row`) on and the keys `first..end`.
    fn score(&self, tile: &mut Tile<'_>, row: usize, position: usize, count: usize, first: usize, end: usize) {
        let (dim, group, padded) = (self.heads.head_dim, self.heads.group(), self.padded());
        let columns = (end - first).next_multiple_of(PANEL);
        let against = |left: &[f32], panels: &[f32], result: &mut [f32]| {
            let block = Block {
                rows: count * group,
                columns,
                depth: dim,
                a: left.as_ptr(),
                a_row: padded,
                a_step: 1,
                b: panels[first * dim..].as_ptr(),
                b_panel: PANEL * dim,
                b_step: PANEL,
                c: result.as_mut_ptr(),
                c_row: TILE_KEYS,
                mode: Mode::Store,
            };
            // SAFETY: the tile has these rows and columns, and whole blocks of keys reach beyond `end`.
            unsafe { multiply(self.set, &block) };
        };
        against(tile.queries, &self.matrices.key_panels, tile.scores);
        against(tile.doutputs, &self.matrices.value_panels, tile.dscores);
        for index in 0..count * group {
            let visible = (position + index / group + 1).saturating_sub(first).min(end - first);
            let query_head = self.head * group + index % group;
            let log_sum_exp = self.inputs.log_sum_exp[(row + index / group) * self.heads.query_heads + query_head];
            let range = index * TILE_KEYS..index * TILE_KEYS + columns;
            let (scores, dscores) = (&mut tile.scores[range.clone()], &mut tile.dscores[range]);
            score_gradient(scores, dscores, visible, log_sum_exp, tile.corrections[index]);
        }
    }

    /// The gradients of some rows' queries, keys ascending.
    fn query_gradients(&self, row: usize, position: usize, count: usize, drotated: Shared) {
        let (dim, group, padded) = (self.heads.head_dim, self.heads.group(), self.padded());
        let rows = count * group;
        self.with_tile(rows, rows * padded, |mut tile, dqueries| {
            self.load(&mut tile, row, count);
            let visible = position + count; // keys that the last of these positions sees
            for first in (0..visible).step_by(TILE_KEYS) {
                let end = visible.min(first + TILE_KEYS);
                self.score(&mut tile, row, position, count, first, end);
                let block = Block {
                    rows,
                    columns: padded,
                    depth: end - first,
                    a: tile.dscores.as_ptr(),
                    a_row: TILE_KEYS,
                    a_step: 1,
                    b: self.matrices.key_rows[first * padded..].as_ptr(),
                    b_panel: PANEL,
                    b_step: padded,
                    c: dqueries.as_mut_ptr(),
                    c_row: padded,
                    mode: Mode::Continue,
                };
                // SAFETY: inside the tile, the head's keys and `dqueries`.
                unsafe { multiply(self.set, &block) };
            }
            let scale = 1.0 / (dim as f32).sqrt();
            for (index, dquery) in dqueries.chunks_exact(padded).enumerate() {
                let (token, column) = (row + index / group, (self.head * group + index % group) * dim);
                // SAFETY: these query columns of these rows belong to this piece alone, and lie inside by the caller's assertion.
                let target = unsafe { drotated.slice(token * self.heads.projected_width() + column, dim) };
                scaled_copy(&dquery[..dim], scale, target);
            }
        });
    }

    /// The gradients of the keys and values of a tile's width from `first` on, rows ascending, `positions` at a time.
    fn key_gradients(&self, first: usize, positions: usize, shape: &BlockShape, dblocks: Shared) {
        let (dim, group, padded) = (self.heads.head_dim, self.heads.group(), self.padded());
        let last = self.document.keys.min(first + TILE_KEYS);
        self.with_tile(positions * group, 2 * TILE_KEYS * padded, |mut tile, gradients| {
            let (dkeys, dvalues) = gradients.split_at_mut(TILE_KEYS * padded); // [TILE_KEYS, padded] each
            for slice in &self.document.slices {
                let seeing = slice.first.max(first)..slice.first + slice.length;
                for position in seeing.clone().step_by(positions) {
                    let count = positions.min(seeing.end - position);
                    let (row, end) = (slice.row + position - slice.first, last.min(position + count));
                    self.load(&mut tile, row, count);
                    self.score(&mut tile, row, position, count, first, end);
                    for (weights, vectors, sums) in
                        [(&*tile.dscores, &*tile.queries, &mut *dkeys), (&*tile.scores, &*tile.doutputs, &mut *dvalues)]
                    {
                        let block = Block {
                            rows: end - first,
                            columns: padded,
                            depth: count * group,
                            a: weights.as_ptr(),
                            a_row: 1,
                            a_step: TILE_KEYS,
                            b: vectors.as_ptr(),
                            b_panel: PANEL,
                            b_step: padded,
                            c: sums.as_mut_ptr(),
                            c_row: padded,
                            mode: Mode::Continue,
                        };
                        // SAFETY: inside the tile and the sums, which are as wide as a tile.
                        unsafe { multiply(self.set, &block) };
                    }
                }
            }
            for (part, sums) in [(Part::Keys, dkeys), (Part::Values, dvalues)] {
                let blocks = self.document.table[first / KEYS_PER_BLOCK..].iter();
                for (&block, sums) in blocks.zip(sums.chunks_exact(KEYS_PER_BLOCK * padded)) {
                    let start = block as usize * shape.numbers() + shape.offset(part, self.head);
                    // SAFETY: no other document has this block, no other piece this head of it; it lies inside by the caller's assertion.
                    let target = unsafe { dblocks.slice(start, KEYS_PER_BLOCK * dim) };
                    for (target, sum) in target.chunks_exact_mut(dim).zip(sums.chunks_exact(padded)) {
                        target.copy_from_slice(&sum[..dim]);
                    }
                }
            }
        });
    }
}
