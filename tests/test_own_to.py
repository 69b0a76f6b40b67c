"""Which classes with their own `to` are walked, when, and what makes the engine run `to` again."""

from __future__ import annotations

import enum
import gc
import warnings
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from arrivals import CPU, assert_same, engine_for, race_free, reference
from torch import Tensor
from torchrec import KeyedJaggedTensor

from torchrec_prealloc import own_to, shipment
from torchrec_prealloc.transfer import TransferEngine

pytestmark = pytest.mark.filterwarnings("error", "ignore:batch of class")


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipment, "_learned", {})


@pytest.fixture
def engine(device: torch.device) -> Iterator[TransferEngine]:
    engine = engine_for(device)
    yield engine
    engine.close()
    assert not engine._pending


class Batch:
    """Counts the runs of its `to`; which fields move depends on the class."""

    runs = 0
    stays: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        type(self).runs += 1
        return type(self)(**{name: self.part(name, value, device) for name, value in self.__dict__.items()})

    def part(self, name: str, value: Any, device: torch.device) -> Any:
        if name in self.stays:
            return value
        if isinstance(value, list):
            return [self.part(name, item, device) for item in value]
        return value.to(device, non_blocking=True) if hasattr(value, "to") else value


def fresh(base: type[Batch] = Batch, **members: Any) -> type[Batch]:
    """A subclass of which nothing is known."""
    return type("Fresh", (base,), {"runs": 0, **members})


def runs(engine: TransferEngine, *batches: Any) -> list[bool]:
    """For each batch whether its `to` ran; each must arrive as its `to` gives it."""
    ran = []
    for batch in batches:
        before = type(batch).runs
        arrived = engine.start(batch).wait()
        ran.append(type(batch).runs > before)
        assert_same(arrived, reference(batch, engine.device))
    return ran


def ones(count: int = 3) -> Tensor:
    return torch.ones(count)


# What is learned -------------------------------------------------------------------------------------------------


def test_a_class_runs_its_to_once_and_is_walked_then(engine: TransferEngine) -> None:
    cls = fresh()
    assert runs(engine, *(cls(x=ones(), y=[ones(2)], n=None) for _ in range(4))) == [True, False, False, False]


def test_a_field_that_stays_on_the_host_stays_there(engine: TransferEngine) -> None:
    cls = fresh(stays=("y",))
    batches = [cls(x=ones(), y=ones()) for _ in range(3)]
    assert runs(engine, *batches) == [True, False, False]
    assert engine.start(batches[0]).wait().y is batches[0].y


def test_a_kjt_in_a_field_is_walked(engine: TransferEngine) -> None:
    cls = fresh()
    batches = [cls(k=KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.tensor([1, 2]))) for _ in range(3)]
    assert runs(engine, *batches) == [True, False, False]


def test_a_to_that_changes_a_dtype_runs_for_every_batch(engine: TransferEngine) -> None:
    cls = fresh(part=lambda self, name, value, device: value.to(device, torch.float64))
    assert runs(engine, *(cls(x=ones()) for _ in range(3))) == [True] * 3


def test_a_to_that_computes_runs_for_every_batch(engine: TransferEngine) -> None:
    cls = fresh(part=lambda self, name, value, device: value.to(device) * 2)
    assert runs(engine, *(cls(x=ones()) for _ in range(3))) == [True] * 3


def test_a_to_that_changes_a_plain_field_runs_for_every_batch(engine: TransferEngine) -> None:
    cls = fresh(part=lambda self, name, value, device: value.to(device) if name == "x" else "device")
    assert runs(engine, *(cls(x=ones(), where="host") for _ in range(3))) == [True] * 3


def test_a_to_that_changes_its_own_object_runs_for_every_batch(device: torch.device) -> None:
    class Moves(Batch):
        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            type(self).runs += 1
            self.log.append("moved")
            return Moves(x=self.x.to(device, non_blocking=True), log=list(self.log))

    class InPlace(Batch):
        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            type(self).runs += 1
            self.x = self.x.to(device, non_blocking=True)
            return self

    engine = engine_for(device)
    for cls in (Moves, InPlace):
        for count in range(1, 4):
            batch = cls(x=ones(), log=[])
            arrived = engine.start(batch).wait()
            assert cls.runs == count
            assert_same(arrived.x, ones().to(device))
            assert (arrived is batch) == (cls is InPlace)
            assert arrived.log == (["moved"] if cls is Moves else [])
    engine.close()


