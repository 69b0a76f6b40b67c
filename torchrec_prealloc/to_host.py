"""The other direction: a state's tensors go to pinned host memory, all at once, on a side stream.

`transfer.py` and this are the only modules that touch streams and events. Both get them from
`torch.get_device_module(device)`, so CUDA, MTIA, XPU, NPU and the simulator are the same to them. Tensors of a device
without streams (the CPU) are copied by the host at once, into the same kept memory.

Where the bytes go: a tensor of `GATHER_BYTES` or more makes one transfer, straight to its place. Smaller ones are
gathered on the device, on the stream that produced them, and make one transfer for each dtype. Tensors that overlap
(tied weights, a view of another tensor) make one transfer for the bytes that they cover, and overlap on the host too.

    copy = to_pinned_host(model.state_dict())   # queued; the host goes on
    copy.wait()                                  # from here the current stream may change the tensors
    optimizer.step()
    write(copy.result())                         # the host waits, and has the tensors as they were at the call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc.batch import Walk
from torchrec_prealloc.batch_types import Kind, structure
from torchrec_prealloc.pinned_memory import Bytes, PinnedMemory, PinnedSet
from torchrec_prealloc.state_layout import Alone, Overlapping, StateLayout, is_strided
from torchrec_prealloc.wrapped import taken_apart

GATHER_BYTES = 64 << 10
"""Smallest tensor that makes a transfer of its own."""


class HostOrdering:
    """Every ordering that a copy to the host relies on, one method for each.

    The tests take them away one at a time, and show that the race checker or wrong numbers notice.
    """

    def copy_after_producer(self, side: Any, producer: Any) -> None:
        """The tensors may still be written by work queued on the current stream before the call."""
        side.wait_stream(producer)

    def change_after_copy(self, stream: Any, copied: Any) -> None:
        """A stream changes the tensors only when they are copied."""
        stream.wait_event(copied)

    def free_after_copy(self, tensor: Tensor, side: Any) -> None:
        """Tensors may be freed at once; their memory is reused only when they are copied."""
        tensor.record_stream(side)

    def host_after_copy(self, copied: Any) -> None:
        """The host reads or reuses the pinned memory only when the copies into it have run."""
        copied.synchronize()

    def is_free(self, kept: PinnedSet) -> bool:
        """Pinned memory is used again only when nothing refers to it any more."""
        return not kept.is_lent()


@dataclass
class ToHostStats:
    """What was done, counted at the calls."""

    copies: int = 0
    """States."""
    tensors: int = 0
    transfers: int = 0
    """From a device, or from host memory to host memory."""
    bytes: int = 0


class HostCopy:
    """A state on its way to the host.

    Attributes:
        tensors: where each tensor arrives, in the order of `ToHost.start`. Read them only after `synchronize`.
    """

    def __init__(self, tensors: list[Tensor], copied: list[tuple[torch.device, Any]], order: HostOrdering) -> None:
        self.tensors = tensors
        self.tree: Any = tensors
        """What `result` gives."""
        self._copied = copied
        self._order = order

    def wait(self) -> None:
        """Order the current stream of each device after the copies; it may change the tensors from here on.

        The host does not wait.
        """
        for device, copied in self._copied:
            self._order.change_after_copy(torch.get_device_module(device).current_stream(device), copied)

    def synchronize(self) -> None:
        """Make the host wait until the copies have run."""
        for _, copied in self._copied:
            self._order.host_after_copy(copied)

    def done(self) -> bool:
        """Whether the copies have run: every stream may change the tensors, and the host may read the copies."""
        return all(copied.query() for _, copied in self._copied)

    def without_tensors(self) -> HostCopy:
        """The same events: to wait for a copy without keeping its memory."""
        return HostCopy([], self._copied, self._order)

    def result(self) -> Any:
        """What was copied, in host memory, as it was at the call. The host waits until it is there."""
        self.synchronize()
        return self.tree


class ToHost:
    """Copies states to host memory that is kept and reused.

    Args:
        max_in_flight: how many copies may be in host memory at a time, each in memory of its own. A copy is there
            until nothing refers to its tensors any more; another one waits, and never overwrites it.
        patience: seconds that it waits before it raises `MemoryInUse`.
        gather_bytes: smallest tensor that makes a transfer of its own.
        ordering: for tests.
    """

    def __init__(
        self,
        max_in_flight: int = 2,
        patience: float = 600.0,
        gather_bytes: int = GATHER_BYTES,
        ordering: type[HostOrdering] = HostOrdering,
    ) -> None:
        self.stats = ToHostStats()
        self._order = ordering()
        self.memory = PinnedMemory(max_in_flight, patience, self._order.host_after_copy, self._order.is_free)
        self._gather_bytes = gather_bytes
        self._sides: dict[torch.device, Any] = {}

    def start(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Queue a copy of each tensor, as its device's current stream will have left it.

        Args:
            tensors: plain or of any subclass, on any device; a tensor may appear more than once.

        Raises:
            MemoryInUse: `max_in_flight` earlier copies are still referred to.
            BatchError: a tensor's memory was freed.
        """
        apart = [None if type(tensor) is Tensor else taken_apart(tensor) for tensor in tensors]
        parts = [
            part
            for tensor, wrapped in zip(tensors, apart, strict=True)
            for part in ([tensor] if wrapped is None else wrapped[0])
        ]
        # Below autograd: thousands of views that keep no record of what they view.
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            arrived, copied = self._start(parts)
        places = iter(arrived)
        made = [
            next(places) if wrapped is None else wrapped[1]([next(places) for _ in wrapped[0]]) for wrapped in apart
        ]
        self.stats.copies += 1
        self.stats.tensors += len(parts)
        return HostCopy(made, copied, self._order)

    def start_tree(self, tree: Any) -> HostCopy:
        """As `start`, for all tensors of a tree; `result` gives the same tree around the host's.

        Containers and objects that hold no tensors are passed on as they are.
        """
        walk = Walk(_LookInto())
        walk.find(tree)
        (found,) = walk.groups
        unique = {id(tensor): tensor for tensor in found}
        copy = self.start(list(unique.values()))
        arrived = dict(zip(unique, copy.tensors, strict=True))
        copy.tree = walk.rebuild(tree, [[arrived[id(tensor)] for tensor in found]])
        return copy

    def close(self) -> None:
        """Wait for the copies that were queued, and give the kept memory back."""
        self.memory.close()

    def _start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[torch.device, Any]]]:
        by_device: dict[torch.device, list[int]] = {}
        arrived: dict[int, Tensor] = {}
        for index, tensor in enumerate(tensors):
            if not is_strided(tensor):
                arrived[index] = tensor.detach().clone() if tensor.is_cpu else tensor.detach().cpu()
            elif tensor.numel() == 0:
                arrived[index] = torch.empty_like(tensor, device="cpu")
            else:
                by_device.setdefault(tensor.device, []).append(index)
        layouts: dict[torch.device, StateLayout] = {}
        end = 0
        for device, indices in by_device.items():
            layouts[device] = StateLayout(tensors, indices, self._gather_bytes, end)
            end = layouts[device].end
        copied: list[tuple[torch.device, Any]] = []
        if layouts:
            # Transfers are queued before the host starts to copy what it has itself.
            order = sorted(layouts, key=lambda device: not _has_streams(device))
            kept, lease = self.memory.take(max(end, 1), pin=_has_streams(order[0]))
            for device in order:
                load = _Load(tensors, lease, arrived)
                if _has_streams(device):
                    copied.append((device, self._queue(load, layouts[device], device, kept)))
                else:
                    load.fill(layouts[device])
                self.stats.transfers += len(load.transfers)
                self.stats.bytes += sum(target.nbytes for target, _ in load.transfers)
        return [arrived[index] for index in range(len(tensors))], copied

    def _queue(self, load: _Load, layout: StateLayout, device: torch.device, kept: PinnedSet) -> Any:
        """Gather on the current stream, copy on the side stream; the event that says the copies have run."""
        module: Any = torch.get_device_module(device)
        with module.device(device):
            producer = module.current_stream(device)
            side = self._sides.get(device)
            if side is None:
                side = self._sides[device] = module.Stream()
            load.gather(layout, device)
            self._order.copy_after_producer(side, producer)
            copied = module.Event()
            try:
                with module.stream(side):
                    for target, source in load.transfers:
                        target.copy_(source, non_blocking=True)
                        self._order.free_after_copy(source, side)
            finally:
                copied.record(side)
                kept.copied.append(copied)
        return copied


