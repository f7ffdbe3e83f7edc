// Backward of attention over whole sequences, without atomics: every sum has one owner and a fixed order (Dao 2023, with the
// gradients by queries in a pass of their own: 7 products instead of 5, and the same bits in every run).
//   attention_delta              delta = sum over columns of doutput output, per row and head
//   attention_backward_keys      dV = sum of P^T doutput, dK = scale sum of dS^T Q, over the group's heads, then queries
//   attention_backward_queries   dQ = scale sum of dS K, over keys ascending
// with P = exp(scale Q K^T - log_sum_exp) computed again and dS = P (doutput V^T - delta). P and dS are rounded to bf16 only as
// operands; they never leave registers, because each kernel computes them in the orientation it goes on with.
#include "attention.h"

constexpr int DELTA_THREADS = 128;

// head_dim / 8 lanes per (row, head), 8 columns each.
template <int head_dim> DEVICE void attention_delta(const AttentionBackward& arguments) {
    constexpr int lanes = head_dim / 8;
    const int64_t count = arguments.rows * arguments.query_heads;
    const int64_t stride = int64_t(gridDim.x) * (DELTA_THREADS / lanes);
    const int column = int(threadIdx.x) % lanes * 8;
    // The bound is rounded up so that all lanes of a warp meet in the sum.
    for (int64_t base = int64_t(blockIdx.x) * (DELTA_THREADS / lanes); base < count; base += stride) {
        const int64_t index = base + int(threadIdx.x) / lanes;
        float sum = 0.0f;
        if (index < count) {
            float doutput[8], output[8];
            unpack8(load16(arguments.doutput + index * head_dim + column), doutput);
            unpack8(load16(arguments.output + index * head_dim + column), output);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = multiply_add(doutput[i], output[i], sum);
        }
        sum = warp_sum<lanes>(sum);
        if (index < count && column == 0) arguments.delta[index] = sum;
    }
}

constexpr int BACKWARD_THREADS = 128;

// ---- gradients by keys and values ----

// Queries per step: what the registers allow beside two accumulators of 16 x head_dim.
template <int head_dim> constexpr int QUERIES_PER_STEP = head_dim == 128 ? 32 : 64;

template <int head_dim> struct KeysShared {
    static constexpr int QUERIES = QUERIES_PER_STEP<head_dim>;
    struct Stage {
        Tile<QUERIES, head_dim> queries, doutputs;
        float statistics[2][QUERIES]; // log2(e) log_sum_exp, delta
    };
    Tile<KEYS_PER_PAGE, head_dim> keys, values;
    Stage stages[2];
};

