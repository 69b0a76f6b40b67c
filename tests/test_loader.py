"""Packed batches through torch's DataLoader: every kind of worker, and what goes wrong in one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import arrivals
import pytest
import torch
from arrivals import CPU, assert_same, engine_for, race_free, send
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recsys import FREES_EARLY, losses, make_batches, sharded
from test_random_trees import Builder, batches, common, expected
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_prealloc import PreallocConfig, PreallocTrainPipelineSparseDist
from torchrec_prealloc.codec import CodecError
from torchrec_prealloc.loader import PackedBatch, pack, packed
from torchrec_prealloc.transfer import TransferEngine

pytestmark = pytest.mark.usefixtures("collected")


def make(index: int) -> dict[str, Any]:
    """Batch number `index`; every third has another structure."""
    lengths = torch.arange(6) % 3 + index % 2
    batch: dict[str, Any] = {
        "index": index,
        "dense": [torch.full((16,), float(index + i)) for i in range(20)],
        "kjt": KeyedJaggedTensor(["a", "b"], torch.arange(int(lengths.sum())) + index, lengths=lengths),
    }
    if index % 3 == 0:
        batch["label"] = torch.tensor(index)
    return batch


class Made(Dataset[Any]):
    """Whole batches."""

    def __init__(self, count: int = 8) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return make(index)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return (make(index) for index in range(first, 8, step))


class Samples(Dataset[Any]):
    """Samples that a collate makes batches of."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index)), "y": index}


def sorted_by_index(batches: Any) -> list[Any]:
    return sorted((batch.unpack() for batch in batches), key=lambda batch: batch["index"])


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "spawn"},
]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_map_dataset(workers: dict[str, Any]) -> None:
    loader = DataLoader(Made(), batch_size=None, collate_fn=pack, **workers)
    for _ in range(2 if workers.get("persistent_workers") else 1):
        batches = list(loader)
        assert all(isinstance(batch, PackedBatch) for batch in batches)
        assert_same([batch.unpack() for batch in batches], [make(index) for index in range(8)])


@pytest.mark.parametrize("workers", WORKERS[:4], ids=str)
def test_an_iterable_dataset(workers: dict[str, Any]) -> None:
    loader = DataLoader(Streamed(), batch_size=None, collate_fn=pack, **workers)
    assert_same(sorted_by_index(loader), [make(index) for index in range(8)])


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_collate(workers: dict[str, Any]) -> None:
    loader = DataLoader(Samples(), batch_size=4, collate_fn=packed(), **workers)
    wanted = [default_collate([Samples()[index] for index in range(first, first + 4)]) for first in (0, 4)]
    assert_same([batch.unpack() for batch in loader], wanted)


def test_a_worker_packs_into_shared_memory_and_sends_one_descriptor() -> None:
    [first, *_] = DataLoader(Made(), batch_size=None, collate_fn=pack, num_workers=1)
    assert first.sections[0].is_shared()
    assert len({section.untyped_storage().data_ptr() for section in first.sections}) == 1


