// Device memory, pinned host memory, copies and sets.

#include "driver.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulator::driver {

// ---- pinned host memory ----

// A copy from or to pinned memory holds the region until it has run, and moves the bytes only then: reusing a staging buffer
// too soon shows as wrong values.
struct PinnedRegion {
    char* start;
    size_t bytes;
    bool owned; // by cuMemHostAlloc; else registered, and the program's own
    ~PinnedRegion() {
        if (owned) std::free(start);
    }
};

struct PinnedRegions {
    std::mutex mutex;
    std::map<const char*, std::shared_ptr<PinnedRegion>> by_start;
};
static PinnedRegions& pinned() { return immortal<PinnedRegions>(); }

// The region that holds all of the bytes, or null for pageable memory.
static std::shared_ptr<PinnedRegion> pinned_region(const void* address, size_t bytes) {
    const char* first = static_cast<const char*>(address);
    const std::lock_guard lock(pinned().mutex);
    auto after = pinned().by_start.upper_bound(first);
    if (after == pinned().by_start.begin()) return nullptr;
    const std::shared_ptr<PinnedRegion>& region = (--after)->second;
    return first + bytes <= region->start + region->bytes ? region : nullptr;
}

static Result unpin(void* address, bool owned, const char* function) {
    std::shared_ptr<PinnedRegion> region;
    {
        const std::lock_guard lock(pinned().mutex);
        const auto found = pinned().by_start.find(static_cast<const char*>(address));
        if (found == pinned().by_start.end() || found->second->owned != owned) {
            return owned ? INVALID_VALUE : HOST_MEMORY_NOT_REGISTERED;
        }
        region = std::move(found->second);
        pinned().by_start.erase(found);
    }
    if (region.use_count() > 1) {
        report_call(Kind::Stream, function, "pinned host memory is given up while a queued copy still uses it");
    }
    return SUCCESS;
}

// ---- device memory ----

static void* to_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// The device whose range holds the address; null, and the caller's error, if none does.
static Device* owner_of(uint64_t address) {
    const int ordinal = device_of(to_pointer(address));
    return ordinal < 0 ? nullptr : &device_at(ordinal);
}

static Result allocate_on(Device& device, uint64_t* address, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    void* memory = allocate(device.ordinal, bytes);
    if (!memory) {
        device.wait_all(); // frees may be queued
        memory = allocate(device.ordinal, bytes);
    }
    if (!memory) return OUT_OF_MEMORY;
    const std::lock_guard lock(device.mutex);
    device.allocations.insert(memory);
    *address = reinterpret_cast<uint64_t>(memory);
    return SUCCESS;
}

// Takes an allocation out of the program's hands, whatever context is current; freeing what is not one is a finding. On a lost
// device memory is still taken back.
static Result forget(uint64_t address, Device*& owner) {
    owner = owner_of(address);
    if (!owner) return INVALID_VALUE;
    if (owner->state() == CONTEXT_IS_DESTROYED) return CONTEXT_IS_DESTROYED;
    {
        const std::lock_guard lock(owner->mutex);
        if (owner->allocations.erase(to_pointer(address))) return SUCCESS;
    }
    owner->wait_all();
    release(owner->ordinal, to_pointer(address)); // tells what is wrong with it
    return INVALID_VALUE;
}

// ---- copies ----

static bool readable(uint64_t from, size_t bytes, const char* what) {
    return is_module_variable(from, bytes) || check_readable(to_pointer(from), bytes, what);
}

static bool is_readable_place(uint64_t from) { return owner_of(from) || is_module_variable(from, 1); }

// Bounds are checked when the copy runs: memory may be freed before. A copy that fails them ends the context, as a kernel would.
static void move_bytes(Device& device, uint64_t to, uint64_t from, size_t bytes, const char* what) {
    const bool sound = is_module_variable(from, bytes) ? mark_written(to_pointer(to), bytes, what)
                                                       : mark_copied(to_pointer(to), to_pointer(from), bytes, what);
    if (sound) {
        std::memmove(to_pointer(to), to_pointer(from), bytes);
    } else {
        device.lost = true;
    }
}

