// NCCL between emulated devices of one process (libnccl.so). Collectives are work in the ranks' streams: the rank that arrives
// last computes for all, in rank order, so that two runs give the same bits. Where ranks disagree, or one leaves, what would be a
// hang on real devices is a finding and an error.

#include "driver.h"
#include "reduce.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

namespace emulator::nccl {

using driver::Device;
using driver::Stream;

enum Result : int32_t {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
};

enum class Call { AllReduce, Reduce, ReduceScatter, AllGather, Broadcast, Transfer };

// What all ranks of an operation must agree on.
struct Signature {
    Call call;
    size_t count; // as in NCCL: of the smaller buffer for gathers and scatters
    int32_t type;
    int32_t reduction;
    int32_t root;
    bool operator==(const Signature&) const = default;
};

static std::string describe(const Signature& signature) {
    static const char* const CALLS[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "send/receive"};
    static const char* const REDUCTIONS[] = {"sum", "product", "maximum", "minimum", "average"};
    std::string text = CALLS[int(signature.call)];
    if (signature.call <= Call::ReduceScatter) text += std::string(" (") + REDUCTIONS[signature.reduction] + ")";
    text += " of " + std::to_string(signature.count) + " " + type_name(signature.type);
    const bool rooted = signature.call == Call::Reduce || signature.call == Call::Broadcast;
    if (rooted) text += " with root " + std::to_string(signature.root);
    return text;
}

// One rank's side of an operation. In a transfer part 0 sends and part 1 receives.
struct Part {
    int rank = -1;
    const void* send = nullptr;
    void* receive = nullptr;
    std::shared_ptr<Stream> stream;
    uint64_t sequence = 0; // of its work in the stream, once that is queued
    bool joined = false;   // the rank has made the call
    bool left = false;     // the rank gave it up (ncclCommAbort)
};

struct Operation {
    Signature signature;
    std::vector<Part> parts;
    size_t joined = 0;
    size_t arrived = 0; // parts whose stream got here
    bool done = false;
    bool failed = false;
};

// Which operation a call belongs to: collectives are counted per communicator (from = to = -1), transfers per pair of ranks.
struct Key {
    int from, to;
    uint64_t number;
    auto operator<=>(const Key&) const = default;
};

// The ranks that share a unique id.
struct Clique {
    explicit Clique(int size) : devices(size_t(size), -1), gone(size_t(size), false) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<int> devices; // by rank; -1: has not come yet
    std::vector<bool> gone;   // by rank
    size_t present = 0;
    Result error = SUCCESS;
    std::map<Key, std::shared_ptr<Operation>> incomplete; // some rank has not made the call yet
    size_t size() const { return devices.size(); }
};

struct Communicator {
    std::shared_ptr<Clique> clique;
    int rank;
    int device;
    uint64_t collectives = 0;              // made so far
    std::vector<uint64_t> sent, received;  // by peer
    std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> queued;
};

static driver::Handles<Communicator>& communicators() { return driver::immortal<driver::Handles<Communicator>>(); }

// ---- operations ----

// (clique.mutex is held)
static void fail(Clique& clique, Result error) {
    if (clique.error == SUCCESS) clique.error = error;
    for (const auto& [key, operation] : clique.incomplete) operation->failed = true;
    clique.incomplete.clear();
    clique.changed.notify_all();
}

static std::string ranks_of(const Operation& operation, bool joined) {
    std::string text;
    for (const Part& part : operation.parts) {
        if (part.joined == joined) text += (text.empty() ? "" : ", ") + std::to_string(part.rank);
    }
    return text;
}

struct Request {
    std::shared_ptr<Communicator> communicator;
    Signature signature;
    int peer; // of a transfer
    bool sends;
    const void* send;
    void* receive;
    std::shared_ptr<Stream> stream;
};

// Finds or makes the operation that a call is part of, and compares the call with those of the other ranks.
static Result join(const Request& request, std::shared_ptr<Operation>& operation, size_t& index) {
    Communicator& communicator = *request.communicator;
    Clique& clique = *communicator.clique;
    const int rank = communicator.rank;
    const std::lock_guard lock(clique.mutex);
    if (clique.error != SUCCESS) return clique.error;
    const bool transfer = request.signature.call == Call::Transfer;
    Key key{-1, -1, communicator.collectives};
    if (transfer) {
        const auto peer = size_t(request.peer);
        key = request.sends ? Key{rank, request.peer, communicator.sent[peer]++}
                            : Key{request.peer, rank, communicator.received[peer]++};
    } else {
        ++communicator.collectives;
    }
    std::shared_ptr<Operation>& known = clique.incomplete[key];
    if (!known) {
        known = std::make_shared<Operation>();
        known->signature = request.signature;
        known->parts.resize(transfer ? 2 : clique.size());
        for (size_t i = 0; i < known->parts.size(); ++i) known->parts[i].rank = transfer ? (i == 0 ? key.from : key.to) : int(i);
    }
    operation = known;
    index = transfer ? (request.sends ? 0 : 1) : size_t(rank);
    if (operation->signature != request.signature) {
        driver::report_call(Kind::Collective, "nccl", "rank " + std::to_string(rank) + " calls " + describe(request.signature) +
                            " where " + describe(operation->signature) + " was called by rank " + ranks_of(*operation, true));
        fail(clique, INVALID_USAGE);
        return INVALID_USAGE;
    }
    for (const Part& part : operation->parts) {
        if (part.joined || !clique.gone[size_t(part.rank)]) continue;
        driver::report_call(Kind::Collective, "nccl", "rank " + std::to_string(rank) + " calls " + describe(request.signature) +
                            " after rank " + std::to_string(part.rank) + " left the communicator");
        fail(clique, REMOTE_ERROR);
        return REMOTE_ERROR;
    }
    Part& part = operation->parts[index];
    part.send = request.send;
    part.receive = request.receive;
    part.stream = request.stream;
    part.joined = true;
    if (++operation->joined == operation->parts.size()) clique.incomplete.erase(key);
    return SUCCESS;
}

static size_t send_bytes(const Operation& operation, size_t index) {
    const size_t bytes = operation.signature.count * type_bytes(operation.signature.type);
    switch (operation.signature.call) {
    case Call::ReduceScatter: return bytes * operation.parts.size();
    case Call::Broadcast: return int(index) == operation.signature.root ? bytes : 0;
    case Call::Transfer: return index == 0 ? bytes : 0;
    default: return bytes;
    }
}

static size_t receive_bytes(const Operation& operation, size_t index) {
    const size_t bytes = operation.signature.count * type_bytes(operation.signature.type);
    switch (operation.signature.call) {
    case Call::AllGather: return bytes * operation.parts.size();
    case Call::Reduce: return int(index) == operation.signature.root ? bytes : 0;
    case Call::Transfer: return index == 1 ? bytes : 0;
    default: return bytes;
    }
}

// Moves the numbers once all parts have arrived. False after a finding (memory).
static bool compute(const Operation& operation) {
    const auto& [call, count, type, reduction, root] = operation.signature;
    const auto& parts = operation.parts;
    const size_t bytes = count * type_bytes(type);
    bool sound = true;
    for (size_t i = 0; i < parts.size(); ++i) {
        const size_t length = send_bytes(operation, i);
        if (length > 0 && !check_readable(parts[i].send, length, "nccl (send buffer)")) sound = false;
    }
    for (size_t i = 0; i < parts.size(); ++i) {
        const size_t length = receive_bytes(operation, i);
        if (length > 0 && !mark_written(parts[i].receive, length, "nccl (receive buffer)")) sound = false;
    }
    if (!sound || bytes == 0) return sound;
    std::vector<const char*> sends;
    std::vector<char*> receives;
    for (const Part& part : parts) {
        sends.push_back(static_cast<const char*>(part.send));
        receives.push_back(static_cast<char*>(part.receive));
    }
    switch (call) {
    case Call::AllReduce:
        reduce(sends, receives, count, type, Reduction(reduction));
        break;
    case Call::Reduce:
        reduce(sends, {receives[size_t(root)]}, count, type, Reduction(reduction));
        break;
    case Call::ReduceScatter:
        for (char* receive : receives) {
            reduce(sends, {receive}, count, type, Reduction(reduction));
            for (const char*& send : sends) send += bytes;
        }
        break;
    case Call::AllGather:
        for (size_t from = 0; from < sends.size(); ++from) {
            for (char* receive : receives) std::memmove(receive + from * bytes, sends[from], bytes);
        }
        break;
    case Call::Broadcast:
        for (char* receive : receives) std::memmove(receive, sends[size_t(root)], bytes);
        break;
    case Call::Transfer:
        std::memmove(receives[1], sends[0], bytes);
        break;
    }
    return true;
}

using Batch = std::vector<std::pair<std::shared_ptr<Operation>, size_t>>; // operation and index of the part

// The work in a stream for what one group put there: arrives everywhere, then waits for everything, so that sends and receives
// of a group do not wait for each other.
static void run(Clique& clique, const Batch& batch, Device& device) {
    std::unique_lock lock(clique.mutex);
    for (const auto& [operation, index] : batch) {
        if (device.lost) operation->failed = true;
        for (const Part& part : operation->parts) {
            if (part.sequence) part.stream->demand(part.sequence); // lazy streams: this one waits for those
        }
        if (++operation->arrived < operation->parts.size() || operation->failed) continue;
        lock.unlock();
        const bool sound = compute(*operation);
        lock.lock();
        (sound ? operation->done : operation->failed) = true;
    }
    clique.changed.notify_all();
    clique.changed.wait(lock, [&] {
        return std::all_of(batch.begin(), batch.end(), [](const auto& entry) { return entry.first->done || entry.first->failed; });
    });
    for (const auto& [operation, index] : batch) {
        if (operation->failed && !operation->parts[index].left) device.lost = true;
    }
}

// ---- groups: what is called between ncclGroupStart and ncclGroupEnd is queued at the end ----

struct Group {
    int depth = 0;
    std::vector<Request> requests;
    std::vector<std::shared_ptr<Clique>> arrivals; // ncclCommInitRank waits for the other ranks
};
static Group& group() { // (behind a pointer: thread-local storage of a library loaded late is scarce)
    static thread_local Group* object = nullptr;
    if (!object) object = new Group;
    return *object;
}

static Result wait_for_ranks(Clique& clique) {
    std::unique_lock lock(clique.mutex);
    clique.changed.wait(lock, [&] { return clique.present == clique.size() || clique.error != SUCCESS; });
    return clique.present == clique.size() ? SUCCESS : clique.error; // what the others did after that is not this call's error
}

static Result end_group() {
    const std::vector<Request> requests = std::move(group().requests);
    const std::vector<std::shared_ptr<Clique>> arrivals = std::move(group().arrivals);
    group().requests.clear();
    group().arrivals.clear();
    Result first = SUCCESS;
    const auto note = [&](Result result) {
        if (first == SUCCESS) first = result;
    };
    for (const auto& clique : arrivals) note(wait_for_ranks(*clique));

    // one piece of work per communicator and stream, in the order of their first calls
    struct Work {
        std::shared_ptr<Communicator> communicator;
        std::shared_ptr<Stream> stream;
        Batch batch;
    };
    std::vector<Work> all;
    for (const Request& request : requests) {
        std::shared_ptr<Operation> operation;
        size_t index = 0;
        if (const Result result = join(request, operation, index)) {
            note(result);
            continue;
        }
        auto found = std::find_if(all.begin(), all.end(), [&](const Work& work) {
            return work.communicator == request.communicator && work.stream == request.stream;
        });
        if (found == all.end()) found = all.insert(all.end(), {request.communicator, request.stream, {}});
        found->batch.emplace_back(operation, index);
    }
    for (const Work& work : all) {
        const std::shared_ptr<Clique> clique = work.communicator->clique;
        const uint64_t sequence = driver::enqueue(
            work.stream, [clique, batch = work.batch, &device = work.stream->device] { run(*clique, batch, device); }, true);
        const std::lock_guard lock(clique->mutex);
        for (const auto& [operation, index] : work.batch) {
            operation->parts[index].sequence = sequence;
            if (operation->arrived > 0) work.stream->demand(sequence); // somebody waits already
        }
        std::erase_if(work.communicator->queued, [](const auto& entry) { return entry.first->is_complete(entry.second); });
        work.communicator->queued.emplace_back(work.stream, sequence);
    }
    return first;
}

static Result submit(void* handle, Signature signature, int peer, bool sends, const void* send, void* receive,
                     void* stream_handle) {
    Request request{communicators().find(handle), signature, peer, sends, send, receive, nullptr};
    if (!request.communicator) return INVALID_ARGUMENT;
    const Communicator& communicator = *request.communicator;
    const int size = int(communicator.clique->size());
    if (type_bytes(signature.type) == 0) return INVALID_ARGUMENT;
    if (signature.reduction < 0 || signature.reduction > int(Reduction::Average)) return INVALID_ARGUMENT;
    if (signature.root < 0 || signature.root >= size || peer < 0 || peer >= size) return INVALID_ARGUMENT;
    if (driver::open_stream(stream_handle, request.stream)) return UNHANDLED_CUDA_ERROR;
    // Everything of a rank must live on its device (but buffers that this rank's side of the call does not use).
    for (const void* pointer : {send, static_cast<const void*>(receive)}) {
        const int owner = pointer && signature.count > 0 ? device_of(pointer) : communicator.device;
        if (owner == communicator.device && request.stream->device.ordinal == communicator.device) continue;
        driver::report_call(Kind::Collective, "nccl", "rank " + std::to_string(communicator.rank) + ", which is device " +
                            std::to_string(communicator.device) + ", passes a buffer of device " + std::to_string(owner) +
                            " and a stream of device " + std::to_string(request.stream->device.ordinal));
        return INVALID_ARGUMENT;
    }
    group().requests.push_back(std::move(request));
    return group().depth > 0 ? SUCCESS : end_group();
}

// ---- coming and leaving ----

struct UniqueId {
    char internal[128];
};

struct Cliques {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Clique>> by_id; // null until the first rank comes; gone when all have come
};
static Cliques& cliques() { return driver::immortal<Cliques>(); }

static void* add_communicator(const std::shared_ptr<Clique>& clique, int rank, int device) {
    const auto communicator = std::make_shared<Communicator>();
    communicator->clique = clique;
    communicator->rank = rank;
    communicator->device = device;
    communicator->sent.resize(clique->size());
    communicator->received.resize(clique->size());
    return communicators().add(communicator);
}

static Result come(void** handle, int size, const UniqueId& id, int rank) {
    Device* device;
    if (driver::open_device(device)) return UNHANDLED_CUDA_ERROR;
    if (size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    const std::string key(id.internal, sizeof id.internal);
    std::shared_ptr<Clique> clique;
    {
        const std::lock_guard lock(cliques().mutex);
        const auto found = cliques().by_id.find(key);
        if (found == cliques().by_id.end()) {
            driver::report_call(Kind::Collective, "ncclCommInitRank",
                                "the id was not made by ncclGetUniqueId in this process, or its ranks are complete: "
                                "emulated devices live in one process");
            return INVALID_ARGUMENT;
        }
        if (!found->second) found->second = std::make_shared<Clique>(size);
        clique = found->second;
        const std::lock_guard inner(clique->mutex);
        std::string fault;
        const auto& devices = clique->devices;
        if (int(clique->size()) != size) {
            fault = "it expects " + std::to_string(size) + " ranks, others " + std::to_string(clique->size());
        } else if (devices[size_t(rank)] >= 0) {
            fault = "this rank has already come";
        } else if (std::count(devices.begin(), devices.end(), device->ordinal)) {
            fault = "another rank has the same device";
        }
        if (!fault.empty()) {
            driver::report_call(Kind::Collective, "ncclCommInitRank", "rank " + std::to_string(rank) + ": " + fault);
            fail(*clique, INVALID_USAGE);
            cliques().by_id.erase(found);
            return INVALID_USAGE;
        }
        clique->devices[size_t(rank)] = device->ordinal;
        if (++clique->present == clique->size()) cliques().by_id.erase(found);
        clique->changed.notify_all();
    }
    *handle = add_communicator(clique, rank, device->ordinal);
    if (group().depth > 0) {
        group().arrivals.push_back(clique);
        return SUCCESS;
    }
    return wait_for_ranks(*clique);
}

// The rank makes no more calls. What all ranks have called still completes; what waits for a call is freed, with an error for the
// other ranks that wait.
static void leave(Communicator& communicator) {
    Clique& clique = *communicator.clique;
    const int rank = communicator.rank;
    const std::lock_guard lock(clique.mutex);
    clique.gone[size_t(rank)] = true;
    bool breaks_off = false;
    for (const auto& [key, operation] : clique.incomplete) {
        for (Part& part : operation->parts) {
            if (part.rank != rank) continue;
            part.left = true;
            breaks_off = true;
            const std::string call = describe(operation->signature);
            driver::report_call(Kind::Collective, "nccl", "rank " + std::to_string(rank) + " left the communicator" +
                                (part.joined ? " and gave up " + call + ", not yet called by rank " + ranks_of(*operation, false)
                                             : " before its " + call + ", already called by rank " + ranks_of(*operation, true)));
        }
    }
    if (breaks_off) fail(clique, REMOTE_ERROR);
}

static void finish(Communicator& communicator) {
    for (const auto& [stream, sequence] : communicator.queued) stream->wait(sequence);
}

} // namespace emulator::nccl

using namespace emulator::nccl;

#pragma GCC visibility push(default)
extern "C" {

int32_t ncclGetVersion(int32_t* version) {
    *version = 23000; // 2.30.0
    return SUCCESS;
}

const char* ncclGetErrorString(int32_t result) {
    switch (result) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA_ERROR: return "a call of the emulated driver failed";
    case SYSTEM_ERROR: return "a call of the operating system failed";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "the ranks disagree; see the findings";
    case REMOTE_ERROR: return "a rank left the communicator; see the findings";
    default: return "unknown result";
    }
}

const char* ncclGetLastError(void*) { return "see the findings"; }

int32_t ncclGetUniqueId(UniqueId* id) {
    std::memset(id->internal, 0, sizeof id->internal);
    if (getrandom(id->internal, 16, 0) != 16) return SYSTEM_ERROR;
    const std::lock_guard lock(cliques().mutex);
    cliques().by_id[std::string(id->internal, sizeof id->internal)] = nullptr;
    return SUCCESS;
}

int32_t ncclCommInitRank(void** communicator, int32_t size, UniqueId id, int32_t rank) {
    return come(communicator, size, id, rank);
}

int32_t ncclCommInitRankConfig(void** communicator, int32_t size, UniqueId id, int32_t rank, void*) {
    return come(communicator, size, id, rank);
}

int32_t ncclCommInitAll(void** handles, int32_t size, const int32_t* devices) {
    if (size < 1 || size > emulator::settings().devices) return INVALID_ARGUMENT;
    const auto clique = std::make_shared<Clique>(size);
    for (int rank = 0; rank < size; ++rank) {
        const int device = devices ? devices[rank] : rank;
        if (device < 0 || device >= emulator::settings().devices) return INVALID_ARGUMENT;
        if (std::count(clique->devices.begin(), clique->devices.end(), device)) return INVALID_USAGE;
        clique->devices[size_t(rank)] = device;
    }
    clique->present = clique->size();
    for (int rank = 0; rank < size; ++rank) handles[rank] = add_communicator(clique, rank, clique->devices[size_t(rank)]);
    return SUCCESS;
}

int32_t ncclCommFinalize(void* handle) {
    const auto communicator = communicators().find(handle);
    if (!communicator) return INVALID_ARGUMENT;
    finish(*communicator);
    return SUCCESS;
}

int32_t ncclCommDestroy(void* handle) {
    const auto communicator = communicators().take(handle);
    if (!communicator) return INVALID_ARGUMENT;
    finish(*communicator);
    leave(*communicator);
    return SUCCESS;
}

int32_t ncclCommAbort(void* handle) {
    const auto communicator = communicators().take(handle);
    if (!communicator) return INVALID_ARGUMENT;
    leave(*communicator);
    return SUCCESS;
}

int32_t ncclCommGetAsyncError(void* handle, int32_t* error) {
    const auto communicator = communicators().find(handle);
    if (!communicator) return INVALID_ARGUMENT;
    const std::lock_guard lock(communicator->clique->mutex);
    *error = communicator->clique->error;
    return SUCCESS;
}

int32_t ncclCommCount(void* handle, int32_t* count) {
    const auto communicator = communicators().find(handle);
    if (!communicator) return INVALID_ARGUMENT;
    *count = int32_t(communicator->clique->size());
    return SUCCESS;
}

int32_t ncclCommCuDevice(void* handle, int32_t* device) {
    const auto communicator = communicators().find(handle);
    if (!communicator) return INVALID_ARGUMENT;
    *device = communicator->device;
    return SUCCESS;
}

int32_t ncclCommUserRank(void* handle, int32_t* rank) {
    const auto communicator = communicators().find(handle);
    if (!communicator) return INVALID_ARGUMENT;
    *rank = communicator->rank;
    return SUCCESS;
}

int32_t ncclGroupStart() {
    ++group().depth;
    return SUCCESS;
}

int32_t ncclGroupEnd() {
    if (group().depth == 0) return INVALID_USAGE;
    return --group().depth > 0 ? SUCCESS : end_group();
}

int32_t ncclAllReduce(const void* send, void* receive, size_t count, int32_t type, int32_t reduction, void* communicator,
                      void* stream) {
    return submit(communicator, {Call::AllReduce, count, type, reduction, 0}, 0, false, send, receive, stream);
}

int32_t ncclReduce(const void* send, void* receive, size_t count, int32_t type, int32_t reduction, int32_t root,
                   void* communicator, void* stream) {
    return submit(communicator, {Call::Reduce, count, type, reduction, root}, 0, false, send, receive, stream);
}

int32_t ncclReduceScatter(const void* send, void* receive, size_t count, int32_t type, int32_t reduction, void* communicator,
                          void* stream) {
    return submit(communicator, {Call::ReduceScatter, count, type, reduction, 0}, 0, false, send, receive, stream);
}

int32_t ncclAllGather(const void* send, void* receive, size_t count, int32_t type, void* communicator, void* stream) {
    return submit(communicator, {Call::AllGather, count, type, 0, 0}, 0, false, send, receive, stream);
}

int32_t ncclBroadcast(const void* send, void* receive, size_t count, int32_t type, int32_t root, void* communicator,
                      void* stream) {
    return submit(communicator, {Call::Broadcast, count, type, 0, root}, 0, false, send, receive, stream);
}

int32_t ncclSend(const void* send, size_t count, int32_t type, int32_t peer, void* communicator, void* stream) {
    return submit(communicator, {Call::Transfer, count, type, 0, 0}, peer, true, send, nullptr, stream);
}

int32_t ncclRecv(void* receive, size_t count, int32_t type, int32_t peer, void* communicator, void* stream) {
    return submit(communicator, {Call::Transfer, count, type, 0, 0}, peer, false, nullptr, receive, stream);
}

} // extern "C"
#pragma GCC visibility pop
