// Device memory: one range of addresses per device, allocations between red zones, and one byte of shadow per byte.
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "worker.h"

namespace emulator {

void map_at(uint64_t address, size_t bytes) {
    void* wanted = reinterpret_cast<void*>(address);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    if (mmap(wanted, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) != wanted) {
        fprintf(stderr, "emulated GPU: cannot map %zu bytes at %p: allow overcommit of memory (vm.overcommit_memory = 0 or 1)\n", bytes, wanted);
        abort();
    }
}

constexpr size_t GRAIN = 256;    // alignment of allocations
constexpr size_t RED_ZONE = 256; // never allocated, behind each
constexpr size_t LARGE = 1 << 16; // pages of freed allocations of this size go back to the system

struct Device {
    std::mutex mutex;
    size_t capacity = 0;
    size_t in_use = 0;
    std::map<uint64_t, size_t> live;  // address -> bytes asked for
    std::map<uint64_t, size_t> freed; // the latest frees, for findings: address -> bytes
    std::map<uint64_t, size_t> holes; // address -> bytes
    uint64_t cursor = 0;              // where to look next: freed memory is used again as late as possible
};

static Device& device_at(int device) {
    static Device* devices = new Device[MOST_DEVICES]; // never destroyed: threads outlive main
    return devices[device];
}

static size_t footprint(size_t bytes) { return (bytes + GRAIN - 1) / GRAIN * GRAIN + RED_ZONE; }

static void set_shadow(uint64_t address, size_t bytes, State state) {
    memset(reinterpret_cast<void*>(address + SHADOW), state, bytes);
}

// Cuts `bytes` from the first hole at or after the cursor that is large enough, else from the first of all; 0 if there is none.
static uint64_t take_hole(Device& device, size_t bytes) {
    for (int pass = 0; pass < 2; ++pass) {
        for (auto hole = pass == 0 ? device.holes.lower_bound(device.cursor) : device.holes.begin(); hole != device.holes.end(); ++hole) {
            if (hole->second < bytes) continue;
            const auto [address, size] = *hole;
            device.holes.erase(hole);
            if (size > bytes) device.holes.emplace(address + bytes, size - bytes);
            device.cursor = address + bytes;
            return address;
        }
    }
    return 0;
}

static void add_hole(Device& device, uint64_t address, size_t bytes) {
    auto next = device.holes.lower_bound(address);
    if (next != device.holes.end() && next->first == address + bytes) {
        bytes += next->second;
        next = device.holes.erase(next);
    }
    if (next != device.holes.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == address) {
            before->second += bytes;
            return;
        }
    }
    device.holes.emplace(address, bytes);
}

static void map_locked(int number, Device& device) {
    if (device.capacity != 0) return;
    device.capacity = size_t(settings().memory_bytes);
    map_at(device_base(number), device.capacity);
    map_at(device_base(number) + SHADOW, device.capacity);
    device.holes.emplace(device_base(number) + RED_ZONE, device.capacity - RED_ZONE);
}

size_t map_device(int number) {
    Device& device = device_at(number);
    std::lock_guard lock(device.mutex);
    map_locked(number, device);
    return device.capacity;
}

void* allocate(int number, size_t bytes) {
    if (bytes == 0 || number < 0 || number >= MOST_DEVICES) return nullptr;
    Device& device = device_at(number);
    std::lock_guard lock(device.mutex);
    map_locked(number, device);
    const uint64_t address = take_hole(device, footprint(bytes));
    if (address == 0) return nullptr;
    device.live.emplace(address, bytes);
    device.freed.erase(device.freed.lower_bound(address), device.freed.lower_bound(address + footprint(bytes)));
    device.in_use += bytes;
    set_shadow(address, footprint(bytes), UNALLOCATED);
    set_shadow(address, bytes, settings().memory ? ALLOCATED : WRITTEN);
    return reinterpret_cast<void*>(address);
}

bool release(int number, void* pointer) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    const int owner = device_of(pointer);
    Finding finding{};
    finding.kind = Kind::OutOfBounds;
    finding.block[0] = finding.block[1] = finding.block[2] = -1;
    finding.address = address;
    if (owner != number) {
        finding.text = describe("free of an address that is no memory of device %d", number);
        report(finding);
        return false;
    }
    Device& device = device_at(number);
    std::unique_lock lock(device.mutex);
    const auto found = device.live.find(address);
    if (found == device.live.end()) {
        const bool twice = device.freed.count(address) != 0;
        lock.unlock();
        if (twice) finding.kind = Kind::UseAfterFree;
        finding.text = twice ? "free of memory that was freed before" : "free of an address " + where_is(address);
        report(finding);
        return false;
    }
    const size_t bytes = found->second;
    device.live.erase(found);
    device.freed[address] = bytes;
    device.in_use -= bytes;
    set_shadow(address, bytes, FREED);
    if (bytes >= LARGE) {
        const uint64_t first_page = (address + 4095) & ~uint64_t(4095), end_page = (address + bytes) & ~uint64_t(4095);
        madvise(reinterpret_cast<void*>(first_page), end_page - first_page, MADV_DONTNEED);
    }
    add_hole(device, address, footprint(bytes));
    return true;
}

