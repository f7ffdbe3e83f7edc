// Causal attention of new rows over all keys of their sequences: grouped-query heads, packed sequences of any length, keys and
// values in pages. One block takes 64 queries of one head, each of its four warps 16 of them, and walks the pages up to the last
// query. Keys are reduced in segments counted from the sequence's start, each from zero, merged ascending, so that decode, which
// computes segments in parallel, gives the same bits.
#include "attention.h"

constexpr int FORWARD_THREADS = 128;

template <int head_dim> struct ForwardShared {
    Tile<KEYS_PER_PAGE, head_dim> ring[3];     // the queries pass through the last before the first page needs it
    float merged[QUERIES_PER_TILE * head_dim]; // of the segments before, each thread its own: [head_dim / 8, threads, 4]
};

// Merges the segment just finished into those before it. `first`, `last`: none comes before, after.
template <int head_dim>
DEVICE void finish_segment(Gathered<head_dim>& segment, float (&maxima)[2], float (&sums)[2], float* merged, bool first,
                           bool last, float scale_log2) {
    segment.add_lanes();
    if (first && last) return;
    float* const own = merged + 4 * int(threadIdx.x);
    MergeFactors factors[2];
    if (!first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factors[half] = merge(maxima[half], sums[half], segment.maxima[half], segment.sums[half], scale_log2);
            segment.maxima[half] = maxima[half];
            segment.sums[half] = sums[half];
        }
#pragma unroll
        for (int n = 0; n < head_dim / 8; ++n) {
            float before[4];
            load_floats(own + n * 4 * FORWARD_THREADS, before);
#pragma unroll
            for (int i = 0; i < 4; ++i) segment.values[0][n][i] = merge_value(before[i], segment.values[0][n][i], factors[i / 2]);
        }
    }
    if (!last) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            maxima[half] = segment.maxima[half];
            sums[half] = segment.sums[half];
        }
#pragma unroll
        for (int n = 0; n < head_dim / 8; ++n) store_floats(own + n * 4 * FORWARD_THREADS, segment.values[0][n]);
        segment.reset();
    }
}

template <int head_dim> DEVICE void attention_forward(const AttentionForward& arguments, ForwardShared<head_dim>& shared) {
    const AttentionSpan tile = arguments.tiles[blockIdx.x];
    const HeadRange& heads = arguments.heads;
    const int group = heads.query_heads / heads.key_value_heads;
    const int head = heads.first * group + int(blockIdx.y);
    const int64_t width = int64_t(heads.query_heads + 2 * heads.key_value_heads) * head_dim;
    const int64_t first_row = tile.row;
    const int count = tile.length;
    const int keys = tile.past + count; // those that the last query sees
    const float scale_log2 = arguments.scale * LOG2_E;

    copy_rows<FORWARD_THREADS>(shared.ring[2], arguments.rotated + first_row * width + int64_t(head) * head_dim, width, count);
    commit_copies();
    PageStream<FORWARD_THREADS, head_dim> stream;
    stream.start(shared.ring, arguments.blocks, arguments.pages + tile.page, heads.count, int(blockIdx.y) / group, keys);
    wait_copies<2>();
    sync_block();
    LeftRows<head_dim> queries;
    const int warp_row = 16 * warp();
    load_left<head_dim>(queries, shared.ring[2], warp_row);

    const int first_position = tile.past + warp_row;
    const int positions[2] = {first_position + lane_group(), first_position + lane_group() + 8};
    Gathered<head_dim> gathered;
    gathered.reset();
    float maxima[2], sums[2]; // of the segments before
    int64_t segment_end = arguments.segment;
    for (int first_key = 0; first_key < keys; first_key += KEYS_PER_PAGE) {
        attend_page<head_dim>(gathered, queries, stream, first_key, positions, first_position, 0, scale_log2);
        const int64_t seen = int64_t(first_key) + KEYS_PER_PAGE;
        if (seen == segment_end || seen >= keys) {
            finish_segment(gathered, maxima, sums, shared.merged, segment_end == arguments.segment, seen >= keys, scale_log2);
            segment_end += arguments.segment;
        }
    }

    const float factors[2] = {1.0f / gathered.sums[0], 1.0f / gathered.sums[1]};
    const int64_t output_width = int64_t(heads.query_heads) * head_dim;
    store_rows<head_dim>(gathered.values, factors, stream.free_tile(), warp_row,
                         arguments.output + first_row * output_width + int64_t(head) * head_dim, output_width, count);
    if (arguments.log_sum_exp && lane_member() == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + lane_group() + 8 * half;
            if (row < count) {
                arguments.log_sum_exp[(first_row + row) * heads.query_heads + head] =
                    multiply_add(gathered.maxima[half], arguments.scale, log_precise(gathered.sums[half]));
            }
        }
    }
}

KERNEL(attention_forward_d32, FORWARD_THREADS, AttentionForward, ForwardShared<32>) {
    attention_forward<32>(arguments, shared);
}
KERNEL(attention_forward_d64, FORWARD_THREADS, AttentionForward, ForwardShared<64>) {
    attention_forward<64>(arguments, shared);
}
KERNEL(attention_forward_d128, FORWARD_THREADS, AttentionForward, ForwardShared<128>) {
    attention_forward<128>(arguments, shared);
}
