// Operators of the host that touch pinned memory while a queued copy uses it.
#pragma once

namespace sim {

// For the calling thread, and for the threads that its autograd uses.
void watch_host_operators(bool on);

} // namespace sim
