// Backward of attention over blocks of keys, without atomics: every sum has one owner and a fixed order (Dao 2023, with the
// gradients by queries in a pass of their own: 7 products instead of 5, and the same bits in every run).
//   attention_delta              delta = sum over columns of doutput output, per row and head
//   attention_backward_keys      dV = sum of P^T doutput, dK = scale sum of dS^T Q, over the group's heads, then queries ascending; the
//                                queries of a document that several ranks share are brought here for it
//   attention_backward_queries   dQ = scale sum of dS K, over keys ascending
// with P = exp(scale Q K^T - log_sum_exp) computed again and dS = P (doutput V^T - delta). P and dS are rounded to bf16 only as
// operands; they never leave registers, because each kernel computes them in the orientation it goes on with.
#include "attention.h"

constexpr int DELTA_THREADS = 128;

// A warp per row; head_dim / 8 lanes per head, 8 columns each.
template <int head_dim> DEVICE void attention_delta(const AttentionDelta& arguments) {
    constexpr int lanes = head_dim / 8;
    const int column = lane() % lanes * 8;
    const int64_t stride = int64_t(gridDim.x) * (DELTA_THREADS / WARP);
    for (int64_t row = int64_t(blockIdx.x) * (DELTA_THREADS / WARP) + warp(); row < arguments.rows; row += stride) {
        // The bound is of a whole warp, so that all lanes meet in the sum.
#pragma unroll 4
        for (int base = 0; base < arguments.query_heads; base += WARP / lanes) {
            const int head = base + lane() / lanes;
            const int64_t index = row * arguments.query_heads + head;
            float sum = 0.0f;
            if (head < arguments.query_heads) {
                float doutput[8], output[8];
                unpack8(load16(arguments.doutput + index * head_dim + column), doutput);
                unpack8(load16(arguments.output + index * head_dim + column), output);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum = multiply_add(doutput[i], output[i], sum);
            }
            sum = warp_sum<lanes>(sum);
            if (head < arguments.query_heads && column == 0) arguments.delta[index] = sum;
        }
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

template <int head_dim>
DEVICE void attention_backward_keys(const AttentionBackwardKeys& arguments, KeysShared<head_dim>& shared) {
    constexpr int QUERIES = QUERIES_PER_STEP<head_dim>;
    constexpr int STEPS_PER_TILE = QUERIES_PER_TILE / QUERIES;
    const AttentionKeys keys = arguments.keys[blockIdx.x];
    const HeadRange& heads = arguments.heads;
    const int group = heads.query_heads / heads.key_value_heads;
    const float scale_log2 = arguments.scale * LOG2_E;

    // A step is QUERIES queries of one head: all steps of the first head of the group, then of the next.
    struct Step {
        int head;   // of the range
        int number; // STEPS_PER_TILE times the tile, and the step in it
    };
    const int first_number = keys.first_tile * STEPS_PER_TILE, end_number = keys.end_tile * STEPS_PER_TILE;
    const int first_head = int(blockIdx.y) * group, end_head = first_head + group;
    const auto after = [&](Step step) {
        return step.number + 1 < end_number ? Step{step.head, step.number + 1} : Step{step.head + 1, first_number};
    };
    float statistic = 0.0f; // this thread's of the step copied last
    const auto copy_step = [&](Step step, auto& stage) {
        if (step.head < end_head) {
            const QueryRows& from = arguments.queries;
            const AttentionSpan tile = arguments.tiles[step.number / STEPS_PER_TILE];
            const int first_query = step.number % STEPS_PER_TILE * QUERIES;
            const int64_t row = tile.row + first_query;
            const int rows = tile.length - first_query;
            const int column = step.head * head_dim;
            copy_rows<BACKWARD_THREADS>(stage.queries, from.queries + row * from.query_pitch + column, from.query_pitch, rows);
            copy_rows<BACKWARD_THREADS>(stage.doutputs, from.doutputs + row * from.doutput_pitch + column, from.doutput_pitch, rows);
            const int query = int(threadIdx.x) % QUERIES;
            const int64_t at = (row + query) * from.statistic_pitch + step.head;
            if (int(threadIdx.x) < QUERIES) {
                statistic = query < rows ? LOG2_E * from.log_sum_exps[at] : INFINITE; // no query: probability 0
            } else if (int(threadIdx.x) < 2 * QUERIES) {
                statistic = query < rows ? from.deltas[at] : 0.0f;
            }
        }
        commit_copies();
    };

    const bf16* const block = arguments.blocks + (int64_t(keys.block) * 2 * heads.count + blockIdx.y) * KEYS_PER_PAGE * head_dim;
    copy_rows<BACKWARD_THREADS>(shared.keys, block, head_dim, KEYS_PER_PAGE);
    copy_rows<BACKWARD_THREADS>(shared.values, block + heads.count * KEYS_PER_PAGE * head_dim, head_dim, KEYS_PER_PAGE);
    Step step = {first_head, first_number};
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
        // Of the first query, from the first key on.
        const int position = arguments.tiles[step.number / STEPS_PER_TILE].past + step.number % STEPS_PER_TILE * QUERIES - keys.first;
        const bool diagonal = position < KEYS_PER_PAGE;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; ++n) {
            const int query = 8 * n + 2 * lane_member();
            const Vector8 log2_sum_exps = load8(&stage.statistics[0][query]), deltas = load8(&stage.statistics[1][query]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool hidden = diagonal && warp_row + lane_group() + 8 * (i / 2) > position + query + i % 2;
                const float p = probability(weights[0][n][i], scale_log2, bits_to_float(log2_sum_exps.words[i % 2]));
                weights[0][n][i] = hidden ? 0.0f : p;
                dweights[0][n][i] = score_gradient(weights[0][n][i], dweights[0][n][i], bits_to_float(deltas.words[i % 2]));
            }
        }
        multiply_weights(dvalues, weights, stage.doutputs, 0);
        multiply_weights(dkeys, dweights, stage.queries, 0);
    }

    // The gradients pass through the warp's rows of the keys and values, which it alone has read.
    sync_warp();
    const int64_t width = (heads.query_heads + 2 * int64_t(heads.key_value_heads)) * head_dim;
    const int64_t column = (int64_t(heads.query_heads) + heads.first + blockIdx.y) * head_dim;
    bf16* const to = arguments.drotated + keys.row * width + column;
    const float scales[2] = {arguments.scale, arguments.scale}, ones[2] = {1.0f, 1.0f};
    store_rows<head_dim>(dkeys, scales, shared.keys, warp_row, to, width, keys.length);
    store_rows<head_dim>(dvalues, ones, shared.values, warp_row, to + heads.key_value_heads * head_dim, width, keys.length);
    wait_copies<0>();
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
DEVICE void attention_backward_queries(const AttentionBackwardQueries& arguments, QueriesShared<head_dim>& shared) {
    const AttentionSpan tile = arguments.tiles[blockIdx.x];
    const HeadRange& heads = arguments.heads;
    const int group = heads.query_heads / heads.key_value_heads;
    const int head = heads.first * group + int(blockIdx.y);
    const int64_t output_width = int64_t(heads.query_heads) * head_dim;
    const int64_t width = output_width + 2 * int64_t(heads.key_value_heads) * head_dim;
    const int64_t first_row = tile.row;
    const int count = tile.length;
    const int keys = tile.past + count; // those that the last query sees
    const int64_t column = int64_t(head) * head_dim;
    const float scale_log2 = arguments.scale * LOG2_E;

    const int64_t* const pages = arguments.pages + tile.page;
    const int page_head = int(blockIdx.y) / group;
    const auto copy_step = [&](int first_key) {
        if (first_key < keys) {
            auto& stage = shared.stages[first_key / KEYS_PER_PAGE % 2];
            const bf16* const page = page_at(arguments.blocks, pages[first_key / KEYS_PER_PAGE]);
            const bf16* const from = page + page_head * KEYS_PER_PAGE * head_dim;
            copy_rows<BACKWARD_THREADS>(stage.keys, from, head_dim, keys - first_key);
            copy_rows<BACKWARD_THREADS>(stage.values, from + heads.count * KEYS_PER_PAGE * head_dim, head_dim, keys - first_key);
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
        const int64_t at = (first_row + row) * heads.query_heads + head;
        log2_sum_exps[half] = row < count ? LOG2_E * arguments.log_sum_exp[at] : INFINITE; // no query: probability 0
        deltas[half] = row < count ? arguments.delta[at] : 0.0f;
    }

    const int first_position = tile.past + warp_row;
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

KERNEL(attention_delta_d32, DELTA_THREADS, AttentionDelta, NoShared) { attention_delta<32>(arguments); }
KERNEL(attention_delta_d64, DELTA_THREADS, AttentionDelta, NoShared) { attention_delta<64>(arguments); }
KERNEL(attention_delta_d128, DELTA_THREADS, AttentionDelta, NoShared) { attention_delta<128>(arguments); }

KERNEL(attention_backward_keys_d32, BACKWARD_THREADS, AttentionBackwardKeys, KeysShared<32>) {
    attention_backward_keys<32>(arguments, shared);
}
KERNEL(attention_backward_keys_d64, BACKWARD_THREADS, AttentionBackwardKeys, KeysShared<64>) {
    attention_backward_keys<64>(arguments, shared);
}
KERNEL(attention_backward_keys_d128, BACKWARD_THREADS, AttentionBackwardKeys, KeysShared<128>) {
    attention_backward_keys<128>(arguments, shared);
}
KERNEL(attention_backward_queries_d32, BACKWARD_THREADS, AttentionBackwardQueries, QueriesShared<32>) {
    attention_backward_queries<32>(arguments, shared);
}
KERNEL(attention_backward_queries_d64, BACKWARD_THREADS, AttentionBackwardQueries, QueriesShared<64>) {
    attention_backward_queries<64>(arguments, shared);
}
KERNEL(attention_backward_queries_d128, BACKWARD_THREADS, AttentionBackwardQueries, QueriesShared<128>) {
    attention_backward_queries<128>(arguments, shared);
}
