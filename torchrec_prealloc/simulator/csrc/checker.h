// The happens-before checker: every allocation, of device memory and of pinned memory, has a Shadow that
// knows which accesses to its bytes are still not ordered before everything that can come.
#pragma once

#include "scheduler.h"

#include <map>
#include <string>

namespace c10 {
struct GatheredContext;
}

namespace sim {

// A Python stack. Taken with the GIL, hence before lock(); turned into text when somebody asks.
using Stack = std::shared_ptr<c10::GatheredContext>;
Stack capture_stack();

struct Frame {
  std::string file;
  int64_t line;
  std::string function;
};
std::vector<Frame> symbolize(const Stack& stack); // innermost first; needs the GIL

constexpr StreamIndex kHost = -1; // the host in the place of a stream
constexpr int kPoison =
    0xA5; // fills memory whose contents are undefined: negative as an integer, tiny as a float

struct Access {
  uintptr_t begin, end;
  StreamIndex stream;
  uint64_t time;     // the operation's clock on its stream
  uint64_t position; // of its task in the stream's queue, once it has run
  bool writes;
  std::string op;
  Stack stack;
};

// The reports' kinds. Their text is part of the Python interface.
constexpr const char* kDataRace = "data race";  // two device accesses, one of them a write, without order
constexpr const char* kReuse = "memory reused"; // handed out while another stream may still read or write it
constexpr const char* kUnsafeFree =
    "unsafe free";                               // freed: the next allocation may hand it out in such a state
constexpr const char* kHostRead = "host read";   // of pinned memory that a queued copy still writes
constexpr const char* kHostWrite = "host write"; // of pinned memory that a queued copy still uses
constexpr const char* kHostFree = "host free";   // of registered memory that a queued copy still uses

struct Report {
  std::string kind;
  Access first, second;
};

struct CheckerSettings {
  bool enabled = false;
  bool repair = true;   // after a report, run the first access, so that later operations find sensible bytes
  bool history = false; // stacks are wanted by the allocator's history too
};
CheckerSettings& checker();

void add_report(const char* kind, const Access& first, const Access& second);
std::vector<Report> take_reports();

class Shadow {
 public:
  // A new access: reports those it is not ordered after, and forgets those that it makes redundant.
  void record(const char* kind, Access access);
  // Checks an access of the host, which needs no record: whatever is queued later is ordered after it.
  // Returns whether it was in order.
  bool check_host(const char* kind, const Access& access) const;
  // The first access that `clock` has not seen, other than those of the streams in `covered`.
  const Access* find_unseen(const Clock& clock, const std::map<StreamIndex, Event>& covered) const;

  void forget_seen(const Clock& clock);
  void clear() {
    accesses_.clear();
  }
  // Moves what lies at or after `address` to the second half of a split block.
  Shadow split(uintptr_t address);
  void merge(Shadow&& other);

 private:
  std::vector<Access> accesses_;
};

} // namespace sim
