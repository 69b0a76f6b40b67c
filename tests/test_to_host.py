"""Device → pinned host: the bits that `.cpu()` would give, in memory that is kept, behind every wait that it needs."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import KeyedJaggedTensor

from torchrec_prealloc import pinned_memory, simulator
from torchrec_prealloc.batch_types import BatchError
from torchrec_prealloc.pinned_memory import MemoryInUse
from torchrec_prealloc.to_host import GATHER_BYTES, HostOrdering, ToHost, to_pinned_host

SCHEDULES = ("lazy", "eager", "random")
BYTES = 1 << 20
LARGE = GATHER_BYTES  # bytes


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def assert_same(copied: Tensor, tensor: Tensor) -> None:
    expected = on_host(tensor)
    assert copied.dtype == expected.dtype
    assert copied.shape == expected.shape
    assert copied.stride() == expected.stride()
    assert copied.device.type == "cpu"
    assert torch.equal(_bits(copied), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 20_000])
def test_each_dtype_arrives_bit_for_bit(dtype: torch.dtype, rows: int, device: torch.device) -> None:
    source = torch.randint(0, 2, (rows, 16 * dtype.itemsize), dtype=torch.uint8).view(dtype).to(device)
    assert_same(ToHost().start([source]).result()[0], source)


def strange(device: torch.device) -> dict[str, Tensor]:
    wide = torch.randn(300, 200).to(device)
    return {
        "zero-dim": torch.tensor(3.5, device=device),
        "empty": torch.empty(0, 3, device=device),
        "transposed": wide.t(),
        "every other column": wide[:, ::2],
        "small, every other": torch.arange(10, device=device)[::2],
        "permuted slices": torch.randn(6, 8, 10).to(device).permute(2, 0, 1)[1:],
        "expanded": torch.randn(3, 1).to(device).expand(3, 40_000),
        "channels last": torch.randn(2, 3, 64, 64).to(device).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(4, dtype=torch.complex64).to(device).conj(),
        "requires grad": torch.nn.Parameter(torch.randn(4).to(device)),
        "sparse": torch.eye(3).to_sparse() if device.type == "cpu" else torch.ones(1).to(device),
    }


def test_a_tensor_arrives_as_cpu_would_give_it(device: torch.device) -> None:
    for name, tensor in strange(device).items():
        (copied,) = ToHost().start([tensor]).result()
        assert not copied.requires_grad
        if tensor.is_sparse:
            assert torch.equal(copied.to_dense(), tensor.to_dense())
        else:
            assert_same(copied.resolve_conj(), tensor.resolve_conj())
            assert copied.stride() == on_host(tensor).stride(), name


def test_a_tree_keeps_its_types_and_its_sharing(device: torch.device) -> None:
    tensor = torch.randn(100, 300).to(device)
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.tensor([1, 2, 3, 0])).to(device)
    tree = {"a": tensor, "list": [tensor, (kjt, 3, None)], "lr": {"step": 5}}
    result = to_pinned_host(tree).result()
    assert result["list"][0] is result["a"]
    assert type(result["list"][1]) is tuple
    assert result["list"][1][0].keys() == ["a", "b"]
    assert_same(result["list"][1][0].values(), kjt.values())
    assert result["list"][1][1:] == (3, None)
    assert result["lr"] is tree["lr"]


def test_tensors_that_overlap_travel_once_and_overlap_on_the_host(device: torch.device) -> None:
    base = torch.randn(1000, 100).to(device)
    names = {
        "base": base, "rows": base[3:7], "flat": base.view(-1)[2:], "bits": base.view(torch.int32)[:1],
        "tied": base.detach(), "turned": base.t(),
    }  # fmt: skip
    engine = ToHost()
    result = engine.start_tree(names).result()
    for name, tensor in names.items():
        assert_same(result[name], tensor)
    assert engine.stats.transfers == 1
    assert engine.stats.bytes == base.nbytes
    result["base"].fill_(7)
    assert {float(value) for value in result["rows"].view(-1)} == {7.0}
    assert float(result["turned"][5, 5]) == 7.0


def test_neighbours_in_one_storage_get_storages_of_their_own(device: torch.device) -> None:
    """As FBGEMM's tables lie: a writer copies a tensor whose storage is larger than the tensor once more."""
    both = torch.randn(2, 30_000).to(device)
    copied = ToHost().start([both[0], both[1]]).result()
    for index, tensor in enumerate(copied):
        assert_same(tensor, both[index])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_one_transfer_for_each_large_tensor_and_one_for_all_small_of_a_dtype(device: torch.device) -> None:
    large = [torch.randn(LARGE // 4).to(device) for _ in range(5)]
    small = [torch.randn(index % 7 + 1).to(device) for index in range(300)]
    counts = [torch.arange(index % 5 + 1).to(device) for index in range(100)]
    engine = ToHost()
    copied = engine.start([*large, *small, *counts]).result()
    for new, old in zip(copied, [*large, *small, *counts], strict=True):
        assert_same(new, old)
    assert engine.stats.transfers == 5 + 1 + 1
    assert engine.stats.tensors == 405


def test_memory_that_was_freed_is_refused(device: torch.device) -> None:
    freed = torch.randn(100).to(device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(BatchError, match="its memory was freed"):
        ToHost().start([freed])


@st.composite
def views(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """(storage, offset, rows, columns) of views into three storages of 40 x 40."""
    number = st.integers(0, 39)
    return [
        (draw(st.integers(0, 2)), draw(number), draw(st.integers(1, 39)), draw(st.integers(1, 39)))
        for _ in range(draw(st.integers(1, 12)))
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(views(), st.sampled_from([1, 700, 1 << 20]))
def test_any_views_arrive(device: torch.device, chosen: list[tuple[int, int, int, int]], gather_bytes: int) -> None:
    storages = [torch.randn(40, 40).to(device), torch.randn(40, 40).half().to(device), torch.arange(1600).to(device)]
    squares = [storage.view(40, 40) for storage in storages]
    tensors = [squares[which][row : row + rows, row % 3 : columns] for which, row, rows, columns in chosen]
    for new, old in zip(ToHost(gather_bytes=gather_bytes).start(tensors).result(), tensors, strict=True):
        assert_same(new, old)


# Wrappers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded_and_dtensor(one_rank: None) -> tuple[Any, Any]:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharded_tensor import Shard
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor import distribute_tensor

    local = torch.randn(50, 20)
    sharded = sharded_tensor.init_from_local_shards([Shard.from_tensor_and_offsets(local, [0, 0], 0)], 50, 20)
    return sharded, distribute_tensor(torch.randn(8, 4), init_device_mesh("cpu", (1,)), [Split(0)])


def test_sharded_tensors_and_dtensors_keep_their_metadata(sharded_and_dtensor: tuple[Any, Any]) -> None:
    sharded, dtensor = sharded_and_dtensor
    result = to_pinned_host({"s": sharded, "d": dtensor}).result()
    assert type(result["s"]) is type(sharded)
    assert result["s"].metadata() == sharded.metadata()
    assert_same(result["s"].local_shards()[0].tensor, sharded.local_shards()[0].tensor)
    assert result["s"].local_shards()[0].tensor.data_ptr() != sharded.local_shards()[0].tensor.data_ptr()
    assert type(result["d"]) is type(dtensor)
    assert result["d"].placements == dtensor.placements
    assert result["d"].shape == dtensor.shape
    assert_same(result["d"].to_local(), dtensor.to_local())
    assert result["d"].to_local().data_ptr() != dtensor.to_local().data_ptr()


# Kept memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_kept_while_tensors_are_added_removed_and_resized(device: torch.device) -> None:
    engine = ToHost(max_in_flight=1, patience=1)
    state = {"a": torch.randn(1000, 40).to(device), "b": torch.randn(500, 80).to(device), "n": torch.ones(3).to(device)}
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: state.pop("b"),
        lambda: state.update(c=torch.randn(10, 3).to(device)),
        lambda: state.update(a=torch.randn(4000, 40).to(device)),
        lambda: state.update(a=torch.randn(100, 40).to(device)),
    ]
    for change in changes:
        change()
        result = engine.start_tree(state).result()
        for name in state:
            assert_same(result[name], state[name])
        del result
        total = sum(tensor.nbytes + 64 for tensor in state.values())
        assert engine.memory.nbytes <= 2 * total
    engine.close()
    assert engine.memory.nbytes == 0


def test_the_same_memory_serves_the_next_copy(device: torch.device) -> None:
    engine = ToHost()
    tensor = torch.randn(1000, 40).to(device)
    places = {engine.start([tensor]).result()[0].data_ptr() for _ in range(5)}
    assert len(places) == 1
    held = engine.memory.nbytes
    assert held < 1.1 * tensor.nbytes
    assert engine.memory.bytes_pinned == (held if device.type != "cpu" else 0)


def test_what_is_held_is_not_overwritten(device: torch.device) -> None:
    engine = ToHost(max_in_flight=2, patience=0.05)
    tensor = torch.zeros(50_000).to(device)
    first = engine.start([tensor]).result()
    tensor += 1
    view = engine.start([tensor]).result()[0][7:9].numpy()  # nothing but an array of a view holds the memory
    tensor += 1
    with pytest.raises(MemoryInUse, match="2 states are still in host memory"):
        engine.start([tensor])
    assert float(first[0].sum()) == 0
    assert list(view) == [1.0, 1.0]
    del view
    third = engine.start([tensor]).result()
    assert float(third[0][3]) == 2
    assert float(first[0].sum()) == 0


def test_a_third_copy_waits_for_a_writer(device: torch.device) -> None:
    engine = ToHost(max_in_flight=1, patience=30)
    tensor = torch.zeros(50_000).to(device)
    written = [engine.start([tensor]).result()]

    def write() -> None:
        time.sleep(0.1)
        assert float(written[0][0].sum()) == 0
        written.clear()

    writer = threading.Thread(target=write)
    writer.start()
    tensor += 1
    start = time.perf_counter()
    assert float(engine.start([tensor]).result()[0][0]) == 1
    assert time.perf_counter() - start > 0.05
    writer.join()


def test_what_only_a_cycle_holds_is_collected_before_anybody_waits(device: torch.device) -> None:
    engine = ToHost(max_in_flight=1, patience=0.0)
    tensor = torch.zeros(50_000).to(device)
    cycle: list[Any] = [engine.start([tensor])]
    cycle.append(cycle)
    del cycle
    engine.start([tensor]).result()


def test_pinning_that_fails_is_said_once_and_does_not_matter(
    simulated_accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> Tensor:
        raise RuntimeError("OS call failed or operation not supported on this OS\nmore")

    monkeypatch.setattr(pinned_memory, "pinned_block", refuse)
    engine = ToHost()
    tensor = torch.randn(50_000).to(simulated_accelerator)
    with pytest.warns(UserWarning, match="cannot pin .* bytes of host memory .OS call failed"):
        first = engine.start([tensor]).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = engine.start([tensor]).result()  # another set
    assert_same(first[0], tensor)
    assert_same(second[0], tensor)
    assert engine.memory.bytes_pinned == 0
    assert engine.memory.nbytes >= 2 * tensor.nbytes


def test_close_waits_and_what_is_lent_lives_on(simulated_accelerator: torch.device) -> None:
    with simulator.checked(schedule="lazy"):
        engine = ToHost()
        tensor = torch.full((50_000,), 3.0).to(simulated_accelerator)
        copy = engine.start([tensor])
        engine.close()
        assert float(copy.tensors[0].sum()) == 150_000
        assert engine.memory.nbytes == 0


# Orderings -----------------------------------------------------------------------------------------------------------


def produce(device: torch.device, number: float) -> Tensor:
    """A tensor whose values are still being written by work on the current stream."""
    host = torch.full((BYTES // 4,), number).pin_memory()
    return torch.empty(BYTES // 4, device=device).copy_(host, non_blocking=True)


def changed_after(engine: ToHost, device: torch.device) -> tuple[list[float], list[float]]:
    """Produced, copied, and changed as soon as the handle says so."""
    tensor = produce(device, 1)
    copy = engine.start([tensor])
    copy.wait()
    tensor.fill_(2)
    return [float(copy.result()[0][5])], [1]


def freed_after(engine: ToHost, device: torch.device) -> tuple[list[float], list[float]]:
    """Freed right after the call; what the current stream allocates next takes the memory."""
    tensor = produce(device, 1)
    copy = engine.start([tensor])
    del tensor
    produce(device, 9)
    return [float(copy.result()[0][5])], [1]


def read_at_once(engine: ToHost, device: torch.device) -> tuple[list[float], list[float]]:
    copy = engine.start([produce(device, 1)])
    return [float(copy.result()[0][5])], [1]


def two_held(engine: ToHost, device: torch.device) -> tuple[list[float], list[float]]:
    first = engine.start([produce(device, 1)]).result()
    second = engine.start([produce(device, 2)]).result()
    return [float(first[0][5]), float(second[0][5])], [1, 2]


SCENES: dict[str, Callable[[ToHost, torch.device], tuple[list[float], list[float]]]] = {
    "copy_after_producer": read_at_once,
    "change_after_copy": changed_after,
    "free_after_copy": freed_after,
    "host_after_copy": read_at_once,
    "is_free": two_held,
}
NAMES = [name for name, _ in inspect.getmembers(HostOrdering, inspect.isfunction)]


def notices(scene: Any, ordering: type[HostOrdering], schedule: Any, device: torch.device) -> bool:
    """Whether the checker reports something, or the numbers are wrong."""
    with simulator.checked(schedule=schedule, seed=1, raise_on_report=False) as run:
        engine = ToHost(ordering=ordering)
        seen, expected = scene(engine, device)
        torch.get_device_module(device).synchronize()
        del engine
        gc.collect()
    return bool(run.reports) or seen != expected


def test_every_ordering_has_a_scene() -> None:
    assert sorted(SCENES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_with_every_ordering_in_place_nothing_is_noticed(name: str, simulated_accelerator: torch.device) -> None:
    for schedule in SCHEDULES:
        assert not notices(SCENES[name], HostOrdering, schedule, simulated_accelerator), schedule


@pytest.mark.parametrize("name", NAMES)
def test_an_ordering_taken_away_is_noticed(name: str, simulated_accelerator: torch.device) -> None:
    def nothing(self: HostOrdering, *args: Any) -> bool:
        return True

    faulty = type("Without_" + name, (HostOrdering,), {name: nothing})
    assert any(notices(SCENES[name], faulty, schedule, simulated_accelerator) for schedule in SCHEDULES)


def test_a_tensor_changed_before_the_handle_says_so_is_detected(simulated_accelerator: torch.device) -> None:
    with simulator.checked(schedule="lazy", raise_on_report=False) as run:
        engine = ToHost()
        tensor = produce(simulated_accelerator, 1)
        copy = engine.start([tensor])
        tensor.fill_(2)  # without copy.wait()
        copy.result()
    assert [report.kind for report in run.reports] == ["data race"]


def test_done_says_when(simulated_accelerator: torch.device) -> None:
    with simulator.checked(schedule="lazy"):
        engine = ToHost()
        copy = engine.start([produce(simulated_accelerator, 1)])
        assert not copy.done()
        copy.synchronize()
        assert copy.done()


def test_the_host_does_not_wait_for_the_device(simulated_accelerator: torch.device) -> None:
    """Nothing has run when `wait` returns, under a schedule that runs a copy only when something waits for it."""
    with simulator.checked(schedule="lazy"):
        engine = ToHost()
        copy = engine.start([produce(simulated_accelerator, index) for index in range(4)])
        copy.wait()
        assert not copy.done()


def test_host_tensors_among_the_devices_are_copied_too(simulated_accelerator: torch.device) -> None:
    step = torch.tensor(5.0)
    with simulator.checked(schedule="lazy"):
        copy = ToHost().start([produce(simulated_accelerator, 1), step])
        step += 1
        assert float(copy.result()[1]) == 5
