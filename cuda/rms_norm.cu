// RMSNorm (Zhang and Sennrich 2019) with the residual add before it, and its backward.
//
//   forward    sum = round(x + branch),  y = weight * (sum * r),  r = 1 / sqrt(mean(sum^2) + epsilon)
//   backward   with g = dy * weight:  dx += r * (g - sum * r^2 * mean(g * sum)),  dweight += dy * sum * r
//
// The ROUNDED sum is what is normed, because that is what the backward reads.
//
// Floor in bytes per element: 4 forward (8 with the add), 8 backward (dy and x read, dx read and written), f32 weights once.
//
// A team of one to eight warps holds a row in registers, up to 4 chunks of 8 columns per thread (10 in the _wide kernels), so that a
// row is read once; weights lie in shared memory for all the rows that a block walks. Rows of up to 1,024 columns need one warp and
// no barrier. The gradient by the weight stays in registers until a block has seen its rows; then its teams add theirs up, ascending.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;
constexpr int CHUNKS = NORM_WIDTH / (THREADS * CHUNK);
constexpr int CHUNKS_WIDE = NORM_WIDTH_WIDE / (THREADS * CHUNK);

template <int chunks, int sums> struct NormShared {
    SharedRow<THREADS * chunks * CHUNK> weight;
    float scratch[sums][THREADS / WARP];
};

template <int most> DEVICE void norm_rows(const RmsNorm& arguments, NormShared<most, 1>& shared) {
    const int width = int(arguments.width);
    const Team team = form_teams<THREADS, most>(width / CHUNK);
    if (int64_t(blockIdx.x) * team.count >= arguments.rows) return; // nothing to norm, so no need of the weights
    shared.weight.fill(arguments.weight, width, int(threadIdx.x), THREADS);
    sync_block();
    for (int64_t first = int64_t(blockIdx.x) * team.count; first < arguments.rows; first += int64_t(gridDim.x) * team.count) {
        const int64_t row = first + team.index;
        const int chunks = team.index < team.count && row < arguments.rows ? width / CHUNK : 0; // of this thread's row
        const int64_t start = row * width;
        Vector16 held[most];
#pragma unroll
        for (int c = 0; c < most; ++c) {
            const int chunk = team.rank + c * team.threads;
            if (chunk < chunks) held[c] = load16(arguments.x + start + chunk * CHUNK);
        }
        if (arguments.branch != nullptr) {
            Vector16 branch[most];
#pragma unroll
            for (int c = 0; c < most; ++c) {
                const int chunk = team.rank + c * team.threads;
                if (chunk < chunks) branch[c] = load16(arguments.branch + start + chunk * CHUNK);
            }
#pragma unroll
            for (int c = 0; c < most; ++c) {
                const int chunk = team.rank + c * team.threads;
                if (chunk < chunks) {
                    float x[CHUNK], added[CHUNK];
                    unpack8(held[c], x);
                    unpack8(branch[c], added);
#pragma unroll
                    for (int k = 0; k < CHUNK; ++k) x[k] += added[k];
                    held[c] = pack8(x);
                    store16(arguments.sum + start + chunk * CHUNK, held[c]);
                }
            }
        }

        float squares[1] = {0.0f};
#pragma unroll
        for (int c = 0; c < most; ++c) {
            if (team.rank + c * team.threads < chunks) {
                float x[CHUNK];
                unpack8(held[c], x);
#pragma unroll
                for (int k = 0; k < CHUNK; ++k) squares[0] = multiply_add(x[k], x[k], squares[0]);
            }
        }
        team_sums<THREADS>(team, squares, shared.scratch);
        const float inverse = 1.0f / square_root(squares[0] / float(width) + arguments.epsilon);
#pragma unroll
        for (int c = 0; c < most; ++c) {
            const int chunk = team.rank + c * team.threads;
            if (chunk < chunks) {
                float x[CHUNK], weight[CHUNK];
                unpack8(held[c], x);
                shared.weight.read(chunk, weight);
#pragma unroll
                for (int k = 0; k < CHUNK; ++k) x[k] = weight[k] * (x[k] * inverse);
                store16(arguments.y + start + chunk * CHUNK, pack8(x));
            }
        }
    }
}

using NormForward = NormShared<CHUNKS, 1>;
using NormForwardWide = NormShared<CHUNKS_WIDE, 1>;
KERNEL(rms_norm, THREADS, RmsNorm, NormForward) { norm_rows<CHUNKS>(arguments, shared); }
KERNEL(rms_norm_wide, THREADS, RmsNorm, NormForwardWide) { norm_rows<CHUNKS_WIDE>(arguments, shared); }

