#include "host_memory.h"

#include <c10/core/Storage.h>

#include <cstdlib>
#include <cstring>
#include <list>

namespace sim {
namespace {

struct PinnedBlock {
  uintptr_t begin;
  size_t size;
  bool registered = false;
  bool freed = false;
  int queued = 0; // copies that have not run yet
  Shadow shadow;
};

// The bytes that a queued copy will read, as they were when it was queued.
struct Snapshot {
  Access read;
  std::vector<char> bytes;
};

struct State {
  std::map<uintptr_t, PinnedBlock> blocks;
  std::list<Snapshot> snapshots;
  HostStats stats;
};

State& state() {
  static auto* s = [] {
    on_host_advance(&check_snapshots);
    return new State;
  }();
  return *s;
}

PinnedBlock* find_block(uintptr_t address) {
  auto& blocks = state().blocks;
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) {
    return nullptr;
  }
  auto& block = std::prev(it)->second;
  return address < block.begin + block.size ? &block : nullptr;
}

void compare(const Snapshot& snapshot) {
  auto& read = snapshot.read;
  if (std::memcmp(reinterpret_cast<void*>(read.begin), snapshot.bytes.data(), snapshot.bytes.size()) != 0) {
    // Who wrote is not known here, only that it was before the host could know that the copy was done.
    add_report(kHostWrite, read, {read.begin, read.end, kHost, 0, 0, true, "unknown", nullptr});
  }
}

void compare_and_drop(const std::function<bool(const Access&)>& select) {
  std::list<Snapshot> selected; // taken out first: a report may run tasks, which come here again
  auto& all = state().snapshots;
  for (auto it = all.begin(); it != all.end();) {
    auto here = it++;
    if (select(here->read)) {
      selected.splice(selected.end(), all, here);
    }
  }
  for (auto& snapshot : selected) {
    compare(snapshot);
  }
}

bool overlap(const Access& access, uintptr_t begin, uintptr_t end) {
  return access.begin < end && begin < access.end;
}

void drop_block(PinnedBlock& block) {
  auto begin = block.begin, end = block.begin + block.size;
  compare_and_drop([&](const Access& read) { return overlap(read, begin, end); });
  auto& size = block.registered ? state().stats.registered_bytes : state().stats.allocated_bytes;
  size -= static_cast<int64_t>(block.size);
  if (!block.registered) {
    std::free(reinterpret_cast<void*>(begin));
  }
  state().blocks.erase(begin);
}

void free_pinned(void* context) {
  auto guard = lock();
  auto& block = state().blocks.at(reinterpret_cast<uintptr_t>(context));
  if (block.queued > 0) {
    block.freed = true;
    state().stats.deferred_frees++;
  } else {
    drop_block(block);
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    size = std::max<size_t>(size, 1);
    void* base = nullptr;
    TORCH_CHECK(posix_memalign(&base, 64, size) == 0, "simulator: no memory for ", size, " pinned bytes");
    auto guard = lock();
    auto begin = reinterpret_cast<uintptr_t>(base);
    state().blocks[begin] = {begin, size};
    auto& stats = state().stats;
    stats.allocated_bytes += static_cast<int64_t>(size);
    stats.peak_allocated_bytes = std::max(stats.peak_allocated_bytes, stats.allocated_bytes);
    return {base, base, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

// ---- registered memory

// The storage's own DataPtr, put back by unregister_host and released after the end of the registration.
struct Registration {
  c10::DataPtr original;
  uintptr_t begin;
};

void end_registration(uintptr_t begin, const char* op, const Stack& stack) {
  auto guard = lock();
  auto& block = state().blocks.at(begin);
  Access free{begin, begin + block.size, kHost, 0, 0, true, op, stack};
  block.shadow.check_host(kHostFree, free);
  if (block.queued > 0) {
    run_everything(); // the tasks would read memory that is gone
  }
  drop_block(block);
}

void free_registered(void* context) {
  std::unique_ptr<Registration> registration(static_cast<Registration*>(context));
  end_registration(registration->begin, "free", capture_stack());
}

} // namespace

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* address) {
  auto guard = lock();
  return find_block(reinterpret_cast<uintptr_t>(address)) != nullptr;
}

void register_host(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto begin = reinterpret_cast<uintptr_t>(storage.data());
  TORCH_CHECK(storage.device_type() == c10::kCPU && storage.nbytes() > 0, "simulator: not host memory");
  TORCH_CHECK(!is_pinned(storage.data()), "simulator: this memory is pinned already");
  auto guard = lock();
  state().blocks[begin] = {begin, storage.nbytes(), /*registered=*/true};
  state().stats.registered_bytes += static_cast<int64_t>(storage.nbytes());
  auto* registration = new Registration{c10::DataPtr(), begin};
  registration->original = storage.set_data_ptr(
      c10::DataPtr(storage.mutable_data(), registration, &free_registered, c10::Device(c10::kCPU)));
}

void unregister_host(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto* registration = storage.data_ptr().cast_context<Registration>(&free_registered);
  TORCH_CHECK(registration != nullptr, "simulator: this memory is not registered");
  end_registration(registration->begin, "unregister_host", capture_stack());
  auto wrapper = storage.set_data_ptr(std::move(registration->original));
  wrapper.release_context();
  delete registration;
}

void record_host_access(const Access& access) {
  auto* block = find_block(access.begin);
  if (!block) {
    return;
  }
  bool first = block->queued++ == 0;
  if (!checker().enabled) {
    return;
  }
  block->shadow.record(kDataRace, access);
  if (access.writes && first) { // until the copy runs, the host may find anything here
    compare_and_drop([&](const Access& read) { return overlap(read, access.begin, access.end); });
    std::memset(reinterpret_cast<void*>(access.begin), kPoison, access.end - access.begin);
  }
  if (!access.writes) {
    auto* bytes = reinterpret_cast<const char*>(access.begin);
    state().snapshots.push_back({access, {bytes, bytes + (access.end - access.begin)}});
  }
}

void end_host_access(const Access& access, bool about_to_write) {
  auto* block = find_block(access.begin);
  if (!block) {
    return;
  }
  if (about_to_write) { // legal where a copy from here has run: from now on the bytes differ
    compare_and_drop([&](const Access& read) { return overlap(read, access.begin, access.end); });
    return;
  }
  if (--block->queued == 0 && block->freed) {
    drop_block(*block);
  }
}

bool any_pinned_memory() {
  return !state().blocks.empty();
}

void check_host_operator(uintptr_t begin, uintptr_t end, bool writes, const std::string& op,
                         const Stack& stack) {
  auto* block = find_block(begin);
  if (!block) {
    return;
  }
  Access access{begin, end, kHost, 0, 0, writes, op, stack};
  if (!block->shadow.check_host(writes ? kHostWrite : kHostRead, access) && writes) {
    std::erase_if(state().snapshots, [&](const Snapshot& s) { return overlap(s.read, begin, end); });
  }
}

void check_snapshots() {
  compare_and_drop([](const Access& read) { return host_clock().has_seen(read.stream, read.time); });
}

void forget_host_accesses() {
  state().snapshots.clear();
  for (auto& [begin, block] : state().blocks) {
    block.shadow.clear();
  }
}

HostStats& host_stats() {
  return state().stats;
}

} // namespace sim
