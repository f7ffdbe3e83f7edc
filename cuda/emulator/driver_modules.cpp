// Modules and kernels: a module is a shared library for x86-64, made from a kernel file by the host compiler.

#include "driver.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

namespace emulator::driver {

struct LaunchShape { // as in include/device.h
    int32_t threads;
    int32_t shared_bytes;
    int32_t argument_bytes;
    int32_t reserved;
};

// A kernel of a module, and what cuFuncSetAttribute said about it.
struct Function {
    Kernel kernel;
    std::atomic<size_t> shared_bytes_allowed{SHARED_BYTES_WITHOUT_ASKING};
};

struct Module {
    void* library;
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Function>> functions;
};

// Variables that cuModuleGetGlobal named: address and size.
struct Variables {
    std::mutex mutex;
    std::map<uint64_t, size_t> bytes;
};
static Variables& variables() { return immortal<Variables>(); }

bool is_module_variable(uint64_t address, size_t bytes) {
    Variables& known = variables();
    const std::lock_guard lock(known.mutex);
    auto after = known.bytes.upper_bound(address);
    if (after == known.bytes.begin()) return false;
    const auto [start, size] = *--after;
    return address + bytes <= start + size;
}

static Handles<Module>& modules() { return immortal<Handles<Module>>(); }
static Handles<Function>& functions() { return immortal<Handles<Function>>(); }

// Length of the ELF file at `image`, or 0 if it is not a shared library for this processor.
static size_t library_length(const void* image) {
    Elf64_Ehdr header;
    std::memcpy(&header, image, SELFMAG);
    if (std::memcmp(&header, ELFMAG, SELFMAG) != 0) return 0; // a fat binary, PTX text, ..
    std::memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_X86_64 || header.e_type != ET_DYN) return 0; // a cubin
    size_t length = header.e_shoff + size_t(header.e_shnum) * header.e_shentsize;
    const auto* segments = reinterpret_cast<const Elf64_Phdr*>(static_cast<const char*>(image) + header.e_phoff);
    for (int i = 0; i < header.e_phnum; ++i) length = std::max<size_t>(length, segments[i].p_offset + segments[i].p_filesz);
    return length;
}

// Loads the library from memory. It stays mapped and its descriptor open as long as the process lives: findings name places in
// its code, their lines are read from it later, and the loader takes two files of the same /proc/self/fd path for one.
// The same bytes are loaded once.
static Result load_library(const void* image, size_t length, void*& library) {
    struct Loaded {
        std::string_view bytes; // a mapping of the file
        void* library;
    };
    struct Libraries {
        std::mutex mutex;
        std::vector<Loaded> all;
    };
    Libraries& libraries = immortal<Libraries>();
    const std::lock_guard lock(libraries.mutex);
    for (const Loaded& loaded : libraries.all) {
        if (loaded.bytes == std::string_view(static_cast<const char*>(image), length)) {
            library = loaded.library;
            return SUCCESS;
        }
    }
    const int descriptor = memfd_create("kernels", MFD_CLOEXEC);
    if (descriptor < 0) return OPERATING_SYSTEM;
    size_t written = 0;
    while (written < length) {
        const ssize_t step = write(descriptor, static_cast<const char*>(image) + written, length - written);
        if (step <= 0) break;
        written += size_t(step);
    }
    void* bytes = written == length ? mmap(nullptr, length, PROT_READ, MAP_SHARED, descriptor, 0) : MAP_FAILED;
    if (bytes == MAP_FAILED) {
        close(descriptor);
        return OPERATING_SYSTEM;
    }
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        report_call(Kind::Launch, "cuModuleLoadData", std::string("the module cannot be loaded: ") + dlerror());
        munmap(bytes, length);
        close(descriptor);
        return NO_BINARY_FOR_GPU;
    }
    libraries.all.push_back({std::string_view(static_cast<const char*>(bytes), length), library});
    return SUCCESS;
}

