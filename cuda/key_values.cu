// append_keys_values: the keys and values of new rows go to the pages of their sequences, one warp per row, 16 bytes per lane at
// a time. A head's part of a row is contiguous in the page as in the row, so whole sectors are read and written.
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
