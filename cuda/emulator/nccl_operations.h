// What emulated collectives are made of: the ranks that share an id, the operations they make together, and the work that an
// operation is in each rank's stream. nccl.cpp exports NCCL's functions over them.
#pragma once

#include "driver.h"
#include "reduce.h"

#include <map>
#include <string>

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
    IN_PROGRESS = 7,
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

std::string describe(const Signature& signature);

// One rank's side of an operation. In a transfer part 0 sends and part 1 receives.
struct Part {
    int rank = -1;
    const void* send = nullptr;
    void* receive = nullptr;
    std::shared_ptr<Stream> stream;
    uint64_t sequence = 0; // of its work in the stream, once that is queued
    bool joined = false;   // the rank has made the call
    bool arrived = false;  // its stream got here
    bool left = false;     // the rank gave it up (ncclCommAbort)
};

struct Operation {
    Signature signature;
    std::vector<Part> parts;
    size_t joined = 0;
    size_t arrived = 0;
    bool done = false;
    bool failed = false;
};

// Which operation a call belongs to: collectives are counted per communicator (from = to = -1), transfers per pair of ranks.
struct Key {
    int from, to;
    uint64_t number;
    auto operator<=>(const Key&) const = default;
};

// Guards everything here: whether streams wait for each other shows only across communicators.
std::mutex& ledger();

// The ranks that share a unique id.
struct Clique {
    explicit Clique(int size) : devices(size_t(size), -1), gone(size_t(size)), aborted(size_t(size)) {}
    std::condition_variable changed;
    std::vector<int> devices; // by rank; -1: has not come yet
    std::vector<bool> gone;    // by rank: it makes no more calls,
    std::vector<bool> aborted; // and said that something is wrong
    size_t present = 0;
    Result error = SUCCESS;
    std::map<Key, std::shared_ptr<Operation>> incomplete; // some rank has not made the call yet
    size_t size() const { return devices.size(); }
};

struct Communicator {
    std::shared_ptr<Clique> clique;
    int rank;
    int device;
    bool blocking = true;
    uint64_t collectives = 0;             // made so far
    std::vector<uint64_t> sent, received; // by peer
    std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> queued;
};

struct Request {
    std::shared_ptr<Communicator> communicator;
    Signature signature;
    int peer; // of a transfer
    bool sends;
    const void* send;
    void* receive;
    std::shared_ptr<Stream> stream;
};

using Batch = std::vector<std::pair<std::shared_ptr<Operation>, size_t>>; // operation and index of the part

// Finds or makes the operation that a call is part of, and compares the call with those of the other ranks.
Result join(const Request& request, std::shared_ptr<Operation>& operation, size_t& index);

// The work in a stream for what one group put there: arrives everywhere, then waits for everything, so that sends and receives
// of a group do not wait for each other.
void run(const std::shared_ptr<Clique>& clique, const Batch& batch, Device& device);

// Reports streams that wait for each other in a circle, and frees them with an error (the ledger is held).
void find_deadlock();

// Operations that not all ranks have called come to nothing (the ledger is held).
void fail(Clique& clique, Result error);

// The ranks that have, or have not, made the call: "0, 2".
std::string ranks_of(const Operation& operation, bool joined);

} // namespace emulator::nccl
