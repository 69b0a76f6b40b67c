#include "allocator.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <set>

namespace sim {
namespace {

constexpr size_t kMinBlockSize = 512;
constexpr size_t kSmallSize = 1 << 20;      // the largest "small" allocation
constexpr size_t kSmallBuffer = 2 << 20;    // "small" allocations come from segments of this size
constexpr size_t kMinLargeAlloc = 10 << 20; // between the two: from segments of kLargeBuffer
constexpr size_t kLargeBuffer = 20 << 20;
constexpr size_t kRoundLarge = 2 << 20; // larger ones: a segment each, rounded to this

struct Block {
  char* base;
  size_t size; // rounded
  size_t requested;
  Segment* segment;
  bool allocated = false;                // a storage has it
  bool active = false;                   // allocated, or freed and waiting for the recorded streams
  std::map<StreamIndex, Event> recorded; // by record_stream; the events are recorded at the free
  uint64_t fresh_time = 0;               // the owner's clock at the allocation
  uint64_t filled_at = 0;                // position in the owner's queue after the poison fill
  Shadow shadow;
  Stack stack; // of the allocation, while the history is recorded

  uintptr_t begin() const {
    return reinterpret_cast<uintptr_t>(base);
  }
  uintptr_t end() const {
    return begin() + size;
  }
};

// A free whose block other streams may still use. It becomes a fault with the next allocation from the same
// pool, unless the owning stream is ordered after that use by then: until then nobody can be given the block.
struct PendingFree {
  StreamIndex owner;
  Access use;
  Access free;
};

struct State {
  std::map<char*, Block> blocks; // of all segments, free ones too; neighbours in memory are neighbours here
  std::map<char*, Segment> segments;
  // By (stream, small), each by (size, address).
  std::map<std::pair<StreamIndex, bool>, std::set<std::pair<size_t, char*>>> free_blocks;
  std::vector<Block*> waiting; // freed, recorded streams not past the free yet
  std::vector<PendingFree> pending_frees;
  std::optional<size_t> limit;
};

State& state() {
  static auto* s = new State;
  return *s;
}

// ---- free blocks

std::set<std::pair<size_t, char*>>& pool_of(const Segment& segment) {
  return state().free_blocks[{segment.stream, segment.small}];
}

void insert_free(Block& block) {
  pool_of(*block.segment).insert({block.size, block.base});
  if (block.size < block.segment->size) {
    count(&DeviceStats::inactive_split, *block.segment, 1);
    count(&DeviceStats::inactive_split_bytes, *block.segment, block.size);
  }
}

void erase_free(Block& block) {
  pool_of(*block.segment).erase({block.size, block.base});
  if (block.size < block.segment->size) {
    count(&DeviceStats::inactive_split, *block.segment, -1);
    count(&DeviceStats::inactive_split_bytes, *block.segment, -static_cast<int64_t>(block.size));
  }
}

// Appends `next` to `block`; both are free, and in no pool.
void merge(Block& block, Block& next) {
  block.size += next.size;
  block.shadow.merge(std::move(next.shadow));
  state().blocks.erase(next.base);
}

// The block is nobody's any more: back to its stream's pool, as one with its free neighbours.
void free_block(Block& freed) {
  auto* block = &freed;
  auto& segment = *block->segment;
  trace("free_completed", segment.stream, block->begin(), block->requested, block->stack);
  count(&DeviceStats::active, segment, -1);
  count(&DeviceStats::active_bytes, segment, -static_cast<int64_t>(block->size));
  block->active = false;
  block->recorded.clear();
  auto here = state().blocks.find(block->base);
  if (auto next = std::next(here); next != state().blocks.end()) {
    if (next->second.segment == &segment && !next->second.active) {
      erase_free(next->second);
      merge(*block, next->second);
    }
  }
  if (here != state().blocks.begin()) {
    auto& previous = std::prev(here)->second;
    if (previous.segment == &segment && !previous.active) {
      erase_free(previous);
      merge(previous, *block);
      block = &previous;
    }
  }
  insert_free(*block);
}

// The recorded streams have passed the free.
void finish_free(Block& block) {
  for (auto& [stream, event] : block.recorded) {
    block.shadow.forget_seen(event->clock);
  }
  free_block(block);
}

void complete_waiting_frees() {
  std::erase_if(state().waiting, [](Block* block) {
    for (auto& [stream, event] : block->recorded) {
      if (!has_passed(event)) {
        return false;
      }
    }
    finish_free(*block);
    return true;
  });
}

void report_pending_frees(std::optional<StreamIndex> owner) {
  std::erase_if(state().pending_frees, [&](const PendingFree& pending) {
    if (owner && pending.owner != *owner) {
      return false;
    }
    auto clock = clock_of(pending.owner);
    clock.join(host_clock());
    if (!clock.has_seen(pending.use.stream, pending.use.time)) {
      add_report(kUnsafeFree, pending.use, pending.free);
    }
    return true;
  });
}

// ---- segments

size_t segment_size(size_t size) {
  if (size <= kSmallSize) {
    return kSmallBuffer;
  }
  return size < kMinLargeAlloc ? kLargeBuffer : (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

bool over_limit(int device, size_t size) {
  auto reserved = static_cast<size_t>(device_stats(device).reserved_bytes[0].current);
  return state().limit && reserved + size > *state().limit;
}

// What cudaFree of every unused segment does; it waits for the device first. The host learns nothing from it.
void release_cached_segments() {
  auto& s = state();
  run_everything();
  for (auto* block : s.waiting) {
    finish_free(*block);
  }
  s.waiting.clear();
  for (auto it = s.segments.begin(); it != s.segments.end();) {
    auto& segment = it->second;
    auto& block = s.blocks.at(segment.base);
    if (block.active || block.size != segment.size) {
      ++it;
      continue;
    }
    erase_free(block);
    count(&DeviceStats::segment, segment, -1);
    count(&DeviceStats::reserved_bytes, segment, -static_cast<int64_t>(segment.size));
    trace("segment_free", segment.stream, block.begin(), segment.size, nullptr);
    std::free(segment.base);
    s.blocks.erase(segment.base);
    it = s.segments.erase(it);
  }
}

Block& new_segment(StreamIndex stream, size_t size, const Stack& stack) {
  auto& s = state();
  int device = device_of(stream);
  auto bytes = segment_size(size);
  void* base = nullptr;
  if (over_limit(device, bytes)) {
    count_retry(stream);
    release_cached_segments();
  }
  if (over_limit(device, bytes) || posix_memalign(&base, kMinBlockSize, bytes) != 0) {
    count_oom(stream);
    trace("oom", stream, 0, size, stack);
    auto& stats = device_stats(device);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "Simulator out of memory. Tried to allocate ", size,
                     " bytes (a segment of ", bytes, "). Device ", device, " has a limit of ",
                     s.limit.value_or(0), " bytes, ", stats.reserved_bytes[0].current, " are reserved, ",
                     stats.allocated_bytes[0].current, " of them allocated.");
  }
  auto* address = static_cast<char*>(base);
  auto& segment = s.segments[address] = {address, bytes, stream, size <= kSmallSize, stack};
  count(&DeviceStats::segment, segment, 1);
  count(&DeviceStats::reserved_bytes, segment, bytes);
  trace("segment_alloc", segment.stream, reinterpret_cast<uintptr_t>(base), bytes, stack);
  auto& block = s.blocks[address] = Block{address, bytes, 0, &segment};
  insert_free(block);
  return block;
}

// ---- allocation and free

Block& allocate_block(StreamIndex stream, size_t requested, const Stack& stack) {
  auto& s = state();
  complete_waiting_frees();
  report_pending_frees(stream);
  auto size = std::max(kMinBlockSize, (requested + kMinBlockSize - 1) / kMinBlockSize * kMinBlockSize);
  bool small = size <= kSmallSize;
  auto& pool = s.free_blocks[{stream, small}];
  auto fit = pool.lower_bound({size, nullptr});
  auto& block = fit != pool.end() ? s.blocks.at(fit->second) : new_segment(stream, size, stack);
  erase_free(block);
  auto rest = block.size - size;
  if (small ? rest >= kMinBlockSize : rest > kSmallSize) {
    block.size = size;
    auto& remaining = s.blocks[block.base + size] = Block{block.base + size, rest, 0, block.segment};
    remaining.shadow = block.shadow.split(remaining.begin());
    insert_free(remaining);
  }
  block.allocated = block.active = true;
  block.requested = requested;
  block.stack = records_history() ? stack : nullptr;
  count(&DeviceStats::allocation, *block.segment, 1);
  count(&DeviceStats::allocated_bytes, *block.segment, block.size);
  count(&DeviceStats::requested_bytes, *block.segment, requested);
  count(&DeviceStats::active, *block.segment, 1);
  count(&DeviceStats::active_bytes, *block.segment, block.size);
  trace("alloc", block.segment->stream, block.begin(), requested, stack);
  return block;
}

// Fresh memory may still be in use by whatever the owning stream has queued so far: its first user must be
// ordered after that. To the checker the allocation is therefore a write by the owner's last operation.
void mark_fresh(Block& block, StreamIndex stream, const Stack& stack) {
  if (!checker().enabled) {
    return;
  }
  auto now = record_event(stream);
  block.shadow.record(
      kReuse, {block.begin(), block.end(), stream, now->time, now->position + 1, true, "alloc", stack});
  // The bytes are spoilt in the owning stream's order: what it has queued before still finds the old ones.
  enqueue(stream, [base = block.base, size = block.size] { std::memset(base, kPoison, size); });
  block.fresh_time = now->time;
  block.filled_at = queue_end(stream);
}

void free_storage(void* context) {
  auto stack = capture_stack();
  auto guard = lock();
  auto& block = *static_cast<Block*>(context);
  auto owner = block.segment->stream;
  block.allocated = false;
  count(&DeviceStats::allocation, *block.segment, -1);
  count(&DeviceStats::allocated_bytes, *block.segment, -static_cast<int64_t>(block.size));
  count(&DeviceStats::requested_bytes, *block.segment, -static_cast<int64_t>(block.requested));
  trace("free_requested", block.segment->stream, block.begin(), block.requested, stack);
  if (checker().enabled) {
    auto clock = clock_of(owner);
    clock.join(host_clock());
    // The block waits for the recorded streams, and so for all that these were ordered after.
    for (auto& [stream, event] : block.recorded) {
      clock.join(clock_of(stream));
    }
    if (auto* use = block.shadow.find_unseen(clock, block.recorded)) {
      state().pending_frees.push_back(
          {owner, *use, {block.begin(), block.end(), owner, 0, 0, true, "free", stack}});
    }
  }
  if (block.recorded.empty()) {
    free_block(block);
    return;
  }
  for (auto& [stream, event] : block.recorded) {
    event = record_event(stream);
  }
  state().waiting.push_back(&block);
}

Block* find_block(uintptr_t address) {
  auto& blocks = state().blocks;
  auto it = blocks.upper_bound(reinterpret_cast<char*>(address));
  if (it == blocks.begin()) {
    return nullptr;
  }
  auto& block = std::prev(it)->second;
  return address < block.end() ? &block : nullptr;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto stream = current_stream();
    c10::Device device(kDevice, static_cast<c10::DeviceIndex>(current_device()));
    if (size == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    }
    auto stack = capture_stack();
    auto guard = lock();
    auto& block = allocate_block(stream, size, stack);
    mark_fresh(block, stream, stack);
    return {block.base, &block, &free_storage, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    auto guard = lock();
    run_all(current_stream());
    std::memcpy(to, from, size);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    auto guard = lock();
    release_cached_segments();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto guard = lock();
    auto index = from_c10(stream);
    if (auto* block = find_block(reinterpret_cast<uintptr_t>(data.get()))) {
      if (index != block->segment->stream) {
        block->recorded.try_emplace(index);
      }
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto guard = lock();
    return device_stats(device < 0 ? current_device() : device);
  }

  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {
  }

  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    auto guard = lock();
    reset_peak_stats();
  }
};

} // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void follow_fill(StreamIndex stream, uintptr_t address) {
  auto* block = checker().enabled ? find_block(address) : nullptr;
  // A stream that is not even ordered after the allocation is left to meet the poison.
  if (block && clock_of(stream).has_seen(block->segment->stream, block->fresh_time)) {
    follow(stream, block->segment->stream, block->filled_at);
  }
}

void record_device_access(Access access) {
  if (auto* block = checker().enabled ? find_block(access.begin) : nullptr) {
    block->shadow.record(kDataRace, std::move(access));
  }
}

void set_memory_limit(std::optional<size_t> bytes) {
  state().limit = bytes;
}

void check_pending_frees() {
  report_pending_frees(std::nullopt);
}

void forget_device_accesses() {
  state().pending_frees.clear();
  for (auto& [base, block] : state().blocks) {
    block.shadow.clear();
  }
}

std::vector<BlockState> list_blocks() {
  std::vector<BlockState> list;
  for (auto& [base, b] : state().blocks) {
    auto name = b.allocated ? "active_allocated" : b.active ? "active_pending_free" : "inactive";
    list.push_back({*b.segment, b.begin(), b.size, b.requested, name, b.stack});
  }
  return list;
}

} // namespace sim

REGISTER_ALLOCATOR(sim::kDevice, &sim::device_allocator());
