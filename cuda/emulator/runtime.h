// The seam between the two halves of the emulated GPU: below it kernels run and are checked (fibers, warps, memory, races,
// counters), above it are the libraries that the learner loads in place of NVIDIA's (driver, NCCL, cuBLASLt).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default) // libcuda.so exports all of this to the other two libraries and to Rust

namespace emulator {

// ---- what the learner sets before the first call (exported as emulator_configure) ----

struct Settings {
    int32_t devices = 1;
    int32_t threads = 0;       // OS threads that run blocks; 0: as many as cores
    int32_t memory = 1;        // bounds, alignment, use after free, reads of what nobody wrote
    int32_t races = 1;         // shared-memory races (vector clocks)
    int32_t counters = 0;      // sectors, bytes, bank conflicts, tensor-core operations, barriers, per source line
    int32_t late_copies = 0;   // cp.async takes effect when it is waited for, not at once
    int32_t reverse = 0;       // fibers and blocks start in descending order
    int32_t lazy_streams = 0;  // a stream runs nothing until somebody waits for it
    int32_t multiprocessors = 4;
    int64_t memory_bytes = int64_t(4) << 30; // of each device
};
Settings& settings();

// ---- findings ----

enum class Kind { OutOfBounds, Misaligned, UseAfterFree, Uninitialised, HostPointer, Race, Barrier, Deadlock, WarpDivergence,
                  MissingWait, SharedBounds, Leak, Launch, Collective, Stream };

struct Finding {
    Kind kind;
    std::string kernel;
    void* code = nullptr;  // return address in the kernel, turned into file:line when read
    int32_t block[3] = {}; // -1 where there is none
    int32_t thread = -1;
    uint64_t address = 0;  // or offset in shared memory
    std::string text;      // one sentence: what happened
    void* other_code = nullptr;
    int32_t other_thread = -1;
};
// Adds it unless one of the same kind, kernel and place is there.
void report(const Finding& finding);

// ---- device memory ----

// Never null for bytes > 0 while the device has room; between allocations lie red zones.
void* allocate(int device, size_t bytes);
// False, and a finding, if `address` is not the start of a live allocation of the device.
bool release(int device, void* address);
size_t bytes_in_use(int device);
// Which device an address belongs to, or -1.
int device_of(const void* address);
// Host-side copies and sets: mark as written; check bounds (false, and a finding naming `what`).
bool mark_written(void* address, size_t bytes, const char* what);
bool check_readable(const void* address, size_t bytes, const char* what);
// Before a copy on or between devices: checks both places and carries over which bytes were written.
bool mark_copied(void* to, const void* from, size_t bytes, const char* what);
// Live allocations of a device as findings of kind Leak.
void report_leaks(int device);

// ---- kernels ----

struct Kernel {
    std::string name;
    void (*entry)(const void* arguments);
    int32_t threads;
    int32_t shared_bytes;
    int32_t argument_bytes;
};

struct Launch {
    const Kernel* kernel;
    const void* arguments; // argument_bytes, copied when it was enqueued
    uint32_t grid[3];
    uint32_t block[3];
    size_t shared_bytes;
    int device;
};

// Runs the whole grid and returns; several may run at once from different OS threads. False after a fatal finding (memory,
// deadlock): the device is then lost until reset, as a real one would be.
bool run(const Launch& launch);

// ---- counters of one kernel since the last clear, summed over launches ----

struct LineCounters {
    std::string place; // file:line
    uint64_t global_requests = 0, global_sectors = 0, global_sectors_least = 0; // warp-wide; sectors of 32 bytes
    uint64_t shared_requests = 0, shared_wavefronts = 0, shared_wavefronts_least = 0;
    uint64_t tensor_core_operations = 0; // m16n8k16
    uint64_t barriers = 0;
};
struct KernelCounters {
    std::string kernel;
    uint64_t launches = 0, blocks = 0, threads = 0;
    // Of global memory: 32 x the sectors that a cache of 128 KiB per block does not hold. Asynchronous copies bypass the cache.
    uint64_t bytes_read = 0, bytes_written = 0;
    LineCounters total;
    std::vector<LineCounters> lines;
};
std::vector<KernelCounters> counters();
void clear_counters();

} // namespace emulator

// What Rust finds by dlsym in libcuda.so. JSON goes into `text` as far as it fits; the return value is the length needed.
extern "C" {
void emulator_configure(const emulator::Settings* settings);
size_t emulator_findings(char* text, size_t capacity); // [{"kind", "kernel", "place", "block", "thread", "address", "text", "other_place", "other_thread"}]
void emulator_clear_findings();
size_t emulator_counters(char* text, size_t capacity); // [KernelCounters]
void emulator_clear_counters();
}

#pragma GCC visibility pop
