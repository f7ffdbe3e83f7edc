// Inside view of device memory.
#pragma once

#include <cstdint>
#include <string>

namespace emulator {

// Where an address of global memory lies, seen from the nearest allocation: "4 bytes past the end of an allocation of 256 bytes".
std::string where_is(uint64_t address);

// Maps the memory of a device unless it is there already; its size.
size_t map_device(int device);

} // namespace emulator
