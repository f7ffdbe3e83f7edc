// NCCL between emulated devices of one process (libnccl.so). Collectives are work in the ranks' streams: the rank that arrives
// last computes for all, in rank order, so that two runs give the same bits. Where ranks disagree, one leaves, or streams wait for
// each other, what would be a hang on real devices is a finding and an error. A rank that aborts says itself that something is
// wrong: that is no finding, and the others hang, as on real devices, until they abort too.

#include "nccl_operations.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

namespace emulator::nccl {

static driver::Handles<Communicator>& communicators() { return driver::immortal<driver::Handles<Communicator>>(); }

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
    std::unique_lock lock(ledger());
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
            work.stream, [clique, batch = work.batch, &device = work.stream->device] { run(clique, batch, device); }, true);
        const std::lock_guard lock(ledger());
        for (const auto& [operation, index] : work.batch) {
            operation->parts[index].sequence = sequence;
            if (operation->arrived > 0) work.stream->demand(sequence); // somebody waits already
        }
        std::erase_if(work.communicator->queued, [](const auto& entry) { return entry.first->is_complete(entry.second); });
        work.communicator->queued.emplace_back(work.stream, sequence);
        find_deadlock();
    }
    const auto returns_at_once = [](const Work& work) { return !work.communicator->blocking; };
    return first == SUCCESS && std::any_of(all.begin(), all.end(), returns_at_once) ? IN_PROGRESS : first;
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

// The beginning of ncclConfig_t; what follows tunes what is not emulated.
struct Config {
    size_t size;
    uint32_t magic, version;
    int32_t blocking; // 0: calls return at once, and ncclCommGetAsyncError says when they are under way
};

struct Cliques {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Clique>> by_id; // null until the first rank comes; gone when all have come
};
static Cliques& cliques() { return driver::immortal<Cliques>(); }

static void* add_communicator(const std::shared_ptr<Clique>& clique, int rank, int device, bool blocking) {
    const auto communicator = std::make_shared<Communicator>();
    communicator->clique = clique;
    communicator->rank = rank;
    communicator->device = device;
    communicator->blocking = blocking;
    communicator->sent.resize(clique->size());
    communicator->received.resize(clique->size());
    return communicators().add(communicator);
}

static Result come(void** handle, int size, const UniqueId& id, int rank, bool blocking) {
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
        const std::lock_guard inner(ledger());
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
    *handle = add_communicator(clique, rank, device->ordinal, blocking);
    if (!blocking) return IN_PROGRESS;
    if (group().depth > 0) {
        group().arrivals.push_back(clique);
        return SUCCESS;
    }
    return wait_for_ranks(*clique);
}

// The rank makes no more calls. What all ranks have called still completes. What waits for a call comes to nothing: at once, and as
// a finding, if the rank ends as if all were well; for this rank alone if it aborts.
static void leave(Communicator& communicator, bool aborts) {
    Clique& clique = *communicator.clique;
    const int rank = communicator.rank;
    const std::lock_guard lock(ledger());
    clique.gone[size_t(rank)] = true;
    clique.aborted[size_t(rank)] = aborts;
    bool breaks_off = false;
    for (const auto& [key, operation] : clique.incomplete) {
        for (Part& part : operation->parts) {
            if (part.rank != rank) continue;
            part.left = true;
            breaks_off = true;
            if (aborts) continue;
            const std::string call = describe(operation->signature);
            driver::report_call(Kind::Collective, "nccl", "rank " + std::to_string(rank) + " left the communicator" +
                                (part.joined ? " and gave up " + call + ", not yet called by rank " + ranks_of(*operation, false)
                                             : " before its " + call + ", already called by rank " + ranks_of(*operation, true)));
        }
    }
    if (breaks_off && !aborts) fail(clique, REMOTE_ERROR);
    if (breaks_off && aborts && clique.error == SUCCESS) clique.error = REMOTE_ERROR;
    clique.changed.notify_all();
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
    case REMOTE_ERROR: return "a rank left the communicator";
    case IN_PROGRESS: return "the call is in progress";
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
    return come(communicator, size, id, rank, true);
}

int32_t ncclCommInitRankConfig(void** communicator, int32_t size, UniqueId id, int32_t rank, const Config* config) {
    return come(communicator, size, id, rank, !config || config->blocking != 0);
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
    for (int rank = 0; rank < size; ++rank) handles[rank] = add_communicator(clique, rank, clique->devices[size_t(rank)], true);
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
    leave(*communicator, false);
    return SUCCESS;
}

int32_t ncclCommAbort(void* handle) {
    const auto communicator = communicators().take(handle);
    if (!communicator) return INVALID_ARGUMENT;
    leave(*communicator, true);
    return SUCCESS;
}

int32_t ncclCommGetAsyncError(void* handle, int32_t* error) {
    const auto communicator = communicators().find(handle);
    if (!communicator) return INVALID_ARGUMENT;
    const Clique& clique = *communicator->clique;
    const std::lock_guard lock(ledger());
    *error = clique.error == SUCCESS && clique.present < clique.size() ? IN_PROGRESS : clique.error;
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
