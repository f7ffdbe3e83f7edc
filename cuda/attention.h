// What the attention kernels share: the operands' places in shared tiles, the online softmax, and the merge of segments. Each
// formula is here once, because forward and decode must give the same bits for the same row.
//
// A warp owns 16 rows of queries (keys, in the backward by keys). In an accumulator a lane holds two of them, `group` and
// `group + 8`, called half 0 and half 1 here: elements [n][2 * half] and [n][2 * half + 1] are columns 8 n + 2 * member and the
// next (mma.h). Scores stay in registers from the first product to the second: an accumulator of 16 columns, rounded to bf16, is
// the left operand of 16 values of k, element for element.
//
// Online softmax: Milakov and Gimelshein 2018; for attention: Dao et al. 2022 (FlashAttention), Dao 2023 (FlashAttention-2).
#pragma once

#include "include/arguments.h"
#include "include/mma.h"

DEVICE int lane_group() { return lane() / 4; }
DEVICE int lane_member() { return lane() % 4; }

// ---- operands in shared tiles ----

// Where a lane points load_matrices for 16 rows by 16 columns (two chunks) at (row, chunk), `row` a multiple of 8. A tile's
// permutation repeats every 8 rows, so that `row` only adds to the address: one address in a register serves all rows.
//   left_rows      left operand, rows of the tile are rows of the product: load plain
//   right_columns  right operand, rows of the tile are columns of the product (A B^T): load plain, gives two parts of 16 x 8
//   right_rows     right operand, rows of the tile are k (A B): load transposed, gives two parts of 16 x 8
template <class AnyTile> DEVICE const bf16* left_rows(AnyTile& tile, int row, int chunk) {
    return tile.at(lane() % 16, chunk + lane() / 16) + row * AnyTile::COLUMNS;
}
template <class AnyTile> DEVICE const bf16* right_columns(AnyTile& tile, int row, int chunk) {
    return tile.at(lane() / 16 * 8 + lane() % 8, chunk + lane() / 8 % 2) + row * AnyTile::COLUMNS;
}
template <class AnyTile> DEVICE const bf16* right_rows(AnyTile& tile, int row, int chunk) {
    return tile.at(lane() % 16, chunk + lane() / 16) + row * AnyTile::COLUMNS;
}

// One load of 16 x 16 of a right operand is two of its 16 x 8 parts. Loads before `first` are something else.
template <int tiles, int count>
DEVICE void as_right(const uint32_t (&loaded)[count][4], int first, uint32_t (&right)[tiles][2]) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        right[n][0] = loaded[first + n / 2][n % 2 * 2];
        right[n][1] = loaded[first + n / 2][n % 2 * 2 + 1];
    }
}

// Columns 16 step .. 16 step + 15 of an accumulator, rounded, as a left operand.
template <int tiles> DEVICE void as_left(const float (&accumulator)[1][tiles][4], int step, uint32_t (&left)[1][4]) {
    const float(&low)[4] = accumulator[0][2 * step];
    const float(&high)[4] = accumulator[0][2 * step + 1];
    left[0][0] = pack(low[0], low[1]);
    left[0][1] = pack(low[2], low[3]);
    left[0][2] = pack(high[0], high[1]);
    left[0][3] = pack(high[2], high[3]);
}

template <int tiles> DEVICE void clear(float (&accumulator)[1][tiles][4]) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) accumulator[0][n][i] = 0.0f;
    }
}

// The warp's 16 rows of a tile as left operands of every step of k, to be kept in registers.
template <int head_dim> using LeftRows = uint32_t[head_dim / 16][4];

template <int head_dim, class AnyTile> DEVICE void load_left(LeftRows<head_dim>& left, AnyTile& tile, int row) {
    const bf16* rows[head_dim / 16];
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) rows[step] = left_rows(tile, row, 2 * step);
    load_matrices<head_dim / 16>(left, rows);
}

