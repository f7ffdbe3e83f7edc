// append_keys_values: the keys and values of new rows go to the pages of their sequences, one warp per row, 16 bytes per lane at
// a time. A head's part of a row is contiguous in the page as in the row, so whole sectors are read and written.
// write_key_blocks: the same for pages of some of the heads, a block per page and head, keys or values.
// write_shared_queries: rows of queries, and what the gradients of keys need with them, for other ranks.
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

// A block moves the keys of one head, or its values, [KEYS_PER_PAGE, head_dim] in the page: all keys lie there before all values.
KERNEL(write_key_blocks, BLOCK_THREADS, KeyBlockRows, NoShared) {
    const AttentionSpan tile = arguments.tiles[blockIdx.x];
    const HeadRange& heads = arguments.heads;
    const int part = int(blockIdx.y);
    const int row_part = part < heads.count ? heads.first + part : heads.key_value_heads + heads.first + (part - heads.count);
    const int64_t page = arguments.pages[tile.page + tile.past / KEYS_PER_PAGE] / int64_t(sizeof(bf16));
    const int chunks = arguments.head_dim / 8; // of a row
    const int64_t width = (heads.query_heads + 2 * int64_t(heads.key_value_heads)) * arguments.head_dim;
    const bf16* const from = arguments.rotated + tile.row * width + (int64_t(heads.query_heads) + row_part) * arguments.head_dim;
    bf16* const to = arguments.blocks + page + int64_t(part) * KEYS_PER_PAGE * arguments.head_dim;
    for (int index = int(threadIdx.x); index < KEYS_PER_PAGE * chunks; index += BLOCK_THREADS) {
        const int row = index / chunks, chunk = index % chunks;
        store16(to + 8 * index, row < tile.length ? load16(from + row * width + 8 * chunk) : Vector16{});
    }
}

KERNEL(write_shared_queries, BLOCK_THREADS, WriteSharedQueries, NoShared) {
    const QueryRows& from = arguments.from;
    const int chunks = arguments.query_heads * arguments.head_dim / 8; // of a row of queries, and of one of doutputs
    const int row_chunks = int(arguments.pitch / 8);
    const int64_t total = arguments.count * row_chunks, stride = int64_t(gridDim.x) * BLOCK_THREADS;
    for (int64_t index = int64_t(blockIdx.x) * BLOCK_THREADS + threadIdx.x; index < total; index += stride) {
        const int64_t row = arguments.rows[index / row_chunks];
        const int chunk = int(index % row_chunks);
        Vector16 value;
        if (chunk < chunks) {
            value = load16(from.queries + row * from.query_pitch + 8 * chunk);
        } else if (chunk < 2 * chunks) {
            value = load16(from.doutputs + row * from.doutput_pitch + 8 * (chunk - chunks));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int head = 4 * (chunk - 2 * chunks) + i - arguments.query_heads; // below 0: of the log-sum-exps
                const int64_t at = row * from.statistic_pitch;
                const float statistic = head < 0                       ? from.log_sum_exps[at + head + arguments.query_heads]
                                        : head < arguments.query_heads ? from.deltas[at + head]
                                                                       : 0.0f;
                value.words[i] = float_to_bits(statistic);
            }
        }
        store16(arguments.to + 8 * index, value);
    }
}
