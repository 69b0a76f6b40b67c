// Every operator without a kernel of its own runs its CPU kernel on the same bytes, at the call, after what
// its stream has queued. The checker sees it as an operation on the current stream like any other.
#include "collectives.h"
#include "operation.h"
#include "schemas.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/as_strided_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace sim {
namespace {

using c10::IValue;

bool holds_tensors(const IValue& value) {
  if (!value.isList()) {
    return false;
  }
  auto kind = value.toList().elementType()->kind();
  return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::OptionalType ||
         kind == c10::TypeKind::ListType;
}

// `value` with `f` applied to every tensor in it, in lists and lists of lists too.
IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? f(value.toTensor()) : value;
  }
  if (!holds_tensors(value)) {
    return value;
  }
  auto list = value.toList();
  c10::impl::GenericList result(list.elementType());
  result.reserve(list.size());
  for (size_t i = 0; i < list.size(); i++) {
    result.push_back(map_tensors(list.get(i), f));
  }
  return result;
}

// One call: its device tensors and their CPU twins.
struct Call {
  const c10::FunctionSchema& schema;
  std::vector<std::pair<at::Tensor, at::Tensor>> twins;
  StorageMap storages;
  std::optional<c10::Device> device;

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      return tensor;
    }
    for (auto& [original, twin] : twins) {
      if (original.is_same(tensor)) {
        return twin;
      }
    }
    twins.emplace_back(tensor, as_cpu(tensor, /*owning=*/true, &storages));
    return twins.back().second;
  }

  // A result of the CPU kernel: one of the arguments, a view of one, or new.
  at::Tensor to_device(const at::Tensor& result, Operation& op) {
    if (!result.device().is_cpu()) {
      return result;
    }
    auto* bytes = result.storage().data();
    for (auto& [original, twin] : twins) {
      if (twin.is_same(result)) {
        return original;
      }
    }
    for (auto& [original, twin] : twins) {
      if (bytes && bytes == twin.storage().data()) {
        return at::native::as_strided_tensorimpl(original, result.sizes(), result.strides(),
                                                 result.storage_offset());
      }
    }
    return new_on_device(result, op);
  }

  static at::Tensor new_on_device(const at::Tensor& result, Operation& op) {
    auto tensor = empty_device(result.sizes(), result.strides(), result.scalar_type());
    auto guard = lock();
    run_all(current_stream()); // the poison of the new block comes first
    op.wrote(tensor);
    copy_bytes(as_cpu(tensor, false), result);
    return tensor;
  }
};

// ---- CPU kernels that build their own autograd graph
//
// FBGEMM's lookups are autograd functions behind the CPU key. Their graph must hang on the device's: the two
// functions below carry gradients from one to the other. When a gradient enters the CPU graph, its kernels
// run at once, on the forward's arguments.

struct ToCpu : torch::autograd::Function<ToCpu> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) {
    return as_cpu(tensor, /*owning=*/true);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    Operation op("backward", current_stream(), capture_stack());
    {
      auto guard = lock();
      op.begin();
    }
    return {Call::new_on_device(grads[0], op)};
  }
};

struct BackwardUses { // a struct of our own: tensors in plain arguments would become inputs of the graph
  std::string name;
  std::vector<at::Tensor> read;
};

struct ToDevice : torch::autograd::Function<ToDevice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& result,
                            const BackwardUses& uses) {
    context->saved_data["read"] = uses.read;
    context->saved_data["name"] = uses.name;
    Operation op(uses.name, current_stream(), capture_stack());
    {
      auto guard = lock();
      op.begin();
    }
    return Call::new_on_device(result, op);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    at::Tensor grad;
    if (grads[0].defined()) {
      c10::DeviceGuard device_guard(grads[0].device());
      auto stream = current_stream();
      Operation op(context->saved_data["name"].toStringRef() + " backward", stream, capture_stack());
      auto guard = lock();
      op.use(grads[0], false);
      for (auto& tensor : context->saved_data["read"].toTensorVector()) {
        op.use(tensor, false);
      }
      op.begin();
      run_all(stream);
      grad = at::detail::empty_cpu(grads[0].sizes(), grads[0].scalar_type());
      copy_bytes(grad, as_cpu(grads[0], false));
    }
    return {grad, at::Tensor()};
  }
};

