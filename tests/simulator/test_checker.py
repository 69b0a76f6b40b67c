"""What the checker finds on the device. Each fault has a twin with the wait or call it lacks, which must be clean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchrec_prealloc import simulator

SCHEDULES = pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
FAULT = pytest.mark.parametrize("fault", [True, False], ids=["fault", "clean"])
SIZE = 1000


def kinds(schedule: simulator.Schedule, program: Callable[[], object], repair: bool = True) -> set[str]:
    with simulator.checked(schedule, raise_on_report=False, repair=repair) as run:
        program()
    return {report.kind for report in run.reports}


@pytest.fixture
def main(device: torch.device) -> torch.Stream:
    stream: torch.Stream = torch.mtia.current_stream()
    return stream


@pytest.fixture
def side(device: torch.device) -> torch.Stream:
    return torch.mtia.Stream()


@pytest.fixture
def source() -> torch.Tensor:
    return torch.arange(float(SIZE)).pin_memory()


@SCHEDULES
@FAULT
def test_read_before_the_copy_is_waited_for(
    schedule: simulator.Schedule, fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream,
    source: torch.Tensor,
) -> None:  # fmt: skip
    def program() -> None:
        with torch.mtia.stream(side):
            batch = source.to(device, non_blocking=True)
        if not fault:
            main.wait_stream(side)
        batch.record_stream(main)
        batch.sum()

    assert kinds(schedule, program) == ({"data race"} if fault else set())


@SCHEDULES
@FAULT
def test_overwritten_while_another_stream_reads(
    schedule: simulator.Schedule, fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream,
    source: torch.Tensor,
) -> None:  # fmt: skip
    kept = torch.zeros(SIZE, device=device)

    def program() -> None:
        kept.sum()
        if not fault:
            side.wait_stream(main)
        with torch.mtia.stream(side):
            kept.copy_(source, non_blocking=True)
        main.wait_stream(side)

    assert kinds(schedule, program) == ({"data race"} if fault else set())


@SCHEDULES
@FAULT
def test_an_event_recorded_too_early(
    schedule: simulator.Schedule, fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream,
    source: torch.Tensor,
) -> None:  # fmt: skip
    def program() -> None:
        with torch.mtia.stream(side):
            batch = torch.empty(SIZE, device=device)
            if fault:
                event = side.record_event()
            batch.copy_(source, non_blocking=True)
            if not fault:
                event = side.record_event()
        main.wait_event(event)
        batch.record_stream(main)
        batch.sum()

    assert kinds(schedule, program) == ({"data race"} if fault else set())


@SCHEDULES
@FAULT
def test_fresh_memory_written_before_its_stream_is_waited_for(
    schedule: simulator.Schedule, fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream,
    source: torch.Tensor,
) -> None:  # fmt: skip
    def program() -> None:
        torch.ones(SIZE, device=device).sum()  # what the main stream may still be doing with the block
        batch = torch.empty(SIZE, device=device)
        if not fault:
            side.wait_stream(main)
        with torch.mtia.stream(side):
            batch.copy_(source, non_blocking=True)
        main.wait_stream(side)
        assert batch.sum().item() == source.sum().item()

    assert kinds(schedule, program) == ({"memory reused"} if fault else set())


@SCHEDULES
def test_fresh_memory_of_an_idle_stream_needs_no_wait(
    schedule: simulator.Schedule, device: torch.device, main: torch.Stream, side: torch.Stream, source: torch.Tensor
) -> None:
    def program() -> None:
        torch.ones(SIZE, device=device).sum()
        main.synchronize()
        batch = torch.empty(SIZE, device=device)
        with torch.mtia.stream(side):
            batch.copy_(source, non_blocking=True)
        main.wait_stream(side)
        assert batch.sum().item() == source.sum().item()

    assert kinds(schedule, program) == set()


@SCHEDULES
@pytest.mark.parametrize("how", ["nothing", "record_stream", "wait", "synchronize"])
def test_freed_while_another_stream_reads(
    schedule: simulator.Schedule, how: str, device: torch.device, main: torch.Stream, side: torch.Stream,
    source: torch.Tensor,
) -> None:  # fmt: skip
    def program() -> None:
        with torch.mtia.stream(side):
            batch = source.to(device, non_blocking=True)
        main.wait_stream(side)
        batch.sum()
        if how == "record_stream":
            batch.record_stream(main)
        del batch
        if how == "wait":  # after the free, but before anybody can be given the memory
            side.wait_stream(main)
        if how == "synchronize":
            main.synchronize()
        with torch.mtia.stream(side):
            source.to(device, non_blocking=True)

    expected = {"unsafe free", "memory reused"} if how == "nothing" else set()
    assert kinds(schedule, program) == expected


def test_an_unsafe_free_is_told_even_if_nobody_takes_the_memory(
    device: torch.device, main: torch.Stream, side: torch.Stream, source: torch.Tensor
) -> None:
    def program() -> None:
        with torch.mtia.stream(side):
            batch = source.to(device, non_blocking=True)
        main.wait_stream(side)
        batch.sum()
        del batch

    assert kinds("lazy", program) == {"unsafe free"}


@FAULT
def test_a_storage_resized_to_nothing_is_a_free(
    fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream
) -> None:
    def program() -> None:
        batch = torch.ones(SIZE, device=device)
        side.wait_stream(main)
        with torch.mtia.stream(side):
            batch.sum()
        if not fault:
            batch.record_stream(side)
        batch.untyped_storage().resize_(0)
        torch.ones(SIZE, device=device)

    assert kinds("eager", program) == ({"unsafe free", "memory reused"} if fault else set())


def test_disjoint_parts_of_a_tensor_do_not_race(
    device: torch.device, main: torch.Stream, side: torch.Stream, source: torch.Tensor
) -> None:
    arena = torch.empty(2 * SIZE, device=device)
    main.synchronize()

    def program() -> None:
        with torch.mtia.stream(side):
            arena[:SIZE].copy_(source, non_blocking=True)
        arena[SIZE:].fill_(1)

    assert kinds("lazy", program) == set()


def test_reads_do_not_race(device: torch.device, main: torch.Stream, side: torch.Stream) -> None:
    kept = torch.ones(SIZE, device=device)

    def program() -> None:
        kept.sum()
        with torch.mtia.stream(side):
            kept.sum()

    assert kinds("lazy", program) == set()


def test_order_is_transitive(device: torch.device, main: torch.Stream, side: torch.Stream) -> None:
    third = torch.mtia.Stream()
    kept = torch.ones(SIZE, device=device)

    def program() -> None:
        kept.add_(1)
        side.wait_stream(main)
        third.wait_stream(side)
        with torch.mtia.stream(third):
            kept.add_(1)

    assert kinds("lazy", program) == set()


@FAULT
def test_two_copies_through_one_pinned_buffer(
    fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream
) -> None:
    staging = torch.empty(SIZE).pin_memory()
    values = torch.ones(SIZE, device=device)
    target = torch.empty(SIZE, device=device)
    torch.mtia.synchronize()

    def program() -> None:
        staging.copy_(values, non_blocking=True)
        if not fault:
            side.wait_stream(main)
        with torch.mtia.stream(side):
            target.copy_(staging, non_blocking=True)

    assert kinds("eager", program) == ({"data race"} if fault else set())


def test_repair_hides_the_wrong_bytes_and_without_it_they_are_seen(
    device: torch.device, main: torch.Stream, side: torch.Stream, source: torch.Tensor
) -> None:
    sums = []

    def program() -> None:
        with torch.mtia.stream(side):
            batch = source.to(device, non_blocking=True)
        batch.record_stream(main)
        sums.append(batch.sum().cpu().item())

    assert kinds("lazy", program, repair=True) == {"data race"}
    assert kinds("lazy", program, repair=False) == {"data race"}
    assert sums[0] == source.sum().item() != sums[1]


def test_a_report_names_both_places_and_the_seed(device: torch.device, side: torch.Stream) -> None:
    kept = torch.ones(SIZE, device=device)

    def first_use() -> None:
        kept.add_(1)

    def second_use() -> None:
        with torch.mtia.stream(side):
            kept.mul_(2)

    def program() -> None:
        with simulator.checked("random", seed=42):
            first_use()
            second_use()

    with pytest.raises(simulator.RaceError) as error:
        program()
    (report,) = error.value.reports
    assert (report.kind, report.bytes) == ("data race", 4 * SIZE)
    assert (report.first.op, report.first.stack[0].name) == ("aten::add", "first_use")
    assert (report.second.op, report.second.stack[0].name) == ("aten::mul", "second_use")
    assert (report.first.stream, report.second.stream) == ((0, 0), (0, side.stream_id))
    assert "seed=42" in str(error.value)
    assert "test_checker.py" in str(error.value)


def test_an_exception_of_the_program_is_not_hidden(device: torch.device, side: torch.Stream) -> None:
    kept = torch.ones(SIZE, device=device)

    def program() -> None:
        with simulator.checked():
            kept.add_(1)
            with torch.mtia.stream(side):
                kept.add_(1)
            raise KeyError

    with pytest.raises(KeyError):
        program()


def test_a_run_starts_without_the_past(device: torch.device, side: torch.Stream) -> None:
    kept = torch.ones(SIZE, device=device)
    with torch.mtia.stream(side):
        kept.add_(1)
    with simulator.checked():
        kept.add_(1)


@FAULT
def test_gradients_of_another_stream(fault: bool, device: torch.device, main: torch.Stream, side: torch.Stream) -> None:
    weight = torch.ones(SIZE, device=device, requires_grad=True)

    def program() -> None:
        side.wait_stream(main)
        with torch.mtia.stream(side):
            loss = (weight * 2).sum()
            if fault:
                loss.backward()  # orders the gradients for its caller's stream, which is `side`
        if not fault:
            main.wait_stream(side)
            loss.backward()
        loss.record_stream(main)
        assert weight.grad is not None
        weight.grad.add_(1)

    assert ("data race" in kinds("lazy", program)) == fault
