"""Runs under a schedule, and what the checker has to say about them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torchrec_prealloc.simulator.build import load

Schedule = Literal["lazy", "eager", "random"]
_SCHEDULES = ("lazy", "eager", "random")
_running = threading.Lock()


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Access:
    """One of a report's two operations."""

    op: str  #: the operator, or "copy_", "alloc", "free", "unknown" (a write of the host that only left its trace)
    stream: tuple[int, int] | None  #: (device index, stream id); None: the host
    is_write: bool
    stack: tuple[Frame, ...]  #: Python, innermost first; empty where no Python ran

    def __str__(self) -> str:
        where = "the host" if self.stream is None else f"stream {self.stream[1]} of device {self.stream[0]}"
        lines = [f"{self.op} ({'write' if self.is_write else 'read'}) on {where}"]
        lines += [f"    {frame}" for frame in self.stack[:12]]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Two uses of the same bytes without an order between them.

    ``kind`` is one of

    - ``"data race"``: two operations on streams, at least one of them a write;
    - ``"memory reused"``: the allocator handed out memory that another stream may still use, or a stream used fresh
      memory without waiting for the stream that allocated it;
    - ``"unsafe free"``: memory was freed while another stream used it, neither named by ``record_stream`` nor waited
      for before the owning stream's next allocation;
    - ``"host read"``, ``"host write"``: the host touched pinned memory that a queued copy still used;
    - ``"host free"``: registered host memory was freed, or unregistered, while a queued copy still used it.
    """

    kind: str
    first: Access
    second: Access
    bytes: int  #: of the second operation
    count: int = 1  #: how often the same two places met

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.kind}, {self.bytes} bytes{times}\n  first: {self.first}\n  then: {self.second}"


class RaceError(AssertionError):
    """What :func:`checked` raises: all reports, with the schedule and seed that show them."""

    def __init__(self, reports: tuple[Report, ...], schedule: str, seed: int) -> None:
        self.reports = reports
        self.schedule = schedule
        self.seed = seed
        shown = "\n".join(str(report) for report in reports[:10])
        more = f"\n... and {len(reports) - 10} more" if len(reports) > 10 else ""
        super().__init__(f"{len(reports)} reports under schedule={schedule!r}, seed={seed}:\n{shown}{more}")


@dataclass
class Run:
    """A checked run. ``reports`` is filled at its end, and by :meth:`collect`."""

    schedule: Schedule
    seed: int
    reports: tuple[Report, ...] = field(default=())

    def collect(self) -> tuple[Report, ...]:
        """The reports so far."""
        merged: dict[tuple[Any, ...], Report] = {(r.kind, r.first, r.second): r for r in self.reports}
        for kind, first, second in load().take_reports():
            key = (kind, _access(first), _access(second))
            count = merged[key].count + 1 if key in merged else 1
            merged[key] = Report(kind, key[1], key[2], second["end"] - second["begin"], count)
        self.reports = tuple(merged.values())
        return self.reports


def _access(raw: dict[str, Any]) -> Access:
    return Access(raw["op"], raw["stream"], raw["is_write"], tuple(Frame(**frame) for frame in raw["stack"]))


@contextlib.contextmanager
def checked(
    schedule: Schedule = "lazy", seed: int = 0, raise_on_report: bool = True, repair: bool = True
) -> Iterator[Run]:
    """Checks everything that happens on the simulated devices, in all threads, until the block ends.

    Args:
        schedule: "lazy" runs a copy only when something waits for it, "eager" at once, "random" at moments drawn
            with ``seed``. The reports hardly depend on it; the bytes that a faulty program sees do.
        seed: of the random schedule.
        raise_on_report: raise at the end of the block; otherwise only collect in ``run.reports``.
        repair: after each report run the operation that came first, so that the program goes on with the bytes it
            meant to see. Without it a race shows its wrong bytes, as on a device, and may crash CPU kernels, which
            do not expect arbitrary lengths and indices.

    Raises:
        RaceError: at the end, if there are reports. An exception of the block itself comes first.

    The block begins and ends with a synchronisation of all streams. Host operators (reads and writes of pinned
    memory) are seen in the thread that entered the block; of other threads only what they wrote.
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule must be one of {_SCHEDULES}, not {schedule!r}")
    extension = load()
    if not _running.acquire(blocking=False):
        raise RuntimeError("simulator.checked() is already running in this process, and it cannot be nested")
    run = Run(schedule, seed)
    try:
        extension.begin_check(schedule, seed, repair)
        extension.watch_host_operators(True)
        try:
            yield run
        finally:
            extension.watch_host_operators(False)
            extension.end_check()
            run.collect()
    finally:
        _running.release()
    if run.reports and raise_on_report:
        raise RaceError(run.reports, schedule, seed)
