//! Causal grouped-query attention of rows over the keys of their sequences: in growing caches, or in blocks.
//!
//! One forward serves training and sampling: a head's keys and values are brought into one layout. For each (row, query head) the
//! keys are reduced in segments of fixed length counted from the sequence's start: maximum, exponentials, their sum in lanes
//! by key index, and the weighted values as one chain over the keys, ascending; segments are merged ascending. Keys a row may not
//! see enter these sums as exact zeros, so it does not matter which rows are computed together (FlashAttention's recurrence,
//! Dao et al. 2022, with the order of everything pinned).

use super::kernel::{Block, Mode, PANEL, multiply};
use super::key_blocks::{self, BlockShape, Part};
use super::parallel::{Shared, for_each, with_scratch};
use super::simd::{InstructionSet, LANES, exp, fold_lanes, maximum, vectorised};
use crate::device::attention_plan::AttentionPlan;
use crate::device::ops::{Heads, Span};

/// Keys and values of one sequence at one layer.
#[derive(Clone, Debug)]
pub struct KeyValues {
    heads: Vec<HeadKeyValues>,
    length: usize,
}

#[derive(Clone, Debug, Default)]
struct HeadKeyValues {
    /// `[at least ceil(length / 16), head_dim, 16]`, zero beyond the length
    keys: Vec<f32>,
    /// `[at least length, head_dim rounded up to 16]`, zero beyond `head_dim`
    values: Vec<f32>,
}

impl KeyValues {
    pub fn new(heads: Heads) -> KeyValues {
        KeyValues { heads: vec![HeadKeyValues::default(); heads.key_value_heads], length: 0 }
    }

    pub fn clear(&mut self) {
        self.length = 0;
        for head in &mut self.heads {
            head.keys.clear();
            head.values.clear();
        }
    }

    /// Appends the keys and values of `rows` projected rows that start at `rotated`.
    fn append(&mut self, rotated: &[f32], heads: Heads, rows: usize) {
        let (dim, width) = (heads.head_dim, heads.projected_width());
        let padded = dim.next_multiple_of(PANEL);
        let total = self.length + rows;
        for (index, head) in self.heads.iter_mut().enumerate() {
            head.keys.resize(total.div_ceil(PANEL) * PANEL * dim, 0.0);
            head.values.resize(total * padded, 0.0);
            let key_column = heads.query_width() + index * dim;
            let value_column = key_column + heads.key_value_width();
            for (row, position) in rotated.chunks_exact(width).zip(self.length..total) {
                let panel = &mut head.keys[position / PANEL * PANEL * dim..][..PANEL * dim];
                for (k, &key) in row[key_column..key_column + dim].iter().enumerate() {
                    panel[k * PANEL + position % PANEL] = key;
                }
                head.values[position * padded..position * padded + dim].copy_from_slice(&row[value_column..value_column + dim]);
            }
        }
        self.length = total;
    }
}

/// Query rows (positions times heads of the group) computed together over `keys` keys: as many as keep scores in the second-level cache.
fn positions_per_piece(keys: usize, group: usize) -> usize {
    ((48 * 1024 / keys.max(1)).clamp(6, 96) / group).max(1)
}

/// Consecutive rows of one sequence, with the query heads of one key/value head.
#[derive(Clone, Copy)]
struct Piece<'a> {
    keys: &'a HeadKeyValues,
    /// Key/value head.
    head: usize,
    /// First row in the pass.
    row: usize,
    /// Its position in the sequence.
    position: usize,
    count: usize,
}

/// Appends the keys and values of `spans[i]`'s rows to `caches[i]`, then attends.
#[allow(clippy::too_many_arguments)]
pub fn forward(
    set: InstructionSet,
    segment: usize,
    rotated: &[f32],
    heads: Heads,
    spans: &[Span],
    caches: &mut [&mut KeyValues],
    output: &mut [f32],
    log_sum_exp: Option<&mut [f32]>,
) {
    append_all(rotated, heads, spans, caches);
    let mut pieces = Vec::new();
    let mut operations = 0;
    for (span, cache) in spans.iter().zip(caches.iter()) {
        let step = positions_per_piece(cache.length.min(segment), heads.group());
        operations += span.length * cache.length * heads.query_width() / 4;
        for (head, keys) in cache.heads.iter().enumerate() {
            push_pieces(&mut pieces, step, span.length, |first, count| {
                let position = cache.length - span.length + first;
                Piece { keys, head, row: span.start + first, position, count }
            });
        }
    }
    let rows = spans.iter().map(|span| span.length).sum();
    attend_all(set, segment, rotated, heads, rows, &pieces, operations, output, log_sum_exp);
}

