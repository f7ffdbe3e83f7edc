// The language-model head after its product: rows of logits (f32, [rows, vocabulary]) become log-probabilities, entropies,
// gradients and sampled ids. One block per row; each kernel reads the row once.
//
// With z = logit / temperature, M = max z and S = sum exp(z - M):
//     log p(t) = (z_t - M) - ln S        H = -sum p ln p = ln S - sum exp(z - M) (z - M) / S
// The largest z add exactly 1 each to S. They are counted apart and ln S is taken as ln(1 + the rest): a policy that is sure of
// its token has a rest of 1e-4 or 1e-8, of which S itself would keep three digits or none.
//
// A row is cut into stretches of 1,024 ids. A warp reduces a stretch, relative to the stretch's own maximum, while it lies in
// registers; the block then joins the stretches. The order of all sums follows from the vocabulary alone. head_scores and
// head_sample share every line of this, so that a token's log-probability has the same bits in both.
#include "include/arguments.h"

constexpr int THREADS = 256;
constexpr int PIECES = 8; // of 4 ids per lane and stretch: 8 independent 16-byte loads
constexpr int STRETCH = PIECES * WARP * 4;
constexpr int STRETCHES = int(HEAD_MAX_VOCABULARY) / STRETCH;
static_assert(STRETCHES == THREADS, "each thread joins one stretch");

// Stands for a z that is not there: finite, so that its share of a sum is 0 and not 0 times infinity.
constexpr float NOTHING = -1e30f;

DEVICE float natural_exp(float x) { return exp2_fast(x * LOG2_E); }

// ln(1 + x) for x >= 0, to full precision for small x too: the factor makes up for the rounding of 1 + x (Kahan).
DEVICE float log_one_plus(float x) {
    const float sum = 1.0f + x;
    return sum == 1.0f ? x : log_precise(sum) * (x / (sum - 1.0f));
}

// What a row, or a part of it, comes to: 16 bytes, one access.
struct alignas(16) Part {
    float largest;  // M
    float ties;     // how many z are M
    float others;   // sum of exp(z - M) over z < M
    float weighted; // sum of exp(z - M) (z - M)

    DEVICE float sum() const { return ties + others; }
    DEVICE float log_sum() const { return log_one_plus((ties - 1.0f) + others); }
    // The formula of a log-probability: the only one.
    DEVICE float log_probability(float z) const { return (z - largest) - log_sum(); }
    DEVICE float entropy() const { return log_sum() - weighted / sum(); }

    // The same relative to `reference`, which is M or above.
    DEVICE Part relative_to(float reference) const {
        if (reference == largest) return *this;
        const float shift = largest - reference;
        const float factor = natural_exp(shift);
        return Part{reference, 0.0f, sum() * factor, multiply_add(sum(), shift, weighted) * factor};
    }
};
constexpr Part NO_PART = {NOTHING, 0.0f, 0.0f, 0.0f};

DEVICE Part load_part(const Part& from) {
    float numbers[4];
    load_floats(&from.largest, numbers);
    return Part{numbers[0], numbers[1], numbers[2], numbers[3]};
}
DEVICE void store_part(Part& to, const Part& part) {
    const float numbers[4] = {part.largest, part.ties, part.others, part.weighted};
    store_floats(&to.largest, numbers);
}

// z of `pieces` times 4 ids: piece i starts at first + i * distance. Ids from `end` on are not read and NOTHING.
template <int pieces>
DEVICE void load_z(const float* logits, int64_t first, int distance, int64_t end, float inverse_temperature,
                   float (&z)[pieces][4]) {
    if (first + (pieces - 1) * distance + 4 <= end) { // nothing stands between the loads
#pragma unroll
        for (int i = 0; i < pieces; ++i) load_floats(logits + first + i * distance, z[i]);
    } else {
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
            const int64_t id = first + i * distance;
            if (id + 4 <= end) {
                load_floats(logits + id, z[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) z[i][j] = id + j < end ? logits[id + j] : NOTHING;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) z[i][j] *= inverse_temperature;
    }
}

// Reduces the ids of one stretch below `end`; the result is the same in all lanes.
DEVICE Part reduce_stretch(const float* logits, int stretch, int64_t end, float inverse_temperature) {
    float z[PIECES][4];
    load_z(logits, int64_t(stretch) * STRETCH + 4 * lane(), 4 * WARP, end, inverse_temperature, z);
    float largest = NOTHING;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) largest = maximum(largest, z[i][j]);
    }
    largest = warp_maximum(largest);
    float ties = 0.0f;
    float others = 0.0f;
    float weighted = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float shifted = z[i][j] - largest;
            const float e = natural_exp(shifted);
            const bool tied = shifted == 0.0f;
            ties += tied ? 1.0f : 0.0f;
            others += tied ? 0.0f : e;
            weighted = multiply_add(e, shifted, weighted);
        }
    }
    return Part{largest, warp_sum(ties), warp_sum(others), warp_sum(weighted)};
}