// What a launch breaks, in words; empty if nothing.
static std::string launch_fault(const Function& function, const uint32_t (&grid)[3], const uint32_t (&block)[3],
                                size_t shared_bytes) {
    const Kernel& kernel = function.kernel;
    const auto number = [](uint64_t value) { return std::to_string(value); };
    if (!grid[0] || !grid[1] || !grid[2]) return "an empty grid";
    if (grid[0] > 2147483647u || grid[1] > 65535u || grid[2] > 65535u) {
        return "a grid of " + number(grid[0]) + " x " + number(grid[1]) + " x " + number(grid[2]) +
               " blocks; at most 2147483647 x 65535 x 65535 are possible";
    }
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    if (threads > 1024) return "a block of " + number(threads) + " threads; at most 1024 are possible";
    if (block[0] != uint32_t(kernel.threads) || block[1] != 1 || block[2] != 1) {
        return "blocks of " + number(block[0]) + " x " + number(block[1]) + " x " + number(block[2]) +
               " threads, but the kernel is made for " + number(uint64_t(kernel.threads)) + " x 1 x 1";
    }
    if (shared_bytes != size_t(kernel.shared_bytes)) {
        return number(shared_bytes) + " bytes of shared memory, but the kernel's struct has " +
               number(uint64_t(kernel.shared_bytes));
    }
    if (shared_bytes > function.shared_bytes_allowed) {
        return number(shared_bytes) + " bytes of shared memory, but cuFuncSetAttribute allowed only " +
               number(function.shared_bytes_allowed);
    }
    return "";
}

} // namespace emulator::driver

using namespace emulator::driver;
using emulator::Kind;

#pragma GCC visibility push(default)
extern "C" {

int32_t cuModuleLoadData(void** handle, const void* image) {
    Device* device;
    if (const Result result = open_device(device)) return result;
    if (!image) return INVALID_VALUE;
    const size_t length = library_length(image);
    if (length == 0) return NO_BINARY_FOR_GPU;
    const auto module = std::make_shared<Module>();
    if (const Result result = load_library(image, length, module->library)) return result;
    *handle = modules().add(module);
    return SUCCESS;
}

// Launches that are queued keep the module; its code is never unmapped.
int32_t cuModuleUnload(void* handle) {
    const std::shared_ptr<Module> module = modules().take(handle);
    if (!module) return INVALID_HANDLE;
    const std::lock_guard lock(module->mutex);
    for (const auto& [name, function] : module->functions) functions().take(function.get());
    return SUCCESS;
}

int32_t cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
    const std::shared_ptr<Module> module = modules().find(module_handle);
    if (!module) return INVALID_HANDLE;
    const std::lock_guard lock(module->mutex);
    std::shared_ptr<Function>& function = module->functions[name];
    if (!function) {
        void* entry = dlsym(module->library, name);
        const auto* shape = static_cast<const LaunchShape*>(dlsym(module->library, (std::string(name) + "_launch").c_str()));
        if (!entry || !shape) {
            module->functions.erase(name);
            return NOT_FOUND;
        }
        function = std::make_shared<Function>();
        function->kernel.name = name;
        function->kernel.entry = reinterpret_cast<void (*)(const void*)>(entry);
        function->kernel.threads = shape->threads;
        function->kernel.shared_bytes = shape->shared_bytes;
        function->kernel.argument_bytes = shape->argument_bytes;
        functions().add(function);
    }
    *handle = function.get();
    return SUCCESS;
}

// A variable of the module lives in host memory here; copies from it are allowed all the same.
int32_t cuModuleGetGlobal_v2(uint64_t* address, size_t* bytes, void* handle, const char* name) {
    const std::shared_ptr<Module> module = modules().find(handle);
    if (!module) return INVALID_HANDLE;
    void* variable = dlsym(module->library, name);
    if (!variable) return NOT_FOUND;
    Dl_info info;
    const Elf64_Sym* symbol = nullptr;
    void** place = reinterpret_cast<void**>(const_cast<Elf64_Sym**>(&symbol));
    if (!dladdr1(variable, &info, place, RTLD_DL_SYMENT) || !symbol) return NOT_FOUND;
    {
        Variables& known = variables();
        const std::lock_guard lock(known.mutex);
        known.bytes[reinterpret_cast<uint64_t>(variable)] = symbol->st_size;
    }
    if (address) *address = reinterpret_cast<uint64_t>(variable);
    if (bytes) *bytes = symbol->st_size;
    return SUCCESS;
}

