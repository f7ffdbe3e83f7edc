// What the checkers found, kept until somebody reads it.
#include <algorithm>
#include <mutex>

#include "findings.h"
#include "places.h"
#include "worker.h"

namespace emulator {

static std::mutex& findings_mutex = *new std::mutex; // never destroyed: threads of the pool outlive main
static std::vector<Finding>& findings = *new std::vector<Finding>;

const char* name_of(Kind kind) {
    switch (kind) {
    case Kind::OutOfBounds: return "out_of_bounds";
    case Kind::Misaligned: return "misaligned";
    case Kind::UseAfterFree: return "use_after_free";
    case Kind::Uninitialised: return "uninitialised";
    case Kind::HostPointer: return "host_pointer";
    case Kind::Race: return "race";
    case Kind::Barrier: return "barrier";
    case Kind::Deadlock: return "deadlock";
    case Kind::WarpDivergence: return "warp_divergence";
    case Kind::MissingWait: return "missing_wait";
    case Kind::SharedBounds: return "shared_bounds";
    case Kind::Leak: return "leak";
    case Kind::Launch: return "launch";
    case Kind::Collective: return "collective";
    case Kind::Stream: return "stream";
    }
    return "unknown";
}

// Of several findings of one kind at one place, that of the block that starts first is kept, so that what is reported does not
// depend on which OS thread was faster. Within a block it is the first.
static bool comes_before(const Finding& a, const Finding& b) {
    for (int i = 2; i >= 0; --i) {
        if (a.block[i] != b.block[i]) return (a.block[i] < b.block[i]) != (settings().reverse != 0);
    }
    return false;
}

void report(const Finding& finding) {
    std::lock_guard lock(findings_mutex);
    for (Finding& other : findings) {
        if (other.kind != finding.kind || other.kernel != finding.kernel || other.code != finding.code) continue;
        if (finding.code == nullptr && (other.address != finding.address || other.text != finding.text)) continue;
        if (comes_before(finding, other)) other = finding;
        return;
    }
    findings.push_back(finding);
}

Finding finding_here(Kind kind, const void* code, int thread) {
    Finding finding{};
    finding.kind = kind;
    finding.kernel = current_worker->launch->kernel->name;
    finding.code = const_cast<void*>(code);
    finding.block[0] = int32_t(emulator_position.block.x);
    finding.block[1] = int32_t(emulator_position.block.y);
    finding.block[2] = int32_t(emulator_position.block.z);
    finding.thread = thread >= 0 ? thread : int32_t(emulator_position.thread);
    return finding;
}

// ---- JSON ----

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        if (uint8_t(c) < 32) result += describe("\\u%04x", unsigned(uint8_t(c)));
        else result += c;
    }
    return result + '"';
}

size_t copy_out(const std::string& from, char* text, size_t capacity) {
    if (capacity > 0) {
        const size_t bytes = std::min(from.size(), capacity - 1);
        memcpy(text, from.data(), bytes);
        text[bytes] = 0;
    }
    return from.size();
}

static std::string to_json(const Finding& finding) {
    std::string json = "{\"kind\": " + quoted(name_of(finding.kind)) + ", \"kernel\": " + quoted(finding.kernel);
    json += ", \"place\": " + quoted(place_of(finding.code));
    json += describe(", \"block\": [%d, %d, %d], \"thread\": %d", finding.block[0], finding.block[1], finding.block[2], finding.thread);
    json += describe(", \"address\": %llu", (unsigned long long)finding.address);
    json += ", \"text\": " + quoted(finding.text);
    json += ", \"other_place\": " + quoted(place_of(finding.other_code));
    return json + describe(", \"other_thread\": %d}", finding.other_thread);
}

static std::string findings_json() {
    std::vector<Finding> all;
    {
        std::lock_guard lock(findings_mutex);
        all = findings;
    }
    std::vector<const void*> codes;
    for (const Finding& finding : all) {
        codes.push_back(finding.code);
        codes.push_back(finding.other_code);
    }
    resolve(codes);
    std::stable_sort(all.begin(), all.end(), [](const Finding& a, const Finding& b) {
        return a.kernel != b.kernel ? a.kernel < b.kernel : a.kind != b.kind ? a.kind < b.kind : a.code != b.code ? a.code < b.code : a.address < b.address;
    });
    // One source line may be several places in the code: loops are unrolled.
    std::string json = "[", last;
    for (const Finding& finding : all) {
        const std::string key = finding.code == nullptr ? "" : std::string(name_of(finding.kind)) + finding.kernel + place_of(finding.code);
        if (!key.empty() && key == last) continue;
        last = key;
        json += (json.size() > 1 ? ",\n " : "") + to_json(finding);
    }
    return json + "]";
}

} // namespace emulator

EMULATOR_API size_t emulator_findings(char* text, size_t capacity) {
    return emulator::copy_out(emulator::findings_json(), text, capacity);
}
EMULATOR_API void emulator_clear_findings() {
    std::lock_guard lock(emulator::findings_mutex);
    emulator::findings.clear();
}
