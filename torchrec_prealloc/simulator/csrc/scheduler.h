// Streams, events and the order between them.
//
// Two notions of time live side by side:
//
//  * physical: every stream is a queue of tasks. The schedule decides when a queued task runs: as late as
//    possible, at once, or at a random moment. It is what decides which bytes a test sees.
//  * logical: every operation gets a clock on its stream, and every stream (and the host) has a vector clock
//    that says which operations of the other streams it is ordered after. Only events, waits and
//    synchronisation carry clocks from one to the other. The checker looks at these alone, so that it finds a
//    missing wait under any schedule.
//
// All host threads share one clock: an order between threads (a queue, a lock) is invisible to us, and taking
// it for granted costs missed reports, never false ones.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace sim {

// Registered as MTIA: every torch wheel has the Python module and bindings of that device type and none of
// its kernels, and TorchRec takes its accelerator branches for it.
constexpr auto kDevice = c10::DeviceType::MTIA;
constexpr auto kDispatchKey = c10::DispatchKey::MTIA;
constexpr int kMaxDevices = 64;

// A stream's place in all vector clocks.
using StreamIndex = int;

class Clock {
 public:
  void join(const Clock& other);
  bool has_seen(StreamIndex stream, uint64_t time) const;
  uint64_t at(StreamIndex stream) const;
  uint64_t advance(StreamIndex stream);

 private:
  std::vector<uint64_t> times_;
};

// A point in a stream's queue, and everything that is ordered before it.
struct EventPoint {
  StreamIndex stream;
  uint64_t position; // number of tasks queued before it
  uint64_t time;     // the stream's own clock
  Clock clock;
  double recorded_ms; // host time, for elapsed_time
  bool polled = false;
};
using Event = std::shared_ptr<EventPoint>;

enum class Schedule { Lazy, Eager, Random };

// One lock for the simulator's whole state. Recursive, because a task or an allocation inside one entry point
// may use another. Never take the GIL while holding it: a thread that holds the GIL may be waiting for it.
std::unique_lock<std::recursive_mutex> lock();

void set_schedule(Schedule schedule, uint64_t seed);

// Devices and streams of the calling thread.
int device_count();
void set_device_count(int count);
int current_device();
int exchange_device(int device);
StreamIndex current_stream(int device = -1);
void set_current_stream(StreamIndex stream);
StreamIndex default_stream(int device);
StreamIndex pool_stream(int device); // round robin over 32, as on CUDA
StreamIndex collective_stream(int device,
                              const void* group); // what a process group runs on; see collectives.cpp
int device_of(StreamIndex stream);
c10::StreamId id_of(StreamIndex stream);
c10::Stream as_c10(StreamIndex stream);
StreamIndex from_c10(const c10::Stream& stream);

// Logical time.
uint64_t begin_operation(StreamIndex stream); // the new operation's clock
const Clock& clock_of(StreamIndex stream);
const Clock& host_clock();
void on_host_advance(std::function<void()> callback); // called after the host has synchronised with something

// Queues.
uint64_t queue_end(StreamIndex stream);
void enqueue(StreamIndex stream, std::function<void()> task);
void run_until(StreamIndex stream, uint64_t position); // physical only: orders nothing
void run_all(StreamIndex stream);
void run_everything();

// Events.
Event record_event(StreamIndex stream);
void wait_event(StreamIndex stream, const Event& event);
// Physical only: the stream's later tasks do not run before `position` of `other` has. For effects of our own
// (the poison fill of fresh memory) that must not look like an order the program made.
void follow(StreamIndex stream, StreamIndex other, uint64_t position);
bool query_event(const Event& event);
bool query_stream(StreamIndex stream);
bool has_passed(const Event& event); // what the allocator sees; the host learns nothing from it
void synchronize_event(const Event& event);
void synchronize_stream(StreamIndex stream);
void synchronize_device(int device);
void synchronize_everything();

} // namespace sim
