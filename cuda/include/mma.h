// Tensor cores and the copies that feed them: cp.async, ldmatrix and mma.sync m16n8k16 (sm_80), and the swizzled shared tiles that
// make them free of bank conflicts. Hopper's wgmma and TMA will be further bodies of the same functions over the same tiles.
//
// Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 * group + member:
//   a[4]: rows group and group + 8, columns 2 * member (+1) and 8 + 2 * member (+1): a[0] (group, low columns), a[1] (group + 8,
//         low), a[2] (group, high), a[3] (group + 8, high), each two bf16
//   b[2]: column group of B, rows 2 * member (+1) in b[0] and 8 + 2 * member (+1) in b[1]
//   c[4]: (group, 2 * member), (group, 2 * member + 1), (group + 8, 2 * member), (group + 8, 2 * member + 1)
#pragma once

#include "device.h"

// ---- asynchronous copies from global to shared memory ----

// Copies the first `bytes` (0 to 16) of 16 and writes zeros in place of the rest, which is not read. Both addresses are 16-aligned.
DEVICE void copy_async_part(void* shared, const void* global, int bytes) {
#ifdef LEARNER_EMULATOR
    emulator::copy_async(shared, global, bytes);
#else
    const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
#endif
}

// Copies 16 bytes, or writes 16 zero bytes where `valid` is false (`global` is then not read).
DEVICE void copy_async(void* shared, const void* global, bool valid = true) { copy_async_part(shared, global, valid ? 16 : 0); }

// Closes the group of this thread's copies since the last call.
DEVICE void commit_copies() {
#ifdef LEARNER_EMULATOR
    emulator::commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's groups are unfinished. Other threads' copies are seen after a barrier.
template <int pending> DEVICE void wait_copies() {
#ifdef LEARNER_EMULATOR
    emulator::wait_copies(pending);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- fragments ----

// `count` times ldmatrix.x4: matrices i = 0..3 of 8 rows of 8 bf16; lane 8 * i + r gives the (16-aligned, shared) address of row r
// of matrix i, and gets elements 2 * member (+1) of row `group` of every matrix. Transposed: of column `group` instead.
template <int count> DEVICE void load_matrices(uint32_t (&registers)[count][4], const bf16* const (&rows)[count]) {
#ifdef LEARNER_EMULATOR
    emulator::load_matrices(&registers[0][0], reinterpret_cast<const void* const*>(&rows[0]), count, false);
#else
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const uint32_t address = uint32_t(__cvta_generic_to_shared(rows[i]));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(registers[i][0]), "=r"(registers[i][1]), "=r"(registers[i][2]), "=r"(registers[i][3])
                     : "r"(address) : "memory");
    }
#endif
}
template <int count> DEVICE void load_matrices_transposed(uint32_t (&registers)[count][4], const bf16* const (&rows)[count]) {
#ifdef LEARNER_EMULATOR
    emulator::load_matrices(&registers[0][0], reinterpret_cast<const void* const*>(&rows[0]), count, true);
#else
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const uint32_t address = uint32_t(__cvta_generic_to_shared(rows[i]));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(registers[i][0]), "=r"(registers[i][1]), "=r"(registers[i][2]), "=r"(registers[i][3])
                     : "r"(address) : "memory");
    }
#endif
}

// c[m][n] += a[m] * b[n] for every pair: rows_m * columns_n products of 16x16 by 16x8. One warp. An element's sum depends on its own
// row of A and column of B only, so its bits do not depend on the tile it is computed in.
template <int tiles_m, int tiles_n>
DEVICE void multiply(float (&c)[tiles_m][tiles_n][4], const uint32_t (&a)[tiles_m][4], const uint32_t (&b)[tiles_n][2]) {
#ifdef LEARNER_EMULATOR
    emulator::multiply(&c[0][0][0], &a[0][0], &b[0][0], tiles_m, tiles_n);
#else
#pragma unroll
    for (int m = 0; m < tiles_m; ++m) {
#pragma unroll
        for (int n = 0; n < tiles_n; ++n) {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                         "{%0, %1, %2, %3};"
                         : "+f"(c[m][n][0]), "+f"(c[m][n][1]), "+f"(c[m][n][2]), "+f"(c[m][n][3])
                         : "r"(a[m][0]), "r"(a[m][1]), "r"(a[m][2]), "r"(a[m][3]), "r"(b[n][0]), "r"(b[n][1]));
        }
    }
#endif
}

// ---- shared tiles ----

// A tile of bf16 in shared memory, rows of `columns` (32, 64 or 128). Chunks of 16 bytes are permuted within each line of 128
// bytes, so that 8 consecutive rows of one chunk column lie in 8 different groups of banks: ldmatrix and 16-byte copies are free
// of conflicts.
template <int rows, int columns> struct alignas(128) Tile {
    static constexpr int ROWS = rows;
    static constexpr int COLUMNS = columns;
    static constexpr int CHUNKS = columns / 8; // per row
    bf16 values[rows * columns];

    // Address of 8 consecutive elements: chunk `chunk` of row `row`.
    DEVICE bf16* at(int row, int chunk) {
        constexpr int rows_per_line = CHUNKS >= 8 ? 1 : 8 / CHUNKS;
        constexpr int period = CHUNKS >= 8 ? 8 : CHUNKS;
        return values + row * columns + (chunk ^ ((row / rows_per_line) % period)) * 8;
    }
};
