// Where the emulator keeps what kernels can reach. Everything lies at fixed virtual addresses, so that one shift of an address
// tells what kind of memory it is, and one addition finds its shadow. A zone is 16 TiB; its upper half holds the shadow.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr int ZONE_BITS = 44;
enum Zone : uint64_t { GLOBAL = 1, SHARED = 2, PRIVATE = 3 }; // PRIVATE: stacks of fibers, and the arguments of a launch

constexpr uint64_t zone_of(uint64_t address) { return address >> ZONE_BITS; }

// One byte of shadow per byte of global and shared memory. Zero pages mean unallocated. Bit 0: may be accessed; bit 1: written.
constexpr uint64_t SHADOW = uint64_t(1) << 43;
enum State : uint8_t { UNALLOCATED = 0, ALLOCATED = 1, WRITTEN = 3, FREED = 4 };

// Global memory: one range per device.
constexpr int DEVICE_BITS = 37;
constexpr int MOST_DEVICES = 64;
constexpr uint64_t device_base(int device) { return (uint64_t(GLOBAL) << ZONE_BITS) + (uint64_t(device) << DEVICE_BITS); }

// Shared memory: one arena per worker, as a worker runs one block at a time.
constexpr int ARENA_BITS = 20;
constexpr size_t ARENA_BYTES = size_t(1) << (ARENA_BITS - 1); // mapped, with as much shadow
constexpr size_t MOST_SHARED = 227 << 10; // what Hopper offers to a block
constexpr uint64_t arena_base(int worker) { return (uint64_t(SHARED) << ZONE_BITS) + (uint64_t(worker) << ARENA_BITS); }

// Stacks: the arguments lie at the start of a worker's range, the stacks in its upper half.
constexpr int PRIVATE_BITS = 27;
constexpr int MOST_THREADS = 1024;
constexpr size_t MOST_ARGUMENTS = 4096;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint64_t private_base(int worker) { return (uint64_t(PRIVATE) << ZONE_BITS) + (uint64_t(worker) << PRIVATE_BITS); }
constexpr uint64_t stack_base(int worker, int thread) {
    return private_base(worker) + (uint64_t(1) << (PRIVATE_BITS - 1)) + uint64_t(thread) * STACK_BYTES;
}

// Maps zeroed pages at exactly this address, reserving nothing; ends the process with a message if the address is taken.
void map_at(uint64_t address, size_t bytes);

} // namespace emulator
