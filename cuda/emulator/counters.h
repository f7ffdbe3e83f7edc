// Counters of the running launch, per place in the code.
#pragma once

#include <cstdint>
#include <memory>

namespace emulator {

struct Worker;
struct Counting;
struct CountingDeleter {
    void operator()(Counting* counting) const;
};

// `bytes` are read at `global`, the rest of 16 is zeros.
void count_copy(Worker& worker, uint32_t thread, uint64_t shared, uint64_t global, uint32_t bytes, const void* code);
// 32 rows of ldmatrix, given by the lanes of a warp.
void count_matrix_rows(Worker& worker, const uint64_t (&rows)[32], const void* code);
void count_barrier(Worker& worker, const void* code);

void counters_start_launch(Worker& worker);
void counters_finish_launch(Worker& worker); // adds to what all launches of the kernel did
void counters_start_block(Worker& worker);
// The lanes of a warp are together: what they accessed since they last were becomes requests.
void counters_warp_meets(Worker& worker, uint32_t warp);
void counters_all_meet(Worker& worker);
void count_launch(const char* kernel, uint64_t blocks, uint64_t threads);

} // namespace emulator
