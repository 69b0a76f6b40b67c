"""What goes wrong goes wrong as with TorchRec's pipelines, and leaves nothing behind: no memory, no thread."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import re
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kinds import CPU, KINDS, Kind, of_batches
from recsys import Model, make_batches, pinned
from torchrec.distributed.train_pipeline import DataLoadingThread

from torchrec_prealloc import simulator

pytestmark = pytest.mark.usefixtures("one_rank")
NAMES = [name for name, kind in KINDS.items() if kind.ranks == 1]
HANDS_OVER = "_exception" in inspect.getsource(DataLoadingThread)
"""Whether TorchRec's loading thread tells its consumer when the loader raises; older ones let it wait forever."""


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Collecting garbage looks at what a test has made, not at torch, nor at what earlier tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _then_frozen(_frozen: None) -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


def kind_on(name: str, device: torch.device) -> Kind:
    kind = KINDS[name]
    kind.theirs()
    if device == CPU and kind.on_cpu:
        pytest.skip(f"{kind.cls} on a CPU device: {kind.on_cpu}")
    return kind


def trace(pipeline: Any, iterator: Iterator[Any], calls: int) -> list[Any]:
    """Losses and exceptions of so many calls of `progress`. The losses are read at the end."""
    seen: list[Any] = []
    for _ in range(calls):
        try:
            seen.append(pipeline.progress(iterator)[0])
        except BaseException as error:
            seen.append((type(error), str(error)[:60]))
    return [float(entry) if isinstance(entry, torch.Tensor) else entry for entry in seen]


def reset(pipeline: Any) -> None:
    with contextlib.suppress(AttributeError):
        pipeline.reset()


def left(device: torch.device) -> tuple[int, int, int]:
    """Bytes on the device, pinned bytes, and threads that load or copy."""
    for _ in range(2):
        gc.collect()
    deadline = time.monotonic() + 5
    while (count := len(_threads())) and time.monotonic() < deadline:
        time.sleep(0.01)
    if device == CPU:
        return 0, 0, count
    torch.get_device_module(device).synchronize()
    gc.collect()
    if device.type == "cuda":  # of pinned memory nothing is told that is not also kept for reuse
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(device), 0, count
    stats = simulator.stats()
    return stats.devices[device.index].allocated, stats.pinned.allocated, count


def _threads() -> list[threading.Thread]:
    running = (thread for thread in threading.enumerate() if thread not in _earlier)
    return [thread for thread in running if thread.name.startswith((LOADING, "inplace_copy"))]


LOADING = "DataLoading"
_earlier: set[threading.Thread] = set()
"""Threads of other tests, which older TorchRecs' pipelines do not end."""


@pytest.fixture(autouse=True)
def _know_threads() -> None:
    _earlier.update(threading.enumerate())


def failing(kind: Kind, device: torch.device, fail_at: int, error: BaseException) -> Iterator[Any]:
    for number, batch in enumerate(kind.batches(6, device)):
        if number == fail_at:
            raise error
        yield batch


def checked(device: torch.device) -> Any:
    return simulator.checked("random", 11, raise_on_report=False) if device.type == "mtia" else contextlib.nullcontext()


def both(kind: Kind, device: torch.device, run: Callable[[Any], list[Any]]) -> list[Any]:
    """What `run` gives with our class: the same as with TorchRec's, without races, and leaving nothing behind."""
    before = left(device)
    with checked(device) as theirs:
        expected = run(kind.theirs())
    torchrecs = left(device)
    with checked(device) as reports:
        seen = run(kind.ours())
    ours = left(device)
    assert seen == expected
    if device.type == "mtia":
        assert not (of_batches(reports.reports) if theirs.reports else reports.reports)
    assert ours[2] == 0
    if any(thread.name.startswith(LOADING) for thread in _earlier.intersection(threading.enumerate())):
        return seen  # what they copy meanwhile is counted, too
    # What TorchRec's leaves, ours may leave; with most that is nothing. With a pipeline its staging memory stays.
    may_stay = [after - start for after, start in zip(torchrecs, before, strict=True)]
    grown = [now - after for now, after in zip(ours, torchrecs, strict=True)]
    assert grown[0] <= may_stay[0], (grown, may_stay)
    assert grown[1] <= may_stay[1] or kind.stays, (grown, may_stay)
    assert may_stay[0] == 0 or kind.stays, (torchrecs, before)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_loader_that_raises_at_each_step(name: str, device: torch.device) -> None:
    kind = kind_on(name, device)
    if "Eval" in kind.cls and "Sparse" in kind.cls and not HANDS_OVER:
        pytest.skip("this TorchRec's loading thread ends when the loader raises, and its consumer waits forever")

    def run(cls: Any) -> list[Any]:
        seen = []
        for fail_at in range(6):
            pipeline = kind.build(cls, device)
            with kind.names(device):
                seen.append(trace(pipeline, failing(kind, device, fail_at, OSError("cannot be read")), fail_at + 2))
                reset(pipeline)
                seen[-1] += trace(pipeline, iter(kind.batches(3, device, seed=2)), 4)
            reset(pipeline)
        return seen

    assert all((OSError, "cannot be read") in entries for entries in both(kind, device, run))


