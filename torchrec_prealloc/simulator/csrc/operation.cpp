#include "operation.h"

#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim {
namespace {

void drop_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

} // namespace

std::pair<uintptr_t, uintptr_t> byte_range(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {0, 0};
  }
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  auto begin =
      reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

at::Tensor as_cpu(const at::Tensor& tensor, bool owning, StorageMap* storages) {
  auto storage = tensor.storage();
  auto make = [&] {
    auto* bytes = storage.mutable_data();
    auto data = owning ? c10::DataPtr(bytes, new c10::Storage(storage), &drop_storage, c10::kCPU)
                       : c10::DataPtr(bytes, c10::kCPU);
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                        c10::GetCPUAllocator(),
                        /*resizable=*/true);
  };
  auto* key = storage.unsafeGetStorageImpl();
  auto cpu_storage = !storages              ? make()
                     : storages->count(key) ? storages->at(key)
                                            : (*storages)[key] = make();
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(cpu_storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    result._set_conj(tensor.is_conj());
    result._set_neg(tensor.is_neg());
  }
  return result;
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  using c10::DispatchKey;
  static const auto above_backend =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                           DispatchKey::PreDispatch, DispatchKey::TESTING_ONLY_GenericMode});
  c10::impl::ExcludeDispatchKeyGuard guard(above_backend);
  to.copy_(from);
}

Operation::Operation(std::string name, StreamIndex stream, Stack stack)
    : name_(std::move(name)), stream_(stream), stack_(std::move(stack)) {
}

void Operation::use(const at::Tensor& tensor, bool writes) {
  uses_.emplace_back(tensor, writes);
}

Access Operation::access(const at::Tensor& tensor, bool writes) const {
  auto [begin, end] = byte_range(tensor);
  return {begin, end, stream_, time_, queue_end(stream_) + 1, writes, name_, stack_};
}

void Operation::begin() {
  time_ = begin_operation(stream_);
  for (auto& [tensor, writes] : uses_) {
    if (on_device(tensor)) {
      follow_fill(stream_, byte_range(tensor).first);
    }
  }
  for (auto& [tensor, writes] : uses_) {
    auto use = access(tensor, writes);
    if (on_device(tensor)) {
      record_device_access(std::move(use));
    } else {
      record_host_access(use);
      host_accesses.push_back(std::move(use));
    }
  }
  uses_.clear();
}

void Operation::wrote(const at::Tensor& tensor) {
  record_device_access(access(tensor, true));
}

} // namespace sim
