// One operation on a device stream, as the checker sees it; and device tensors as CPU tensors.
#pragma once

#include "allocator.h"
#include "host_memory.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// A CPU tensor over the same bytes. Owning ones keep the storage alive; those in queued tasks must not, for
// the program may count the references to its storages, and memory freed too early is for the checker to
// find. `storages` lets several tensors of one operation share a storage, as the originals do.
using StorageMap = std::unordered_map<void*, c10::Storage>;
at::Tensor as_cpu(const at::Tensor& tensor, bool owning, StorageMap* storages = nullptr);

// The bytes between a tensor's first and last element. Holes count: two strided views that interleave without
// sharing an element would be reported, which no pipeline does.
std::pair<uintptr_t, uintptr_t> byte_range(const at::Tensor& tensor);

// The copy itself: CPU tensors, no autograd, no dispatch modes.
void copy_bytes(const at::Tensor& to, const at::Tensor& from);

// Use: name it, say what it uses, begin() it (all under lock()), then queue its task or run it.
class Operation {
 public:
  Operation(std::string name, StreamIndex stream, Stack stack);
  void use(const at::Tensor& tensor, bool writes);
  void begin();
  // After begin(): for results that the operation allocated.
  void wrote(const at::Tensor& tensor);
  // The access to pinned memory among its uses, if there is one.
  std::vector<Access> host_accesses;

 private:
  Access access(const at::Tensor& tensor, bool writes) const;

  std::string name_;
  StreamIndex stream_;
  Stack stack_;
  uint64_t time_ = 0;
  std::vector<std::pair<at::Tensor, bool>> uses_;
};

const at::Tensor& resize_device(const at::Tensor& self, at::IntArrayRef size,
                                std::optional<at::MemoryFormat> format);
at::Tensor empty_device(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType type);

} // namespace sim
