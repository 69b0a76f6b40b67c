// The device's caching allocator: PyTorch's CUDACachingAllocator in its default settings, on CPU memory.
//
// One pool per stream, requests rounded to 512 bytes, small (up to 1 MiB) and large blocks from segments of
// their own, best fit, splitting, merging with free neighbours, and frees that wait for the streams named by
// record_stream. Names and thresholds are those of c10/cuda/CUDACachingAllocator.cpp.
#pragma once

#include "checker.h"
#include "statistics.h"

#include <optional>

namespace sim {

struct BlockState { // of a memory snapshot
  Segment segment;
  uintptr_t address;
  size_t size, requested;
  const char* state;
  Stack stack;
};

c10::DeviceAllocator& device_allocator();

// To be called before a task is queued that uses the block at `address`: it shall not overtake the poison
// fill.
void follow_fill(StreamIndex stream, uintptr_t address);
// A device access; addresses of other memory are ignored.
void record_device_access(Access access);

void set_memory_limit(std::optional<size_t> bytes); // of reserved memory, for each device
void check_pending_frees();                         // reports those that are not in order yet
void forget_device_accesses();

// For memory snapshots. Call under lock().
std::vector<BlockState> list_blocks(); // by address

} // namespace sim