def test_subclasses_decide_for_themselves(engine: TransferEngine) -> None:
    base = fresh()
    derived = fresh(base, stays=("y",))
    batches = [cls(x=ones(), y=ones()) for _ in range(2) for cls in (base, derived)]
    assert runs(engine, *batches) == [True, True, False, False]


def test_a_to_of_another_class_runs_for_every_batch(engine: TransferEngine) -> None:
    class Host(Batch):
        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            type(self).runs += 1
            return Batch(x=self.x.to(device))

    assert runs(engine, *(Host(x=ones()) for _ in range(3))) == [True] * 3


def test_classes_that_are_more_than_their_fields_run_for_every_batch(engine: TransferEngine) -> None:
    class Encoding(dict[str, Any]):
        runs = 0

        def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
            type(self).runs += 1
            return Encoding({key: value.to(device) for key, value in self.items()})

    class User(UserDict[str, Any]):
        runs = 0

        def to(self, device: torch.device, non_blocking: bool = False) -> User:
            type(self).runs += 1
            return User({key: value.to(device) for key, value in self.data.items()})

    assert runs(engine, *(Encoding(x=ones()) for _ in range(3))) == [True] * 3
    assert runs(engine, *(User(x=ones()) for _ in range(3))) == [True, False, False]


def test_a_class_with_slots_is_walked(engine: TransferEngine) -> None:
    class Slotted:
        __slots__ = ("unset", "x")
        runs = 0

        def to(self, device: torch.device, non_blocking: bool = False) -> Slotted:
            type(self).runs += 1
            moved = Slotted()
            moved.x = self.x.to(device)
            return moved

    batch = Slotted()
    batch.x = ones()
    for _ in range(3):
        arrived = engine.start(batch).wait()
        assert_same(arrived.x, ones().to(engine.device))
        assert not hasattr(arrived, "unset")
    assert Slotted.runs == 1


def test_a_list_that_moves_in_part_makes_its_class_run_for_every_batch(engine: TransferEngine) -> None:
    def part(self: Any, name: str, value: Any, device: torch.device) -> Any:
        return [value[0].to(device), value[1]]

    cls = fresh(part=part)
    assert runs(engine, *(cls(x=[ones(), ones()]) for _ in range(3))) == [True] * 3


# What must not go unnoticed --------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """A flag."""

    TRAIN = 0
    EVAL = 1


class Flagged(Batch):
    """Leaves `y` on the host where its flag says so."""

    def part(self, name: str, value: Any, device: torch.device) -> Any:
        if name == "y" and self.flag in (True, 1, "host", 0.5, Phase.EVAL):
            return value
        return super().part(name, value, device)


@pytest.mark.parametrize("flags", [(False, True), (0, 1), ("device", "host"), (0.0, 0.5), tuple(Phase), (None, True)])
def test_a_flag_that_takes_another_branch_is_noticed_at_once(flags: Any, engine: TransferEngine) -> None:
    cls = fresh(Flagged)
    batches = [cls(x=ones(), y=ones(), flag=flag) for flag in (flags[0], flags[1], *flags, *flags)]
    assert runs(engine, *batches) == [True, True, False, False, False, False]


@pytest.mark.parametrize("kind", [int, str])
def test_a_number_or_string_of_many_values_is_no_flag(kind: type, engine: TransferEngine) -> None:
    cls = fresh()
    batches = [cls(x=ones(), step=kind(step)) for step in range(own_to.MAX_VALUES + 6)]
    assert runs(engine, *batches) == [True] * (own_to.MAX_VALUES + 1) + [False] * 5


