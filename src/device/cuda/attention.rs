//! Attention over paged keys and values: what is new is appended, then long spans go to the forward kernel in tiles of queries, and
//! spans of few rows, as in decoding, to kernels that share a key among the heads of a group. Both give the same bits.

use std::ops::Range;

use super::CudaDevice;
use super::allocator::Purpose;
use super::arguments::{
    Address, AppendKeysValues, AttentionDecode, AttentionForward, AttentionSpan, HeadRange, QUERIES_PER_TILE,
};
use super::buffers::Buffer;
use super::indices::{Table, narrow};
use super::pages::PagedKeyValues;
use crate::device::ops::{Heads, Span};

/// Rows (new rows of a span times heads of a group) that one decode block takes.
const DECODE_ROWS: usize = 16;

/// What the kernels know of the spans of a pass.
struct Plan {
    /// Keys of the span's sequence, the new ones included.
    keys: Vec<usize>,
    spans: Vec<AttentionSpan>,
}

impl Plan {
    /// Spans over `caches` that already hold their keys; `pages` are the caches' page tables, one after another.
    fn new(spans: &[Span], caches: &[&mut PagedKeyValues]) -> (Plan, Vec<Address>) {
        let mut pages = Vec::new();
        let mut plan = Plan { keys: Vec::new(), spans: Vec::new() };
        for (span, cache) in spans.iter().zip(caches) {
            plan.keys.push(cache.length());
            plan.spans.push(kernel_span(span, cache.length() - span.length, pages.len()));
            pages.extend(cache.addresses());
        }
        (plan, pages)
    }

    /// Those of the spans that are (not) for the decode kernels: `(spans, their keys)`.
    fn part(&self, decoded: impl Fn(&AttentionSpan) -> bool) -> (Vec<AttentionSpan>, Vec<usize>) {
        self.spans
            .iter()
            .zip(&self.keys)
            .filter(|(span, _)| span.length > 0 && decoded(span))
            .map(|(span, keys)| (*span, *keys))
            .unzip()
    }
}

pub(super) fn kernel_span(span: &Span, past: usize, page: usize) -> AttentionSpan {
    let [row, length, past, page] = [span.start, span.length, past, page].map(|number| narrow([number])[0]);
    AttentionSpan { row, length, past, page }
}

/// The tiles of each span, ascending.
pub(super) fn tiles(spans: &[AttentionSpan]) -> Vec<AttentionSpan> {
    let cut = |span: &AttentionSpan| {
        let AttentionSpan { row, length, past, page } = *span;
        (0..length).step_by(QUERIES_PER_TILE).map(move |first| AttentionSpan {
            row: row + first,
            length: (length - first).min(QUERIES_PER_TILE as i32),
            past: past + first,
            page,
        })
    };
    spans.iter().flat_map(cut).collect()
}

/// Those with the most keys first, so that the last blocks to start are the shortest.
pub(super) fn longest_first(mut tiles: Vec<AttentionSpan>) -> Vec<AttentionSpan> {
    tiles.sort_by_key(|tile| -tile.past);
    tiles
}

pub(super) fn scale(heads: Heads) -> f32 {
    1.0 / (heads.head_dim as f32).sqrt()
}

pub(super) fn head_range(heads: Heads, range: &Range<usize>) -> HeadRange {
    HeadRange {
        query_heads: heads.query_heads as i32,
        key_value_heads: heads.key_value_heads as i32,
        first: range.start as i32,
        count: range.len() as i32,
    }
}

fn total_rows(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.start + span.length).max().unwrap_or(0)
}