def test_pinning_is_asked_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin_memory(tensor: Tensor, *args: Any) -> Tensor:
        pinned.append(len(tensor))
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    from torch.utils.data._utils.pin_memory import pin_memory as by_loader

    batch = by_loader(pack(make(0)))
    assert isinstance(batch, PackedBatch)
    assert pinned == [len(batch)]
    assert_same(batch.unpack(), make(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_by_the_loaders_thread() -> None:
    loader = DataLoader(Made(), batch_size=None, collate_fn=pack, num_workers=2, pin_memory=True)
    engine = TransferEngine(torch.device("cuda"))
    for index, batch in enumerate(loader):
        assert batch.is_pinned()
        arrived = engine.start(batch).wait()
        assert arrived["index"] == index
        assert torch.equal(arrived["kjt"].values().cpu(), make(index)["kjt"].values())


@pytest.mark.filterwarnings("ignore:batch of class PackedBatch")
def test_batches_go_on_to_the_device(device: torch.device) -> None:
    engine = TransferEngine(device)
    for index, batch in enumerate(DataLoader(Made(), batch_size=None, collate_fn=pack, num_workers=1)):
        arrived = engine.start(batch).wait()
        assert torch.equal(arrived["kjt"].values().cpu(), make(index)["kjt"].values())
        assert arrived["dense"][3].device.type == device.type


@pytest.mark.filterwarnings("ignore:batch of class PackedBatch")
@pytest.mark.parametrize("early", [False, True], ids=["", "freed early"])
def test_losses_are_torchrecs(early: bool, device: torch.device, one_rank: None) -> None:
    if early and not FREES_EARLY:
        pytest.skip("this TorchRec frees nothing early")
    batches = make_batches(8, wobble=True)
    ready = batches if device.type == "cpu" else [batch.pin_memory() for batch in batches]
    wanted = losses(TrainPipelineSparseDist(*sharded(device), device), ready)
    options = {"free_features_storage_early": True} if early else {}
    pipeline = PreallocTrainPipelineSparseDist(*sharded(device), device, **options)
    with race_free(device):
        assert losses(pipeline, map(pack, batches)) == wanted


@pytest.mark.parametrize("pipeline_class", [PreallocTrainPipelineSparseDist, TrainPipelineSparseDist])
def test_losses_are_torchrecs_with_torchrecs_own_copy(
    pipeline_class: Any, device: torch.device, one_rank: None
) -> None:
    batches = make_batches(8, wobble=True)
    ready = batches if device.type == "cpu" else [batch.pin_memory() for batch in batches]
    wanted = losses(TrainPipelineSparseDist(*sharded(device), device), ready)
    ours = pipeline_class is PreallocTrainPipelineSparseDist
    options = {"prealloc": PreallocConfig(enabled=False)} if ours else {}
    with race_free(device):
        packed_batches = [pack(batch) for batch in batches]
        if device.type != "cpu":
            packed_batches = [batch.pin_memory() for batch in packed_batches]
        assert losses(pipeline_class(*sharded(device), device, **options), packed_batches) == wanted


# What goes wrong -------------------------------------------------------------------------------------------------


def raises(samples: Any) -> Any:
    raise KeyError("no such column")


def alone(statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement in a process of its own."""
    script = f"from test_loader import *; {statement}"
    here = Path(__file__).parent
    return subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, timeout=300)


class Dies(Made):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            time.sleep(1)  # what was sent before is received
            os._exit(7)
        return make(index)


class Local(Made):
    def __getitem__(self, index: int) -> Any:
        class Hidden:
            x = 1

        return {"x": [torch.ones(1), Hidden()]}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_raises(workers: int) -> None:
    with pytest.raises(KeyError, match="no such column"):
        list(DataLoader(Samples(), batch_size=2, collate_fn=packed(raises), num_workers=workers))


def test_a_worker_that_dies() -> None:
    # The loader's signal handler raises wherever Python happens to be.
    ran = alone("list(DataLoader(Dies(), batch_size=None, collate_fn=pack, num_workers=1))")
    assert ran.returncode == 1
    assert "RuntimeError: DataLoader worker (pid" in ran.stderr, ran.stderr


def test_what_cannot_be_sent_is_refused_in_the_worker() -> None:
    # Unpacked it is refused in the queue's thread, and the main process waits for ever.
    with pytest.raises(CodecError, match=r"batch\['x'\]\[1\].*Hidden"):
        list(DataLoader(Local(), batch_size=None, collate_fn=pack, num_workers=1))
    [first, *_] = DataLoader(Local(), batch_size=None, collate_fn=pack)
    assert first.unpack()["x"][1].x == 1


class WithHistory(Made):
    def __getitem__(self, index: int) -> Any:
        return {"x": [torch.ones(1), torch.ones(1, requires_grad=True) * 2]}


def test_a_gradients_history_is_refused_in_the_worker() -> None:
    with pytest.raises(CodecError, match=r"batch\['x'\]\[1\]: a torch.Tensor cannot be pickled .*detach"):
        list(DataLoader(WithHistory(), batch_size=None, collate_fn=pack, num_workers=1))


# Any tree --------------------------------------------------------------------------------------------------------


class Trees(Dataset[Any]):
    """A batch for each description of a tree."""

    def __init__(self, descriptions: Any) -> None:
        self.descriptions = descriptions

    def __len__(self) -> int:
        return len(self.descriptions)

    def __getitem__(self, index: int) -> Any:
        return ["root", *map(Builder(CPU).build, self.descriptions[index]), torch.arange(2)]


def arrive(descriptions: Any, device: torch.device, **options: Any) -> None:
    """Every tree comes out of a worker as it went in, and goes on to the device as unpacked."""
    sent = Trees([one for one in descriptions if "requires grad, no leaf" not in repr(one)])
    engine = engine_for(device)
    described = arrivals._described
    # Packed tensors have the strides that `.to` gives, and come out of a worker as the values that they stand for.
    values = {"strides": None, "conj": False, "neg": False}
    for index, arrived in enumerate(DataLoader(sent, batch_size=None, collate_fn=pack, **options)):
        unpacked = arrived.unpack()
        with mock.patch.object(arrivals, "_described", lambda tensor: {**described(tensor), **values}):
            assert_same(unpacked, sent[index])
        for isolate in (False, True):
            assert_same(send(arrived, device, isolate, seed=index, engine=engine), expected(unpacked, device))


@settings(common, max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(st.lists(batches, min_size=20, max_size=40))
def test_any_tree_comes_out_of_a_forked_worker(device: torch.device, descriptions: Any) -> None:
    arrive(descriptions, device, num_workers=1, multiprocessing_context="fork")


@settings(common, max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(st.lists(batches, min_size=20, max_size=40))
def test_any_tree_comes_out_of_a_spawned_worker(descriptions: Any) -> None:
    arrive(descriptions, CPU, num_workers=1, multiprocessing_context="spawn")


@pytest.mark.long
@settings(common, max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(st.lists(batches, min_size=20, max_size=40))
def test_any_of_many_trees_comes_out_of_two_workers(device: torch.device, descriptions: Any) -> None:
    arrive(descriptions, device, num_workers=2)


# torchdata -------------------------------------------------------------------------------------------------------


def test_the_stateful_loader() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(Made(), batch_size=None, collate_fn=pack, num_workers=1)
    iterator = iter(loader)
    assert next(iterator).unpack()["index"] == 0
    state = loader.state_dict()
    again = stateful.StatefulDataLoader(Made(), batch_size=None, collate_fn=pack, num_workers=1)
    again.load_state_dict(state)
    assert_same([batch.unpack() for batch in again], [make(index) for index in range(1, 8)])


@pytest.mark.parametrize("method", ["thread", "process"])
def test_nodes(method: str) -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    source = nodes.IterableWrapper(range(8))
    mapper = nodes.ParallelMapper(source, lambda index: pack(make(index)), num_workers=2, method=method)
    batches = list(nodes.Loader(mapper))
    assert_same([batch.unpack() for batch in batches], [make(index) for index in range(8)])


# Thousands of batches with few descriptors ----------------------------------------------------------------------


class Wide(Made):
    """Many tensors in each batch."""

    def __getitem__(self, index: int) -> Any:
        return [torch.full((16,), float(index)) for _ in range(100)]


def soak(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    for index, batch in enumerate(DataLoader(Wide(count), batch_size=None, collate_fn=pack, num_workers=2)):
        tensors = batch.unpack()
        assert float(tensors[0][0]) == float(tensors[99][15]) == index
    assert index == count - 1


def soaks(count: int) -> None:
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.exists() else set()
    ran = alone(f"soak({count})")
    assert ran.returncode == 0, ran.stderr
    after = set(shared.iterdir()) if shared.exists() else set()
    assert not [path for path in after - before if path.name.startswith("torch_")]


def test_a_short_soak() -> None:
    soaks(300)


@pytest.mark.long
def test_a_soak() -> None:
    soaks(5000)


def test_unpacked_the_soak_runs_out_of_descriptors() -> None:
    ran = alone("soak_unpacked()")
    assert ran.returncode != 0
    assert "Too many open files" in ran.stderr or "received 0 items of ancdata" in ran.stderr


def soak_unpacked() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    list(DataLoader(Wide(20), batch_size=None, num_workers=2))
