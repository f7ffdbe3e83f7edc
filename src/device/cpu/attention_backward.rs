//! Backward of attention over blocks of keys, as two passes that each compute the scores again: one sums the gradients of queries,
//! the other those of keys and values. So every sum has one owner, which walks its terms in ascending order, and one long
//! document keeps all threads busy.

use super::attention::scaled_copy;
use super::kernel::{Block, Mode, PANEL, multiply};
use super::key_blocks::{self, BlockShape, Document, Part, QueryRows};
use super::parallel::{Shared, for_each, for_row_blocks, with_scratch};
use super::simd::{InstructionSet, dot, exp, vectorised};
use crate::device::CpuDevice;
use crate::device::attention_plan::{AttentionPlan, KEYS_PER_BLOCK, QuerySlice};
use crate::device::ops::{AttendedRows, Heads};

/// Keys of a tile of scores: whole blocks.
const TILE_KEYS: usize = 4 * KEYS_PER_BLOCK;

/// Rows of a tile (positions times heads of the group), unless a group has more heads: two tiles fit into a second-level cache.
const TILE_ROWS: usize = 96;

vectorised! {
    /// `P = exp(score - log_sum_exp)` and `dS = P (dP - delta)`, in place of scores and dP; 0 beyond `visible`.
    fn score_gradient(scores: &mut [f32], dscores: &mut [f32], visible: usize, log_sum_exp: f32, delta: f32) {
        for (score, dscore) in scores.iter_mut().zip(dscores.iter_mut()).take(visible) {
            *score = exp(*score - log_sum_exp);
            *dscore = *score * (*dscore - delta);
        }
        scores[visible..].fill(0.0);
        dscores[visible..].fill(0.0);
    }

    fn row_dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b)
    }
}

/// `delta[row, head]`, the sum over the head's columns of `doutput * output`.
pub fn delta(doutput: &[f32], output: &[f32], heads: Heads, rows: usize, delta: &mut [f32]) {
    let (width, dim) = (heads.query_width(), heads.head_dim);
    let (doutput, output) = (&doutput[..rows * width], &output[..rows * width]);
    for_row_blocks(rows, 2 * width, [(delta, heads.query_heads)], |first, count, [delta]| {
        let here = first * width..(first + count) * width;
        let (doutput, output) = (doutput[here.clone()].chunks_exact(dim), output[here].chunks_exact(dim));
        for ((delta, doutput), output) in delta.iter_mut().zip(doutput).zip(output) {
            *delta = row_dot(doutput, output);
        }
    });
}

/// A head's keys and values as the products want them.
struct Matrices {
    key_panels: Vec<f32>,   // [keys / 16, dim, 16]
    value_panels: Vec<f32>, // [keys / 16, dim, 16]
    key_rows: Vec<f32>,     // [keys, padded]
}

