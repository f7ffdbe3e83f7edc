// A worker runs blocks, one after another, on one OS thread: its fibers are the block's threads. All state of the running block
// hangs here. Fibers switch only where a thread waits; nothing in a block is concurrent, so nothing here is locked.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "copies.h"
#include "counters.h"
#include "language.h"
#include "layout.h"
#include "races.h"
#include "runtime.h"

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

namespace emulator {

constexpr int LANES = 32;

// What the lanes of a warp do together.
enum class Operation : uint8_t { None, WarpBarrier, Shuffle, Sum, Maximum, LoadMatrices, Multiply };

enum class Wait : uint8_t { No, Barrier, Warp, Returned };

struct Fiber {
    void* stack_pointer = nullptr;
    const void* code = nullptr; // where it waits: a return address in the kernel
    Wait wait = Wait::Returned;
};

struct Warp {
    uint32_t lanes = 0;   // of this warp
    uint32_t arrived = 0; // at the operation under way
    Operation operation = Operation::None;
    uint32_t parameter = 0; // must agree as well: width, count, tiles
    const void* code = nullptr;
    // What each lane gave, and what it gets.
    alignas(32) uint32_t values[LANES];
    alignas(32) uint32_t others[LANES];
    alignas(32) uint32_t results[LANES];
    void* destinations[LANES];
    const void* sources[LANES];
    const void* more_sources[LANES];
};

// Why control came back to the worker's own stack.
enum class Outcome : uint8_t { Finished, Stuck, Failed };

struct Worker {
    int number = 0;
    const Launch* launch = nullptr;
    Settings checks; // as they were when the launch began
    uint64_t device_first = 0, device_bytes = 0; // addresses of the device

    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    void* stack_pointer = nullptr; // of the worker's own stack
    Outcome outcome = Outcome::Finished;

    // Threads that can go on, first come first served.
    static constexpr uint32_t QUEUE = 2 * MOST_THREADS;
    uint16_t ready[QUEUE];
    uint32_t ready_first = 0, ready_end = 0;

    // Constants of the module that were last found to be so.
    uint64_t constants_first = 0, constants_bytes = 0;

    uint32_t threads = 0; // of the block
    uint32_t live = 0;    // that have not returned
    uint32_t barrier_arrived = 0;
    const void* barrier_code = nullptr;

    // Of the checkers that are on.
    std::unique_ptr<Races> races;
    std::unique_ptr<Copies> copies;
    std::unique_ptr<Counting, CountingDeleter> counting;

    unsigned char* shared() const { return reinterpret_cast<unsigned char*>(arena_base(number)); }
    void* arguments() const { return reinterpret_cast<void*>(private_base(number)); }

    void push(uint32_t thread) { ready[ready_end++ % QUEUE] = uint16_t(thread); }
    bool run_block(uint64_t index); // of the grid, x fastest; false after a fatal finding
};

// The worker of this OS thread while it runs a launch.
extern __thread Worker* current_worker __attribute__((tls_model("initial-exec")));

// Workers are kept between launches with their stacks. Also gives the worker to the calling OS thread.
Worker& take_worker();
void give_worker(Worker& worker);
void prepare(Worker& worker, const Launch& launch); // stacks for its threads, its arguments

// Leaves the running fiber and continues the next that is ready. Returns when somebody has pushed this one and its turn came.
void leave();
// Ends the block: the running fiber never continues.
[[noreturn]] void fail();
// Completes a barrier of the block when all threads that have not returned are there.
void release_barrier_if_complete();

// The running lane comes to an operation of its warp: its slot is warp.values[lane] and so on. True for the last lane to come,
// which computes for all and then calls release(); the others wait inside, and their results are there when it returns false.
bool meet(Worker& worker, Warp& warp, Operation operation, uint32_t parameter, const void* code);
void release(Worker& worker, Warp& warp);

// A finding about the running thread, or about another of its block.
Finding finding_here(Kind kind, const void* code, int thread = -1);

// Whether two return addresses stand for the same source line through the same chain of inlined calls.
bool same_place(const void* a, const void* b);
// "file:line" of a return address, the innermost frame that is not in include/; "kernel+offset" where nothing is known.
std::string place_of(const void* code);
std::string describe(const char* format, ...) __attribute__((format(printf, 1, 2)));

} // namespace emulator
