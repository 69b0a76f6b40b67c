"""The engine: device memory from the main stream, filled in place on a side stream, waited for by its readers.

The only module that touches streams and events, and it gets them from `torch.get_device_module(device)`: CUDA, MTIA,
XPU, NPU and the simulator are the same to it. A device without streams (the CPU) runs the same code with nothing to
wait for.

The life of one batch: `TransferEngine.start` takes it apart, allocates its arenas on the *owner* stream (the one that
is current where the batch will be used), gathers what is small into pinned staging memory, queues the copies on the
side stream and records one event. Each stream that reads the batch waits for that event (`wait`). The engine holds
the arenas until the owner stream is ordered after every reader; from then on the memory is free as soon as the batch
is dropped, and whatever the owner stream allocates next may have it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc import batch as batch_tree
from torchrec_prealloc.batch import BatchError, Walk
from torchrec_prealloc.buffers import Views, allocate, host_bytes, leaf_views, unit_views
from torchrec_prealloc.capture import Capture, RealCopies, is_plain
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.layout import Form, Leaf, aligned, plan

_CAPTURE_BYTES = 1 << 20
"""Size of the arenas into which captured conversions go, whose sizes are not known beforehand."""


@dataclass
class TransferStats:
    """What an engine has done, counted at the calls."""

    batches: int = 0
    bytes: int = 0
    """Bytes copied to the device, alignment included."""
    copies: int = 0
    """Copies to the device."""
    allocations: int = 0
    """Device allocations."""

    def reset(self) -> None:
        """Set every count to 0."""
        for name in (item.name for item in fields(self)):
            setattr(self, name, 0)


class Ordering:
    """Every ordering the engine relies on, one method for each.

    The tests take them away one at a time, and show that the race checker or wrong numbers notice.
    """

    def copy_after_allocation(self, side: Any, owner: Any) -> None:
        """The memory may still be in use by work queued on the owner stream before it was allocated."""
        side.wait_stream(owner)

    def reader_after_copy(self, reader: Any, copied: Any) -> None:
        """A stream reads the batch only when it has arrived."""
        reader.wait_event(copied)

    def reader_after_reader(self, reader: Any, earlier: Any) -> None:
        """The owner stream goes on, and so may reuse the memory, only after the other streams that read it."""
        reader.wait_stream(earlier)

    def owner_after_copy(self, owner: Any, copied: Any) -> None:
        """A batch that nobody waited for is dropped: its memory may be reused only when the copy is done with it."""
        owner.wait_event(copied)

    def free_after_reader(self, arena: Tensor, reader: Any) -> None:
        """Memory that may be freed while a reader's work is queued (TorchRec's early free) is kept until that ran."""
        arena.record_stream(reader)

    def host_after_copy(self, copied: Any) -> None:
        """The host changes or frees memory only when the copies that read it have run."""
        copied.synchronize()

    def keep(self, sources: list[Any]) -> list[Any]:
        """Host tensors that a queued copy reads stay alive until it has run."""
        return sources


@dataclass(eq=False)
class Transfer:
    """One batch on its way to the device."""

    batch: Any
    """The device's batch: the same object around device tensors. Read it only after `wait`."""
    _engine: TransferEngine
    _owner: Any
    _copied: Any = None
    _arenas: list[Tensor] = field(default_factory=list)
    _isolated: list[Tensor] = field(default_factory=list)
    _foreign: list[Tensor] = field(default_factory=list)
    _readers: list[Any] = field(default_factory=list)

    def wait(self) -> Any:
        """Order the current stream after the copy, and return the batch.

        The host does not wait. Memory is safe on the current stream however long its work takes.
        """
        self._engine.wait_transfer(self, None)
        return self.batch


@dataclass
class _Filling:
    """An arena that is being filled: where in it which host tensors go."""

    base: Tensor
    sources: list[Tensor]
    targets: list[Tensor]
    """On the CPU: tensors in `base`, copied into directly. Elsewhere: tensors in `staging`."""
    staging: Tensor | None


