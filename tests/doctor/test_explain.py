"""The report and the fields of `explain`."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from test_arrival import JAGGED, TENSORDICTS, TENSORS, Computes, numbers
from test_random_trees import Flagged, Mode, Noded, Registered
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from doctor.batches import LeavesOne, Plain, jagged
from torchrec_prealloc import BatchError, ConfigError, buffers, explain, pack, shipment, unpinned
from torchrec_prealloc.doctor.reasons import Route
from torchrec_prealloc.doctor.trial import Learning, Trial
from torchrec_prealloc.own_to import Learned
from torchrec_prealloc.shipment import Shipment

MIB = {"direct_bytes": 1 << 20}


@dataclasses.dataclass
class Sample:
    """A batch class without `to`."""

    x: Any
    many: Any
    kjt: Any
    again: Any = None


def lines(batch: Any, device: str = "xpu", **options: Any) -> list[str]:
    """The lines of the tree, without the spaces between columns and whether memory is pinned."""
    text = str(explain(batch, device, MIB, **options)).split("\n\n")[1]
    return [" ".join(line.replace(" unpinned ", " ").split()) for line in text.splitlines()]


def test_the_tree_has_a_line_for_each_leaf_or_for_many_alike() -> None:
    x = numbers(4, 13)
    assert lines(Sample(x, [numbers(16) for _ in range(600)], jagged(), x)) == [
        "batch Sample 68.2 KiB",
        "x float32[4,13] 208 B gathered under direct_bytes (1.0 MiB)",
        "many list 37.5 KiB",
        "[0] .. [599] 600 × float32[16] 37.5 KiB gathered under direct_bytes (1.0 MiB)",
        "kjt KeyedJaggedTensor 30.5 KiB 26 keys (f0, f1, f2, ...), stride 100, 2600 values",
        "_values int64[2600] 20.3 KiB gathered under direct_bytes (1.0 MiB)",
        "_lengths int32[2600] 10.2 KiB gathered under direct_bytes (1.0 MiB)",
        "again Tensor the same as batch.x",
    ]


def test_containers_that_are_alike_are_one_line_too() -> None:
    assert lines({index: {"a": numbers(2), "b": [numbers(3)]} for index in range(50)}) == [
        "batch dict 1000 B",
        "[0] .. [49] 50 × dict 1000 B each:",
        "['a'] float32[2] 8 B gathered under direct_bytes (1.0 MiB)",
        "['b'] list 12 B",
        "[0] float32[3] 12 B gathered under direct_bytes (1.0 MiB)",
    ]


def test_what_is_not_alike_is_cut_off_and_summed_up() -> None:
    shown = lines([numbers(count) for count in range(1000)])
    assert len(shown) == 21
    assert shown[-1] == f"981 more 981 × Tensor {sum(range(19, 1000)) * 4 / 1024 / 1024:.1f} MiB 981 gathered"


def test_the_sums_and_the_fields(simulated_accelerator: torch.device) -> None:
    storage = torch.arange(1 << 20).pin_memory()
    views = [storage[: 1 << 19], storage[1 << 19 :]]
    batch = {"views": views, "small": numbers(3), "grad": numbers(2).requires_grad_()}
    found = explain(batch, simulated_accelerator)
    assert (found.copies, len(found.segments), found.nbytes) == (2, 2, 8 * (1 << 20) + 20)
    assert found.copied_bytes == 8 * (1 << 20) + 64
    one, two, small, grad = found.leaves
    assert one.path == "batch['views'][0]"
    assert (one.dtype, one.shape, one.nbytes) == (torch.int64, (1 << 19,), 4 << 20)
    assert one.pinned
    assert (one.route, one.segment, one.shared) == (two.route, two.segment, two.shared) == (Route.DIRECT, 1, 2)
    assert one.storage == two.storage != small.storage
    assert (small.route, small.segment, small.pinned) == (Route.GATHERED, 0, False)
    assert (grad.route, grad.segment, grad.requires_grad) == (Route.OWN_TO, None, True)
    assert found.of_route(Route.OWN_TO) == (grad,)
    assert found.root.type == "dict"
    report = str(found)
    assert "4 leaves, 8.0 MiB: 2 copies of 8.0 MiB into 2 allocations of 8.0 MiB" in report
    assert "shares its storage with 1 more" in report
    assert "2 direct, 8.0 MiB" in report


def test_chunks_are_counted_as_copies(simulated_accelerator: torch.device) -> None:
    large = torch.zeros(1 << 20).pin_memory()
    assert explain(large, simulated_accelerator, {"chunk_bytes": 1 << 20}).copies == 4
    assert explain(large, simulated_accelerator).copies == 1


def test_large_tensors_are_told_by_whether_they_are_pinned_and_dense(simulated_accelerator: torch.device) -> None:
    large = torch.zeros(1 << 20, 2)
    routes = {
        "unpinned": (large, Route.BACKGROUND, "large; not pinned"),
        "pinned": (large.pin_memory(), Route.DIRECT, "pinned, at least direct_bytes (1.0 MiB)"),
        "gaps": (large.pin_memory()[:, 0], Route.BACKGROUND, "large; there are gaps between its elements"),
    }
    found = explain({name: tensor for name, (tensor, _, _) in routes.items()}, simulated_accelerator, MIB)
    assert [(leaf.route, leaf.why) for leaf in found.leaves] == [route[1:] for route in routes.values()]


def test_without_a_device_nothing_is_pinned_unless_it_is_taken_for_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    large = torch.zeros(1 << 20)
    as_is, taken = explain(large), explain(large, pinned=True)
    assert as_is.device.type == taken.device.type == "cuda"
    assert as_is.leaves[0].pinned is None
    assert (as_is.leaves[0].route, taken.leaves[0].route) == (Route.BACKGROUND, Route.DIRECT)
    assert "Nothing can be pinned here" in str(as_is)
    assert "Its memory is taken for pinned" in str(taken)


def test_a_tensor_is_a_batch() -> None:
    assert lines(numbers(3)) == ["batch float32[3] 12 B gathered under direct_bytes (1.0 MiB)"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: LeavesOne(numbers(2), {"in": numbers(3)}), "LeavesOne.to leaves it there"),
        (lambda: Registered(numbers(2), numbers(3)), "how Registered is taken apart does not name it"),
        (lambda: [numbers(2), Plain([numbers(3)])], "Plain is no type that is understood, and is passed on as it is"),
    ],
)
def test_what_stays_on_the_host_is_told_with_the_reason(make: Any, why: str, device: torch.device) -> None:
    found = explain(make(), device)
    (left,) = found.of_route(Route.LEFT)
    assert (left.shape, left.why, left.segment) == ((3,), why, None)
    assert len(found.leaves) == 2


def test_a_class_that_is_walked_and_a_kjt_that_is_freed_early_are_told(device: torch.device) -> None:
    found = explain([LeavesOne(numbers(2), 3), jagged()], device, isolate=True)
    assert "LeavesOne" in str(found)
    assert "its `to` only moves fields: walked, but for the first of its class" in str(found)
    whys = {leaf.path: leaf.why for leaf in found.leaves}
    assert whys["batch[1]._values"].endswith("; apart from other memory, since it is freed early")
    assert "apart" not in whys["batch[0].moved"]
    assert len(found.segments) == 2


def test_what_a_class_does_each_time_is_told(device: torch.device) -> None:
    found = explain([Computes(numbers(3)), numbers(2)], device)
    assert "its own `to` runs for each batch" in str(found)
    assert [leaf.route for leaf in found.leaves] == [Route.GATHERED] * 2
    halved = explain(Flagged(numbers(2), numbers(4), Mode.SOME, 1), device)
    assert [leaf.route for leaf in halved.leaves] == [Route.GATHERED, Route.LEFT]


def test_names_of_a_pytree_node_and_of_a_packed_batch() -> None:
    assert [leaf.path for leaf in explain(Noded(numbers(2), [numbers(3)])).leaves] == ["batch.x", "batch.y[0]"]
    packed = explain(pack({"a": numbers(2), "b": numbers(1, 2)}))
    assert [leaf.path for leaf in packed.leaves] == ["batch.sections[0]"]
    assert "2 tensors in 1 section" in str(packed)


def test_names_of_a_tensordict_and_of_jagged_tensors() -> None:
    found = explain({"td": TENSORDICTS["flat"](), "v": JAGGED["variable batch"](), "j": JAGGED["JaggedTensor"]()})
    paths = [leaf.path for leaf in found.leaves]
    assert [path for path in paths if path.startswith("batch['td']['")]
    assert "batch['v']._inverse_indices[1]" in paths
    notes = {node.path: node.note for node in found.root.nodes()}
    assert notes["batch['td']"].startswith("batch size [")
    assert notes["batch['v']"] == "2 keys (f, g), variable batch, 10 values"
    assert notes["batch['j']"] == "6 values, weighted"


def test_a_batch_that_holds_itself() -> None:
    batch: dict[str, Any] = {"x": numbers(2)}
    batch["self"] = [batch]
    assert lines(batch)[1:] == [
        "['x'] float32[2] 8 B gathered under direct_bytes (1.0 MiB)",
        "['self'] list 0 B",
        "[0] dict the same as batch",
    ]


def test_what_the_engine_refuses_is_refused(device: torch.device) -> None:
    with pytest.raises(BatchError, match="type int is no tensor"):
        explain(3, device)
    freed = numbers(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(BatchError, match="its memory was freed"):
        explain([freed], device)
    deep: Any = numbers(1)
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(BatchError, match="nest"):
        explain(deep, device)
    inner: list[Any] = [numbers(2)]
    inner.append((inner,))
    with pytest.raises(BatchError, match="a tuple in the batch holds itself"):
        explain(inner[1], device)
    with pytest.raises(ConfigError, match="direct_bytes"):
        explain(numbers(1), device, {"direct_bytes": 0})
    with pytest.raises(ValueError, match="device 'nowhere'"):
        explain(numbers(1), "nowhere")


def test_neither_what_was_learned_nor_what_was_warned_of_is_touched(device: torch.device) -> None:
    learned, checked = dict(shipment._learned), dict(unpinned._checked)
    explain([LeavesOne(numbers(2), 3), JAGGED["caches"](), TENSORS["transposed"]()], device)
    assert shipment._learned == learned
    assert unpinned._checked == checked


def test_the_memory_of_the_trial_is_given_back_at_once(
    simulated_accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: list[StorageWeakRef] = []
    make = buffers.allocate

    def allocate(*args: Any) -> Tensor:
        base = make(*args)
        memory.append(StorageWeakRef(base.untyped_storage()))
        return base

    monkeypatch.setattr("torchrec_prealloc.memory.allocate", allocate)
    gc.disable()
    try:
        explain([LeavesOne(numbers(2), 3), Computes(numbers(3)), numbers(300_000)], simulated_accelerator)
    finally:
        gc.enable()
    assert len(memory) >= 4
    assert all(one.expired() for one in memory)


def test_what_a_trial_writes_down_are_methods_of_the_engine() -> None:
    own = {"examine", "write_down"}
    for ours, engines in ((Trial, Shipment), (Learning, Learned)):
        names = {name for name, value in vars(ours).items() if callable(value) and not name.startswith("__")}
        assert {name for name in names if not hasattr(engines, name)} <= own