template <int most> DEVICE void norm_rows_backward(const RmsNormBackward& arguments, NormShared<most, 2>& shared) {
    const int width = int(arguments.width);
    const Team team = form_teams<THREADS, most>(width / CHUNK);
    shared.weight.fill(arguments.weight, width, int(threadIdx.x), THREADS);
    sync_block();

    float dweight[most][CHUNK] = {};
    const int64_t begin = int64_t(blockIdx.x) * arguments.rows_per_part;
    const int64_t end = minimum(begin + arguments.rows_per_part, arguments.rows);
    for (int64_t first = begin; first < end; first += team.count) {
        const int64_t row = first + team.index;
        const int chunks = team.index < team.count && row < end ? width / CHUNK : 0; // of this thread's row
        const int64_t start = row * width;
        Vector16 held_x[most], held_dy[most];
#pragma unroll
        for (int c = 0; c < most; ++c) {
            const int chunk = team.rank + c * team.threads;
            if (chunk < chunks) {
                held_x[c] = load16(arguments.x + start + chunk * CHUNK);
                held_dy[c] = load16(arguments.dy + start + chunk * CHUNK);
            }
        }

        float sums[2] = {0.0f, 0.0f}; // x^2 and dy * weight * x
#pragma unroll
        for (int c = 0; c < most; ++c) {
            const int chunk = team.rank + c * team.threads;
            if (chunk < chunks) {
                float x[CHUNK], dy[CHUNK], weight[CHUNK];
                unpack8(held_x[c], x);
                unpack8(held_dy[c], dy);
                shared.weight.read(chunk, weight);
#pragma unroll
                for (int k = 0; k < CHUNK; ++k) {
                    sums[0] = multiply_add(x[k], x[k], sums[0]);
                    sums[1] = multiply_add(dy[k] * weight[k], x[k], sums[1]);
                }
            }
        }
        team_sums<THREADS>(team, sums, shared.scratch);
        const float inverse = 1.0f / square_root(sums[0] / float(width) + arguments.epsilon);
        const float projection = sums[1] * inverse * inverse / float(width);
#pragma unroll
        for (int pair = 0; pair < most; pair += 2) { // more of dx at once would not fit the registers
            Vector16 held_dx[2];
#pragma unroll
            for (int c = pair; c < pair + 2; ++c) {
                const int chunk = team.rank + c * team.threads;
                if (chunk < chunks) held_dx[c - pair] = load16(arguments.dx + start + chunk * CHUNK);
            }
#pragma unroll
            for (int c = pair; c < pair + 2; ++c) {
                const int chunk = team.rank + c * team.threads;
                if (chunk < chunks) {
                    float x[CHUNK], dy[CHUNK], dx[CHUNK], weight[CHUNK];
                    unpack8(held_x[c], x);
                    unpack8(held_dy[c], dy);
                    unpack8(held_dx[c - pair], dx);
                    shared.weight.read(chunk, weight);
#pragma unroll
                    for (int k = 0; k < CHUNK; ++k) {
                        dweight[c][k] = multiply_add(x[k] * inverse, dy[k], dweight[c][k]);
                        dx[k] += inverse * (dy[k] * weight[k] - x[k] * projection);
                    }
                    store16(arguments.dx + start + chunk * CHUNK, pack8(dx));
                }
            }
        }
    }

    // The weights are no longer needed: their place takes the sum over the teams.
    sync_block();
    for (int t = 0; t < team.count; ++t) {
        if (team.index == t) {
#pragma unroll
            for (int c = 0; c < most; ++c) {
                const int chunk = team.rank + c * team.threads;
                if (chunk < width / CHUNK) {
                    if (t == 0) shared.weight.write(chunk, dweight[c]);
                    else shared.weight.add(chunk, dweight[c]);
                }
            }
        }
        sync_block();
    }
    shared.weight.copy_to(arguments.parts + int64_t(blockIdx.x) * width, width, int(threadIdx.x), THREADS);
}

using NormBackward = NormShared<CHUNKS, 2>;
using NormBackwardWide = NormShared<CHUNKS_WIDE, 2>;
RESIDENT_KERNEL(rms_norm_backward, THREADS, 2, RmsNormBackward, NormBackward) { norm_rows_backward<CHUNKS>(arguments, shared); }
KERNEL(rms_norm_backward_wide, THREADS, RmsNormBackward, NormBackwardWide) { norm_rows_backward<CHUNKS_WIDE>(arguments, shared); }
