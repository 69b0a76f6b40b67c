// What the caching allocator counts and remembers: PyTorch's statistics, for each stream and each device, and
// the history of a memory snapshot. Call under lock().
#pragma once

#include "checker.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>

namespace sim {

using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

struct Segment {
  char* base;
  size_t size;
  StreamIndex stream;
  bool small;
  Stack stack;
};

void count(c10::CachingAllocator::StatArray DeviceStats::* stat, const Segment& segment, int64_t amount);
void count_retry(StreamIndex stream);
void count_oom(StreamIndex stream);
const std::map<StreamIndex, DeviceStats>& stream_stats();
const DeviceStats& device_stats(int device);
void reset_peak_stats();

struct TraceEntry { // one line of a snapshot's device_traces
  std::string action;
  StreamIndex stream;
  uintptr_t address;
  size_t size; // of blocks as requested, as in PyTorch's
  int64_t time_us;
  Stack stack;
};

void record_history(size_t max_entries); // forgets what there was; 0 stops it
bool records_history();
void trace(const char* action, StreamIndex stream, uintptr_t address, size_t size, const Stack& stack);
const std::deque<TraceEntry>& history();

} // namespace sim
