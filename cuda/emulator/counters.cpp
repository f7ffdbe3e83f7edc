// Counters: how the accesses of kernels look to the memory system.
//
// A warp accesses memory with one instruction for all its lanes, but fibers run lane after lane. Requests are put together again
// from this: the n-th execution of one instruction by each lane, counted since the lanes were last together (in a barrier or an
// operation of the warp), belongs to the n-th request of that instruction. Lanes that skip an execution (a tail, a branch) leave
// their place in the last requests empty.
//
// A request to global memory touches sectors of 32 bytes; the least possible is that of the bytes asked for, laid side by side. A
// request to shared memory takes a wavefront for each different word that one of the 32 banks must give; 8-byte accesses go by half
// warps, 16-byte accesses (ldmatrix too) by quarters. The bytes moved are those of sectors that a cache of the block does not hold:
// CACHED sectors, first in, first out, reads and writes apart; asynchronous copies go around it, as cp.async.cg does.
#include "counters.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "access.h"
#include "findings.h"
#include "places.h"
#include "worker.h"

namespace emulator {

constexpr size_t CACHED = 4096; // sectors: 128 KiB

struct Counts {
    uint64_t global_requests = 0, global_sectors = 0, global_sectors_least = 0;
    uint64_t shared_requests = 0, shared_wavefronts = 0, shared_wavefronts_least = 0;
    uint64_t tensor_core_operations = 0, barriers = 0;
    uint64_t bytes_read = 0, bytes_written = 0;

