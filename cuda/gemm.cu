// Matrix products on the tensor cores: C[m, n] = sum over k of A[m, k] B[k, n], operands bf16, sums f32.
//
// A block owns one tile of C and walks k from 0 upwards, TILE_K at a time, through a ring of stages in shared memory:
//
//     global --cp.async--> stages[i] --ldmatrix--> fragments (two sets) --mma.sync--> sums in registers --> C
//
// While the tensor cores work on one step of 16 along k, the fragments of the next are being loaded, and STAGES - 1 tiles are
// on their way from memory. k is never split and always ascends in steps of 16 from 0, so an element of C is the same sequence of
// instructions whatever the tile, its place in it, and the number of rows and columns: that is what makes sampling and training
// agree to the bit. Tails are zeros in shared memory, and adding products of zeros leaves a sum as it is.
#include "include/arguments.h"
#include "include/mma.h"

// How a block is cut. A warp owns (tile_m / warps_m) x (tile_n / warps_n) of C.
template <int tile_m, int tile_n, int tile_k, int stages, int warps_m, int warps_n> struct Shape {
    static constexpr int TILE_M = tile_m;
    static constexpr int TILE_N = tile_n;
    static constexpr int TILE_K = tile_k;
    static constexpr int STAGES = stages;
    static constexpr int WARPS_M = warps_m;
    static constexpr int WARPS_N = warps_n;
};

// Warps of 64x64 read (64 + 64) x 16 elements of shared memory for 64 x 64 x 16 products. Eight warps of 64x32 would read half as
// much again, and shared memory, not the tensor cores, would set the pace from sm_80 on. 48 KiB: two blocks on every card.
using Shape128x128 = Shape<128, 128, 32, 3, 2, 2>;
// For matrices too small to fill a GPU with the tile above. 48 KiB.
using Shape64x64 = Shape<64, 64, 64, 3, 2, 2>;
// For few rows (decoding), where the time is that of reading B once: many stages keep 50 KiB per block on their way. 60 KiB.
using Shape16x64 = Shape<16, 64, 64, 6, 1, 2>;

// How operands lie in memory: along k, as [outer, k], or across it, as [k, outer], outer being m for A and n for B.
struct Nt { // A [m, k], B [n, k]
    static constexpr bool A_ALONG_K = true;
    static constexpr bool B_ALONG_K = true;
};
struct Nn { // A [m, k], B [k, n]
    static constexpr bool A_ALONG_K = true;
    static constexpr bool B_ALONG_K = false;
};
struct Tn { // A [k, m], B [k, n]
    static constexpr bool A_ALONG_K = false;
    static constexpr bool B_ALONG_K = false;
};

// What is done with a finished sum.
struct StoreBf16 {
    using Element = bf16;
    static constexpr bool ADDS = false;
};
struct StoreFloat {
    using Element = float;
    static constexpr bool ADDS = false;
};
struct AddFloat {
    using Element = float;
    static constexpr bool ADDS = true;
};

// Blocks that run at the same time should share rows of A and columns of B in the L2 cache: tiles are visited in bands of this
// many tile rows, down each column of a band before the next.
constexpr int64_t BAND = 8;

constexpr int STEP = 16; // along k, of one mma

DEVICE int clamp(int64_t value, int limit) { return value < 0 ? 0 : value > limit ? limit : int(value); }

// Starts copying the window of a row-major matrix at `corner` into a tile, zeros where it lies outside: `rows_left` x
// `columns_left` elements of the matrix lie at and behind the corner. Each thread keeps to one column of chunks.
template <int threads, int rows, int columns>
DEVICE void copy_window(Tile<rows, columns>& tile, const bf16* corner, int64_t pitch, int64_t rows_left, int64_t columns_left) {
    constexpr int chunks = columns / 8;
    constexpr int rows_at_once = threads / chunks;
    static_assert(threads % chunks == 0 && rows % rows_at_once == 0);
    const int chunk = int(threadIdx.x) % chunks;
    const int first_row = int(threadIdx.x) / chunks;
    const bf16* from = corner + first_row * pitch + 8 * chunk;
    if (rows_left >= rows && columns_left >= columns) { // nearly always
#pragma unroll
        for (int i = 0; i < rows / rows_at_once; ++i) {
            copy_async(tile.at(first_row + i * rows_at_once, chunk), from + i * rows_at_once * pitch);
        }
        return;
    }
    const int bytes = clamp(columns_left - 8 * chunk, 8) * int(sizeof(bf16));
#pragma unroll 1
    for (int row = first_row; row < rows; row += rows_at_once) {
        copy_async_part(tile.at(row, chunk), from, row < rows_left ? bytes : 0);
        from += rows_at_once * pitch;
    }
}

