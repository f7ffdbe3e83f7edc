// What the emulated driver is made of: devices, streams and events. driver*.cpp export CUDA's functions over them; NCCL and
// cuBLASLt (libraries of their own) put their work into the same streams.
//
// Three libraries, compiled as fibers.cpp says and linked with -static-libstdc++ -static-libgcc -Wl,-z,now -Wl,--exclude-libs,ALL:
//   libcuda.so      all .cpp but the next three; must be loaded first, with RTLD_GLOBAL
//   libnccl.so      nccl.cpp, nccl_operations.cpp -lcuda
//   libcublasLt.so  cublaslt.cpp -lcuda
// Each has its file's name as SONAME: so the loader finds the one in memory when cudarc or a kernel asks for it by name.
//
// No header of NVIDIA's is used: handles are opaque pointers, and the values of enums stand where they are used.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "runtime.h"

#pragma GCC visibility push(default) // the libraries are compiled with -fvisibility=hidden

namespace emulator::driver {

// CUresult, as far as the emulator returns it.
enum Result : int32_t {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    UNSUPPORTED_LIMIT = 215,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
};

constexpr size_t SHARED_BYTES_WITHOUT_ASKING = 48 * 1024; // dynamic shared memory of a kernel before cuFuncSetAttribute
constexpr size_t SHARED_BYTES_MOST = 227 * 1024;          // and after it, as on sm_90

struct Device;

// Work in the order in which it came, on a thread of its own. Entries are numbered from 1. An entry runs when it is demanded:
// at once where streams are eager, and where they are lazy (Settings::lazy_streams) when somebody waits for it or for one after
// it, so that a missing wait shows.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    Stream(Device& device, bool blocking) : device(device), blocking(blocking) {}
    void start(); // the thread, which keeps the stream alive until close()

    // Appends and returns the entry's number. Work is skipped on a lost device, unless it must happen `always`.
    uint64_t enqueue(std::function<void()> work, bool always = false);
    void demand(uint64_t sequence);
    void wait(uint64_t sequence); // demands it and returns when it is done
    void wait_all() { wait(last()); }
    bool is_complete(uint64_t sequence);
    bool is_finished(); // destroyed, and done with all that was queued before
    uint64_t last();
    void close(); // finishes what is there, then ends the thread

    Device& device;
    const bool blocking; // keeps order with the default stream

  private:
    struct Entry {
        std::function<void()> work;
        bool always;
    };
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Entry> queue_; // entries completed_ + 1 (or the running one + 1) .. last_
    uint64_t last_ = 0;
    uint64_t demanded_ = 0;
    uint64_t completed_ = 0;
    bool closed_ = false;
};

// A point in a stream: everything up to `sequence`.
struct Mark {
    std::shared_ptr<Stream> stream;
    uint64_t sequence = 0;
    std::atomic<int64_t> nanoseconds{0}; // when it was reached, for events with timing
};

struct Event {
    bool timed;
    std::mutex mutex;
    std::shared_ptr<Mark> mark; // of the latest record; null before the first
};

// A device and its primary context, which are one here: a context's handle is the device's address.
struct Device {
    int ordinal;
    // A fatal finding poisons the context: all calls return LAUNCH_FAILED until the last owner releases it (or it is reset).
    std::atomic<bool> lost{false};
    std::mutex mutex;
    std::atomic<int> owners{0}; // cuDevicePrimaryCtxRetain
    std::shared_ptr<Stream> default_stream;
    std::vector<std::shared_ptr<Stream>> streams; // all but the default one
    std::unordered_set<void*> allocations;        // not yet freed by the program (a free may still be queued)
    std::unordered_set<int> peers;                // whose access was enabled

    std::shared_ptr<Stream> stream_zero();                  // the default stream
    std::vector<std::shared_ptr<Stream>> every_stream();    // the default one included
    void wait_all();
    Result state() const; // SUCCESS, LAUNCH_FAILED or CONTEXT_IS_DESTROYED
};

constexpr int DEVICES_MOST = 64;
Device& device_at(int ordinal); // made at first use, never destroyed

// ---- the calling thread ----

Device* current_device(); // of the current context, or null
// The device of the current context if calls may go to it.
Result open_device(Device*& device);
// The stream that `handle` names (null: the current context's default stream). On a lost device it is found all the same, for
// what must still happen, but the result is an error.
Result open_stream(void* handle, std::shared_ptr<Stream>& stream);

// Appends to a stream, after what the default stream's old rule asks it to wait for: the default stream and streams that were
// not created as non-blocking run in the order of the calls.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> work, bool always = false);
void enqueue_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Mark>& mark);

// ---- handles: what the program holds is an object's address, looked up before it is used ----

template <class T> class Handles {
  public:
    T* add(std::shared_ptr<T> object) {
        const std::lock_guard lock(mutex_);
        T* handle = object.get();
        objects_[handle] = std::move(object);
        return handle;
    }
    std::shared_ptr<T> find(void* handle) {
        const std::lock_guard lock(mutex_);
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }
    std::shared_ptr<T> take(void* handle) {
        const std::lock_guard lock(mutex_);
        const auto found = objects_.find(handle);
        if (found == objects_.end()) return nullptr;
        std::shared_ptr<T> object = std::move(found->second);
        objects_.erase(found);
        return object;
    }

  private:
    std::mutex mutex_;
    std::unordered_map<void*, std::shared_ptr<T>> objects_;
};

Handles<Stream>& streams();
Handles<Event>& events();

// Whether bytes belong to a variable of a module that cuModuleGetGlobal named.
bool is_module_variable(uint64_t address, size_t bytes);

// A finding of the libraries above the kernels.
void report_call(Kind kind, const char* function, std::string text);

// Statics of these libraries are made with new and never destroyed: threads still wait on them when the process exits.
template <class T> T& immortal() {
    static T* object = new T;
    return *object;
}

} // namespace emulator::driver

#pragma GCC visibility pop