def test_an_older_loading_thread_hands_over_what_the_loader_raises(device: torch.device) -> None:
    if HANDS_OVER:
        pytest.skip("this TorchRec's does so itself")
    kind = kind_on("eval", device)
    pipeline = kind.build(kind.ours(), device)
    seen = trace(pipeline, failing(kind, device, 2, OSError("cannot be read")), 3)
    assert (OSError, "cannot be read") in seen


class CannotMove:
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        raise OSError("cannot be moved")


def test_a_batch_that_cannot_be_moved_does_not_leave_the_consumer_of_a_thread_waiting(device: torch.device) -> None:
    """In TorchRec's thread the exception is lost, and `progress` never returns."""
    kind = kind_on("eval", device)
    pipeline = kind.build(kind.ours(), device)
    assert trace(pipeline, iter([CannotMove()]), 1) == [(OSError, "cannot be moved")]
    reset(pipeline)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("name", NAMES)
def test_a_forward_that_raises_and_is_tried_again(name: str, error: type[BaseException], device: torch.device) -> None:
    kind = kind_on(name, device)
    if kind.cls == "TrainPipelinePT2":
        pytest.skip("the batch is lost in TorchRec's too: nothing to try again")

    def run(cls: Any) -> list[Any]:
        pipeline = kind.build(cls, device)
        iterator, forward, countdown = iter(kind.batches(8, device)), Model.forward, [3]

        def once(self: Model, batch: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise error("once")
            return forward(self, batch)

        with pytest.MonkeyPatch.context() as patch, kind.names(device):
            patch.setattr(Model, "forward", once)
            seen = trace(pipeline, iterator, 10)
        reset(pipeline)
        return seen

    assert (error, "once") in both(kind, device, run)


class Interrupting:
    """Ctrl-C when a function of ours is called, the `number`th time; from 0 on, it only counts."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __enter__(self) -> Interrupting:
        sys.setprofile(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        # What a callback of a weak reference raises, Python only prints.
        if event == "call" and OURS.match(code.co_filename) and code.co_name != "<lambda>":
            self.calls += 1
            if self.calls == self.number:
                raise KeyboardInterrupt


OURS = re.compile(r".*/torchrec_prealloc/\w+\.py$")
AT = 40
"""Places at which a run is interrupted, one a run."""


@pytest.mark.parametrize("name", ["base", "sparse_dist", "semi_sync", "threaded"])
def test_ctrl_c_anywhere_in_what_progress_calls_of_ours(name: str, simulated_accelerator: torch.device) -> None:
    device, kind = simulated_accelerator, kind_on(name, simulated_accelerator)
    if not hasattr(kind.theirs(), "reset"):
        pytest.skip("this TorchRec's pipelines cannot be reset")

    def run(number: int) -> int:
        pipeline = kind.build(kind.ours(), device)
        with kind.names(device), Interrupting(number) as interrupting, contextlib.suppress(KeyboardInterrupt):
            iterator = iter(kind.batches(5, device))
            for _ in range(3):
                pipeline.progress(iterator)
        with kind.names(device):
            pipeline.reset()
            losses = list(trace(pipeline, iter(kind.batches(3, device, seed=2)), 4))
        assert [type(entry) for entry in losses] == [float] * 3 + [tuple], (number, losses)
        return interrupting.calls

    with checked(device) as reports:
        run(0)  # what is learned of a class at its first batch is called only then
        calls = run(0)
        before = left(device)
        for place in range(AT):
            number = 1 + place * calls // AT
            assert run(number) in (number, calls)
        after = left(device)
    assert not reports.reports
    assert after == before


@pytest.mark.parametrize("name", NAMES)
def test_progress_after_the_end(name: str, device: torch.device) -> None:
    kind = kind_on(name, device)

    def run(cls: Any) -> list[Any]:
        pipeline = kind.build(cls, device)
        with kind.names(device):
            seen = trace(pipeline, iter(kind.batches(2, device)), 5)
        reset(pipeline)
        return seen

    assert both(kind, device, run)[2:] == [(StopIteration, "")] * 3


@pytest.mark.parametrize("name", ["base", "sparse_dist", "semi_sync", "threaded", "hybrid"])
def test_two_pipelines_over_one_model(name: str, device: torch.device) -> None:
    kind = kind_on(name, device)

    def run(cls: Any) -> list[Any]:
        with kind.names(device):
            model, optimizer = kind.make(device)
            first, second = (cls(model, optimizer, device) for _ in range(2))
            batches = [iter(kind.batches(5, device, seed=seed)) for seed in (1, 2)]
            return [entry for _ in range(5) for entry in trace(first, batches[0], 1) + trace(second, batches[1], 1)]

    both(kind, device, run)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_used_in_a_thread(name: str, device: torch.device) -> None:
    kind = kind_on(name, device)

    def run(cls: Any) -> list[Any]:
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.extend(kind.run(cls, device, 8)))
        thread.start()
        thread.join()
        return seen

    assert len(both(kind, device, run)) == 8


@pytest.mark.parametrize("name", ["base", "pt2", "accumulated_base"])  # sharded models: in test_distributed.py
def test_on_a_second_device(name: str, simulated_accelerator: torch.device) -> None:
    kind = kind_on(name, simulated_accelerator)
    second = simulator.device(1)
    with torch.get_device_module(second).device(second):
        with simulator.checked("lazy", raise_on_report=False):
            expected = kind.run(kind.theirs(), second, 8)
        with simulator.checked("random", 2):
            assert kind.run(kind.ours(), second, 8) == expected
    assert expected == kind.run(kind.ours(), simulated_accelerator, 8)


def test_two_devices_in_turn(simulated_accelerator: torch.device) -> None:
    kind, devices = KINDS["base"], [simulated_accelerator, simulator.device(1)]
    with simulator.checked("random", 6):
        pipelines = [kind.build(kind.ours(), device) for device in devices]
        iterators = [iter(kind.batches(6, device)) for device in devices]
        seen: list[list[Any]] = [[], []]
        for _ in range(6):
            for number, device in enumerate(devices):
                with torch.get_device_module(device).device(device):
                    seen[number].append(pipelines[number].progress(iterators[number])[0])
    assert [float(loss) for loss in seen[0]] == [float(loss) for loss in seen[1]]


# Soak ------------------------------------------------------------------------------------------------------------


def slope(samples: list[float]) -> float:
    """By how much the samples rise from first to last, as the median over all pairs: single peaks do not count."""
    pairs = itertools.combinations(enumerate(samples), 2)
    rises = [(later - earlier) / (index - start) for (start, earlier), (index, later) in pairs]
    return statistics.median(rises) * (len(samples) - 1)


def test_a_slope_is_seen_where_there_is_one() -> None:
    assert slope([5.0] * 9) == 0
    assert slope([float(value) for value in range(9)]) == pytest.approx(8)
    assert slope([0.0, 0.0, 99.0, 0.0, 0.0, 0.0, 0.0]) == 0


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


MAY_RISE = (4, 4 * 2**20, 16 * 2**10, 4 * 2**20, 2, 2)
"""RSS in MiB; reserved bytes: a segment of 2 MiB may be taken late; allocated bytes: less than a tensor in three steps;
pinned bytes: staging comes by the MiB; threads; file descriptors."""


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["base", "sparse_dist", "semi_sync", "eval", "threaded"])
def test_memory_is_flat_over_many_steps_of_wobbling_size(
    name: str, steps: int, simulated_accelerator: torch.device
) -> None:
    kind = kind_on(name, simulated_accelerator)
    pipeline = kind.build(kind.ours(), simulated_accelerator)
    batches = pinned(make_batches(20, wobble=True))
    iterator = (batches[number * 7 % len(batches)] for number in range(steps + 8))  # never drained
    seen: list[tuple[float, ...]] = []
    kept: list[Any] = []
    for step in range(1, steps + 1):
        with kind.names(simulated_accelerator):
            kept = [*kept[-3:], pipeline.progress(iterator)]
        if step >= steps // 2 and step % len(batches) == 0:  # the same batches are under way each time
            gc.collect()
            torch.get_device_module(simulated_accelerator).synchronize()
            stats = simulator.stats()
            bytes_now = (stats.devices[0].reserved, stats.devices[0].allocated, stats.pinned.allocated)
            seen.append((resident(), *bytes_now, *open_ends()))
    rises = [slope([float(value) for value in values]) for values in zip(*seen, strict=True)]
    assert all(rise < most for rise, most in zip(rises, MAY_RISE, strict=True)), (rises, seen)
    reset(pipeline)


def open_ends() -> tuple[int, int]:
    """Threads and file descriptors."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