class _Load:
    """The transfers of one device's tensors into lent memory.

    Args:
        tensors: of the whole state.
        lease: the memory.
        arrived: takes the host's tensor for each tensor's index.
    """

    def __init__(self, tensors: Sequence[Tensor], lease: Bytes, arrived: dict[int, Tensor]) -> None:
        self.transfers: list[tuple[Tensor, Tensor]] = []
        """Host tensors and what is copied into them: same dtype, shape and strides."""
        self._tensors = tensors
        self._lease = lease
        self._arrived = arrived

    def gather(self, layout: StateLayout, device: torch.device) -> None:
        """List the transfers; what is small or not dense is made so on the device, on the current stream."""
        self._direct(layout)
        for dtype, gathered in layout.gathered.items():
            members = [self._tensors[index] for index in gathered.members]
            flat = torch.empty(gathered.numel, dtype=dtype, device=device)
            torch._foreach_copy_(list(torch._utils._unflatten_dense_tensors(flat, members)), members)
            target = self._place(gathered.offset, flat.nbytes).view(dtype)
            places = torch._utils._unflatten_dense_tensors(target, members)
            self._arrived.update(zip(gathered.members, places, strict=True))
            self.transfers.append((target, flat))
        self.transfers = [(target, _dense(source, target)) for target, source in self.transfers]

    def fill(self, layout: StateLayout) -> None:
        """Copy by the host, at once."""
        self._direct(layout)
        for target, source in self.transfers:
            target.copy_(source)
        for dtype, gathered in layout.gathered.items():
            members = [self._tensors[index] for index in gathered.members]
            target = self._place(gathered.offset, gathered.numel * dtype.itemsize).view(dtype)
            places = list(torch._utils._unflatten_dense_tensors(target, members))
            torch._foreach_copy_(places, members)
            self._arrived.update(zip(gathered.members, places, strict=True))
            self.transfers.append((target, target))

    def _direct(self, layout: StateLayout) -> None:
        for alone in layout.alone:
            self._add_alone(alone)
        for overlapping in layout.overlapping:
            self._add_overlapping(overlapping)

    def _add_alone(self, alone: Alone) -> None:
        source = self._tensors[alone.index]
        place = self._place(alone.offset, alone.nbytes).view(source.dtype)
        target = self._arrived[alone.index] = place.as_strided(source.shape, alone.strides)
        self.transfers.append((target, source))

    def _add_overlapping(self, overlapping: Overlapping) -> None:
        target = self._place(overlapping.offset, overlapping.nbytes)
        storage = self._tensors[overlapping.members[0]].untyped_storage()
        for index in overlapping.members:
            tensor = self._tensors[index]
            start = tensor.data_ptr() - storage.data_ptr() - overlapping.first
            place = target[start : start + tensor.nbytes].view(tensor.dtype)
            self._arrived[index] = place.as_strided(tensor.shape, tensor.stride(), place.storage_offset())
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage, overlapping.first, (overlapping.nbytes,), (1,))
        self.transfers.append((target, source))

    def _place(self, offset: int, nbytes: int) -> Tensor:
        """Lent bytes (uint8, 1-D) as a storage of exactly that size: torch's writers copy a tensor whose storage is
        larger than the tensor."""
        return torch.from_numpy(self._lease[offset : offset + nbytes])