static Result copy_on_device(uint64_t to, uint64_t from, size_t bytes, void* handle, const char* what, bool wait) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    if (bytes == 0) return SUCCESS;
    if (!owner_of(to) || !is_readable_place(from)) return INVALID_VALUE;
    const uint64_t sequence = enqueue(stream, [=, &device = stream->device] { move_bytes(device, to, from, bytes, what); });
    if (!wait) return SUCCESS;
    stream->wait(sequence);
    return stream->device.state();
}

static void write_bytes(Device& device, uint64_t to, const void* from, size_t bytes, const char* what) {
    if (mark_written(to_pointer(to), bytes, what)) {
        std::memcpy(to_pointer(to), from, bytes);
    } else {
        device.lost = true;
    }
}

// From pageable memory the bytes are taken at the call; from pinned memory when the copy runs.
static Result copy_to_device(uint64_t to, const void* from, size_t bytes, void* handle, const char* what, bool wait) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    if (bytes == 0) return SUCCESS;
    if (!from || !owner_of(to)) return INVALID_VALUE;
    Device& device = stream->device;
    uint64_t sequence;
    if (auto region = pinned_region(from, bytes)) {
        sequence = enqueue(stream, [=, &device, region = std::move(region)] { write_bytes(device, to, from, bytes, what); });
    } else {
        const char* first = static_cast<const char*>(from);
        sequence = enqueue(stream, [=, &device, copy = std::vector<char>(first, first + bytes)] {
            write_bytes(device, to, copy.data(), bytes, what);
        });
    }
    if (!wait) return SUCCESS;
    stream->wait(sequence);
    return device.state();
}

// Into pageable memory the call returns when the bytes are there; into pinned memory at once.
static Result copy_to_host(void* to, uint64_t from, size_t bytes, void* handle, const char* what, bool wait) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    if (bytes == 0) return SUCCESS;
    if (!to || !is_readable_place(from)) return INVALID_VALUE;
    Device& device = stream->device;
    auto region = pinned_region(to, bytes);
    wait = wait || !region;
    const uint64_t sequence = enqueue(stream, [=, &device, region = std::move(region)] {
        if (readable(from, bytes, what)) {
            std::memcpy(to, to_pointer(from), bytes);
        } else {
            device.lost = true;
        }
    });
    if (!wait) return SUCCESS;
    stream->wait(sequence);
    return device.state();
}

template <class T> static Result fill(uint64_t to, T value, size_t count, void* handle, const char* what, bool wait) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    if (count == 0) return SUCCESS;
    if (!owner_of(to) || to % sizeof(T) != 0) return INVALID_VALUE;
    Device& device = stream->device;
    const uint64_t sequence = enqueue(stream, [=, &device] {
        if (mark_written(to_pointer(to), count * sizeof(T), what)) {
            std::fill_n(static_cast<T*>(to_pointer(to)), count, value);
        } else {
            device.lost = true;
        }
    });
    if (!wait) return SUCCESS;
    stream->wait(sequence);
    return device.state();
}

} // namespace emulator::driver

using namespace emulator::driver;
using emulator::bytes_in_use;
using emulator::settings;

#pragma GCC visibility push(default)
extern "C" {

// ---- allocation ----

// The address is there at once; that it may be used only in stream order is not checked.
int32_t cuMemAllocAsync(uint64_t* address, size_t bytes, void* handle) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    return allocate_on(stream->device, address, bytes);
}

int32_t cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    return allocate_on(*device, address, bytes);
}

// Frees in stream order: other streams that still use the memory are caught.
int32_t cuMemFreeAsync(uint64_t address, void* handle) {
    Device* owner;
    if (const Result result = forget(address, owner)) return result;
    std::shared_ptr<Stream> stream = handle ? streams().find(handle) : owner->stream_zero();
    if (!stream) stream = owner->stream_zero();
    enqueue(stream, [=] { emulator::release(owner->ordinal, to_pointer(address)); }, true);
    return owner->state();
}

int32_t cuMemFree_v2(uint64_t address) {
    if (address == 0) return SUCCESS;
    Device* owner;
    if (const Result result = forget(address, owner)) return result;
    owner->wait_all();
    emulator::release(owner->ordinal, to_pointer(address));
    return owner->state();
}

int32_t cuMemGetInfo_v2(size_t* free, size_t* total) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    *total = size_t(settings().memory_bytes);
    *free = *total - std::min(*total, bytes_in_use(device->ordinal));
    return SUCCESS;
}

// ---- memory pools: one per device, whose handle is the device's; it keeps nothing back ----

