// Streams and events: order, waiting, time.

#include <chrono>
#include <thread>

#include "driver.h"

namespace emulator::driver {

void Stream::start() {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Stream::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return completed_ < demanded_ || (closed_ && queue_.empty()); });
        if (queue_.empty()) return;
        Entry entry = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        if (entry.always || !device.lost) entry.work();
        entry.work = nullptr; // what it held goes before anybody hears that it is done
        lock.lock();
        ++completed_;
        changed_.notify_all();
    }
}

uint64_t Stream::enqueue(std::function<void()> work, bool always) {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), always});
    ++last_;
    if (!settings().lazy_streams || closed_) {
        demanded_ = last_;
        changed_.notify_all();
    }
    return last_;
}

void Stream::demand(uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    if (sequence <= demanded_) return;
    demanded_ = sequence;
    changed_.notify_all();
}

void Stream::wait(uint64_t sequence) {
    std::unique_lock lock(mutex_);
    if (sequence > demanded_) {
        demanded_ = sequence;
        changed_.notify_all();
    }
    changed_.wait(lock, [&] { return completed_ >= sequence; });
}

bool Stream::is_complete(uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    return completed_ >= sequence;
}

bool Stream::is_finished() {
    const std::lock_guard lock(mutex_);
    return closed_ && completed_ == last_;
}

uint64_t Stream::last() {
    const std::lock_guard lock(mutex_);
    return last_;
}

void Stream::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    demanded_ = last_;
    changed_.notify_all();
}

void enqueue_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Mark>& mark) {
    if (mark->stream == stream || mark->stream->is_complete(mark->sequence)) return;
    stream->enqueue([mark] { mark->stream->wait(mark->sequence); }, true);
}

// A destroyed stream still does what is queued in it, and until then everybody who waits for the device waits for it too.
static void forget_finished_streams(Device& device) {
    const std::lock_guard lock(device.mutex);
    std::erase_if(device.streams, [](const std::shared_ptr<Stream>& stream) { return stream->is_finished(); });
}

uint64_t enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> work, bool always) {
    Device& device = stream->device;
    const std::lock_guard lock(device.mutex); // one order for all streams that keep order with each other
    const auto follow = [&](const std::shared_ptr<Stream>& other) {
        const auto mark = std::make_shared<Mark>();
        mark->stream = other;
        mark->sequence = other->last();
        enqueue_wait(stream, mark);
    };
    if (stream == device.default_stream) {
        for (const auto& other : device.streams) {
            if (other->blocking) follow(other);
        }
    } else if (stream->blocking && device.default_stream) {
        follow(device.default_stream);
    }
    return stream->enqueue(std::move(work), always);
}

static int64_t now_nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static std::shared_ptr<Mark> mark_of(Event& event) {
    const std::lock_guard lock(event.mutex);
    return event.mark;
}

static bool is_reached(const Mark& mark) {
    mark.stream->demand(mark.sequence); // a program that polls must get there some day
    return mark.stream->is_complete(mark.sequence);
}

} // namespace emulator::driver

using namespace emulator::driver;

#pragma GCC visibility push(default)
extern "C" {

// ---- streams ----

int32_t cuStreamCreateWithPriority(void** handle, uint32_t flags, int32_t) {
    constexpr uint32_t NON_BLOCKING = 1;
    Device* device;
    if (const Result result = open_device(device)) return result;
    if (flags > NON_BLOCKING) return INVALID_VALUE;
    const auto stream = std::make_shared<Stream>(*device, flags != NON_BLOCKING);
    stream->start();
    forget_finished_streams(*device);
    {
        const std::lock_guard lock(device->mutex);
        device->streams.push_back(stream);
    }
    *handle = streams().add(stream);
    return SUCCESS;
}

int32_t cuStreamCreate(void** handle, uint32_t flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

// What is queued still runs, as in CUDA.
int32_t cuStreamDestroy_v2(void* handle) {
    const std::shared_ptr<Stream> stream = streams().take(handle);
    if (!stream) return INVALID_HANDLE;
    stream->close();
    forget_finished_streams(stream->device);
    return SUCCESS;
}

int32_t cuStreamSynchronize(void* handle) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    stream->wait_all();
    return stream->device.state();
}

int32_t cuStreamQuery(void* handle) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    const uint64_t last = stream->last();
    stream->demand(last);
    return stream->is_complete(last) ? stream->device.state() : NOT_READY;
}

