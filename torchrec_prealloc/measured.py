"""An engine that times its copies and what the main stream waits for them, for the launcher's summary."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torchrec_prealloc.shipment import Shipment
from torchrec_prealloc.stats import TransferStats
from torchrec_prealloc.transfer import Transfer, TransferEngine


class Totals:
    """What all measured engines of this process have done."""

    def __init__(self) -> None:
        self.stats: list[TransferStats] = []
        self.copying = Stopwatch()
        self.waiting = Stopwatch()

    def line(self) -> str:
        """The summary, in one line."""
        batches, nbytes, copies = (
            sum(getattr(stats, name) for stats in self.stats) for name in ("batches", "bytes", "copies")
        )
        text = f"torchrec-prealloc: {batches} batches, {nbytes} bytes in {copies} copies"
        if not batches:
            return text + ": no pipeline of ours ran"
        copying, waiting = self.copying.milliseconds(), self.waiting.milliseconds()
        if copying is None or waiting is None:
            return text + "; host only: no device that times its copies"
        speed = f"{nbytes / copying / 1e6:.1f} GB/s" if copying else "too fast to time"
        return f"{text}, {speed}; the main stream waited {waiting:.1f} ms for them, {waiting / batches:.3f} ms a batch"


class Stopwatch:
    """A sum of times between pairs of events, which are read when they have passed."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._milliseconds: float | None = None

    def add(self, start: Any, end: Any) -> None:
        self._pairs.append((start, end))
        while self._pairs and self._pairs[0][1].query():
            self._read()

    def milliseconds(self) -> float | None:
        """The sum, when all pairs have passed; None if there were none, or the device cannot tell."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            while self._pairs:
                self._pairs[0][1].synchronize()
                self._read()
        return self._milliseconds

    def _read(self) -> None:
        start, end = self._pairs.pop(0)
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._milliseconds = (self._milliseconds or 0.0) + start.elapsed_time(end)


class MeasuredEngine(TransferEngine):
    """Records an event before and after each batch's copies, and before and after the owner stream's wait."""

    totals = Totals()
    """Replaced by the launcher for each run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = type(self).totals
        self._watch.stats.append(self.stats)
        self._started: Any = None

    def wait_transfer(self, transfer: Transfer, upstream: Any = None, events: Sequence[Any] = ()) -> None:
        if not self.has_streams or self.current_stream() != transfer._owner:
            super().wait_transfer(transfer, upstream, events)
            return
        before = self._stamp(transfer._owner)
        super().wait_transfer(transfer, upstream, events)
        self._watch.waiting.add(before, self._stamp(transfer._owner))

    def _send(self, shipment: Shipment, transfer: Transfer) -> None:
        super()._send(shipment, transfer)
        if self.has_streams:
            self._watch.copying.add(self._started, self._stamp(self.side))

    def _wait_for_memory(self, shipment: Shipment, owner: Any) -> None:
        super()._wait_for_memory(shipment, owner)
        if self.has_streams:
            self._started = self._stamp(self.side)

    def _stamp(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event
