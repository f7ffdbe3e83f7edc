//! Attention of training passes over blocks of keys: the forward kernel of paged caches with a block as a page, and the backward.

use std::cmp::Reverse;
use std::ops::Range;

use super::CudaDevice;
use super::arguments::{
    Address, AttentionBackwardKeys, AttentionBackwardQueries, AttentionDelta, AttentionForward, AttentionKeys, AttentionSpan,
    KEYS_PER_PAGE, KeyBlockRows, QueryRows, WriteSharedQueries,
};
use super::attention::{head_range, kernel_span, longest_first, scale, tiles};
use super::buffers::Buffer;
use super::indices::{Table, narrow};
use crate::device::attention_plan::{AttentionPlan, KEYS_PER_BLOCK, QuerySlice};
use crate::device::ops::{AttendedRows, Heads, Span};

// A block is a page, and a tile of queries has the rows of one block.
const _: () = assert!(KEYS_PER_BLOCK == KEYS_PER_PAGE);

/// Numbers of all blocks of a plan.
fn numbers(plan: &AttentionPlan, heads: Heads, range: &Range<usize>) -> usize {
    plan.blocks * AttentionPlan::block_numbers(range.len(), heads.head_dim)
}

/// Where the page table of each document starts when they follow each other.
fn table_starts(plan: &AttentionPlan) -> Vec<usize> {
    let start = |at: &mut usize, table: &Vec<u32>| {
        let start = *at;
        *at += table.len();
        Some(start)
    };
    plan.tables.iter().scan(0, start).collect()
}

/// The tiles of these slices, in their order; `starts` are those of the page tables.
fn slice_tiles(slices: &[QuerySlice], starts: &[usize]) -> Vec<AttentionSpan> {
    let span = |slice: &QuerySlice| {
        assert!(slice.first.is_multiple_of(KEYS_PER_BLOCK), "a slice starts at {}, inside a block", slice.first);
        kernel_span(&Span { start: slice.row, length: slice.length }, slice.first, starts[slice.document])
    };
    tiles(&slices.iter().map(span).collect::<Vec<_>>())
}

/// The blocks of the keys of `here`, slices of the pass, each with the tiles that see any of them, those with the most tiles first; and
/// the tiles of `queries`, all slices of the same documents, ascending by document and position.
fn keys_and_tiles(plan: &AttentionPlan, here: &[QuerySlice], queries: &[QuerySlice]) -> (Vec<AttentionKeys>, Vec<AttentionSpan>) {
    let (starts, mut tiles, mut of_document) = (table_starts(plan), Vec::new(), vec![0..0; plan.tables.len()]);
    for slices in queries.chunk_by(|a, b| a.document == b.document) {
        let start = tiles.len();
        tiles.extend(slice_tiles(slices, &starts));
        of_document[slices[0].document] = start..tiles.len();
    }
    let mut keys = Vec::new();
    for &QuerySlice { row, length, document, first } in here {
        let seeing = of_document[document].clone();
        for offset in (0..length).step_by(KEYS_PER_BLOCK) {
            let (first, row, length) = (first + offset, row + offset, (length - offset).min(KEYS_PER_BLOCK));
            let block = plan.tables[document][first / KEYS_PER_BLOCK] as usize;
            let first_tile = seeing.start + tiles[seeing.clone()].partition_point(|tile| (tile.past as usize) < first);
            let own = tiles[first_tile..seeing.end].first();
            assert!(
                own.is_some_and(|tile| tile.past as usize == first),
                "keys at {first} of document {document} lack their queries"
            );
            let numbers = [block, first, row, length, first_tile, seeing.end].map(|number| narrow([number])[0]);
            let [block, first, row, length, first_tile, end_tile] = numbers;
            keys.push(AttentionKeys { block, first, row, length, first_tile, end_tile });
        }
    }
    keys.sort_by_key(|keys| Reverse(keys.end_tile - keys.first_tile));
    (keys, tiles)
}

impl CudaDevice {
    /// Uploads where the blocks of each document lie, in bytes of bf16: the same for all buffers of blocks of as many heads.
    fn block_pages(&self, plan: &AttentionPlan, heads: Heads, range: &Range<usize>) -> Address {
        let bytes = AttentionPlan::block_numbers(range.len(), heads.head_dim) * size_of::<u16>();
        let pages: Vec<i64> = plan.tables.iter().flatten().map(|&block| block as i64 * bytes as i64).collect();
        self.tables().upload(Table::BlockPages, &pages)
    }

    /// Uploads the tiles of all slices; `(where, how many)`.
    fn block_tiles(&self, plan: &AttentionPlan) -> (Address, usize) {
        let tiles = longest_first(slice_tiles(&plan.slices, &table_starts(plan)));
        (self.tables().upload(Table::BlockTiles, &tiles), tiles.len())
    }

