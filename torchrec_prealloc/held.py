"""Small tensors that are kept long after their batch: found out, and given memory of their own.

Small tensors share an arena, and a user who keeps one of them (the labels, for a metric over a thousand steps) keeps
the arena. Nobody says beforehand which these are, so it is found out: an arena that is alive `PATIENCE` batches later
is held by something small. Then one batch of that kind, the *probe*, is laid out with every tensor in memory of its
own, and `PATIENCE` batches later it shows which are held. These stand alone from then on. What is wasted until then are
the arenas of about 2 × `PATIENCE` batches, however long training goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

PATIENCE = 8
"""Batches after which a pipeline has long let go of one."""
MAX_PROBES = 4
"""A kind of batch is probed no more often: what is held then is not always the same."""


@dataclass
class Watched:
    """The memory of one batch."""

    number: int
    count: int
    probe: bool
    memory: list[tuple[Callable[[], bool], int, int]] = field(default_factory=list)
    """Whether it is released by now, its size in bytes, and the position of its tensor (-1: it is an arena)."""

    def watch(self, is_released: Callable[[], bool], nbytes: int, position: int = -1) -> None:
        """The batch has memory of `nbytes`, as an arena or for its tensor number `position`.

        Args:
            is_released: whether nobody refers to it any more.
        """
        self.memory.append((is_released, nbytes, position))


class HeldTensors:
    """What an engine has found out. Kinds of batches are told apart by their number of tensors."""

    def __init__(self) -> None:
        self._number = 0
        self._watched: deque[Watched] = deque()
        self._alone: dict[int, frozenset[int]] = {}
        self._probes: dict[int, int] = {}
        self._to_probe: set[int] = set()
        self._in_flight: set[int] = set()

    def next_batch(self, count: int) -> Collection[int]:
        """The positions, among the `count` tensors of the next batch, of those that get memory of their own."""
        self._number += 1
        while self._watched and self._watched[0].number + PATIENCE < self._number:
            self._look(self._watched.popleft())
        probe = count in self._to_probe
        self._to_probe.discard(count)
        self._watched.append(Watched(self._number, count, probe))
        return range(count) if probe else self._alone.get(count, frozenset())

    @property
    def latest(self) -> Watched:
        """The batch that came last."""
        return self._watched[-1]

    def _look(self, watched: Watched) -> None:
        held = [(nbytes, position) for is_released, nbytes, position in watched.memory if not is_released()]
        count = watched.count
        if watched.probe:
            self._in_flight.discard(count)
            # Somebody who keeps most of a batch wastes little by keeping its arena.
            if sum(nbytes for nbytes, _ in held) <= sum(nbytes for _, nbytes, _ in watched.memory) // 2:
                self._alone[count] = self._alone.get(count, frozenset()).union(position for _, position in held)
        elif any(position < 0 for _, position in held) and count not in self._in_flight:
            probes = self._probes[count] = self._probes.get(count, 0) + 1
            if probes <= MAX_PROBES:
                self._to_probe.add(count)
                self._in_flight.add(count)