struct RowShared {
    Part stretches[STRETCHES];
    float scratch[THREADS / WARP];
};

// Reduces a row by the whole block; the result is the same in all threads, and shared.stretches stays.
DEVICE Part reduce_row(const float* logits, int64_t vocabulary, float inverse_temperature, RowShared& shared) {
    const int count = int((vocabulary + STRETCH - 1) / STRETCH);
    for (int stretch = warp(); stretch < count; stretch += THREADS / WARP) {
        const Part part = reduce_stretch(logits, stretch, vocabulary, inverse_temperature);
        if (lane() == 0) store_part(shared.stretches[stretch], part);
    }
    sync_block();
    const int mine = int(threadIdx.x);
    const Part part = mine < count ? load_part(shared.stretches[mine]) : NO_PART;
    const float largest = block_maximum<THREADS>(part.largest, shared.scratch);
    const Part joined = part.relative_to(largest);
    const float ties = block_sum<THREADS>(joined.ties, shared.scratch);
    const float others = block_sum<THREADS>(joined.others, shared.scratch);
    const float weighted = block_sum<THREADS>(joined.weighted, shared.scratch);
    return Part{largest, ties, others, weighted};
}

// ---- scores ----

KERNEL(head_scores, THREADS, HeadScores, RowShared) {
    const int64_t row = blockIdx.x;
    const float* logits = arguments.logits + row * arguments.pitch;
    const Part whole = reduce_row(logits, arguments.vocabulary, arguments.inverse_temperature, shared);
    if (threadIdx.x == 0) {
        arguments.log_probs[row] = whole.log_probability(logits[arguments.targets[row]] * arguments.inverse_temperature);
        arguments.entropies[row] = whole.entropy();
        arguments.log_sum_exps[row] = whole.largest + whole.log_sum();
    }
}

// ---- gradient ----

KERNEL(head_gradient, THREADS, HeadGradient, NoShared) {
    const int64_t row = blockIdx.x;
    const float* logits = arguments.logits + row * arguments.pitch;
    bf16* dlogits = arguments.dlogits + row * arguments.pitch_d;
    const int64_t target = arguments.targets[row];
    const float log_sum_exp = arguments.log_sum_exps[row];
    const float entropy = arguments.entropies[row];
    const float target_log_prob = arguments.log_probs[row];
    const float by_log_prob = arguments.dlog_probs[row];
    const float by_entropy = arguments.dentropies ? arguments.dentropies[row] : 0.0f;
    // d log p(target) / dz_target = 1 - p(target), which f32 would round to nothing long before p reaches 1.
    const float one_minus_p = -expm1_precise(target_log_prob);

    constexpr int pieces = 4; // per thread and turn
    constexpr int distance = 4 * THREADS;
    for (int64_t first = 4 * int64_t(threadIdx.x); first < arguments.pitch_d; first += pieces * distance) {
        float z[pieces][4];
        load_z(logits, first, distance, arguments.vocabulary, arguments.inverse_temperature, z);
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
            const int64_t id = first + i * distance;
            float gradient[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool is_target = id + j == target;
                const float log_p = is_target ? target_log_prob : z[i][j] - log_sum_exp;
                const float p = natural_exp(log_p); // 0 where z is NOTHING
                const float dlog_prob = by_log_prob * (is_target ? one_minus_p : -p);
                const float dentropy = by_entropy * p * (log_p + entropy);
                gradient[j] = (dlog_prob - dentropy) * arguments.inverse_temperature;
            }
            const Vector8 rounded = {{pack(gradient[0], gradient[1]), pack(gradient[2], gradient[3])}};
            if (id < arguments.pitch_d) store8(dlogits + id, rounded);
        }
    }
}

// ---- sampling ----
//
// The cumulative distribution is inverted in two steps, among stretches and then within the chosen one, by the same function.
// Weights are whole numbers in units of 2^-40 of the largest: their sums are exact in any order (262,144 weights of 2^40 fill 58
// bits), so the cumulative sums rise and no id of weight 0 is ever chosen. Greedy decoding is the same with weight 1 for the
// largest and 0 for all others: the first id of positive weight is the lowest of the largest.

