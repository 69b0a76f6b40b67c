"""Packed batches: what is in them, what the engine makes of them, and that both are the batch to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import pickletools
import threading
from typing import Any
from unittest import mock

import arrivals
import pytest
import torch
from arrivals import CPU, assert_same, engine_for, race_free, reference, send
from hypothesis import given, settings
from test_arrival import DTYPES, JAGGED, TENSORS, Computes, Subclass, numbers
from test_random_trees import VARIANTS, Builder, Flagged, Mode, batches, common, expected
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.test_utils.model_input import ModelInput

from torchrec_prealloc import packed_kind
from torchrec_prealloc.batch_types import BatchError
from torchrec_prealloc.codec import CodecError
from torchrec_prealloc.layout import ALIGNMENT
from torchrec_prealloc.packed_batch import UNPACKED
from torchrec_prealloc.packing import SECTION_BYTES, SHARED_BYTES, PackedBatch, pack
from torchrec_prealloc.plain import is_plain
from torchrec_prealloc.transfer import TransferEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:batch of class", "ignore:ComplexHalf", "ignore:The PyTorch API of nested"
)


def model_input(count: int = 50) -> ModelInput:
    return ModelInput(
        float_features=torch.randn(4, 3),
        idlist_features=JAGGED["lengths"](),
        idscore_features=JAGGED["offsets"](),
        label=torch.rand(4),
        dummy=[torch.randn(16) for _ in range(count)],
    )


@dataclasses.dataclass
class Plain:
    """No `to` of its own, and a field that everybody may change."""

    x: Tensor
    tags: list[str]


def by_queue(packed: PackedBatch) -> PackedBatch:
    arrived: PackedBatch = pickle.loads(pickle.dumps(packed))
    return arrived


# What is in one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_every_tensor(name: str) -> None:
    tensor = TENSORS[name]()
    assert_same(pack([tensor]).unpack(), reference([tensor], CPU) if is_plain(tensor) else [tensor])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    batch = [numbers(count).to(dtype) for count in (0, 1, 3, 3, 3, 3, 65)]
    assert_same(by_queue(pack(batch)).unpack(), batch)


@pytest.mark.parametrize("name", sorted(JAGGED))
def test_every_jagged_tensor(name: str) -> None:
    packed = by_queue(pack({"x": JAGGED[name]()}))
    assert_same(packed.unpack(), {"x": JAGGED[name]()})
    assert packed.apart == ()


def test_the_layout_is_the_devices() -> None:
    batch = [torch.full((16,), float(index)) for index in range(10)] + [torch.arange(5)]
    packed = pack(batch)
    [section] = packed.sections
    assert len(packed) % ALIGNMENT == 0
    pointers = [tensor.data_ptr() for tensor in packed.unpack()]
    assert all((pointer - section.data_ptr()) % ALIGNMENT == 0 for pointer in pointers)
    assert {b - a for a, b in itertools.pairwise(pointers[:10])} == {64}


def test_a_large_tensor_is_a_section_of_its_own() -> None:
    large = torch.arange(SECTION_BYTES // 4, dtype=torch.int32)
    packed = pack([large, torch.ones(3), large + 1])
    assert [len(section) for section in packed.sections] == [ALIGNMENT, SECTION_BYTES, SECTION_BYTES]
    assert len({section.untyped_storage().data_ptr() for section in packed.sections}) == 1
    arrived = by_queue(packed)
    assert len({section.untyped_storage().data_ptr() for section in arrived.sections}) == 1
    assert_same(arrived.unpack(), [large, torch.ones(3), large + 1])


def test_shared_storage_stays_shared() -> None:
    base = torch.arange(100.0)
    one, two, again = by_queue(pack([base[:60], base[30:], base])).unpack()
    one[40] = -1.0
    assert two[10] == again[40] == -1.0


def test_one_object_stays_one() -> None:
    tensor = torch.ones(3)
    batch: dict[str, Any] = {"a": tensor, "b": [tensor]}
    batch["self"] = batch
    arrived = pack(batch).unpack()
    assert arrived["a"] is arrived["b"][0]
    assert arrived["self"] is arrived


def test_what_is_more_than_bytes_travels_apart() -> None:
    batch = {
        "grad": torch.ones(2, requires_grad=True),
        "subclass": torch.ones(2).as_subclass(Subclass),
        "sparse": torch.eye(3).to_sparse(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "plain": torch.ones(2),
    }
    packed = pack(batch)
    assert len(packed.apart) == 4
    assert_same(packed.unpack(), batch)


def test_large_tensors_in_shared_memory_are_not_copied() -> None:
    shared = torch.ones(SHARED_BYTES // 4).share_memory_()
    packed = pack([shared, torch.ones(3)])
    assert packed.apart == (shared,)
    assert packed.unpack()[0] is shared
    assert pack([shared]).sections == ()
    [arrived] = by_queue(pack([shared])).unpack()
    assert torch.equal(arrived, shared)
    assert torch.equal(send(pack([shared]), CPU)[0], shared)
    assert pack([torch.ones(100).share_memory_()]).apart == ()


@pytest.mark.parametrize("batch", [None, [], 3, "x", {"a": 1}, torch.ones(2), (torch.ones(1),)], ids=str)
def test_small_batches(batch: Any) -> None:
    assert_same(by_queue(pack(batch)).unpack(), batch)


def test_views_are_none_to_autograd() -> None:
    one, two = pack([torch.ones(4), torch.ones(4)]).unpack()
    assert not one._is_view()
    version = two._version
    one.add_(1)
    assert two._version == version


@pytest.mark.parametrize("odd", [0, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_of_the_last_batch_that_is_none_in_this_one(variant: str, odd: int) -> None:
    for count in (20, 3, 20):
        pack(Builder(CPU).many(20, count, variant, 20))
        batch = Builder(CPU).many(20, count, variant, odd)
        wanted = [reference(tensor, CPU) if is_plain(tensor) else tensor for tensor in batch]
        assert_same(pack(batch).unpack(), wanted)


@pytest.mark.parametrize("name", ["conjugate view", "negative view"])
def test_a_lazy_view_crosses_as_its_values(name: str) -> None:
    # torch.multiprocessing hands over what the view lies over, and forgets that it is one.
    [arrived] = by_queue(pack([TENSORS[name]()])).unpack()
    assert torch.equal(arrived, TENSORS[name]())
    assert not arrived.is_conj()
    assert not arrived.is_neg()


def test_a_run_whose_memory_was_freed() -> None:
    pack([torch.ones(5) for _ in range(20)])
    batch = [torch.ones(5) for _ in range(20)]
    batch[7].untyped_storage().resize_(0)
    with pytest.raises(BatchError, match="its memory was freed"):
        pack(batch)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CodecError, match=r"^batch\['x'\]\[1\]\.tags: a _thread\.lock cannot be pickled"):
        pack({"x": [1, Plain(torch.ones(1), threading.Lock())]})  # type: ignore[arg-type]


def test_reading_imports_nothing() -> None:
    packed = pack([model_input(3), Plain(torch.ones(1), ["a"]), len, Mode.ALL])
    for written in (packed.code, packed.table):
        assert not [op.name for op, *_ in pickletools.genops(written) if "GLOBAL" in op.name or "INST" in op.name]
    assert packed.unpack()[1:3] == [Plain(packed.unpack()[1].x, ["a"]), len]


def test_it_says_what_it_is() -> None:
    assert repr(pack([torch.ones(3)])) == "PackedBatch(1 tensors, 64 bytes in 1 sections)"


# What the engine makes of one ------------------------------------------------------------------------------------


def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch from now on is taken as it is."""
    taken: list[bool] = []
    choose = packed_kind.choose

    def counted(*args: Any) -> Any:
        kind = choose(*args)
        taken.append(kind is not UNPACKED)
        return kind

    monkeypatch.setattr(packed_kind, "choose", counted)
    return taken


