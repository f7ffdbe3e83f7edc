//! Attention over paged keys and values: what is new is appended, then long spans go to the forward kernel in tiles of queries, and
//! spans of few rows, as in decoding, to kernels that share a key among the heads of a group. Both give the same bits.

use super::CudaDevice;
use super::allocator::Purpose;
use super::arguments::{
    Address, AppendKeysValues, AttentionBackward, AttentionDecode, AttentionForward, AttentionSpan, AttentionTile,
    QUERIES_PER_TILE,
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

fn kernel_span(span: &Span, past: usize, page: usize) -> AttentionSpan {
    let [row, length, past, page] = [span.start, span.length, past, page].map(|number| narrow([number])[0]);
    AttentionSpan { row, length, past, page }
}

/// Tiles of all spans, those with the most work first, so that the last blocks to start are the shortest. `work(span, first)`.
fn tiles(spans: &[AttentionSpan], work: impl Fn(&AttentionSpan, i32) -> i64) -> Vec<AttentionTile> {
    let mut tiles = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        for first in (0..span.length).step_by(QUERIES_PER_TILE) {
            tiles.push((-work(span, first), AttentionTile { span: index as i32, first }));
        }
    }
    tiles.sort_by_key(|&(work, _)| work);
    tiles.into_iter().map(|(_, tile)| tile).collect()
}

fn scale(heads: Heads) -> f32 {
    1.0 / (heads.head_dim as f32).sqrt()
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
        let tiles = tiles(spans, |span, first| (span.past + first) as i64);
        let arguments = AttentionForward {
            rotated,
            spans: self.tables().upload(Table::ForwardSpans, spans),
            tiles: self.tables().upload(Table::ForwardTiles, &tiles),
            pages,
            output,
            log_sum_exp,
            segment: self.segment() as i64,
            query_heads: heads.query_heads as i32,
            key_value_heads: heads.key_value_heads as i32,
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

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend_backward(
        &self,
        doutput: &Buffer,
        rotated: &Buffer,
        output: &Buffer,
        log_sum_exp: &Buffer,
        heads: Heads,
        spans: &[Span],
        drotated: &mut Buffer,
    ) {
        let rows = total_rows(spans);
        let spans: Vec<AttentionSpan> = spans.iter().map(|span| kernel_span(span, 0, 0)).collect();
        // A tile of keys is seen by the queries from its first on, a tile of queries sees the keys up to its last.
        let key_tiles = tiles(&spans, |span, first| (span.length - first) as i64);
        let query_tiles = tiles(&spans, |_, first| first as i64);
        let delta = self.allocate(Purpose::Workspace, rows * heads.query_heads * size_of::<f32>());
        let of_keys = AttentionBackward {
            doutput: doutput.bf16(rows * heads.query_width()),
            rotated: rotated.bf16(rows * heads.projected_width()),
            output: output.bf16(rows * heads.query_width()),
            log_sum_exp: log_sum_exp.f32(rows * heads.query_heads),
            delta: delta.address(),
            spans: self.tables().upload(Table::BackwardSpans, &spans),
            tiles: self.tables().upload(Table::KeyTiles, &key_tiles),
            drotated: drotated.bf16(rows * heads.projected_width()),
            rows: rows as i64,
            query_heads: heads.query_heads as i32,
            key_value_heads: heads.key_value_heads as i32,
            scale: scale(heads),
            reserved: 0,
        };
        let of_queries = AttentionBackward { tiles: self.tables().upload(Table::QueryTiles, &query_tiles), ..of_keys };
        let dim = heads.head_dim;
        let kernels = self.kernels();
        kernels.launch_striding(&format!("attention_delta_d{dim}"), rows * heads.query_heads * 32, &of_keys);
        kernels.launch(&format!("attention_backward_keys_d{dim}"), [key_tiles.len(), heads.key_value_heads, 1], &of_keys);
        kernels.launch(&format!("attention_backward_queries_d{dim}"), [query_tiles.len(), heads.query_heads, 1], &of_queries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_span_and_the_longest_come_first() {
        let span = |row, length, past| AttentionSpan { row, length, past, page: 0 };
        let tiles = tiles(&[span(0, 129, 0), span(129, 0, 5), span(129, 3, 1000)], |span, first| (span.past + first) as i64);
        let found: Vec<(i32, i32)> = tiles.iter().map(|tile| (tile.span, tile.first)).collect();
        assert_eq!(found, [(2, 0), (0, 128), (0, 64), (0, 0)]);
    }
}
