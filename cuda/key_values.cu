// append_keys_values: the keys and values of new rows go to the pages of their sequences, one warp per row, 16 bytes per lane at
// a time. A head's part of a row is contiguous in the page as in the row, so whole sectors are read and written.
// write_key_blocks, read_key_block_gradients: the same for pages of some of the heads, a block per page and head, keys or values.
#include "include/arguments.h"

constexpr int APPEND_THREADS = 128;

KERNEL(append_keys_values, APPEND_THREADS, AppendKeysValues, NoShared) {
    const int chunks_per_head = arguments.head_dim / 8;
    const int chunks = 2 * arguments.key_value_heads * chunks_per_head; // keys, then values, as in the projected row
    const int64_t query_width = int64_t(arguments.query_heads) * arguments.head_dim;
    const int64_t width = query_width + 8 * int64_t(chunks);
    const int64_t stride = int64_t(gridDim.x) * (APPEND_THREADS / WARP);
    for (int64_t row = int64_t(blockIdx.x) * (APPEND_THREADS / WARP) + warp(); row < arguments.rows; row += stride) {
        const AttentionSpan span = arguments.spans[arguments.span_of_row[row]];
        const int64_t position = span.past + (row - span.row);
        bf16* const page = arguments.pages[span.page + position / KEYS_PER_PAGE];
        const bf16* from = arguments.rotated + row * width + query_width;
        for (int chunk = lane(); chunk < chunks; chunk += WARP) {
            // In a page too, keys and values of all heads follow each other: [2 key_value_heads, KEYS_PER_PAGE, head_dim].
            const int64_t head = chunk / chunks_per_head;
            const int64_t to = (head * KEYS_PER_PAGE + position % KEYS_PER_PAGE) * arguments.head_dim;
            store16(page + to + chunk % chunks_per_head * 8, load16(from + 8 * chunk));
        }
    }
}

constexpr int BLOCK_THREADS = 128;

// The part of a page that one block moves: the keys of each head, then the values of each, [KEYS_PER_PAGE, head_dim].
struct PagePart {
    int64_t place;  // of its first number in `blocks`
    int64_t column; // of its first number in a row
};
DEVICE PagePart page_part(const KeyBlockRows& arguments, const AttentionSpan& tile) {
    const HeadRange& heads = arguments.heads;
    const int part = int(blockIdx.y);
    const int row_part = part < heads.count ? heads.first + part : heads.key_value_heads + heads.first + (part - heads.count);
    const int64_t page = arguments.pages[tile.page + tile.past / KEYS_PER_PAGE] / int64_t(sizeof(bf16));
    return {page + int64_t(part) * KEYS_PER_PAGE * arguments.head_dim,
            (int64_t(heads.query_heads) + row_part) * arguments.head_dim};
}
DEVICE int64_t row_width(const KeyBlockRows& arguments) {
    return (arguments.heads.query_heads + 2 * int64_t(arguments.heads.key_value_heads)) * arguments.head_dim;
}

KERNEL(write_key_blocks, BLOCK_THREADS, KeyBlockRows, NoShared) {
    const AttentionSpan tile = arguments.tiles[blockIdx.x];
    const PagePart part = page_part(arguments, tile);
    const int chunks = arguments.head_dim / 8; // of a row
    const int64_t width = row_width(arguments);
    const bf16* const from = arguments.rows + tile.row * width + part.column;
    bf16* const to = static_cast<bf16*>(arguments.blocks) + part.place;
    for (int index = int(threadIdx.x); index < KEYS_PER_PAGE * chunks; index += BLOCK_THREADS) {
        const int row = index / chunks, chunk = index % chunks;
        store16(to + 8 * index, row < tile.length ? load16(from + row * width + 8 * chunk) : Vector16{});
    }
}

// A lane takes four numbers, 16 bytes of f32 and 8 of bf16.
KERNEL(read_key_block_gradients, BLOCK_THREADS, KeyBlockRows, NoShared) {
    const AttentionSpan tile = arguments.tiles[blockIdx.x];
    const PagePart part = page_part(arguments, tile);
    const int quads = arguments.head_dim / 4; // of a row
    const int64_t width = row_width(arguments);
    const float* const from = static_cast<const float*>(arguments.blocks) + part.place;
    bf16* const to = arguments.rows + tile.row * width + part.column;
    for (int index = int(threadIdx.x); index < tile.length * quads; index += BLOCK_THREADS) {
        float values[4];
        load_floats(from + 4 * index, values);
        store8(to + index / quads * width + index % quads * 4, Vector8{{pack(values[0], values[1]), pack(values[2], values[3])}});
    }
}
