//! Causal grouped-query attention of new rows over growing caches, and its backward.
//!
//! One forward serves training and sampling: training appends whole sequences to empty caches. For each (row, query head) the
//! keys are reduced in segments of fixed length counted from the sequence's start: maximum, exponentials, their sum in lanes
//! by key index, and the weighted values as one chain over the keys, ascending; segments are merged ascending. Keys a row may not
//! see enter these sums as exact zeros, so it does not matter which rows are computed together (FlashAttention's recurrence,
//! Dao et al. 2022, with the order of everything pinned).

use super::kernel::{Block, Mode, PANEL, multiply};
use super::parallel::{Shared, for_each, with_scratch};
use super::simd::{InstructionSet, LANES, dot, exp, fold_lanes, maximum, vectorised};
use crate::device::ops::{Heads, Span};

/// Keys and values of one sequence at one layer.
#[derive(Clone, Debug)]
pub struct KeyValues {
    heads: Vec<HeadKeyValues>,
    length: usize,
}

#[derive(Clone, Debug, Default)]
struct HeadKeyValues {
    /// `[ceil(length / 16), head_dim, 16]`, zero beyond the length
    keys: Vec<f32>,
    /// `[length, head_dim rounded up to 16]`, zero beyond `head_dim`
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

/// Some consecutive query positions of one span, for one key/value head.
#[derive(Clone, Copy)]
struct Piece {
    span: usize,
    head: usize,
    first: usize,
    count: usize,
}

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
    let (width, query_width) = (heads.projected_width(), heads.query_width());
    append_all(rotated, heads, spans, caches);
    let caches: Vec<&KeyValues> = caches.iter().map(|cache| &**cache).collect();
    let rows: usize = spans.iter().map(|span| span.length).sum();
    assert!(rotated.len() >= rows * width && output.len() >= rows * query_width, "a buffer is too short for {rows} rows");
    let mut pieces = Vec::new();
    let mut operations = 0;
    for (index, (span, cache)) in spans.iter().zip(&caches).enumerate() {
        let step = positions_per_piece(cache.length.min(segment), heads.group());
        operations += span.length * cache.length * query_width / 4;
        for head in 0..heads.key_value_heads {
            for first in (0..span.length).step_by(step) {
                pieces.push(Piece { span: index, head, first, count: step.min(span.length - first) });
            }
        }
    }
    let output = Shared::new(output);
    let log_sum_exp = log_sum_exp.map(Shared::new);
    for_each(pieces.len(), operations, |index| {
        let piece = pieces[index];
        attend(set, segment, rotated, heads, spans[piece.span], caches[piece.span], piece, output, log_sum_exp);
    });
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

    /// `P = exp(score - log_sum_exp)` and `dS = P (dP - correction)`, in place of scores and dP; 0 beyond `visible`.
    fn score_gradient(scores: &mut [f32], dscores: &mut [f32], visible: usize, log_sum_exp: f32, correction: f32) {
        for (score, dscore) in scores.iter_mut().zip(dscores.iter_mut()).take(visible) {
            *score = exp(*score - log_sum_exp);
            *dscore = *score * (*dscore - correction);
        }
        scores[visible..].fill(0.0);
        dscores[visible..].fill(0.0);
    }

    fn scaled_copy(from: &[f32], factor: f32, to: &mut [f32]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
    }

    fn row_dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b)
    }
}

