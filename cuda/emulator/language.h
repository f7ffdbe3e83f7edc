// CUDA's device language for the host compiler, and the functions that include/ calls for what is an instruction on a GPU.
// The emulator's runtime (libcuda.so) implements them; kernels are compiled against this header with the sanitizer's hooks on.
//
// Accesses to memory are seen through calls that the compiler inserts for -fsanitize=thread. What must not be seen so (the
// indices of the running thread, which live in the host's thread-local storage) is read by small asm statements, which the
// compiler does not instrument but does merge: they are not volatile, as the indices of a thread never change.
#pragma once

#include <stdint.h>
#include <string.h>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define EMULATOR_EXPORT __attribute__((visibility("default")))
#define EMULATOR_KERNEL __attribute__((visibility("default"), noinline, no_sanitize("thread")))
#define EMULATOR_INLINE inline __attribute__((always_inline))

struct Dim3 {
    uint32_t x, y, z;
};

namespace emulator {

typedef uint32_t Words4 __attribute__((vector_size(16)));

// Where the running thread is: thread-local in the runtime, one per OS thread, changed when a fiber is switched.
struct Position {
    uint32_t thread; // threadIdx.x; blocks have one dimension
    uint32_t threads;
    Dim3 block;
    Dim3 grid;
};

extern "C" {
extern __thread Position emulator_position __attribute__((tls_model("initial-exec")));

void* emulator_shared_memory();
void emulator_barrier();
void emulator_warp_barrier();
uint32_t emulator_shuffle(uint32_t value, int from);
float emulator_butterfly_sum(float value, int width);
float emulator_butterfly_maximum(float value, int width);
Words4 emulator_load16(const void* address);
void emulator_store16(void* address, Words4 value);
uint64_t emulator_load8(const void* address);
void emulator_store8(void* address, uint64_t value);
void emulator_copy_async(void* shared, const void* global, int bytes);
void emulator_commit_copies();
void emulator_wait_copies(int pending);
void emulator_load_matrices(uint32_t* registers, const void* const* rows, int count, int transposed);
void emulator_multiply(float* c, const uint32_t* a, const uint32_t* b, int tiles_m, int tiles_n);
float emulator_exp2(float x);
float emulator_log(float x);
float emulator_exp(float x);
float emulator_expm1(float x);
}

// ---- indices ----

template <int offset> EMULATOR_INLINE uint32_t position() {
    const char* base;
    uint32_t value;
    asm("movq emulator_position@gottpoff(%%rip), %0" : "=r"(base));
    asm("movl %%fs:%c2(%1), %0" : "=r"(value) : "r"(base), "i"(offset));
    return value;
}
template <int offset> EMULATOR_INLINE Dim3 position3() {
    return Dim3{position<offset>(), position<offset + 4>(), position<offset + 8>()};
}

#define threadIdx (Dim3{emulator::position<__builtin_offsetof(emulator::Position, thread)>(), 0, 0})
#define blockDim (Dim3{emulator::position<__builtin_offsetof(emulator::Position, threads)>(), 1, 1})
#define blockIdx (emulator::position3<__builtin_offsetof(emulator::Position, block)>())
#define gridDim (emulator::position3<__builtin_offsetof(emulator::Position, grid)>())

// ---- numbers ----

EMULATOR_INLINE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
EMULATOR_INLINE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// The upper half of the nearest bfloat16, ties to even; a NaN becomes 0x7fff as in PTX's cvt.
EMULATOR_INLINE uint32_t round_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    return value == value ? (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16 : 0x7fffu;
}
EMULATOR_INLINE uint32_t pack(float low, float high) { return round_to_bf16(low) | round_to_bf16(high) << 16; }
EMULATOR_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMULATOR_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
EMULATOR_INLINE float exp2(float x) { return emulator_exp2(x); }
EMULATOR_INLINE float log(float x) { return emulator_log(x); }
EMULATOR_INLINE float exp(float x) { return emulator_exp(x); }
EMULATOR_INLINE float expm1(float x) { return emulator_expm1(x); }

// ---- memory ----

// Vector accesses are calls, so that the compiler can neither split nor merge them.
template <class Vector> EMULATOR_INLINE Vector load16(const void* address) {
    return __builtin_bit_cast(Vector, emulator_load16(address));
}
template <class Vector> EMULATOR_INLINE void store16(void* address, const Vector& value) {
    emulator_store16(address, Words4{value.words[0], value.words[1], value.words[2], value.words[3]});
}
template <class Vector> EMULATOR_INLINE Vector load8(const void* address) {
    return __builtin_bit_cast(Vector, emulator_load8(address));
}
template <class Vector> EMULATOR_INLINE void store8(void* address, const Vector& value) {
    emulator_store8(address, value.words[0] | uint64_t(value.words[1]) << 32);
}

EMULATOR_INLINE void* shared_memory() { return emulator_shared_memory(); }

// ---- waiting, exchange, copies and products ----

EMULATOR_INLINE void warp_barrier() { emulator_warp_barrier(); }
EMULATOR_INLINE uint32_t shuffle(uint32_t value, int from) { return emulator_shuffle(value, from); }
EMULATOR_INLINE float butterfly_sum(float value, int width) { return emulator_butterfly_sum(value, width); }
EMULATOR_INLINE float butterfly_maximum(float value, int width) { return emulator_butterfly_maximum(value, width); }
EMULATOR_INLINE void copy_async(void* shared, const void* global, int bytes) { emulator_copy_async(shared, global, bytes); }
EMULATOR_INLINE void commit_copies() { emulator_commit_copies(); }
EMULATOR_INLINE void wait_copies(int pending) { emulator_wait_copies(pending); }
EMULATOR_INLINE void load_matrices(uint32_t* registers, const void* const* rows, int count, bool transposed) {
    emulator_load_matrices(registers, rows, count, transposed);
}
EMULATOR_INLINE void multiply(float* c, const uint32_t* a, const uint32_t* b, int tiles_m, int tiles_n) {
    emulator_multiply(c, a, b, tiles_m, tiles_n);
}

} // namespace emulator

EMULATOR_INLINE void __syncthreads() { emulator::emulator_barrier(); }
