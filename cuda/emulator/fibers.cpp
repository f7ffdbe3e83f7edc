// Threads of a block as fibers: switching, barriers of the block, and what happens when nobody can go on.
//
// Sources of libcuda.so: fibers warp matrix copies access memory races counters findings places
// launch (.cpp) below the seam of runtime.h, and
// those of the driver above it. Compiled with
//   g++ -std=c++20 -O2 -g1 -march=x86-64-v3 -ffp-contract=off -fPIC -fvisibility=hidden -shared -Wl,-soname,libcuda.so -pthread
// and never with a sanitizer. Kernels are compiled with -fno-optimize-sibling-calls besides what the sanitizer needs: the return
// address of a call is the place that findings and counters name.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "memory.h"
#include "worker.h"

namespace emulator {

__thread Worker* current_worker = nullptr;

extern "C" {
__attribute__((visibility("default"))) __thread Position emulator_position __attribute__((tls_model("initial-exec")));
}

// emulator_switch(void** save, void* load): keeps the callee-saved registers and the stack pointer, takes up the others'. Called
// from one place only, so that the processor predicts the return.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

__attribute__((noinline)) void leave() {
    Worker& worker = *current_worker;
    void** save = &worker.fibers[emulator_position.thread].stack_pointer;
    void* load;
    if (worker.ready_first == worker.ready_end) {
        worker.outcome = worker.live == 0 ? Outcome::Finished : Outcome::Stuck;
        load = worker.stack_pointer;
    } else {
        const uint32_t next = worker.ready[worker.ready_first++ % Worker::QUEUE];
        emulator_position.thread = next;
        load = worker.fibers[next].stack_pointer;
    }
    emulator_switch(save, load);
}

void fail() {
    Worker& worker = *current_worker;
    worker.outcome = Outcome::Failed;
    void* abandoned;
    emulator_switch(&abandoned, worker.stack_pointer);
    __builtin_unreachable();
}

// What every fiber does: the kernel, once per block, for ever.
static void fiber_main() {
    for (;;) {
        Worker& worker = *current_worker;
        worker.launch->kernel->entry(worker.arguments());
        Fiber& fiber = worker.fibers[emulator_position.thread];
        fiber.wait = Wait::Returned;
        copies_thread_returns(worker, emulator_position.thread);
        --worker.live;
        release_barrier_if_complete();
        leave();
    }
}

// A stack that starts fiber_main at the next switch. Tops are shifted against each other: 64 KiB apart, the hot lines of all
// stacks would share one set of the cache.
static void rewind(Worker& worker, uint32_t thread) {
    const uint64_t top = stack_base(worker.number, int(thread)) + STACK_BYTES - (thread % 61) * 64;
    void** stack = reinterpret_cast<void**>(top);
    *--stack = nullptr; // fiber_main's caller: there is none; leaves the stack aligned as after a call
    *--stack = reinterpret_cast<void*>(&fiber_main);
    stack -= 6; // callee-saved registers
    worker.fibers[thread].stack_pointer = stack;
    worker.fibers[thread].wait = Wait::Returned;
}

// ---- workers ----

static std::mutex& workers_mutex = *new std::mutex; // never destroyed: threads of the pool outlive main
static std::vector<Worker*>& free_workers = *new std::vector<Worker*>;
static int worker_count = 0;

Worker& take_worker() {
    Worker* worker = nullptr;
    {
        std::lock_guard lock(workers_mutex);
        if (!free_workers.empty()) {
            worker = free_workers.back();
            free_workers.pop_back();
        } else {
            worker = new Worker;
            worker->number = worker_count++;
            map_at(arena_base(worker->number), ARENA_BYTES);
            map_at(arena_base(worker->number) + SHADOW, ARENA_BYTES);
            map_at(private_base(worker->number), MOST_ARGUMENTS);
        }
    }
    current_worker = worker;
    return *worker;
}

void give_worker(Worker& worker) {
    current_worker = nullptr;
    std::lock_guard lock(workers_mutex);
    free_workers.push_back(&worker);
}

void prepare(Worker& worker, const Launch& launch) {
    worker.launch = &launch;
    worker.checks = settings();
    worker.device_first = device_base(launch.device);
    worker.device_bytes = map_device(launch.device);
    worker.threads = launch.block[0];
    memcpy(worker.arguments(), launch.arguments, size_t(launch.kernel->argument_bytes));
    while (worker.fibers.size() < worker.threads) {
        const uint32_t thread = uint32_t(worker.fibers.size());
        constexpr size_t guard = 4096; // the lowest page of a stack stays unmapped
        map_at(stack_base(worker.number, int(thread)) + guard, STACK_BYTES - guard);
        worker.fibers.emplace_back();
        rewind(worker, thread);
    }
    const uint32_t warps = (worker.threads + LANES - 1) / LANES;
    if (worker.warps.size() < warps) worker.warps.resize(warps);
    counters_start_launch(worker);
    emulator_position.threads = worker.threads;
    emulator_position.grid = Dim3{launch.grid[0], launch.grid[1], launch.grid[2]};
}

static void report_stuck(Worker& worker);

bool Worker::run_block(uint64_t index) {
    const uint32_t* grid = launch->grid;
    emulator_position.block = Dim3{uint32_t(index % grid[0]), uint32_t(index / grid[0] % grid[1]), uint32_t(index / grid[0] / grid[1])};
    live = threads;
    barrier_arrived = 0;
    ready_first = ready_end = 0;
    for (uint32_t warp = 0; warp * LANES < threads; ++warp) {
        warps[warp].lanes = threads - warp * LANES < LANES ? threads - warp * LANES : LANES;
        warps[warp].arrived = 0;
    }
    for (uint32_t i = 0; i < threads; ++i) {
        fibers[i].wait = Wait::No;
        push(checks.reverse ? threads - 1 - i : i);
    }
    // What nobody wrote reads as NaN, and its shadow says that nobody wrote it.
    memset(shared(), 0xff, launch->shared_bytes);
    memset(shared() + SHADOW, ALLOCATED, launch->shared_bytes);
    copies_start_block(*this);
    races_start_block(*this);
    counters_start_block(*this);

    const uint32_t first = ready[ready_first++];
    emulator_position.thread = first;
    emulator_switch(&stack_pointer, fibers[first].stack_pointer);

    memset(shared() + SHADOW, UNALLOCATED, launch->shared_bytes);
    counters_all_meet(*this);
    if (outcome == Outcome::Stuck) report_stuck(*this);
    if (outcome == Outcome::Finished) return true;
    for (uint32_t i = 0; i < threads; ++i) {
        if (fibers[i].wait != Wait::Returned) rewind(*this, i);
    }
    return false;
}

// ---- barriers of the block ----

void release_barrier_if_complete() {
    Worker& worker = *current_worker;
    if (worker.barrier_arrived == 0 || worker.barrier_arrived < worker.live) return;
    if (worker.live < worker.threads) {
        Finding finding = finding_here(Kind::Barrier, worker.barrier_code);
        finding.thread = -1;
        finding.text = describe("%u of the block's %u threads have returned and do not take part in this barrier",
                                worker.threads - worker.live, worker.threads);
        report(finding);
    }
    worker.barrier_arrived = 0;
    races_block_synchronised(worker);
    copies_block_synchronised(worker);
    counters_all_meet(worker);
    count_barrier(worker, worker.barrier_code);
    const uint32_t running = emulator_position.thread;
    for (uint32_t i = 0; i < worker.threads; ++i) {
        const uint32_t thread = worker.checks.reverse ? worker.threads - 1 - i : i;
        if (worker.fibers[thread].wait != Wait::Barrier) continue;
        worker.fibers[thread].wait = Wait::No;
        if (thread != running) worker.push(thread);
    }
}

EMULATOR_API void emulator_barrier() {
    const void* code = __builtin_return_address(0);
    Worker& worker = *current_worker;
    Fiber& fiber = worker.fibers[emulator_position.thread];
    fiber.wait = Wait::Barrier;
    fiber.code = code;
    if (worker.barrier_arrived++ == 0) {
        worker.barrier_code = code;
    } else if (code != worker.barrier_code && !same_place(code, worker.barrier_code)) {
        Finding finding = finding_here(Kind::Barrier, code);
        finding.text = "this thread waits in another __syncthreads than those that came before it";
        finding.other_code = const_cast<void*>(worker.barrier_code);
        report(finding);
    }
    release_barrier_if_complete();
    if (fiber.wait != Wait::No) leave();
}

EMULATOR_API void* emulator_shared_memory() { return current_worker->shared(); }

// ---- nobody can go on ----

static const char* name_of(Operation operation) {
    switch (operation) {
    case Operation::WarpBarrier: return "sync_warp";
    case Operation::Shuffle: return "shuffle";
    case Operation::Sum: return "warp_sum";
    case Operation::Maximum: return "warp_maximum";
    case Operation::LoadMatrices: return "load_matrices";
    case Operation::Multiply: return "multiply";
    case Operation::None: break;
    }
    return "nothing";
}

// "threads 0-31 wait in sync_block at gemm.cu:80; threads 32-63 have returned": runs of threads in one place.
static std::string who_waits_where(const Worker& worker, uint32_t first, uint32_t end) {
    std::string text;
    for (uint32_t i = first; i < end;) {
        const Fiber& fiber = worker.fibers[i];
        uint32_t j = i + 1;
        while (j < end && worker.fibers[j].wait == fiber.wait && (fiber.wait == Wait::Returned || worker.fibers[j].code == fiber.code)) ++j;
        if (!text.empty()) text += "; ";
        text += j - i == 1 ? describe("thread %u ", i) : describe("threads %u-%u ", i, j - 1);
        if (fiber.wait == Wait::Returned) {
            text += j - i == 1 ? "has returned" : "have returned";
        } else {
            const char* what = fiber.wait == Wait::Barrier ? "sync_block" : name_of(worker.warps[i / LANES].operation);
            text += describe("%s in %s at %s", j - i == 1 ? "waits" : "wait", what, place_of(fiber.code).c_str());
        }
        i = j;
    }
    return text;
}

// No thread is ready, yet some have not returned. A warp whose lanes are not all in its operation is the cause if there is one.
static void report_stuck(Worker& worker) {
    for (uint32_t w = 0; w * LANES < worker.threads; ++w) {
        const Warp& warp = worker.warps[w];
        if (warp.arrived == 0) continue;
        const uint32_t first = w * LANES;
        uint32_t waiting = first, missing = first;
        for (uint32_t i = first; i < first + warp.lanes; ++i) {
            if (worker.fibers[i].wait == Wait::Warp) waiting = i;
            else missing = i;
        }
        Finding finding = finding_here(Kind::WarpDivergence, worker.fibers[waiting].code, int(waiting));
        finding.other_thread = int(missing);
        if (worker.fibers[missing].wait != Wait::Returned) finding.other_code = const_cast<void*>(worker.fibers[missing].code);
        finding.text = describe("%s needs all lanes of warp %u: ", name_of(warp.operation), w) +
                       who_waits_where(worker, first, first + warp.lanes);
        report(finding);
        return;
    }
    uint32_t waiting = 0;
    while (worker.fibers[waiting].wait == Wait::Returned) ++waiting;
    Finding finding = finding_here(Kind::Deadlock, worker.fibers[waiting].code, int(waiting));
    finding.text = "no thread of the block can go on: " + who_waits_where(worker, 0, worker.threads);
    report(finding);
}

} // namespace emulator
