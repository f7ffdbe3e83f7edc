// The calls that -fsanitize=thread and -fsanitize=bounds-strict put into kernels, vector accesses, and what is said when an access
// is not allowed.
#include <dlfcn.h>
#include <link.h>

#include "access.h"
#include "memory.h"

namespace emulator {

// ---- the compiler's calls ----

#define CALLER __builtin_return_address(0)
#define SCALAR_HOOKS(bytes)                                                                                                    \
    EMULATOR_API void __tsan_read##bytes(void* address) { check_access<bytes, false>(uint64_t(address), CALLER); }              \
    EMULATOR_API void __tsan_write##bytes(void* address) { check_access<bytes, true>(uint64_t(address), CALLER); }              \
    EMULATOR_API void __tsan_unaligned_read##bytes(void* address) { check_access<bytes, false, false>(uint64_t(address), CALLER); } \
    EMULATOR_API void __tsan_unaligned_write##bytes(void* address) { check_access<bytes, true, false>(uint64_t(address), CALLER); }
SCALAR_HOOKS(1)
SCALAR_HOOKS(2)
SCALAR_HOOKS(4)
SCALAR_HOOKS(8)
SCALAR_HOOKS(16)
#undef SCALAR_HOOKS

// Copies of whole structs: as the words a GPU would move.
template <bool write> static void check_range(uint64_t address, uint64_t bytes, const void* code) {
    if (zone_of(address) == PRIVATE) return;
    uint64_t i = 0;
    for (; i + 4 <= bytes; i += 4) check_access<4, write, false>(address + i, code);
    for (; i < bytes; ++i) check_access<1, write, false>(address + i, code);
}
EMULATOR_API void __tsan_read_range(void* address, uint64_t bytes) { check_range<false>(uint64_t(address), bytes, CALLER); }
EMULATOR_API void __tsan_write_range(void* address, uint64_t bytes) { check_range<true>(uint64_t(address), bytes, CALLER); }
EMULATOR_API void __tsan_init() {}
EMULATOR_API void __tsan_func_entry(void*) {}
EMULATOR_API void __tsan_func_exit() {}

// ---- vector accesses ----

EMULATOR_API Words4 emulator_load16(const void* address) {
    check_access<16, false>(uint64_t(address), CALLER);
    Words4 value;
    memcpy(&value, address, 16);
    return value;
}
EMULATOR_API void emulator_store16(void* address, Words4 value) {
    check_access<16, true>(uint64_t(address), CALLER);
    memcpy(address, &value, 16);
}
EMULATOR_API uint64_t emulator_load8(const void* address) {
    check_access<8, false>(uint64_t(address), CALLER);
    uint64_t value;
    memcpy(&value, address, 8);
    return value;
}
EMULATOR_API void emulator_store8(void* address, uint64_t value) {
    check_access<8, true>(uint64_t(address), CALLER);
    memcpy(address, &value, 8);
}

// ---- an index past an array ----

// What the compiler passes to the handler: the place, and the array's type (GCC's ubsan.h).
struct UbsanType {
    uint16_t kind, information;
    char name[1];
};
struct UbsanOutOfBounds {
    const char* file;
    uint32_t line, column;
    const UbsanType* array;
    const UbsanType* index;
};

EMULATOR_API void __ubsan_handle_out_of_bounds(const UbsanOutOfBounds* data, uint64_t index) {
    Finding finding = finding_here(Kind::SharedBounds, CALLER);
    const uint32_t index_bits = 1u << (data->index->information >> 1);
    const long long value = index_bits == 64 ? (long long)index : (long long)(int32_t)index;
    finding.text = describe("index %lld is out of bounds of %s (%s:%u)", value, data->array->name, data->file, data->line);
    report(finding);
    fail();
}

// ---- refusals ----

// Offset of a byte of the block's shared memory; else the address.
static uint64_t as_reported(uint64_t address) {
    const uint64_t offset = address - arena_base(current_worker->number);
    return offset < ARENA_BYTES ? offset : address;
}

void refuse_misaligned(uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code) {
    Finding finding = finding_here(Kind::Misaligned, code, int(thread));
    finding.address = as_reported(address);
    finding.text = describe("%s of %u bytes at an address that is not a multiple of %u", write ? "write" : "read", bytes, bytes);
    report(finding);
    fail();
}

void refuse_copy_destination(uint32_t thread, uint64_t address, const void* code) {
    Finding finding = finding_here(Kind::OutOfBounds, code, int(thread));
    finding.address = address;
    finding.text = "asynchronous copy to an address that is not in the block's shared memory";
    report(finding);
    fail();
}

void refuse_access(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code) {
    const uint8_t* shadow = reinterpret_cast<const uint8_t*>(address + SHADOW);
    const bool shared = zone_of(address) == SHARED;
    Kind kind = Kind::Uninitialised;
    for (uint32_t i = 0; i < bytes; ++i) {
        if (shadow[i] == FREED) kind = Kind::UseAfterFree;
        if (shadow[i] == UNALLOCATED && kind != Kind::UseAfterFree) kind = Kind::OutOfBounds;
    }
    Finding finding = finding_here(kind, code, int(thread));
    finding.address = as_reported(address);
    const char* action = write ? "write" : "read";
    if (kind == Kind::Uninitialised) {
        finding.text = describe("read of %u bytes of %s memory that nobody wrote", bytes, shared ? "shared" : "global");
    } else if (shared) {
        finding.text = describe("%s of %u bytes at offset %llu of the block's %zu bytes of shared memory", action, bytes,
                                (unsigned long long)finding.address, worker.launch->shared_bytes);
    } else {
        finding.text = describe("%s of %u bytes that lie ", action, bytes) + where_is(address);
    }
    report(finding);
    if (kind != Kind::Uninitialised) fail();
}

// The loaded module that holds `address`, as its base; null if none does.
static const void* module_of(const void* address) {
    Dl_info information;
    return dladdr(address, &information) ? information.dli_fbase : nullptr;
}

void check_foreign(Worker& worker, uint32_t thread, uint64_t address, uint32_t bytes, bool write, const void* code) {
    if (!worker.checks.memory) return;
    if (!write) { // tables of constants in the kernel's module
        const void* entry = reinterpret_cast<const void*>(worker.launch->kernel->entry);
        if (address - worker.constants_first < worker.constants_bytes) return;
        if (module_of(reinterpret_cast<const void*>(address)) == module_of(entry)) {
            worker.constants_first = address & ~uint64_t(63);
            worker.constants_bytes = 64;
            return;
        }
    }
    const int device = device_of(reinterpret_cast<const void*>(address));
    const bool shared = zone_of(address) == SHARED;
    Finding finding = finding_here(device >= 0 || shared ? Kind::OutOfBounds : Kind::HostPointer, code, int(thread));
    finding.address = address;
    const char* action = write ? "write" : "read";
    if (shared) finding.text = describe("%s of %u bytes outside of the block's shared memory", action, bytes);
    else if (device == worker.launch->device) finding.text = describe("%s of %u bytes beyond the device's memory", action, bytes);
    else if (device >= 0) finding.text = describe("%s of %u bytes of memory of device %d by a kernel on device %d", action, bytes, device, worker.launch->device);
    else if (address < 4096) finding.text = describe("%s of %u bytes through a null pointer", action, bytes);
    else finding.text = describe("%s of %u bytes at an address that is no device memory (a host pointer?)", action, bytes);
    report(finding);
    fail();
}

} // namespace emulator