// product[16, 8 tiles] = left * tile^T, k ascending.
template <int head_dim, int tiles, class AnyTile>
DEVICE void multiply_transposed(float (&product)[1][tiles][4], const LeftRows<head_dim>& left, AnyTile& tile) {
    clear(product);
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
        const bf16* rows[tiles / 2];
#pragma unroll
        for (int i = 0; i < tiles / 2; ++i) rows[i] = right_columns(tile, 16 * i, 2 * step);
        uint32_t loaded[tiles / 2][4];
        load_matrices<tiles / 2>(loaded, rows);
        uint32_t right[tiles][2];
        as_right(loaded, 0, right);
        const uint32_t operand[1][4] = {{left[step][0], left[step][1], left[step][2], left[step][3]}};
        multiply<1, tiles>(product, operand, right);
    }
}

// The same with both operands in shared memory: rows row .. row + 15 of `left` by all rows of `right`.
template <int head_dim, int tiles, class LeftTile, class RightTile>
DEVICE void multiply_tiles(float (&product)[1][tiles][4], LeftTile& left, int row, RightTile& right) {
    clear(product);
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
        const bf16* rows[1 + tiles / 2];
        rows[0] = left_rows(left, row, 2 * step);
#pragma unroll
        for (int i = 0; i < tiles / 2; ++i) rows[1 + i] = right_columns(right, 16 * i, 2 * step);
        uint32_t loaded[1 + tiles / 2][4];
        load_matrices<1 + tiles / 2>(loaded, rows);
        const uint32_t operand[1][4] = {{loaded[0][0], loaded[0][1], loaded[0][2], loaded[0][3]}};
        uint32_t operands[tiles][2];
        as_right(loaded, 1, operands);
        multiply<1, tiles>(product, operand, operands);
    }
}

// sum[16, 8 tiles] += weights[16, 8 weight_tiles] * tile[.., from column 8 first_chunk], k ascending; weights rounded to bf16.
template <int weight_tiles, int tiles, class AnyTile>
DEVICE void multiply_weights(float (&sum)[1][tiles][4], const float (&weights)[1][weight_tiles][4], AnyTile& tile,
                             int first_chunk) {
#pragma unroll
    for (int step = 0; step < weight_tiles / 2; ++step) {
        uint32_t left[1][4];
        as_left(weights, step, left);
        const bf16* rows[tiles / 2];
#pragma unroll
        for (int i = 0; i < tiles / 2; ++i) rows[i] = right_rows(tile, 16 * step, first_chunk + 2 * i);
        uint32_t loaded[tiles / 2][4];
        load_matrices_transposed<tiles / 2>(loaded, rows);
        uint32_t right[tiles][2];
        as_right(loaded, 0, right);
        multiply<1, tiles>(sum, left, right);
    }
}

// ---- rows between global and shared memory ----

// Starts the copy of `rows` rows of head_dim to the tile; rows from `count` on become zero and are not read.
template <int threads, int rows, int head_dim>
DEVICE void copy_rows(Tile<rows, head_dim>& tile, const bf16* from, int64_t pitch, int count) {
    constexpr int chunks = head_dim / 8;
    constexpr int rows_at_once = threads / chunks;
    static_assert(rows % rows_at_once == 0 && rows_at_once % 8 == 0); // the tile's permutation repeats every 8 rows
    const int first_row = int(threadIdx.x) / chunks, chunk = int(threadIdx.x) % chunks;
    bf16* const to = tile.at(first_row, chunk);
    from += first_row * pitch + chunk * 8;
#pragma unroll
    for (int row = 0; row < rows; row += rows_at_once) {
        copy_async(to + row * head_dim, from, first_row + row < count);
        from += rows_at_once * pitch;
    }
}

// value * factor, any zero as +0: a masked key may or may not have turned a sum's -0 into +0.
DEVICE float normalised(float value, float factor) { return multiply_add(value, factor, 0.0f); }

// Writes the warp's 16 rows of an accumulator, times factors[half], to global memory in bf16, as far as they lie below `count`.
// They pass through rows row .. row + 15 of a tile that no other warp uses there, so that 16 bytes go out at a time.
template <int head_dim, class AnyTile>
DEVICE void store_rows(const float (&values)[1][head_dim / 8][4], const float (&factors)[2], AnyTile& tile, int row, bf16* to,
                       int64_t pitch, int count) {
    constexpr int chunks = head_dim / 8;
#pragma unroll
    for (int n = 0; n < chunks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float low = normalised(values[0][n][2 * half], factors[half]);
            const float high = normalised(values[0][n][2 * half + 1], factors[half]);
            store4(tile.at(row + lane_group() + 8 * half, n) + 2 * lane_member(), pack(low, high));
        }
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < 16 * chunks / WARP; ++i) {
        const int index = i * WARP + lane();
        const int at = row + index / chunks, chunk = index % chunks;
        if (at < count) store16(to + at * pitch + chunk * 8, load16(tile.at(at, chunk)));
    }
}

