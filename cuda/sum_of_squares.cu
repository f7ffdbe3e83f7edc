// Sum of squares in f64, for the norm of the gradient: every block sums one chunk of fixed bounds, then one block sums the parts.
//
// Floor: 4 bytes per element. The order of all additions depends on the length and the number of parts alone.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;

struct Partials {
    double values[THREADS];
};

// Sum over the block, in all threads: halves are added until one is left.
DEVICE double sum_threads(double value, Partials& partials) {
    partials.values[threadIdx.x] = value;
    sync_block();
#pragma unroll
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) partials.values[threadIdx.x] += partials.values[threadIdx.x + half];
        sync_block();
    }
    return partials.values[0];
}

KERNEL(sum_of_squares, THREADS, SumOfSquares, Partials) {
    const int64_t quads = arguments.length / 4;
    const int64_t quads_per_part = (quads + arguments.count - 1) / arguments.count;
    const int64_t begin = int64_t(blockIdx.x) * quads_per_part;
    const int64_t end = minimum(begin + quads_per_part, quads);
    double sum = 0.0;
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        float values[4];
        load_floats(arguments.values + 4 * i, values);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += double(values[k]) * double(values[k]);
    }
    const int64_t tail = 4 * quads + threadIdx.x; // up to three elements, in the last part
    if (blockIdx.x == arguments.count - 1 && tail < arguments.length) {
        const double value = double(arguments.values[tail]);
        sum += value * value;
    }
    sum = sum_threads(sum, shared);
    if (threadIdx.x == 0) arguments.parts[blockIdx.x] = sum;
}

KERNEL(sum_of_parts, THREADS, SumOfSquares, Partials) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < arguments.count; i += THREADS) sum += arguments.parts[i];
    sum = sum_threads(sum, shared);
    if (threadIdx.x == 0) arguments.total[0] = sum;
}
