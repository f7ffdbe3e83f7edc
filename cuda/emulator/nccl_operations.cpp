// Emulated collectives: calls of several ranks become one operation, streams arrive at it, the last one computes for all.

#include "nccl_operations.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace emulator::nccl {

std::mutex& ledger() { return driver::immortal<std::mutex>(); }

std::string describe(const Signature& signature) {
    static const char* const CALLS[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "send/receive"};
    static const char* const REDUCTIONS[] = {"sum", "product", "maximum", "minimum", "average"};
    std::string text = CALLS[int(signature.call)];
    if (signature.call <= Call::ReduceScatter) text += std::string(" (") + REDUCTIONS[signature.reduction] + ")";
    text += " of " + std::to_string(signature.count) + " " + type_name(signature.type);
    const bool rooted = signature.call == Call::Reduce || signature.call == Call::Broadcast;
    if (rooted) text += " with root " + std::to_string(signature.root);
    return text;
}

void fail(Clique& clique, Result error) {
    if (clique.error == SUCCESS) clique.error = error;
    for (const auto& [key, operation] : clique.incomplete) operation->failed = true;
    clique.incomplete.clear();
    clique.changed.notify_all();
}

std::string ranks_of(const Operation& operation, bool joined) {
    std::string text;
    for (const Part& part : operation.parts) {
        if (part.joined == joined) text += (text.empty() ? "" : ", ") + std::to_string(part.rank);
    }
    return text;
}

Result join(const Request& request, std::shared_ptr<Operation>& operation, size_t& index) {
    Communicator& communicator = *request.communicator;
    Clique& clique = *communicator.clique;
    const int rank = communicator.rank;
    const std::lock_guard lock(ledger());
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
        if (clique.aborted[size_t(part.rank)]) return clique.error = REMOTE_ERROR;
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

// ---- in the streams ----

// What a stream waits in, by stream.
static std::map<Stream*, const Batch*>& waiting() { return driver::immortal<std::map<Stream*, const Batch*>>(); }

static bool is_open(const Operation& operation) { return !operation.done && !operation.failed; }

// Whether `from` waits for something that lies in `to` behind what `to` itself waits in, and so on: `path` is where this leads.
static bool waits_for(Stream* from, Stream* to, std::vector<Stream*>& path) {
    if (std::find(path.begin(), path.end(), from) != path.end()) return false;
    const auto found = waiting().find(from);
    if (found == waiting().end()) return false;
    path.push_back(from);
    for (const auto& [operation, index] : *found->second) {
        if (!is_open(*operation)) continue;
        for (const Part& part : operation->parts) {
            if (!part.joined || part.arrived) continue;
            if (part.stream.get() == to || waits_for(part.stream.get(), to, path)) return true;
        }
    }
    path.pop_back();
    return false;
}

void find_deadlock() {
    for (const auto& [stream, batch] : waiting()) {
        std::vector<Stream*> circle;
        if (!waits_for(stream, stream, circle)) continue;
        std::string text = "streams of different devices wait for each other: ";
        for (Stream* member : circle) {
            const auto& [operation, index] = waiting()[member]->front();
            text += (member == circle.front() ? "device " : ", device ") + std::to_string(member->device.ordinal) + " in " +
                    describe(operation->signature) + " of ranks " + ranks_of(*operation, true);
        }
        driver::report_call(Kind::Deadlock, "nccl", text + ": all ranks must make the calls of all communicators in one order");
        for (Stream* member : circle) {
            for (const auto& [operation, index] : *waiting()[member]) operation->failed = true;
        }
        return;
    }
}

void run(const std::shared_ptr<Clique>& clique, const Batch& batch, Device& device) {
    std::unique_lock lock(ledger());
    Stream* stream = nullptr;
    for (const auto& [operation, index] : batch) {
        Part& own = operation->parts[index];
        stream = own.stream.get();
        own.arrived = true;
        if (device.lost) operation->failed = true;
        for (const Part& part : operation->parts) {
            if (part.sequence) part.stream->demand(part.sequence); // lazy streams: this one waits for those
        }
        if (++operation->arrived < operation->parts.size() || operation->failed || own.left) continue;
        lock.unlock();
        const bool sound = compute(*operation);
        lock.lock();
        (sound ? operation->done : operation->failed) = true;
    }
    waiting()[stream] = &batch;
    find_deadlock();
    clique->changed.notify_all();
    const auto is_over = [](const auto& entry) { return !is_open(*entry.first) || entry.first->parts[entry.second].left; };
    // A circle leads through other communicators, which do not tell this one that it was found.
    while (!std::all_of(batch.begin(), batch.end(), is_over)) clique->changed.wait_for(lock, std::chrono::milliseconds(20));
    waiting().erase(stream);
    for (const auto& [operation, index] : batch) {
        if (operation->failed && !operation->parts[index].left) device.lost = true;
    }
}

} // namespace emulator::nccl
