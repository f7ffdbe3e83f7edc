// Asynchronous copies from global to shared memory (cp.async). Two schedules, both allowed by the hardware: early, where a copy takes
// effect when it is issued, and late, where it takes effect when its thread waits for it, and never if nobody waits.
#include "access.h"
#include "worker.h"

namespace emulator {

EMULATOR_API void emulator_copy_async(void* shared, const void* global, int bytes) {
    memset(shared, 0, 16);
    memcpy(shared, global, size_t(bytes));
    memset(static_cast<char*>(shared) + SHADOW, WRITTEN, 16);
}
EMULATOR_API void emulator_commit_copies() {}
EMULATOR_API void emulator_wait_copies(int) {}

void start_block(Worker&) {}
void block_synchronised(Worker&) {}
void warp_synchronised(Worker&, uint32_t) {}
void thread_returns(Worker&, uint32_t) {}
void finish_launch(Worker&) {}
void track_race(Worker&, uint32_t, uint64_t, uint32_t, bool, bool, const void*) {}
void count_access(Worker&, uint32_t, uint64_t, uint32_t, bool, const void*) {}
void count_tensor_core(Worker&, const void*, uint64_t) {}
std::vector<KernelCounters> counters() { return {}; }
void clear_counters() {}
} EMULATOR_API size_t emulator_counters(char* t, size_t) { *t = 0; return 0; } namespace emulator {

} // namespace emulator
