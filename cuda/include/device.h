// The device layer: what kernels use instead of CUDA's own words. Each function that is an instruction of the GPU has two
// bodies: PTX (or a CUDA intrinsic) for nvcc, and a call of the emulator's model for the host compiler. Kernels contain neither
// assembly nor #ifdef. Both compilers run without contraction (-fmad=false, -ffp-contract=off): a fused multiply-add is where
// the source says multiply_add, so that two kernels that write the same formula compute the same bits.
#pragma once

#include <stdint.h>

#ifdef LEARNER_EMULATOR
#include "../emulator/language.h" // __device__, threadIdx and the rest of the language, and namespace emulator
#endif

#define DEVICE __device__ __forceinline__

// ---- kernels ----

// What the host must know to launch a kernel. It lives in the compiled module as NAME_launch.
struct LaunchShape {
    int32_t threads;        // per block
    int32_t shared_bytes;   // of the kernel's one struct of shared memory
    int32_t argument_bytes; // of the kernel's one struct of arguments
    int32_t reserved;
};

struct NoShared {};

// Defines a kernel: KERNEL(name, threads, Arguments, Shared) { body }, the body seeing `arguments` (by reference, in constant
// memory) and `shared`. Every kernel takes one plain struct of arguments (arguments.h) and has one struct of dynamic shared
// memory, 1024-aligned. blockDim.x is `threads`. RESIDENT_KERNEL also bounds registers so that a multiprocessor holds `blocks` blocks.
#define KERNEL(name, threads, Arguments, Shared) DEFINE_KERNEL(name, threads, Arguments, Shared, threads)
#define RESIDENT_KERNEL(name, threads, blocks, Arguments, Shared) DEFINE_KERNEL(name, threads, Arguments, Shared, threads, blocks)
#ifdef LEARNER_EMULATOR
#define DEFINE_KERNEL(name, block_threads, Arguments, Shared, ...)                                                       \
    static void name##_body(const Arguments& arguments, Shared& shared);                                                 \
    extern "C" EMULATOR_KERNEL void name(const void* arguments) {                                                        \
        name##_body(*static_cast<const Arguments*>(arguments), *static_cast<Shared*>(emulator::shared_memory()));        \
    }                                                                                                                    \
    extern "C" {                                                                                                         \
    EMULATOR_EXPORT LaunchShape name##_launch = {block_threads, int32_t(sizeof(Shared)), int32_t(sizeof(Arguments)), 0}; \
    }                                                                                                                    \
    static void name##_body([[maybe_unused]] const Arguments& arguments, [[maybe_unused]] Shared& shared)
#else
#define DEFINE_KERNEL(name, block_threads, Arguments, Shared, ...)                                                       \
    DEVICE void name##_body(const Arguments& arguments, Shared& shared);                                                 \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Arguments arguments) {        \
        extern __shared__ __align__(1024) unsigned char shared_memory[];                                                 \
        name##_body(arguments, *reinterpret_cast<Shared*>(shared_memory));                                               \
    }                                                                                                                    \
    extern "C" __device__ LaunchShape name##_launch = {block_threads, int32_t(sizeof(Shared)), int32_t(sizeof(Arguments)), 0}; \
    DEVICE void name##_body(const Arguments& arguments, Shared& shared)
#endif

constexpr int WARP = 32;

DEVICE int lane() { return int(threadIdx.x) % WARP; }
DEVICE int warp() { return int(threadIdx.x) / WARP; }

// ---- numbers ----

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

DEVICE float bits_to_float(uint32_t bits) {
#ifdef LEARNER_EMULATOR
    return emulator::bits_to_float(bits);
#else
    return __uint_as_float(bits);
#endif
}