/// Attends the rows of a training pass to keys and values in blocks, for the key/value heads of `shape`.
#[allow(clippy::too_many_arguments)]
pub fn forward_blocks(
    set: InstructionSet,
    segment: usize,
    rotated: &[f32],
    shape: &BlockShape,
    plan: &AttentionPlan,
    blocks: &[f32],
    output: &mut [f32],
    log_sum_exp: &mut [f32],
) {
    let (heads, documents) = (shape.heads, key_blocks::documents(plan));
    let brought = key_blocks::bring(blocks, shape, &documents, |head| HeadKeyValues {
        keys: head.panels(Part::Keys),
        values: head.rows(Part::Values),
    });
    let mut pieces = Vec::new();
    let mut operations = 0;
    for (document, brought) in documents.iter().zip(brought.chunks_exact(shape.range.len())) {
        let step = positions_per_piece(document.keys.min(segment), heads.group());
        for slice in &document.slices {
            operations += slice.length * (slice.first + slice.length) * shape.range.len() * heads.group() * heads.head_dim / 4;
            for (head, keys) in shape.range.clone().zip(brought) {
                push_pieces(&mut pieces, step, slice.length, |first, count| Piece {
                    keys,
                    head,
                    row: slice.row + first,
                    position: slice.first + first,
                    count,
                });
            }
        }
    }
    attend_all(set, segment, rotated, heads, plan.rows(), &pieces, operations, output, Some(log_sum_exp));
}

fn push_pieces<'a>(pieces: &mut Vec<Piece<'a>>, step: usize, length: usize, piece: impl Fn(usize, usize) -> Piece<'a>) {
    pieces.extend((0..length).step_by(step).map(|first| piece(first, step.min(length - first))));
}

#[allow(clippy::too_many_arguments)]
fn attend_all(
    set: InstructionSet,
    segment: usize,
    rotated: &[f32],
    heads: Heads,
    rows: usize,
    pieces: &[Piece<'_>],
    operations: usize,
    output: &mut [f32],
    log_sum_exp: Option<&mut [f32]>,
) {
    let long_enough = rotated.len() >= rows * heads.projected_width()
        && output.len() >= rows * heads.query_width()
        && log_sum_exp.as_ref().is_none_or(|log_sum_exp| log_sum_exp.len() >= rows * heads.query_heads);
    assert!(long_enough, "a buffer is too short for {rows} rows");
    let output = Shared::new(output);
    let log_sum_exp = log_sum_exp.map(Shared::new);
    for_each(pieces.len(), operations, |index| attend(set, segment, rotated, heads, pieces[index], output, log_sum_exp));
}

fn append_all(rotated: &[f32], heads: Heads, spans: &[Span], caches: &mut [&mut KeyValues]) {
    use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, IntoParallelRefMutIterator, ParallelIterator};
    let width = heads.projected_width();
    let append = |(cache, span): (&mut &mut KeyValues, &Span)| {
        cache.append(&rotated[span.start * width..(span.start + span.length) * width], heads, span.length);
    };
    let rows: usize = spans.iter().map(|span| span.length).sum();
    if rows * heads.key_value_width() < 32 * 1024 {
        caches.iter_mut().zip(spans).for_each(append);
    } else {
        caches.par_iter_mut().zip(spans.par_iter()).for_each(append);
    }
}

