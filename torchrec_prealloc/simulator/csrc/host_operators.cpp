// How: a boxed kernel for every operator at TESTING_ONLY_GenericMode, a dispatch key above autograd that
// PyTorch keeps for such modes and nobody else uses. It is reached only by threads that switched it on. It
// sees an operator as it was called, before it is taken apart, and no raw access: `tolist()`, NumPy, other
// threads. For their writes there are the snapshots of host_memory.cpp.
#include "host_operators.h"

#include "host_memory.h"
#include "operation.h"
#include "schemas.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace sim {
namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

template <typename F>
void for_each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      f(tensor);
    }
  }
}

struct HostUse {
  uintptr_t begin, end;
  bool writes;
};

// Uses of pinned memory by an operator that stays on the host. Copies to and from the device are none: their
// order is the stream's business.
std::vector<HostUse> host_uses(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  std::vector<HostUse> uses;
  bool device = false;
  size_t base = stack.size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = stack[base + i];
    device |= value.isDevice() && value.toDevice().type() == kDevice;
    auto* alias = schema.arguments()[i].alias_info();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      device |= on_device(tensor);
      if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
          !tensor.has_storage()) {
        return;
      }
      bool view = alias && !alias->isWrite();
      if (!view && is_pinned(tensor.storage().data())) {
        auto [begin, end] = byte_range(tensor);
        uses.push_back({begin, end, alias && alias->isWrite()});
      }
    });
  }
  return device ? std::vector<HostUse>() : uses;
}

void watch(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto& schema = handle.schema();
  if (any_pinned_memory() && !reads_no_values(schema.name())) {
    if (auto uses = host_uses(schema, *stack); !uses.empty()) {
      auto python = capture_stack();
      auto guard = lock();
      for (auto& use : uses) {
        check_host_operator(use.begin, use.end, use.writes, schema.name(), python);
      }
    }
  }
  c10::impl::ExcludeDispatchKeyGuard once(kKey);
  handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&watch>());
}

} // namespace

void watch_host_operators(bool on) {
  c10::impl::tls_set_dispatch_key_included(kKey, on);
}

} // namespace sim
