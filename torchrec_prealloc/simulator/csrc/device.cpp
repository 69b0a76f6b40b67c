// PyTorch's view of the device: its guard (streams, events) and its hooks (torch.mtia, torch.accelerator).
#include "device.h"

#include "allocator.h"
#include "host_memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/MTIAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace sim {
namespace {

c10::Device as_device(int index) {
  return c10::Device(kDevice, static_cast<c10::DeviceIndex>(index));
}

const Event& event_in(void* pointer) {
  return *static_cast<Event*>(pointer);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return as_device(exchange_device(device.index()));
  }
  c10::Device getDevice() const override {
    return as_device(current_device());
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_c10(current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_c10(default_stream(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return as_c10(pool_stream(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return as_c10(pool_stream(device.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto previous = current_stream(stream.device_index());
    set_current_stream(from_c10(stream));
    return as_c10(previous);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto guard = lock();
    return query_stream(from_c10(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto guard = lock();
    synchronize_stream(from_c10(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    auto guard = lock();
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    auto guard = lock();
    if (!*event) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = record_event(from_c10(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      auto guard = lock();
      wait_event(from_c10(stream), event_in(event));
    }
  }
  bool queryEvent(void* event) const override {
    auto guard = lock();
    return !event || query_event(event_in(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      auto guard = lock();
      synchronize_event(event_in(event));
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    return event_in(second)->recorded_ms - event_in(first)->recorded_ms; // when the host recorded them
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }
};

} // namespace

C10_REGISTER_GUARD_IMPL(MTIA, Guard)

} // namespace sim

namespace at { // where the hooks' registry lives, which looks for a class of this name
struct MTIAHooks final : MTIAHooksInterface {
  MTIAHooks(MTIAHooksArgs /*args*/ = {}) {
  } // the registry passes arguments in some versions, in others none
  void init() const override {
  }
  bool hasMTIA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override {
    return true;
  }
  std::string showConfig() const override {
    return "torchrec_prealloc.simulator";
  }

  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(sim::device_count());
  }
  DeviceIndex getDeviceCount() const override {
    return deviceCount();
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(sim::current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    sim::exchange_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(sim::exchange_device(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex device) const override {
    auto guard = sim::lock();
    sim::synchronize_device(device < 0 ? sim::current_device() : device);
  }

  c10::Stream getCurrentStream(DeviceIndex device) const override {
    return sim::as_c10(sim::current_stream(device));
  }
  int64_t getCurrentRawStream(DeviceIndex device) const override {
    return sim::current_stream(device);
  }
  c10::Stream getDefaultStream(DeviceIndex device) const override {
    return sim::as_c10(sim::default_stream(device));
  }
  void setCurrentStream(const c10::Stream& stream) const override {
    auto index = sim::from_c10(stream);
    sim::exchange_device(sim::device_of(index));
    sim::set_current_stream(index);
  }

  bool isPinnedPtr(const void* address) const override {
    return sim::is_pinned(address);
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return &sim::pinned_allocator();
  }
  void emptyCache() const override {
    sim::device_allocator().emptyCache();
  }
  void resetPeakMemoryStats(DeviceIndex device) const override {
    sim::device_allocator().resetPeakStats(device);
  }

  // The CPU's generator, so that a model draws the same numbers on both.
  const Generator& getDefaultGenerator(DeviceIndex /*device*/) const override {
    return detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex /*device*/) const override {
    return detail::createCPUGenerator();
  }
};
REGISTER_MTIA_HOOKS(MTIAHooks)
} // namespace at

namespace sim {

void install_hooks() {
  auto& hooks = at::detail::getMTIAHooks();
  if (!hooks.hasMTIA()) {
    // Somebody asked for MTIA before the simulator was loaded, and PyTorch keeps the empty hooks for good.
    // They have no state, nor have ours: put ours in their place.
    static_assert(sizeof(at::MTIAHooks) == sizeof(at::MTIAHooksInterface));
    new (const_cast<at::MTIAHooksInterface*>(&hooks)) at::MTIAHooks();
  }
}

} // namespace sim