    pub(super) fn fill_key_blocks(
        &self,
        rotated: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &mut Buffer,
    ) {
        let (tiles, count) = self.block_tiles(plan);
        let arguments = KeyBlockRows {
            rotated: rotated.bf16(plan.rows() * heads.projected_width()),
            tiles,
            pages: self.block_pages(plan, heads, &range),
            blocks: blocks.bf16(numbers(plan, heads, &range)),
            heads: head_range(heads, &range),
            head_dim: heads.head_dim as i32,
            reserved: 0,
        };
        self.kernels().launch("write_key_blocks", [count, 2 * range.len(), 1], &arguments);
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend_blocks(
        &self,
        rotated: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Buffer,
        output: &mut Buffer,
        log_sum_exp: &mut Buffer,
    ) {
        let rows = plan.rows();
        let (tiles, count) = self.block_tiles(plan);
        let arguments = AttentionForward {
            rotated: rotated.bf16(rows * heads.projected_width()),
            tiles,
            blocks: blocks.bf16(numbers(plan, heads, &range)),
            pages: self.block_pages(plan, heads, &range),
            output: output.bf16(rows * heads.query_width()),
            log_sum_exp: log_sum_exp.f32(rows * heads.query_heads),
            segment: self.segment() as i64,
            heads: head_range(heads, &range),
            scale: scale(heads),
            reserved: 0,
        };
        let kernel = format!("attention_forward_d{}", heads.head_dim);
        self.kernels().launch(&kernel, [count, range.len() * heads.group(), 1], &arguments);
    }

    pub(super) fn output_delta(&self, doutput: &Buffer, output: &Buffer, heads: Heads, rows: usize, delta: &mut Buffer) {
        let arguments = AttentionDelta {
            doutput: doutput.bf16(rows * heads.query_width()),
            output: output.bf16(rows * heads.query_width()),
            delta: delta.f32(rows * heads.query_heads),
            rows: rows as i64,
            query_heads: heads.query_heads as i32,
            reserved: 0,
        };
        self.kernels().launch_striding(&format!("attention_delta_d{}", heads.head_dim), rows * 32, &arguments);
    }

    /// The rows of the pass, from the first query head of the range on.
    fn own_queries(&self, attended: AttendedRows<'_, CudaDevice>, heads: Heads, range: &Range<usize>, rows: usize) -> QueryRows {
        let AttendedRows { rotated, doutput, log_sum_exp, delta } = attended;
        let first_head = range.start * heads.group();
        let column = (first_head * heads.head_dim * size_of::<u16>()) as Address;
        let statistic = (first_head * size_of::<f32>()) as Address;
        QueryRows {
            queries: rotated.bf16(rows * heads.projected_width()) + column,
            doutputs: doutput.bf16(rows * heads.query_width()) + column,
            log_sum_exps: log_sum_exp.f32(rows * heads.query_heads) + statistic,
            deltas: delta.f32(rows * heads.query_heads) + statistic,
            query_pitch: heads.projected_width() as i64,
            doutput_pitch: heads.query_width() as i64,
            statistic_pitch: heads.query_heads as i64,
        }
    }

    pub(super) fn fill_shared_queries(
        &self,
        attended: AttendedRows<'_, CudaDevice>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        queries: &mut Buffer,
    ) {
        let (rows, pitch) = (narrow(plan.contributed_rows()), AttentionPlan::query_numbers(heads, &range));
        let own = (plan.queries.own * pitch * size_of::<u16>()) as Address;
        let arguments = WriteSharedQueries {
            from: self.own_queries(attended, heads, &range, plan.rows()),
            rows: self.tables().upload(Table::ContributedRows, &rows),
            to: queries.bf16((plan.queries.own + rows.len()) * pitch) + own,
            count: rows.len() as i64,
            pitch: pitch as i64,
            query_heads: (range.len() * heads.group()) as i32,
            head_dim: heads.head_dim as i32,
        };
        self.kernels().launch_striding("write_shared_queries", rows.len() * pitch / 8, &arguments);
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend_blocks_backward(
        &self,
        attended: AttendedRows<'_, CudaDevice>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Buffer,
        queries: &Buffer,
        drotated: &mut Buffer,
    ) {
        let rows = plan.rows();
        let blocks = blocks.bf16(numbers(plan, heads, &range));
        let drotated = drotated.bf16(rows * heads.projected_width());
        let key_gradients = |keys: (Table, &[AttentionKeys]), tiles: (Table, &[AttentionSpan]), queries: QueryRows| {
            let arguments = AttentionBackwardKeys {
                queries,
                keys: self.tables().upload(keys.0, keys.1),
                tiles: self.tables().upload(tiles.0, tiles.1),
                blocks,
                drotated,
                heads: head_range(heads, &range),
                scale: scale(heads),
                reserved: 0,
            };
            let kernel = format!("attention_backward_keys_d{}", heads.head_dim);
            self.kernels().launch(&kernel, [keys.1.len(), range.len(), 1], &arguments);
        };
        let whole: Vec<QuerySlice> = plan.whole_slices().copied().collect();
        let (keys, tiles) = keys_and_tiles(plan, &whole, &whole);
        let own = self.own_queries(attended, heads, &range, rows);
        key_gradients((Table::WholeKeys, &keys), (Table::WholeTiles, &tiles), own);
        let shared: Vec<QuerySlice> = plan.shared_slices().copied().collect();
        let (keys, tiles) = keys_and_tiles(plan, &shared, &plan.queries.slices);
        let exchanged = self.exchanged_queries(queries, heads, &range, plan);
        key_gradients((Table::SharedKeys, &keys), (Table::SharedTiles, &tiles), exchanged);

        let AttendedRows { rotated, doutput, log_sum_exp, delta } = attended;
        let (tiles, count) = self.block_tiles(plan);
        let arguments = AttentionBackwardQueries {
            rotated: rotated.bf16(rows * heads.projected_width()),
            doutput: doutput.bf16(rows * heads.query_width()),
            log_sum_exp: log_sum_exp.f32(rows * heads.query_heads),
            delta: delta.f32(rows * heads.query_heads),
            tiles,
            blocks,
            pages: self.block_pages(plan, heads, &range),
            drotated,
            heads: head_range(heads, &range),
            scale: scale(heads),
            reserved: 0,
        };
        let kernel = format!("attention_backward_queries_d{}", heads.head_dim);
        self.kernels().launch(&kernel, [count, range.len() * heads.group(), 1], &arguments);
    }

    /// The rows that all ranks contributed, which hold the query heads of the range alone.
    fn exchanged_queries(&self, queries: &Buffer, heads: Heads, range: &Range<usize>, plan: &AttentionPlan) -> QueryRows {
        let (query_heads, pitch) = (range.len() * heads.group(), AttentionPlan::query_numbers(heads, range));
        let rows = plan.queries.slices.iter().map(|slice| slice.row + slice.length).max().unwrap_or(0);
        let start = queries.bf16(rows * pitch);
        let doutputs = start + (query_heads * heads.head_dim * size_of::<u16>()) as Address;
        let log_sum_exps = doutputs + (query_heads * heads.head_dim * size_of::<u16>()) as Address;
        QueryRows {
            queries: start,
            doutputs,
            log_sum_exps,
            deltas: log_sum_exps + (query_heads * size_of::<f32>()) as Address,
            query_pitch: pitch as i64,
            doutput_pitch: pitch as i64,
            statistic_pitch: (pitch * size_of::<u16>() / size_of::<f32>()) as i64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::attention_plan::SharedQueries;

    /// Two documents of 3 and 2 blocks, the first shared: here are its first and last block and all of the second.
    #[test]
    fn every_block_knows_the_tiles_that_see_it() {
        let slice = |row, length, document, first| QuerySlice { row, length, document, first };
        let plan = AttentionPlan {
            slices: vec![slice(0, 64, 0, 0), slice(64, 10, 0, 128), slice(74, 71, 1, 0)],
            tables: vec![vec![0, 2, 1], vec![4, 5]],
            blocks: 6,
            shared: 2,
            queries: SharedQueries {
                rows: 80,
                own: 0,
                slices: vec![slice(0, 64, 0, 0), slice(80, 64, 0, 64), slice(64, 10, 0, 128)],
            },
        };
        assert_eq!(plan.contributed_rows().collect::<Vec<_>>(), (0..74).collect::<Vec<_>>());
        let tile = |row, length, past, page| AttentionSpan { row, length, past, page };
        let numbers = |keys: &[AttentionKeys]| -> Vec<[i32; 6]> {
            keys.iter().map(|keys| [keys.block, keys.first, keys.row, keys.length, keys.first_tile, keys.end_tile]).collect()
        };
        let (keys, tiles) = keys_and_tiles(&plan, &plan.slices[..2], &plan.queries.slices);
        assert_eq!(tiles, [tile(0, 64, 0, 0), tile(80, 64, 64, 0), tile(64, 10, 128, 0)]);
        assert_eq!(numbers(&keys), [[0, 0, 0, 64, 0, 3], [1, 128, 64, 10, 2, 3]]);
        let (keys, tiles) = keys_and_tiles(&plan, &plan.slices[2..], &plan.slices[2..]);
        assert_eq!(tiles, [tile(74, 64, 0, 3), tile(138, 7, 64, 3)]);
        assert_eq!(numbers(&keys), [[4, 0, 74, 64, 0, 2], [5, 64, 138, 7, 1, 2]]);
    }
}