vectorised! {
    /// Turns the first `visible` scores into `exp(score - maximum)`, all later ones into 0; gives the maximum and the sum.
    fn exponentials(scores: &mut [f32], visible: usize) -> (f32, f32) {
        let largest = maximum(&scores[..visible]);
        let (live, hidden) = scores.split_at_mut(visible.next_multiple_of(LANES).min(scores.len()));
        live[visible..].fill(f32::NEG_INFINITY);
        hidden.fill(0.0);
        let mut lanes = [0.0f32; LANES];
        for block in live.as_chunks_mut::<LANES>().0 {
            for lane in 0..LANES {
                block[lane] = exp(block[lane] - largest);
                lanes[lane] += block[lane];
            }
        }
        (largest, fold_lanes(lanes))
    }

    pub fn scaled_copy(from: &[f32], factor: f32, to: &mut [f32]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn attend(
    set: InstructionSet,
    segment: usize,
    rotated: &[f32],
    heads: Heads,
    piece: Piece<'_>,
    output: Shared,
    log_sum_exp: Option<Shared>,
) {
    let (dim, group, width) = (heads.head_dim, heads.group(), heads.projected_width());
    let padded = dim.next_multiple_of(PANEL);
    let rows = piece.count * group;
    let (first_position, head) = (piece.position, piece.keys);
    let visible_to_last = first_position + piece.count;
    let keys_padded = visible_to_last.min(segment).next_multiple_of(PANEL);
    let scale = 1.0 / (dim as f32).sqrt();
    with_scratch(rows * (dim + keys_padded + 2 * padded + 4), |scratch| {
        let (queries, scratch) = scratch.split_at_mut(rows * dim);
        let (scores, scratch) = scratch.split_at_mut(rows * keys_padded);
        let (partial, scratch) = scratch.split_at_mut(rows * padded);
        let (sum_of_values, scratch) = scratch.split_at_mut(rows * padded);
        let (maxima, scratch) = scratch.split_at_mut(rows);
        let (sums, scratch) = scratch.split_at_mut(rows);
        let (segment_maxima, segment_sums) = scratch.split_at_mut(rows);
        for position in 0..piece.count {
            let start = (piece.row + position) * width + piece.head * group * dim;
            scaled_copy(&rotated[start..start + group * dim], scale, &mut queries[position * group * dim..][..group * dim]);
        }
        for start in (0..visible_to_last).step_by(segment) {
            let keys = segment.min(visible_to_last - start);
            let products = Block {
                rows,
                columns: keys.next_multiple_of(PANEL),
                depth: dim,
                a: queries.as_ptr(),
                a_row: dim,
                a_step: 1,
                b: head.keys[start * dim..].as_ptr(),
                b_panel: PANEL * dim,
                b_step: PANEL,
                c: scores.as_mut_ptr(),
                c_row: keys_padded,
                mode: Mode::Store,
            };
            // SAFETY: `keys` holds every panel up to `visible_to_last`, and a segment is a whole number of panels.
            unsafe { multiply(set, &products) };
            for row in 0..rows {
                let visible = (first_position + row / group + 1).saturating_sub(start).min(keys);
                let scores = &mut scores[row * keys_padded..(row + 1) * keys_padded];
                (segment_maxima[row], segment_sums[row]) = if visible == 0 {
                    scores.fill(0.0);
                    (f32::NEG_INFINITY, 0.0)
                } else {
                    exponentials(scores, visible)
                };
            }
            let weighted = Block {
                rows,
                columns: padded,
                depth: keys,
                a: scores.as_ptr(),
                a_row: keys_padded,
                a_step: 1,
                b: head.values[start * padded..].as_ptr(),
                b_panel: PANEL,
                b_step: padded,
                c: if start == 0 { sum_of_values.as_mut_ptr() } else { partial.as_mut_ptr() },
                c_row: padded,
                mode: Mode::Store,
            };
            // SAFETY: the head holds `keys` values from `start`, each padded to whole panels.
            unsafe { multiply(set, &weighted) };
            for row in 0..rows {
                let (largest, sum) = (segment_maxima[row], segment_sums[row]);
                if start == 0 {
                    (maxima[row], sums[row]) = (largest, sum);
                } else if largest > f32::NEG_INFINITY {
                    let merged = if largest > maxima[row] { largest } else { maxima[row] };
                    let (old, new) = (exp(maxima[row] - merged), exp(largest - merged));
                    (maxima[row], sums[row]) = (merged, sums[row].mul_add(old, sum * new));
                    let columns = row * padded..(row + 1) * padded;
                    for (total, &value) in sum_of_values[columns.clone()].iter_mut().zip(&partial[columns]) {
                        *total = total.mul_add(old, value * new);
                    }
                }
            }
        }
        for row in 0..rows {
            let token = piece.row + row / group;
            let query_head = piece.head * group + row % group;
            // SAFETY: this (token, query head) belongs to this piece alone; rows lie inside output by the caller's assertion.
            let target = unsafe { output.slice(token * heads.query_width() + query_head * dim, dim) };
            scaled_copy(&sum_of_values[row * padded..row * padded + dim], 1.0 / sums[row], target);
            if let Some(log_sum_exp) = log_sum_exp {
                // SAFETY: as above, one element per (token, query head).
                unsafe { log_sum_exp.slice(token * heads.query_heads + query_head, 1)[0] = maxima[row] + sums[row].ln() };
            }
        }
    });
}
