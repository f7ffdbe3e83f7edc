// From a return address in a kernel to the line of its source, by addr2line on the module's file, only when somebody asks.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>

#include "places.h"
#include "worker.h"

namespace emulator {

std::string describe(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return text;
}

// A source line, and the lines that the call it was inlined into came from: "innermost|caller|...".
struct Place {
    std::string line;  // innermost frame outside of include/
    std::string chain; // all frames; empty where nothing is known
};

static std::mutex& places_mutex = *new std::mutex; // never destroyed: threads of the pool outlive main
static std::map<const void*, Place>& places = *new std::map<const void*, Place>;

// The module's file as a child process can open it: a module in memory has a path under /proc/self.
static std::string openable(const char* path) {
    const std::string self = "/proc/self/";
    const std::string text = path;
    return text.compare(0, self.size(), self) == 0 ? describe("/proc/%d/", int(getpid())) + text.substr(self.size()) : text;
}

// "/a/b/cuda/gemm.cu" -> "cuda/gemm.cu", with anything else left as it is but for its directories above the last.
static std::string shorten(const std::string& path) {
    size_t cut = path.rfind("/cuda/");
    if (cut == std::string::npos) {
        cut = path.rfind('/');
        if (cut != std::string::npos && cut > 0) cut = path.rfind('/', cut - 1);
    }
    return cut == std::string::npos ? path : path.substr(cut + 1);
}

static bool is_device_layer(const std::string& line) {
    return line.find("/include/") != std::string::npos || line.find("/emulator/") != std::string::npos;
}

// Reads addr2line's answer for one address: frames from the innermost outwards.
static Place place_from(const std::vector<std::string>& frames) {
    Place place;
    for (const std::string& frame : frames) {
        if (place.line.empty() && !is_device_layer(frame)) place.line = shorten(frame);
        place.chain += frame + '|';
    }
    if (place.line.empty() && !frames.empty()) place.line = shorten(frames.front());
    return place;
}

static Place fallback(const void* code) {
    Dl_info information;
    Place place;
    if (dladdr(code, &information) && information.dli_sname != nullptr) {
        place.line = describe("%s+0x%zx", information.dli_sname, size_t(static_cast<const char*>(code) - static_cast<const char*>(information.dli_saddr)));
    } else {
        place.line = describe("%p", code);
    }
    return place;
}

static void resolve_in_module(const std::string& file, const char* base, const std::vector<const void*>& codes) {
    // -a prints each address before its frames: 0x and 16 digits.
    for (size_t first = 0; first < codes.size(); first += 500) {
        std::string command = "addr2line -a -i -e '" + openable(file.c_str()) + "'";
        std::vector<const void*> asked;
        for (size_t i = first; i < codes.size() && i < first + 500; ++i) {
            // The call lies before the address to which it returns.
            command += describe(" 0x%zx", size_t(static_cast<const char*>(codes[i]) - base) - 1);
            asked.push_back(codes[i]);
        }
        command += " 2>/dev/null";
        FILE* pipe = popen(command.c_str(), "r");
        if (pipe == nullptr) return;
        char buffer[4096];
        size_t next = 0;
        std::vector<std::string> frames;
        const auto finish = [&] {
            if (next > 0 && !frames.empty() && frames.front().find('?') == std::string::npos) places[asked[next - 1]] = place_from(frames);
            frames.clear();
        };
        while (fgets(buffer, sizeof buffer, pipe) != nullptr) {
            std::string line = buffer;
            while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
            const size_t note = line.find(" (discriminator");
            if (note != std::string::npos) line.resize(note);
            if (line.compare(0, 2, "0x") == 0 && line.find(':') == std::string::npos) {
                finish();
                if (++next > asked.size()) break;
            } else {
                frames.push_back(line);
            }
        }
        finish();
        pclose(pipe);
    }
}

void resolve(const std::vector<const void*>& codes) {
    std::lock_guard lock(places_mutex);
    std::map<std::pair<std::string, const char*>, std::vector<const void*>> by_module;
    for (const void* code : codes) {
        Dl_info information;
        if (code == nullptr || places.count(code) != 0) continue;
        if (dladdr(code, &information) && information.dli_fname != nullptr) {
            by_module[{information.dli_fname, static_cast<const char*>(information.dli_fbase)}].push_back(code);
        } else {
            places[code] = fallback(code);
        }
    }
    for (const auto& [module, its_codes] : by_module) {
        resolve_in_module(module.first, module.second, its_codes);
        for (const void* code : its_codes) {
            if (places.count(code) == 0) places[code] = fallback(code);
        }
    }
}

static Place find(const void* code) {
    resolve({code});
    std::lock_guard lock(places_mutex);
    return places[code];
}

std::string place_of(const void* code) { return code == nullptr ? "" : find(code).line; }

bool same_place(const void* a, const void* b) {
    if (a == b) return true;
    const std::string chain_a = find(a).chain, chain_b = find(b).chain;
    return chain_a.empty() || chain_b.empty() || chain_a == chain_b; // in doubt no fault
}

} // namespace emulator