int32_t cuDeviceGetDefaultMemPool(void** pool, int32_t ordinal) {
    if (ordinal < 0 || ordinal >= settings().devices) return INVALID_DEVICE;
    *pool = &device_at(ordinal);
    return SUCCESS;
}

int32_t cuDeviceGetMemPool(void** pool, int32_t ordinal) { return cuDeviceGetDefaultMemPool(pool, ordinal); }

int32_t cuMemPoolSetAttribute(void*, int32_t, void*) { return SUCCESS; } // when to give memory back: always

int32_t cuMemPoolGetAttribute(void* pool, int32_t attribute, void* value) {
    constexpr int32_t RESERVED_CURRENT = 5, USED_CURRENT = 7;
    if (attribute != RESERVED_CURRENT && attribute != USED_CURRENT) return INVALID_VALUE;
    *static_cast<uint64_t*>(value) = bytes_in_use(static_cast<Device*>(pool)->ordinal);
    return SUCCESS;
}

int32_t cuMemPoolTrimTo(void*, size_t) { return SUCCESS; }

int32_t cuMemAllocFromPoolAsync(uint64_t* address, size_t bytes, void*, void* handle) {
    return cuMemAllocAsync(address, bytes, handle);
}

// ---- pinned host memory ----

int32_t cuMemHostAlloc(void** address, size_t bytes, uint32_t) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    if (bytes == 0) return INVALID_VALUE;
    constexpr size_t PAGE = 4096;
    char* memory = static_cast<char*>(std::aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE));
    if (!memory) return OUT_OF_MEMORY;
    const auto region = std::make_shared<PinnedRegion>(memory, bytes, true);
    const std::lock_guard lock(pinned().mutex);
    pinned().by_start[memory] = region;
    *address = memory;
    return SUCCESS;
}

int32_t cuMemFreeHost(void* address) { return unpin(address, true, "cuMemFreeHost"); }

int32_t cuMemHostRegister_v2(void* address, size_t bytes, uint32_t) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    if (!address || bytes == 0) return INVALID_VALUE;
    if (pinned_region(address, 1)) return HOST_MEMORY_ALREADY_REGISTERED;
    char* first = static_cast<char*>(address);
    const auto region = std::make_shared<PinnedRegion>(first, bytes, false);
    const std::lock_guard lock(pinned().mutex);
    pinned().by_start[first] = region;
    return SUCCESS;
}

int32_t cuMemHostUnregister(void* address) { return unpin(address, false, "cuMemHostUnregister"); }

// ---- copies and sets ----

int32_t cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    return copy_to_device(to, from, bytes, stream, "cuMemcpyHtoDAsync", false);
}
int32_t cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    return copy_to_device(to, from, bytes, nullptr, "cuMemcpyHtoD", true);
}
int32_t cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    return copy_to_host(to, from, bytes, stream, "cuMemcpyDtoHAsync", false);
}
int32_t cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    return copy_to_host(to, from, bytes, nullptr, "cuMemcpyDtoH", true);
}
int32_t cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    return copy_on_device(to, from, bytes, stream, "cuMemcpyDtoDAsync", false);
}
int32_t cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
    return copy_on_device(to, from, bytes, nullptr, "cuMemcpyDtoD", true);
}

int32_t cuMemcpyPeerAsync(uint64_t to, void* to_context, uint64_t from, void* from_context, size_t bytes, void* stream) {
    if (bytes != 0 && (owner_of(to) != to_context || owner_of(from) != from_context)) return INVALID_VALUE;
    return copy_on_device(to, from, bytes, stream, "cuMemcpyPeerAsync", false);
}

int32_t cuMemsetD8Async(uint64_t to, uint8_t value, size_t count, void* stream) {
    return fill(to, value, count, stream, "cuMemsetD8Async", false);
}
int32_t cuMemsetD8_v2(uint64_t to, uint8_t value, size_t count) { return fill(to, value, count, nullptr, "cuMemsetD8", true); }
int32_t cuMemsetD16Async(uint64_t to, uint16_t value, size_t count, void* stream) {
    return fill(to, value, count, stream, "cuMemsetD16Async", false);
}
int32_t cuMemsetD32Async(uint64_t to, uint32_t value, size_t count, void* stream) {
    return fill(to, value, count, stream, "cuMemsetD32Async", false);
}

} // extern "C"
#pragma GCC visibility pop
