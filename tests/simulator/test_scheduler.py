"""Streams, events and the three schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from torchrec_prealloc import simulator

BytesNow = Callable[[torch.Tensor], torch.Tensor]


def pinned(value: float, size: int = 16) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def test_lazy_runs_a_copy_when_something_waits_for_it(device: torch.device, bytes_now: BytesNow) -> None:
    with simulator.checked("lazy"):
        target = torch.empty(16, device=device)
        target.copy_(pinned(3), non_blocking=True)
        assert not (bytes_now(target) == 3).all()
        torch.mtia.synchronize()
        assert (bytes_now(target) == 3).all()


def test_eager_runs_a_copy_at_once(device: torch.device, bytes_now: BytesNow) -> None:
    with simulator.checked("eager"):
        target = torch.empty(16, device=device)
        target.copy_(pinned(3), non_blocking=True)
        assert (bytes_now(target) == 3).all()


value = itertools.count(3)  # new in every run: memory may still hold what an earlier one left


def done_after_each_call(device: torch.device, bytes_now: BytesNow, seed: int) -> list[bool]:
    expected = next(value)
    streams = [torch.mtia.Stream() for _ in range(4)]
    done = []
    with simulator.checked("random", seed=seed):
        targets = []
        for stream in streams:
            with torch.mtia.stream(stream):
                targets.append(torch.empty(16, device=device))
                targets[-1].copy_(pinned(expected), non_blocking=True)
            done += [bool((bytes_now(target) == expected).all()) for target in targets]
    return done


def test_random_repeats_with_its_seed(device: torch.device, bytes_now: BytesNow) -> None:
    runs = [done_after_each_call(device, bytes_now, seed) for seed in range(6)]
    assert runs == [done_after_each_call(device, bytes_now, seed) for seed in range(6)]
    assert len({tuple(run) for run in runs}) > 1


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_fresh_memory_is_poisoned_after_what_was_queued_before(
    device: torch.device, bytes_now: BytesNow, schedule: simulator.Schedule
) -> None:
    with simulator.checked(schedule):
        source = torch.ones(1000, device=device)
        target = torch.empty(1000, device=device)
        target.copy_(source, non_blocking=True)
        del source
        again = torch.empty(1000, device=device)  # the source's block
        torch.mtia.synchronize()
        assert (bytes_now(target) == 1).all()
        assert (bytes_now(again.view(torch.uint8)) == 0xA5).all()


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_polling_an_event_or_a_stream_ends(device: torch.device, schedule: simulator.Schedule) -> None:
    with simulator.checked(schedule):
        for _ in range(20):
            target = torch.empty(16, device=device)
            target.copy_(pinned(3), non_blocking=True)
            event = torch.mtia.Event()
            event.record()
            for _ in range(1000):
                if event.query():
                    break
            else:
                pytest.fail("the event never passed")
            target.copy_(pinned(4), non_blocking=True)
            for _ in range(1000):
                if torch.mtia.current_stream().query():
                    break
            else:
                pytest.fail("the stream never ended")


def test_lazy_says_no_to_the_first_query(device: torch.device) -> None:
    with simulator.checked("lazy"):
        torch.empty(16, device=device).copy_(pinned(3), non_blocking=True)
        event = torch.mtia.Event()
        event.record()
        assert [event.query(), event.query()] == [False, True]


def test_an_event_waits_for_the_last_record_only(device: torch.device, bytes_now: BytesNow) -> None:
    with simulator.checked("lazy"):
        first, second = torch.empty(16, device=device), torch.empty(16, device=device)
        event = torch.mtia.Event()
        first.copy_(pinned(1), non_blocking=True)
        event.record()
        second.copy_(pinned(2), non_blocking=True)
        event.synchronize()
        assert (bytes_now(first) == 1).all()
        assert not (bytes_now(second) == 2).all()
        event.record()
        event.synchronize()
        assert (bytes_now(second) == 2).all()


def test_a_wait_runs_what_it_waits_for_and_no_more(device: torch.device, bytes_now: BytesNow) -> None:
    side = torch.mtia.Stream()
    with simulator.checked("lazy"):
        with torch.mtia.stream(side):
            first, second = torch.empty(16, device=device), torch.empty(16, device=device)
            first.copy_(pinned(1), non_blocking=True)
            event = side.record_event()
            second.copy_(pinned(2), non_blocking=True)
        torch.mtia.current_stream().wait_event(event)
        torch.mtia.current_stream().synchronize()
        assert (bytes_now(first) == 1).all()
        assert not (bytes_now(second) == 2).all()


def test_elapsed_time_is_in_milliseconds(device: torch.device) -> None:
    start, end = torch.mtia.Event(enable_timing=True), torch.mtia.Event(enable_timing=True)
    start.record()
    end.record()
    torch.mtia.synchronize()
    assert 0 <= start.elapsed_time(end) < 10_000


def test_streams_come_from_a_pool_of_32(device: torch.device) -> None:
    ids = [torch.mtia.Stream().stream_id for _ in range(64)]
    assert ids[:32] == ids[32:]
    assert len(set(ids)) == 32
    assert torch.mtia.default_stream().stream_id not in ids


def test_each_device_has_its_streams(device: torch.device) -> None:
    assert torch.mtia.device_count() == 8
    other = simulator.device(1)
    side = torch.mtia.Stream(other)
    with torch.mtia.stream(side):
        assert torch.mtia.current_device() == 1
        assert torch.mtia.current_stream() == side
        assert torch.mtia.current_stream(0) == torch.mtia.default_stream(0)
    assert torch.mtia.current_device() == 0
    assert torch.mtia.current_stream(1) == torch.mtia.default_stream(1)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_a_copy_between_devices_orders_both(device: torch.device, schedule: simulator.Schedule) -> None:
    with simulator.checked(schedule):
        here = torch.arange(100.0, device=device)
        there = here.to(simulator.device(1), non_blocking=True)
        here.add_(1)
        assert there.device.index == 1
        assert torch.equal(there.cpu(), torch.arange(100.0))


def test_the_schedule_is_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match="lazy"), simulator.checked("slow"):  # type: ignore[arg-type]
        pass


def test_runs_do_not_nest(device: torch.device) -> None:
    with simulator.checked(), pytest.raises(RuntimeError, match="already running"), simulator.checked():
        pass
    with simulator.checked():
        pass