int32_t cuFuncGetAttribute(int32_t* value, int32_t attribute, void* handle) {
    const std::shared_ptr<Function> function = functions().find(handle);
    if (!function) return INVALID_HANDLE;
    switch (attribute) {
    case 0: *value = function->kernel.threads; return SUCCESS;         // threads per block
    case 1: case 2: case 3: case 4: *value = 0; return SUCCESS;        // static shared, constant and local bytes, registers
    case 5: case 6: *value = 90; return SUCCESS;                       // PTX and binary version
    case 8: *value = int32_t(function->shared_bytes_allowed); return SUCCESS;
    default: return INVALID_VALUE;
    }
}

int32_t cuFuncSetAttribute(void* handle, int32_t attribute, int32_t value) {
    constexpr int32_t DYNAMIC_SHARED_BYTES = 8, CARVEOUT = 9;
    const std::shared_ptr<Function> function = functions().find(handle);
    if (!function) return INVALID_HANDLE;
    if (attribute == CARVEOUT) return SUCCESS; // a hint
    if (attribute != DYNAMIC_SHARED_BYTES || value < 0 || size_t(value) > SHARED_BYTES_MOST) return INVALID_VALUE;
    function->shared_bytes_allowed = size_t(value);
    return SUCCESS;
}

int32_t cuLaunchKernel(void* function_handle, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                       uint32_t block_y, uint32_t block_z, uint32_t shared_bytes, void* handle, void** parameters, void** extra) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    const std::shared_ptr<Function> function = functions().find(function_handle);
    if (!function) return INVALID_HANDLE;
    if (extra || !parameters || !parameters[0]) return INVALID_VALUE;
    const uint32_t grid[3] = {grid_x, grid_y, grid_z};
    const uint32_t block[3] = {block_x, block_y, block_z};
    const std::string fault = launch_fault(*function, grid, block, shared_bytes);
    if (!fault.empty()) {
        report_call(Kind::Launch, function->kernel.name.c_str(), "launched with " + fault);
        return INVALID_VALUE;
    }
    // The caller's arguments may change as soon as this returns.
    const auto* bytes = static_cast<const char*>(parameters[0]);
    std::vector<char> arguments(bytes, bytes + function->kernel.argument_bytes);
    enqueue(stream, [=, arguments = std::move(arguments), &device = stream->device] {
        emulator::Launch launch{};
        launch.kernel = &function->kernel;
        launch.arguments = arguments.data();
        std::copy_n(grid, 3, launch.grid);
        std::copy_n(block, 3, launch.block);
        launch.shared_bytes = shared_bytes;
        launch.device = device.ordinal;
        if (!run(launch)) device.lost = true;
    });
    return SUCCESS;
}

int32_t cuLaunchCooperativeKernel(void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**) {
    return NOT_SUPPORTED; // blocks run one after another where threads are few
}

// By threads and shared memory alone; registers are not emulated.
int32_t cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int32_t* blocks, void* handle, int32_t threads,
                                                             size_t shared_bytes, uint32_t) {
    if (!functions().find(handle)) return INVALID_HANDLE;
    if (threads <= 0 || threads > 1024 || shared_bytes > SHARED_BYTES_MOST) return INVALID_VALUE;
    const size_t by_shared_memory = (228 * 1024) / (shared_bytes + 1024);
    *blocks = int32_t(std::min({size_t(2048 / ((threads + 31) / 32 * 32)), by_shared_memory, size_t(32)}));
    return SUCCESS;
}

int32_t cuOccupancyMaxActiveBlocksPerMultiprocessor(int32_t* blocks, void* handle, int32_t threads, size_t shared_bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, threads, shared_bytes, 0);
}

} // extern "C"
#pragma GCC visibility pop
