// Tensor cores: ldmatrix and mma.sync m16n8k16 for all lanes of a warp at once. Layouts of fragments: see include/mma.h.
#include <immintrin.h>

#include "access.h"
#include "worker.h"

namespace emulator {

// ---- ldmatrix ----

// Eight rows of eight bf16 as they lie in memory, and the same with rows and columns exchanged.
struct Matrix8x8 {
    __m128i rows[8];
};

static Matrix8x8 transpose(const Matrix8x8& m) {
    __m128i a[8], b[8];
    Matrix8x8 result;
    for (int i = 0; i < 4; ++i) { // pairs of rows: 16-bit elements interleaved
        a[2 * i] = _mm_unpacklo_epi16(m.rows[2 * i], m.rows[2 * i + 1]);
        a[2 * i + 1] = _mm_unpackhi_epi16(m.rows[2 * i], m.rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) { // fours of rows: 32-bit elements
        for (int j = 0; j < 2; ++j) {
            b[4 * i + 2 * j] = _mm_unpacklo_epi32(a[4 * i + j], a[4 * i + 2 + j]);
            b[4 * i + 2 * j + 1] = _mm_unpackhi_epi32(a[4 * i + j], a[4 * i + 2 + j]);
        }
    }
    for (int j = 0; j < 4; ++j) {
        result.rows[2 * j] = _mm_unpacklo_epi64(b[j], b[4 + j]);
        result.rows[2 * j + 1] = _mm_unpackhi_epi64(b[j], b[4 + j]);
    }
    return result;
}

// Lane 4 * group + member takes word `member` of row `group`, which is word `lane` of the matrix. Four matrices at once: word
// `lane` of each becomes the four registers of the lane.
static void distribute(const Matrix8x8 (&matrices)[4], Warp& warp, int offset) {
    for (int group = 0; group < 8; ++group) {
        const __m128i low01 = _mm_unpacklo_epi32(matrices[0].rows[group], matrices[1].rows[group]);
        const __m128i high01 = _mm_unpackhi_epi32(matrices[0].rows[group], matrices[1].rows[group]);
        const __m128i low23 = _mm_unpacklo_epi32(matrices[2].rows[group], matrices[3].rows[group]);
        const __m128i high23 = _mm_unpackhi_epi32(matrices[2].rows[group], matrices[3].rows[group]);
        const __m128i registers[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                                      _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
        for (int member = 0; member < 4; ++member) {
            uint32_t* to = static_cast<uint32_t*>(warp.destinations[4 * group + member]) + offset;
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), registers[member]);
        }
    }
}

EMULATOR_API void emulator_load_matrices(uint32_t* registers, const void* const* rows, int count, int transposed) {
    const void* code = __builtin_return_address(0);
    Worker& worker = *current_worker;
    Warp& warp = worker.warps[emulator_position.thread / LANES];
    const uint32_t lane = emulator_position.thread % LANES;
    const uint32_t first = emulator_position.thread - lane;
    warp.destinations[lane] = registers;
    warp.sources[lane] = rows;
    if (!meet(worker, warp, Operation::LoadMatrices, uint32_t(2 * count + transposed), code)) return;
    for (int i = 0; i < count; ++i) {
        Matrix8x8 matrices[4];
        uint64_t addresses[LANES];
        for (uint32_t from = 0; from < LANES; ++from) {
            const void* row = static_cast<const void* const*>(warp.sources[from])[i];
            addresses[from] = reinterpret_cast<uint64_t>(row);
            check_matrix_row(worker, first + from, row, code);
            matrices[from / 8].rows[from % 8] = _mm_loadu_si128(static_cast<const __m128i*>(row));
        }
        if (worker.checks.counters) count_matrix_rows(worker, addresses, code);
        if (transposed) {
            for (Matrix8x8& matrix : matrices) matrix = transpose(matrix);
        }
        distribute(matrices, warp, 4 * i);
    }
    release(worker, warp);
}

// ---- mma ----

constexpr int MOST_TILES = 32; // of 8 columns

// Row-major f32 operands of one step of k.
struct RowsOfA {
    alignas(32) float values[16][16]; // [row, k]
};
struct ColumnsOfB {
    alignas(32) float values[16][8 * MOST_TILES]; // [k, column]
};

static void gather_a(const Warp& warp, int tile, RowsOfA& a) {
    for (int lane = 0; lane < LANES; ++lane) {
        const int group = lane / 4, member = lane % 4;
        const uint32_t* registers = static_cast<const uint32_t*>(warp.sources[lane]) + 4 * tile;
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(registers));
        const __m128i low = _mm_slli_epi32(packed, 16);
        const __m128i high = _mm_and_si128(packed, _mm_set1_epi32(int(0xffff0000u)));
        const __m128 first_half = _mm_castsi128_ps(_mm_unpacklo_epi32(low, high)); // registers 0 and 1: columns 2 member, + 1
        const __m128 second_half = _mm_castsi128_ps(_mm_unpackhi_epi32(low, high));
        _mm_storel_pi(reinterpret_cast<__m64*>(&a.values[group][2 * member]), first_half);
        _mm_storeh_pi(reinterpret_cast<__m64*>(&a.values[group + 8][2 * member]), first_half);
        _mm_storel_pi(reinterpret_cast<__m64*>(&a.values[group][8 + 2 * member]), second_half);
        _mm_storeh_pi(reinterpret_cast<__m64*>(&a.values[group + 8][8 + 2 * member]), second_half);
    }
}