def test_a_field_of_another_type_dtype_or_name_is_learned_anew(engine: TransferEngine) -> None:
    cls = fresh()
    kinds = [{"x": ones()}, {"x": [ones()]}, {"x": torch.arange(3)}, {"x": ones(), "y": ones()}]
    assert runs(engine, *(cls(**fields) for fields in kinds)) == [True] * 4
    assert runs(engine, *(cls(**fields) for fields in kinds)) == [False] * 4


@pytest.mark.parametrize("stays", [(), ("y",)])
@pytest.mark.parametrize("empty", [[], [None], [[]], ["text"]])
def test_tensors_in_a_list_that_had_none_are_noticed(empty: Any, stays: Any, engine: TransferEngine) -> None:
    cls = fresh(stays=stays)
    batches = [cls(x=ones(), y=y) for y in (empty, empty, [ones()], [ones()], empty)]
    assert runs(engine, *batches) == [True, False, True, False, False]


def test_one_list_in_two_fields_of_different_fate_is_not_walked(engine: TransferEngine) -> None:
    cls = fresh(stays=("y",))
    shared = [ones()]
    assert runs(engine, *(cls(x=shared, y=shared) for _ in range(2)))[0]
    arrived = engine.start(cls(x=shared, y=shared)).wait()
    assert arrived.y is shared


def test_a_hidden_branch_is_found_at_the_recheck(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_to, "RECHECK", 5)
    cls = fresh()
    batches = [cls(x=ones(), y=ones()) for _ in range(12)]
    # Nothing has changed: each fifth walked batch is checked, and the class stays trusted.
    assert runs(engine, *batches) == [True] + [False] * 4 + [True] + [False] * 4 + [True, False]
    cls.stays = ("y",)  # as a global would
    arrived = [engine.start(batch).wait() for batch in batches[:3]]
    assert all(batch.y is not other.y for batch, other in zip(arrived, batches, strict=False))
    with pytest.warns(UserWarning, match=r"Fresh.to moved other fields than it did .* register_batch_type"):
        engine.start(batches[3]).wait()
    assert runs(engine, *batches) == [True] * 12


def test_a_branch_on_a_nested_flag_is_found_at_the_recheck(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_to, "RECHECK", 2)

    class Nested(Batch):
        def part(self, name: str, value: Any, device: torch.device) -> Any:
            return value if name == "y" and self.options["host"] else super().part(name, value, device)

    cls = fresh(Nested)
    engine.start(cls(x=ones(), y=ones(), options={"host": False})).wait()
    engine.start(cls(x=ones(), y=ones(), options={"host": True})).wait()
    with pytest.warns(UserWarning, match=r"Fresh.to moved other fields"):
        engine.start(cls(x=ones(), y=ones(), options={"host": True})).wait()


def test_more_combinations_of_flags_than_are_kept_are_learned_anew(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_to, "MAX_SIGNATURES", 3)
    cls = fresh()
    batches = [cls(x=ones(), flag=flag) for flag in (0, 1, 2, 3, 3, 0)]
    assert runs(engine, *batches) == [True, True, True, True, False, True]


# Objects in objects ----------------------------------------------------------------------------------------------


def test_a_nested_object_with_its_own_to_is_walked_as_that_says(engine: TransferEngine) -> None:
    inner = fresh(stays=("y",))
    outer = fresh()
    batches = [outer(x=ones(), inner=inner(x=ones(), y=ones())) for _ in range(3)]
    assert runs(engine, *batches) == [True, False, False]


def test_a_nested_object_that_computes_makes_the_outer_run(engine: TransferEngine) -> None:
    inner = fresh(part=lambda self, name, value, device: value.to(device) + 1)
    outer = fresh()
    assert runs(engine, *(outer(x=ones(), inner=inner(x=ones())) for _ in range(3))) == [True] * 3


def test_an_outer_to_that_does_not_call_the_nested_one_runs_for_every_batch(engine: TransferEngine) -> None:
    inner = fresh(stays=("y",))

    class Outer(Batch):
        def part(self, name: str, value: Any, device: torch.device) -> Any:
            if name == "inner":  # moves all of it
                return type(value)(x=value.x.to(device), y=value.y.to(device))
            return super().part(name, value, device)

    outer = fresh(Outer)
    assert runs(engine, *(outer(x=ones(), inner=inner(x=ones(), y=ones())) for _ in range(3))) == [True] * 3


