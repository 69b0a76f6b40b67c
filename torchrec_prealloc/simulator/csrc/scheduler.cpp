#include "scheduler.h"

#include <Python.h>

#include <c10/util/Exception.h>

#include <chrono>
#include <deque>
#include <map>
#include <random>

namespace sim {
namespace {

constexpr int kPoolSize = 32;

struct Task {
  std::function<void()> run; // or, where empty:
  StreamIndex other = 0;     // wait for this position of another stream
  uint64_t position = 0;
};

struct Stream {
  int device;
  c10::StreamId id;
  std::deque<Task> queue;
  uint64_t queued = 0, done = 0; // counts of tasks since the start
  Clock clock;
  Event last_query;
  bool used = false;
};

struct State {
  std::recursive_mutex mutex;
  Schedule schedule = Schedule::Eager;
  std::mt19937_64 random;
  std::deque<Stream> streams; // by StreamIndex; a deque keeps references valid
  std::map<std::pair<int, c10::StreamId>, StreamIndex> index;
  std::vector<StreamIndex> used; // since set_schedule, by first use: a seed must not depend on earlier runs
  std::map<const void*, int> groups;
  int next_in_pool[kMaxDevices] = {};
  int devices = 8;
  Clock host;
  std::function<void()> host_advanced;
};

// Leaked: tensors may be freed after static destructors have run.
State& state() {
  static auto* s = new State;
  return *s;
}

thread_local int tls_device = 0;
thread_local StreamIndex tls_stream[kMaxDevices]; // plus one; zero stands for the default stream

StreamIndex index_of(int device, c10::StreamId id) {
  TORCH_CHECK(device >= 0 && device < state().devices, "simulator: no device ", device);
  auto guard = lock();
  auto [it, added] = state().index.try_emplace({device, id}, static_cast<int>(state().streams.size()));
  if (added) {
    state().streams.push_back(Stream{device, id});
  }
  return it->second;
}

Stream& at(StreamIndex index) {
  return state().streams[index];
}

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// What the schedule does after something was queued or asked.
void let_time_pass() {
  auto& s = state();
  if (s.schedule == Schedule::Lazy) {
    return;
  }
  for (auto stream : s.used) {
    auto left = at(stream).queued - at(stream).done;
    if (left == 0) {
      continue;
    }
    if (s.schedule == Schedule::Eager) {
      run_all(stream);
    } else if (s.random() % 2) {
      run_until(stream, at(stream).done + 1 + s.random() % left);
    }
  }
}

void push(StreamIndex stream, Task task) {
  auto& s = at(stream);
  if (!std::exchange(s.used, true)) {
    state().used.push_back(stream);
  }
  s.queue.push_back(std::move(task));
  s.queued++;
  let_time_pass();
}

void host_joins(const Clock& clock) {
  state().host.join(clock);
  if (state().host_advanced) {
    state().host_advanced();
  }
}

Event point_now(StreamIndex stream) {
  auto& s = at(stream);
  s.clock.join(state().host);
  return std::make_shared<EventPoint>(EventPoint{stream, s.queued, s.clock.at(stream), s.clock, now_ms()});
}

} // namespace

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) {
    times_.resize(other.times_.size());
  }
  for (size_t i = 0; i < other.times_.size(); i++) {
    times_[i] = std::max(times_[i], other.times_[i]);
  }
}

bool Clock::has_seen(StreamIndex stream, uint64_t time) const {
  return at(stream) >= time;
}

uint64_t Clock::at(StreamIndex stream) const {
  return static_cast<size_t>(stream) < times_.size() ? times_[stream] : 0;
}

uint64_t Clock::advance(StreamIndex stream) {
  if (times_.size() <= static_cast<size_t>(stream)) {
    times_.resize(stream + 1);
  }
  return ++times_[stream];
}

std::unique_lock<std::recursive_mutex> lock() {
  std::unique_lock guard(state().mutex, std::try_to_lock);
  if (!guard.owns_lock()) {
    // Who has the lock may need the GIL (to describe a race, to drop the last reference to a tensor): who waits for
    // the lock must not keep it.
    auto* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    guard.lock();
    if (python) {
      PyEval_RestoreThread(python);
    }
  }
  return guard;
}

void set_schedule(Schedule schedule, uint64_t seed) {
  run_everything();
  state().schedule = schedule;
  state().random.seed(seed);
  state().used.clear();
  for (auto& stream : state().streams) {
    stream.used = false;
  }
}

int device_count() {
  return state().devices;
}

void set_device_count(int count) {
  TORCH_CHECK(count > 0 && count <= kMaxDevices, "simulator: 1 to ", kMaxDevices, " devices");
  state().devices = count;
}

