// Asynchronous copies from global to shared memory (cp.async). Two schedules, both allowed by the hardware: early, where a copy takes
// effect when it is issued, and late, where it takes effect when its thread waits for it, and never if nobody waits. A read that comes
// too early is a race in both, and in the late schedule also a read of what nobody wrote.
#include "copies.h"

#include "access.h"
#include "counters.h"
#include "worker.h"

namespace emulator {

static void take_effect(const PendingCopy& copy) {
    memset(copy.shared, 0, 16);
    memcpy(copy.shared, copy.global, copy.bytes);
    memset(static_cast<char*>(copy.shared) + SHADOW, WRITTEN, 16);
}

void copies_start_block(Worker& worker) {
    if (!worker.copies) worker.copies = std::make_unique<Copies>();
    Copies& copies = *worker.copies;
    if (!copies.used) return;
    copies.used = false;
    for (ThreadCopies& mine : copies.threads) { // all groups of earlier blocks lie before
        const uint32_t next = mine.groups.open + 1;
        mine.groups = CopyGroups{next, next, next, next};
        mine.pending.clear();
        copies.restarted |= next > LAST_TIME;
    }
    if (!copies.restarted) return;
    for (ThreadCopies& mine : copies.threads) mine = ThreadCopies{};
}

void copies_block_synchronised(Worker& worker) {
    if (!worker.copies->used) return;
    for (uint32_t i = 0; i < worker.threads; ++i) {
        CopyGroups& groups = worker.copies->threads[i].groups;
        groups.joined_at_warp = groups.joined_at_block = groups.joined;
    }
}

void copies_warp_synchronised(Worker& worker, uint32_t warp) {
    if (!worker.copies->used) return;
    for (uint32_t i = warp * LANES; i < (warp + 1) * LANES; ++i) {
        CopyGroups& groups = worker.copies->threads[i].groups;
        groups.joined_at_warp = groups.joined;
    }
}

static bool source_allowed(uint64_t from, int bytes) {
    if (bytes == 16) return shadow_allows<16, false>(from);
    for (int i = 0; i < bytes; ++i) { // the partial chunk at the end of a row
        if (!shadow_allows<1, false>(from + uint64_t(i))) return false;
    }
    return true;
}

EMULATOR_API void emulator_copy_async(void* shared, const void* global, int bytes) {
    const void* code = __builtin_return_address(0);
    Worker& worker = *current_worker;
    Copies& copies = *worker.copies;
    const uint32_t thread = emulator_position.thread;
    const uint64_t to = reinterpret_cast<uint64_t>(shared), from = reinterpret_cast<uint64_t>(global);
    ThreadCopies& mine = copies.threads[thread];
    if (bytes == 16) { // most copies are the first touch of their line: let both lines come at once
        __builtin_prefetch(global);
        __builtin_prefetch(static_cast<const char*>(global) + SHADOW);
    }
    if (worker.checks.memory) {
        if (to % 16 != 0) refuse_misaligned(thread, to, 16, true, code);
        if (to - arena_base(worker.number) >= ARENA_BYTES) refuse_copy_destination(thread, to, code);
        if (!shadow_allows_copy(to)) refuse_access(worker, thread, to, 16, true, code);
        if (bytes > 0) {
            if (from % 16 != 0) refuse_misaligned(thread, from, 16, false, code);
            if (from - worker.device_first >= worker.device_bytes) check_foreign(worker, thread, from, uint32_t(bytes), false, code);
            else if (!source_allowed(from, bytes)) refuse_access(worker, thread, from, uint32_t(bytes), false, code);
        }
    }
    copies.used = true;
    if (mine.last_group < mine.groups.joined) mine.code = code;
    mine.last_group = mine.groups.open;
    if (worker.checks.races) track_race(worker, thread, to, 16, true, true, code);
    if (worker.checks.counters) count_copy(worker, thread, to, from, uint32_t(bytes), code);
    const PendingCopy copy{shared, global, uint32_t(bytes), mine.groups.open};
    if (worker.checks.late_copies) {
        memset(static_cast<char*>(shared) + SHADOW, ALLOCATED, 16); // until then nobody knows what is there
        mine.pending.push_back(copy);
    } else {
        take_effect(copy);
    }
}

EMULATOR_API void emulator_commit_copies() { ++current_worker->copies->threads[emulator_position.thread].groups.open; }

EMULATOR_API void emulator_wait_copies(int pending) {
    ThreadCopies& mine = current_worker->copies->threads[emulator_position.thread];
    CopyGroups& groups = mine.groups;
    if (groups.open - groups.joined <= uint32_t(pending)) return;
    groups.joined = groups.open - uint32_t(pending);
    std::vector<PendingCopy>& late = mine.pending;
    if (late.empty()) return;
    size_t done = 0;
    while (done < late.size() && late[done].group < groups.joined) take_effect(late[done++]);
    late.erase(late.begin(), late.begin() + long(done));
}

void copies_thread_returns(Worker& worker, uint32_t thread) {
    const ThreadCopies& mine = worker.copies->threads[thread];
    if (!worker.copies->used || mine.last_group < mine.groups.joined) return;
    Finding finding = finding_here(Kind::MissingWait, mine.code, int(thread));
    finding.text = "the thread returns without waiting for asynchronous copies, of which this may be the first";
    report(finding);
}

} // namespace emulator