def test_a_class_with_its_own_to_is_taken_as_it_is_once_learned(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_prealloc.shipment._learned", {})
    taken = ways(monkeypatch)
    engine = engine_for(device)
    for _ in range(4):
        host = model_input()
        assert_same(send(by_queue(pack(host)), device, engine=engine), reference(host, device))
    assert taken == [False, True, True, True]
    assert engine.stats.copies - 4 <= 8  # the first batch runs its own `to`


def test_one_copy(device: torch.device) -> None:
    engine = TransferEngine(device)
    batch = {"x": [torch.full((3,), float(index)) for index in range(100)], "kjt": JAGGED["lengths"]()}
    send(pack(batch), device, engine=engine)
    assert (engine.stats.copies, engine.stats.allocations) == (1, 1)


def test_a_large_tensor_can_be_freed_by_itself(device: torch.device) -> None:
    small, large = send(pack([torch.ones(3), torch.ones(SECTION_BYTES)]), device)
    assert small.untyped_storage().nbytes() < SECTION_BYTES < large.untyped_storage().nbytes()


def test_early_free_gets_memory_of_its_own(device: torch.device) -> None:
    host = model_input()
    for _ in range(3):
        arrived = send(pack(host), device, isolate=True)
        assert_same(arrived, reference(host, device))
        storages = [
            {part.untyped_storage().data_ptr() for part in parts}
            for parts in (
                [arrived.idlist_features.values(), arrived.idlist_features.lengths()],
                [arrived.idscore_features.values(), arrived.idscore_features.lengths()],
                [arrived.label, *arrived.dummy],
            )
        ]
        assert not storages[0] & storages[1]
        assert not storages[2] & (storages[0] | storages[1])


def test_a_field_that_stays_on_the_host_stays(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ways(monkeypatch)
    for _ in range(3):
        host = Flagged(numbers(5), numbers(3), Mode.SOME, 5)
        arrived = send(pack([host]), device)
        assert_same(arrived, reference([host], device))
    assert taken[-1]


def test_a_flag_that_changes(device: torch.device) -> None:
    engine = engine_for(device)
    for mode in [Mode.ALL, Mode.SOME, Mode.ALL, Mode.SOME] * 2:
        host = Flagged(numbers(5), numbers(3), mode, 5)
        assert_same(send(pack([host]), device, engine=engine), reference([host], device))


def test_a_to_that_computes_runs_for_every_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ways(monkeypatch)
    for _ in range(3):
        host = [Computes(numbers(3))]
        assert_same(send(pack(host), device), reference(host, device))
    assert taken == [False] * 3


@pytest.mark.filterwarnings("ignore:Drifts.to moved other fields")
def test_a_to_that_changes_its_mind_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_prealloc.own_to.RECHECK", 10)
    engine = engine_for(CPU)
    Drifts.moves = True
    for step in range(40):
        Drifts.moves = step < 5
        arrived = send(pack(Drifts(numbers(3))), CPU, engine=engine)
    assert arrived.y is not None
    assert arrived.x.untyped_storage().nbytes() == ALIGNMENT  # it stayed in the packed batch


class Drifts:
    moves = True

    def __init__(self, x: Tensor) -> None:
        self.x, self.y = x, x

    def to(self, device: torch.device, non_blocking: bool = False) -> Drifts:
        moved = Drifts(self.x)
        if self.moves:
            moved.x = moved.y = self.x.to(device, non_blocking=non_blocking)
        return moved


def test_batches_share_nothing_that_may_change(device: torch.device) -> None:
    engine = engine_for(device)
    one, two = (send(pack(Plain(torch.ones(1), ["a"])), device, engine=engine) for _ in range(2))
    one.tags.append("b")
    assert two.tags == ["a"]
    assert send(pack(Plain(torch.ones(1), ["a"])), device, engine=engine).tags == ["a"]


def test_a_structure_that_changes(device: torch.device) -> None:
    engine = engine_for(device)
    for step in range(3 * packed_kind.REMEMBERED):
        host = {"step": step, "x": [numbers(count) for count in range(step % 7)]}
        assert_same(send(pack(host), device, engine=engine), reference(host, device))
    assert len(packed_kind._structures) <= packed_kind.REMEMBERED


def test_what_was_looked_up_on_the_host_is_forgotten(device: torch.device) -> None:
    kjt = JAGGED["lengths"]()
    kjt.to_dict()
    for _ in range(2):
        assert send(pack([kjt]), device)[0]._jt_dict is None


def test_sizes_that_change_are_one_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_kind._structures.clear()
    engine = engine_for(CPU)
    for size in range(1, 20):
        host = {"x": numbers(size), "kjt": KeyedJaggedTensor(["a"], numbers(size), lengths=torch.tensor([size]))}
        assert_same(send(pack(host), CPU, engine=engine), reference(host, CPU))
    assert len(packed_kind._structures) == 1


def test_several_in_one_batch(device: torch.device) -> None:
    packed = pack({"x": numbers(3)})
    one, two, three = send([packed, pack([numbers(4)]), packed], device)
    assert one is three
    assert_same([one, two], reference([{"x": numbers(3)}, [numbers(4)]], device))


@pytest.mark.parametrize("batch", [{"a": 1}, [], None], ids=str)
def test_a_batch_without_tensors(batch: Any, device: torch.device) -> None:
    assert send(pack(batch), device) == batch


# Without the engine ----------------------------------------------------------------------------------------------


def of_several_classes() -> Any:
    return {"x": [numbers(3), Computes(numbers(3))], "y": JAGGED["lengths"]()}


@pytest.mark.parametrize("make", [model_input, of_several_classes])
def test_its_own_to_gives_what_the_batchs_own_gives(make: Any, device: torch.device) -> None:
    host = make()
    assert_same(pack(host).to(device), reference(host, device))


def test_options_go_to_the_batchs_own_to(device: torch.device) -> None:
    stream = torch.get_device_module(device).Stream()
    with race_free(device):
        host = model_input()
        arrived, wanted = (
            batch.to(device, non_blocking=True, data_copy_stream=stream) for batch in (pack(host), host)
        )
        if device != CPU:
            torch.get_device_module(device).current_stream().wait_stream(stream)
        assert_same(arrived, wanted)


# Any tree --------------------------------------------------------------------------------------------------------


@functools.cache
def _engine(device: torch.device) -> TransferEngine:
    return engine_for(device)


def packed_tree(descriptions: Any, device: torch.device) -> Any:
    host = ["root", *map(Builder(device).build, descriptions), numbers(2)]
    return host, pack(host)


@settings(common, max_examples=150)
@given(descriptions=batches)
def test_any_tree_arrives_packed(device: torch.device, descriptions: Any) -> None:
    for isolate in (False, True):
        _, packed = packed_tree(descriptions, device)
        arrived = send(packed, device, isolate, seed=1, engine=_engine(device))
        assert_same(arrived, expected(packed.unpack(), device))


@settings(common, max_examples=100)
@given(descriptions=batches)
def test_any_tree_unpacks(descriptions: Any) -> None:
    host, packed = packed_tree(descriptions, CPU)
    described = arrivals._described
    # Packed tensors have the strides that `.to` gives, also where it leaves them on the host.
    without_strides = {"strides": None}
    with mock.patch.object(arrivals, "_described", lambda tensor: {**described(tensor), **without_strides}):
        assert_same(packed.unpack(), host)
