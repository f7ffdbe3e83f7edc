// What happens at each access of a kernel to memory. The compiler's hooks and the emulator's own operations all come here.
#pragma once

#include "worker.h"

namespace emulator {

// `bytes` bytes of shadow at once.
template <int bytes> struct ShadowWord;
template <> struct ShadowWord<1> { typedef uint8_t type; };
template <> struct ShadowWord<2> { typedef uint16_t type; };
template <> struct ShadowWord<4> { typedef uint32_t type; };
template <> struct ShadowWord<8> { typedef uint64_t type; };

template <class Word> constexpr Word every_byte(uint8_t value) { return Word(Word(~Word(0)) / 0xff * value); }

// True if all bytes may be accessed, and were written in case of a read. A write marks them written.
template <int bytes, bool write> inline bool shadow_allows(uint64_t address) {
    if constexpr (bytes == 16) {
        return shadow_allows<8, write>(address) & shadow_allows<8, write>(address + 8);
    } else {
        typedef typename ShadowWord<bytes>::type Word;
        Word state;
        memcpy(&state, reinterpret_cast<const void*>(address + SHADOW), bytes);
        constexpr Word all_written = every_byte<Word>(WRITTEN), all_allocated = every_byte<Word>(ALLOCATED);
        if (state == all_written) return true;
        if (!write || (state & all_allocated) != all_allocated) return false;
        memcpy(reinterpret_cast<void*>(address + SHADOW), &all_written, bytes);
        return true;
    }
}

// Reports what is wrong with an access that the shadow does not allow. Returns only if it is no more than a read of what nobody wrote.
void refuse_access(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code);
[[noreturn]] void refuse_misaligned(uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code);
// An address that is neither shared memory nor memory of this device: a constant of the module, or a fault.
void check_foreign(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code);

[[noreturn]] void refuse_copy_destination(uint32_t thread, uint64_t address, const void* code);

// 16 bytes of shared memory that a copy may write: not marked as written before it takes effect.
inline bool shadow_allows_copy(uint64_t address) {
    uint64_t state[2];
    memcpy(state, reinterpret_cast<const void*>(address + SHADOW), 16);
    return (state[0] & state[1] & every_byte<uint64_t>(ALLOCATED)) == every_byte<uint64_t>(ALLOCATED);
}

void track_race(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, bool copy, const void* code);
void count_access(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code);
void count_tensor_core(Worker& worker, const void* code, uint64_t operations);

template <int bytes, bool write, bool aligned = true>
__attribute__((always_inline)) inline void check_access(uint64_t address, const void* code) {
    if (zone_of(address) == PRIVATE) return;
    Worker& worker = *current_worker;
    const uint32_t thread = emulator_position.thread;
    if (aligned && (address & (bytes - 1)) != 0 && worker.checks.memory) refuse_misaligned(thread, address, bytes, write, code);
    if (address - worker.device_first < worker.device_bytes) {
        if (worker.checks.memory && !shadow_allows<bytes, write>(address)) refuse_access(worker, thread, address, bytes, write, code);
    } else if (address - arena_base(worker.number) < ARENA_BYTES) {
        if (worker.checks.memory && !shadow_allows<bytes, write>(address)) refuse_access(worker, thread, address, bytes, write, code);
        if (worker.checks.races) track_race(worker, thread, address, bytes, write, false, code);
    } else {
        check_foreign(worker, thread, address, bytes, write, code);
        return;
    }
    if (worker.checks.counters) count_access(worker, thread, address, bytes, write, code);
}

// A row of ldmatrix, read on behalf of `thread`.
inline void check_matrix_row(Worker& worker, uint32_t thread, const void* row, const void* code) {
    const uint64_t address = reinterpret_cast<uint64_t>(row);
    if (worker.checks.memory) {
        if ((address & 15) != 0) refuse_misaligned(thread, address, 16, false, code);
        if (address - arena_base(worker.number) >= ARENA_BYTES) check_foreign(worker, thread, address, 16, false, code);
        else if (!shadow_allows<16, false>(address)) refuse_access(worker, thread, address, 16, false, code);
    }
    if (worker.checks.races) track_race(worker, thread, address, 16, false, false, code);
}

} // namespace emulator