def test_a_nested_object_left_on_the_host_stays_there(engine: TransferEngine) -> None:
    inner = fresh()
    outer = fresh(stays=("inner",))
    batches = [outer(x=ones(), inner=inner(x=ones())) for _ in range(3)]
    assert runs(engine, *batches) == [True, False, False]
    assert engine.start(batches[0]).wait().inner is batches[0].inner


def test_an_object_that_holds_itself_in_a_list_is_understood(device: torch.device) -> None:
    class Cyclic(Batch):
        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            type(self).runs += 1
            moved = Cyclic(x=self.x.to(device), me=[])
            moved.me.append(moved)
            return moved

    batch = Cyclic(x=ones(), me=[])
    batch.me.append(batch)
    engine = engine_for(device)
    for _ in range(3):
        arrived = engine.start(batch).wait()
        assert arrived.me[0] is arrived
        assert_same(arrived.x, ones().to(device))
    engine.close()


# Bad input -------------------------------------------------------------------------------------------------------


def raising(error: Exception, when: Any) -> type[Batch]:
    def part(self: Any, name: str, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.to(device)
        if when(self):
            raise error
        return moved

    return fresh(part=part)


def test_a_to_that_raises_gives_its_own_exception_with_a_note_and_the_next_batch_goes(device: torch.device) -> None:
    error = ValueError("no")
    bad, good = raising(error, lambda self: True), fresh()
    engine = engine_for(device)
    for batch in (bad(x=ones()), {"nested": [bad(x=ones()), ones()]}):
        with pytest.raises(ValueError, match="no") as caught:
            engine.start(batch)
        assert caught.value is error
        assert error.__context__ is error.__cause__ is None
        if hasattr(error, "__notes__"):
            assert "while a batch's Fresh was moved to" in error.__notes__[-2]
            assert f"in a batch of class {type(batch).__name__}, after " in error.__notes__[-1]
        assert not engine._pending
        assert_same(engine.start(good(x=ones())).wait().x, ones().to(device))
    engine.close()


def test_a_to_that_has_run_before_is_not_run_twice_when_it_raises(device: torch.device) -> None:
    engine = engine_for(device)
    cls = raising(ValueError("no"), lambda self: type(self).runs == 2)
    engine.start(cls(x=ones(), flag=False)).wait()
    with pytest.raises(ValueError, match="no"):
        engine.start(cls(x=ones().long(), flag=True))
    assert cls.runs == 2
    engine.close()


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_to_that_cannot_be_observed_runs_plainly_and_says_so_once(ran_before: bool, engine: TransferEngine) -> None:
    def part(self: Any, name: str, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.first:
            return value.to(device) * 1
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            if ran_before:
                value.view(-7, 99)  # an operation fails
            raise RuntimeError("not under a mode")
        return value.to(device)

    cls = fresh(part=part)
    if ran_before:
        engine.start(cls(x=ones(), first=True)).wait()
    with pytest.warns(UserWarning, match=r"Fresh.to cannot run while .* register_batch_type\(Fresh, ") as caught:
        arrived = [engine.start({"b": cls(x=ones(), first=False)}).wait()["b"] for _ in range(3)]
    assert len(caught) == 1
    for one in arrived:
        assert_same(one.x, ones().to(engine.device))


def test_a_to_that_returns_none_is_refused_by_name(engine: TransferEngine) -> None:
    class Forgets(Batch):
        def to(self, device: torch.device, non_blocking: bool = False) -> Any:
            self.x.to(device)

    with pytest.raises(TypeError, match=r"Forgets.to returned None; it must return the moved object"):
        engine.start(Forgets(x=ones()))
    assert not engine._pending


def test_a_to_that_runs_out_of_memory_says_so(engine: TransferEngine) -> None:
    cls = raising(torch.OutOfMemoryError("full"), lambda self: True)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        engine.start(cls(x=ones()))
    assert cls.runs == 1


def test_what_to_returns_is_passed_on_whatever_it_is(engine: TransferEngine) -> None:
    class Summed(Batch):
        def to(self, device: torch.device, non_blocking: bool = False) -> Any:
            return {"sum": float(self.x.to(device).sum()), "x": (self.x.to(device),)}

    for _ in range(3):
        assert_same(engine.start(Summed(x=ones())).wait(), {"sum": 3.0, "x": (ones().to(engine.device),)})


def test_batches_that_fail_leave_no_memory_behind(simulated_accelerator: torch.device) -> None:
    from torchrec_prealloc import simulator

    def allocated() -> int:
        gc.collect()
        devices = simulator.stats().devices
        return devices[0].allocated if devices else 0

    def part(self: Any, name: str, value: Any, device: torch.device) -> Any:
        moved = value.to(device, torch.float64)
        if name == "y":
            (moved + 1).sum()  # makes the queue run
            raise ValueError("no")
        return moved

    cls = fresh(part=part)
    engine = engine_for(simulated_accelerator)
    before = allocated()
    with race_free(simulated_accelerator):
        for batch in (cls(x=ones(2000), y=ones()), [ones(2000), cls(x=ones(), y=ones())], [ones(), ones().to("meta")]):
            with pytest.raises((ValueError, NotImplementedError)) as caught:
                engine.start(batch)
            del caught
            assert not engine._pending
        assert_same(engine.start([ones()]).wait(), [ones().to(simulated_accelerator)])
        engine.close()
    assert allocated() == before


@pytest.mark.parametrize("stays", [(), ("here",)])
def test_memory_that_to_passes_on_is_held_for_other_streams(stays: Any, simulated_accelerator: torch.device) -> None:
    """Whether `to` runs or the class is walked: the memory is of a stream that knows nothing of the readers."""
    module = torch.get_device_module(simulated_accelerator)
    engine = engine_for(simulated_accelerator)
    foreign, reader = module.Stream(), module.Stream()
    cls = fresh(stays=stays)
    with race_free(simulated_accelerator):
        for _ in range(4):
            with module.stream(foreign):
                here = torch.ones(500, device=simulated_accelerator)
            module.current_stream().wait_stream(foreign)
            host = cls(x=ones().pin_memory(), here=here)
            transfer = engine.start(host)
            with module.stream(reader):
                total = transfer.wait().here.sum()
            del transfer, host, here
            with module.stream(foreign):
                torch.zeros(500, device=simulated_accelerator)  # could have the memory that is being read
        engine.close()
        module.synchronize()
        assert float(total) == 500
    assert cls.runs == 1


class Doubles(Batch):
    """Allocates and computes on the stream that runs its `to`."""

    def part(self, name: str, value: Any, device: torch.device) -> Any:
        return value.to(device, non_blocking=True) * 2


class Shy(Doubles):
    """As `Doubles`, and cannot be observed."""

    def part(self, name: str, value: Any, device: torch.device) -> Any:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return super().part(name, value, device)


@pytest.mark.parametrize("cls", [Doubles, Shy])
@pytest.mark.parametrize("seed", range(3))
def test_what_to_allocates_is_ordered_and_kept_for_other_streams(
    cls: type[Batch], seed: int, simulated_accelerator: torch.device
) -> None:
    module = torch.get_device_module(simulated_accelerator)
    engine = engine_for(simulated_accelerator)
    reader = module.Stream()
    with race_free(simulated_accelerator, seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Shy cannot be observed
        sums = []
        for step in range(4):
            transfer = engine.start(cls(x=torch.full((500,), float(step)).pin_memory()))
            with module.stream(reader):
                sums.append(transfer.wait().x.sum())
            del transfer  # as a pipeline that is done with it
            torch.zeros(500, device=simulated_accelerator)
        engine.close()
        module.synchronize()
        assert [float(total) for total in sums] == [0.0, 1000.0, 2000.0, 3000.0]


def test_nothing_is_said_of_ordinary_classes() -> None:
    engine = engine_for(CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls = fresh(stays=("y",))
        assert runs(engine, *(cls(x=ones(), y=ones()) for _ in range(3))) == [True, False, False]
