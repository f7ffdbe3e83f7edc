// The emulated driver: devices, their attributes, and contexts. A made-up GPU of compute capability 9.0.

#include "driver.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emulator::driver {

static std::atomic<bool> initialized{false};
static thread_local Device* current = nullptr;

Handles<Stream>& streams() { return immortal<Handles<Stream>>(); }
Handles<Event>& events() { return immortal<Handles<Event>>(); }

void report_call(Kind kind, const char* function, std::string text) {
    Finding finding{};
    finding.kind = kind;
    finding.kernel = function;
    for (int32_t& coordinate : finding.block) coordinate = -1;
    finding.text = std::move(text);
    report(finding);
}

// ---- devices ----

Device& device_at(int ordinal) {
    struct Devices {
        std::mutex mutex;
        Device* all[DEVICES_MOST] = {};
    };
    Devices& devices = immortal<Devices>();
    const std::lock_guard lock(devices.mutex);
    if (!devices.all[ordinal]) {
        devices.all[ordinal] = new Device;
        devices.all[ordinal]->ordinal = ordinal;
    }
    return *devices.all[ordinal];
}

static int device_count() { return std::clamp(settings().devices, 0, DEVICES_MOST); }
static bool is_device(int ordinal) { return ordinal >= 0 && ordinal < device_count(); }

std::shared_ptr<Stream> Device::stream_zero() {
    const std::lock_guard lock(mutex);
    if (!default_stream) {
        default_stream = std::make_shared<Stream>(*this, true);
        default_stream->start();
    }
    return default_stream;
}

std::vector<std::shared_ptr<Stream>> Device::every_stream() {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Stream>> every = streams;
    if (default_stream) every.push_back(default_stream);
    return every;
}

void Device::wait_all() {
    for (const auto& stream : every_stream()) stream->wait_all();
}

Result Device::state() const {
    if (lost) return LAUNCH_FAILED;
    return owners > 0 ? SUCCESS : CONTEXT_IS_DESTROYED;
}

// What the end of a context does: finishes what is queued, destroys the streams, and takes back all memory. What a healthy
// program left behind is reported.
static void reset(Device& device) {
    device.wait_all();
    const std::lock_guard lock(device.mutex);
    for (const auto& stream : device.streams) {
        streams().take(stream.get());
        stream->close();
    }
    device.streams.clear();
    if (device.default_stream) device.default_stream->close();
    device.default_stream = nullptr;
    if (!device.lost && !device.allocations.empty()) report_leaks(device.ordinal);
    for (void* address : device.allocations) release(device.ordinal, address);
    device.allocations.clear();
    device.peers.clear();
    device.lost = false;
}

// ---- the calling thread ----

Device* current_device() { return current; }

Result open_device(Device*& device) {
    if (!initialized) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    device = current;
    return device->state();
}

Result open_stream(void* handle, std::shared_ptr<Stream>& stream) {
    void* const LEGACY = reinterpret_cast<void*>(1); // CU_STREAM_LEGACY is the default stream by another name
    Device* device;
    const Result state = open_device(device);
    if (state != SUCCESS && state != LAUNCH_FAILED) return state;
    stream = !handle || handle == LEGACY ? device->stream_zero() : streams().find(handle);
    return stream ? stream->device.state() : INVALID_HANDLE;
}

// Attributes that are not listed read 0: not supported, or not known of a GPU that does not exist.
static int attribute_of(int attribute) {
    switch (attribute) {
    case 1: return 1024;                               // threads per block
    case 2: case 3: return 1024;                       // block x, y
    case 4: return 64;                                 // block z
    case 5: return 2147483647;                         // grid x
    case 6: case 7: return 65535;                      // grid y, z
    case 8: return int(SHARED_BYTES_WITHOUT_ASKING);   // shared memory per block
    case 9: return 64 * 1024;                          // constant memory
    case 10: return 32;                                // warp size
    case 12: case 82: return 65536;                    // registers per block, per multiprocessor
    case 15: case 31: return 1;                        // copies overlap kernels, kernels overlap each other
    case 16: return settings().multiprocessors;
    case 19: return 1;                                 // host memory can be mapped
    case 39: return 2048;                              // threads per multiprocessor
    case 40: return 1;                                 // copy engines
    case 41: return 1;                                 // one address space
    case 75: return 9;                                 // compute capability
    case 76: return 0;
    case 78: return 1;                                 // stream priorities
    case 81: return 228 * 1024;                        // shared memory per multiprocessor
    case 97: return int(SHARED_BYTES_MOST);            // shared memory per block after cuFuncSetAttribute
    case 99: return 1;                                 // cuMemHostRegister
    case 106: return 32;                               // blocks per multiprocessor
    case 111: return 1024;                             // shared memory that a block needs for itself
    case 115: return 1;                                // memory pools
    default: return 0;
    }
}

} // namespace emulator::driver

using namespace emulator::driver;
using emulator::settings;