class TransferEngine:
    """Moves batches to one device.

    Args:
        device: the target.
        side: the stream to copy on; a new one by default. None on devices without streams.
        config: options.
        ordering: for tests.
    """

    def __init__(
        self,
        device: torch.device,
        side: Any = None,
        config: PreallocConfig | None = None,
        ordering: type[Ordering] = Ordering,
    ) -> None:
        module: Any = torch.get_device_module(device)
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, module.current_device())
        self.device = device
        self.config = config or PreallocConfig()
        self.stats = TransferStats()
        self.has_streams = device.type != "cpu" and hasattr(module, "Stream") and hasattr(module, "Event")
        if self.has_streams and side is None:
            with self._on_device(module):
                side = module.Stream()
        self.side = side if self.has_streams else None
        self._module = module
        self._order = ordering()
        self._pending: dict[int, Transfer] = {}
        self._reading: list[tuple[Any, list[Any]]] = []

    def _on_device(self, module: Any) -> Any:
        return module.device(self.device) if hasattr(module, "device") else contextlib.nullcontext()

    def current_stream(self) -> Any:
        """The stream that is current on the engine's device; None on a device without streams."""
        return self._module.current_stream(self.device) if self.has_streams else None

    def start(self, batch: Any, owner: Any = None, isolate: bool = False) -> Transfer:
        """Queue a batch's copy, in place into memory of the owner stream.

        Args:
            batch: host batch of any type (`batch.py` says how it is understood). It is left as it is.
            owner: the stream that will own the memory; by default the current one.
            isolate: give each KeyedJaggedTensor memory of its own, for pipelines that free it early.

        Raises:
            BatchError: nothing in the batch can be moved to a device, or it cannot be taken apart.
            Exception: what the batch's own `to` raises. Nothing is queued then, and nothing lost.
        """
        if not batch_tree.is_understood(batch):
            raise BatchError(
                f"a batch of type {type(batch).__name__} is no tensor, no registered type and has no `to`; "
                "register its class with register_batch_type, or give it `to(device, non_blocking)`"
            )
        self._settle_dropped()
        owner = owner if owner is not None else self.current_stream()
        shipment = _Shipment(self, owner)
        with self._current(owner):
            try:
                shipment.load(batch, isolate)
                shipment.send()
            except BaseException:
                shipment.abandon()
                raise
        transfer = shipment.transfer
        self.stats.batches += 1
        if transfer._arenas or transfer._isolated or transfer._foreign:
            earlier = self._pending.pop(id(transfer.batch), None)
            if earlier is not None:
                self._settle(earlier)
            self._pending[id(transfer.batch)] = transfer
        return transfer

    def wait(self, batch: Any, upstream: Any = None) -> bool:
        """Order the current stream after the copy of `batch`.

        Args:
            batch: what `start(...).batch` was.
            upstream: another stream that read the batch, which the current one follows.

        Returns:
            Whether the engine knows the batch. It forgets it once the owner stream has waited for it.
        """
        transfer = self._pending.get(id(batch))
        if transfer is None:
            return False
        self.wait_transfer(transfer, upstream)
        return True

    def wait_transfer(self, transfer: Transfer, upstream: Any) -> None:
        """As `wait`, for a transfer at hand."""
        if not self.has_streams:
            self._forget(transfer)
            return
        reader = self.current_stream()
        self._order.reader_after_copy(reader, transfer._copied)
        if upstream is not None and upstream != self.side:
            self._order.reader_after_reader(reader, upstream)
            if upstream in transfer._readers:
                # What that stream read is now before the reader; the reader stands for both.
                transfer._readers.remove(upstream)
        for tensor in transfer._foreign:
            tensor.record_stream(reader)
        if reader != transfer._owner:
            for arena in transfer._isolated:
                self._order.free_after_reader(arena, reader)
            if reader not in transfer._readers:
                transfer._readers.append(reader)
            self._pending[id(transfer.batch)] = transfer
        elif not transfer._readers:
            self._forget(transfer)

    def reset(self) -> None:
        """Let go of every batch, each after its copy and its readers. The host does not wait."""
        for transfer in list(self._pending.values()):
            self._settle(transfer)
        self._release_sources()

    def close(self) -> None:
        """As `reset`, and wait until the copies have run, so that no host memory is kept."""
        self.reset()
        for copied, _ in self._reading:
            self._order.host_after_copy(copied)
        self._reading.clear()

    def _forget(self, transfer: Transfer) -> None:
        if self._pending.get(id(transfer.batch)) is transfer:
            del self._pending[id(transfer.batch)]

    def _settle(self, transfer: Transfer) -> None:
        if self.has_streams:
            self._order.owner_after_copy(transfer._owner, transfer._copied)
            for reader in transfer._readers:
                self._order.reader_after_reader(transfer._owner, reader)
        self._forget(transfer)

    def _settle_dropped(self) -> None:
        """Settle the batches that the pipeline dropped before its owner stream waited (an exception, an early end)."""
        for transfer in list(self._pending.values()):
            # The transfer's own reference and getrefcount's argument: nobody else has the batch any more.
            if sys.getrefcount(transfer.batch) <= 2:
                self._settle(transfer)
        self._release_sources()

    def _release_sources(self) -> None:
        while self._reading and self._reading[0][0].query():
            self._reading.pop(0)

    @contextlib.contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
        else:
            with self._module.stream(stream):
                yield


