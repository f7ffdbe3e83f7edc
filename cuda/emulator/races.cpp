#include "races.h"

#include "access.h"
#include "copies.h"
#include "worker.h"

namespace emulator {

void races_start_block(Worker& worker) {
    if (!worker.checks.races) return;
    if (!worker.races) worker.races = std::make_unique<Races>();
    Races& races = *worker.races;
    if (races.time > LAST_TIME || worker.copies->restarted) {
        worker.copies->restarted = false;
        races.chunks.assign(races.chunks.size(), Chunk{});
        races.time = 0;
    }
    races_block_synchronised(worker); // all that earlier blocks did lies before
}

void races_block_synchronised(Worker& worker) {
    if (!worker.checks.races) return;
    Races& races = *worker.races;
    races.block_time = ++races.time;
    for (uint32_t warp = 0; warp * LANES < worker.threads; ++warp) races.warp_times[warp] = races.time;
}

void races_warp_synchronised(Worker& worker, uint32_t warp) {
    if (!worker.checks.races) return;
    worker.races->warp_times[warp] = ++worker.races->time;
}

// Whether what the stamp stands for lies before what `thread` does now.
static inline bool ordered(const Worker& worker, uint32_t thread, const Stamp& stamp) {
    const Races& races = *worker.races;
    if (!stamp.copy && stamp.time < races.block_time) return true;
    const bool same_warp = stamp.thread / LANES == thread / LANES;
    if (stamp.copy) {
        const CopyGroups& groups = worker.copies->threads[stamp.thread].groups;
        return stamp.time < (stamp.thread == thread ? groups.joined : same_warp ? groups.joined_at_warp : groups.joined_at_block);
    }
    if (stamp.scope == Scope::Block || !same_warp) return false;
    return (stamp.scope == Scope::Thread && stamp.thread == thread) || stamp.time < races.warp_times[thread / LANES];
}

struct Access {
    uint32_t thread;
    uint64_t address;
    uint32_t bytes;
    bool write;
    bool copy;
    const void* code;
};

static void report_race(Worker& worker, const Access& access, const Stamp& other, bool other_writes, uint32_t other_code) {
    Finding finding = finding_here(Kind::Race, access.code, int(access.thread));
    finding.address = access.address - arena_base(worker.number);
    // The other code lies in the same module, so that its lower half tells its distance.
    const uint64_t code = reinterpret_cast<uint64_t>(access.code);
    finding.other_code = reinterpret_cast<void*>(code + uint64_t(int64_t(int32_t(other_code - uint32_t(code)))));
    finding.other_thread = other.thread;
    const char* mine = access.copy ? "asynchronous copy" : access.write ? "write" : "read";
    const char* theirs = other.copy ? "an asynchronous copy" : other_writes ? "a write" : "a read";
    finding.text = describe("%s of %u bytes of shared memory, and %s by thread %u: ", mine, access.bytes, theirs, unsigned(other.thread));
    const bool awaited = other.copy && other.time < worker.copies->threads[other.thread].groups.joined;
    finding.text += !other.copy ? "no barrier orders them" : awaited ? "no barrier after its wait_copies orders them" : "no wait_copies orders them";
    report(finding);
}

// Takes an access into one cell.
static void touch(Worker& worker, const Access& access, const Stamp& stamp, Cell& cell) {
    if (!ordered(worker, access.thread, cell.write)) report_race(worker, access, cell.write, true, cell.write_code);
    const uint32_t code = uint32_t(reinterpret_cast<uint64_t>(access.code));
    // One more of the readers in several warps since the last barrier of the block changes nothing.
    if (!access.write && cell.read.scope == Scope::Block && cell.read.time >= worker.races->block_time) return;
    const bool after_reads = ordered(worker, access.thread, cell.read);
    if (access.write) {
        if (!after_reads) report_race(worker, access, cell.read, false, cell.read_code);
        cell.write = stamp;
        cell.write_code = code;
        cell.read = Stamp{};
        return;
    }
    Scope scope = Scope::Thread;
    if (!after_reads) {
        const bool same_warp = cell.read.thread / LANES == access.thread / LANES;
        scope = same_warp && cell.read.scope != Scope::Block ? Scope::Warp : Scope::Block;
    }
    cell.read = stamp;
    cell.read.scope = scope;
    cell.read_code = code;
}

void track_race(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, bool copy, const void* code) {
    Races& races = *worker.races;
    const uint64_t offset = address - arena_base(worker.number);
    if (offset + bytes > races.chunks.size() * 16) return; // out of bounds: not this checker's
    const Access access{thread, address, bytes, write, copy, code};
    const Stamp stamp{copy ? worker.copies->threads[thread].groups.open : races.time, uint16_t(thread), Scope::Thread, copy};
    if (bytes == 16 && offset % 16 == 0) {
        Chunk& chunk = races.chunks[offset / 16];
        if (chunk.split) {
            Parts& parts = races.parts[offset / 16];
            for (Cell& cell : parts.cells) touch(worker, access, stamp, cell);
            if (write) { // now all cells are equal
                chunk.split = false;
                chunk.whole = parts.cells[0];
            }
        } else {
            touch(worker, access, stamp, chunk.whole);
        }
        return;
    }
    for (uint64_t cell = offset / 2; cell <= (offset + bytes - 1) / 2; ++cell) {
        Chunk& chunk = races.chunks[cell / 8];
        Parts& parts = races.parts[cell / 8];
        if (!chunk.split) {
            for (Cell& part : parts.cells) part = chunk.whole;
            chunk.split = true;
        }
        touch(worker, access, stamp, parts.cells[cell % 8]);
    }
}

} // namespace emulator