using Weight = uint64_t;

// `share` is that of the ids in question in a sum of exponentials relative to the largest z: at most 1,024.
DEVICE Weight to_weight(float share) { return Weight(share * float(int64_t(1) << 40)); }

DEVICE Weight shuffle(Weight value, int from) {
    const uint64_t low = shuffle(uint32_t(value), from);
    const uint64_t high = shuffle(uint32_t(value >> 32), from);
    return high << 32 | low;
}

struct Inverse {
    int index;   // of the chosen weight
    double rest; // in [0, 1): how far into it
};

// The first of 32 x count weights, lane after lane, whose cumulative sum exceeds `uniform` of the total. The same in all lanes.
template <int count> DEVICE Inverse invert(const Weight (&weights)[count], double uniform) {
    Weight own = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) own += weights[i];
    Weight upto = own; // inclusive sum over lanes
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const Weight other = shuffle(upto, (lane() - distance) & (WARP - 1));
        if (lane() >= distance) upto += other;
    }
    const Weight total = shuffle(upto, WARP - 1);
    const Weight threshold = minimum(Weight(uniform * double(total)), total - 1);
    // Lanes that end at or below the threshold come before the one that holds it.
    const int winner = minimum(int(warp_sum(upto <= threshold ? 1.0f : 0.0f)), WARP - 1);

    Weight left = threshold - (upto - own); // meaningful in the winner
    int index = 0;
    Weight chosen = 1;
    bool found = false;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (!found && left < weights[i]) {
            found = true;
            index = i;
            chosen = weights[i];
        } else if (!found) {
            left -= weights[i];
        }
    }
    index = int(shuffle(uint32_t(index), winner));
    left = shuffle(left, winner);
    chosen = shuffle(chosen, winner);
    return Inverse{winner * count + index, (double(left) + 0.5) / double(chosen)};
}

KERNEL(head_sample, THREADS, HeadSample, RowShared) {
    const int64_t row = blockIdx.x;
    const float* logits = arguments.logits + row * arguments.pitch;
    const float inverse_temperature = arguments.inverse_temperature;
    const bool greedy = arguments.greedy != 0;
    const Part whole = reduce_row(logits, arguments.vocabulary, inverse_temperature, shared);
    if (warp() != 0) return;

    // Only ids below `sampleable` may be drawn: the stretch that holds the last of them is reduced again without the others.
    const int64_t end = arguments.sampleable;
    const int last = int((end - 1) / STRETCH);
    const Part cut = reduce_stretch(logits, last, end, inverse_temperature);

    constexpr int per_lane = STRETCHES / WARP;
    Part stretches[per_lane];
    float largest = NOTHING; // of what may be sampled: the row's may belong to an excluded id, and flush all others to 0
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        const int stretch = lane() * per_lane + i;
        stretches[i] = stretch < last ? load_part(shared.stretches[stretch]) : stretch == last ? cut : NO_PART;
        largest = maximum(largest, stretches[i].largest);
    }
    largest = warp_maximum(largest);
    Weight stretch_weights[per_lane];
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        const Weight weight = to_weight(stretches[i].relative_to(largest).sum());
        stretch_weights[i] = greedy ? Weight(stretches[i].largest == largest) : weight;
    }
    const Inverse chosen = invert(stretch_weights, greedy ? 0.0 : arguments.uniforms[row]);
    const int stretch = minimum(chosen.index, last); // in bounds even if logits are not numbers, as the token below

    // Within the stretch, weights are relative to its own maximum, and a lane holds consecutive ids.
    const float reference = stretch == last ? cut.largest : shared.stretches[stretch].largest;
    constexpr int ids_per_lane = STRETCH / WARP;
    const int64_t first = int64_t(stretch) * STRETCH + lane() * ids_per_lane;
    float z[ids_per_lane / 4][4];
    load_z(logits, first, 4, end, inverse_temperature, z);
    Weight weights[ids_per_lane];
#pragma unroll
    for (int i = 0; i < ids_per_lane; ++i) {
        const float mine = z[i / 4][i % 4];
        weights[i] = greedy ? Weight(mine == reference) : to_weight(natural_exp(mine - reference));
    }
    const Inverse id = invert(weights, greedy ? 0.0 : chosen.rest);
    const int64_t token = minimum(int64_t(stretch) * STRETCH + id.index, end - 1);
    if (lane() == 0) {
        arguments.tokens[row] = int32_t(token);
        arguments.log_probs[row] = whole.log_probability(logits[token] * inverse_temperature);
    }
}