impl CudaDevice {
    pub(super) fn attend(
        &self,
        rotated: &Buffer,
        heads: Heads,
        spans: &[Span],
        caches: &mut [&mut PagedKeyValues],
        output: &mut Buffer,
        log_sum_exp: Option<&mut Buffer>,
    ) {
        let rows = total_rows(spans);
        let rotated = rotated.bf16(rows * heads.projected_width());
        let output = output.bf16(rows * heads.query_width());
        let log_sum_exp = log_sum_exp.map(|buffer| buffer.f32(rows * heads.query_heads));
        caches.iter_mut().zip(spans).for_each(|(cache, span)| cache.grow(span.length));
        let (plan, pages) = Plan::new(spans, caches);
        let pages = self.tables().upload(Table::Pages, &pages);
        self.append(rotated, heads, spans, &plan, pages);
        // Only the forward kernel writes the log-sum-exp that a backward wants.
        let decodes = |span: &AttentionSpan| log_sum_exp.is_none() && span.length as usize * heads.group() <= DECODE_ROWS;
        let (decoded, keys) = plan.part(decodes);
        self.decode(rotated, heads, &decoded, &keys, pages, output);
        let (tiled, _) = plan.part(|span| !decodes(span));
        self.forward(rotated, heads, &tiled, pages, output, log_sum_exp.unwrap_or(0));
    }

    fn append(&self, rotated: Address, heads: Heads, spans: &[Span], plan: &Plan, pages: Address) {
        let rows = total_rows(spans);
        let mut span_of_row = vec![0i32; rows];
        for (index, span) in spans.iter().enumerate() {
            span_of_row[span.start..span.start + span.length].fill(index as i32);
        }
        let arguments = AppendKeysValues {
            rotated,
            spans: self.tables().upload(Table::AppendedSpans, &plan.spans),
            span_of_row: self.tables().upload(Table::SpanOfRow, &span_of_row),
            pages,
            rows: rows as i64,
            query_heads: heads.query_heads as i32,
            key_value_heads: heads.key_value_heads as i32,
            head_dim: heads.head_dim as i32,
            reserved: 0,
        };
        self.kernels().launch_striding("append_keys_values", rows * heads.key_value_width() / 4, &arguments);
    }

    fn forward(
        &self,
        rotated: Address,
        heads: Heads,
        spans: &[AttentionSpan],
        pages: Address,
        output: Address,
        log_sum_exp: Address,
    ) {
        let tiles = longest_first(tiles(spans));
        let arguments = AttentionForward {
            rotated,
            tiles: self.tables().upload(Table::ForwardTiles, &tiles),
            blocks: 0, // the pages of a cache have addresses of their own
            pages,
            output,
            log_sum_exp,
            segment: self.segment() as i64,
            heads: head_range(heads, &(0..heads.key_value_heads)),
            scale: scale(heads),
            reserved: 0,
        };
        let kernel = format!("attention_forward_d{}", heads.head_dim);
        self.kernels().launch(&kernel, [tiles.len(), heads.query_heads, 1], &arguments);
    }

    fn decode(&self, rotated: Address, heads: Heads, spans: &[AttentionSpan], keys: &[usize], pages: Address, output: Address) {
        if spans.is_empty() {
            return;
        }
        let segments = keys.iter().map(|keys| keys.div_ceil(self.segment())).max().unwrap_or(0);
        let floats = spans.len() * heads.key_value_heads * segments * DECODE_ROWS * (heads.head_dim + 2);
        let partial = self.allocate(Purpose::Workspace, floats * size_of::<f32>());
        let arguments = AttentionDecode {
            rotated,
            spans: self.tables().upload(Table::DecodeSpans, spans),
            pages,
            partial: partial.address(),
            output,
            segment: self.segment() as i64,
            span_count: spans.len() as i32,
            segments: segments as i32,
            query_heads: heads.query_heads as i32,
            key_value_heads: heads.key_value_heads as i32,
            scale: scale(heads),
            reserved: 0,
        };
        let grid = [spans.len(), heads.key_value_heads, segments];
        self.kernels().launch(&format!("attention_decode_d{}", heads.head_dim), grid, &arguments);
        let warps: usize = spans.len() * DECODE_ROWS * heads.key_value_heads;
        self.kernels().launch_striding(&format!("attention_merge_d{}", heads.head_dim), warps * 32, &arguments);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_span_and_the_longest_come_first() {
        let span = |row, length, past| AttentionSpan { row, length, past, page: 0 };
        let tiles = longest_first(tiles(&[span(0, 129, 0), span(129, 0, 5), span(129, 3, 1000)]));
        assert_eq!(tiles, [span(129, 3, 1000), span(128, 1, 128), span(64, 64, 64), span(0, 64, 0)]);
    }
}
