"""What a pipeline tells of itself: counts, times, lines in the log, labels in a profile."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from kinds import KINDS
from torch.profiler import ProfilerActivity, profile

from torchrec_prealloc import PreallocConfig, simulator
from torchrec_prealloc.measured import TIME_EVERY, MeasuredEngine, Timing, _Times
from torchrec_prealloc.stats import TransferStats, total

CPU = torch.device("cpu")


class Event:
    def __init__(self, time: float, passed: bool = True) -> None:
        self.time, self.passed = time, passed

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def times(copied: float, waited: float, passed: bool = True) -> _Times:
    return _Times([(Event(1), Event(1 + copied))], (Event(5), Event(5 + waited, passed)), nbytes=1000)


def test_times_are_read_when_the_batch_has_arrived() -> None:
    timing = Timing(TransferStats())
    timing.add(times(2, 1))
    timing.add(times(4, 3, passed=False))
    timing.read()
    assert (timing.stats.timed_batches, timing.stats.copy_ms, timing.stats.wait_ms) == (1, 2, 1)
    timing.read(wait=True)
    assert timing.stats == TransferStats(timed_batches=2, timed_bytes=2000, copy_ms=6, wait_ms=4)


def test_events_that_cannot_tell_the_time_are_no_error() -> None:
    class Timeless(Event):
        def elapsed_time(self, end: Event) -> float:
            raise RuntimeError("not created with timing enabled")

    timing = Timing(TransferStats())
    timing.add(_Times([], (Timeless(0), Timeless(1))))
    timing.read()
    assert timing.stats == TransferStats()


def test_a_line_says_how_many_how_fast_and_how_long_it_was_waited_for() -> None:
    stats = TransferStats(batches=7, bytes=9000, copies=8, timed_batches=2, timed_bytes=6_000_000, copy_ms=3, wait_ms=1)
    assert stats.line() == (
        "7 batches, 9000 bytes in 8 copies, 2.0 GB/s; the main stream waited 1.0 ms for 2 of them, 0.500 ms each"
    )
    assert total([stats, stats]).batches == 14


def test_reset_sets_all_to_nothing() -> None:
    stats = TransferStats(**dict.fromkeys(vars(TransferStats()), 5))
    stats.reset()
    assert stats == TransferStats()


def test_a_ring_counts_from_a_reset_on(simulated_accelerator: torch.device) -> None:
    engine = MeasuredEngine(simulated_accelerator, config=PreallocConfig(buffers="ring", ring_slots=1))
    with pytest.warns(UserWarning, match="all in use"):
        held = [engine.start([torch.ones(4)]).wait() for _ in range(3)]
    assert engine.stats.ring_skipped == 2
    engine.stats.reset()
    assert engine.stats.ring_skipped == 0
    held.append(engine.start([torch.ones(4)]).wait())
    assert (engine.stats.ring_skipped, engine.stats.batches) == (1, 1)


@pytest.mark.usefixtures("one_rank")
def test_a_pipeline_times_some_of_its_batches(simulated_accelerator: torch.device) -> None:
    kind, steps = KINDS["sparse_dist"], 3 * TIME_EVERY
    with simulator.checked("random", 1):
        pipeline = kind.build(kind.ours(), simulated_accelerator)
        with kind.names(simulated_accelerator):
            iterator = iter(kind.batches(steps, simulated_accelerator))
            for _ in range(steps):
                pipeline.progress(iterator)
        torch.get_device_module(simulated_accelerator).synchronize()
        stats = pipeline.transfer_stats
    assert (stats.batches, stats.timed_batches) == (steps, 3)
    assert 0 < stats.timed_bytes < stats.bytes / TIME_EVERY * 4
    assert stats.staging_bytes > 0


@pytest.mark.parametrize("device_name", ["cpu", "simulated"])
def test_every_so_many_batches_a_line_is_logged(
    device_name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    device = CPU if device_name == "cpu" else request.getfixturevalue("simulated_accelerator")
    engine = MeasuredEngine(device, config=PreallocConfig(log_every=4))
    with caplog.at_level(logging.INFO, logger="torchrec_prealloc"):
        for _ in range(9):
            engine.start([torch.ones(4)]).wait()
    assert [line.split(" batches")[0] for line in caplog.messages] == [f"{engine.device}: 4", f"{engine.device}: 8"]


def labels(device: torch.device, work: Any) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    return [event.key for event in seen.key_averages() if event.key.startswith("## prealloc")]


def test_the_steps_of_a_copy_are_labelled_in_a_profile(simulated_accelerator: torch.device) -> None:
    engine = MeasuredEngine(simulated_accelerator)
    batch = {"small": [torch.ones(4) for _ in range(20)], "large": torch.ones(1 << 20).pin_memory()}
    found = labels(simulated_accelerator, lambda: engine.start(batch).wait())
    steps = ("find tensors", "lay out", "allocate", "gather", "rebuild", "copy", "wait")
    assert sorted(found) == sorted(f"## prealloc: {step} ##" for step in steps)


def test_without_a_profiler_no_label_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("torchrec_prealloc.labels.record_function", refuse)
    MeasuredEngine(CPU).start([torch.ones(4)]).wait()
