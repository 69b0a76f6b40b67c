"""Random trees of everything that test_arrival.py sends piece by piece."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from arrivals import CPU, assert_same, engine_for, reference, send
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from test_arrival import (
    CONTAINERS,
    DTYPES,
    JAGGED,
    NOT_SIMULATED,
    TENSORDICTS,
    TENSORS,
    Color,
    Computes,
    Subclass,
    numbers,
)
from torch import Tensor

from torchrec_prealloc.batch_types import register_batch_type
from torchrec_prealloc.transfer import TransferEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:batch of class", "ignore:ComplexHalf", "ignore:The PyTorch API of nested"
)


class Mode(enum.Enum):
    """What `Flagged.to` branches on."""

    ALL = 0
    SOME = 1


class Flagged:
    """Its `to` leaves a field on the host, depending on a flag, and shares its plain fields."""

    def __init__(self, x: Any, y: Any, mode: Mode, rows: int) -> None:
        self.x, self.y, self.mode, self.rows = x, y, mode, rows

    def to(self, device: torch.device, non_blocking: bool = False) -> Flagged:
        y = self.y if self.mode is Mode.SOME else self.y.to(device, non_blocking=non_blocking)
        return Flagged(self.x.to(device, non_blocking=non_blocking), y, self.mode, self.rows)


class Halves(Flagged):
    """A subclass that does something else."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Halves:
        x = self.x.to(device, torch.float16, non_blocking=non_blocking)
        return Halves(x, self.y, self.mode, self.rows)


class Noded:
    """Known to torch's pytree."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Registered:
    """Known to us, with a field that stays on the host."""

    def __init__(self, x: Any, host: Any) -> None:
        self.x, self.host = x, host


pytree.register_pytree_node(Noded, lambda obj: ([obj.x, obj.y], None), lambda children, _: Noded(*children))
register_batch_type(Registered, lambda obj: ([obj.x], obj.host), lambda children, host: Registered(*children, host))

SIMPLE = [name for name in TENSORS if name not in NOT_SIMULATED]
PASSED = (None, "text", 1, 2.5, Color.RED, float("nan"))

# One of many tensors of equal form may be something else.
VARIANTS = ("plain", "conj", "neg", "grad", "expanded", "part", "shared", "dtype", "shape", "device", "subclass")

# A tree is drawn as a description first: from it equal trees can be built as often as they are needed.
leaves = st.one_of(
    st.tuples(st.just("tensor"), st.sampled_from(SIMPLE)),
    st.tuples(st.just("dtype"), st.sampled_from(range(len(DTYPES))), st.integers(0, 400)),
    st.tuples(st.just("jagged"), st.sampled_from(sorted(JAGGED))),
    st.tuples(st.just("tensordict"), st.sampled_from(sorted(set(TENSORDICTS) - {"memory-mapped"}))),
    st.tuples(st.just("passed"), st.sampled_from(range(len(PASSED)))),
    st.tuples(st.just("again"), st.integers(0, 50)),
    st.tuples(st.just("many"), st.integers(4, 24), st.integers(0, 3), st.sampled_from(VARIANTS), st.integers(0, 3)),
    st.tuples(st.just("view"), st.integers(0, 90), st.integers(0, 10)),
    st.tuples(st.just("flagged"), st.sampled_from(Mode), st.integers(0, 20)),
    st.tuples(st.just("halves"), st.sampled_from(Mode), st.integers(0, 2)),
    st.just(("computes",)),
)


def branches(children: Any) -> Any:
    kinds = st.sampled_from([*(name for name in CONTAINERS if name != "return type"), "pytree", "registered"])
    return st.tuples(st.just("container"), kinds, children, children)


batches = st.lists(st.recursive(leaves, branches, max_leaves=20), min_size=1, max_size=4)


class Builder:
    """Builds what a description says."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: list[Any] = []
        self.storage = torch.arange(100.0)

    def build(self, description: Any) -> Any:
        kind, *rest = description
        made = getattr(self, kind)(*rest)
        self.made.append(made)
        return made

    def tensor(self, name: str) -> Any:
        return TENSORS[name]()

    def dtype(self, index: int, count: int) -> Tensor:
        return numbers(count).to(DTYPES[index])

    def many(self, count: int, size: int, variant: str, odd: int) -> list[Tensor]:
        made = [torch.full((size,), float(index)) for index in range(count)]
        if variant in ("conj", "neg"):
            made = [torch.complex(tensor, tensor + 1) for tensor in made]
        odd_one: dict[str, Callable[[Tensor], Tensor]] = {
            "plain": lambda tensor: tensor,
            "conj": torch.conj,
            "neg": lambda tensor: torch._neg_view(tensor),
            "grad": lambda tensor: tensor.requires_grad_(),
            "expanded": lambda tensor: torch.tensor(3.0).expand(size),
            "part": lambda tensor: torch.arange(100.0)[odd : odd + size],
            "shared": lambda tensor: made[0].view(size),
            "dtype": lambda tensor: tensor.int(),
            "shape": lambda tensor: tensor.repeat(2),
            "device": lambda tensor: tensor.clone().to(self.device),
            "subclass": lambda tensor: tensor.as_subclass(Subclass),
        }
        for index in range(odd, count):  # none of the first: `odd` others stay plain
            made[index] = odd_one[variant](made[index])
        return made

    def jagged(self, name: str) -> Any:
        return JAGGED[name]()

    def tensordict(self, name: str) -> Any:
        return TENSORDICTS[name]()

    def passed(self, index: int) -> Any:
        return PASSED[index]

    def again(self, index: int) -> Any:
        return self.made[index % len(self.made)] if self.made else None

    def view(self, start: int, count: int) -> Tensor:
        return self.storage[start : start + count]

    def flagged(self, mode: Mode, rows: int) -> Flagged:
        return Flagged(numbers(rows), JAGGED["caches"](), mode, rows)

    def halves(self, mode: Mode, rows: int) -> Flagged:
        return Halves(numbers(rows), numbers(2), mode, rows)

    def computes(self) -> Computes:
        return Computes(numbers(3))

    def container(self, name: str, first: Any, second: Any) -> Any:
        made: Callable[[Any, Any], Any] = CONTAINERS.get(name) or {"pytree": Noded, "registered": Registered}[name]
        return made(self.build(first), self.build(second))


