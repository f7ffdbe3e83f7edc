//! Attention of training passes over blocks of keys: the forward kernel of paged caches with a block as a page, and the backward,
//! which leaves the gradients of keys and values in blocks too.

use std::cmp::Reverse;
use std::ops::Range;

use super::CudaDevice;
use super::allocator::Purpose;
use super::arguments::{Address, AttentionBackward, AttentionForward, AttentionKeys, AttentionSpan, KEYS_PER_PAGE, KeyBlockRows};
use super::attention::{head_range, kernel_span, longest_first, scale, tiles};
use super::buffers::Buffer;
use super::indices::{Table, narrow};
use crate::device::ops::{Heads, KEYS_PER_BLOCK, KeyBlocks, QuerySlice, Span};

// A block is a page, and a tile of queries has the rows of one block.
const _: () = assert!(KEYS_PER_BLOCK == KEYS_PER_PAGE);

/// Numbers of all blocks of a plan.
fn numbers(plan: &KeyBlocks, heads: Heads, range: &Range<usize>) -> usize {
    plan.blocks * KeyBlocks::block_numbers(range.len(), heads.head_dim)
}

/// Where the page table of each document starts when they follow each other.
fn table_starts(plan: &KeyBlocks) -> Vec<usize> {
    let start = |at: &mut usize, table: &Vec<u32>| {
        let start = *at;
        *at += table.len();
        Some(start)
    };
    plan.tables.iter().scan(0, start).collect()
}

/// The tiles of these slices, in their order.
fn slice_tiles<'a>(plan: &KeyBlocks, slices: impl IntoIterator<Item = &'a QuerySlice>) -> Vec<AttentionSpan> {
    let starts = table_starts(plan);
    let span = |slice: &QuerySlice| {
        assert!(slice.first.is_multiple_of(KEYS_PER_BLOCK), "a slice starts at {}, inside a block", slice.first);
        kernel_span(&Span { start: slice.row, length: slice.length }, slice.first, starts[slice.document])
    };
    tiles(&slices.into_iter().map(span).collect::<Vec<_>>())
}

/// Every block with the tiles at or after it in its document, those with the most tiles first; and the tiles of all documents, each
/// document's ascending. Blocks that no row here attends to have no tiles: their gradients are 0.
fn keys_and_tiles(plan: &KeyBlocks) -> (Vec<AttentionKeys>, Vec<AttentionSpan>) {
    let mut slices: Vec<&QuerySlice> = plan.slices.iter().collect();
    slices.sort_by_key(|slice| (slice.document, slice.first));
    let mut tiles = Vec::new();
    let mut keys: Vec<AttentionKeys> =
        (0..plan.blocks as i32).map(|block| AttentionKeys { block, first: 0, first_tile: 0, end_tile: 0 }).collect();
    for of_document in slices.chunk_by(|a, b| a.document == b.document) {
        let start = tiles.len();
        tiles.extend(slice_tiles(plan, of_document.iter().copied()));
        for (index, &block) in plan.tables[of_document[0].document].iter().enumerate() {
            let first = index * KEYS_PER_BLOCK;
            let before = tiles[start..].partition_point(|tile| (tile.past as usize) < first);
            let [first, first_tile, end_tile] = [first, start + before, tiles.len()].map(|number| narrow([number])[0]);
            keys[block as usize] = AttentionKeys { block: block as i32, first, first_tile, end_tile };
        }
    }
    keys.sort_by_key(|keys| Reverse(keys.end_tile - keys.first_tile));
    (keys, tiles)
}

impl CudaDevice {
    /// Uploads where the blocks of each document lie, in bytes of bf16: the same for all buffers of blocks of as many heads.
    fn block_pages(&self, plan: &KeyBlocks, heads: Heads, range: &Range<usize>) -> Address {
        let bytes = KeyBlocks::block_numbers(range.len(), heads.head_dim) * size_of::<u16>();
        let pages: Vec<i64> = plan.tables.iter().flatten().map(|&block| block as i64 * bytes as i64).collect();
        self.tables().upload(Table::BlockPages, &pages)
    }

    /// Uploads the tiles of all slices; `(where, how many)`.
    fn block_tiles(&self, plan: &KeyBlocks) -> (Address, usize) {
        let tiles = longest_first(slice_tiles(plan, &plan.slices));
        (self.tables().upload(Table::BlockTiles, &tiles), tiles.len())
    }

