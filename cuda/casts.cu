// Copies and sums of whole buffers: between bf16 and f32, a factor, rows by index, and the second stage of gradients of vectors.
//
// Floor: one read and one write of each element. A lane takes four elements at a time, 16 bytes on the f32 side and 8 on the bf16
// side, because two 16-byte reads per lane, 32 bytes apart, would each touch every sector of both.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;

// Calls quad(i) for every multiple of 4 in 0 .. length - 3 and single(i) for the up to three elements after them, over the grid.
template <class Quad, class Single> DEVICE void for_quads(int64_t length, Quad quad, Single single) {
    const int64_t quads = length / 4;
    for (int64_t i = grid_thread(); i < quads; i += grid_threads()) quad(4 * i);
    const int64_t tail = 4 * quads + grid_thread();
    if (tail < length) single(tail);
}

KERNEL(cast_to_bf16, THREADS, CastToBf16, NoShared) {
    const float* const from = arguments.from;
    bf16* const to = arguments.to;
    for_quads(
        arguments.length,
        [&](int64_t i) {
            float values[4];
            load_floats(from + i, values);
            store8(to + i, Vector8{{pack(values[0], values[1]), pack(values[2], values[3])}});
        },
        [&](int64_t i) { to[i] = to_bf16(from[i]); });
}

KERNEL(cast_to_float, THREADS, CastToFloat, NoShared) {
    const bf16* const from = arguments.from;
    float* const to = arguments.to;
    for_quads(
        arguments.length,
        [&](int64_t i) {
            const Vector8 pair = load8(from + i);
            const float values[4] = {low_half(pair.words[0]), high_half(pair.words[0]), low_half(pair.words[1]), high_half(pair.words[1])};
            store_floats(to + i, values);
        },
        [&](int64_t i) { to[i] = to_float(from[i]); });
}

KERNEL(accumulate_floats, THREADS, AccumulateFloats, NoShared) {
    const float* const from = arguments.from;
    float* const to = arguments.to;
    for_quads(
        arguments.length,
        [&](int64_t i) {
            float terms[4], sums[4];
            load_floats(from + i, terms);
            load_floats(to + i, sums);
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[k] += terms[k];
            store_floats(to + i, sums);
        },
        [&](int64_t i) { to[i] += from[i]; });
}

KERNEL(scale_floats, THREADS, ScaleFloats, NoShared) {
    float* const values = arguments.values;
    const float factor = arguments.factor;
    for_quads(
        arguments.length,
        [&](int64_t i) {
            float quad[4];
            load_floats(values + i, quad);
#pragma unroll
            for (int k = 0; k < 4; ++k) quad[k] *= factor;
            store_floats(values + i, quad);
        },
        [&](int64_t i) { values[i] *= factor; });
}

// ---- rows by index: one warp per row, so that an index is read once ----

DEVICE void copy_row(const bf16* from, bf16* to, int64_t width) {
#pragma unroll 4
    for (int64_t column = lane() * CHUNK; column < width; column += WARP * CHUNK) store16(to + column, load16(from + column));
}

KERNEL(gather_rows, THREADS, MoveRows, NoShared) {
    for (int64_t i = grid_warp(); i < arguments.count; i += grid_warps())
        copy_row(arguments.from + int64_t(arguments.rows[i]) * arguments.width, arguments.to + i * arguments.width, arguments.width);
}

KERNEL(scatter_rows, THREADS, MoveRows, NoShared) {
    for (int64_t i = grid_warp(); i < arguments.count; i += grid_warps())
        copy_row(arguments.from + i * arguments.width, arguments.to + int64_t(arguments.rows[i]) * arguments.width, arguments.width);
}

// ---- sum_parts: a block takes 128 columns; each warp sums an eighth of the parts, then the eighths are added ascending ----

struct PartSums {
    float warps[THREADS / WARP][WARP * 4];
};

KERNEL(sum_parts, THREADS, SumParts, PartSums) {
    constexpr int WARPS = THREADS / WARP;
    const int64_t first = arguments.count * warp() / WARPS;
    const int64_t last = arguments.count * (warp() + 1) / WARPS;
    for (int64_t block = int64_t(blockIdx.x) * WARP * 4; block < arguments.width; block += int64_t(gridDim.x) * WARP * 4) {
        const int64_t column = block + lane() * 4;
        const bool inside = column < arguments.width;
        float sums[4] = {};
        if (inside) {
#pragma unroll 4
            for (int64_t part = first; part < last; ++part) {
                float terms[4];
                load_floats(arguments.parts + part * arguments.pitch + column, terms);
#pragma unroll
                for (int k = 0; k < 4; ++k) sums[k] += terms[k];
            }
        }
        store_floats(&shared.warps[warp()][lane() * 4], sums);
        sync_block();
        if (warp() == 0 && inside) {
            float total[4];
            load_floats(arguments.into + column, total);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                float terms[4];
                load_floats(&shared.warps[w][lane() * 4], terms);
#pragma unroll
                for (int k = 0; k < 4; ++k) sums[k] = w == 0 ? terms[k] : sums[k] + terms[k];
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) total[k] += sums[k];
            store_floats(arguments.into + column, total);
        }
        sync_block();
    }
}