int32_t cuStreamIsCapturing(void* handle, int32_t* status) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    *status = 0;
    return SUCCESS;
}

// Waits for what the event recorded last before this call; what happens to the event afterwards does not matter.
int32_t cuStreamWaitEvent(void* handle, void* event_handle, uint32_t) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    const std::shared_ptr<Event> event = events().find(event_handle);
    if (!event) return INVALID_HANDLE;
    if (const auto mark = mark_of(*event)) enqueue(stream, [mark] { mark->stream->wait(mark->sequence); }, true);
    return SUCCESS;
}

int32_t cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    if (!function) return INVALID_VALUE;
    enqueue(stream, [=] { function(data); });
    return SUCCESS;
}

int32_t cuCtxGetStreamPriorityRange(int32_t* least, int32_t* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5; // accepted, and of no effect
    return SUCCESS;
}

// ---- events ----

int32_t cuEventCreate(void** handle, uint32_t flags) {
    constexpr uint32_t DISABLE_TIMING = 2;
    Device* device;
    if (const Result result = open_device(device)) return result;
    const auto event = std::make_shared<Event>();
    event->timed = !(flags & DISABLE_TIMING);
    *handle = events().add(event);
    return SUCCESS;
}

int32_t cuEventDestroy_v2(void* handle) { return events().take(handle) ? SUCCESS : INVALID_HANDLE; }

int32_t cuEventRecord(void* event_handle, void* handle) {
    std::shared_ptr<Stream> stream;
    if (const Result result = open_stream(handle, stream)) return result;
    const std::shared_ptr<Event> event = events().find(event_handle);
    if (!event) return INVALID_HANDLE;
    const auto mark = std::make_shared<Mark>();
    mark->stream = stream;
    mark->sequence = enqueue(stream, [timed = event->timed, weak = std::weak_ptr(mark)] {
        const auto mark = weak.lock();
        if (timed && mark) mark->nanoseconds = now_nanoseconds();
    });
    const std::lock_guard lock(event->mutex);
    event->mark = mark;
    return SUCCESS;
}

int32_t cuEventSynchronize(void* handle) {
    const std::shared_ptr<Event> event = events().find(handle);
    if (!event) return INVALID_HANDLE;
    const auto mark = mark_of(*event);
    if (!mark) return SUCCESS;
    mark->stream->wait(mark->sequence);
    return mark->stream->device.state();
}

int32_t cuEventQuery(void* handle) {
    const std::shared_ptr<Event> event = events().find(handle);
    if (!event) return INVALID_HANDLE;
    const auto mark = mark_of(*event);
    if (!mark) return SUCCESS;
    return is_reached(*mark) ? mark->stream->device.state() : NOT_READY;
}

// Milliseconds of the emulation, which say nothing about a GPU.
int32_t cuEventElapsedTime_v2(float* milliseconds, void* start_handle, void* end_handle) {
    const std::shared_ptr<Event> start = events().find(start_handle);
    const std::shared_ptr<Event> end = events().find(end_handle);
    if (!start || !end || !start->timed || !end->timed) return INVALID_HANDLE;
    const auto first = mark_of(*start);
    const auto second = mark_of(*end);
    if (!first || !second) return INVALID_HANDLE;
    if (!is_reached(*first) || !is_reached(*second)) return NOT_READY;
    *milliseconds = float(double(second->nanoseconds - first->nanoseconds) * 1e-6);
    return SUCCESS;
}

int32_t cuEventElapsedTime(float* milliseconds, void* start, void* end) { return cuEventElapsedTime_v2(milliseconds, start, end); }

} // extern "C"
#pragma GCC visibility pop
