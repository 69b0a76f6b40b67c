// The operators that this device implements itself: factories, views, resizing, copies. All others go through
// fallback.cpp. Only copies are asynchronous.
#include "operation.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {
namespace {

constexpr c10::DispatchKeySet kKeys(kDispatchKey);

c10::Device current_c10_device() {
  return c10::Device(kDevice, static_cast<c10::DeviceIndex>(current_device()));
}

at::ScalarType or_default(std::optional<at::ScalarType> type) {
  return type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(current_c10_device()));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> /*pin*/) {
  c10::DeviceGuard guard(device.value_or(current_c10_device()));
  return empty_device(size, stride, or_default(type));
}

// Whether the bytes can be moved as they are, by one cudaMemcpyAsync. Otherwise CUDA goes through a
// temporary, and the host's side of the copy happens at the call.
bool is_plain_copy(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// The two devices' streams wait for each other, as in CUDA's peer-to-peer copy.
void meet(StreamIndex a, StreamIndex b) {
  if (a != b) {
    auto from_a = record_event(a), from_b = record_event(b);
    wait_event(a, from_b);
    wait_event(b, from_a);
  }
}

// Queues the copy. `to` and `from` are CPU tensors; `host` are the task's accesses to pinned memory.
void queue_copy(StreamIndex stream, at::Tensor to, at::Tensor from, std::vector<Access> host) {
  enqueue(stream, [to = std::move(to), from = std::move(from), host = std::move(host)] {
    for (auto& access : host) {
      if (access.writes) {
        end_host_access(access, /*about_to_write=*/true);
      }
    }
    copy_bytes(to, from);
    for (auto& access : host) {
      end_host_access(access, /*about_to_write=*/false);
    }
  });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(source)) {
    return self;
  }
  bool to_device = on_device(self), from_device = on_device(source);
  auto& host = to_device ? source : self; // where one of them is there
  bool pinned = !(to_device && from_device) && is_pinned(host.storage().data());
  bool direct = pinned && is_plain_copy(self, source);
  c10::DeviceGuard device_guard(from_device ? source.device() : self.device());
  auto stream = current_stream(), other = to_device ? current_stream(self.device().index()) : stream;
  auto stack = capture_stack();
  at::Tensor staged;
  if (!from_device && !direct) { // pageable memory, and what needs a temporary, is read during the call
    staged = at::detail::empty_cpu(self.sizes(), self.scalar_type());
    copy_bytes(staged, source);
  }
  auto guard = lock();
  meet(stream, other);
  Operation op("copy_", stream, std::move(stack));
  if (from_device || direct) {
    op.use(source, false);
  }
  if (to_device || direct) {
    op.use(self, true);
  }
  op.begin();
  queue_copy(stream, to_device || direct ? as_cpu(self, false) : self,
             from_device || direct ? as_cpu(source, false) : staged, std::move(op.host_accesses));
  meet(stream, other);
  bool host_waits = from_device && !to_device ? !non_blocking || !direct : !from_device && !non_blocking;
  if (host_waits) {
    synchronize_stream(stream);
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

} // namespace

at::Tensor empty_device(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType type) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, type);
}

// Grows the storage where it is too small; the old bytes are copied in stream order.
const at::Tensor& resize_device(const at::Tensor& self, at::IntArrayRef size,
                                std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard device_guard(self.device());
  if (self.sizes() == size && !format) {
    return self;
  }
  auto* impl = self.unsafeGetTensorImpl();
  auto storage = self.storage();
  auto bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > storage.nbytes()) {
    auto old_bytes = static_cast<int64_t>(storage.nbytes());
    auto grown = empty_device({static_cast<int64_t>(bytes)}, {1}, at::kByte);
    if (old_bytes > 0) {
      auto old = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), kKeys,
                                                          caffe2::TypeMeta::Make<uint8_t>());
      old.unsafeGetTensorImpl()->set_sizes_contiguous({old_bytes});
      auto start = at::native::as_strided_tensorimpl(grown, {old_bytes}, {1}, 0);
      copy_(start, old, /*non_blocking=*/true);
    }
    storage.set_data_ptr(grown.storage().set_data_ptr(c10::DataPtr(nullptr, self.device())));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

TORCH_LIBRARY_IMPL(aten, MTIA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("resize_", &resize_device);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
}

} // namespace sim
