// CUDA's device language for the host compiler, and the functions that include/ calls for what is an instruction on a GPU.
// The emulator's runtime (libcuda.so) implements them; kernels are compiled against this header with the sanitizer's hooks on.
#pragma once

#include <stdint.h>
#include <string.h>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define EMULATOR_EXPORT __attribute__((visibility("default")))
#define EMULATOR_KERNEL __attribute__((visibility("default"), noinline, no_sanitize("thread")))

struct Dim3 {
    uint32_t x, y, z;
};

namespace emulator {

// (signatures fixed by the device layer; see include/device.h and include/mma.h for what each means)
extern "C" {
void* emulator_shared_memory();
void emulator_barrier(); // __syncthreads
}

} // namespace emulator
