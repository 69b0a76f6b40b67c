"""Our pipelines against TorchRec's own: the same losses bit for bit, the same ends, the same errors."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import gc
import inspect
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recsys import CONTAINERS, Model, losses, make_batches, outputs, pinned, sharded, unsharded
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _to_device

from torchrec_prealloc import (
    PipelineError,
    PreallocTrainPipelineBase,
    PreallocTrainPipelineSparseDist,
    prealloc_pipeline,
    simulator,
)

PAIRS = {
    "base": (TrainPipelineBase, PreallocTrainPipelineBase, unsharded),
    "sparse_dist": (TrainPipelineSparseDist, PreallocTrainPipelineSparseDist, sharded),
}
CPU = torch.device("cpu")
STEPS = 8
needs_reset = pytest.mark.skipif(
    not hasattr(TrainPipelineBase, "reset"), reason="this TorchRec's pipelines cannot be reset"
)


@pytest.fixture(params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest, one_rank: None) -> Any:
    return PAIRS[request.param]


def checked(device: torch.device) -> Any:
    return contextlib.nullcontext() if device.type != "mtia" else simulator.checked("random", 9)


def new(cls: Any, make: Any, device: torch.device = CPU, **options: Any) -> Any:
    model, optimizer = make(device)
    return cls(model, optimizer, device, **options)


# Same losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_three_ways_to_copy_give_equal_losses(pair: Any, inplace: bool) -> None:
    theirs, ours, make = pair
    options = {"enable_inplace_copy_batch": True} if inplace else {}
    if not options.keys() <= inspect.signature(theirs).parameters.keys():
        pytest.skip(f"this TorchRec's {theirs.__name__} has no in-place copy")
    batches = make_batches(STEPS, wobble=True)
    non_blocking = losses(new(theirs, make), batches)
    blocking = losses(new(theirs, make), (batch.to(CPU) for batch in batches))
    preallocated = losses(new(ours, make, **options), batches)
    assert len(set(non_blocking)) == STEPS
    assert blocking == non_blocking == preallocated


def test_on_the_simulator_and_a_gpu_losses_equal_torchrecs(device: torch.device, one_rank: None) -> None:
    for theirs, ours, make in PAIRS.values():
        batches = make_batches(STEPS, wobble=True)
        ready = batches if device == CPU else pinned(batches)
        assert losses(new(ours, make, device), ready) == losses(new(theirs, make, device), ready)


@pytest.mark.parametrize("container", sorted(CONTAINERS))
def test_no_batch_class_has_to_change(container: str) -> None:
    wrap, unwrap = CONTAINERS[container]
    batches = make_batches(STEPS, wobble=True)
    expected = losses(new(TrainPipelineBase, unsharded), batches)
    model, optimizer = unsharded(CPU, unwrap)
    pipeline = PreallocTrainPipelineBase(model, optimizer, CPU)
    assert losses(pipeline, [wrap(batch) for batch in batches]) == expected
    assert pipeline.transfer_stats.batches == STEPS


@pytest.mark.parametrize("container", ["dict", "tuple", "dataclass", "only to", "computes in to"])
def test_no_batch_class_has_to_change_for_a_sharded_model(container: str, one_rank: None) -> None:
    wrap, unwrap = CONTAINERS[container]
    batches = make_batches(STEPS, wobble=True)
    expected = losses(new(TrainPipelineSparseDist, sharded), batches)
    model, optimizer = sharded(CPU, unwrap=unwrap)
    pipeline = PreallocTrainPipelineSparseDist(model, optimizer, CPU)
    assert losses(pipeline, [wrap(batch) for batch in batches]) == expected


def test_one_allocation_and_one_copy_a_batch(pair: Any) -> None:
    _, ours, make = pair
    pipeline = new(ours, make)
    losses(pipeline, make_batches(STEPS))
    stats = pipeline.transfer_stats
    assert (stats.batches, stats.copies, stats.allocations) == (STEPS, STEPS, STEPS)
    stats.reset()
    assert (stats.batches, stats.copies, stats.allocations, stats.bytes) == (0, 0, 0, 0)


def test_switched_off_it_is_torchrecs_own(pair: Any) -> None:
    theirs, ours, make = pair
    batches = make_batches(STEPS)
    pipeline = new(ours, make, prealloc={"enabled": False})
    assert losses(pipeline, batches) == losses(new(theirs, make), batches)
    assert pipeline.transfer_stats.batches == 0


def test_the_host_batch_is_left_as_it_was(pair: Any) -> None:
    _, ours, make = pair
    batches, again = make_batches(STEPS), make_batches(STEPS)
    losses(new(ours, make), batches)
    for batch, same in zip(batches, again, strict=True):
        assert batch.dense_features.equal(same.dense_features)
        assert batch.sparse_features.values().equal(same.sparse_features.values())
        assert batch.labels.equal(same.labels)


# Same ends -------------------------------------------------------------------------------------------------------


def trace(pipeline: Any, iterators: list[Iterator[Any]], calls: int) -> list[Any]:
    """What `calls` calls of `progress` give: a loss, or the type of the exception."""
    seen: list[Any] = []
    current = iterators.pop(0)
    for _ in range(calls):
        try:
            seen.append(float(pipeline.progress(current)[0]))
        except Exception as error:
            seen.append((type(error), str(error)))
            if iterators:
                current = iterators.pop(0)
    return seen


@pytest.mark.parametrize("count", [0, 1, 2, 3, STEPS])
def test_a_loader_ends_as_it_does_for_torchrec(pair: Any, count: int) -> None:
    theirs, ours, make = pair
    expected, seen = (trace(new(cls, make), [iter(make_batches(count))], count + 3) for cls in (theirs, ours))
    assert seen == expected
    assert seen[count:] == [(StopIteration, "")] * 3


@pytest.mark.parametrize("execute_all", [True, False])
@pytest.mark.parametrize("count", [1, 2, STEPS])
def test_execute_all_batches_keeps_its_meaning(one_rank: None, execute_all: bool, count: int) -> None:
    expected, seen = (
        trace(new(cls, sharded, execute_all_batches=execute_all), [iter(make_batches(count))], count + 2)
        for cls in (TrainPipelineSparseDist, PreallocTrainPipelineSparseDist)
    )
    assert seen == expected


def failing(count: int, fail_at: int) -> Iterator[Any]:
    for number, batch in enumerate(make_batches(count)):
        if number == fail_at:
            raise OSError(f"batch {number} cannot be read")
        yield batch


@needs_reset
@pytest.mark.parametrize("fail_at", range(5))
def test_a_loader_that_raises_does_so_as_for_torchrec_and_training_goes_on(pair: Any, fail_at: int) -> None:
    theirs, ours, make = pair

    def run(cls: Any) -> list[Any]:
        pipeline = new(cls, make)
        seen = trace(pipeline, [failing(5, fail_at)], fail_at + 1)
        pipeline.reset()
        return seen + trace(pipeline, [iter(make_batches(4, seed=2))], 5)

    expected, seen = run(theirs), run(ours)
    assert any(isinstance(entry, tuple) and entry[0] is OSError for entry in seen)
    assert seen == expected


@needs_reset
def test_reset_and_a_new_loader_give_what_they_give_torchrec(pair: Any) -> None:
    theirs, ours, make = pair

    def run(cls: Any) -> list[Any]:
        pipeline = new(cls, make)
        seen = trace(pipeline, [iter(make_batches(5))], 2)
        pipeline.reset()
        return seen + trace(pipeline, [iter(make_batches(4, seed=2)), iter(make_batches(3, seed=3))], 10)

    assert run(ours) == run(theirs)


@needs_reset
def test_a_model_that_raises_raises_through(pair: Any) -> None:
    theirs, ours, make = pair

    def run(cls: Any) -> list[Any]:
        pipeline = new(cls, make)
        seen = trace(pipeline, [iter(make_batches(1))], 1)
        pipeline.reset()
        iterator = iter(make_batches(6))
        forward = Model.forward
        failures = [True, False, True, False]

        def sometimes(self: Model, batch: Any) -> Any:
            if failures and failures.pop(0):
                raise ValueError("bad batch")
            return forward(self, batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Model, "forward", sometimes)
            return seen + trace(pipeline, [iterator], 8)

    expected, seen = run(theirs), run(ours)
    assert (ValueError, "bad batch") in seen
    assert seen == expected


def test_evaluation_between_training_steps(pair: Any) -> None:
    theirs, ours, make = pair

    def run(cls: Any) -> list[float]:
        pipeline = new(cls, make)
        iterator, collected = iter(make_batches(6)), []
        for step in range(6):
            pipeline._model.train(step % 2 == 0)
            collected.append(float(pipeline.progress(iterator)[0]))
        return collected

    assert run(ours) == run(theirs)


# What is left behind ---------------------------------------------------------------------------------------------


def test_nothing_is_held_after_the_last_batch_or_a_reset(device: torch.device, one_rank: None) -> None:
    for _, ours, make in PAIRS.values():
        pipeline = new(ours, make, device)
        outputs(pipeline, make_batches(3))
        assert not pipeline._engine._pending
        trace(pipeline, [iter(make_batches(5))], 2)
        pipeline.reset()
        assert not pipeline._engine._pending


def test_a_dropped_pipeline_lets_its_batches_go() -> None:
    batches = make_batches(4)
    pipeline = new(PreallocTrainPipelineBase, unsharded)
    pipeline.progress(iter(batches))
    held = weakref.ref(pipeline._cur_batch)
    engine = pipeline._engine
    del pipeline
    gc.collect()
    assert held() is None
    assert not engine._pending


# The class factory -----------------------------------------------------------------------------------------------


class Logging(TrainPipelineSparseDist):  # type: ignore[type-arg]
    """A user's subclass: overrides, and calls what it overrides."""

    def __init__(self, *args: Any, note: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes = [note]

    def progress(self, dataloader_iter: Any) -> Any:
        self.notes.append("progress")
        return super().progress(dataloader_iter)

    def copy_batch_to_gpu(self, dataloader_iter: Any) -> Any:
        self.notes.append("copy")
        return super().copy_batch_to_gpu(dataloader_iter)


def test_a_users_subclass_is_served_through_its_super_calls(one_rank: None) -> None:
    batches = make_batches(4)
    expected = new(Logging, sharded, note="start")
    pipeline = new(prealloc_pipeline(Logging), sharded, note="start")
    assert losses(pipeline, batches) == losses(expected, batches)
    assert pipeline.notes == expected.notes
    assert pipeline.transfer_stats.batches == 4
    assert isinstance(pipeline, Logging)
    assert type(pipeline).__name__ == "PreallocLogging"


class Predicting(TrainPipelineSparseDist):  # type: ignore[type-arg]
    """As TorchEasyRec's predict pipeline: it copies itself, and feeds a shallow copy of what is on the device."""

    def copy_batch_to_gpu(self, dataloader_iter: Any) -> Any:
        context = self._create_context()
        with self._stream_context(self._memcpy_stream):
            batch = self._next_batch(dataloader_iter)
            if batch is not None:
                batch = copy.copy(_to_device(batch, self._device, non_blocking=True))
        return batch, context


def test_a_shallow_copy_of_what_was_copied_is_ordered(device: torch.device, one_rank: None) -> None:
    batches = make_batches(8, wobble=True)
    ready = batches if device == CPU else pinned(batches)
    expected = losses(new(Predicting, sharded, device), ready)
    pipeline = new(prealloc_pipeline(Predicting), sharded, device)
    with checked(device):
        assert losses(pipeline, ready) == expected
    assert pipeline.transfer_stats.batches == 8


def test_batches_that_are_on_the_device_already_are_passed_on(device: torch.device, one_rank: None) -> None:
    on_device = [batch.to(device) for batch in make_batches(6)]
    shallow = [copy.copy(batch) for batch in on_device]
    expected = losses(new(TrainPipelineSparseDist, sharded, device), on_device)
    with checked(device):
        assert losses(new(PreallocTrainPipelineSparseDist, sharded, device), shallow) == expected


class Named:
    """A mixin that knows nothing of pipelines, without a `__dict__` of its own."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str: ...


class Mixed(Named, TrainPipelineBase):  # type: ignore[type-arg]
    __slots__ = ("extra",)

    def __init__(self, model: Any, optimizer: Any, device: Any, *, extra: int) -> None:
        super().__init__(model, optimizer, device)
        self.extra = extra

    @property
    def name(self) -> str:
        return f"mixed {self.extra}"

    @staticmethod
    def moved(batch: Any, device: torch.device) -> Any:
        return _to_device(batch, device, non_blocking=True)

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        with self._stream_context(self._memcpy_stream):
            self._cur_batch = self.moved(cur_batch, self._device)


def test_mixins_slots_static_methods_and_partials_are_served() -> None:
    batches = make_batches(4)
    made: Any = prealloc_pipeline(functools.partial(Mixed, extra=3))  # type: ignore[arg-type]
    pipeline = new(made, unsharded)
    assert losses(pipeline, batches) == losses(new(functools.partial(Mixed, extra=3), unsharded), batches)
    assert (pipeline.name, pipeline.transfer_stats.batches) == ("mixed 3", 4)


def test_a_hand_written_subclass_of_ours_may_call_torchrecs_functions() -> None:
    class Own(PreallocTrainPipelineBase):  # type: ignore[misc]
        def __init__(self, model: Any, optimizer: Any, device: Any) -> None:
            super().__init__(model, optimizer, device)

        def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
            self._cur_batch = _to_device(cur_batch, self._device, True)

    batches = make_batches(4)
    pipeline = new(Own, unsharded)
    assert losses(pipeline, batches) == losses(new(TrainPipelineBase, unsharded), batches)
    assert pipeline.transfer_stats.batches == 4


def test_a_class_of_a_script_is_served() -> None:
    script = (
        "import torch, torch.nn\n"
        "from torchrec.distributed.train_pipeline import TrainPipelineBase\n"
        "from torchrec.distributed.train_pipeline.utils import _to_device\n"
        "from torchrec_prealloc import prealloc_pipeline\n"
        "class Mine(TrainPipelineBase):\n"
        "    def _copy_batch_to_gpu(self, batch):\n"
        "        self._cur_batch = _to_device(later(batch), self._device, non_blocking=True)\n"
        "def later(batch): return batch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, batch): loss = super().forward(batch).mean(); return loss.unsqueeze(0), loss\n"
        "model = Model(3, 1)\n"
        "pipeline = prealloc_pipeline(Mine)(model, torch.optim.SGD(model.parameters(), 0.1), torch.device('cpu'))\n"
        "batches = iter([torch.ones(2, 3)] * 3)\n"
        "for _ in range(3): pipeline.progress(batches)\n"
        "print(pipeline.transfer_stats.batches)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "3\n", done.stderr


class OwnCopy(TrainPipelineBase):  # type: ignore[type-arg]
    """A user's subclass that copies in its own way: only waits can be replaced, and find nothing of ours."""

    def _connect(self, dataloader_iter: Any) -> None:
        self._cur_batch = self._next_batch(dataloader_iter)
        if self._cur_batch is not None:
            self._copy_batch_to_gpu(self._cur_batch)
        self._connected = True

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        self._cur_batch = cur_batch.to(self._device)


def test_a_subclass_with_its_own_copy_keeps_it() -> None:
    batches = make_batches(4)
    pipeline = new(prealloc_pipeline(OwnCopy), unsharded)
    assert losses(pipeline, batches) == losses(new(OwnCopy, unsharded), batches)
    assert pipeline.transfer_stats.batches == 0


def test_the_class_of_a_class_is_made_once_and_ours_stay_ours() -> None:
    assert prealloc_pipeline(TrainPipelineBase) is PreallocTrainPipelineBase
    assert prealloc_pipeline(PreallocTrainPipelineBase) is PreallocTrainPipelineBase


@pytest.mark.parametrize("wrong", [torch.nn.Linear, int, "TrainPipelineBase"])
def test_what_is_no_pipeline_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(PipelineError, match=getattr(wrong, "__name__", "TrainPipelineBase")):
        prealloc_pipeline(wrong)


def test_torchrec_itself_is_not_patched() -> None:
    from torchrec.distributed.train_pipeline import train_pipelines, utils

    before = dict(vars(TrainPipelineSparseDist))
    prealloc_pipeline(type("Fresh", (TrainPipelineSparseDist,), {}))
    assert dict(vars(TrainPipelineSparseDist)) == before
    assert train_pipelines._to_device is utils._to_device
    assert utils._to_device.__module__ == "torchrec.distributed.train_pipeline.utils"


def test_names_defined_after_the_class_are_found() -> None:
    scope: dict[str, Any] = {}
    exec(  # a trainer's own module, whose function comes after the class
        "from torchrec.distributed.train_pipeline import TrainPipelineBase\n"
        "from torchrec.distributed.train_pipeline.utils import _to_device\n"
        "class Late(TrainPipelineBase):\n"
        "    def _copy_batch_to_gpu(self, batch):\n"
        "        self._cur_batch = _to_device(later(batch), self._device, non_blocking=True)\n",
        scope,
    )
    cls = prealloc_pipeline(scope["Late"])
    scope["later"] = lambda batch: batch
    pipeline = new(cls, unsharded)
    losses(pipeline, make_batches(2))
    assert pipeline.transfer_stats.batches == 2