/// Overwrites the query, key and value columns of `shape`'s heads in `drotated`. `exchanged` are the queries of shared documents.
pub fn backward(
    set: InstructionSet,
    rows: AttendedRows<'_, CpuDevice>,
    shape: &BlockShape,
    plan: &AttentionPlan,
    blocks: &[f32],
    exchanged: &[f32],
    drotated: &mut [f32],
) {
    let heads = shape.heads;
    let of_pass = QueryRows::of_pass(rows, shape, plan.rows());
    let exchanged = QueryRows::exchanged(exchanged, shape);
    assert!(drotated.len() >= plan.rows() * heads.projected_width(), "a buffer is too short for {} rows", plan.rows());
    let documents = key_blocks::documents(plan);
    let matrices = key_blocks::bring(blocks, shape, &documents, |head| Matrices {
        key_panels: head.panels(Part::Keys),
        value_panels: head.panels(Part::Values),
        key_rows: head.rows(Part::Keys),
    });
    let seeing: Vec<Seeing<'_>> = documents.iter().map(|document| Seeing::new(document, plan, of_pass, exchanged)).collect();
    let of_documents = documents.iter().zip(&seeing).zip(matrices.chunks_exact(shape.range.len()));
    let every_head: Vec<Head<'_>> = of_documents
        .flat_map(|((document, seeing), matrices)| {
            let heads = shape.range.clone().zip(matrices);
            heads.map(move |(head, matrices)| Head { set, shape, head, document, seeing, matrices })
        })
        .collect();
    let positions = (TILE_ROWS / heads.group()).max(1);
    let mut queries = Vec::new(); // (head, first row, its position, positions)
    let mut keys = Vec::new(); // (head, slice, the first of its keys)
    let mut operations = 0;
    for head in &every_head {
        for &slice in &head.document.slices {
            operations += slice.length * (slice.first + slice.length) * heads.group() * heads.head_dim;
            let firsts = (0..slice.length).step_by(positions);
            queries
                .extend(firsts.map(|first| (head, slice.row + first, slice.first + first, positions.min(slice.length - first))));
            keys.extend((0..slice.length).step_by(TILE_KEYS).map(|first| (head, slice, first)));
        }
    }
    let drotated = Shared::new(drotated);
    for_each(queries.len(), operations, |index| {
        let (head, row, position, count) = queries[index];
        head.query_gradients(of_pass, row, position, count, drotated);
    });
    for_each(keys.len(), operations, |index| {
        let (head, slice, first) = keys[index];
        head.key_gradients(slice, first, positions, drotated);
    });
}

/// One key/value head of one document.
struct Head<'a> {
    set: InstructionSet,
    shape: &'a BlockShape,
    head: usize,
    document: &'a Document<'a>,
    seeing: &'a Seeing<'a>,
    matrices: &'a Matrices,
}

/// All queries of a document, whoever computed them, ascending.
struct Seeing<'a> {
    rows: QueryRows<'a>,
    slices: &'a [QuerySlice],
}

impl<'a> Seeing<'a> {
    fn new(document: &'a Document<'_>, plan: &'a AttentionPlan, of_pass: QueryRows<'a>, exchanged: QueryRows<'a>) -> Self {
        match plan.queries_of(document.number) {
            [] => Seeing { rows: of_pass, slices: &document.slices },
            shared => Seeing { rows: exchanged, slices: shared },
        }
    }
}

/// Scratch of one tile.
struct Tile<'a> {
    queries: &'a mut [f32],      // [rows, padded], scaled, zero beyond `dim`
    doutputs: &'a mut [f32],     // [rows, padded], zero beyond `dim`
    scores: &'a mut [f32],       // [rows, TILE_KEYS], then their exponentials
    dscores: &'a mut [f32],      // [rows, TILE_KEYS]
    log_sum_exps: &'a mut [f32], // [rows]
    deltas: &'a mut [f32],       // [rows]
}