#[allow(clippy::too_many_arguments)]
fn attend(
    set: InstructionSet,
    segment: usize,
    rotated: &[f32],
    heads: Heads,
    span: Span,
    cache: &KeyValues,
    piece: Piece,
    output: Shared,
    log_sum_exp: Option<Shared>,
) {
    let (dim, group, width) = (heads.head_dim, heads.group(), heads.projected_width());
    let padded = dim.next_multiple_of(PANEL);
    let rows = piece.count * group;
    let first_position = cache.length - span.length + piece.first;
    let visible_to_last = first_position + piece.count;
    let keys_padded = visible_to_last.min(segment).next_multiple_of(PANEL);
    let head = &cache.heads[piece.head];
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
            let start = (span.start + piece.first + position) * width + piece.head * group * dim;
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
            // SAFETY: the cache holds every panel up to `visible_to_last`, and a segment is a whole number of panels.
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
            // SAFETY: the cache holds `keys` values from `start`, each padded to whole panels.
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
            let token = span.start + piece.first + row / group;
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

/// Backward over whole sequences: one piece per (sequence, key/value head), which alone sums its keys' gradients, queries ascending.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    set: InstructionSet,
    doutput: &[f32],
    rotated: &[f32],
    output: &[f32],
    log_sum_exp: &[f32],
    heads: Heads,
    spans: &[Span],
    drotated: &mut [f32],
) {
    let rows: usize = spans.iter().map(|span| span.length).sum();
    assert!(drotated.len() >= rows * heads.projected_width(), "a buffer is too short for {rows} rows");
    let operations = spans.iter().map(|span| span.length * span.length * heads.query_width()).sum();
    let shared = Shared::new(drotated);
    for_each(spans.len() * heads.key_value_heads, operations, |index| {
        let (span, head) = (spans[index / heads.key_value_heads], index % heads.key_value_heads);
        backward_head(set, doutput, rotated, output, log_sum_exp, heads, span, head, shared);
    });
}

