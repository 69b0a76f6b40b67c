// The device's caching allocator: PyTorch's CUDACachingAllocator in its default settings, on CPU memory.
//
// One pool per stream, requests rounded to 512 bytes, small (up to 1 MiB) and large blocks from segments of
// their own, best fit, splitting, merging with free neighbours, and frees that wait for the streams named by
// record_stream. Names and thresholds are those of c10/cuda/CUDACachingAllocator.cpp.
#pragma once

#include "checker.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <optional>

namespace sim {

using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

struct Segment {
  char* base;
  size_t size;
  StreamIndex stream;
  bool small;
  Stack stack;
};

struct BlockState { // of a memory snapshot
  Segment segment;
  uintptr_t address;
  size_t size, requested;
  const char* state;
  Stack stack;
};

struct TraceEntry { // one line of a memory snapshot's device_traces
  std::string action;
  StreamIndex stream;
  uintptr_t address;
  size_t size;
  int64_t time_us;
  Stack stack;
};

c10::DeviceAllocator& device_allocator();

// Before an operation is queued that uses the block at `address`: its task shall not overtake the poison fill.
void follow_fill(StreamIndex stream, uintptr_t address);
// A device access; addresses of other memory are ignored.
void record_device_access(Access access);

void set_memory_limit(std::optional<size_t> bytes); // of reserved memory, for each device
void check_pending_frees(); // reports those that are not in order yet
void forget_device_accesses();

// For the Python side. Call under lock().
const std::map<StreamIndex, DeviceStats>& stream_stats();
const DeviceStats& device_stats(int device);
void reset_peak_stats();
std::vector<BlockState> list_blocks(); // by address
void record_history(size_t max_entries); // 0 stops it
const std::deque<TraceEntry>& history();

} // namespace sim
