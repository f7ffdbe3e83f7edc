// Attention of a few new rows (one, when sampling) over all keys of their sequences. What limits it is reading keys and values
// once, so the query heads of a group are rows of one tile, and segments of keys are computed by different blocks.
// attention_merge puts the segments together in ascending order. A row goes through the same operations as in attention_forward,
// so the same bits come out.
#include "attention.h"

constexpr int DECODE_ROWS = 16;

// Every warp computes all scores, which is free while memory is the limit, and owns a part of the values' columns: warps exchange
// nothing.
template <int head_dim> constexpr int DECODE_WARPS = head_dim >= 64 ? 4 : 2;

template <int head_dim> struct DecodeShared {
    Tile<KEYS_PER_PAGE, head_dim> ring[3];
    Tile<DECODE_ROWS, head_dim> queries;
};

// What one block leaves: [16, head_dim] values, then [16, 2] maxima and sums.
DEVICE int64_t partial_offset(const AttentionDecode& arguments, int head_dim, int64_t span, int64_t head, int64_t segment) {
    return ((span * arguments.key_value_heads + head) * arguments.segments + segment) * DECODE_ROWS * (head_dim + 2);
}

template <int head_dim> DEVICE void attention_decode(const AttentionDecode& arguments, DecodeShared<head_dim>& shared) {
    constexpr int threads = DECODE_WARPS<head_dim> * WARP;
    constexpr int columns = head_dim / DECODE_WARPS<head_dim>; // of one warp
    const AttentionSpan span = arguments.spans[blockIdx.x];
    const int head = int(blockIdx.y);
    const int group = arguments.query_heads / arguments.key_value_heads;
    const int64_t segment_start = int64_t(blockIdx.z) * arguments.segment;
    if (segment_start >= span.past + span.length) return;
    const int first_key = int(segment_start);
    const int keys = int(minimum(int64_t(span.past + span.length), segment_start + arguments.segment));
    const int rows = span.length * group;
    const int64_t width = int64_t(arguments.query_heads + 2 * arguments.key_value_heads) * head_dim;
    const float scale_log2 = arguments.scale * LOG2_E;

    // The query heads of a group are neighbours: `group` rows of head_dim in each new row.
    const bf16* first_query = arguments.rotated + int64_t(span.row) * width + int64_t(head) * group * head_dim;
    for (int index = int(threadIdx.x); index < DECODE_ROWS * head_dim / 8; index += threads) {
        const int row = index / (head_dim / 8), chunk = index % (head_dim / 8);
        const bf16* from = first_query + row / group * width + row % group * head_dim + chunk * 8;
        copy_async(shared.queries.at(row, chunk), from, row < rows);
    }
    commit_copies();
    PageStream<threads, head_dim> stream;
    stream.start(shared.ring, nullptr, arguments.pages + span.page + first_key / KEYS_PER_PAGE, arguments.key_value_heads, head,
                 keys - first_key);
    wait_copies<2>();
    sync_block();
    LeftRows<head_dim> queries;
    load_left<head_dim>(queries, shared.queries, 0);

    const int positions[2] = {span.past + lane_group() / group, span.past + (lane_group() + 8) / group};
    Gathered<columns> gathered;
    gathered.reset();
    for (int key = first_key; key < keys; key += KEYS_PER_PAGE) {
        attend_page<head_dim>(gathered, queries, stream, key, positions, span.past, warp() * columns / 8, scale_log2);
    }
    gathered.add_lanes();

    float* values = arguments.partial + partial_offset(arguments, head_dim, blockIdx.x, head, blockIdx.z);
    float* maxima_and_sums = values + DECODE_ROWS * head_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane_group() + 8 * half;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < columns / 8; ++n) {
            const float(&pair)[4] = gathered.values[0][n];
            store8(values + row * head_dim + warp() * columns + 8 * n + 2 * lane_member(),
                   Vector8{{float_to_bits(pair[2 * half]), float_to_bits(pair[2 * half + 1])}});
        }
        if (warp() == 0 && lane_member() == 0) {
            store8(maxima_and_sums + 2 * row,
                   Vector8{{float_to_bits(gathered.maxima[half]), float_to_bits(gathered.sums[half])}});
        }
    }
}

