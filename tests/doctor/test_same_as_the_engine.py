"""What `explain` says of a batch is what the engine then does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from arrivals import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from test_arrival import DTYPES, JAGGED, NOT_SIMULATED, TENSORDICTS, TENSORS, Computes, numbers, pinned
from test_random_trees import Builder, Flagged, Halves, Mode, batches, common
from torch import Tensor

from doctor.batches import LeavesOne, Opaque
from torchrec_prealloc import Explanation, PreallocConfig, explain, pack, shipment
from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.bench.counting import count_operations
from torchrec_prealloc.doctor.place import Place
from torchrec_prealloc.doctor.reasons import Route, why_not_plain
from torchrec_prealloc.packing import PackedBatch
from torchrec_prealloc.plain import is_plain
from torchrec_prealloc.stats import TransferStats
from torchrec_prealloc.transfer import TransferEngine

pytestmark = pytest.mark.filterwarnings("ignore")
TRAVELS = (Route.DIRECT, Route.GATHERED, Route.BACKGROUND)


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipment, "_learned", {})


def second_batch(
    batch: Any, device: torch.device, config: PreallocConfig, isolate: bool = False
) -> tuple[TransferStats, Any]:
    """What a new engine counts for the second of two such batches, and how that arrives."""
    shipment._learned.clear()
    engine = TransferEngine(device, config=config)
    for _ in range(2):
        engine.stats.reset()
        arrived = engine.start(batch, isolate=isolate).wait()
    engine.close()
    return engine.stats, arrived


def agrees(
    make: Callable[[], Any], device: torch.device, config: PreallocConfig, isolate: bool = False
) -> tuple[Explanation, Any, Any]:
    host, same = make(), make()
    explanation = explain(host, device, config, isolate=isolate)
    if not isinstance(host, PackedBatch):
        assert_same(host, same)
    assert str(explanation)
    stats, arrived = second_batch(host, device, config, isolate)
    assert explanation.copies == stats.copies
    assert explanation.copied_bytes == stats.bytes
    if config.buffers == "per_batch":
        assert len(explanation.segments) == stats.allocations
    assert sum(segment.leaves for segment in explanation.segments) == sum(
        leaf.segment is not None for leaf in explanation.leaves
    )
    return explanation, host, arrived


configs = st.builds(
    PreallocConfig,
    direct_bytes=st.sampled_from([1, 200, 1024, 1 << 20]),
    size_rounding=st.sampled_from([0, 8]),
    buffers=st.sampled_from(["per_batch", "ring"]),
    chunk_bytes=st.sampled_from([0, 64, 1000]),
)


def agrees_on_a_tree(device: torch.device, descriptions: Any, config: PreallocConfig, isolate: bool) -> None:
    agrees(lambda: ["root", *map(Builder(device).build, descriptions), numbers(2)], device, config, isolate)


@settings(common, max_examples=100)
@given(batches, configs, st.booleans())
def test_copies_bytes_and_allocations_of_any_tree(
    device: torch.device, descriptions: Any, config: PreallocConfig, isolate: bool
) -> None:
    agrees_on_a_tree(device, descriptions, config, isolate)


@pytest.mark.long
@settings(common, max_examples=2000)
@given(batches, configs, st.booleans())
def test_copies_bytes_and_allocations_of_any_of_many_trees(
    device: torch.device, descriptions: Any, config: PreallocConfig, isolate: bool
) -> None:
    agrees_on_a_tree(device, descriptions, config, isolate)


# Each leaf -------------------------------------------------------------------------------------------------------


def check_each_leaf(explanation: Explanation, host: Any, arrived: Any, device: torch.device) -> None:
    """The way that is told of each tensor is the one that it went."""
    pairs = list(zip(tensors_in(host), tensors_in(arrived), strict=True))
    assert len(pairs) == len(explanation.leaves)
    leaves = {(leaf.dtype, leaf.shape, leaf.type): leaf for leaf in explanation.leaves}
    assert len(leaves) == len(pairs), "no two leaves of this batch may look alike"
    storages: dict[int | None, set[int]] = {}
    for before, after in pairs:
        shape = None if before.is_nested else tuple(before.shape)
        leaf = leaves[before.dtype, shape, type(before).__name__]
        assert (before is after) == (leaf.route in (Route.LEFT, Route.PRESENT)), leaf
        if leaf.segment is not None:
            storages.setdefault(leaf.segment, set()).add(after.untyped_storage()._cdata)
            nbytes = explanation.segments[leaf.segment].nbytes
            assert after.untyped_storage().nbytes() == nbytes, leaf
    assert all(len(found) == 1 for found in storages.values())
    assert len(set.union(set(), *storages.values())) == len(storages) == len(explanation.segments)


def many_ways(device: torch.device) -> Any:
    """A batch whose leaves go every way, no two of them alike."""
    whole = numbers(600)
    return {
        "small": numbers(3),
        "pinned": pinned(numbers(1001)),
        "unpinned": numbers(1002),
        "large": numbers(shipment.BACKGROUND_BYTES // 4 + 1),
        "gaps": numbers(60, 60)[:, ::2],
        "grad": numbers(5).requires_grad_(),
        "subclass": TENSORS["subclass"](),
        "conj": TENSORS["conjugate view"](),
        "views": [whole[:300], whole[300:].view(2, 150), whole[17:18]],
        "left": LeavesOne(numbers(6), numbers(7)),
        "halves": Halves(numbers(8), numbers(9), Mode.ALL, 3),
        "many": [torch.full((11, index + 1), 1.0) for index in range(40)],
        "here": torch.zeros(12).to(device) if device.type != "cpu" else None,
        "kjt": JAGGED["float16 weights"](),
    }


def test_each_leaf_goes_the_way_that_is_told(device: torch.device) -> None:
    explanation, host, arrived = agrees(lambda: many_ways(device), device, PreallocConfig(direct_bytes=1024))
    check_each_leaf(explanation, host, arrived, device)
    routes = {leaf.route for leaf in explanation.leaves}
    everywhere = {Route.DIRECT, Route.GATHERED, Route.OWN_TO, Route.LEFT}
    assert routes == everywhere | (set() if device.type == "cpu" else {Route.BACKGROUND, Route.PRESENT})


@pytest.mark.parametrize("name", sorted(set(TENSORS) - set(NOT_SIMULATED) - {"packed sequence"}))
def test_each_kind_of_tensor_goes_the_way_that_is_told(name: str, device: torch.device) -> None:
    odd = TENSORS[name]().shape[:1]
    other = numbers(*odd, 3, 7)
    config = PreallocConfig(direct_bytes=1024)
    explanation, host, arrived = agrees(lambda: {"odd": TENSORS[name](), "other": other}, device, config)
    check_each_leaf(explanation, host, arrived, device)


@pytest.mark.parametrize("name", sorted({**JAGGED, **TENSORDICTS}))
def test_jagged_tensors_and_tensordicts(name: str, device: torch.device) -> None:
    make = {**JAGGED, **TENSORDICTS}[name]
    for isolate in (False, True):
        explanation, host, _ = agrees(lambda: [make(), numbers(2)], device, PreallocConfig(direct_bytes=64), isolate)
        assert len(explanation.leaves) >= len({id(tensor) for tensor in tensors_in(host)}) - 1


@pytest.mark.parametrize("make", [Computes, Opaque, lambda x: Flagged(x, numbers(4), Mode.SOME, 1)])
def test_objects_whose_own_to_runs(make: Any, device: torch.device) -> None:
    agrees(lambda: [make(numbers(3)), numbers(2)], device, PreallocConfig())


def test_packed_batches(device: torch.device) -> None:
    batch = {"many": [numbers(16) for _ in range(50)], "large": numbers(1 << 19), "kjt": JAGGED["lengths"]()}
    explanation, _, _ = agrees(lambda: pack(batch), device, PreallocConfig())
    assert [leaf.path for leaf in explanation.leaves] == ["batch.sections[0]", "batch.sections[1]"]
    explanation, _, _ = agrees(lambda: pack(batch), device, PreallocConfig(), True)
    assert len(explanation.leaves) == 53


def test_what_pytorch_dispatches_is_what_was_told(simulated_accelerator: torch.device) -> None:
    device = simulated_accelerator
    few = [pinned(numbers(1 << 19)), *(pinned(numbers(5)) for _ in range(30))]
    batch = {"few": few, "own": numbers(3).requires_grad_()}
    explanation = explain(batch, device)
    engine = TransferEngine(device)
    with count_operations(device) as counts:
        engine.start(batch).wait()
    engine.close()
    own = len(explanation.of_route(Route.OWN_TO))
    assert own == 1
    assert (counts.copies, counts.allocations) == (explanation.copies + own, len(explanation.segments) + own)


# Without the device ----------------------------------------------------------------------------------------------


@settings(common, max_examples=100)
@given(batches, configs, st.booleans())
def test_without_the_device_the_same_is_told_as_with_it(
    simulated_accelerator: torch.device, descriptions: Any, config: PreallocConfig, isolate: bool
) -> None:
    cpu = torch.device("cpu")

    def make() -> Any:
        return ["root", *map(Builder(cpu).build, descriptions), numbers(2)]

    here, missing = (explain(make(), device, config, isolate=isolate) for device in (simulated_accelerator, "xpu"))
    assert here.device_is_here
    assert not missing.device_is_here
    assert missing.segments == here.segments
    ways = [[(leaf.path, leaf.route, leaf.segment) for leaf in one.leaves] for one in (here, missing)]
    assert ways[0] == ways[1]


@pytest.mark.parametrize("name", sorted({*NOT_SIMULATED} - {"packed sequence"}))
def test_layouts_that_no_device_stands_in_for(name: str) -> None:
    explanation = explain([TENSORS[name](), numbers(3)], "xpu")
    assert [leaf.route for leaf in explanation.leaves] == [Route.OWN_TO, Route.GATHERED]


def test_a_tensor_on_meta_is_refused_as_by_the_engine(device: torch.device) -> None:
    for target in (device, torch.device("xpu")):
        with pytest.raises(NotImplementedError, match="no data"):
            explain([numbers(3), numbers(3).to("meta")], target)


def test_an_own_to_that_needs_values_is_told_to_be_unknown_without_the_device() -> None:
    class Looks:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, device: torch.device, non_blocking: bool = False) -> Looks:
            moved = self.x.to(device)
            return Looks(moved * int(moved.sum().item()))

    explanation = explain(Looks(numbers(3)), "xpu")
    assert "not known without the device, where it stopped (RuntimeError: " in str(explanation)
    assert explanation.leaves[0].route is Route.GATHERED


def test_streams_are_expected_where_the_engine_has_them(device: torch.device) -> None:
    place = Place.of(device)
    engine = TransferEngine(device)
    assert (place.used, place.streams, place.is_there) == (engine.device, engine.has_streams, True)
    assert Place.of("xpu") == (torch.device("xpu"), torch.device("meta"), True)
    with pytest.raises(ValueError, match=r"device 'tpu'"):
        Place.of("tpu")


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_a_reason_is_given_for_just_those_tensors_that_are_not_plain(name: str) -> None:
    tensor = TENSORS[name]()
    for one in tensor if isinstance(tensor, tuple) else [tensor]:
        if isinstance(one, Tensor):
            assert (why_not_plain(one) is None) == is_plain(one)
            assert why_not_plain(one) != "it is more than strided host memory"


def test_every_dtype(device: torch.device) -> None:
    agrees(lambda: [numbers(7).to(dtype) for dtype in DTYPES], device, PreallocConfig(direct_bytes=8))