// One operand's tile of `outer` x `depth` (along k) in shared memory, stored as the matrix is.
template <bool along_k, int outer, int depth> struct Operand {
    using Stored = Tile<along_k ? outer : depth, along_k ? depth : outer>;

    template <int threads>
    DEVICE static void copy(Stored& tile, const bf16* matrix, int64_t pitch, int64_t outer_size, int64_t k, int64_t first_outer,
                            int64_t first_k) {
        const int64_t outer_left = outer_size - first_outer;
        const int64_t k_left = k - first_k;
        if constexpr (along_k) {
            copy_window<threads>(tile, matrix + first_outer * pitch + first_k, pitch, outer_left, k_left);
        } else {
            copy_window<threads>(tile, matrix + first_k * pitch + first_outer, pitch, k_left, outer_left);
        }
    }

    // The fragments of 16 * count outer elements from `first` at one step along k. Each 16x16 piece is four 8x8 matrices; A's
    // fragments count the outer half first (a[1] is rows + 8), B's the half along k (b[1] is k + 8).
    template <bool k_first, int count>
    DEVICE static void fragments(uint32_t (&registers)[count][4], Stored& tile, int first, int step) {
        const int row = lane() % 8;
        const int fast = lane() / 8 % 2;
        const int slow = lane() / 16;
        const int outer_half = k_first ? slow : fast;
        const int k_half = k_first ? fast : slow;
        const bf16* rows[count];
        if constexpr (along_k) {
            const bf16* corner = tile.at(first + 8 * outer_half + row, 2 * step + k_half);
#pragma unroll
            for (int i = 0; i < count; ++i) rows[i] = corner + 16 * i * depth; // the permutation repeats every 8 rows
        } else {
#pragma unroll
            for (int i = 0; i < count; ++i) rows[i] = tile.at(STEP * step + 8 * k_half + row, first / 8 + 2 * i + outer_half);
        }
        if constexpr (along_k) {
            load_matrices(registers, rows);
        } else {
            load_matrices_transposed(registers, rows);
        }
    }
};