    /// Moves keys and values, or their gradients, between rows and blocks.
    fn move_key_blocks(
        &self,
        kernel: &str,
        rows: Address,
        heads: Heads,
        range: &Range<usize>,
        plan: &KeyBlocks,
        blocks: Address,
    ) {
        let (tiles, count) = self.block_tiles(plan);
        let arguments = KeyBlockRows {
            rows,
            tiles,
            pages: self.block_pages(plan, heads, range),
            blocks,
            heads: head_range(heads, range),
            head_dim: heads.head_dim as i32,
            reserved: 0,
        };
        self.kernels().launch(kernel, [count, 2 * range.len(), 1], &arguments);
    }

    pub(super) fn fill_key_blocks(
        &self,
        rotated: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &KeyBlocks,
        blocks: &mut Buffer,
    ) {
        let rotated = rotated.bf16(plan.rows() * heads.projected_width());
        let blocks = blocks.bf16(numbers(plan, heads, &range));
        self.move_key_blocks("write_key_blocks", rotated, heads, &range, plan, blocks);
    }

    pub(super) fn key_block_gradients(
        &self,
        dblocks: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &KeyBlocks,
        drotated: &mut Buffer,
    ) {
        let drotated = drotated.bf16(plan.rows() * heads.projected_width());
        let dblocks = dblocks.f32(numbers(plan, heads, &range));
        self.move_key_blocks("read_key_block_gradients", drotated, heads, &range, plan, dblocks);
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend_blocks(
        &self,
        rotated: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &KeyBlocks,
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

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend_blocks_backward(
        &self,
        doutput: &Buffer,
        rotated: &Buffer,
        output: &Buffer,
        log_sum_exp: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &KeyBlocks,
        blocks: &Buffer,
        drotated: &mut Buffer,
        dblocks: &mut Buffer,
    ) {
        let (rows, numbers) = (plan.rows(), numbers(plan, heads, &range));
        let (keys, tiles_by_document) = keys_and_tiles(plan);
        let (tiles, count) = self.block_tiles(plan);
        let delta = self.allocate(Purpose::Workspace, rows * heads.query_heads * size_of::<f32>());
        let of_queries = AttentionBackward {
            doutput: doutput.bf16(rows * heads.query_width()),
            rotated: rotated.bf16(rows * heads.projected_width()),
            output: output.bf16(rows * heads.query_width()),
            log_sum_exp: log_sum_exp.f32(rows * heads.query_heads),
            delta: delta.address(),
            tiles,
            keys: self.tables().upload(Table::BlockKeys, &keys),
            blocks: blocks.bf16(numbers),
            pages: self.block_pages(plan, heads, &range),
            dblocks: dblocks.f32(numbers),
            drotated: drotated.bf16(rows * heads.projected_width()),
            rows: rows as i64,
            heads: head_range(heads, &range),
            scale: scale(heads),
            reserved: 0,
        };
        let of_keys = AttentionBackward { tiles: self.tables().upload(Table::TilesByDocument, &tiles_by_document), ..of_queries };
        let (dim, query_heads) = (heads.head_dim, range.len() * heads.group());
        let kernels = self.kernels();
        kernels.launch_striding(&format!("attention_delta_d{dim}"), rows * 32, &of_keys);
        kernels.launch(&format!("attention_backward_keys_d{dim}"), [keys.len(), range.len(), 1], &of_keys);
        kernels.launch(&format!("attention_backward_queries_d{dim}"), [count, query_heads, 1], &of_queries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two documents of 3 and 2 blocks; here are the first and last block of the one and the second of the other.
    #[test]
    fn every_block_knows_the_tiles_that_see_it() {
        let slice = |row, length, document, first| QuerySlice { row, length, document, first };
        let plan = KeyBlocks {
            slices: vec![slice(0, 64, 0, 0), slice(64, 7, 1, 64), slice(71, 10, 0, 128)],
            tables: vec![vec![5, 1, 4], vec![0, 2]],
            blocks: 6,
            shared: 0,
        };
        let tile = |row, length, past, page| AttentionSpan { row, length, past, page };
        let (keys, tiles) = keys_and_tiles(&plan);
        assert_eq!(tiles, [tile(0, 64, 0, 0), tile(71, 10, 128, 0), tile(64, 7, 64, 3)]);
        let found: Vec<[i32; 4]> = keys.iter().map(|keys| [keys.block, keys.first, keys.first_tile, keys.end_tile]).collect();
        assert_eq!(found, [[5, 0, 0, 2], [0, 0, 2, 3], [1, 64, 1, 2], [2, 64, 2, 3], [4, 128, 1, 2], [3, 0, 0, 0]]);
    }
}
