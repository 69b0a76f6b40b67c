// Collectives, ordered as NCCL orders them: a process group runs on a stream of its own, which waits for the
// caller's; Work.wait() makes the stream that is current then wait for the group's, and blocks no host
// thread. (Gloo does the work in threads of its own, on the same bytes, between the call and wait().)
#pragma once

#include "scheduler.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace sim {

// The stream that the collective runs on; the process group is among the arguments, from stack[base] on.
StreamIndex begin_collective(StreamIndex caller, const torch::jit::Stack& stack, size_t base);

// Wraps the c10d::Work in `work`. The tensors are kept until wait(), as NCCL's process group does; a Work
// that is dropped without it leaves them recorded on the group's stream.
c10::IValue end_collective(const c10::IValue& work, StreamIndex stream, std::vector<at::Tensor> tensors);

} // namespace sim
