// The extension module. Thin: Python gives names and types to what is here.
#include "allocator.h"
#include "device.h"
#include "host_memory.h"
#include "host_operators.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim {
namespace {

py::list frames_of(const Stack& stack) {
  py::list frames;
  for (auto& frame : symbolize(stack)) {
    frames.append(py::dict(py::arg("filename") = frame.file, py::arg("line") = frame.line,
                           py::arg("name") = frame.function));
  }
  return frames;
}

py::object stream_of(StreamIndex stream) { // (device, stream id), or None for the host
  return stream == kHost ? py::object(py::none()) : py::make_tuple(device_of(stream), id_of(stream));
}

py::dict access_of(const Access& access) {
  return py::dict(py::arg("op") = access.op, py::arg("stream") = stream_of(access.stream),
                  py::arg("is_write") = access.writes, py::arg("begin") = access.begin,
                  py::arg("end") = access.end, py::arg("stack") = frames_of(access.stack));
}

// The keys of torch.cuda.memory_stats().
py::dict stats_of(const DeviceStats& stats) {
  py::dict result;
  auto add = [&](const char* name, const c10::CachingAllocator::StatArray& array) {
    const char* pools[] = {"all", "small_pool", "large_pool"};
    for (size_t i = 0; i < array.size(); i++) {
      auto key = std::string(name) + "." + pools[i] + ".";
      result[py::str(key + "current")] = array[i].current;
      result[py::str(key + "peak")] = array[i].peak;
      result[py::str(key + "allocated")] = array[i].allocated;
      result[py::str(key + "freed")] = array[i].freed;
    }
  };
  add("allocation", stats.allocation);
  add("segment", stats.segment);
  add("active", stats.active);
  add("inactive_split", stats.inactive_split);
  add("allocated_bytes", stats.allocated_bytes);
  add("reserved_bytes", stats.reserved_bytes);
  add("active_bytes", stats.active_bytes);
  add("inactive_split_bytes", stats.inactive_split_bytes);
  add("requested_bytes", stats.requested_bytes);
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  return result;
}

// Copies what `get` returns under the lock. Python objects are made after it: making one may collect garbage,
// which may free tensors.
template <typename F>
auto locked(const F& get) {
  auto guard = lock();
  return get();
}

py::dict all_stats() { // {(device, stream id or None for the whole device): statistics}
  py::dict result;
  for (auto& [stream, stats] : locked([] { return stream_stats(); })) {
    result[stream_of(stream)] = stats_of(stats);
  }
  for (int device = 0; device < device_count(); device++) {
    result[py::make_tuple(device, py::none())] = stats_of(locked([&] { return device_stats(device); }));
  }
  return result;
}

py::list reports() {
  py::list result;
  for (auto& report : locked(&take_reports)) {
    result.append(py::make_tuple(report.kind, access_of(report.first), access_of(report.second)));
  }
  return result;
}

py::dict pinned_stats() {
  auto stats = locked([] { return host_stats(); });
  return py::dict(
      py::arg("allocated") = stats.allocated_bytes, py::arg("peak_allocated") = stats.peak_allocated_bytes,
      py::arg("registered") = stats.registered_bytes, py::arg("deferred_frees") = stats.deferred_frees);
}

py::list segments() {
  py::list result;
  uintptr_t last = 0;
  py::dict segment;
  for (auto& block : locked(&list_blocks)) {
    auto& owner = block.segment;
    if (reinterpret_cast<uintptr_t>(owner.base) != last) {
      last = reinterpret_cast<uintptr_t>(owner.base);
      segment = py::dict(py::arg("device") = device_of(owner.stream), py::arg("address") = last,
                         py::arg("total_size") = owner.size, py::arg("stream") = id_of(owner.stream),
                         py::arg("segment_type") = owner.small ? "small" : "large",
                         py::arg("frames") = frames_of(owner.stack), py::arg("blocks") = py::list());
      result.append(segment);
    }
    segment["blocks"].cast<py::list>().append(
        py::dict(py::arg("address") = block.address, py::arg("size") = block.size,
                 py::arg("requested_size") = block.requested, py::arg("state") = block.state,
                 py::arg("frames") = frames_of(block.stack)));
  }
  return result;
}

py::list trace_entries() {
  py::list result;
  for (auto& entry : locked([] { return history(); })) {
    result.append(py::dict(py::arg("action") = entry.action, py::arg("device") = device_of(entry.stream),
                           py::arg("stream") = id_of(entry.stream), py::arg("addr") = entry.address,
                           py::arg("size") = entry.size, py::arg("time_us") = entry.time_us,
                           py::arg("frames") = frames_of(entry.stack)));
  }
  return result;
}

void begin_check(const std::string& schedule, uint64_t seed, bool repair) {
  auto guard = lock();
  synchronize_everything();
  forget_device_accesses();
  forget_host_accesses();
  take_reports();
  set_schedule(schedule == "lazy"    ? Schedule::Lazy
               : schedule == "eager" ? Schedule::Eager
                                     : Schedule::Random,
               seed);
  checker().enabled = true;
  checker().repair = repair;
}

void end_check() {
  auto guard = lock();
  check_pending_frees();
  synchronize_everything();
  set_schedule(Schedule::Eager, 0);
  checker().enabled = false;
}

} // namespace
} // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  install_hooks();
  m.def("set_device_count", &set_device_count);
  m.def("begin_check", &begin_check);
  m.def("end_check", &end_check);
  m.def("watch_host_operators", &watch_host_operators);
  m.def("take_reports", &reports);
  m.def("stats", &all_stats);
  m.def("pinned_stats", &pinned_stats);
  m.def("reset_peak_stats", [] {
    auto guard = lock();
    reset_peak_stats();
    host_stats().peak_allocated_bytes = host_stats().allocated_bytes;
  });
  m.def("empty_cache", [] { device_allocator().emptyCache(); });
  m.def("set_memory_limit", [](std::optional<size_t> bytes) {
    auto guard = lock();
    set_memory_limit(bytes);
  });
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("record_history", [](size_t max_entries) {
    auto guard = lock();
    record_history(max_entries);
  });
  m.def("segments", &segments);
  m.def("trace", &trace_entries);
}
