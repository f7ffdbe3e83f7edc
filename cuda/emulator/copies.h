// Asynchronous copies of the running block.
#pragma once

#include <vector>

#include "races.h"

namespace emulator {

struct PendingCopy {
    void* shared;
    const void* global;
    uint32_t bytes; // 16, or 0 for zeros
    uint32_t group;
};

struct ThreadCopies {
    CopyGroups groups;
    uint32_t last_group = 0;    // that holds a copy
    const void* code = nullptr; // where the thread issued the first copy it has not waited for
    std::vector<PendingCopy> pending; // late copies that have not taken effect, in order
};

struct Copies {
    ThreadCopies threads[MOST_THREADS];
    bool used = false;      // by this block
    bool restarted = false; // groups count from 1 again: cells of the race checker mean nothing any more
};

void copies_start_block(Worker& worker);
void copies_block_synchronised(Worker& worker);
void copies_warp_synchronised(Worker& worker, uint32_t warp);
void copies_thread_returns(Worker& worker, uint32_t thread);

} // namespace emulator