template <int head_dim> DEVICE void attention_backward_keys(const AttentionBackward& arguments, KeysShared<head_dim>& shared) {
    constexpr int QUERIES = QUERIES_PER_STEP<head_dim>;
    const AttentionTile tile = arguments.tiles[blockIdx.x];
    const AttentionSpan span = arguments.spans[tile.span];
    const int key_head = int(blockIdx.y);
    const int group = arguments.query_heads / arguments.key_value_heads;
    const int output_width = arguments.query_heads * head_dim;
    const int width = output_width + 2 * arguments.key_value_heads * head_dim;
    const int64_t first_row = int64_t(span.row) + tile.first; // of the keys, and of the first queries that see them
    const int count = span.length - tile.first;               // queries that see any of the keys
    const float scale_log2 = arguments.scale * LOG2_E;
    const int key_column = output_width + key_head * head_dim;
    const int value_column = key_column + arguments.key_value_heads * head_dim;

    // A step is QUERIES queries of one head: all steps of the first head of the group, then of the next.
    struct Step {
        int head;
        int first_query; // from tile.first
    };
    const int end_head = (key_head + 1) * group;
    const auto after = [&](Step step) {
        return step.first_query + QUERIES < count ? Step{step.head, step.first_query + QUERIES} : Step{step.head + 1, 0};
    };
    float statistic = 0.0f; // this thread's of the step copied last
    const auto copy_step = [&](Step step, auto& stage) {
        if (step.head < end_head) {
            const int64_t row = first_row + step.first_query;
            const int rows = count - step.first_query;
            const int column = step.head * head_dim;
            copy_rows<BACKWARD_THREADS>(stage.queries, arguments.rotated + row * width + column, width, rows);
            copy_rows<BACKWARD_THREADS>(stage.doutputs, arguments.doutput + row * output_width + column, output_width, rows);
            const int query = int(threadIdx.x) % QUERIES;
            const int64_t at = (row + query) * arguments.query_heads + step.head;
            if (int(threadIdx.x) < QUERIES) {
                statistic = query < rows ? LOG2_E * arguments.log_sum_exp[at] : INFINITE; // no query: probability 0
            } else if (int(threadIdx.x) < 2 * QUERIES) {
                statistic = query < rows ? arguments.delta[at] : 0.0f;
            }
        }
        commit_copies();
    };

    copy_rows<BACKWARD_THREADS>(shared.keys, arguments.rotated + first_row * width + key_column, width, count);
    copy_rows<BACKWARD_THREADS>(shared.values, arguments.rotated + first_row * width + value_column, width, count);
    Step step = {key_head * group, 0};
    copy_step(step, shared.stages[0]);
    float dkeys[1][head_dim / 8][4], dvalues[1][head_dim / 8][4];
    clear(dkeys);
    clear(dvalues);
    const int warp_row = 16 * warp();
    for (int turn = 0; step.head < end_head; turn ^= 1, step = after(step)) {
        auto& stage = shared.stages[turn];
        if (int(threadIdx.x) < 2 * QUERIES) stage.statistics[int(threadIdx.x) / QUERIES][int(threadIdx.x) % QUERIES] = statistic;
        wait_copies<0>();
        sync_block();
        copy_step(after(step), shared.stages[turn ^ 1]);

        float weights[1][QUERIES / 8][4], dweights[1][QUERIES / 8][4]; // [16 keys, QUERIES]
        multiply_tiles<head_dim>(weights, shared.keys, warp_row, stage.queries);
        multiply_tiles<head_dim>(dweights, shared.values, warp_row, stage.doutputs);
        const bool diagonal = step.first_query < KEYS_PER_PAGE;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; ++n) {
            const int query = 8 * n + 2 * lane_member();
            const Vector8 log2_sum_exps = load8(&stage.statistics[0][query]), deltas = load8(&stage.statistics[1][query]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool hidden = diagonal && warp_row + lane_group() + 8 * (i / 2) > step.first_query + query + i % 2;
                const float p = probability(weights[0][n][i], scale_log2, bits_to_float(log2_sum_exps.words[i % 2]));
                weights[0][n][i] = hidden ? 0.0f : p;
                dweights[0][n][i] = score_gradient(weights[0][n][i], dweights[0][n][i], bits_to_float(deltas.words[i % 2]));
            }
        }
        multiply_weights(dvalues, weights, stage.doutputs, 0);
        multiply_weights(dkeys, dweights, stage.queries, 0);
    }

    // Each warp read only its own rows of the keys and values: their gradients leave through the same places.
    bf16* const to = arguments.drotated + first_row * width;
    const float scales[2] = {arguments.scale, arguments.scale}, ones[2] = {1.0f, 1.0f};
    sync_warp();
    store_rows<head_dim>(dkeys, scales, shared.keys, warp_row, to + key_column, width, count);
    store_rows<head_dim>(dvalues, ones, shared.values, warp_row, to + value_column, width, count);
}

// ---- gradients by queries ----

template <int head_dim> struct QueriesShared {
    struct Stage {
        Tile<KEYS_PER_PAGE, head_dim> keys, values;
    };
    Stage stages[2];                           // the queries pass through the second before the second keys need it
    Tile<QUERIES_PER_TILE, head_dim> doutputs; // stay here: registers hold the queries, and no more
};

