"""The engine: device memory from the main stream, filled in place on a side stream, waited for by its readers.

With `to_host.py` the only module that touches streams and events, and it gets them from
`torch.get_device_module(device)`: CUDA, MTIA, XPU, NPU and the simulator are the same to it. A device without streams
(the CPU) runs the same code with nothing to wait for.

The life of one batch: `TransferEngine.start` takes it apart, allocates its arenas on the *owner* stream (the one that
is current where the batch will be used), gathers what is small into pinned staging memory, queues the copies on the
side stream and records one event. Each stream that reads the batch waits for that event (`wait`). The engine holds
the arenas until the owner stream is ordered after every reader; from then on the memory is free as soon as the batch
is dropped, and whatever the owner stream allocates next may have it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from torchrec_prealloc.batch_types import check_understood
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.labels import step
from torchrec_prealloc.memory import Memory
from torchrec_prealloc.ordering import Ordering
from torchrec_prealloc.shipment import Arena, Shipment
from torchrec_prealloc.staging import Background, Staging
from torchrec_prealloc.stats import TransferStats

_NO_EVENT = object()
"""What stands for an event on a device without streams, where everything is done when its call returns."""


@dataclass(eq=False)
class Transfer:
    """One batch on its way to the device."""

    batch: Any
    """The device's batch: the same object around device tensors. Read it only after `wait`."""
    _engine: TransferEngine
    _owner: Any
    _arrivals: list[Any] = field(default_factory=list)
    """Events after which it has arrived; futures of them for what a thread in the background still queues."""
    _foreign: list[Tensor] = field(default_factory=list)
    _isolated: list[Tensor] = field(default_factory=list)
    _owned: list[Tensor] = field(default_factory=list)
    _readers: list[Any] = field(default_factory=list)
    _read: list[Any] = field(default_factory=list)
    """Events: a stream that is no longer in `_readers` has read the batch."""
    _times: Any = None
    """What `measured.py` notes of it."""

    def wait(self) -> Any:
        """Order the current stream after the copy, and return the batch.

        The host does not wait. Memory is safe on the current stream however long its work takes.
        """
        self._engine.wait_transfer(self)
        return self.batch

    def _events(self) -> list[Any]:
        """The events after which the batch has arrived. The host waits for what is not queued yet.

        Raises:
            Exception: what the thread in the background raised.
        """
        self._arrivals = [one.result() if isinstance(one, Future) else one for one in self._arrivals]
        return self._arrivals

    def _events_queued(self) -> list[Any]:
        """As `_events`, without those of copies that failed, and so were never queued."""
        failed = [one for one in self._arrivals if isinstance(one, Future) and one.exception() is not None]
        self._arrivals = [one for one in self._arrivals if one not in failed]
        return self._events()

    def wait_on_host(self) -> Any:
        """As `wait`, and the host waits until the copy has run: the host's batch may be changed after it."""
        self.wait()
        self._engine.finish(self)
        return self.batch


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
        self.device = _with_index(device, module)
        self.config = config or PreallocConfig()
        self._stats = TransferStats()
        self._ring_skipped = 0
        self.has_streams = device.type != "cpu" and hasattr(module, "Stream") and hasattr(module, "Event")
        if self.has_streams and side is None:
            with self._on_device(module):
                side = module.Stream()
        self.side = side if self.has_streams else None
        self._module = module
        self._order = ordering()
        self._pending: dict[int, Transfer] = {}
        self._background = Background()
        self._staging = Staging(self._order)
        self._memory = Memory(self.device, self.config, self._record, self._describe_pending)
        self._passed: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """By `id`, batches that their owner stream waited for, with that stream."""
        # Pipelines copy in one thread and wait in another.
        self._lock = threading.RLock()

    def _on_device(self, module: Any) -> Any:
        return module.device(self.device) if hasattr(module, "device") else contextlib.nullcontext()

    @property
    def stats(self) -> TransferStats:
        """What the engine has done so far: always the same object, brought up to date."""
        self._stats.staging_bytes = self._staging.nbytes
        ring = self._memory.ring
        if ring is not None:
            self._stats.ring_bytes = ring.kept_bytes
            self._stats.ring_skipped += ring.skipped - self._ring_skipped
            self._ring_skipped = ring.skipped
        return self._stats

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
        check_understood(batch)
        self._settle_dropped()
        owner = owner if owner is not None else self.current_stream()
        transfer = Transfer(None, self, owner)

        def flush(shipment: Shipment, reuse_sources: bool) -> None:
            self._send(shipment, transfer)
            for copied in transfer._events():
                self._order.reader_after_copy(owner, copied)
                if reuse_sources:
                    self._order.host_after_copy(copied)

        staging = self._staging if self.has_streams else None
        shipment = Shipment(self.device, staging, self.config, isolate, self._memory, flush)
        self._memory.next_batch(owner)
        if staging is not None:
            staging.next_batch()
        with self._current(owner):
            try:
                transfer.batch = shipment.load(batch)
                self._send(shipment, transfer)
                self._keep(transfer, shipment)
            except BaseException as error:
                if hasattr(error, "add_note"):  # Python 3.11 on
                    error.add_note(f"in a batch of class {type(batch).__name__}, after {self._stats.batches} others")
                self._take_back(transfer)
                raise
        return transfer

    def _keep(self, transfer: Transfer, shipment: Shipment) -> None:
        """Know a transfer by its batch until its memory is safe without."""
        transfer._owned, transfer._isolated, transfer._foreign = shipment.owned, shipment.isolated, shipment.foreign
        self._stats.batches += 1
        self._stats.allocations += shipment.allocations
        if shipment.owned or shipment.foreign:
            earlier = self._pending.get(id(transfer.batch))
            if earlier is not None:
                self._settle(earlier)
            self._pending[id(transfer.batch)] = transfer

    def _take_back(self, transfer: Transfer) -> None:
        """After an error: wait on the host for what is queued. An interrupted call has not recorded all of it."""
        transfer._events_queued()
        if self.has_streams:
            self._order.host_after_copy(self._record(self.side))

    def _send(self, shipment: Shipment, transfer: Transfer) -> None:
        """Gather and queue what a shipment lists, and record the event that says it has arrived."""
        taken, direct = shipment.take()
        arenas = [arena for arena in taken if not arena.takes_long]
        with torch.no_grad():
            with step("gather"):
                for arena in arenas:
                    if arena.sources:
                        torch._foreach_copy_(arena.targets, arena.sources)
            self._wait_for_memory(shipment, transfer._owner)
            with step("copy"), self._current(self.side):
                for arena in arenas:
                    if arena.block is None:
                        self._count(arena.nbytes)
                    else:
                        self._copy(arena.base[: arena.nbytes], arena.block[: arena.nbytes])
                for target, source in direct:
                    self._copy(target, source)
        if self.has_streams:
            sources = [source for _, source in direct]
            transfer._arrivals.append(self._copied(sources, [arena.block for arena in arenas]))
            for arena in taken:
                if arena.takes_long:
                    self._send_later(arena, transfer)

    def _send_later(self, arena: Arena, transfer: Transfer) -> None:
        """Have a large arena filled and queued by the thread in the background: the main thread does not wait for it.

        The side stream waits for the arena's memory by now, and so will what the thread queues there.
        """

        def fill_and_send() -> Any:
            with torch.no_grad():
                with step("gather"):
                    torch._foreach_copy_(arena.targets, arena.sources)
                with step("copy"), self._current(self.side):
                    self._copy(arena.base[: arena.nbytes], cast(Tensor, arena.block)[: arena.nbytes])
            return self._copied([], [arena.block])

        transfer._arrivals.append(self._background.submit(fill_and_send))

    def _copied(self, sources: list[Any], blocks: list[Any]) -> Any:
        """The event after all that was queued on the side stream; until then the host memory that it reads is kept."""
        copied = self._record(self.side)
        self._staging.read_until(copied, sources, blocks)
        return copied

    def _wait_for_memory(self, shipment: Shipment, owner: Any) -> None:
        if not self.has_streams:
            return
        if shipment.fresh:
            self._order.copy_after_allocation(self.side, owner)
        for free in shipment.ready:
            self._order.copy_after_last_use(self.side, free)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Queue one copy on the current stream, in pieces where it is larger than `chunk_bytes`."""
        size = target.element_size()
        piece = max(self.config.chunk_bytes // size, 1)
        if not self.config.chunk_bytes or target.numel() <= piece:
            target.copy_(source, non_blocking=True)
            self._count(target.numel() * size)
            return
        # Dense, and of equal strides: their elements lie in one order. As one dimension they can be cut.
        flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in (target, source)]
        for first in range(0, target.numel(), piece):
            into, of = (tensor[first : first + piece] for tensor in flat)
            if first:
                into[:1].zero_()  # without work between them the copy engine serves nobody else until all are done
            into.copy_(of, non_blocking=True)
            self._count(into.numel() * size)

    def _record(self, stream: Any) -> Any:
        if not self.has_streams:
            return _NO_EVENT
        event = self._module.Event()
        event.record(stream)
        return event

    def _describe_pending(self) -> str:
        held = sum(tensor.untyped_storage().nbytes() for one in self._pending.values() for tensor in one._owned)
        kept = self._memory.ring.kept_bytes if self._memory.ring is not None else 0
        return f"{len(self._pending)} batches in flight hold {held} bytes, the ring keeps {kept}"

    def _count(self, nbytes: int) -> None:
        with self._lock:  # the thread in the background counts too
            self._stats.copies += 1
            self._stats.bytes += nbytes

    def wait(self, batch: Any, upstream: Any = None, events: Sequence[Any] = ()) -> bool:
        """Order the current stream after the copy of `batch`.

        Args:
            batch: what `start(...).batch` was.
            upstream: another stream that read the batch, which the current one follows.
            events: what all streams that read the batch before have recorded since; the current one follows them.

        Returns:
            Whether the engine knows the batch and could do so. Once the owner stream has waited, no other stream can.
        """
        transfer = self._pending.get(id(batch))
        if transfer is not None:
            self.wait_transfer(transfer, upstream, events)
            return True
        passed, owner = self._passed.get(id(batch), (None, None))
        if passed is None or passed() is not batch or owner != self.current_stream():
            return False
        if upstream is not None and upstream not in (self.side, owner):
            self._order.reader_after_reader(owner, upstream)
        for event in events:
            self._order.reader_after_event(owner, event)
        return True

    def wait_transfer(self, transfer: Transfer, upstream: Any = None, events: Sequence[Any] = ()) -> None:
        """As `wait`, for a transfer at hand."""
        if not self.has_streams:
            self._forget(transfer)
            return
        reader = self.current_stream()
        with step("wait"):
            for copied in transfer._events():
                self._order.reader_after_copy(reader, copied)
        if upstream is not None and upstream not in (self.side, reader):
            self._order.reader_after_reader(reader, upstream)
            if upstream in transfer._readers:
                # What that stream read is now before the reader; the reader stands for both.
                transfer._readers.remove(upstream)
        for event in events:
            self._order.reader_after_event(reader, event)
            transfer._readers.clear()
        for tensor in transfer._foreign:
            tensor.record_stream(reader)
        if reader != transfer._owner:
            for arena in transfer._isolated:
                self._order.free_after_reader(arena, reader)
            if reader not in transfer._readers:
                transfer._readers.append(reader)
            self._pending[id(transfer.batch)] = transfer
        elif not transfer._readers and not transfer._read:
            self._pass(transfer)
        else:
            # The owner stream goes on beside those that read the batch, and follows them when the batch is dropped: up
            # to here, not up to what they will have been given by then.
            transfer._read += [self._record(earlier) for earlier in transfer._readers]
            transfer._readers.clear()

    def follow(self, transfer: Transfer) -> None:
        """Order the current stream after a transfer's copy, for streams that follow it: it does not read the batch."""
        for copied in transfer._events():
            self._order.reader_after_copy(self.current_stream(), copied)

    def finish(self, transfer: Transfer) -> None:
        """Let the host wait until a transfer's copies have run."""
        for copied in transfer._events():
            self._order.host_after_copy(copied)

    def reset(self) -> None:
        """Let go of every batch, each after its copy and its readers. The host does not wait."""
        for transfer in list(self._pending.values()):
            self._settle(transfer)
        self._background.close()
        self._staging.take_back()

    def close(self) -> None:
        """As `reset`, and wait until the copies have run, so that no host memory is kept."""
        self.reset()
        self._staging.close()

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            if self._pending.get(id(transfer.batch)) is transfer:
                del self._pending[id(transfer.batch)]

    def _pass(self, transfer: Transfer) -> None:
        """Forget a transfer that its owner stream waited for; know the batch again while it lives."""
        key = id(transfer.batch)
        with contextlib.suppress(TypeError):  # nothing refers weakly to a dict or a tuple
            self._passed[key] = (weakref.ref(transfer.batch, lambda _: self._passed.pop(key, None)), transfer._owner)
        self._forget(transfer)

    def _settle(self, transfer: Transfer) -> None:
        arrived = transfer._events_queued()  # not under the lock, which the thread in the background needs
        with self._lock:
            if self.has_streams:
                for copied in arrived:
                    self._order.owner_after_copy(transfer._owner, copied)
                for event in transfer._read:
                    self._order.owner_after_read(transfer._owner, event)
                for reader in transfer._readers:
                    self._order.reader_after_reader(transfer._owner, reader)
            self._forget(transfer)

    def _settle_dropped(self) -> None:
        """Settle the batches that the pipeline dropped before its owner stream waited (an exception, an early end)."""
        for transfer in list(self._pending.values()):
            # The transfer's own reference and getrefcount's argument: nobody else has the batch any more.
            if sys.getrefcount(transfer.batch) <= 2:
                self._settle(transfer)

    @contextlib.contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
        else:
            with self._module.stream(stream):
                yield


def _with_index(device: torch.device, module: Any) -> torch.device:
    index: Any = device.index
    if index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, module.current_device())