class _Shipment:
    """The work of `TransferEngine.start` on one batch: `load` allocates and gathers, `send` queues the copies."""

    def __init__(self, engine: TransferEngine, owner: Any) -> None:
        self.transfer = Transfer(None, engine, owner)
        self._engine = engine
        self._device = engine.device
        self._arenas: list[_Filling] = []
        self._direct: list[tuple[Tensor, Tensor]] = []
        self._open: tuple[_Filling, Views, Views, int] | None = None
        self._sent: list[Any] = []

    # Loading -----------------------------------------------------------------------------------------------------

    def load(self, batch: Any, isolate: bool) -> None:
        walk = Walk(self._run_own_to, isolate)
        walk.find(batch)
        arrived = [self._load_group(list(group.values()), kjt) for kjt, group in enumerate(walk.groups)]
        self.transfer.batch = walk.rebuild(batch, arrived)

    def _load_group(self, tensors: list[Tensor], isolated: int) -> dict[int, Tensor]:
        arrived: dict[int, Tensor] = {}
        plain: list[Tensor] = []
        for tensor in tensors:
            if type(tensor) is Tensor and is_plain(tensor) and _is_dense(tensor):
                plain.append(tensor)
            else:
                arrived[id(tensor)] = self._move_alone(tensor)
        leaves = [_leaf(tensor, index) for index, tensor in enumerate(plain)]
        kept = self.transfer._isolated if isolated else self.transfer._arenas
        for segment in plan(leaves, self._engine.config.direct_bytes):
            base = self._allocate(segment.nbytes)
            kept.append(base)
            views = Views(base)
            units = unit_views(views, segment, leaves)
            sources = [
                plain[unit.members[0]] if len(unit.members) == 1 else host_bytes(unit, plain[unit.members[0]])
                for unit in segment.units
            ]
            if segment.direct and self._travels_from(sources[0]):
                self._direct.append((units[0], sources[0]))
            else:
                self._gather(base, units, sources, lambda into, s=segment: unit_views(into, s, leaves))
            for index, view in leaf_views(views, segment, units, leaves):
                arrived[id(plain[index])] = view
        return arrived

    def _gather(self, base: Tensor, units: list[Tensor], sources: list[Tensor], place: Any) -> None:
        if self._engine.has_streams:
            staging = _pinned(base.numel())
            targets = place(Views(staging))
            self._arenas.append(_Filling(base, sources, targets, staging))
        else:
            self._arenas.append(_Filling(base, sources, units, None))

    def _move_alone(self, tensor: Tensor) -> Tensor:
        """A tensor that is more than strided host memory goes its own way: `.to` on the owner stream."""
        if tensor.device == self._device and self._device.type != "cpu":
            self.transfer._foreign.append(tensor)
            return tensor
        copy = self._device.type == "cpu" and tensor.is_cpu
        moved = tensor.to(self._device, non_blocking=True, copy=copy)
        self.transfer._arenas.append(moved)
        return moved

    def _travels_from(self, source: Tensor) -> bool:
        return not self._engine.has_streams or source.is_pinned()

    def _allocate(self, nbytes: int) -> Tensor:
        self._engine.stats.allocations += 1
        return allocate(nbytes, self._device)

    # A class' own `to` -------------------------------------------------------------------------------------------

    def _run_own_to(self, obj: Any) -> Any:
        real = RealCopies() if self._device.type == "cpu" else contextlib.nullcontext()
        try:
            with real, Capture(self._device, self._arrive, self._flush):
                moved = obj.to(device=self._device, non_blocking=True)
        except Exception as error:
            error.add_note(f"while a batch's {type(obj).__name__} was moved to {self._device} by its own `to`")
            raise
        if moved is None:
            raise BatchError(f"{type(obj).__name__}.to returned None; it must return the moved object")
        return moved

    def _arrive(self, source: Tensor, form: Form) -> Tensor:
        nbytes = source.numel() * source.element_size()
        if nbytes >= self._engine.config.direct_bytes:
            base = self._allocate(aligned(nbytes))
            self.transfer._arenas.append(base)
            view = Views(base).at(0, form)
            if self._travels_from(source):
                self._direct.append((view, source))
            else:
                self._gather(base, [view], [source], lambda into: [into.at(0, form)])
            return view
        if self._open is None or self._open[3] + nbytes > self._open[0].base.numel():
            base = self._allocate(_CAPTURE_BYTES)
            self.transfer._arenas.append(base)
            self._gather(base, [], [], lambda into: [])
            filling = self._arenas[-1]
            staging = filling.staging if filling.staging is not None else base
            self._open = (filling, Views(base), Views(staging), 0)
        filling, views, staged, offset = self._open
        filling.sources.append(source)
        filling.targets.append(staged.at(offset, form))
        self._open = (filling, views, staged, offset + aligned(nbytes))
        return views.at(offset, form)

    def _flush(self, reuse_source: bool) -> None:
        self.send()
        engine, copied = self._engine, self.transfer._copied
        if copied is not None:
            engine._order.reader_after_copy(self.transfer._owner, copied)
            if reuse_source:
                engine._order.host_after_copy(copied)

    # Sending -----------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Queue everything loaded so far on the side stream, and record the event that says it has arrived."""
        engine, transfer = self._engine, self.transfer
        arenas, direct = self._arenas, self._direct
        self._arenas, self._direct, self._open = [], [], None
        with torch.no_grad():
            for filling in arenas:
                torch._foreach_copy_(filling.targets, filling.sources)
            if engine.has_streams:
                engine._order.copy_after_allocation(engine.side, transfer._owner)
            with engine._current(engine.side):
                for filling in arenas:
                    if filling.staging is not None:
                        filling.base.copy_(filling.staging, non_blocking=True)
                    self._count(filling.base.numel())
                for target, source in direct:
                    target.copy_(source, non_blocking=True)
                    self._count(target.numel() * target.element_size())
        if engine.has_streams:
            transfer._copied = engine._module.Event()
            transfer._copied.record(engine.side)
            read = [filling.staging for filling in arenas] + [source for _, source in direct]
            engine._reading.append((transfer._copied, engine._order.keep(read)))

    def abandon(self) -> None:
        """Loading or sending failed: what was queued is ordered before its memory is used again."""
        engine = self._engine
        if engine.has_streams and (self.transfer._arenas or self.transfer._isolated):
            engine._order.reader_after_reader(self.transfer._owner, engine.side)

    def _count(self, nbytes: int) -> None:
        self._engine.stats.copies += 1
        self._engine.stats.bytes += nbytes


