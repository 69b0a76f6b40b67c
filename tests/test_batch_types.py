"""Which kind each type has, and that kinds rebuild objects as they were."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torchrec import KeyedJaggedTensor, KeyedTensor

import torchrec_prealloc
from torchrec_prealloc.batch_types import (
    OWN_TO,
    BatchError,
    check_understood,
    fields_kind,
    is_made_of_fields,
    kind_of,
    register_batch_type,
)
from torchrec_prealloc.transfer import TransferEngine

CPU = torch.device("cpu")


def again(obj: Any) -> Any:
    """The object taken apart and put together around the same children."""
    kind = kind_of(type(obj))
    assert kind is not None
    children, context = kind.flatten(obj)
    return kind.unflatten(list(children), kind.blank(obj) if kind.blank else context)


class HasTo:
    """A class with its own `to`."""

    def to(self, device: torch.device) -> HasTo:
        return self


@dataclasses.dataclass
class DataclassWithTo(HasTo):
    """A dataclass with its own `to`."""

    x: int = 0


class DerivedKJT(KeyedJaggedTensor):
    """A subclass decides for itself: its `to` gives the base class."""


@pytest.mark.parametrize("cls", [HasTo, DataclassWithTo, DerivedKJT, torch.nn.Linear])
def test_classes_with_their_own_to_are_asked(cls: type) -> None:
    assert kind_of(cls) is OWN_TO


@pytest.mark.parametrize("cls", [int, str, np.ndarray, type(None), set, object, range, torch.Size, UserDict])
def test_other_classes_hold_no_tensors(cls: type) -> None:
    assert kind_of(cls) is None


@pytest.mark.parametrize("cls", [dict, list, tuple, OrderedDict, deque, KeyedJaggedTensor, KeyedTensor])
def test_containers_and_torchrecs_types_are_known(cls: type) -> None:
    kind = kind_of(cls)
    assert kind is not None
    assert kind is not OWN_TO


def test_a_deque_keeps_its_length() -> None:
    new = again(deque([1, 2], maxlen=3))
    assert new == deque([1, 2])
    assert new.maxlen == 3


def test_a_dict_subclass_is_filled_without_its_own_methods() -> None:
    class Loud(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise AssertionError

        def values(self) -> Any:
            raise AssertionError

        def __copy__(self) -> Loud:
            new = Loud()
            dict.update(new, self)
            return new

    new = again(Loud(a=1))
    assert type(new) is Loud
    assert dict.__getitem__(new, "a") == 1


def test_what_pytree_knows_goes_before_dict_and_dataclass() -> None:
    @dataclasses.dataclass
    class Output(OrderedDict[str, Any]):
        x: Any

        def __post_init__(self) -> None:
            self["x"] = self.x

    pytree.register_pytree_node(Output, lambda obj: ([obj.x], None), lambda children, _: Output(*children))
    new = again(Output(3))
    assert new.x == new["x"] == 3


def test_a_dataclass_is_rebuilt_without_init_and_keeps_other_attributes() -> None:
    @dataclasses.dataclass
    class Counted:
        x: int
        derived: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.derived = self.x * 10

    host = Counted(1)
    host.derived = 7
    host.extra = "kept"  # type: ignore[attr-defined]
    new = again(host)
    assert new is not host
    assert new.__dict__ == {"x": 1, "derived": 7, "extra": "kept"}


def test_a_dataclass_over_a_builtin_type_keeps_what_is_in_that() -> None:
    @dataclasses.dataclass
    class Failed(Exception):
        x: int

    host = Failed(1)
    host.args = ("why",)
    new = again(host)
    assert (new.x, new.args) == (1, ("why",))


def test_slots_that_are_not_set_stay_unset() -> None:
    class Slotted:
        __slots__ = ("__dict__", "a", "b")

    host: Any = Slotted()
    host.b = 1
    host.c = 2
    kind = fields_kind(Slotted, kept=("c",))
    assert list(kind.flatten(host)[0]) == [1]
    assert kind.blank is not None
    new = kind.unflatten([5], kind.blank(host))
    assert (new.b, new.c, hasattr(new, "a")) == (5, 2, False)


def test_made_of_fields() -> None:
    assert is_made_of_fields(HasTo)
    assert not is_made_of_fields(dict)
    assert not is_made_of_fields(type("Sub", (list,), {}))


def test_a_registration_goes_before_to_and_replaces_an_earlier_one() -> None:
    class Registered(HasTo):
        def __init__(self, x: Any) -> None:
            self.x = x

    assert kind_of(Registered) is OWN_TO
    register_batch_type(Registered, lambda obj: ([obj.x], None), lambda children, _: Registered(children[0]))
    assert again(Registered(1)).x == 1
    torchrec_prealloc.register_batch_type(Registered, lambda obj: ([], obj.x), lambda _, x: Registered(x + 1))
    assert again(Registered(1)).x == 2
    assert kind_of(type("Derived", (Registered,), {})) is OWN_TO


@pytest.mark.parametrize("what", [torch.Tensor, torch.nn.Parameter, "Batch", 3])
def test_registering_what_is_no_batch_class_is_refused(what: Any) -> None:
    with pytest.raises(BatchError, match=r"register_batch_type: .* is not a class that holds tensors; give"):
        register_batch_type(what, lambda obj: ([], None), lambda children, _: None)


@pytest.mark.parametrize("batch", [3, "text", None, object(), np.arange(3)])
def test_a_batch_that_cannot_move_is_refused_with_the_remedy(batch: Any) -> None:
    with pytest.raises(BatchError, match="is no tensor, no registered type and has no `to`"):
        check_understood(batch)
    with pytest.raises(BatchError, match=rf"a batch of type {type(batch).__name__} .* register_batch_type"):
        TransferEngine(CPU).start(batch)