def expected(host: Any, device: torch.device) -> Any:
    """The reference, which knows nothing of the two registrations above."""
    Noded.to = lambda self, device: Noded(*(reference(part, device) for part in (self.x, self.y)))  # type: ignore[attr-defined]
    Registered.to = lambda self, device: Registered(reference(self.x, device), self.host)  # type: ignore[attr-defined]
    try:
        return reference(host, device)
    finally:
        del Noded.to, Registered.to  # type: ignore[attr-defined]


@functools.cache
def _engine(device: torch.device) -> TransferEngine:
    return engine_for(device)


def arrives(descriptions: Any, isolate: bool, device: torch.device) -> None:
    host, same = (["root", *map(Builder(device).build, descriptions), numbers(2)] for _ in range(2))
    # One engine for all: what it remembers of other batches must not matter.
    arrived = send(host, device, isolate, seed=1, engine=_engine(device))
    assert_same(arrived, expected(host, device))
    assert_same(host, same)
    if not isolate:
        # Where a tensor of the host stands in several places, one of the device does.
        pairs = zip(pytree.tree_leaves(host), pytree.tree_leaves(arrived), strict=True)
        ids = {(id(one), id(other)) for one, other in pairs if isinstance(one, Tensor)}
        assert len(ids) == len({one for one, _ in ids})


common = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors],
)


@settings(common, max_examples=200)
@given(batches, st.booleans())
def test_any_tree_arrives(device: torch.device, descriptions: Any, isolate: bool) -> None:
    arrives(descriptions, isolate, device)


@pytest.mark.long
@settings(common, max_examples=2000)
@given(batches, st.booleans())
def test_any_of_many_trees_arrives(device: torch.device, descriptions: Any, isolate: bool) -> None:
    arrives(descriptions, isolate, device)


def test_the_trees_reach_every_kind_of_leaf() -> None:
    for name in SIMPLE:
        assert Builder(CPU).build(("tensor", name)) is not None
    assert isinstance(Builder(CPU).build(("container", "pytree", ("computes",), ("passed", 0))), Noded)
    assert isinstance(TENSORDICTS["flat"](), TensorDict)