// A page `place` bytes from `blocks`.
DEVICE const bf16* page_at(const bf16* blocks, int64_t place) {
    return reinterpret_cast<const bf16*>(reinterpret_cast<uintptr_t>(blocks) + uintptr_t(place));
}

// Keys and values of one key/value head of one sequence, page by page in turn (keys 0, values 0, keys 1, ..), through a ring of
// three tiles: while one is read, the next is on its way or there, and the one after goes where the last was.
template <int threads, int head_dim> struct PageStream {
    using PageTile = Tile<KEYS_PER_PAGE, head_dim>;
    PageTile* ring;       // three tiles
    int to;               // the tile that is filled next; it is being read until then
    const bf16* blocks;   // what the places of pages count from
    const int64_t* pages; // page table, from the next 32 entries on
    Vector8 entries;      // each lane's of the last 32: one load, and its latency, for 2,048 keys
    int entry;            // of them, the one that comes next
    const bf16* page;     // whose keys were copied last
    int key_offset;       // of this head's keys in a page
    int value_offset;     // and of its values
    int keys_left;        // from `page` on: what is beyond becomes zero
    bool values_next;

    DEVICE void copy_next() {
        if (keys_left > 0) {
            if (!values_next) take_page();
            copy_rows<threads>(ring[to], page + (values_next ? value_offset : key_offset), head_dim, keys_left);
            if (values_next) keys_left -= KEYS_PER_PAGE;
            values_next = !values_next;
        }
        commit_copies();
        to = to == 2 ? 0 : to + 1;
    }

    DEVICE void take_page() {
        if (entry == WARP) {
            if (lane() * KEYS_PER_PAGE < keys_left) entries = load8(pages + lane());
            pages += WARP;
            entry = 0;
        }
        const uint64_t low = shuffle(entries.words[0], entry), high = shuffle(entries.words[1], entry);
        page = page_at(blocks, int64_t(high << 32 | low));
        ++entry;
    }

    // `table` points to the page of the first of `keys` keys; pages hold `page_heads` heads, of which this is number `head`. Tile 2 of
    // the ring stays free until the first `next`.
    DEVICE void start(PageTile* ring_of_three, const bf16* origin, const int64_t* table, int page_heads, int head, int keys) {
        ring = ring_of_three;
        to = 0;
        blocks = origin;
        pages = table;
        entries = Vector8{};
        entry = WARP;
        key_offset = head * KEYS_PER_PAGE * head_dim;
        value_offset = (page_heads + head) * KEYS_PER_PAGE * head_dim;
        keys_left = keys;
        values_next = false;
        copy_next();
        copy_next();
    }

    // The next tile, filled. All threads of the block meet here; the tile before is free to be written again.
    DEVICE PageTile& next() {
        wait_copies<1>();
        sync_block();
        copy_next();
        return ring[to];
    }

    // After the last tile: the one before it, which nobody reads or fills any more.
    DEVICE PageTile& free_tile() { return ring[to == 0 ? 2 : to - 1]; }
};

// ---- online softmax ----

// What a warp's 16 queries have gathered from the keys seen so far, over `columns` columns of the values.
template <int columns> struct Gathered {
    float values[1][columns / 8][4]; // sum of exp(scale (score - maximum)) value
    float maxima[2];                 // of the scores, before the scale; -inf where no key was visible
    float sums[2];                   // of exp(scale (score - maximum)): only this lane's columns, until add_lanes

    DEVICE void reset() {
        clear(values);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            maxima[half] = -INFINITE;
            sums[half] = 0.0f;
        }
    }

    DEVICE void add_lanes() {
#pragma unroll
        for (int half = 0; half < 2; ++half) sums[half] = warp_sum<4>(sums[half]);
    }
};

