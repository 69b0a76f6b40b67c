"""What the host may not do to pinned memory, and what the checker finds of it. Each fault has a clean twin."""

from __future__ import annotations

import threading

import pytest
import torch

from torchrec_prealloc import simulator

SIZE = 1000
WAIT = pytest.mark.parametrize("wait", ["nothing", "event", "stream", "device", "item"])


def kinds(run: simulator.Run) -> set[str]:
    return {report.kind for report in run.reports}


def wait_for(how: str, target: torch.Tensor) -> None:
    stream = torch.mtia.current_stream()
    if how == "event":
        stream.record_event().synchronize()
    elif how == "stream":
        stream.synchronize()
    elif how == "device":
        torch.mtia.synchronize()
    elif how == "item":
        target.sum().item()


@WAIT
@pytest.mark.parametrize("writer", ["operator", "out=", "numpy", "thread", "foreach"])
@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_a_source_is_rewritten(device: torch.device, schedule: simulator.Schedule, wait: str, writer: str) -> None:
    source = torch.ones(SIZE).pin_memory()
    with simulator.checked(schedule, raise_on_report=False) as run:
        target = torch.empty(SIZE, device=device)
        target.copy_(source, non_blocking=True)
        wait_for(wait, target)
        if writer == "operator":
            source.fill_(2)
        elif writer == "out=":
            torch.add(torch.ones(SIZE), 1, out=source)
        elif writer == "numpy":
            source.numpy()[:] = 2
        elif writer == "foreach":
            torch._foreach_copy_([source], [torch.full((SIZE,), 2.0)])
        else:
            thread = threading.Thread(target=source.fill_, args=(2,))
            thread.start()
            thread.join()
    assert kinds(run) == ({"host write"} if wait == "nothing" else set())
    if run.reports:
        (report,) = run.reports
        assert (report.first.op, report.second.stream) == ("copy_", None)
        assert report.first.stack[0].filename == __file__
        assert (report.second.op == "unknown") == (writer in ("numpy", "thread"))


@WAIT
def test_a_result_is_read_early(device: torch.device, wait: str) -> None:
    values = torch.ones(SIZE, device=device)
    result = torch.zeros(SIZE).pin_memory()
    with simulator.checked("lazy", raise_on_report=False) as run:
        result.copy_(values, non_blocking=True)
        wait_for(wait, values)
        total = result.sum().item()
    assert kinds(run) == ({"host read"} if wait == "nothing" else set())
    assert total == SIZE  # repaired where it was too early
    if run.reports:
        assert run.reports[0].second.op == "aten::sum"
        assert run.reports[0].second.stack[0].filename == __file__


def test_a_result_read_past_all_operators_is_poison_in_the_lazy_schedule(device: torch.device) -> None:
    values = torch.ones(SIZE, device=device)
    result = torch.zeros(SIZE).pin_memory()
    with simulator.checked("lazy"):
        result.copy_(values, non_blocking=True)
        assert set(result.tolist()).isdisjoint({0.0, 1.0})
        torch.mtia.synchronize()
        assert set(result.tolist()) == {1.0}


@pytest.mark.parametrize("fault", [True, False], ids=["fault", "clean"])
def test_a_result_is_overwritten_early(device: torch.device, fault: bool) -> None:
    values = torch.ones(SIZE, device=device)
    result = torch.zeros(SIZE).pin_memory()
    with simulator.checked("eager", raise_on_report=False) as run:
        result.copy_(values, non_blocking=True)
        if not fault:
            torch.mtia.synchronize()
        result.zero_()
    assert kinds(run) == ({"host write"} if fault else set())


def test_views_and_shapes_are_no_reads(device: torch.device) -> None:
    values = torch.ones(SIZE, device=device)
    result = torch.zeros(SIZE).pin_memory()
    with simulator.checked("lazy"):
        result.copy_(values, non_blocking=True)
        views = [result[:10], result.view(10, -1), result.detach(), *result.split(100)]
        assert result.is_pinned()
        assert torch.empty_like(result).shape == result.shape
        assert all(view.numel() for view in views)


def test_reading_a_source_is_no_fault(device: torch.device) -> None:
    source = torch.ones(SIZE).pin_memory()
    with simulator.checked("lazy"):
        source.to(device, non_blocking=True)
        assert source.sum().item() == SIZE


def test_another_part_of_a_source_may_be_written(device: torch.device) -> None:
    staging = torch.ones(2 * SIZE).pin_memory()
    with simulator.checked("lazy"):
        staging[:SIZE].to(device, non_blocking=True)
        staging[SIZE:].fill_(2)


def test_there_and_back_through_one_buffer_is_in_order(device: torch.device) -> None:
    staging = torch.ones(SIZE).pin_memory()
    with simulator.checked("lazy"):
        target = staging.to(device, non_blocking=True)
        staging.copy_(target * 2, non_blocking=True)
        torch.mtia.synchronize()
        assert staging.sum().item() == 2 * SIZE


@pytest.mark.parametrize(
    "source",
    [torch.ones(SIZE), torch.ones(SIZE).double(), torch.ones(SIZE, 2)[:, 0]],
    ids=["pageable", "other dtype", "not contiguous"],
)
def test_what_cannot_be_copied_as_it_is_was_read_at_the_call(device: torch.device, source: torch.Tensor) -> None:
    if source.dtype == torch.double or not source.is_contiguous():
        pinned = torch.empty_strided((2 * SIZE,), (1,), dtype=source.dtype).pin_memory()
        source = pinned.as_strided(source.shape, source.stride()).copy_(source)
    with simulator.checked("lazy"):
        target = torch.empty(SIZE, device=device)
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        assert target.sum().item() == SIZE


def test_memory_that_torch_pinned_may_be_freed_under_a_copy(device: torch.device) -> None:
    before = simulator.stats().pinned
    with simulator.checked("lazy"):
        source = torch.ones(SIZE).pin_memory()
        target = source.to(device, non_blocking=True)
        del source
        assert simulator.stats().pinned.allocated == before.allocated + 4 * SIZE
        torch.mtia.synchronize()
        assert simulator.stats().pinned.allocated == before.allocated
        assert target.sum().item() == SIZE
    assert simulator.stats().pinned.deferred_frees == before.deferred_frees + 1


@pytest.mark.parametrize("fault", [True, False], ids=["fault", "clean"])
@pytest.mark.parametrize("how", ["free", "unregister_host"])
@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_registered_memory_may_not(device: torch.device, schedule: simulator.Schedule, how: str, fault: bool) -> None:
    source = torch.ones(SIZE)
    assert not source.is_pinned()
    simulator.register_host(source)
    assert source.is_pinned()
    with simulator.checked(schedule, raise_on_report=False) as run:
        target = source.to(device, non_blocking=True)
        if not fault:
            torch.mtia.synchronize()
        if how == "free":
            del source
        else:
            simulator.unregister_host(source)
            assert not source.is_pinned()
            assert source.sum().item() == SIZE
        assert target.sum().item() == SIZE
    assert kinds(run) == ({"host free"} if fault else set())
    if run.reports:
        assert run.reports[0].second.op == how
    assert simulator.stats().pinned.registered == 0


def test_only_host_memory_is_registered_and_only_once(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="not host memory"):
        simulator.register_host(torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match="pinned already"):
        simulator.register_host(torch.ones(3).pin_memory())
    with pytest.raises(RuntimeError, match="not registered"):
        simulator.unregister_host(torch.ones(3))
