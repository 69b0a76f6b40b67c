"""What a batch class' own `to` does: run it, and put its host → device conversions on the side stream.

While the class' `to` runs, each conversion of a plain host tensor gets its device memory at once and is queued;
everything else runs as written, on the stream that owns the memory. An operation that reads a queued tensor, or changes
a host tensor that a queued copy still reads, first makes the queue run. What PyTorch does not dispatch (a kernel
launched on a raw pointer) is not seen.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_prealloc.layout import Form
from torchrec_prealloc.plain import is_plain

_TO_COPY = torch.ops.aten._to_copy.default
_READS_NOTHING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.record_stream.default,
    torch.ops.aten.is_pinned.default,
}


class Capture(TorchDispatchMode):
    """Queues the host → device conversions made inside its `with`.

    Args:
        device: the target.
        arrive: `arrive(source, form)`: the device tensor of dtype, shape and strides `form` that `source`, a plain host
            tensor of that dtype, will be copied into.
        flush: `flush(reuse_source)`: run the queue, and order the current stream after it; with `reuse_source` the
            host tensors may be changed when it returns.
    """

    def __init__(
        self,
        device: torch.device,
        arrive: Callable[[Tensor, Form], Tensor],
        flush: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._device = device
        self._arrive = arrive
        self._flush = flush
        self.captured: dict[int, list[Tensor]] = {}
        """The device tensors for the `id` of each host tensor that was converted."""
        self._kept: list[Tensor] = []
        self._targets: set[int] = set()
        self._sources: set[int] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._sources and func not in _READS_NOTHING and not func.is_view:
            self._order(func, args, kwargs)
        if func is _TO_COPY and self._is_arrival(args[0], kwargs):
            return self._queue(args[0], kwargs)
        return func(*args, **kwargs)

    def _is_arrival(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is None or not is_plain(source):
            return False
        return bool(device.type == self._device.type and device.index in (None, self._device.index))

    def _queue(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        wanted = {**kwargs, "device": torch.device("meta"), "non_blocking": False}
        wanted.pop("pin_memory", None)
        like = _TO_COPY(source, **wanted)  # the shape and strides that the conversion gives, without its bytes
        # As CUDA's own copy does, a change of dtype happens on the host, before the transfer.
        host = source if source.dtype == like.dtype else source.to(like.dtype)
        target = self._arrive(host, (like.dtype, like.shape, like.stride()))
        self.captured.setdefault(id(source), []).append(target)
        self._kept.append(source)  # so that no other tensor gets its id
        self._targets.add(_storage(target))
        self._sources.add(_storage(source))
        return target

    def _order(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        reads = False
        for tensor in _tensors((args, kwargs)):
            key = _storage(tensor)
            if key in self._targets:
                reads = True
            elif key in self._sources and func._schema.is_mutable:
                self.run_queue(reuse_source=True)
                return
        if reads:
            self.run_queue(reuse_source=False)

    def run_queue(self, reuse_source: bool) -> None:
        """Run what is queued, as `flush` says."""
        self._flush(reuse_source)
        self._targets.clear()
        self._sources.clear()


def runs_in(error: BaseException, cls: type) -> bool:
    """Whether an exception passed through a method of `cls` on its way."""
    codes = {value.__code__ for value in vars(cls).values() if isinstance(value, types.FunctionType)}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


class RealCopies(TorchFunctionMode):
    """Makes `Tensor.to(<CPU device>)` a copy, which it is not otherwise.

    On a CPU device a batch's `to` has nothing to convert. With this it converts what it would on an accelerator, so
    that the same code runs there.

    Args:
        flush: makes the queue run: on the CPU Python may read a tensor's memory without an operation.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        super().__init__()
        self._flush = flush

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to and _names_cpu(args, kwargs):
            kwargs["copy"] = True
        elif func in _READS_MEMORY:
            self._flush()
        return func(*args, **kwargs)


_READS_MEMORY = {
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.tolist,
}


def _names_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(device, str):
        device = torch.device(device)
    # `.to(device, dtype, non_blocking, copy)`: where copy is given by position the call says itself what it wants.
    return isinstance(device, torch.device) and device.type == "cpu" and len(args) < 5


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided and type(tree) is Tensor:
            yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
