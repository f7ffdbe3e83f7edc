// Source lines of return addresses.
#pragma once

#include <vector>

namespace emulator {

// Looks many up at once, which is much faster than one by one.
void resolve(const std::vector<const void*>& codes);
// To be called when a module is unloaded: its addresses may come to mean something else. Findings and counters keep their text.
void forget_places();

} // namespace emulator