int current_device() {
  return tls_device;
}

int exchange_device(int device) {
  TORCH_CHECK(device < state().devices, "simulator: no device ", device, ", there are ", state().devices);
  return device < 0 ? tls_device : std::exchange(tls_device, device);
}

StreamIndex current_stream(int device) {
  device = device < 0 ? tls_device : device;
  return tls_stream[device] ? tls_stream[device] - 1 : default_stream(device);
}

void set_current_stream(StreamIndex stream) {
  tls_stream[device_of(stream)] = stream + 1;
}

StreamIndex default_stream(int device) {
  return index_of(device < 0 ? tls_device : device, 0);
}

StreamIndex pool_stream(int device) {
  device = device < 0 ? tls_device : device;
  auto guard = lock();
  return index_of(device, 1 + state().next_in_pool[device]++ % kPoolSize);
}

StreamIndex collective_stream(int device, const void* group) {
  auto guard = lock();
  auto& groups = state().groups;
  auto number = groups.try_emplace(group, static_cast<int>(groups.size())).first->second;
  return index_of(device, 1 + kPoolSize + number);
}

int device_of(StreamIndex stream) {
  auto guard = lock();
  return at(stream).device;
}

c10::StreamId id_of(StreamIndex stream) {
  auto guard = lock();
  return at(stream).id;
}

c10::Stream as_c10(StreamIndex stream) {
  auto device = static_cast<c10::DeviceIndex>(device_of(stream));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id_of(stream));
}

StreamIndex from_c10(const c10::Stream& stream) {
  return index_of(stream.device_index() < 0 ? tls_device : stream.device_index(), stream.id());
}

uint64_t begin_operation(StreamIndex stream) {
  at(stream).clock.join(state().host);
  return at(stream).clock.advance(stream);
}

const Clock& clock_of(StreamIndex stream) {
  return at(stream).clock;
}

const Clock& host_clock() {
  return state().host;
}

void on_host_advance(std::function<void()> callback) {
  state().host_advanced = std::move(callback);
}

uint64_t queue_end(StreamIndex stream) {
  return at(stream).queued;
}

void enqueue(StreamIndex stream, std::function<void()> task) {
  push(stream, {std::move(task)});
}

void run_until(StreamIndex index, uint64_t position) {
  auto& stream = at(index);
  while (stream.done < std::min(position, stream.queued)) {
    auto task = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (task.run) {
      task.run();
    } else {
      run_until(task.other, task.position);
    }
    stream.done++;
  }
}

void run_all(StreamIndex stream) {
  run_until(stream, at(stream).queued);
}

void run_everything() {
  for (size_t i = 0; i < state().streams.size(); i++) {
    run_all(i);
  }
}

Event record_event(StreamIndex stream) {
  auto event = point_now(stream);
  let_time_pass();
  return event;
}

void wait_event(StreamIndex stream, const Event& event) {
  at(stream).clock.join(event->clock);
  push(stream, {nullptr, event->stream, event->position});
}

void follow(StreamIndex stream, StreamIndex other, uint64_t position) {
  if (at(other).done < position) {
    push(stream, {nullptr, other, position});
  }
}

bool has_passed(const Event& event) {
  if (state().schedule == Schedule::Lazy) { // never earlier than the host could know
    return state().host.has_seen(event->stream, event->time);
  }
  return at(event->stream).done >= event->position;
}

bool query_event(const Event& event) {
  let_time_pass();
  // Under the lazy schedule the first answer is no, and the second yes: a host that polls must get on.
  bool passed = has_passed(event) || (state().schedule == Schedule::Lazy && event->polled);
  event->polled = true;
  if (passed) {
    synchronize_event(event);
  }
  return passed;
}

bool query_stream(StreamIndex stream) {
  auto& last = at(stream).last_query;
  if (!last || last->time != at(stream).clock.at(stream) || last->position != at(stream).queued) {
    last = point_now(stream);
  }
  return query_event(last);
}

void synchronize_event(const Event& event) {
  run_until(event->stream, event->position);
  host_joins(event->clock);
}

void synchronize_stream(StreamIndex stream) {
  run_all(stream);
  host_joins(at(stream).clock);
}

void synchronize_device(int device) {
  for (size_t i = 0; i < state().streams.size(); i++) {
    if (at(i).device == device) {
      synchronize_stream(i);
    }
  }
}

void synchronize_everything() {
  for (size_t i = 0; i < state().streams.size(); i++) {
    synchronize_stream(i);
  }
}

} // namespace sim
