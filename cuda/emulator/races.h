// Races in shared memory, by happens-before. Two accesses to the same bytes, one of them a write, must be ordered: by program
// order, by a barrier of the block, by a barrier of their warp; a copy by wait_copies in its thread, and from there on like any access
// of that thread. Shuffles and matrix operations order nothing.
//
// As every barrier takes in a whole warp or a whole block, the vector clocks of all threads can be kept in a factored form: one clock
// for the block, and the time of the last barrier of the block and of each warp. An access at time t is known to another thread of
// the same warp if t lies before the warp's last barrier (barriers of the block count as the warp's too), and to any thread if it lies
// before the block's last. Asynchronous copies are agents of their own, whose clock counts the groups of their thread.
#pragma once

#include <memory>
#include <vector>

#include "layout.h"

namespace emulator {

struct Worker;

// Who accessed a cell, and when. Readers that are not ordered among themselves are summed up: as what orders any of them before a
// later write orders all of them, it is enough to know whether they are one thread, lanes of one warp, or threads of several warps.
enum class Scope : uint8_t { Thread, Warp, Block };
struct Stamp {
    uint32_t time = 0; // of the block; of a copy: the number of its group
    uint16_t thread = 0;
    Scope scope = Scope::Thread;
    bool copy = false;
};

// Two bytes of shared memory.
struct Cell {
    Stamp write, read;
    uint32_t write_code = 0, read_code = 0; // lower half of the return address
};

// 16 bytes of shared memory: one cell for all while they are accessed as a whole, else eight, kept elsewhere.
struct Chunk {
    Cell whole;
    bool split = false;
};
struct Parts {
    Cell cells[8];
};

// Groups of copies of one thread: numbers ascend and go on from block to block.
struct CopyGroups {
    uint32_t open = 1;            // number of the group that takes the next copy
    uint32_t joined = 1;          // groups before it are complete and known to the thread,
    uint32_t joined_at_warp = 1;  // to its warp,
    uint32_t joined_at_block = 1; // to its block
};

constexpr uint32_t LAST_TIME = 1u << 31; // clocks and groups start afresh at the next block, long before they overflow

struct Races {
    std::vector<Chunk> chunks{MOST_SHARED / 16};
    std::vector<Parts> parts{MOST_SHARED / 16};
    uint32_t time = 0;
    uint32_t block_time = 0;
    uint32_t warp_times[MOST_THREADS / 32] = {};
};

void races_start_block(Worker& worker);
void races_block_synchronised(Worker& worker);
void races_warp_synchronised(Worker& worker, uint32_t warp);

} // namespace emulator