size_t bytes_in_use(int number) {
    Device& device = device_at(number);
    std::lock_guard lock(device.mutex);
    return device.in_use;
}

int device_of(const void* pointer) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (zone_of(address) != GLOBAL || address >= device_base(0) + SHADOW) return -1;
    return int(address >> DEVICE_BITS & (MOST_DEVICES - 1));
}

std::string where_is(uint64_t address) {
    const int number = device_of(reinterpret_cast<const void*>(address));
    if (number < 0) return "outside of device memory";
    Device& device = device_at(number);
    std::lock_guard lock(device.mutex);
    const auto nearest = [&](const std::map<uint64_t, size_t>& allocations) {
        const auto after = allocations.upper_bound(address);
        return after == allocations.begin() ? allocations.end() : std::prev(after);
    };
    const auto freed = nearest(device.freed);
    if (freed != device.freed.end() && address < freed->first + freed->second) {
        return describe("%zu bytes into an allocation of %zu bytes that was freed", size_t(address - freed->first), freed->second);
    }
    const auto before = nearest(device.live);
    const auto after = device.live.upper_bound(address);
    const size_t past = before == device.live.end() ? SIZE_MAX : size_t(address - before->first) - before->second;
    const size_t ahead = after == device.live.end() ? SIZE_MAX : size_t(after->first - address);
    if (before != device.live.end() && address < before->first + before->second) {
        return describe("%zu bytes into an allocation of %zu bytes", size_t(address - before->first), before->second);
    }
    if (past == SIZE_MAX && ahead == SIZE_MAX) return "where nothing is allocated";
    if (past <= ahead) return describe("%zu bytes past the end of an allocation of %zu bytes", past, before->second);
    return describe("%zu bytes before an allocation of %zu bytes", ahead, after->second);
}

// ---- the host's accesses ----

// Whether every byte has `bits` set in its shadow; else the first that has not.
static bool shadow_has(uint64_t address, size_t bytes, uint8_t bits, size_t* first_without) {
    const uint8_t* shadow = reinterpret_cast<const uint8_t*>(address + SHADOW);
    const uint64_t wanted = uint64_t(bits) * 0x0101010101010101u;
    for (size_t i = 0; i < bytes;) {
        uint64_t word;
        if (i + 8 <= bytes && (memcpy(&word, shadow + i, 8), (word & wanted) == wanted)) {
            i += 8;
        } else if ((shadow[i] & bits) == bits) {
            ++i;
        } else {
            *first_without = i;
            return false;
        }
    }
    return true;
}

static bool report_host_access(uint64_t address, Kind kind, const char* what, const std::string& text) {
    Finding finding{};
    finding.kind = kind;
    finding.kernel = what;
    finding.block[0] = finding.block[1] = finding.block[2] = -1;
    finding.address = address;
    finding.text = text;
    report(finding);
    return false;
}

// Bounds of a copy or a set by the host.
static bool check_bounds(uint64_t address, size_t bytes, const char* what) {
    const int device = device_of(reinterpret_cast<const void*>(address));
    const uint64_t end = device < 0 ? 0 : device_base(device) + device_at(device).capacity;
    if (device < 0 || address >= end || bytes > end - address) {
        return report_host_access(address, Kind::HostPointer, what, describe("%zu bytes at an address that is no device memory", bytes));
    }
    size_t bad;
    if (shadow_has(address, bytes, ALLOCATED, &bad)) return true;
    const bool was_freed = *reinterpret_cast<const uint8_t*>(address + SHADOW + bad) == FREED;
    return report_host_access(address, was_freed ? Kind::UseAfterFree : Kind::OutOfBounds, what,
                              describe("byte %zu of %zu lies ", bad, bytes) + where_is(address + bad));
}

bool mark_written(void* pointer, size_t bytes, const char* what) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (bytes == 0) return true;
    if (!check_bounds(address, bytes, what)) return false;
    set_shadow(address, bytes, WRITTEN);
    return true;
}

bool check_readable(const void* pointer, size_t bytes, const char* what) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (bytes == 0) return true;
    if (!check_bounds(address, bytes, what)) return false;
    size_t bad;
    if (!settings().memory || shadow_has(address, bytes, WRITTEN, &bad)) return true;
    report_host_access(address + bad, Kind::Uninitialised, what, describe("byte %zu of %zu was written by nobody", bad, bytes));
    return true; // the copy itself does no harm
}

bool mark_copied(void* to, const void* from, size_t bytes, const char* what) {
    const uint64_t target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
    if (bytes == 0) return true;
    if (!check_bounds(source, bytes, what) || !check_bounds(target, bytes, what)) return false;
    memmove(reinterpret_cast<void*>(target + SHADOW), reinterpret_cast<const void*>(source + SHADOW), bytes);
    return true;
}

void report_leaks(int number) {
    Device& device = device_at(number);
    std::lock_guard lock(device.mutex);
    for (const auto& [address, bytes] : device.live) {
        report_host_access(address, Kind::Leak, "", describe("%zu bytes of device %d were never freed", bytes, number));
    }
}

} // namespace emulator
