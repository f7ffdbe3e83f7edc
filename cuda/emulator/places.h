// Source lines of return addresses.
#pragma once

#include <vector>

namespace emulator {

// Looks many up at once, which is much faster than one by one.
void resolve(const std::vector<const void*>& codes);
} // namespace emulator
