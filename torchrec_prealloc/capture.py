"""What a batch class' own `to` does: run it, and put its host → device conversions on the side stream.

While the class' `to` runs, each conversion of a host tensor gets its device memory at once and is queued; everything
else runs as written, on the stream that owns the memory. An operation that reads a queued tensor, or changes a host
tensor that a queued copy still reads, first makes the queue run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_prealloc.layout import Form

_TO_COPY = torch.ops.aten._to_copy.default
_READS_NOTHING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.record_stream.default,
    torch.ops.aten.is_pinned.default,
}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but strided host memory: what can be copied byte by byte, without a gradient."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._sources and func not in _READS_NOTHING and not func.is_view:
            self._order(func, args, kwargs)
        if func is _TO_COPY and self._is_arrival(args[0], kwargs):
            return self._queue(args[0], kwargs)
        return func(*args, **kwargs)

    def _is_arrival(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is None or type(source) is not Tensor or not source.is_cpu or source.layout is not torch.strided:
            return False
        same = device.type == self._device.type and device.index in (None, self._device.index)
        return same and not (source.is_quantized or source.is_conj() or source.is_neg())

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
                self._run(reuse_source=True)
                return
        if reads:
            self._run(reuse_source=False)

    def _run(self, reuse_source: bool) -> None:
        self._flush(reuse_source)
        self._targets.clear()
        self._sources.clear()


class RealCopies(TorchFunctionMode):
    """Makes `Tensor.to(<CPU device>)` a copy, which it is not otherwise.

    On a CPU device a batch's `to` has nothing to convert. With this it converts what it would on an accelerator, so
    that the same code runs there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to and _names_cpu(args, kwargs):
            kwargs["copy"] = True
        return func(*args, **kwargs)


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
