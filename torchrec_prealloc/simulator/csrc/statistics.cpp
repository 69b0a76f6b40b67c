#include "statistics.h"

#include <chrono>

namespace sim {
namespace {

struct State {
  std::map<StreamIndex, DeviceStats> streams;
  std::map<int, DeviceStats> devices;
  std::deque<TraceEntry> history;
  size_t max_history = 0;
};

State& state() {
  static auto* s = new State;
  return *s;
}

void reset(DeviceStats& stats) {
  for (auto* array :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (auto& stat : *array) {
      stat.reset_peak();
    }
  }
}

} // namespace

void count(c10::CachingAllocator::StatArray DeviceStats::* stat, const Segment& segment, int64_t amount) {
  using c10::CachingAllocator::StatType;
  auto pool = segment.small ? StatType::SMALL_POOL : StatType::LARGE_POOL;
  for (auto* stats : {&state().streams[segment.stream], &state().devices[device_of(segment.stream)]}) {
    for (auto type : {StatType::AGGREGATE, pool}) {
      auto& s = (stats->*stat)[static_cast<size_t>(type)];
      amount < 0 ? s.decrease(-amount) : s.increase(amount);
    }
  }
}

void count_retry(StreamIndex stream) {
  state().streams[stream].num_alloc_retries++;
  state().devices[device_of(stream)].num_alloc_retries++;
}

void count_oom(StreamIndex stream) {
  state().streams[stream].num_ooms++;
  state().devices[device_of(stream)].num_ooms++;
}

const std::map<StreamIndex, DeviceStats>& stream_stats() {
  return state().streams;
}

const DeviceStats& device_stats(int device) {
  return state().devices[device];
}

void reset_peak_stats() {
  for (auto& [stream, stats] : state().streams) {
    reset(stats);
  }
  for (auto& [device, stats] : state().devices) {
    reset(stats);
  }
}

void record_history(size_t max_entries) {
  state().max_history = max_entries;
  state().history.clear();
  checker().history = max_entries > 0;
}

bool records_history() {
  return state().max_history > 0;
}

void trace(const char* action, StreamIndex stream, uintptr_t address, size_t size, const Stack& stack) {
  auto& s = state();
  if (s.max_history == 0) {
    return;
  }
  auto now = std::chrono::system_clock::now().time_since_epoch();
  auto time = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  s.history.push_back({action, stream, address, size, time, stack});
  if (s.history.size() > s.max_history) {
    s.history.pop_front();
  }
}

const std::deque<TraceEntry>& history() {
  return state().history;
}

} // namespace sim
