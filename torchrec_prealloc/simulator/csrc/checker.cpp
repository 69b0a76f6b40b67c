#include "checker.h"

#include <torch/csrc/profiler/combined_traceback.h>

namespace sim {
namespace {

constexpr size_t kMaxReports = 10000;

std::vector<Report>& reports() {
  static auto* r = new std::vector<Report>;
  return *r;
}

bool overlap(const Access& a, const Access& b) {
  return a.begin < b.end && b.begin < a.end;
}

bool inside(const Access& inner, const Access& outer) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

} // namespace

Stack capture_stack() {
  if (!checker().enabled && !checker().history) {
    return nullptr;
  }
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

std::vector<Frame> symbolize(const Stack& stack) {
  std::vector<Frame> frames;
  if (stack) {
    auto symbols = torch::symbolize({torch::getCapturedTracebackFromContext(stack)});
    for (auto i : symbols.tracebacks.at(0)) {
      auto& frame = symbols.all_frames[i];
      frames.push_back({frame.filename, static_cast<int64_t>(frame.lineno), frame.funcname});
    }
  }
  return frames;
}

CheckerSettings& checker() {
  static auto* settings = new CheckerSettings;
  return *settings;
}

void add_report(const char* kind, const Access& first, const Access& second) {
  if (reports().size() < kMaxReports) {
    reports().push_back({kind, first, second});
  }
  if (checker().repair) {
    run_until(first.stream, first.position);
  }
}

std::vector<Report> take_reports() {
  return std::exchange(reports(), {});
}

void Shadow::record(const char* kind, Access access) {
  if (!checker().enabled || access.begin >= access.end) {
    return;
  }
  const auto& clock = clock_of(access.stream);
  std::vector<Access> kept;
  kept.reserve(accesses_.size() + 1);
  for (auto& earlier : accesses_) {
    bool ordered = clock.has_seen(earlier.stream, earlier.time);
    if (!ordered && overlap(earlier, access) && (earlier.writes || access.writes)) {
      // Fresh memory counts as written by its allocation, so that an unordered first use is found there.
      add_report(earlier.op == "alloc" ? kReuse : kind, earlier, access);
      continue; // said once
    }
    // Whatever is ordered after this access is ordered after those before it too, so it stands for them. Only
    // a write is not replaced by a read, which another read need not be ordered after.
    bool replaced = ordered && inside(earlier, access) && (access.writes || !earlier.writes);
    if (!replaced) {
      kept.push_back(std::move(earlier));
    }
  }
  kept.push_back(std::move(access));
  accesses_ = std::move(kept);
}

bool Shadow::check_host(const char* kind, const Access& access) const {
  for (auto& earlier : accesses_) {
    if (overlap(earlier, access) && (earlier.writes || access.writes) &&
        !host_clock().has_seen(earlier.stream, earlier.time)) {
      add_report(kind, earlier, access);
      return false;
    }
  }
  return true;
}

const Access* Shadow::find_unseen(const Clock& clock, const std::map<StreamIndex, Event>& covered) const {
  for (auto& access : accesses_) {
    if (!covered.count(access.stream) && !clock.has_seen(access.stream, access.time)) {
      return &access;
    }
  }
  return nullptr;
}

void Shadow::forget_seen(const Clock& clock) {
  std::erase_if(accesses_, [&](const Access& a) { return clock.has_seen(a.stream, a.time); });
}

Shadow Shadow::split(uintptr_t address) {
  Shadow second;
  std::vector<Access> first;
  for (auto& access : accesses_) {
    if (access.end > address) {
      second.accesses_.push_back(access);
      second.accesses_.back().begin = std::max(access.begin, address);
    }
    if (access.begin < address) {
      first.push_back(std::move(access));
      first.back().end = std::min(first.back().end, address);
    }
  }
  accesses_ = std::move(first);
  return second;
}

void Shadow::merge(Shadow&& other) {
  std::move(other.accesses_.begin(), other.accesses_.end(), std::back_inserter(accesses_));
}

} // namespace sim