#pragma GCC visibility push(default)
extern "C" {

int32_t cuInit(uint32_t flags) {
    if (flags) return INVALID_VALUE;
    initialized = true;
    return SUCCESS;
}

int32_t cuDriverGetVersion(int32_t* version) {
    *version = 13000;
    return SUCCESS;
}

// ---- devices ----

int32_t cuDeviceGetCount(int32_t* count) {
    if (!initialized) return NOT_INITIALIZED;
    *count = device_count();
    return SUCCESS;
}

int32_t cuDeviceGet(int32_t* device, int32_t ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    if (!is_device(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int32_t cuDeviceGetName(char* name, int32_t length, int32_t device) {
    if (!is_device(device)) return INVALID_DEVICE;
    if (length <= 0) return INVALID_VALUE;
    std::snprintf(name, size_t(length), "Emulated GPU");
    return SUCCESS;
}

int32_t cuDeviceGetUuid_v2(char uuid[16], int32_t device) {
    if (!is_device(device)) return INVALID_DEVICE;
    std::memcpy(uuid, "emulated GPU\0\0\0", 16);
    uuid[15] = char(device);
    return SUCCESS;
}

int32_t cuDeviceGetUuid(char uuid[16], int32_t device) { return cuDeviceGetUuid_v2(uuid, device); }

int32_t cuDeviceTotalMem_v2(size_t* bytes, int32_t device) {
    if (!is_device(device)) return INVALID_DEVICE;
    *bytes = size_t(settings().memory_bytes);
    return SUCCESS;
}

int32_t cuDeviceGetAttribute(int32_t* value, int32_t attribute, int32_t device) {
    if (!is_device(device)) return INVALID_DEVICE;
    *value = attribute_of(attribute);
    return SUCCESS;
}

int32_t cuDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
    *can = device != peer;
    return SUCCESS;
}

// ---- contexts ----

int32_t cuDevicePrimaryCtxRetain(void** context, int32_t ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    if (!is_device(ordinal)) return INVALID_DEVICE;
    Device& device = device_at(ordinal);
    const std::lock_guard lock(device.mutex);
    ++device.owners;
    *context = &device;
    return SUCCESS;
}

int32_t cuDevicePrimaryCtxReset_v2(int32_t ordinal) {
    if (!is_device(ordinal)) return INVALID_DEVICE;
    reset(device_at(ordinal));
    return SUCCESS;
}

int32_t cuDevicePrimaryCtxRelease_v2(int32_t ordinal) {
    if (!is_device(ordinal)) return INVALID_DEVICE;
    Device& device = device_at(ordinal);
    {
        const std::lock_guard lock(device.mutex);
        if (device.owners == 0) return INVALID_CONTEXT;
        if (--device.owners > 0) return SUCCESS;
    }
    reset(device);
    return SUCCESS;
}

int32_t cuCtxGetCurrent(void** context) {
    *context = current;
    return SUCCESS;
}

int32_t cuCtxSetCurrent(void* context) {
    if (!initialized) return NOT_INITIALIZED;
    if (!context) {
        current = nullptr;
        return SUCCESS;
    }
    for (int i = 0; i < device_count(); ++i) {
        if (&device_at(i) == context) {
            current = static_cast<Device*>(context);
            return SUCCESS;
        }
    }
    return INVALID_CONTEXT;
}

int32_t cuCtxGetDevice(int32_t* device) {
    if (!current) return INVALID_CONTEXT;
    *device = current->ordinal;
    return SUCCESS;
}

int32_t cuCtxSynchronize() {
    Device* device;
    if (const Result result = open_device(device)) return result;
    device->wait_all();
    return device->state();
}

int32_t cuCtxSetFlags(uint32_t) { return current ? SUCCESS : INVALID_CONTEXT; }

int32_t cuCtxGetLimit(size_t* value, int32_t limit) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    switch (limit) {
    case 0: *value = 64 * 1024; return SUCCESS; // stack of a thread: that of an emulated one
    case 1: case 2: *value = 0; return SUCCESS; // printf buffer, malloc heap: kernels have neither
    default: return UNSUPPORTED_LIMIT;
    }
}

int32_t cuCtxSetLimit(int32_t, size_t) { return current ? UNSUPPORTED_LIMIT : INVALID_CONTEXT; }

int32_t cuCtxEnablePeerAccess(void* peer, uint32_t flags) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    if (flags || peer == device || !peer) return INVALID_VALUE;
    const int ordinal = static_cast<Device*>(peer)->ordinal;
    const std::lock_guard lock(device->mutex);
    return device->peers.insert(ordinal).second ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
}

// ---- errors ----

static const struct {
    int32_t code;
    const char* name;
    const char* text;
} ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "cuInit was not called"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "no device has this number"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "no context, or not one of the emulated devices"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "the module was not compiled for the emulated GPU"},
    {UNSUPPORTED_LIMIT, "CUDA_ERROR_UNSUPPORTED_LIMIT", "the emulated GPU has no such limit"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "the operating system refused a call"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "the handle is unknown, or was destroyed"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "the module has no such kernel or variable"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "the work is not done yet"},
    {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "access to this peer is already enabled"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the last owner released the context"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "the host memory is already pinned"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the host memory is not pinned"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "the emulated GPU stopped at a finding; its context must be released"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not part of the emulated GPU"},
};

int32_t cuGetErrorName(int32_t error, const char** name) {
    for (const auto& known : ERRORS) {
        if (known.code == error) {
            *name = known.name;
            return SUCCESS;
        }
    }
    *name = nullptr;
    return INVALID_VALUE;
}

int32_t cuGetErrorString(int32_t error, const char** text) {
    for (const auto& known : ERRORS) {
        if (known.code == error) {
            *text = known.text;
            return SUCCESS;
        }
    }
    *text = nullptr;
    return INVALID_VALUE;
}

} // extern "C"
#pragma GCC visibility pop