// An operator may have resized its outputs, or given them other memory.
void take_over_resized(Call& call, const std::vector<std::pair<std::vector<int64_t>, const void*>>& before,
                       Operation& op) {
  for (size_t i = 0; i < call.twins.size(); i++) {
    auto& [original, twin] = call.twins[i];
    bool moved = twin.storage().data() != before[i].second;
    if (!moved && twin.sizes() == at::IntArrayRef(before[i].first)) {
      continue;
    }
    resize_device(original, twin.sizes(), std::nullopt);
    original.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides());
    if (moved) {
      auto guard = lock();
      run_all(current_stream());
      op.wrote(original);
      copy_bytes(as_cpu(original, false), twin);
    }
  }
}

} // namespace

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  auto& schema = handle.schema();
  Call call{schema};
  size_t count = schema.arguments().size(), base = stack->size() - count;
  auto argument = [&](size_t i) -> IValue& {
    return (*stack)[base + i];
  };

  // 1. The device, and the operation's uses.
  bool needs_grad = false;
  std::vector<std::pair<at::Tensor, bool>> uses;
  BackwardUses backward{schema.name()};
  for (size_t i = 0; i < count; i++) {
    if (argument(i).isDevice() && argument(i).toDevice().type() == kDevice && !call.device) {
      call.device = argument(i).toDevice();
    }
    bool writes = writes_argument(schema, i);
    map_tensors(argument(i), [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        call.device = call.device ? call.device : tensor.device();
        needs_grad |= tensor.requires_grad();
        uses.emplace_back(tensor, writes);
        backward.read.push_back(tensor);
      }
      return tensor;
    });
  }
  c10::OptionalDeviceGuard device_guard(call.device);
  auto stream = current_stream();
  // Reached without an autograd kernel: the CPU kernel may build its own graph.
  bool own_graph = needs_grad && c10::GradMode::is_enabled() &&
                   !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradCPU);

  // 2. What the operation waits for.
  bool collective = is_collective(schema) && call.device;
  if (collective) {
    stream = begin_collective(stream, *stack, base);
  }
  Operation op(schema.name(), stream, capture_stack());
  {
    auto guard = lock();
    for (auto& [tensor, writes] : uses) {
      op.use(tensor, writes);
    }
    op.begin();
    run_all(stream);
    if (synchronizes_host(schema.name())) {
      synchronize_stream(stream);
    }
  }

  // 3. The CPU kernel.
  for (size_t i = 0; i < count; i++) {
    if (argument(i).isDevice() && argument(i).toDevice().type() == kDevice) {
      argument(i) = c10::Device(c10::kCPU);
    } else {
      argument(i) = map_tensors(argument(i), [&](const at::Tensor& t) { return call.to_cpu(t); });
    }
  }
  if (own_graph) {
    std::unordered_map<c10::TensorImpl*, at::Tensor> linked;
    for (auto& [original, twin] : call.twins) {
      if (original.requires_grad()) {
        auto link = ToCpu::apply(original);
        linked.emplace(twin.unsafeGetTensorImpl(), link);
        twin = link;
      }
    }
    for (size_t i = 0; i < count; i++) {
      argument(i) = map_tensors(argument(i), [&](const at::Tensor& t) {
        auto it = linked.find(t.unsafeGetTensorImpl());
        return it == linked.end() ? t : it->second;
      });
    }
  }
  std::vector<std::pair<std::vector<int64_t>, const void*>> before;
  for (auto& [original, twin] : call.twins) {
    before.emplace_back(twin.sizes().vec(), twin.storage().data());
  }
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  // 4. Its results.
  take_over_resized(call, before, op);
  size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; call.device && i < stack->size(); i++) {
    auto& result = (*stack)[i];
    if (collective && result.isCustomClass()) {
      std::vector<at::Tensor> held;
      for (auto& use : uses) {
        held.push_back(use.first);
      }
      result = end_collective(result, stream, std::move(held));
      continue;
    }
    result = map_tensors(result, [&](const at::Tensor& tensor) {
      if (own_graph && tensor.requires_grad() && tensor.device().is_cpu()) {
        return ToDevice::apply(tensor, backward);
      }
      return call.to_device(tensor, op);
    });
  }
}

TORCH_LIBRARY_IMPL(_, MTIA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace sim