#[allow(clippy::too_many_arguments)]
fn backward_head(
    set: InstructionSet,
    doutput: &[f32],
    rotated: &[f32],
    output: &[f32],
    log_sum_exp: &[f32],
    heads: Heads,
    span: Span,
    head: usize,
    drotated: Shared,
) {
    let (dim, group, width, query_width) = (heads.head_dim, heads.group(), heads.projected_width(), heads.query_width());
    let padded = dim.next_multiple_of(PANEL);
    let keys = span.length;
    let keys_padded = keys.next_multiple_of(PANEL);
    let step = positions_per_piece(keys, group);
    let most_rows = step * group;
    let (query_column, key_column) = (head * group * dim, query_width + head * dim);
    let value_column = key_column + heads.key_value_width();
    let scale = 1.0 / (dim as f32).sqrt();
    with_scratch(keys_padded * (2 * dim + 3 * padded) + most_rows * (3 * padded + 2 * keys_padded), |scratch| {
        let (key_panels, scratch) = scratch.split_at_mut(keys_padded * dim); // [panels, dim, 16]
        let (value_panels, scratch) = scratch.split_at_mut(keys_padded * dim); // [panels, dim, 16]
        let (key_rows, scratch) = scratch.split_at_mut(keys_padded * padded); // [keys, padded]
        let (dkeys, scratch) = scratch.split_at_mut(keys_padded * padded); // [keys, padded]
        let (dvalues, scratch) = scratch.split_at_mut(keys_padded * padded); // [keys, padded]
        let (queries, scratch) = scratch.split_at_mut(most_rows * padded); // [rows, padded], scaled
        let (doutputs, scratch) = scratch.split_at_mut(most_rows * padded); // [rows, padded]
        let (dqueries, scratch) = scratch.split_at_mut(most_rows * padded); // [rows, padded]
        let (scores, dscores) = scratch.split_at_mut(most_rows * keys_padded); // [rows, keys_padded] each
        for buffer in
            [&mut *key_panels, &mut *value_panels, &mut *key_rows, &mut *dkeys, &mut *dvalues, &mut *queries, &mut *doutputs]
        {
            buffer.fill(0.0);
        }
        for key in 0..keys {
            let row = &rotated[(span.start + key) * width..(span.start + key + 1) * width];
            key_rows[key * padded..key * padded + dim].copy_from_slice(&row[key_column..key_column + dim]);
            let panel = key / PANEL * PANEL * dim + key % PANEL;
            for k in 0..dim {
                key_panels[panel + k * PANEL] = row[key_column + k];
                value_panels[panel + k * PANEL] = row[value_column + k];
            }
        }
        for first in (0..keys).step_by(step) {
            let count = step.min(keys - first);
            let rows = count * group;
            let visible = first + count; // keys that the last of these positions sees
            for row in 0..rows {
                let (token, column) = (span.start + first + row / group, query_column + row % group * dim);
                scaled_copy(&rotated[token * width + column..][..dim], scale, &mut queries[row * padded..][..dim]);
                doutputs[row * padded..row * padded + dim].copy_from_slice(&doutput[token * query_width + column..][..dim]);
            }
            let against_panels = |left: &[f32], panels: &[f32], result: &mut [f32]| {
                let block = Block {
                    rows,
                    columns: visible.next_multiple_of(PANEL),
                    depth: dim,
                    a: left.as_ptr(),
                    a_row: padded,
                    a_step: 1,
                    b: panels.as_ptr(),
                    b_panel: PANEL * dim,
                    b_step: PANEL,
                    c: result.as_mut_ptr(),
                    c_row: keys_padded,
                    mode: Mode::Store,
                };
                // SAFETY: `rows <= most_rows` rows and `visible <= keys` columns, inside the scratch parts sized above.
                unsafe { multiply(set, &block) };
            };
            against_panels(queries, key_panels, scores);
            against_panels(doutputs, value_panels, dscores);
            let live = visible.next_multiple_of(PANEL);
            for row in 0..rows {
                let token = span.start + first + row / group;
                let query_head = head * group + row % group;
                let columns = token * query_width + query_head * dim..token * query_width + (query_head + 1) * dim;
                let correction = row_dot(&doutput[columns.clone()], &output[columns]);
                let range = row * keys_padded..row * keys_padded + live;
                score_gradient(
                    &mut scores[range.clone()],
                    &mut dscores[range],
                    first + row / group + 1,
                    log_sum_exp[token * heads.query_heads + query_head],
                    correction,
                );
            }
            let to_queries = Block {
                rows,
                columns: padded,
                depth: visible,
                a: dscores.as_ptr(),
                a_row: keys_padded,
                a_step: 1,
                b: key_rows.as_ptr(),
                b_panel: PANEL,
                b_step: padded,
                c: dqueries.as_mut_ptr(),
                c_row: padded,
                mode: Mode::Store,
            };
            // SAFETY: inside the scratch parts sized above.
            unsafe { multiply(set, &to_queries) };
            for (weights, vectors, sums) in [(&*dscores, &*queries, &mut *dkeys), (&*scores, &*doutputs, &mut *dvalues)] {
                let to_keys = Block {
                    rows: visible,
                    columns: padded,
                    depth: rows,
                    a: weights.as_ptr(),
                    a_row: 1,
                    a_step: keys_padded,
                    b: vectors.as_ptr(),
                    b_panel: PANEL,
                    b_step: padded,
                    c: sums.as_mut_ptr(),
                    c_row: padded,
                    mode: Mode::Continue,
                };
                // SAFETY: inside the scratch parts sized above.
                unsafe { multiply(set, &to_keys) };
            }
            for row in 0..rows {
                let (token, column) = (span.start + first + row / group, query_column + row % group * dim);
                // SAFETY: these query columns of this sequence belong to this piece alone.
                let target = unsafe { drotated.slice(token * width + column, dim) };
                scaled_copy(&dqueries[row * padded..row * padded + dim], scale, target);
            }
        }
        for key in 0..keys {
            let start = (span.start + key) * width;
            // SAFETY: these key and value columns of this sequence belong to this piece alone.
            let (dkey, dvalue) = unsafe { (drotated.slice(start + key_column, dim), drotated.slice(start + value_column, dim)) };
            dkey.copy_from_slice(&dkeys[key * padded..key * padded + dim]);
            dvalue.copy_from_slice(&dvalues[key * padded..key * padded + dim]);
        }
    });
}