template <class Layout, class Output, class Shape> struct Product : Shape {
    using Shape::STAGES;
    using Shape::TILE_K;
    using Shape::TILE_M;
    using Shape::TILE_N;
    using Element = typename Output::Element;
    static constexpr int THREADS = Shape::WARPS_M * Shape::WARPS_N * WARP;
    static constexpr int WARP_M = TILE_M / Shape::WARPS_M;
    static constexpr int WARP_N = TILE_N / Shape::WARPS_N;
    static constexpr int TILES_M = WARP_M / 16; // of mma, per warp
    static constexpr int TILES_N = WARP_N / 8;
    static constexpr int STEPS = TILE_K / STEP;
    static_assert(STEPS % 2 == 0, "the two sets of fragments take turns");
    static_assert(TILES_N % 2 == 0, "b fragments are loaded in pairs");

    using OperandA = Operand<Layout::A_ALONG_K, TILE_M, TILE_K>;
    using OperandB = Operand<Layout::B_ALONG_K, TILE_N, TILE_K>;
    struct Stage {
        typename OperandA::Stored a;
        typename OperandB::Stored b;
    };
    // 16 rows of a warp's part of C on their way out. The 8 elements between rows keep the writes of fragments free of conflicts.
    struct Strip {
        alignas(16) Element rows[16][WARP_N + 8];
    };
    union Shared {
        Stage stages[STAGES];
        Strip strips[THREADS / WARP];
    };
    static_assert(sizeof(Shared) <= 99 * 1024);

    struct Fragments {
        uint32_t a[TILES_M][4];
        uint32_t b[TILES_N][2];
    };

    DEVICE static void run(const Gemm& g, Shared& shared) {
        int64_t first_m, first_n;
        locate(first_m, first_n);
        const int warp_m = warp() / Shape::WARPS_N * WARP_M; // this warp's part within the tile
        const int warp_n = warp() % Shape::WARPS_N * WARP_N;

        float sums[TILES_M][TILES_N][4] = {};
        accumulate(sums, g, shared, first_m, first_n, warp_m, warp_n);
        sync_block(); // stages become strips
        write(sums, g, shared.strips[warp()], first_m + warp_m, first_n + warp_n);
    }

    // Which tile of C this block computes.
    DEVICE static void locate(int64_t& first_m, int64_t& first_n) {
        const int64_t index = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
        const int64_t band_size = BAND * gridDim.x;
        const int64_t band = index / band_size;
        const int64_t rows_of_band = minimum(int64_t(gridDim.y) - band * BAND, BAND);
        const int64_t within = index % band_size;
        first_m = (band * BAND + within % rows_of_band) * TILE_M;
        first_n = within / rows_of_band * TILE_N;
    }

    DEVICE static void copy(Stage& stage, const Gemm& g, int64_t first_m, int64_t first_n, int64_t first_k) {
        OperandA::template copy<THREADS>(stage.a, g.a, g.pitch_a, g.m, g.k, first_m, first_k);
        OperandB::template copy<THREADS>(stage.b, g.b, g.pitch_b, g.n, g.k, first_n, first_k);
    }

    DEVICE static void load(Fragments& fragments, Stage& stage, int warp_m, int warp_n, int step) {
        OperandA::template fragments<false>(fragments.a, stage.a, warp_m, step);
        // Two neighbouring b fragments are the four registers of one load.
        auto& pairs = reinterpret_cast<uint32_t(&)[TILES_N / 2][4]>(fragments.b);
        OperandB::template fragments<true>(pairs, stage.b, warp_n, step);
    }

    // The main loop.
    DEVICE static void accumulate(float (&sums)[TILES_M][TILES_N][4], const Gemm& g, Shared& shared, int64_t first_m,
                                  int64_t first_n, int warp_m, int warp_n) {
        const int tiles = int((g.k + TILE_K - 1) / TILE_K);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
            if (i < tiles) copy(shared.stages[i], g, first_m, first_n, int64_t(i) * TILE_K);
            commit_copies(); // an empty group where there is nothing: groups are counted, one per tile
        }
        wait_copies<STAGES - 2>();
        sync_block();
        Fragments fragments[2];
        load(fragments[0], shared.stages[0], warp_m, warp_n, 0);

        int stage = 0;            // of the tile being multiplied
        int refill = STAGES - 1;  // the stage that was multiplied last: free since the last barrier
        for (int tile = 0; tile < tiles; ++tile) {
            const int next = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step + 1 < STEPS) {
                    load(fragments[(step + 1) % 2], shared.stages[stage], warp_m, warp_n, step + 1);
                } else if (tile + 1 < tiles) {
                    wait_copies<STAGES - 2>(); // the next tile is here,
                    sync_block();              // for all threads, and none reads this stage any more
                    load(fragments[0], shared.stages[next], warp_m, warp_n, 0);
                }
                if (step == 0) {
                    const int ahead = tile + STAGES - 1;
                    if (ahead < tiles) copy(shared.stages[refill], g, first_m, first_n, int64_t(ahead) * TILE_K);
                    commit_copies();
                }
                multiply(sums, fragments[step % 2].a, fragments[step % 2].b);
            }
            refill = stage;
            stage = next;
        }
    }

    // Turns fragments into rows, 16 at a time, through the warp's strip, so that C is touched in 16-byte pieces and whole
    // sectors.
    DEVICE static void write(const float (&sums)[TILES_M][TILES_N][4], const Gemm& g, Strip& strip, int64_t first_m,
                             int64_t first_n) {
        constexpr int elements = 16 / int(sizeof(Element)); // of a 16-byte piece
        constexpr int turns = 16 * (WARP_N / elements) / WARP;
        Element* c = static_cast<Element*>(g.c);
        const bool aligned = (uint64_t(c) | uint64_t(g.pitch_c) * sizeof(Element)) % 16 == 0;
        const int group = lane() / 4;
        const int member = lane() % 4;
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                store_pair(&strip.rows[group][8 * j + 2 * member], sums[i][j][0], sums[i][j][1]);
                store_pair(&strip.rows[group + 8][8 * j + 2 * member], sums[i][j][2], sums[i][j][3]);
            }
            sync_warp();
            Element* to[turns];
            int count[turns]; // elements of the piece that exist
            Vector16 before[turns];