def _dense(source: Tensor, target: Tensor) -> Tensor:
    """The source in the form in which it arrives: a copy from any other would go through unpinned memory."""
    if source.stride() == target.stride():
        return source
    return torch.empty_strided(source.shape, target.stride(), dtype=source.dtype, device=source.device).copy_(source)


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


class _LookInto:
    """Looks into every object with its own `to`."""

    def kind(self, obj: Any) -> Kind | None:
        return structure(type(obj))  # type: ignore[arg-type]  # mypy takes no class for hashable

    def run(self, obj: Any) -> Any:
        raise NotImplementedError


_shared: list[ToHost] = []


def to_pinned_host(tree: Any, memory: ToHost | None = None) -> HostCopy:
    """Copy all tensors of a tree to pinned host memory, each in one transfer, all of them queued at once.

    Args:
        tree: tensors, containers and objects of any registered type; among the tensors `ShardedTensor` (its local
            shards), `DTensor` and other wrappers. Tensors on the host are copied too. Tensors whose bytes overlap do so
            in the result; others have storages of their own. What `.cpu()` makes contiguous is contiguous.
        memory: whose kept memory is used; by default one that all such calls share, with room for two states.

    Returns:
        A handle. `handle.wait()` orders the current streams after the copies, and from there the tensors may be
        changed or freed; `handle.result()` gives the tree in host memory. That memory is reused by later calls as soon
        as nothing refers to the result any more.

    Raises:
        MemoryInUse: the results of too many earlier calls are still referred to.
    """
    if memory is None:
        if not _shared:
            _shared.append(ToHost(patience=60.0))
        memory = _shared[0]
    return memory.start_tree(tree)
