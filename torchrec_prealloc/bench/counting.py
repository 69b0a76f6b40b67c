"""How many copies to a device, and allocations on it, a batch's own `.to` makes.

The operations are counted where PyTorch dispatches them, under a `TorchDispatchMode`:

- `aten._to_copy` with the device as its target: one allocation and one copy
- `aten.copy_` from another device onto it: one copy
- `aten.empty`, `aten.empty_like`, `aten.empty_strided` and their kin on the device: one allocation

Tensors without elements count for nothing: they need no memory and start no copy.

Where the target is a CPU, as the batch already is, `Tensor.to(device)` returns the tensor itself and there is nothing
to count. For counting only, a `TorchFunctionMode` then turns each `Tensor.to(device)` into a real copy (`copy=True`),
which gives the operations that a device would see, and `aten.copy_` counts although both its sides are on the CPU.
What the caching allocator does below (whether an allocation asks the driver for memory) is not seen here.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass
class OperationCounts:
    """Copies to a device, and allocations on it, so far."""

    copies: int = 0
    allocations: int = 0


def count_to(batch: Any, device: torch.device, non_blocking: bool = True) -> OperationCounts:
    """The operations of one `batch.to(device, non_blocking=...)`; the copy itself is thrown away.

    Args:
        batch: a tensor, or anything with such a `.to`, on the host
        device: where to; on a CPU every `.to` is made to copy (see the module's docstring)
        non_blocking: passed on
    """
    with count_operations(device) as counts:
        batch.to(device, non_blocking=non_blocking)
    return counts


@contextmanager
def count_operations(device: torch.device) -> Iterator[OperationCounts]:
    """Count what runs in the block and has `device` as its target. The counts are complete when the block ends."""
    counts = OperationCounts()
    with ExitStack() as modes:
        modes.enter_context(_Count(device, counts))
        if device.type == "cpu":
            modes.enter_context(_ToCopies())
        yield counts


class _Count(TorchDispatchMode):
    def __init__(self, device: torch.device, counts: OperationCounts) -> None:
        super().__init__()
        self.device = device
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        if isinstance(result, torch.Tensor) and self._on_device(result) and result.numel():
            name = func.overloadpacket._qualified_op_name
            if name == "aten::_to_copy":
                # A change of dtype on the device itself allocates there too, but moves nothing to it.
                self.counts.copies += self._from_elsewhere(args[0])
                self.counts.allocations += 1
            elif name == "aten::copy_":
                self.counts.copies += self._from_elsewhere(args[1])
            elif name.startswith(("aten::empty", "aten::new_empty")):
                self.counts.allocations += 1
        return result

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    def _from_elsewhere(self, source: torch.Tensor) -> bool:
        return self.device.type == "cpu" or not self._on_device(source)


class _ToCopies(TorchFunctionMode):
    """`Tensor.to(device)` copies, also onto the device where the tensor is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.to and _names_device(args[1:], given):
            given["copy"] = True
        return func(*args, **given)


def _names_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    return isinstance(target, (torch.device, str, int, torch.Tensor))