#pragma unroll
            for (int turn = 0; turn < turns; ++turn) { // all loads of C before the first is needed
                int row_of_strip, column_of_strip;
                place(turn * WARP + lane(), row_of_strip, column_of_strip);
                const int64_t row = first_m + 16 * i + row_of_strip;
                const int64_t column = first_n + column_of_strip;
                to[turn] = c + row * g.pitch_c + column;
                count[turn] = row < g.m ? clamp(g.n - column, elements) : 0;
                if (Output::ADDS && aligned && count[turn] == elements) before[turn] = load16(to[turn]);
            }
#pragma unroll
            for (int turn = 0; turn < turns; ++turn) {
                int row_of_strip, column_of_strip;
                place(turn * WARP + lane(), row_of_strip, column_of_strip);
                const Element* from = &strip.rows[row_of_strip][column_of_strip];
                if (aligned && count[turn] == elements) {
                    store16(to[turn], finish(before[turn], load16(from)));
                } else {
                    for (int e = 0; e < count[turn]; ++e) to[turn][e] = finish(to[turn][e], from[e]);
                }
            }
            sync_warp();
        }
    }

    // Where a 16-byte piece of a strip lies. Eight lanes read 128 bytes at a time: a part of one row or, where rows have but 64
    // bytes (80 with the gap), two rows four apart, which together touch every bank once.
    DEVICE static void place(int piece, int& row, int& column) {
        constexpr int elements = 16 / int(sizeof(Element));
        constexpr int pieces = WARP_N / elements; // of a row
        row = piece / pieces;
        if constexpr (pieces == 4) row = row / 8 * 8 + row % 2 * 4 + row % 8 / 2;
        column = piece % pieces * elements;
    }

    DEVICE static void store_pair(bf16* to, float first, float second) { store4(to, pack(first, second)); }
    DEVICE static void store_pair(float* to, float first, float second) {
        store8(to, Vector8{{float_to_bits(first), float_to_bits(second)}});
    }

    // What becomes of an element of C, or of 16 bytes of them, `before`.
    DEVICE static bf16 finish(bf16, bf16 sum) { return sum; }
    DEVICE static float finish(float before, float sum) { return Output::ADDS ? before + sum : sum; }
    DEVICE static Vector16 finish(const Vector16& before, Vector16 sum) {
        if constexpr (Output::ADDS) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                sum.words[i] = float_to_bits(bits_to_float(before.words[i]) + bits_to_float(sum.words[i]));
            }
        }
        return sum;
    }
};

#define GEMM(name, Layout, Output, Shape)                                                                                \
    using name##_product = Product<Layout, Output, Shape>;                                                               \
    KERNEL(name, name##_product::THREADS, Gemm, name##_product::Shared) { name##_product::run(arguments, shared); }

GEMM(gemm_nt_bf16_128x128, Nt, StoreBf16, Shape128x128)
GEMM(gemm_nt_bf16_64x64, Nt, StoreBf16, Shape64x64)
GEMM(gemm_nt_bf16_16x64, Nt, StoreBf16, Shape16x64)
GEMM(gemm_nt_f32_128x128, Nt, StoreFloat, Shape128x128)
GEMM(gemm_nt_f32_64x64, Nt, StoreFloat, Shape64x64)
GEMM(gemm_nt_f32_16x64, Nt, StoreFloat, Shape16x64)
GEMM(gemm_nn_bf16_128x128, Nn, StoreBf16, Shape128x128)
GEMM(gemm_nn_bf16_64x64, Nn, StoreBf16, Shape64x64)
GEMM(gemm_nn_bf16_16x64, Nn, StoreBf16, Shape16x64)
GEMM(gemm_tn_add_128x128, Tn, AddFloat, Shape128x128)
GEMM(gemm_tn_add_64x64, Tn, AddFloat, Shape64x64)
