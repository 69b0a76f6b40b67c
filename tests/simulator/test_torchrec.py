"""TorchRec's own pipelines, unmodified, as the reference: the CPU's losses to the bit, and no reports. And the
faults that they do have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrec_prealloc import simulator

from . import reference
from .reference import PIPELINES, losses

SCHEDULES: list[simulator.Schedule] = ["lazy", "eager", "random"]
CLEAN = ["base", "base, in place", "sparse dist", "sparse dist, in place", "prefetch"]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{store}")
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cpu_losses(one_rank: None) -> list[float]:
    return losses(PIPELINES["base"], torch.device("cpu"))


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank(device: torch.device, cpu_losses: list[float], schedule: simulator.Schedule, name: str) -> None:
    with simulator.checked(schedule):
        assert losses(PIPELINES[name], device) == cpu_losses


@pytest.mark.parametrize("name", ["sparse dist", "sparse dist, in place"])
def test_many_random_schedules(device: torch.device, cpu_losses: list[float], name: str) -> None:
    for seed in range(25):
        with simulator.checked("random", seed=seed):
            assert losses(PIPELINES[name], device) == cpu_losses


def two_ranks(name: str, tmp_path: Path, environment: dict[str, str]) -> list[dict[str, list[object]]]:
    command = [sys.executable, reference.__file__, name, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    results = []
    for process in ranks:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error.decode()
        results.append(json.loads(out.splitlines()[-1]))
    return results


@pytest.mark.parametrize("name", ["base", "sparse dist", "sparse dist, in place"])
def test_two_ranks(device: torch.device, tmp_path: Path, environment: dict[str, str], name: str) -> None:
    for result in two_ranks(name, tmp_path, environment):
        for schedule in SCHEDULES:
            assert result[f"{schedule} reports"] == []
            assert result[schedule] == result["cpu"]


def test_a_collective_is_ordered_by_wait(device: torch.device) -> None:
    for wait in (True, False):
        values = torch.ones(100, device=device)
        with simulator.checked(raise_on_report=False) as run:
            values.add_(1)
            work = dist.all_reduce(values, async_op=True)
            if wait:
                work.wait()
            values.add_(1)
            work.wait()
        assert bool(run.reports) != wait
        if not wait:
            assert (run.reports[0].kind, run.reports[0].first.op) == ("data race", "c10d::allreduce_")


def test_a_collective_keeps_its_tensors_until_wait(device: torch.device) -> None:
    with simulator.checked():
        source, target = torch.ones(100, device=device), torch.empty(100, device=device)
        work = dist.all_gather_into_tensor(target, source, async_op=True)
        del source
        torch.ones(100, device=device)
        work.wait()
        assert target.sum().item() == 100


@pytest.mark.parametrize("fault", [True, False], ids=["fault", "clean"])
def test_data_parallel_gradients_are_ordered_for_their_stream_only(device: torch.device, fault: bool) -> None:
    side = torch.mtia.Stream()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, device=device))
    with simulator.checked(raise_on_report=False) as run:
        model(torch.ones(4, 8, device=device)).sum().backward()
        assert torch.equal(model.module.bias.grad, torch.full((8,), 4.0, device=device))
        model.module.weight.grad.add_(1)
        if not fault:
            side.wait_stream(torch.mtia.current_stream())
        with torch.mtia.stream(side):
            model.module.weight.grad.zero_()
    assert {report.kind for report in run.reports} == ({"data race"} if fault else set())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_semi_sync_in_place_is_a_race_in_torchrec(device: torch.device, schedule: simulator.Schedule) -> None:
    """Its in-place copy leaves no event in the context, and the input dist waits for the context's events only."""
    with simulator.checked(schedule):
        expected = losses(PIPELINES["semi-sync"], device)
    with simulator.checked(schedule, raise_on_report=False) as run:
        assert losses(PIPELINES["semi-sync, in place"], device) == expected  # repaired
    assert "data race" in {report.kind for report in run.reports}
    assert any(
        report.first.op == "copy_" and any(frame.name == "start_sparse_data_dist" for frame in report.second.stack)
        for report in run.reports
    )


def test_the_fused_pipeline_frees_embeddings_unsafely(device: torch.device, cpu_losses: list[float]) -> None:
    """A real fault of TorchRec 1.8, with one rank as with more: the lookup's result is allocated on the lookup stream
    and read by the forward on the main stream, but `_start_embedding_lookup` names only the lookup's input and its
    context by record_stream. The forward drops the result while the main stream still reads it, and the lookup
    stream's next allocation may take the memory.
    """
    with simulator.checked("eager", raise_on_report=False) as run:
        assert losses(PIPELINES["fused sparse dist"], device) == cpu_losses
    assert {report.kind for report in run.reports} == {"unsafe free", "memory reused"}
    assert {report.first.op for report in run.reports} == {"aten::cat"}
    assert all(report.first.stream == (0, 0) != report.second.stream for report in run.reports)


def test_the_fused_pipeline_waits_for_another_stream_than_it_looks_up_on(
    device: torch.device, cpu_losses: list[float]
) -> None:
    """A real fault of TorchRec 1.8 with `emb_lookup_stream="new"`, on one rank: nobody calls `wait_embedding_lookup`,
    and the forward waits for the data-dist stream. (With more ranks the output collective's wait() orders it; there
    the lookup's input is freed unsafely, which is recorded for the main stream but read by the lookup stream.)
    """
    with simulator.checked("lazy", raise_on_report=False) as run:
        assert losses(PIPELINES["fused sparse dist, new stream"], device) == cpu_losses  # repaired
    assert {report.kind for report in run.reports} == {"data race"}
    assert all("codegen_forward" in report.first.op for report in run.reports)
    assert {report.second.op for report in run.reports} == {"aten::cat"}
