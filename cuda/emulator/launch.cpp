// A launch: its blocks over OS threads. The calling thread takes part; further threads live in a pool. Blocks are taken in order, so
// that of several faults the first block's is always found.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "worker.h"

namespace emulator {

Settings& settings() {
    static Settings settings;
    return settings;
}

struct Job {
    const Launch* launch;
    uint64_t blocks;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    int helpers = 0; // threads of the pool inside; guarded by the pool's mutex
};

struct Pool {
    std::mutex mutex;
    std::condition_variable work, left;
    std::deque<Job*> jobs; // with blocks that nobody has taken
    size_t threads = 0;
};
static Pool& pool = *new Pool; // never destroyed: its threads outlive main

static void run_blocks(Job& job) {
    Worker& worker = take_worker();
    prepare(worker, *job.launch);
    while (!job.failed) {
        const uint64_t index = job.next++;
        if (index >= job.blocks) break;
        if (!worker.run_block(worker.checks.reverse ? job.blocks - 1 - index : index)) job.failed = true;
    }
    counters_finish_launch(worker);
    give_worker(worker);
}

static void help() {
    std::unique_lock lock(pool.mutex);
    for (;;) {
        pool.work.wait(lock, [] { return !pool.jobs.empty(); });
        Job& job = *pool.jobs.front();
        if (job.failed || job.next >= job.blocks) {
            pool.jobs.pop_front();
            continue;
        }
        ++job.helpers;
        lock.unlock();
        run_blocks(job);
        lock.lock();
        if (--job.helpers == 0) pool.left.notify_all();
    }
}

// With the pool's mutex held.
static void grow_pool() {
    const int wanted = settings().threads > 0 ? settings().threads : int(std::thread::hardware_concurrency());
    while (int(pool.threads) < wanted - 1) {
        std::thread(help).detach();
        ++pool.threads;
    }
}

static bool refuse(const Launch& launch, const std::string& text) {
    Finding finding{};
    finding.kind = Kind::Launch;
    finding.kernel = launch.kernel->name;
    finding.block[0] = finding.block[1] = finding.block[2] = -1;
    finding.text = text;
    report(finding);
    return false;
}

bool run(const Launch& launch) {
    const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
    if (launch.block[1] != 1 || launch.block[2] != 1 || threads == 0 || threads > MOST_THREADS || threads % LANES != 0) {
        return refuse(launch, describe("a block of %u x %u x %u threads: one dimension, a multiple of 32 and at most 1024", launch.block[0], launch.block[1], launch.block[2]));
    }
    if (int32_t(threads) != launch.kernel->threads) {
        return refuse(launch, describe("a block of %u threads of a kernel made for %d", threads, launch.kernel->threads));
    }
    if (launch.shared_bytes > MOST_SHARED || launch.shared_bytes < size_t(launch.kernel->shared_bytes)) {
        return refuse(launch, describe("%zu bytes of shared memory; the kernel uses %d and a block may have %zu", launch.shared_bytes, launch.kernel->shared_bytes, MOST_SHARED));
    }
    if (size_t(launch.kernel->argument_bytes) > MOST_ARGUMENTS) {
        return refuse(launch, describe("%d bytes of arguments; at most %zu fit", launch.kernel->argument_bytes, MOST_ARGUMENTS));
    }
    if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0 || launch.grid[1] > 65535 || launch.grid[2] > 65535) {
        return refuse(launch, describe("a grid of %u x %u x %u blocks: at least 1 each, y and z at most 65535", launch.grid[0], launch.grid[1], launch.grid[2]));
    }
    Job job;
    job.launch = &launch;
    job.blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    if (settings().counters) count_launch(launch.kernel->name.c_str(), job.blocks, job.blocks * threads);
    const bool shared_out = job.blocks > 1 && settings().threads != 1;
    if (shared_out) {
        std::lock_guard lock(pool.mutex);
        grow_pool();
        pool.jobs.push_back(&job);
        pool.work.notify_all();
    }
    run_blocks(job);
    if (shared_out) {
        std::unique_lock lock(pool.mutex);
        for (auto i = pool.jobs.begin(); i != pool.jobs.end(); ++i) {
            if (*i == &job) {
                pool.jobs.erase(i);
                break;
            }
        }
        pool.left.wait(lock, [&] { return job.helpers == 0; });
    }
    return !job.failed;
}

} // namespace emulator

EMULATOR_API void emulator_configure(const emulator::Settings* wanted) { emulator::settings() = *wanted; }
