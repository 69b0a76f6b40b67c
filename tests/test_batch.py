"""Taking a batch apart and putting it together again, without an engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from torchrec_prealloc.batch import Walk, tensors_in
from torchrec_prealloc.batch_types import BatchError, Kind, fields_kind


class ByFields:
    """Walks the fields of every class with its own `to`."""

    def kind(self, obj: Any) -> Kind | None:
        return fields_kind(type(obj))

    def run(self, obj: Any) -> Any:
        raise AssertionError


class ByRunning:
    """Runs every `to`."""

    def kind(self, obj: Any) -> Kind | None:
        return None

    def run(self, obj: Any) -> Any:
        return obj.to(torch.device("cpu"))


class HasTo:
    """A class with its own `to`."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: torch.device) -> HasTo:
        return HasTo([self.x])


def rebuilt(batch: Any, own_to: Any = None, isolate: bool = False) -> tuple[Any, Walk]:
    """The batch around tensors that are 1 larger."""
    walk = Walk(own_to or ByFields(), isolate)
    walk.find(batch)
    return walk.rebuild(batch, [[tensor + 1 for tensor in group] for group in walk.groups]), walk


def test_distinct_tensors_are_found_once_in_order() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    _, walk = rebuilt([a, {"x": b, "y": a}, None, "text", (a,)])
    assert [id(tensor) for tensor in walk.groups[0]] == [id(a), id(b)]


def test_a_tensor_alone_is_a_batch() -> None:
    new, _ = rebuilt(torch.zeros(2))
    assert new.tolist() == [1, 1]


def test_what_was_given_is_left_as_it_was() -> None:
    inner = [torch.zeros(1)]
    host = {"a": inner, "b": HasTo(inner[0])}
    new, _ = rebuilt(host)
    assert host["a"] is inner
    assert float(inner[0]) == 0
    assert float(new["a"][0]) == float(new["b"].x) == 1
    assert new["a"][0] is new["b"].x


def test_each_kjt_is_a_group_of_its_own_where_it_may_be_freed_early() -> None:
    shared = torch.tensor([1, 1])
    kjts = [KeyedJaggedTensor(["f"], torch.arange(2), lengths=shared) for _ in range(2)]
    new, walk = rebuilt({"k": kjts, "again": kjts[0], "lengths": shared}, isolate=True)
    assert [len(group) for group in walk.groups] == [1, 2, 2]
    assert new["again"] is new["k"][0]
    assert len({id(tensor) for tensor in (new["lengths"], *(kjt.lengths() for kjt in new["k"]))}) == 3
    _, walk = rebuilt(kjts)
    assert [len(group) for group in walk.groups] == [3]


def test_a_class_with_its_own_to_is_run_once_however_often_it_appears() -> None:
    obj = HasTo(torch.zeros(1))
    new, walk = rebuilt([obj, {"again": obj}], ByRunning())
    assert new[0] is new[1]["again"]
    assert isinstance(new[0].x, list)
    assert walk.groups == [[]]


def test_objects_that_hold_themselves_keep_doing_so() -> None:
    obj = HasTo(torch.zeros(1))
    obj.x = [obj, torch.zeros(1)]
    new, _ = rebuilt(obj)
    assert new.x[0] is new
    assert new is not obj


def test_a_registered_type_may_make_new_children_at_each_call() -> None:
    from torchrec_prealloc.batch_types import register_batch_type

    class Lazy:
        def __init__(self, values: list[Tensor]) -> None:
            self.values = values

    register_batch_type(Lazy, lambda obj: ([list(obj.values)], None), lambda children, _: Lazy(children[0]))
    new, _ = rebuilt([Lazy([torch.zeros(1)])])
    assert float(new[0].values[0]) == 1


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_too_deep_a_batch_is_refused_while_it_is_found_and_while_it_is_rebuilt(depth: int) -> None:
    batch: Any = torch.zeros(1)
    for _ in range(depth):
        batch = (batch,)
    walk = Walk(ByFields())
    with pytest.raises(BatchError, match=r"the batch \(tuple\) nests deeper than .* register_batch_type"):
        walk.find(batch)


def test_a_hundred_levels_are_fine() -> None:
    batch: Any = torch.zeros(1)
    for _ in range(100):
        batch = [batch]
    new, _ = rebuilt(batch)
    for _ in range(100):
        new = new[0]
    assert float(new) == 1


def test_tensors_in_looks_into_everything() -> None:
    @dataclasses.dataclass
    class Outer:
        inner: Any

    a, b, c = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    found = tensors_in([Outer(HasTo({"a": a})), HasTo(HasTo(b)), KeyedJaggedTensor(["f"], c, lengths=a.long()), a])
    assert [id(tensor) for tensor in found[:3]] == [id(a), id(b), id(c)]
    assert len(found) == 4
    assert tensors_in(["text", 1, None, []]) == []
