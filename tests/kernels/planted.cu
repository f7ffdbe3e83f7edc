// Faults planted on purpose, each beside a clean twin, to prove that the emulator's checkers see the one and pass the other; and
// kernels of known memory traffic, to prove its counters. planted.rs launches them and says what must be found. Where a finding
// must point is marked at the end of the line: "FAULT name", and "OTHER name" for the second party.
#include "../../cuda/include/mma.h"

// Mirrored in planted.rs.
struct Planted {
    const float* from; // [length]
    float* to;         // [length]
    int64_t length;
};

constexpr int THREADS = 64;

// NAME_faulty and NAME_clean from one body that says with `faulty` where they differ.
#define PAIR(name, threads, Shared)                                                   \
    KERNEL(name##_faulty, threads, Planted, Shared) { name<true>(arguments, shared); } \
    KERNEL(name##_clean, threads, Planted, Shared) { name<false>(arguments, shared); }

// The values of one block in shared memory, and what lies behind them.
struct SharedValues {
    float values[THREADS];
    float behind[THREADS];
};

// A line of shared memory that 16-byte copies fill.
struct SharedCopies {
    alignas(16) float values[4 * THREADS];
};

DEVICE int thread() { return int(threadIdx.x); }

// ---- global memory ----

// Copies `length` floats. What the host passes decides whether it is at fault: freed memory, its own memory, memory nobody wrote.
KERNEL(copy, THREADS, Planted, NoShared) {
    if (thread() < arguments.length) arguments.to[thread()] = arguments.from[thread()]; // FAULT copy
}

template <bool faulty> DEVICE void read_out_of_bounds(const Planted& arguments, NoShared&) {
    const int index = faulty ? thread() + 1 : thread();
    arguments.to[thread()] = arguments.from[index]; // FAULT read_out_of_bounds
}
PAIR(read_out_of_bounds, THREADS, NoShared)

template <bool faulty> DEVICE void write_out_of_bounds(const Planted& arguments, NoShared&) {
    const int index = faulty ? thread() - 1 : thread();
    arguments.to[index] = 1.0f; // FAULT write_out_of_bounds
}
PAIR(write_out_of_bounds, THREADS, NoShared)

template <bool faulty> DEVICE void misaligned_vector(const Planted& arguments, NoShared&) {
    if (thread() != 7) return;
    store16(arguments.to, load16(arguments.from + (faulty ? 2 : 4))); // FAULT misaligned_vector
}
PAIR(misaligned_vector, THREADS, NoShared)

// ---- shared memory ----

template <bool faulty> DEVICE void uninitialised_shared(const Planted& arguments, SharedValues& shared) {
    if (!faulty || thread() != 9) shared.values[thread()] = arguments.from[thread()];
    arguments.to[thread()] = shared.values[thread()]; // FAULT uninitialised_shared
}
PAIR(uninitialised_shared, THREADS, SharedValues)

template <bool faulty> DEVICE void index_past_array(const Planted& arguments, SharedValues& shared) {
    shared.behind[thread()] = 0.0f;
    const int index = faulty ? thread() + 1 : thread();
    shared.values[index] = arguments.from[thread()]; // FAULT index_past_array
    arguments.to[thread()] = shared.values[index];
}
PAIR(index_past_array, THREADS, SharedValues)

template <bool faulty> DEVICE void missing_barrier(const Planted& arguments, SharedValues& shared) {
    shared.values[thread()] = arguments.from[thread()]; // OTHER missing_barrier
    if (!faulty) sync_block();
    arguments.to[thread()] = shared.values[THREADS - 1 - thread()]; // FAULT missing_barrier
}
PAIR(missing_barrier, THREADS, SharedValues)

// Threads of one warp need a barrier as well.
template <bool faulty> DEVICE void missing_warp_barrier(const Planted& arguments, SharedValues& shared) {
    shared.values[thread()] = arguments.from[thread()]; // OTHER missing_warp_barrier
    if (!faulty) sync_warp();
    arguments.to[thread()] = shared.values[thread() ^ 1]; // FAULT missing_warp_barrier
}
PAIR(missing_warp_barrier, THREADS, SharedValues)

// Values are right, yet a fast warp may overwrite what a slow one has still to read.
template <bool faulty> DEVICE void missing_trailing_barrier(const Planted& arguments, SharedValues& shared) {
    float sum = 0.0f;
    for (int round = 0; round < 2; ++round) {
        shared.values[thread()] = arguments.from[thread()]; // FAULT missing_trailing_barrier
        sync_block();
        sum += shared.values[THREADS - 1 - thread()]; // OTHER missing_trailing_barrier
        if (!faulty) sync_block();
    }
    arguments.to[thread()] = sum;
}
PAIR(missing_trailing_barrier, THREADS, SharedValues)

// ---- barriers and warps ----

template <bool faulty> DEVICE void diverging_barriers(const Planted& arguments, NoShared&) {
    if (faulty && warp() == 1) {
        sync_block(); // FAULT diverging_barriers
        arguments.to[thread()] = 1.0f;
    } else {
        arguments.to[thread()] = 1.0f;
        sync_block(); // OTHER diverging_barriers
    }
}
PAIR(diverging_barriers, THREADS, NoShared)

template <bool faulty> DEVICE void returned_before_barrier(const Planted& arguments, NoShared&) {
    arguments.to[thread()] = 1.0f;
    if (faulty && warp() == 1) return;
    sync_block(); // FAULT returned_before_barrier
}
PAIR(returned_before_barrier, THREADS, NoShared)

// Half a warp waits for the block, which waits for the other half, which waits for its warp.
template <bool faulty> DEVICE void deadlock(const Planted& arguments, NoShared&) {
    if (faulty && lane() < 16) sync_block(); // OTHER deadlock
    sync_warp(); // FAULT deadlock
    arguments.to[thread()] = 1.0f;
}
PAIR(deadlock, THREADS, NoShared)

template <bool faulty> DEVICE void lane_missing(const Planted& arguments, NoShared&) {
    arguments.to[thread()] = 1.0f;
    if (faulty && thread() == 37) return;
    arguments.to[thread()] = warp_sum(arguments.from[thread()]); // FAULT lane_missing
}
PAIR(lane_missing, THREADS, NoShared)

// ---- asynchronous copies ----

template <bool faulty> DEVICE void missing_wait(const Planted& arguments, SharedCopies& shared) {
    copy_async(shared.values + 4 * thread(), arguments.from + 4 * thread()); // OTHER missing_wait
    commit_copies();
    if (!faulty) wait_copies<0>();
    sync_block();
    arguments.to[thread()] = shared.values[thread()]; // FAULT missing_wait
    wait_copies<0>();
}
PAIR(missing_wait, THREADS, SharedCopies)

// Two groups in flight, and the wait leaves one too many unfinished.
template <bool faulty> DEVICE void wait_one_short(const Planted& arguments, SharedCopies& shared) {
    if (warp() == 0) copy_async(shared.values + 4 * thread(), arguments.from + 4 * thread());
    commit_copies();
    if (warp() == 1) copy_async(shared.values + 4 * thread(), arguments.from + 4 * thread()); // OTHER wait_one_short
    commit_copies();
    wait_copies<faulty ? 1 : 0>();
    sync_block();
    arguments.to[thread()] = shared.values[THREADS * 4 - 1 - thread()]; // FAULT wait_one_short
    wait_copies<0>();
}
PAIR(wait_one_short, THREADS, SharedCopies)

template <bool faulty> DEVICE void never_waited(const Planted& arguments, SharedCopies& shared) {
    arguments.to[thread()] = 1.0f;
    copy_async(shared.values + 4 * thread(), arguments.from + 4 * thread()); // FAULT never_waited
    commit_copies();
    if (!faulty) wait_copies<0>();
}
PAIR(never_waited, THREADS, SharedCopies)

// ---- known traffic, for the counters: one warp ----

template <int pitch> struct SharedTile {
    float values[32][pitch];
};

template <int pitch> DEVICE void transpose(const Planted& arguments, SharedTile<pitch>& shared) {
    for (int row = 0; row < 32; ++row) shared.values[row][lane()] = arguments.from[row * 32 + lane()];
    sync_block();
    for (int column = 0; column < 32; ++column) {
        const float value = shared.values[lane()][column]; // COUNT column
        arguments.to[column * 32 + lane()] = value;
    }
}
KERNEL(transpose_pitch_32, 32, Planted, SharedTile<32>) { transpose(arguments, shared); }
KERNEL(transpose_pitch_33, 32, Planted, SharedTile<33>) { transpose(arguments, shared); }

KERNEL(strided_read, 32, Planted, NoShared) {
    const float value = arguments.from[8 * lane()]; // COUNT strided
    arguments.to[lane()] = value;
}
KERNEL(dense_read, 32, Planted, NoShared) {
    const float value = arguments.from[lane()]; // COUNT dense
    arguments.to[lane()] = value;
}

struct SharedProduct {
    Tile<32, 64> a;
    Tile<32, 64> b;
};
// 32 x 32 x 64 by one warp: (32 / 16) (32 / 8) (64 / 16) = 32 operations of a tensor core.
KERNEL(product, 32, Planted, SharedProduct) {
    for (int chunk = 0; chunk < 8; ++chunk) {
        copy_async(shared.a.at(lane(), chunk), arguments.from);
        copy_async(shared.b.at(lane(), chunk), arguments.from);
    }
    commit_copies();
    wait_copies<0>();
    sync_block();
    float sums[2][4][4] = {};
    for (int step = 0; step < 4; ++step) {
        uint32_t a[2][4], b_pairs[2][4], b[4][2];
        const bf16* const a_rows[2] = {shared.a.at(lane() % 16, 2 * step + lane() / 16),
                                       shared.a.at(16 + lane() % 16, 2 * step + lane() / 16)};
        const int b_row = lane() % 8 + lane() / 16 * 8;
        const bf16* const b_rows[2] = {shared.b.at(b_row, 2 * step + lane() / 8 % 2),
                                       shared.b.at(16 + b_row, 2 * step + lane() / 8 % 2)};
        load_matrices(a, a_rows);
        load_matrices(b_pairs, b_rows);
        for (int n = 0; n < 4; ++n) {
            b[n][0] = b_pairs[n / 2][n % 2 * 2];
            b[n][1] = b_pairs[n / 2][n % 2 * 2 + 1];
        }
        multiply(sums, a, b);
    }
    for (int m = 0; m < 2; ++m) {
        for (int n = 0; n < 4; ++n) {
            for (int i = 0; i < 4; ++i) arguments.to[((m * 4 + n) * 4 + i) * 32 + lane()] = sums[m][n][i];
        }
    }
}
