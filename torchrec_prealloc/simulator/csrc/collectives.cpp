#include "collectives.h"

#include "allocator.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace sim {
namespace {

// Gloo's results are CPU tensors over the bytes of those that it was given: give back the latter.
c10::IValue as_given(const c10::IValue& value, const std::vector<at::Tensor>& given) {
  if (!value.isTensorList()) {
    return value;
  }
  auto tensors = value.toTensorVector();
  for (auto& tensor : tensors) {
    for (auto& original : given) {
      if (original.data_ptr() == tensor.data_ptr() && original.sizes() == tensor.sizes()) {
        tensor = original;
      }
    }
  }
  return tensors;
}

class OrderedWork final : public c10d::Work {
 public:
  OrderedWork(c10::intrusive_ptr<c10d::Work> work, Event done, std::vector<at::Tensor> tensors)
      : c10d::Work(-1, work->retrieveOpType()),
        work_(std::move(work)),
        done_(std::move(done)),
        held_(std::move(tensors)) {
  }

  ~OrderedWork() override {
    for (auto& tensor : held_) {
      device_allocator().recordStream(tensor.storage().data_ptr(), as_c10(done_->stream));
    }
  }

  bool isCompleted() override {
    return work_->isCompleted();
  }
  bool isSuccess() const override {
    return work_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return work_->exception();
  }
  int sourceRank() const override {
    return work_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return held_;
  }
  void abort() override {
    work_->abort();
  }

  void synchronize() override {
    order_current_stream();
  }
  void blockCurrentStream() override {
    work_->wait(); // gloo has no stream that could be waited for
    order_current_stream();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool completed = work_->wait(timeout);
    order_current_stream();
    if (retrieveOpType() == c10d::OpType::BARRIER) { // the one wait that blocks the host
      auto guard = lock();
      synchronize_event(done_);
    }
    return completed;
  }

  // DistributedDataParallel waits for this one. A future of the device makes the stream that is current at
  // its wait() follow the streams that are current where it is completed: in gloo's thread, the group's.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto work = work_->getFuture();
    c10::Device device(kDevice, static_cast<c10::DeviceIndex>(device_of(done_->stream)));
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(work->elementType(), std::vector<c10::Device>{device});
    work->addCallback([future, stream = done_->stream, held = held_](c10::ivalue::Future& finished) {
      if (finished.hasError()) {
        future->setError(finished.exception_ptr());
        return;
      }
      auto previous = current_stream(device_of(stream));
      set_current_stream(stream);
      future->markCompleted(as_given(finished.value(), held));
      set_current_stream(previous);
    });
    return future;
  }

 private:
  void order_current_stream() {
    std::vector<at::Tensor> released; // after the lock
    auto guard = lock();
    wait_event(current_stream(device_of(done_->stream)), done_);
    released.swap(held_);
  }

  c10::intrusive_ptr<c10d::Work> work_;
  Event done_;
  std::vector<at::Tensor> held_;
};

} // namespace

StreamIndex begin_collective(StreamIndex caller, const torch::jit::Stack& stack, size_t base) {
  const void* group = nullptr;
  for (size_t i = base; i < stack.size() && !group; i++) {
    if (stack[i].isCustomClass()) {
      group = stack[i].toObjectRef().getSlot(0).toCapsule().get();
    }
  }
  auto guard = lock();
  auto stream = collective_stream(device_of(caller), group);
  wait_event(stream, record_event(caller));
  return stream;
}

c10::IValue end_collective(const c10::IValue& work, StreamIndex stream, std::vector<at::Tensor> tensors) {
  auto guard = lock();
  return c10::IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<OrderedWork>(
      work.toCustomClass<c10d::Work>(), record_event(stream), std::move(tensors))));
}

} // namespace sim
