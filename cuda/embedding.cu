// Embedding: x[i] = table[ids[i]], and its gradient by the table.
//
// Floor, per row of `width`: forward reads 4 width (the f32 table) + 4 (the id) bytes and writes 2 width; backward reads 2 width and,
// per distinct id, reads and writes 4 width.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;

// One warp per row, so that an id is read once.
KERNEL(embed, THREADS, Embed, NoShared) {
    const int64_t width = arguments.width;
    for (int64_t row = grid_warp(); row < arguments.rows; row += grid_warps()) {
        const float* const from = arguments.table + int64_t(arguments.ids[row]) * width;
        bf16* const to = arguments.x + row * width;
#pragma unroll 4
        for (int64_t column = lane() * 4; column < width; column += WARP * 4) {
            float values[4];
            load_floats(from + column, values);
            store8(to + column, Vector8{{pack(values[0], values[1]), pack(values[2], values[3])}});
        }
    }
}

// The host sorts rows by id, so that no two warps add to the same element and an element's terms come in ascending order of rows:
// the same bits every time, without atomics. A warp takes one id and up to QUADS * 128 columns; their sums stay in its registers.
constexpr int QUADS = 4;

KERNEL(embed_backward, THREADS, EmbedBackward, NoShared) {
    constexpr int COLUMNS = QUADS * WARP * 4;
    const int64_t width = arguments.width;
    const int64_t pieces = (width + COLUMNS - 1) / COLUMNS; // of a row
    for (int64_t i = grid_warp(); i < arguments.unique * pieces; i += grid_warps()) {
        const int64_t unique = i / pieces;
        const int64_t column = (i - unique * pieces) * COLUMNS + lane() * 4;
        float* const into = arguments.dtable + int64_t(arguments.ids[unique]) * width;
        float sums[QUADS][4];
#pragma unroll
        for (int q = 0; q < QUADS; ++q)
            if (column + q * WARP * 4 < width) load_floats(into + column + q * WARP * 4, sums[q]);

        const int32_t last = arguments.starts[unique + 1];
#pragma unroll 2
        for (int32_t j = arguments.starts[unique]; j < last; ++j) {
            const bf16* const from = arguments.dx + int64_t(arguments.order[j]) * width;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                if (column + q * WARP * 4 < width) {
                    const Vector8 terms = load8(from + column + q * WARP * 4);
                    sums[q][0] += low_half(terms.words[0]);
                    sums[q][1] += high_half(terms.words[0]);
                    sums[q][2] += low_half(terms.words[1]);
                    sums[q][3] += high_half(terms.words[1]);
                }
            }
        }
#pragma unroll
        for (int q = 0; q < QUADS; ++q)
            if (column + q * WARP * 4 < width) store_floats(into + column + q * WARP * 4, sums[q]);
    }
}