impl Head<'_> {
    fn heads(&self) -> Heads {
        self.shape.heads
    }

    fn padded(&self) -> usize {
        self.heads().head_dim.next_multiple_of(PANEL)
    }

    /// Lends a tile of `rows` rows and `more` numbers of scratch, all zero.
    fn with_tile(&self, rows: usize, more: usize, work: impl FnOnce(Tile<'_>, &mut [f32])) {
        let padded = self.padded();
        with_scratch(more + rows * (2 * padded + 2 * TILE_KEYS + 2), |scratch| {
            let (more, scratch) = scratch.split_at_mut(more);
            let (queries, scratch) = scratch.split_at_mut(rows * padded);
            let (doutputs, scratch) = scratch.split_at_mut(rows * padded);
            let (scores, scratch) = scratch.split_at_mut(rows * TILE_KEYS);
            let (dscores, scratch) = scratch.split_at_mut(rows * TILE_KEYS);
            let (log_sum_exps, deltas) = scratch.split_at_mut(rows);
            for buffer in [&mut *more, &mut *queries, &mut *doutputs] {
                buffer.fill(0.0);
            }
            work(Tile { queries, doutputs, scores, dscores, log_sum_exps, deltas }, more);
        });
    }

    /// Brings `count` positions from `row` on into the tile.
    fn load(&self, tile: &mut Tile<'_>, source: QueryRows<'_>, row: usize, count: usize) {
        let (dim, group, padded) = (self.heads().head_dim, self.heads().group(), self.padded());
        let scale = 1.0 / (dim as f32).sqrt();
        let first_head = (self.head - self.shape.range.start) * group;
        for index in 0..count * group {
            let (row, head) = (row + index / group, first_head + index % group);
            let query = &source.queries[row * source.query_pitch + head * dim..][..dim];
            scaled_copy(query, scale, &mut tile.queries[index * padded..][..dim]);
            let doutput = &source.doutputs[row * source.doutput_pitch + head * dim..][..dim];
            tile.doutputs[index * padded..][..dim].copy_from_slice(doutput);
            tile.log_sum_exps[index] = source.log_sum_exps[row * source.statistic_pitch + head];
            tile.deltas[index] = source.deltas[row * source.statistic_pitch + head];
        }
    }

    /// Turns the tile's `scores` into probabilities and its `dscores` into their gradients, between `count` positions from `position` on
    /// and the keys `first..end`.
    fn score(&self, tile: &mut Tile<'_>, position: usize, count: usize, first: usize, end: usize) {
        let (dim, group, padded) = (self.heads().head_dim, self.heads().group(), self.padded());
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
            let range = index * TILE_KEYS..index * TILE_KEYS + columns;
            let (scores, dscores) = (&mut tile.scores[range.clone()], &mut tile.dscores[range]);
            score_gradient(scores, dscores, visible, tile.log_sum_exps[index], tile.deltas[index]);
        }
    }

    /// The gradients of some rows' queries, keys ascending.
    fn query_gradients(&self, source: QueryRows<'_>, row: usize, position: usize, count: usize, drotated: Shared) {
        let (dim, group, padded) = (self.heads().head_dim, self.heads().group(), self.padded());
        let rows = count * group;
        self.with_tile(rows, rows * padded, |mut tile, dqueries| {
            self.load(&mut tile, source, row, count);
            let visible = position + count; // keys that the last of these positions sees
            for first in (0..visible).step_by(TILE_KEYS) {
                let end = visible.min(first + TILE_KEYS);
                self.score(&mut tile, position, count, first, end);
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
                let target = unsafe { drotated.slice(token * self.heads().projected_width() + column, dim) };
                scaled_copy(&dquery[..dim], scale, target);
            }
        });
    }

    /// The gradients of the keys and values of `slice` from its key `offset` on, a tile's width of them: over all queries of the document,
    /// ascending, `positions` at a time.
    fn key_gradients(&self, slice: QuerySlice, offset: usize, positions: usize, drotated: Shared) {
        let (dim, group, padded) = (self.heads().head_dim, self.heads().group(), self.padded());
        let (first, last) = (slice.first + offset, slice.first + slice.length.min(offset + TILE_KEYS));
        self.with_tile(positions * group, 2 * TILE_KEYS * padded, |mut tile, gradients| {
            let (dkeys, dvalues) = gradients.split_at_mut(TILE_KEYS * padded); // [TILE_KEYS, padded] each
            for queries in self.seeing.slices {
                let here = queries.first.max(first)..queries.first + queries.length;
                for position in here.clone().step_by(positions) {
                    let count = positions.min(here.end - position);
                    let end = last.min(position + count);
                    self.load(&mut tile, self.seeing.rows, queries.row + position - queries.first, count);
                    self.score(&mut tile, position, count, first, end);
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
                let columns = self.shape.columns(part, self.head);
                for (index, sum) in sums.chunks_exact(padded).take(last - first).enumerate() {
                    let start = (slice.row + offset + index) * self.heads().projected_width() + columns.start;
                    // SAFETY: these key or value columns of these rows belong to this piece alone, and lie inside by the caller's assertion.
                    unsafe { drotated.slice(start, dim) }.copy_from_slice(&sum[..dim]);
                }
            }
        });
    }
}
