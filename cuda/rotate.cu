// What happens to projected queries, keys and values before attention, in one pass: bias (Qwen2), RMSNorm of each query and key
// head (Qwen3), rotary embedding (Su et al. 2021; halves are rotated, not pairs). And its backward.
//
//   forward    x = projected + bias;  n = weight * x * r, r = 1 / sqrt(mean(x^2) + epsilon);
//              rotated = (n_low cos - n_high sin, n_high cos + n_low sin).  Value heads: rotated = x.
//   backward   dn = the gradient rotated back;  g = dn * weight;  dx = r * (g - x * r^2 * mean(g x));
//              dweight += dn * x * r;  dbias += dx
//
// Floor in bytes per element of a row: 4 forward; backward 4 for queries and keys (6 where they are normed, 2 for values, and only
// where there is a bias); beside that 4 head_dim per row for the cosines and sines.
//
// A lane holds 8 neighbouring columns of the lower half of a head and their partners of the upper half, so that head_dim / 16 lanes
// hold a head and nothing is exchanged but the sums of the norm.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

namespace {

// Where a lane stands in the heads that its warp takes at once.
template <int head_dim> struct Place {
    static constexpr int LANES = head_dim / (2 * CHUNK); // per head
    static constexpr int HEADS = WARP / LANES;           // at once
    static constexpr int HALF = LANES;                   // chunks in half a head

    DEVICE static int head() { return lane() / LANES; }
    DEVICE static int chunk() { return lane() % LANES; }
};

// The 16 columns of a lane: 8 of the lower half, their 8 partners.
struct Halves {
    float low[CHUNK], high[CHUNK];

    template <class Combine> DEVICE void combine(const Halves& other, Combine with) {
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            low[k] = with(low[k], other.low[k]);
            high[k] = with(high[k], other.high[k]);
        }
    }
    DEVICE void add(const Halves& other) {
        combine(other, [](float a, float b) { return a + b; });
    }
    // sum of low * other.low + high * other.high
    DEVICE float dot(const Halves& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            sum = multiply_add(low[k], other.low[k], sum);
            sum = multiply_add(high[k], other.high[k], sum);
        }
        return sum;
    }
    // By the angles of cosines and sines; direction -1 turns back.
    DEVICE void rotate(const float (&cosines)[CHUNK], const float (&sines)[CHUNK], float direction) {
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            const float sine = sines[k] * direction;
            const float a = low[k], b = high[k];
            low[k] = multiply_add(a, cosines[k], -(b * sine));
            high[k] = multiply_add(b, cosines[k], a * sine);
        }
    }
};

// A lane's part of a head as stored.
struct PackedHalves {
    Vector16 low, high;

    template <int head_dim> DEVICE void load(const bf16* head) {
        low = load16(head + Place<head_dim>::chunk() * CHUNK);
        high = load16(head + Place<head_dim>::chunk() * CHUNK + head_dim / 2);
    }
    DEVICE Halves unpack() const {
        Halves halves;
        unpack8(low, halves.low);
        unpack8(high, halves.high);
        return halves;
    }
};

template <int head_dim> DEVICE void store_halves(bf16* head, const Halves& halves) {
    store16(head + Place<head_dim>::chunk() * CHUNK, pack8(halves.low));
    store16(head + Place<head_dim>::chunk() * CHUNK + head_dim / 2, pack8(halves.high));
}

// A lane's part of a head of f32 in shared memory whose first chunk is `first`.
template <int head_dim, class Row> DEVICE Halves read_halves(Row& row, int first) {
    Halves halves;
    row.read(first + Place<head_dim>::chunk(), halves.low);
    row.read(first + Place<head_dim>::chunk() + Place<head_dim>::HALF, halves.high);
    return halves;
}

template <int head_dim, class Row> DEVICE void add_halves(Row& row, int first, const Halves& terms) {
    row.add(first + Place<head_dim>::chunk(), terms.low);
    row.add(first + Place<head_dim>::chunk() + Place<head_dim>::HALF, terms.high);
}
// Of a head of f32 in global memory.
template <int head_dim> DEVICE Halves load_bias(const float* head) {
    const float* const from = head + Place<head_dim>::chunk() * CHUNK;
    Halves halves;
#pragma unroll
    for (int k = 0; k < CHUNK; ++k) {
        halves.low[k] = from[k];
        halves.high[k] = from[k + head_dim / 2];
    }
    return halves;
}

DEVICE float inverse_rms(float squares, int head_dim, float epsilon) {
    return 1.0f / square_root(squares / float(head_dim) + epsilon);
}

} // namespace

// ---- forward: one warp per row, so that a row of the table is read once; it walks the row's heads ----

