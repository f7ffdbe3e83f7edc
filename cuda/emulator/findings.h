// Texts that findings and counters share.
#pragma once

#include <string>

namespace emulator {

std::string quoted(const std::string& text); // as JSON
// As much as fits into `text`, with a final zero; returns the length of the whole.
size_t copy_out(const std::string& from, char* text, size_t capacity);

} // namespace emulator
