// What the lanes of a warp do together: barriers of a warp, shuffles, sums and maxima. Every lane leaves its operands in its
// warp and waits; the last to come computes for all, and wakes them.
#include <immintrin.h>

#include <cmath>

#include "worker.h"

namespace emulator {

[[noreturn]] static void fail_divergent(Warp& warp, const void* code) {
    Finding finding = finding_here(Kind::WarpDivergence, code);
    finding.text = "this lane comes to another operation than the one in which other lanes of its warp wait";
    finding.other_code = const_cast<void*>(warp.code);
    report(finding);
    fail();
}

bool meet(Worker& worker, Warp& warp, Operation operation, uint32_t parameter, const void* code) {
    if (warp.arrived == 0) {
        warp.operation = operation;
        warp.parameter = parameter;
        warp.code = code;
    } else if (operation != warp.operation || parameter != warp.parameter || (code != warp.code && !same_place(code, warp.code))) {
        fail_divergent(warp, code);
    }
    if (++warp.arrived == warp.lanes) return true;
    Fiber& fiber = worker.fibers[emulator_position.thread];
    fiber.wait = Wait::Warp;
    fiber.code = code;
    leave();
    return false;
}

void release(Worker& worker, Warp& warp) {
    warp.arrived = 0;
    const uint32_t running = emulator_position.thread;
    const uint32_t first = running / LANES * LANES;
    if (worker.checks.counters) counters_warp_meets(worker, running / LANES);
    for (uint32_t i = 0; i < warp.lanes; ++i) {
        const uint32_t thread = first + (worker.checks.reverse ? warp.lanes - 1 - i : i);
        if (thread == running) continue;
        worker.fibers[thread].wait = Wait::No;
        worker.push(thread);
    }
}

EMULATOR_API void emulator_warp_barrier() {
    Worker& worker = *current_worker;
    const uint32_t number = emulator_position.thread / LANES;
    Warp& warp = worker.warps[number];
    if (!meet(worker, warp, Operation::WarpBarrier, 0, __builtin_return_address(0))) return;
    races_warp_synchronised(worker, number);
    copies_warp_synchronised(worker, number);
    release(worker, warp);
}

EMULATOR_API uint32_t emulator_shuffle(uint32_t value, int from) {
    Worker& worker = *current_worker;
    Warp& warp = worker.warps[emulator_position.thread / LANES];
    const uint32_t lane = emulator_position.thread % LANES;
    warp.values[lane] = value;
    warp.others[lane] = uint32_t(from) % LANES;
    if (meet(worker, warp, Operation::Shuffle, 0, __builtin_return_address(0))) {
        for (uint32_t i = 0; i < LANES; ++i) warp.results[i] = warp.values[warp.others[i] % LANES];
        release(worker, warp);
    }
    return warp.results[lane];
}

// Sum or maximum by butterfly: in each round lane i combines its value with that of lane i ^ mask, masks ascending.
template <class Combine>
static float butterfly(Operation operation, float value, int width, const void* code, const Combine& combine) {
    Worker& worker = *current_worker;
    Warp& warp = worker.warps[emulator_position.thread / LANES];
    const uint32_t lane = emulator_position.thread % LANES;
    warp.values[lane] = float_to_bits(value);
    if (meet(worker, warp, operation, uint32_t(width), code)) {
        alignas(32) float values[LANES], next[LANES];
        memcpy(values, warp.values, sizeof values);
        for (int mask = 1; mask < width; mask *= 2) {
            for (int i = 0; i < LANES; ++i) next[i] = combine(values[i], values[i ^ mask]);
            memcpy(values, next, sizeof values);
        }
        memcpy(warp.results, values, sizeof values);
        release(worker, warp);
    }
    return bits_to_float(warp.results[lane]);
}

EMULATOR_API float emulator_butterfly_sum(float value, int width) {
    return butterfly(Operation::Sum, value, width, __builtin_return_address(0), [](float a, float b) { return a + b; });
}

EMULATOR_API float emulator_butterfly_maximum(float value, int width) {
    return butterfly(Operation::Maximum, value, width, __builtin_return_address(0), [](float a, float b) { return a > b ? a : b; });
}

// ---- functions of one lane that are instructions or library calls on a GPU ----

// ex2.approx.ftz: results below the smallest normal number are 0.
EMULATOR_API float emulator_exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
EMULATOR_API float emulator_log(float x) { return std::log(x); }
EMULATOR_API float emulator_exp(float x) { return std::exp(x); }
EMULATOR_API float emulator_expm1(float x) { return std::expm1(x); }

} // namespace emulator