template <int head_dim> struct RotateShared {
    SharedRow<PROJECTED_WIDTH> bias;
    SharedRow<head_dim> norms[2];     // of queries and of keys
    SharedRow<head_dim> table[WARPS]; // each warp's row: cosines, then sines
};

constexpr int STEPS = 2; // groups of heads whose loads are under way together

template <int head_dim> DEVICE void rotate_rows(const Rotate& arguments, RotateShared<head_dim>& shared) {
    using Here = Place<head_dim>;
    const int heads = arguments.query_heads + 2 * arguments.key_value_heads;
    const int turned = arguments.query_heads + arguments.key_value_heads;
    const bool biased = arguments.bias != nullptr;
    const bool normed = arguments.query_norm != nullptr;
    if (int64_t(blockIdx.x) * WARPS >= arguments.rows) return; // nothing to rotate, so no need of the weights
    if (biased) shared.bias.fill(arguments.bias, heads * head_dim, int(threadIdx.x), THREADS);
    if (normed) {
        shared.norms[0].fill(arguments.query_norm, head_dim, int(threadIdx.x), THREADS);
        shared.norms[1].fill(arguments.key_norm, head_dim, int(threadIdx.x), THREADS);
    }
    sync_block();

    SharedRow<head_dim>& table = shared.table[warp()];
    for (int64_t row = grid_warp(); row < arguments.rows; row += grid_warps()) {
        sync_warp(); // every lane has read the last row's angles
        table.fill(arguments.table + int64_t(arguments.positions[row]) * head_dim, head_dim, lane(), WARP);
        sync_warp();
        float cosines[CHUNK], sines[CHUNK];
        table.read(Here::chunk(), cosines);
        table.read(Here::chunk() + Here::HALF, sines);

        const bf16* const from = arguments.projected + row * heads * head_dim;
        bf16* const to = arguments.rotated + row * heads * head_dim;
        for (int first = 0; first < heads; first += STEPS * Here::HEADS) {
            PackedHalves packed[STEPS];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int head = first + s * Here::HEADS + Here::head();
                if (head < heads) packed[s].template load<head_dim>(from + head * head_dim);
            }
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int head = first + s * Here::HEADS + Here::head();
                Halves x = {};
                if (head < heads) {
                    x = packed[s].unpack();
                    if (biased) x.add(read_halves<head_dim>(shared.bias, head * 2 * Here::HALF));
                }
                if (normed) {
                    const float inverse = inverse_rms(warp_sum<Here::LANES>(x.dot(x)), head_dim, arguments.epsilon);
                    if (head < turned) {
                        const Halves weight = read_halves<head_dim>(shared.norms[head < arguments.query_heads ? 0 : 1], 0);
                        x.combine(weight, [&](float value, float factor) { return factor * (value * inverse); });
                    }
                }
                if (head < turned) x.rotate(cosines, sines, 1.0f);
                if (head < heads) store_halves<head_dim>(to + head * head_dim, x);
            }
        }
    }
}

KERNEL(rotate_d32, THREADS, Rotate, RotateShared<32>) { rotate_rows<32>(arguments, shared); }
KERNEL(rotate_d64, THREADS, Rotate, RotateShared<64>) { rotate_rows<64>(arguments, shared); }
KERNEL(rotate_d128, THREADS, Rotate, RotateShared<128>) { rotate_rows<128>(arguments, shared); }

// ---- backward: a block walks its rows in tiles, whose angles it keeps in shared memory. A warp owns columns: it takes its groups of
// heads in turn over all rows of the tile, sums of gradients in registers, and adds them to the block's sums once per tile. ----

constexpr int TILE = 16; // rows

template <int head_dim> struct RotateBackwardShared {
    SharedRow<head_dim> norms[2];     // of queries and of keys
    SharedRow<head_dim> table[TILE];  // cosines, then sines
    SharedRow<PROJECTED_WIDTH> bias;  // sum of gradients over the block's rows
    SharedRow<Place<head_dim>::HEADS * head_dim> norm_sums[2][WARPS]; // each warp's, for every head that it takes at once
};