def _leaf(tensor: Tensor, index: int) -> Leaf:
    numel = tensor.numel()
    # The last element's end: for a dense tensor of any strides that is its number of elements.
    nbytes = numel * tensor.element_size()
    start = tensor.data_ptr()
    # A tensor without elements, or whose address its dtype could not view in an extent, stands alone.
    alone = numel == 0 or start % tensor.element_size() != 0
    storage = -1 - index if alone else tensor.untyped_storage()._cdata
    return Leaf(storage, start, nbytes, (tensor.dtype, tensor.shape, tensor.stride()))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory, each once, in the order of its strides.

    `.to` keeps the strides of such a tensor, and makes any other contiguous.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _pinned(nbytes: int) -> Tensor:
    try:
        # torch's own host allocator: it keeps a block from being used again until the copies from it have run.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"cannot pin {nbytes} bytes of host memory ({error}); copies will block the host", stacklevel=2)
        return torch.empty(nbytes, dtype=torch.uint8)


def to_device(batch: Any, device: torch.device | str, copy_stream: Any = None) -> Transfer:
    """Copy a batch to a device on a side stream, into memory that the current stream owns.

    The batch's memory returns to the current stream's pool, like that of `batch.to(device)`, and the copy overlaps with
    the current stream's work, like `batch.to(device, non_blocking=True)` on a side stream.

    Args:
        batch: host batch of any type; it is left as it is. To overlap, its memory should be pinned.
        device: the target.
        copy_stream: the stream to copy on; by default one that all such calls of a device share.

    Returns:
        A handle: `handle.wait()` orders the stream that is then current after the copy, and returns the batch.
    """
    device = torch.device(device)
    engine = _engine_for(device, copy_stream)
    return engine.start(batch)


_engines: dict[tuple[torch.device, Any], TransferEngine] = {}


def _engine_for(device: torch.device, side: Any) -> TransferEngine:
    key = (device, side)
    engine = _engines.get(key)
    if engine is None:
        engine = _engines[key] = TransferEngine(device, side)
    return engine
