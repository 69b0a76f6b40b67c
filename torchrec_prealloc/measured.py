"""The pipelines' engine: it times some of its batches by events, and logs what it has done."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchrec_prealloc.shipment import Shipment
from torchrec_prealloc.stats import TransferStats, total
from torchrec_prealloc.transfer import Transfer, TransferEngine

logger = logging.getLogger(__name__)

TIME_EVERY = 16
"""Of so many batches one is timed, for which four events are recorded."""


@dataclass
class _Times:
    """Pairs of events around one batch's copies, and around its owner stream's wait."""

    copies: list[tuple[Any, Any]] = field(default_factory=list)
    wait: tuple[Any, Any] = (None, None)
    nbytes: int = 0


class Timing:
    """Adds to an engine's `stats` what lies between events, once they have passed."""

    def __init__(self, stats: TransferStats) -> None:
        self.stats = stats
        self._done: deque[_Times] = deque()
        self._lock = threading.Lock()  # a pipeline's loading thread logs, its main thread asks

    def add(self, times: _Times) -> None:
        """The owner stream's wait for the batch is queued."""
        self._done.append(times)

    def read(self, wait: bool = False) -> None:
        """Read the times of the batches that have arrived; with `wait` the host waits for the others."""
        with self._lock:
            while self._done and (wait or self._done[0].wait[1].query()):
                self._read_one(self._done.popleft())

    def _read_one(self, times: _Times) -> None:
        times.wait[1].synchronize()
        with contextlib.suppress(RuntimeError, NotImplementedError):  # events that cannot tell the time
            copied = sum(start.elapsed_time(end) for start, end in times.copies)
            waited = times.wait[0].elapsed_time(times.wait[1])
            self.stats.timed_batches += 1
            self.stats.timed_bytes += times.nbytes
            self.stats.copy_ms += copied
            self.stats.wait_ms += waited


class MeasuredEngine(TransferEngine):
    """Times every `time_every`-th batch, and logs a line every `config.log_every` batches."""

    time_every = TIME_EVERY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_timed = False
        self._before: Any = None
        self._timing = Timing(self._stats)

    @property
    def stats(self) -> TransferStats:
        """What the engine has done so far: always the same object, brought up to date."""
        self._timing.read()
        return super().stats

    def start(self, batch: Any, owner: Any = None, isolate: bool = False) -> Transfer:
        self._is_timed = self.has_streams and self._stats.batches % self.time_every == self.time_every // 2
        transfer = super().start(batch, owner, isolate)
        every = self.config.log_every
        if every and self._stats.batches % every == 0:
            logger.info("%s: %s", self.device, self.stats.line())
        return transfer

    def wait_transfer(self, transfer: Transfer, upstream: Any = None, events: Sequence[Any] = ()) -> None:
        times = transfer._times
        if times is None or self.current_stream() != transfer._owner:
            super().wait_transfer(transfer, upstream, events)
            return
        transfer._times = None
        before = self._stamp(transfer._owner)
        super().wait_transfer(transfer, upstream, events)
        times.wait = (before, self._stamp(transfer._owner))
        self._timing.add(times)

    def _send(self, shipment: Shipment, transfer: Transfer) -> None:
        if not self._is_timed:
            super()._send(shipment, transfer)
            return
        nbytes = self._stats.bytes
        super()._send(shipment, transfer)
        times = transfer._times = transfer._times or _Times()
        times.copies.append((self._before, self._stamp(self.side)))
        times.nbytes += self._stats.bytes - nbytes

    def _wait_for_memory(self, shipment: Shipment, owner: Any) -> None:
        super()._wait_for_memory(shipment, owner)
        if self._is_timed:
            self._before = self._stamp(self.side)

    def _stamp(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event


class SummedEngine(MeasuredEngine):
    """The launcher's: each batch is timed, and all engines of a run are summed up."""

    time_every = 1
    timings: ClassVar[list[Timing]] = []
    """Of this run's engines, of which nothing else is kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).timings.append(self._timing)

    @classmethod
    def summary(cls) -> str:
        """What all engines have done, in one line. The host waits for the batches that are on their way."""
        for timing in cls.timings:
            timing.read(wait=True)
        stats = total(timing.stats for timing in cls.timings)
        return f"torchrec-prealloc: {stats.line()}" + ("" if stats.batches else ": no pipeline of ours ran")
