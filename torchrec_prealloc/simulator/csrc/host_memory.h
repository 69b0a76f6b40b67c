// Pinned host memory, and what the host may not do to it while a queued copy uses it.
#pragma once

#include "checker.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace sim {

// Freed while a queued copy uses it, a block is kept until the copy has run: PyTorch's CachingHostAllocator
// records an event for every copy and does the same, so such a free is legal and only counted.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

// Memory pinned by other means, as by cudaHostRegister: nothing keeps it, and a free under a copy is a fault.
void register_host(const at::Tensor& tensor);
void unregister_host(const at::Tensor& tensor);

// A queued copy's access. A read keeps a copy of the bytes: when the host comes to know that the copy has
// run, they must still be the same, whoever may have written them, a thread or NumPy or C.
void record_host_access(const Access& access);
void end_host_access(const Access& access, bool about_to_write); // called by the copy's task as it runs

// An operator on the CPU touches [begin, end). Called by host_operators.cpp, in the threads that it watches.
bool any_pinned_memory();
void check_host_operator(uintptr_t begin, uintptr_t end, bool writes, const std::string& op,
                         const Stack& stack);

void check_snapshots(); // compares what the host has come to know
void forget_host_accesses();

struct HostStats {
  int64_t allocated_bytes = 0, peak_allocated_bytes = 0;
  int64_t deferred_frees = 0; // frees that had to wait for a copy
  int64_t registered_bytes = 0;
};
HostStats& host_stats();

} // namespace sim