    void add(const Counts& other) {
        global_requests += other.global_requests;
        global_sectors += other.global_sectors;
        global_sectors_least += other.global_sectors_least;
        shared_requests += other.shared_requests;
        shared_wavefronts += other.shared_wavefronts;
        shared_wavefronts_least += other.shared_wavefronts_least;
        tensor_core_operations += other.tensor_core_operations;
        barriers += other.barriers;
        bytes_read += other.bytes_read;
        bytes_written += other.bytes_written;
    }
};

struct Request {
    uint64_t addresses[LANES];
    uint8_t bytes[LANES]; // as many in every lane, but for copies of part of a chunk
    uint32_t lanes = 0;   // bit per lane
};

// Requests of one instruction by one warp since its lanes were last together.
struct Instruction {
    const void* code;
    bool write, copy;
    uint32_t executed[LANES] = {};
    std::vector<Request> requests;
    size_t used = 0; // of requests
};

struct WarpLog {
    std::unordered_map<uint64_t, size_t> index; // of the instruction, by code and kind
    std::vector<Instruction> instructions;
    uint64_t last_key = 0;
    size_t last = 0;
};

class Cache {
public:
    // Whether the sector was there; it is afterwards.
    bool hit(uint64_t sector) {
        if (!held.insert(sector).second) return true;
        if (order.size() < CACHED) {
            order.push_back(sector);
        } else {
            held.erase(order[oldest]);
            order[oldest] = sector;
            oldest = (oldest + 1) % CACHED;
        }
        return false;
    }
    void clear() {
        held.clear();
        order.clear();
        oldest = 0;
    }

private:
    std::unordered_set<uint64_t> held;
    std::vector<uint64_t> order;
    size_t oldest = 0;
};

struct Counting {
    std::unordered_map<const void*, Counts> lines;
    std::vector<WarpLog> warps{MOST_THREADS / LANES};
    Cache reads, writes;
};

void CountingDeleter::operator()(Counting* counting) const { delete counting; }

// ---- taking down ----

static void log_access(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, bool copy, const void* code) {
    WarpLog& log = worker.counting->warps[thread / LANES];
    const uint32_t lane = thread % LANES;
    const bool global = zone_of(address) == GLOBAL;
    const uint64_t key = reinterpret_cast<uint64_t>(code) * 4 + (copy ? 2 : 0) + global;
    if (key != log.last_key) {
        const auto [found, is_new] = log.index.emplace(key, log.instructions.size());
        if (is_new) log.instructions.push_back(Instruction{code, write, copy, {}, {}, 0});
        log.last_key = key;
        log.last = found->second;
    }
    Instruction& instruction = log.instructions[log.last];
    const uint32_t execution = instruction.executed[lane]++;
    if (execution >= instruction.used) {
        if (instruction.requests.size() <= execution) instruction.requests.emplace_back();
        instruction.requests[execution].lanes = 0;
        instruction.used = execution + 1;
    }
    Request& request = instruction.requests[execution];
    request.addresses[lane] = address;
    request.bytes[lane] = uint8_t(bytes);
    request.lanes |= 1u << lane;
}

void count_access(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code) {
    log_access(worker, thread, address, bytes, write, false, code);
}

void count_copy(Worker& worker, uint32_t thread, uint64_t shared, uint64_t global, uint32_t bytes, const void* code) {
    log_access(worker, thread, shared, 16, true, true, code);
    if (bytes != 0) log_access(worker, thread, global, bytes, false, true, code);
}

// ---- what a request costs ----

// Sorts, and drops what is there twice; returns how many are left.
template <class Value> static size_t distinct(Value* values, size_t count) {
    std::sort(values, values + count);
    return size_t(std::unique(values, values + count) - values);
}

static void count_global(Counting& counting, const Instruction& instruction, const Request& request, Counts& counts) {
    std::pair<uint64_t, uint32_t> asked[LANES]; // address and bytes
    uint64_t sectors[2 * LANES];
    size_t lanes = 0, touched = 0;
    for (int i = 0; i < LANES; ++i) {
        if (request.lanes >> i & 1) asked[lanes++] = {request.addresses[i], request.bytes[i]};
    }
    lanes = distinct(asked, lanes);
    uint64_t bytes = 0;
    for (size_t i = 0; i < lanes; ++i) {
        bytes += asked[i].second;
        sectors[touched++] = asked[i].first / 32;
        sectors[touched++] = (asked[i].first + asked[i].second - 1) / 32;
    }
    touched = distinct(sectors, touched);
    counts.global_requests += 1;
    counts.global_sectors += touched;
    counts.global_sectors_least += (bytes + 31) / 32;
    uint64_t moved = 0;
    for (size_t i = 0; i < touched; ++i) {
        if (instruction.copy || !(instruction.write ? counting.writes : counting.reads).hit(sectors[i])) moved += 32;
    }
    (instruction.write ? counts.bytes_written : counts.bytes_read) += moved;
}

static void count_shared(uint32_t bytes, const uint64_t (&addresses)[LANES], uint32_t lanes, Counts& counts) {
    counts.shared_requests += 1;
    const int lanes_per_phase = bytes == 16 ? 8 : bytes == 8 ? 16 : 32;
    for (int first = 0; first < LANES; first += lanes_per_phase) {
        uint64_t words[LANES];
        size_t count = 0;
        for (int i = first; i < first + lanes_per_phase; ++i) {
            if (!(lanes >> i & 1)) continue;
            for (uint32_t byte = 0; byte < (bytes < 4 ? 4 : bytes); byte += 4) words[count++] = (addresses[i] + byte) / 4;
        }
        if (count == 0) continue;
        count = distinct(words, count);
        uint32_t of_bank[32] = {};
        for (size_t i = 0; i < count; ++i) ++of_bank[words[i] % 32];
        counts.shared_wavefronts += *std::max_element(of_bank, of_bank + 32);
        counts.shared_wavefronts_least += (count + 31) / 32;
    }
}

void count_matrix_rows(Worker& worker, const uint64_t (&rows)[LANES], const void* code) {
    count_shared(16, rows, 0xffffffffu, worker.counting->lines[code]);
}
void count_tensor_core(Worker& worker, const void* code, uint64_t operations) {
    if (worker.checks.counters) worker.counting->lines[code].tensor_core_operations += operations;
}
void count_barrier(Worker& worker, const void* code) {
    if (worker.checks.counters) worker.counting->lines[code].barriers += 1;
}

void counters_warp_meets(Worker& worker, uint32_t warp) {
    Counting& counting = *worker.counting;
    for (Instruction& instruction : counting.warps[warp].instructions) {
        if (instruction.used == 0) continue;
        Counts& counts = counting.lines[instruction.code];
        for (size_t i = 0; i < instruction.used; ++i) {
            const Request& request = instruction.requests[i];
            const int any = __builtin_ctz(request.lanes);
            if (zone_of(request.addresses[any]) == GLOBAL) count_global(counting, instruction, request, counts);
            else count_shared(request.bytes[any], request.addresses, request.lanes, counts);
        }
        instruction.used = 0;
        if (instruction.requests.size() > 1024) instruction.requests = {};
        std::fill(instruction.executed, instruction.executed + LANES, 0);
    }
}

void counters_start_block(Worker& worker) {
    if (!worker.checks.counters) return;
    worker.counting->reads.clear();
    worker.counting->writes.clear();
}
void counters_all_meet(Worker& worker) {
    if (!worker.checks.counters) return;
    for (uint32_t warp = 0; warp * LANES < worker.threads; ++warp) counters_warp_meets(worker, warp);
}

// ---- sums over launches ----

struct KernelCounts {
    uint64_t launches = 0, blocks = 0, threads = 0;
    std::map<const void*, Counts> lines;
};
static std::mutex& totals_mutex = *new std::mutex; // never destroyed: threads of the pool outlive main
static std::map<std::string, KernelCounts>& totals = *new std::map<std::string, KernelCounts>;

void counters_start_launch(Worker& worker) {
    if (worker.checks.counters) worker.counting.reset(new Counting);
}

void counters_finish_launch(Worker& worker) {
    if (!worker.checks.counters) return;
    std::lock_guard lock(totals_mutex);
    KernelCounts& kernel = totals[worker.launch->kernel->name];
    for (const auto& [code, counts] : worker.counting->lines) kernel.lines[code].add(counts);
    worker.counting.reset();
}

void count_launch(const char* name, uint64_t blocks, uint64_t threads) {
    std::lock_guard lock(totals_mutex);
    KernelCounts& kernel = totals[name];
    kernel.launches += 1;
    kernel.blocks += blocks;
    kernel.threads += threads;
}

void clear_counters() {
    std::lock_guard lock(totals_mutex);
    totals.clear();
}

static LineCounters line_counters(const std::string& place, const Counts& counts) {
    return {place, counts.global_requests, counts.global_sectors, counts.global_sectors_least, counts.shared_requests,
            counts.shared_wavefronts, counts.shared_wavefronts_least, counts.tensor_core_operations, counts.barriers};
}

std::vector<KernelCounters> counters() {
    std::map<std::string, KernelCounts> copy;
    {
        std::lock_guard lock(totals_mutex);
        copy = totals;
    }
    std::vector<KernelCounters> result;
    for (const auto& [name, kernel] : copy) {
        std::vector<const void*> codes;
        for (const auto& [code, counts] : kernel.lines) codes.push_back(code);
        resolve(codes);
        std::map<std::string, Counts> by_place;
        Counts total;
        for (const auto& [code, counts] : kernel.lines) {
            by_place[place_of(code)].add(counts);
            total.add(counts);
        }
        KernelCounters entry{name, kernel.launches, kernel.blocks, kernel.threads, total.bytes_read, total.bytes_written, line_counters("", total), {}};
        for (const auto& [place, counts] : by_place) entry.lines.push_back(line_counters(place, counts));
        result.push_back(entry);
    }
    return result;
}

static std::string to_json(const LineCounters& counts) {
    const auto number = [](uint64_t value) { return std::to_string(value); };
    return "{\"place\": " + quoted(counts.place) + ", \"global_requests\": " + number(counts.global_requests) +
           ", \"global_sectors\": " + number(counts.global_sectors) + ", \"global_sectors_least\": " + number(counts.global_sectors_least) +
           ", \"shared_requests\": " + number(counts.shared_requests) + ", \"shared_wavefronts\": " + number(counts.shared_wavefronts) +
           ", \"shared_wavefronts_least\": " + number(counts.shared_wavefronts_least) +
           ", \"tensor_core_operations\": " + number(counts.tensor_core_operations) + ", \"barriers\": " + number(counts.barriers) + "}";
}

static std::string counters_json() {
    std::string json = "[";
    for (const KernelCounters& kernel : counters()) {
        if (json.size() > 1) json += ",\n ";
        json += "{\"kernel\": " + quoted(kernel.kernel);
        const std::pair<const char*, uint64_t> numbers[] = {{"launches", kernel.launches}, {"blocks", kernel.blocks}, {"threads", kernel.threads},
                                                            {"bytes_read", kernel.bytes_read}, {"bytes_written", kernel.bytes_written}};
        for (const auto& [name, value] : numbers) json += ", \"" + std::string(name) + "\": " + std::to_string(value);
        json += ", \"total\": " + to_json(kernel.total) + ", \"lines\": [";
        for (size_t i = 0; i < kernel.lines.size(); ++i) json += (i > 0 ? ",\n  " : "\n  ") + to_json(kernel.lines[i]);
        json += "]}";
    }
    return json + "]";
}

} // namespace emulator

EMULATOR_API size_t emulator_counters(char* text, size_t capacity) {
    return emulator::copy_out(emulator::counters_json(), text, capacity);
}
EMULATOR_API void emulator_clear_counters() { emulator::clear_counters(); }
