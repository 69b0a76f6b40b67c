"""Large tensors in ordinary memory go through a thread in the background: same values, same errors, nothing left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_prealloc.ordering import Ordering
from torchrec_prealloc.staging import MAX_UNREAD, PATIENCE, Background, Staging
from torchrec_prealloc.transfer import TransferEngine

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:.*not in pinned memory")


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchrec-prealloc")]


def large(value: int, count: int = 3) -> list[Tensor]:
    return [torch.full((2 * MIB,), value + number, dtype=torch.uint8) for number in range(count)]


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_batches_of_large_unpinned_tensors_arrive(schedule: Any, simulated_accelerator: torch.device) -> None:
    from torchrec_prealloc import simulator

    engine = TransferEngine(simulated_accelerator)
    seen = []
    with simulator.checked(schedule=schedule, seed=1):
        following = engine.start([*large(0), torch.ones(3)]).batch
        for step in range(1, 6):
            current = following
            engine.wait(current)
            seen.append(sum(tensor[-1].int() for tensor in current[:3]))
            following = None
            del current
            following = engine.start([*large(10 * step), torch.ones(3)]).batch
        engine.reset()
    assert [int(value) for value in seen] == [30 * step + 3 for step in range(5)]
    assert engine.stats.copies == 6 * 4


def test_the_main_thread_does_not_copy_them(
    simulated_accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_by: list[str] = []
    plain = torch._foreach_copy_

    def note(targets: Any, sources: Any) -> Any:
        if any(source.nbytes >= MIB for source in sources):
            copied_by.append(threading.current_thread().name)
        return plain(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    engine = TransferEngine(simulated_accelerator)
    engine.start(large(1)).wait()
    assert len(copied_by) == 3
    assert all(name.startswith("torchrec-prealloc") for name in copied_by)


def test_no_thread_is_there_before_it_is_needed_nor_after_a_reset(simulated_accelerator: torch.device) -> None:
    gc.collect()  # engines of other tests
    engine = TransferEngine(simulated_accelerator)
    engine.start([torch.ones(3)]).wait()
    assert workers() == []
    engine.start(large(1)).wait()
    assert len(workers()) == 1
    engine.reset()
    assert workers() == []
    assert int(engine.start(large(4)).wait()[0][0]) == 4
    engine.close()
    assert workers() == []
    assert not engine._staging.reading


def test_what_the_thread_raises_is_raised_where_the_batch_is_waited_for(
    simulated_accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransferEngine(simulated_accelerator)

    def fail(target: Tensor, source: Tensor) -> None:
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_copy", fail)
        batch = engine.start([torch.full((2 * MIB,), 1, dtype=torch.uint8)]).batch
        with pytest.raises(RuntimeError, match="the link is down"):
            engine.wait(batch)
    engine.reset()
    assert not engine._pending
    assert int(engine.start(large(4)).wait()[0][0]) == 4


def test_work_is_done_in_order_and_a_closed_thread_starts_again() -> None:
    background, done = Background(), []
    futures = [background.submit(lambda number=number: done.append(number)) for number in range(100)]
    background.close()
    assert all(future.done() for future in futures)
    assert done == list(range(100))
    assert background.submit(lambda: 7).result() == 7
    background.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_its_own_thread_and_a_process_ends_with_one_idle() -> None:
    script = """
import os
from torchrec_prealloc.staging import Background
background = Background()
assert background.submit(os.getpid).result() == os.getpid()
child = os.fork()
if child == 0:
    good = background.submit(os.getpid).result(10) == os.getpid()
    background.close()
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0
print("ended")
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (finished.returncode, finished.stdout) == (0, "ended\n"), finished.stderr


# Pinned memory ---------------------------------------------------------------------------------------------------


class Copied:
    """The event after a copy that runs when it is told to, or waited for."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def use(staging: Staging, nbytes: int) -> tuple[Tensor, Copied]:
    """Take memory for one more batch, and queue a copy from it."""
    staging.next_batch()
    block, copied = staging.take(nbytes), Copied()
    staging.read_until(copied, [], [block])
    return block, copied


def test_staging_memory_is_pinned(simulated_accelerator: torch.device) -> None:
    assert Staging(Ordering()).take(100).is_pinned()


def test_a_block_is_filled_again_only_when_the_copy_from_it_has_run(simulated_accelerator: torch.device) -> None:
    staging = Staging(Ordering())
    first, copied = use(staging, 5000)
    second, _ = use(staging, 5000)
    assert second.data_ptr() != first.data_ptr()
    copied.passed = True
    third, _ = use(staging, 4200)
    assert third.data_ptr() == first.data_ptr()
    assert staging.nbytes == 2 * 8192


def test_staging_grows_with_the_batches_and_shrinks_after_them(simulated_accelerator: torch.device) -> None:
    staging = Staging(Ordering())
    for nbytes in [5000] * 3 + [MIB] * 3:
        _, copied = use(staging, nbytes)
        copied.passed = True
    assert staging.nbytes == 8192 + MIB
    for _ in range(PATIENCE + 2):
        _, copied = use(staging, 5000)
        copied.passed = True
    assert staging.nbytes == 8192


def test_the_host_waits_when_it_is_too_many_batches_ahead_of_the_copies(simulated_accelerator: torch.device) -> None:
    staging = Staging(Ordering())
    copies = [use(staging, 5000)[1] for _ in range(5 * MAX_UNREAD)]
    assert staging.nbytes == MAX_UNREAD * 8192
    assert [copied.passed for copied in copies].count(False) == MAX_UNREAD


def test_a_small_batch_does_not_keep_a_large_batchs_block(simulated_accelerator: torch.device) -> None:
    staging = Staging(Ordering())
    large, copied = use(staging, MIB)
    copied.passed = True
    small, _ = use(staging, 5000)
    assert small.data_ptr() != large.data_ptr()


def test_where_nothing_can_be_pinned_ordinary_memory_serves_and_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> Tensor:
        raise RuntimeError("no locked memory")

    monkeypatch.setattr("torchrec_prealloc.staging.pinned_block", refuse)
    staging = Staging(Ordering())
    with pytest.warns(UserWarning, match="cannot pin 8192 bytes of host memory .no locked memory."):
        first, copied = use(staging, 5000)
    copied.passed = True
    assert use(staging, 5000)[0].data_ptr() == first.data_ptr()


def test_an_engine_keeps_as_much_as_its_batches_in_flight_need(simulated_accelerator: torch.device) -> None:
    engine = TransferEngine(simulated_accelerator)
    for step in range(200):
        engine.start([torch.full((100 + step,), step) for _ in range(5)]).wait_on_host()
    assert engine.stats.staging_bytes == 1 << 14
    engine.close()
    assert engine._staging.nbytes == 0