constexpr int MERGE_THREADS = 128;

// One row of a decode tile by head_dim / 4 lanes, 4 columns each: 16 bytes of a partial result.
template <int head_dim> DEVICE void attention_merge(const AttentionDecode& arguments) {
    constexpr int lanes = head_dim / 4;
    const int group = arguments.query_heads / arguments.key_value_heads;
    const float scale_log2 = arguments.scale * LOG2_E;
    const int64_t tile_rows = int64_t(arguments.span_count) * arguments.key_value_heads * DECODE_ROWS;
    const int64_t stride = int64_t(gridDim.x) * (MERGE_THREADS / lanes);
    const int column = int(threadIdx.x) % lanes * 4;
    const int64_t first = int64_t(blockIdx.x) * (MERGE_THREADS / lanes) + int(threadIdx.x) / lanes;
    for (int64_t index = first; index < tile_rows; index += stride) {
        const int row = int(index % DECODE_ROWS);
        const int head = int(index / DECODE_ROWS % arguments.key_value_heads);
        const int64_t span_index = index / DECODE_ROWS / arguments.key_value_heads;
        const AttentionSpan span = arguments.spans[span_index];
        if (row >= span.length * group) continue;

        const int64_t keys = int64_t(span.past) + span.length;
        float maximum = 0.0f, sum = 0.0f, values[4];
        for (int64_t segment = 0; segment * arguments.segment < keys; ++segment) {
            const float* partial = arguments.partial + partial_offset(arguments, head_dim, span_index, head, segment);
            const Vector8 maximum_and_sum = load8(partial + DECODE_ROWS * head_dim + 2 * row);
            const float fresh_maximum = bits_to_float(maximum_and_sum.words[0]);
            const float fresh_sum = bits_to_float(maximum_and_sum.words[1]);
            float fresh[4];
            load_floats(partial + row * head_dim + column, fresh);
            if (segment == 0) {
                maximum = fresh_maximum;
                sum = fresh_sum;
#pragma unroll
                for (int i = 0; i < 4; ++i) values[i] = fresh[i];
            } else {
                const MergeFactors factors = merge(maximum, sum, fresh_maximum, fresh_sum, scale_log2);
#pragma unroll
                for (int i = 0; i < 4; ++i) values[i] = merge_value(values[i], fresh[i], factors);
            }
        }
        const float factor = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = normalised(values[i], factor);
        const int64_t output_row = int64_t(span.row) + row / group;
        const int64_t query_head = int64_t(head) * group + row % group;
        store8(arguments.output + (output_row * arguments.query_heads + query_head) * head_dim + column,
               Vector8{{pack(values[0], values[1]), pack(values[2], values[3])}});
    }
}

KERNEL(attention_decode_d32, DECODE_WARPS<32> * WARP, AttentionDecode, DecodeShared<32>) {
    attention_decode<32>(arguments, shared);
}
KERNEL(attention_decode_d64, DECODE_WARPS<64> * WARP, AttentionDecode, DecodeShared<64>) {
    attention_decode<64>(arguments, shared);
}
KERNEL(attention_decode_d128, DECODE_WARPS<128> * WARP, AttentionDecode, DecodeShared<128>) {
    attention_decode<128>(arguments, shared);
}

KERNEL(attention_merge_d32, MERGE_THREADS, AttentionDecode, NoShared) { attention_merge<32>(arguments); }
KERNEL(attention_merge_d64, MERGE_THREADS, AttentionDecode, NoShared) { attention_merge<64>(arguments); }
KERNEL(attention_merge_d128, MERGE_THREADS, AttentionDecode, NoShared) { attention_merge<128>(arguments); }