DEVICE float to_float(bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

// Two numbers rounded to nearest even and packed, `low` in the lower half.
DEVICE uint32_t pack(float low, float high) {
#ifdef LEARNER_EMULATOR
    return emulator::pack(low, high);
#else
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#endif
}

DEVICE bf16 to_bf16(float value) { return bf16{uint16_t(pack(value, 0.0f))}; }
DEVICE float low_half(uint32_t packed) { return bits_to_float(packed << 16); }
DEVICE float high_half(uint32_t packed) { return bits_to_float(packed & 0xffff0000u); }

constexpr float INFINITE = __builtin_huge_valf();
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// a * b + c, rounded once.
DEVICE float multiply_add(float a, float b, float c) {
#ifdef LEARNER_EMULATOR
    return emulator::multiply_add(a, b, c);
#else
    return __fmaf_rn(a, b, c);
#endif
}

// 2^x; 2^-inf is 0.
DEVICE float exp2_fast(float x) {
#ifdef LEARNER_EMULATOR
    return emulator::exp2(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Natural logarithm; of 0 it is -inf.
DEVICE float log_precise(float x) {
#ifdef LEARNER_EMULATOR
    return emulator::log(x);
#else
    return logf(x);
#endif
}

// e^x and e^x - 1 to a unit or two in the last place.
DEVICE float exp_precise(float x) {
#ifdef LEARNER_EMULATOR
    return emulator::exp(x);
#else
    return expf(x);
#endif
}
DEVICE float expm1_precise(float x) {
#ifdef LEARNER_EMULATOR
    return emulator::expm1(x);
#else
    return expm1f(x);
#endif
}

DEVICE float square_root(float x) {
#ifdef LEARNER_EMULATOR
    return emulator::square_root(x);
#else
    return __fsqrt_rn(x);
#endif
}

// The larger of two numbers; of two zeros or beside a NaN it is either.
DEVICE float maximum(float a, float b) {
#ifdef LEARNER_EMULATOR
    return a > b ? a : b;
#else
    return fmaxf(a, b);
#endif
}
template <class T> DEVICE T minimum(T a, T b) { return a < b ? a : b; }

// ---- vector access to memory: always through these, so that one access is one instruction in both worlds ----

struct alignas(16) Vector16 { // 8 bf16 or 4 floats
    uint32_t words[4];
};

// 16 bytes at a 16-aligned address, of global or shared memory.
DEVICE Vector16 load16(const void* address) {
#ifdef LEARNER_EMULATOR
    return emulator::load16<Vector16>(address);
#else
    const uint4 loaded = *static_cast<const uint4*>(address);
    return Vector16{{loaded.x, loaded.y, loaded.z, loaded.w}};
#endif
}

DEVICE void store16(void* address, const Vector16& value) {
#ifdef LEARNER_EMULATOR
    emulator::store16(address, value);
#else
    *static_cast<uint4*>(address) = make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
#endif
}

// 8 and 4 bytes, aligned to themselves: two floats, or two bf16 as one word.
struct alignas(8) Vector8 {
    uint32_t words[2];
};
DEVICE Vector8 load8(const void* address) {
#ifdef LEARNER_EMULATOR
    return emulator::load8<Vector8>(address);
#else
    const uint2 loaded = *static_cast<const uint2*>(address);
    return Vector8{{loaded.x, loaded.y}};
#endif
}
DEVICE void store8(void* address, const Vector8& value) {
#ifdef LEARNER_EMULATOR
    emulator::store8(address, value);
#else
    *static_cast<uint2*>(address) = make_uint2(value.words[0], value.words[1]);
#endif
}
DEVICE uint32_t load4(const void* address) { return *static_cast<const uint32_t*>(address); }
DEVICE void store4(void* address, uint32_t value) { *static_cast<uint32_t*>(address) = value; }

// The 8 bf16 of a vector as floats, and back.
DEVICE void unpack8(const Vector16& vector, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = low_half(vector.words[i]);
        values[2 * i + 1] = high_half(vector.words[i]);
    }
}
DEVICE Vector16 pack8(const float (&values)[8]) {
    Vector16 vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) vector.words[i] = pack(values[2 * i], values[2 * i + 1]);
    return vector;
}

// 4 floats at a 16-aligned address.
DEVICE void load_floats(const float* address, float (&values)[4]) {
    const Vector16 vector = load16(address);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = bits_to_float(vector.words[i]);
}
DEVICE uint32_t float_to_bits(float value) {
#ifdef LEARNER_EMULATOR
    return emulator::float_to_bits(value);
#else
    return __float_as_uint(value);
#endif
}
DEVICE void store_floats(float* address, const float (&values)[4]) {
    Vector16 vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) vector.words[i] = float_to_bits(values[i]);
    store16(address, vector);
}

// ---- waiting and exchange within a block and a warp ----

// All threads of the block meet; what they wrote to memory before is seen by all after.
DEVICE void sync_block() { __syncthreads(); }

// All lanes of the warp meet.
DEVICE void sync_warp() {
#ifdef LEARNER_EMULATOR
    emulator::warp_barrier();
#else
    __syncwarp();
#endif
}

// The value of lane `from`; all 32 lanes take part.
DEVICE uint32_t shuffle(uint32_t value, int from) {
#ifdef LEARNER_EMULATOR
    return emulator::shuffle(value, from);
#else
    return __shfl_sync(0xffffffffu, value, from);
#endif
}
DEVICE float shuffle(float value, int from) { return bits_to_float(shuffle(float_to_bits(value), from)); }
DEVICE uint32_t shuffle_xor(uint32_t value, int mask) { return shuffle(value, lane() ^ mask); }
DEVICE float shuffle_xor(float value, int mask) { return shuffle(value, lane() ^ mask); }

// Sum and maximum over groups of `width` neighbouring lanes (a power of two), the same bits in every lane of the group: the
// butterfly adds the value of lane ^ 1, then ^ 2, then ^ 4 ... (the emulator does so in one step, in this order).
template <int width = WARP> DEVICE float warp_sum(float value) {
#ifdef LEARNER_EMULATOR
    return emulator::butterfly_sum(value, width);
#else
#pragma unroll
    for (int mask = 1; mask < width; mask *= 2) value += shuffle_xor(value, mask);
    return value;
#endif
}
template <int width = WARP> DEVICE float warp_maximum(float value) {
#ifdef LEARNER_EMULATOR
    return emulator::butterfly_maximum(value, width);
#else
#pragma unroll
    for (int mask = 1; mask < width; mask *= 2) value = maximum(value, shuffle_xor(value, mask));
    return value;
#endif
}

// Sum over a block of `threads`, the same bits in every thread: warps by butterfly, then warps in ascending order. `scratch`
// holds threads / 32 floats of shared memory and may be used again at once.
template <int threads> DEVICE float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (lane() == 0) scratch[warp()] = value;
    sync_block();
    float total = scratch[0];
#pragma unroll
    for (int i = 1; i < threads / WARP; ++i) total += scratch[i];
    sync_block();
    return total;
}
template <int threads> DEVICE float block_maximum(float value, float* scratch) {
    value = warp_maximum(value);
    if (lane() == 0) scratch[warp()] = value;
    sync_block();
    float total = scratch[0];
#pragma unroll
    for (int i = 1; i < threads / WARP; ++i) total = maximum(total, scratch[i]);
    sync_block();
    return total;
}
