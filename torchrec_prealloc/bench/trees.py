"""What it costs to find a batch's tensors and to rebuild it around others, beside torch's own pytree.

Each batch is taken apart and put together by us and by `torch.utils._pytree`, in turns, so that both see the same
machine. Where pytree does not know a class (`ModelInput`), it gets a dict of the same fields: it would stop at the
object otherwise, and find nothing.

>>> table = Table("batch", COLUMNS, tuple(run()))  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor
from torchrec.distributed.test_utils.model_input import ModelInput

from torchrec_prealloc import shipment
from torchrec_prealloc.batch import Walk
from torchrec_prealloc.batch_types import Kind
from torchrec_prealloc.bench.machine import CPU
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.transfer import TransferEngine

SUMMARY = "finding a batch's tensors and rebuilding it, beside torch's pytree"

ROUNDS = 100

STEPS = {"find": "find", "flatten": "tree_flatten", "rebuild": "rebuild", "unflatten": "tree_unflatten"}

COLUMNS = (
    Column("leaves", "tensors"),
    *(Column(key, f"{title} µs per tensor", digits=3, better="low") for key, title in STEPS.items()),
    *(Column(f"{key}_{end}", f"{title} {end}", digits=3) for key, title in STEPS.items() for end in ("min", "max")),
    Column("baseline", "baseline"),
    Column("on", "measured on"),
)


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the figures are held to, in µs."""

    find_per_leaf: float = 1.0
    find_per_batch: float = 50.0
    rebuild_per_leaf: float = 1.5

    def missed(self, rows: Iterable[Row]) -> list[str]:
        """What the rows do not hold to, in words; among it a search that is slower than `tree_flatten`."""
        said = []
        for row in rows:
            leaves, find, flatten, rebuild = (
                float(row.figures[key] or 0) for key in ("leaves", "find", "flatten", "rebuild")
            )
            allowed = self.find_per_leaf + self.find_per_batch / leaves
            if find >= allowed:
                said.append(f"{row.name}: find takes {find:.3f} µs a tensor, not under {allowed:.3f}")
            if find > flatten:
                said.append(f"{row.name}: find takes {find:.3f} µs a tensor, tree_flatten {flatten:.3f}")
            if rebuild >= self.rebuild_per_leaf:
                said.append(f"{row.name}: rebuild takes {rebuild:.3f} µs a tensor, not under {self.rebuild_per_leaf}")
        return said


TARGETS = Targets()
missed = TARGETS.missed


def run(full: bool = False, rounds: int = ROUNDS) -> list[Row]:
    """One row for each batch: medians of `rounds`, of ten times as many where `full`, with the least and the most."""
    rounds *= 10 if full else 1
    return [_row(name, batch, same, rounds) for name, (batch, same) in _batches().items()]


def _batches() -> dict[str, tuple[Any, Any]]:
    """Each batch, and what pytree gets in its place."""
    flat = {f"t{i}": torch.randn(16) for i in range(600)}
    tensordict = TensorDict(flat, batch_size=[16])
    model_input = ModelInput(
        float_features=torch.randn(32, 8),
        idlist_features=_kjt(),
        idscore_features=_kjt(),
        label=torch.rand(32),
        dummy=[torch.randn(16) for _ in range(600)],
    )
    nested = {
        f"a{i}": [{f"b{j}": [torch.randn(4) for _ in range(10)] for j in range(10)} for _ in range(10)]
        for i in range(10)
    }
    return {
        "dict of 600 tensors": (flat, flat),
        "ModelInput, 600 dummies, 2 KJTs": (model_input, dict(vars(model_input))),
        "TensorDict of 600 tensors": (tensordict, tensordict),
        "dicts and lists, 10,000 tensors": (nested, nested),
    }


def _kjt() -> KeyedJaggedTensor:
    lengths = torch.arange(4 * 32) % 4
    return KeyedJaggedTensor([f"f{i}" for i in range(4)], torch.arange(int(lengths.sum())), lengths=lengths)


class _Learned:
    """Walks classes with their own `to` as an engine has learned to; what it checks on each batch is in the time."""

    def kind(self, obj: Any) -> Kind | None:
        return shipment._learned[type(obj), "cpu"].kind(obj)

    def run(self, obj: Any) -> Any:
        raise RuntimeError(f"the engine has not learned {type(obj).__name__}")


def _row(name: str, batch: Any, same: Any, rounds: int) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TransferEngine(torch.device("cpu")).start(batch)  # learns
    walk = Walk(_Learned())
    walk.find(batch)
    arrived = [list(group) for group in walk.groups]
    leaves = sum(len(group) for group in walk.groups)
    times: dict[str, list[float]] = {key: [] for key in STEPS}
    for _ in range(rounds):
        walk = Walk(_Learned())
        gc.collect(0)  # each step pays for its own objects only
        _timed(times["find"], lambda walk=walk: walk.find(batch))  # type: ignore[misc]
        flattened = _timed(times["flatten"], lambda: pytree.tree_flatten(same))
        _timed(times["rebuild"], lambda walk=walk: walk.rebuild(batch, arrived))  # type: ignore[misc]
        _timed(times["unflatten"], lambda flattened=flattened: pytree.tree_unflatten(*flattened))  # type: ignore[misc]
    figures: dict[str, float | int | str | None] = {"leaves": leaves, "baseline": "torch's pytree", "on": CPU}
    for key, seconds in times.items():
        for suffix, of in (("", statistics.median), ("_min", min), ("_max", max)):
            figures[key + suffix] = of(seconds) / leaves * 1e6
    return Row(name, figures)


def _timed(times: list[float], step: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = step()
    times.append(time.perf_counter() - start)
    return result