static void gather_b(const Warp& warp, int tiles, ColumnsOfB& b) {
    for (int lane = 0; lane < LANES; ++lane) {
        const int group = lane / 4, member = lane % 4;
        const uint32_t* registers = static_cast<const uint32_t*>(warp.more_sources[lane]);
        for (int tile = 0; tile < tiles; ++tile) {
            const int column = 8 * tile + group;
            for (int half = 0; half < 2; ++half) {
                const uint32_t packed = registers[2 * tile + half];
                b.values[8 * half + 2 * member][column] = bits_to_float(packed << 16);
                b.values[8 * half + 2 * member + 1][column] = bits_to_float(packed & 0xffff0000u);
            }
        }
    }
}

// Rows `group` and `group + 8` of `tiles` neighbouring tiles of C: the products of bf16 are exact in f32, so that a fused
// multiply-add rounds each partial sum once; k ascends.
template <int tiles> static void multiply_rows(const Warp& warp, int group, int offset, const RowsOfA& a, const ColumnsOfB& b, int column) {
    __m256 upper[tiles], lower[tiles];
    float* c[4];
    for (int member = 0; member < 4; ++member) c[member] = static_cast<float*>(warp.destinations[4 * group + member]) + offset;
#pragma GCC unroll 4
    for (int i = 0; i < tiles; ++i) {
        const __m128 c0 = _mm_loadu_ps(c[0] + 4 * i), c1 = _mm_loadu_ps(c[1] + 4 * i);
        const __m128 c2 = _mm_loadu_ps(c[2] + 4 * i), c3 = _mm_loadu_ps(c[3] + 4 * i);
        upper[i] = _mm256_set_m128(_mm_movelh_ps(c2, c3), _mm_movelh_ps(c0, c1));
        lower[i] = _mm256_set_m128(_mm_movehl_ps(c3, c2), _mm_movehl_ps(c1, c0));
    }
    for (int k = 0; k < 16; ++k) {
        const __m256 a_upper = _mm256_broadcast_ss(&a.values[group][k]);
        const __m256 a_lower = _mm256_broadcast_ss(&a.values[group + 8][k]);
#pragma GCC unroll 4
        for (int i = 0; i < tiles; ++i) {
            const __m256 b_row = _mm256_load_ps(&b.values[k][column + 8 * i]);
            upper[i] = _mm256_fmadd_ps(a_upper, b_row, upper[i]);
            lower[i] = _mm256_fmadd_ps(a_lower, b_row, lower[i]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < tiles; ++i) {
        const __m128 upper0 = _mm256_castps256_ps128(upper[i]), upper1 = _mm256_extractf128_ps(upper[i], 1);
        const __m128 lower0 = _mm256_castps256_ps128(lower[i]), lower1 = _mm256_extractf128_ps(lower[i], 1);
        _mm_storeu_ps(c[0] + 4 * i, _mm_movelh_ps(upper0, lower0));
        _mm_storeu_ps(c[1] + 4 * i, _mm_movehl_ps(lower0, upper0));
        _mm_storeu_ps(c[2] + 4 * i, _mm_movelh_ps(upper1, lower1));
        _mm_storeu_ps(c[3] + 4 * i, _mm_movehl_ps(lower1, upper1));
    }
}

static void multiply_all(const Warp& warp, int tiles_m, int tiles_n) {
    RowsOfA a;
    ColumnsOfB b;
    gather_b(warp, tiles_n, b);
    for (int m = 0; m < tiles_m; ++m) {
        gather_a(warp, m, a);
        for (int group = 0; group < 8; ++group) {
            int n = 0;
            for (; n + 4 <= tiles_n; n += 4) multiply_rows<4>(warp, group, 4 * (m * tiles_n + n), a, b, 8 * n);
            for (; n + 2 <= tiles_n; n += 2) multiply_rows<2>(warp, group, 4 * (m * tiles_n + n), a, b, 8 * n);
            for (; n < tiles_n; ++n) multiply_rows<1>(warp, group, 4 * (m * tiles_n + n), a, b, 8 * n);
        }
    }
}

EMULATOR_API void emulator_multiply(float* c, const uint32_t* a, const uint32_t* b, int tiles_m, int tiles_n) {
    const void* code = __builtin_return_address(0);
    Worker& worker = *current_worker;
    Warp& warp = worker.warps[emulator_position.thread / LANES];
    const uint32_t lane = emulator_position.thread % LANES;
    warp.destinations[lane] = c;
    warp.sources[lane] = a;
    warp.more_sources[lane] = b;
    if (!meet(worker, warp, Operation::Multiply, uint32_t(tiles_m * MOST_TILES + tiles_n), code)) return;
    count_tensor_core(worker, code, uint64_t(tiles_m) * uint64_t(tiles_n));
    multiply_all(warp, tiles_m, tiles_n);
    release(worker, warp);
}

} // namespace emulator