template <int head_dim>
DEVICE void attention_backward_queries(const AttentionBackward& arguments, QueriesShared<head_dim>& shared) {
    const AttentionTile tile = arguments.tiles[blockIdx.x];
    const AttentionSpan span = arguments.spans[tile.span];
    const int head = int(blockIdx.y);
    const int64_t key_head = head / (arguments.query_heads / arguments.key_value_heads);
    const int64_t output_width = int64_t(arguments.query_heads) * head_dim;
    const int64_t width = output_width + 2 * int64_t(arguments.key_value_heads) * head_dim;
    const int64_t first_row = int64_t(span.row) + tile.first;
    const int count = minimum(span.length - tile.first, QUERIES_PER_TILE);
    const int keys = tile.first + count;
    const int64_t column = int64_t(head) * head_dim;
    const float scale_log2 = arguments.scale * LOG2_E;

    const bf16* const first_key_row = arguments.rotated + int64_t(span.row) * width + output_width + key_head * head_dim;
    const auto copy_step = [&](int first_key) {
        if (first_key < keys) {
            auto& stage = shared.stages[first_key / KEYS_PER_PAGE % 2];
            const bf16* from = first_key_row + first_key * width;
            copy_rows<BACKWARD_THREADS>(stage.keys, from, width, keys - first_key);
            copy_rows<BACKWARD_THREADS>(stage.values, from + arguments.key_value_heads * head_dim, width, keys - first_key);
        }
        commit_copies();
    };
    copy_rows<BACKWARD_THREADS>(shared.stages[1].keys, arguments.rotated + first_row * width + column, width, count);
    copy_rows<BACKWARD_THREADS>(shared.doutputs, arguments.doutput + first_row * output_width + column, output_width, count);
    commit_copies();
    copy_step(0);
    wait_copies<1>();
    sync_block();
    const int warp_row = 16 * warp();
    LeftRows<head_dim> queries;
    load_left<head_dim>(queries, shared.stages[1].keys, warp_row);
    float log2_sum_exps[2], deltas[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp_row + lane_group() + 8 * half;
        const int64_t at = (first_row + row) * arguments.query_heads + head;
        log2_sum_exps[half] = row < count ? LOG2_E * arguments.log_sum_exp[at] : INFINITE; // no query: probability 0
        deltas[half] = row < count ? arguments.delta[at] : 0.0f;
    }

    const int first_position = tile.first + warp_row;
    const int positions[2] = {first_position + lane_group(), first_position + lane_group() + 8};
    float dqueries[1][head_dim / 8][4];
    clear(dqueries);
    for (int first_key = 0; first_key < keys; first_key += KEYS_PER_PAGE) {
        auto& stage = shared.stages[first_key / KEYS_PER_PAGE % 2];
        wait_copies<0>();
        sync_block();
        copy_step(first_key + KEYS_PER_PAGE);

        float weights[1][KEYS_PER_PAGE / 8][4], dweights[1][KEYS_PER_PAGE / 8][4]; // [16 queries, 64 keys]
        multiply_transposed<head_dim>(weights, queries, stage.keys);
        multiply_tiles<head_dim>(dweights, shared.doutputs, warp_row, stage.values);
        if (first_key + KEYS_PER_PAGE - 1 > first_position) hide_later_keys(weights, first_key, positions);
#pragma unroll
        for (int n = 0; n < KEYS_PER_PAGE / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float p = probability(weights[0][n][i], scale_log2, log2_sum_exps[i / 2]);
                dweights[0][n][i] = score_gradient(p, dweights[0][n][i], deltas[i / 2]);
            }
        }
        multiply_weights(dqueries, dweights, stage.keys, 0);
    }

    // The stage before the last: every warp has met since it was read.
    const float scales[2] = {arguments.scale, arguments.scale};
    store_rows<head_dim>(dqueries, scales, shared.stages[(keys - 1) / KEYS_PER_PAGE % 2 ^ 1].keys, warp_row,
                         arguments.drotated + first_row * width + column, width, count);
}

KERNEL(attention_delta_d32, DELTA_THREADS, AttentionBackward, NoShared) { attention_delta<32>(arguments); }
KERNEL(attention_delta_d64, DELTA_THREADS, AttentionBackward, NoShared) { attention_delta<64>(arguments); }
KERNEL(attention_delta_d128, DELTA_THREADS, AttentionBackward, NoShared) { attention_delta<128>(arguments); }

KERNEL(attention_backward_keys_d32, BACKWARD_THREADS, AttentionBackward, KeysShared<32>) {
    attention_backward_keys<32>(arguments, shared);
}
KERNEL(attention_backward_keys_d64, BACKWARD_THREADS, AttentionBackward, KeysShared<64>) {
    attention_backward_keys<64>(arguments, shared);
}
KERNEL(attention_backward_keys_d128, BACKWARD_THREADS, AttentionBackward, KeysShared<128>) {
    attention_backward_keys<128>(arguments, shared);
}
KERNEL(attention_backward_queries_d32, BACKWARD_THREADS, AttentionBackward, QueriesShared<32>) {
    attention_backward_queries<32>(arguments, shared);
}
KERNEL(attention_backward_queries_d64, BACKWARD_THREADS, AttentionBackward, QueriesShared<64>) {
    attention_backward_queries<64>(arguments, shared);
}
KERNEL(attention_backward_queries_d128, BACKWARD_THREADS, AttentionBackward, QueriesShared<128>) {
    attention_backward_queries<128>(arguments, shared);
}