// Where no key was visible the maximum is -inf, and any number will do to subtract.
DEVICE float finite(float maximum) { return maximum > -INFINITE ? maximum : 0.0f; }

// exp(scale (maximum - merged)): what brings sums under one maximum to a larger one. 0 from -inf to a number, exactly 1 from a
// number to itself. `scale_log2` is scale log2(e).
DEVICE float decay(float maximum, float merged, float scale_log2) {
    return exp2_fast((maximum - finite(merged)) * scale_log2);
}

// The factors of two parts whose maxima and sums are merged into `maximum` and `sum`. A part that saw no key changes no bit.
struct MergeFactors {
    float old, fresh;
};
DEVICE MergeFactors merge(float& maximum, float& sum, float fresh_maximum, float fresh_sum, float scale_log2) {
    const float merged = ::maximum(maximum, fresh_maximum);
    const MergeFactors factors = {decay(maximum, merged, scale_log2), decay(fresh_maximum, merged, scale_log2)};
    sum = multiply_add(sum, factors.old, fresh_sum * factors.fresh);
    maximum = merged;
    return factors;
}
DEVICE float merge_value(float value, float fresh, MergeFactors factors) {
    return multiply_add(value, factors.old, fresh * factors.fresh);
}

// Hides the keys after each query: keys first_key + column, queries at `positions` of the two halves.
template <int tiles> DEVICE void hide_later_keys(float (&scores)[1][tiles][4], int first_key, const int (&positions)[2]) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first_key + 8 * n + 2 * lane_member() + i % 2 > positions[i / 2]) scores[0][n][i] = -INFINITE;
        }
    }
}

// Takes in the scores of 64 more keys: maxima, sums and values are brought to the new maxima, and the scores become the weights
// of the keys' values. Hidden keys enter as exact zeros.
template <int columns, int tiles>
DEVICE void take_in(Gathered<columns>& gathered, float (&scores)[1][tiles][4], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = gathered.maxima[half];
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
            largest = maximum(largest, maximum(scores[0][n][2 * half], scores[0][n][2 * half + 1]));
        }
        largest = warp_maximum<4>(largest);
        const float factor = decay(gathered.maxima[half], largest, scale_log2);
        const float shift = -finite(largest) * scale_log2;
        float sum = gathered.sums[half] * factor;
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                scores[0][n][i] = exp2_fast(multiply_add(scores[0][n][i], scale_log2, shift));
                sum += scores[0][n][i];
            }
        }
        gathered.maxima[half] = largest;
        gathered.sums[half] = sum;
        if (factor == 1.0f) continue; // after many keys the maximum seldom moves, and a product with 1 changes no bit
#pragma unroll
        for (int n = 0; n < columns / 8; ++n) {
            gathered.values[0][n][2 * half] *= factor;
            gathered.values[0][n][2 * half + 1] *= factor;
        }
    }
}

// One page of keys and values for 16 queries: scores, softmax, weighted values. Forward and decode are made of this step.
template <int head_dim, int columns, class Stream>
DEVICE void attend_page(Gathered<columns>& gathered, const LeftRows<head_dim>& queries, Stream& stream, int first_key,
                        const int (&positions)[2], int first_position, int first_chunk, float scale_log2) {
    float scores[1][KEYS_PER_PAGE / 8][4];
    multiply_transposed<head_dim>(scores, queries, stream.next());
    if (first_key + KEYS_PER_PAGE - 1 > first_position) hide_later_keys(scores, first_key, positions);
    take_in(gathered, scores, scale_log2);
    multiply_weights(gathered.values, scores, stream.next(), first_chunk);
}

// ---- backward ----

// softmax(scale score) again, from the natural log-sum-exp of the row times log2(e).
DEVICE float probability(float score, float scale_log2, float log2_sum_exp) {
    return exp2_fast(multiply_add(score, scale_log2, -log2_sum_exp));
}
// d loss / d (scale score) = p (d loss / dp - delta) with delta = sum over keys of p d loss / dp, which is also the sum over
// columns of doutput output.
DEVICE float score_gradient(float probability, float dprobability, float delta) {
    return probability * (dprobability - delta);
}