template <int head_dim>
DEVICE void rotate_rows_backward(const RotateBackward& arguments, RotateBackwardShared<head_dim>& shared) {
    using Here = Place<head_dim>;
    const int heads = arguments.query_heads + 2 * arguments.key_value_heads;
    const int turned = arguments.query_heads + arguments.key_value_heads;
    const int width = heads * head_dim;
    const bool biased = arguments.bias != nullptr;
    const bool normed = arguments.query_norm != nullptr;
    const int touched = biased ? heads : turned; // the gradient of values passes as it is
    if (biased) shared.bias.clear(width, int(threadIdx.x), THREADS);
    if (normed) {
        shared.norms[0].fill(arguments.query_norm, head_dim, int(threadIdx.x), THREADS);
        shared.norms[1].fill(arguments.key_norm, head_dim, int(threadIdx.x), THREADS);
        for (int kind = 0; kind < 2; ++kind) shared.norm_sums[kind][warp()].clear(Here::HEADS * head_dim, lane(), WARP);
    }

    const int64_t begin = int64_t(blockIdx.x) * arguments.rows_per_part;
    const int64_t end = minimum(begin + arguments.rows_per_part, arguments.rows);
    for (int64_t tile = begin; tile < end; tile += TILE) {
        const int rows = int(minimum(end - tile, int64_t(TILE)));
        sync_block(); // every warp has read the last tile's angles
        for (int r = warp(); r < rows; r += WARPS)
            shared.table[r].fill(arguments.table + int64_t(arguments.positions[tile + r]) * head_dim, head_dim, lane(), WARP);
        sync_block();

        for (int first = warp() * Here::HEADS; first < touched; first += WARPS * Here::HEADS) {
            const int head = first + Here::head();
            const int kind = head < arguments.query_heads ? 0 : 1;
            Halves bias_sums = {}, norm_sums = {};
#pragma unroll 1
            for (int r = 0; r < rows; ++r) {
                const int64_t place = (tile + r) * width + head * head_dim;
                PackedHalves packed = {}, packed_x = {};
                if (head < touched) packed.template load<head_dim>(arguments.gradient + place);
                if (normed && head < turned) packed_x.template load<head_dim>(arguments.projected + place);
                Halves gradient = packed.unpack();
                if (head < turned) {
                    float cosines[CHUNK], sines[CHUNK];
                    shared.table[r].read(Here::chunk(), cosines);
                    shared.table[r].read(Here::chunk() + Here::HALF, sines);
                    gradient.rotate(cosines, sines, -1.0f);
                }
                if (normed) { // all lanes, for the sums
                    Halves x = packed_x.unpack();
                    if (biased && head < turned) x.add(load_bias<head_dim>(arguments.bias + head * head_dim));
                    Halves weighted = read_halves<head_dim>(shared.norms[kind], 0);
                    weighted.combine(gradient, [](float weight, float value) { return value * weight; });
                    const float inverse = inverse_rms(warp_sum<Here::LANES>(x.dot(x)), head_dim, arguments.epsilon);
                    const float projection = warp_sum<Here::LANES>(weighted.dot(x)) * inverse * inverse / float(head_dim);
                    if (head < turned) {
                        gradient.combine(x, [&](float value, float by) { return by * inverse * value; });
                        norm_sums.add(gradient);
                        gradient = weighted;
                        gradient.combine(x, [&](float value, float by) { return inverse * (value - by * projection); });
                    }
                }
                if (head < turned) store_halves<head_dim>(arguments.gradient + place, gradient);
                if (biased) bias_sums.add(gradient);
            }
            if (biased && head < heads) add_halves<head_dim>(shared.bias, head * 2 * Here::HALF, bias_sums);
            if (normed && head < turned)
                add_halves<head_dim>(shared.norm_sums[kind][warp()], Here::head() * 2 * Here::HALF, norm_sums);
        }
    }
    if (arguments.parts == nullptr) return;

    sync_block();
    float* part = arguments.parts + int64_t(blockIdx.x) * arguments.part_width;
    if (biased) {
        shared.bias.copy_to(part, width, int(threadIdx.x), THREADS);
        part += width;
    }
    if (normed && int(threadIdx.x) < 2 * head_dim / 4) {
        const int kind = int(threadIdx.x) / (head_dim / 4), quad = int(threadIdx.x) % (head_dim / 4);
        float total[4] = {};
        for (int i = 0; i < WARPS * Here::HEADS; ++i) {
            float terms[4];
            load_floats(shared.norm_sums[kind][i / Here::HEADS].quad(i % Here::HEADS * (head_dim / 4) + quad), terms);
#pragma unroll
            for (int k = 0; k < 4; ++k) total[k] += terms[k];
        }
        store_floats(part + kind * head_dim + 4 * quad, total);
    }
}

RESIDENT_KERNEL(rotate_backward_d32, THREADS, 2, RotateBackward, RotateBackwardShared<32>) { rotate_rows_backward<32>(arguments, shared); }
RESIDENT_KERNEL(rotate_backward_d64, THREADS, 2, RotateBackward, RotateBackwardShared<64>) { rotate_rows_backward<64>(arguments, shared); }
RESIDENT_KERNEL(rotate_backward_d128, THREADS, 2, RotateBackward, RotateBackwardShared<128>) { rotate_rows_backward<128>(arguments, shared); }
