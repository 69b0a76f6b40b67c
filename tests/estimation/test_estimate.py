"""What pipelines hold of their batches has the published shapes, and what does not run is said in a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recsys import make_batches, sharded
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

import torchrec_prealloc
from torchrec_prealloc import simulator, versions
from torchrec_prealloc.errors import CommandError
from torchrec_prealloc.estimation.description import DescribedBatch, Description
from torchrec_prealloc.estimation.estimate import EstimateError, estimate
from torchrec_prealloc.estimation.footprint import MIB
from torchrec_prealloc.estimation.stand_in import StandIn, read
from torchrec_prealloc.ways import BLOCKING, NON_BLOCKING, PREALLOCATED

GENERATOR = torch.Generator()
MIBS = 16
"""A batch of one tensor, large enough for a segment of its own."""


def batch_of(mib: int) -> DescribedBatch:
    return Description((mib * MIB // 4,) * 2).batch(mib * MIB // 4, GENERATOR)


@pytest.mark.parametrize(("pipeline", "in_flight"), [(TrainPipelineBase, 2), (TrainPipelineSparseDist, 3)])
@pytest.mark.parametrize("ahead", [False, True])
def test_batches_in_flight_are_the_published_multiples(
    pipeline: type, in_flight: int, ahead: bool, simulated_accelerator: torch.device
) -> None:
    found = estimate(pipeline, batch_of(MIBS), device=simulated_accelerator, ahead=ahead)
    blocking, non_blocking, ours = (found.ways[name] for name in (BLOCKING, NON_BLOCKING, PREALLOCATED))
    batch = MIBS * MIB
    assert found.batch_bytes == batch
    # Two batches for the base pipeline, three for sparse-dist; a host that is ahead holds one more by record_stream.
    assert blocking.reserved == pytest.approx(in_flight * batch, rel=0.1)
    assert non_blocking.reserved == pytest.approx((in_flight + ahead) * batch, rel=0.1)
    assert (blocking.side, ours.side) == (0, 0)
    assert non_blocking.side == non_blocking.reserved
    assert ours.reserved <= blocking.reserved
    if pipeline is TrainPipelineBase:  # drops a batch before it copies the next: what the main stream frees serves it
        assert ours.reserved == pytest.approx(batch, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("pipeline", "in_flight"), [(TrainPipelineBase, 2), (TrainPipelineSparseDist, 3)])
def test_a_gpu_holds_the_same_multiples(pipeline: type, in_flight: int) -> None:
    found = estimate(pipeline, batch_of(MIBS), device=torch.device("cuda", 0), ahead=False)
    assert found.on == "GPU"
    assert found.ways[BLOCKING].reserved == pytest.approx(in_flight * MIBS * MIB, rel=0.1)
    assert found.ways[NON_BLOCKING].side == pytest.approx(in_flight * MIBS * MIB, rel=0.1)
    assert found.ways[PREALLOCATED].side == 0


def test_wobbling_batches_fragment_what_equal_ones_do_not(simulated_accelerator: torch.device) -> None:
    def wobbling() -> Iterator[DescribedBatch]:
        return Description((MIBS * MIB * 3 // 16, MIBS * MIB // 4)).batches()

    equal, varied = (
        estimate(TrainPipelineBase, given, steps=16, device=simulated_accelerator)
        for given in (batch_of(MIBS), wobbling)
    )
    assert varied.ways[NON_BLOCKING].reserved > equal.ways[NON_BLOCKING].reserved
    assert varied.ways[PREALLOCATED].reserved < 2 * MIBS * MIB


NEEDS_MODEL = {
    "StagedTrainPipeline": "'model'",
    "EvalPipelineCPUSparse": "data_copy_stream|dense_only",
    "TrainPipelineSparseDistBwdOpt": "site_fqn",
    "TrainPipelineSparseDistOptStash": "site_fqn",
    "TrainPipelineSparseDistEmbStash": "site_fqn",
    "TrainPipelinePrefetchEMS": "site_fqn",
}
"""Classes that do not run with a model, or a batch, of any kind, and what the message names."""


@pytest.mark.parametrize("name", sorted(versions.available()))
def test_every_pipeline_class_runs_or_says_what_it_lacks(name: str, simulated_accelerator: torch.device) -> None:
    cls, batch = versions.pipeline_class(name), batch_of(4)
    if name in NEEDS_MODEL:
        with pytest.raises(EstimateError, match=rf"^{BLOCKING} of {name} does not run: .*({NEEDS_MODEL[name]})"):
            estimate(cls, batch, steps=4, device=simulated_accelerator)
        return
    if name.endswith("CompAutograd") and not versions.at_least("1.7", versions.installed_version()):
        pytest.skip(f"{name} of this TorchRec does not run with torch {torch.__version__}")
    cuda = dict(vars(torch.cuda))
    found = estimate(cls, batch, steps=4, device=simulated_accelerator)
    assert dict(vars(torch.cuda)) == cuda, "the names of CUDA's streams"
    assert list(found.ways) == [BLOCKING, NON_BLOCKING, PREALLOCATED]
    assert found.ways[PREALLOCATED].side == 0
    assert found.ways[PREALLOCATED].reserved <= found.ways[NON_BLOCKING].reserved


def test_a_model_of_ones_own_counts_its_input_dist(simulated_accelerator: torch.device) -> None:
    found = estimate(
        TrainPipelineSparseDist, make_batches(1, size=1 << 17)[0], model=sharded, device=simulated_accelerator, steps=6
    )
    # The dist's ids are on a side stream of TorchRec's, which no way of copying changes.
    assert 0 < found.ways[PREALLOCATED].side < found.ways[NON_BLOCKING].side


def test_a_trainers_own_class_and_options_are_run(simulated_accelerator: torch.device) -> None:
    seen = []

    class Own(TrainPipelineSparseDist):  # type: ignore[type-arg]
        def progress(self, dataloader_iter: Any) -> Any:
            seen.append((type(self).__name__, self._execute_all_batches))
            return super().progress(dataloader_iter)

    estimate(Own, batch_of(4), options={"execute_all_batches": False}, steps=2, device=simulated_accelerator)
    assert seen == [("Own", False)] * 4 + [("PreallocOwn", False)] * 2
    with pytest.raises(CommandError, match=r"prealloc\.slots: unknown"):
        estimate(Own, batch_of(4), options={"prealloc": {"slots": 1}}, device=simulated_accelerator)


def test_the_model_is_not_counted_and_batches_are_pinned(simulated_accelerator: torch.device) -> None:
    pinned = []

    class Seen(DescribedBatch):
        def pin_memory(self) -> DescribedBatch:
            pinned.append(self)
            return super().pin_memory()

    def model(device: torch.device) -> Any:
        made = StandIn().to(device)
        made.register_buffer("table", torch.zeros(100 * MIB, dtype=torch.uint8, device=device))
        return made, torch.optim.SGD(made.parameters(), lr=0.1)

    found = estimate(TrainPipelineBase, Seen(batch_of(4).fields), model=model, device=simulated_accelerator)
    assert found.ways[BLOCKING].reserved < 40 * MIB
    assert len(pinned) == 3


def test_the_stand_in_reads_every_tensor_of_any_batch(simulated_accelerator: torch.device) -> None:
    device = simulated_accelerator
    kinds = (torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64)
    batch = [torch.ones(3, dtype=dtype, device=device) for dtype in kinds]
    assert float(read({"a": batch, "empty": torch.zeros(0, device=device), "host": torch.ones(2)})) == len(kinds)
    assert float(read({"text": "x"})) == 0


def test_it_prints_a_table_marked_as_simulated(simulated_accelerator: torch.device) -> None:
    printed = str(estimate(TrainPipelineBase, batch_of(4), steps=3, device=simulated_accelerator))
    assert "TrainPipelineBase, batches of up to 4.0 MiB, 3 steps (simulated)" in printed
    assert printed.count("simulator") == 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": torch.zeros(2)}, "blocking_copy of TrainPipelineBase does not run: AttributeError: .*'to'"),
        (lambda: iter(()), "no batch"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(batch: Any, message: str, simulated_accelerator: torch.device) -> None:
    with pytest.raises(EstimateError, match=message):
        estimate(TrainPipelineBase, batch, device=simulated_accelerator)


def test_a_model_that_fails_is_named(simulated_accelerator: torch.device) -> None:
    class Broken(nn.Module):
        def forward(self, batch: Any) -> Any:
            raise ValueError("no table\nfor ids")

    def model(device: torch.device) -> Any:
        return Broken(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    with pytest.raises(EstimateError, match=r"does not run: ValueError: no table for ids$"):
        estimate(TrainPipelineBase, batch_of(4), model=model, device=simulated_accelerator)


def test_without_a_simulator_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "available", lambda: (False, "no C++ compiler ('g++'): install g++ 11"))
    with pytest.raises(EstimateError, match=r"no simulator: no C\+\+ compiler \('g\+\+'\): install g\+\+ 11"):
        estimate(TrainPipelineBase, batch_of(4))


def test_a_compiler_that_fails_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise simulator.BuildError("building failed: g++: out of memory")

    monkeypatch.setattr(simulator, "available", lambda: (True, ""))
    monkeypatch.setattr(simulator, "built", lambda: False)
    monkeypatch.setattr(simulator, "device", fail)
    with pytest.raises(EstimateError, match="no simulator: building failed"):
        estimate(TrainPipelineBase, batch_of(4))


def test_it_is_a_name_of_the_package_although_a_module_of_that_name_was_imported() -> None:
    assert torchrec_prealloc.estimate is estimate
    assert torchrec_prealloc.EstimateError is EstimateError
