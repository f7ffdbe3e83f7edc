// Probes of include/: each function that has two bodies, PTX for a GPU and a model for the emulated one, runs once on inputs that the
// test chooses, and what every lane got is written out. No emulator can prove its own model; these can, on a GPU.
#include "include/arguments.h"
#include "include/mma.h"

KERNEL(probe_numbers, 32, ProbeNumbers, NoShared) {
    for (int64_t i = lane(); i < arguments.count; i += WARP) {
        const float x = arguments.x[i], y = arguments.y[i];
        const float product = x * y;
        arguments.packed[i] = pack(x, y);
        float* const results = arguments.results + i * PROBED_NUMBERS;
        results[0] = exp2_fast(x);
        results[1] = log_precise(x);
        results[2] = exp_precise(x);
        results[3] = expm1_precise(x);
        results[4] = square_root(x);
        results[5] = multiply_add(x, y, -product); // the rounding error of the product, if it is rounded once
        results[6] = maximum(x, y);
        results[7] = product;
    }
}

template <int step> DEVICE void probe_width(const ProbeWarp& arguments, float value) {
    const int place = step * WARP + lane();
    arguments.exchanged[place] = shuffle_xor(value, 1 << step);
    arguments.sums[place] = warp_sum<(2 << step)>(value);
    arguments.maxima[place] = warp_maximum<(2 << step)>(value);
}
KERNEL(probe_warp, 32, ProbeWarp, NoShared) {
    const float value = arguments.values[lane()];
    arguments.shuffled[lane()] = shuffle(value, arguments.from[lane()]);
    probe_width<0>(arguments, value);
    probe_width<1>(arguments, value);
    probe_width<2>(arguments, value);
    probe_width<3>(arguments, value);
    probe_width<4>(arguments, value);
}

struct ProbeBlockShared {
    float scratch[PROBE_THREADS / WARP];
};
KERNEL(probe_block, PROBE_THREADS, ProbeBlock, ProbeBlockShared) {
    const float value = arguments.values[threadIdx.x];
    arguments.sums[threadIdx.x] = block_sum<PROBE_THREADS>(value, shared.scratch);
    arguments.maxima[threadIdx.x] = block_maximum<PROBE_THREADS>(value, shared.scratch);
}

KERNEL(probe_memory, 32, ProbeMemory, NoShared) {
    const uint32_t* const from = arguments.from;
    uint32_t* const to = arguments.to;
    store16(to + 4 * lane(), load16(from + 4 * lane()));
#pragma unroll
    for (int i = 0; i < 2; ++i) store8(to + 128 + 2 * (lane() + i * WARP), load8(from + 2 * (lane() + i * WARP)));
#pragma unroll
    for (int i = 0; i < 4; ++i) store4(to + 256 + lane() + i * WARP, load4(from + lane() + i * WARP));
    float halves[8], floats[4];
    unpack8(load16(from + 4 * lane()), halves);
    store16(to + 384 + 4 * lane(), pack8(halves));
    load_floats(reinterpret_cast<const float*>(from) + 4 * lane(), floats);
    store_floats(reinterpret_cast<float*>(to) + 512 + 4 * lane(), floats);
}

struct ProbeCopiesShared {
    Vector16 chunks[WARP];
};
KERNEL(probe_copies, 32, ProbeCopies, ProbeCopiesShared) {
    store16(&shared.chunks[lane()], Vector16{{1, 1, 1, 1}});
    const int bytes = arguments.bytes[lane()];
    const uint32_t* const from = arguments.from + 4 * lane();
    if (lane() % 2 == 0) copy_async_part(&shared.chunks[lane()], from, bytes);
    commit_copies();
    if (lane() % 2 == 1) copy_async_part(&shared.chunks[lane()], from, bytes);
    commit_copies();
    wait_copies<1>(); // the even lanes' group is done
    if (lane() % 2 == 0) store16(arguments.to + 4 * lane(), load16(&shared.chunks[lane()]));
    wait_copies<0>();
    if (lane() % 2 == 1) store16(arguments.to + 4 * lane(), load16(&shared.chunks[lane()]));
}

struct ProbeMatricesShared {
    bf16 matrix[64][8];
};
KERNEL(probe_matrices, 32, ProbeMatrices, ProbeMatricesShared) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = lane() + i * WARP;
        store16(shared.matrix[row], load16(arguments.matrix + 8 * row));
    }
    sync_warp();
    const bf16* const rows[2] = {shared.matrix[arguments.rows[lane()]], shared.matrix[arguments.rows[WARP + lane()]]};
    uint32_t plain[2][4], transposed[2][4];
    load_matrices<2>(plain, rows);
    load_matrices_transposed<2>(transposed, rows);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            arguments.registers[(lane() * 2 + i) * 4 + k] = plain[i][k];
            arguments.transposed[(lane() * 2 + i) * 4 + k] = transposed[i][k];
        }
    }
}

KERNEL(probe_multiply, 32, ProbeMultiply, NoShared) {
    uint32_t a[2][4], b[3][2];
    float c[2][3][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) a[m][k] = arguments.a[(lane() * 2 + m) * 4 + k];
    }
#pragma unroll
    for (int n = 0; n < 3; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) b[n][k] = arguments.b[(lane() * 3 + n) * 2 + k];
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 3; ++n) load_floats(arguments.c + ((lane() * 2 + m) * 3 + n) * 4, c[m][n]);
    }
    multiply<2, 3>(c, a, b);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 3; ++n) store_floats(arguments.result + ((lane() * 2 + m) * 3 + n) * 4, c[m][n]);
    }
}

template <int columns> DEVICE void probe_chunks(Tile<64, columns>& tile, int32_t* offsets) {
    constexpr int CHUNKS = columns / 8;
    for (int i = lane(); i < 64 * CHUNKS; i += WARP) offsets[i] = int32_t(tile.at(i / CHUNKS, i % CHUNKS) - tile.values);
}
struct ProbeTileShared {
    Tile<64, 32> columns32;
    Tile<64, 64> columns64;
    Tile<64, 128> columns128;
};
KERNEL(probe_tile, 32, ProbeTile, ProbeTileShared) {
    probe_chunks<32>(shared.columns32, arguments.columns32);
    probe_chunks<64>(shared.columns64, arguments.columns64);
    probe_chunks<128>(shared.columns128, arguments.columns128);
}
