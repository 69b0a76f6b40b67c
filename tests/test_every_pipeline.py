"""Every pipeline class of TorchRec's against ours: the same losses bit for bit, in every mode, without a race."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpu_stand_ins import stand_in
from kinds import CPU, KINDS, Kind, accumulating, of_batches

import torchrec_prealloc
from torchrec_prealloc import simulator, versions

STEPS = 20
MODES = ("train", "eval", "switched")
SCHEDULES = [("lazy", 0), ("eager", 0), ("random", 1)]
CASES = [
    pytest.param(kind, mode, id=f"{name}-{mode}")
    for name, kind in KINDS.items()
    for mode in MODES
    if kind.ranks == 1 and (kind.trains or mode == "eval")
]
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_on_the_cpu_outputs_equal_torchrecs(kind: Kind, mode: str) -> None:
    theirs = kind.theirs()
    if kind.on_cpu:
        pytest.skip(f"{kind.cls} on a CPU device: {kind.on_cpu}")
    expected = kind.run(theirs, CPU, STEPS, mode)
    assert kind.run(kind.ours(), CPU, STEPS, mode) == expected
    assert len(expected) == len(set(expected)) == STEPS


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_on_the_simulator_outputs_equal_torchrecs_and_nothing_races(
    kind: Kind, mode: str, simulated_accelerator: torch.device
) -> None:
    try:
        with simulator.checked(raise_on_report=False) as theirs:
            expected = kind.run(kind.theirs(), simulated_accelerator, STEPS, mode)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            kind.run(kind.ours(), simulated_accelerator, STEPS, mode)
        pytest.skip(f"{kind.cls} of TorchRec {versions.installed_version()} itself fails: {error}")
    assert len(expected) == len(set(expected)) == STEPS
    assert not kind.lookup_races or theirs.reports
    for schedule, seed in SCHEDULES:
        with simulator.checked(schedule, seed, raise_on_report=False) as ours:  # type: ignore[arg-type]
            seen = kind.run(kind.ours(), simulated_accelerator, STEPS, mode)
        assert seen == expected, (schedule, seed)
        assert not (of_batches(ours.reports) if kind.lookup_races else ours.reports), (schedule, seed)
    with simulator.checked("random", 2, raise_on_report=False) as ours:  # each tensor from where it is
        seen = kind.run(kind.ours(), simulated_accelerator, STEPS, mode, prealloc={"direct_bytes": 1})
    assert seen == expected
    assert not (of_batches(ours.reports) if kind.lookup_races else ours.reports)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.ranks == 1])
def test_on_a_gpu_outputs_equal_torchrecs(name: str) -> None:
    kind, device = KINDS[name], torch.device("cuda", 0)
    stand_in(device)
    for mode in MODES if kind.trains else ("eval",):
        try:
            expected = kind.run(kind.theirs(), device, STEPS, mode)
        except RuntimeError as error:
            pytest.skip(f"{kind.cls} of TorchRec {versions.installed_version()} itself fails: {error}")
        for options in ({}, {"direct_bytes": 1}, {"buffers": "ring"}):
            assert kind.run(kind.ours(), device, STEPS, mode, prealloc=options) == expected, (mode, options)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.ranks == 1])
def test_each_kind_copies_in_our_way_into_memory_of_the_main_stream(
    name: str, simulated_accelerator: torch.device
) -> None:
    kind = KINDS[name]
    pipeline = kind.build(kind.ours(), simulated_accelerator)
    before = taken_from(pipeline._engine.side)
    with kind.names(simulated_accelerator):
        iterator = iter(kind.batches(4, simulated_accelerator))
        for _ in range(4):
            pipeline.progress(iterator)
    assert pipeline.transfer_stats.batches == 4
    assert taken_from(pipeline._engine.side) == before


def taken_from(stream: Any) -> int:
    """Bytes that were ever allocated in a stream's pool, which other pipelines' streams of the same id share."""
    pool = simulator.stats().streams.get((0, stream.stream_id))
    return 0 if pool is None else pool.memory_stats["allocated_bytes.all.allocated"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.ranks == 1 and kind.trains])
def test_gradients_are_accumulated_around_any(name: str, simulated_accelerator: torch.device) -> None:
    kind = dataclasses.replace(KINDS[name], wrap=accumulating)
    seen = []
    for cls in (kind.theirs(), kind.ours()):
        with simulator.checked("random", 3, raise_on_report=False) as run:
            try:
                seen.append(kind.run(cls, simulated_accelerator, 8))
            except Exception as error:
                seen.append((type(error), str(error)))
    assert seen[1] == seen[0]
    assert not (of_batches(run.reports) if kind.lookup_races else run.reports)


# The names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(versions.PIPELINES))
def test_each_class_has_ours_or_says_since_when_torchrec_has_it(name: str) -> None:
    since = versions.PIPELINES[name][1]
    if name not in versions.available():
        with pytest.raises(AttributeError, match=f"it came with TorchRec {since}"):
            getattr(torchrec_prealloc, "Prealloc" + name)
        with pytest.raises(ImportError, match=f"has no {name}: it came with TorchRec {since}"):
            exec(f"from torchrec_prealloc import Prealloc{name}")
        assert not hasattr(torchrec_prealloc, "Prealloc" + name)
        assert not versions.at_least(since, versions.installed_version())
        return
    ours = getattr(torchrec_prealloc, "Prealloc" + name)
    assert issubclass(ours, versions.pipeline_class(name))
    assert (ours.__name__, ours.__module__) == ("Prealloc" + name, "torchrec_prealloc.pipelines")
    assert versions.at_least(since, versions.installed_version())


def test_no_pipeline_class_of_torchrec_is_missing_in_the_table() -> None:
    import importlib
    import pkgutil

    package = importlib.import_module(versions.PACKAGE)
    base = package.TrainPipeline
    found = set()
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{versions.PACKAGE}.{info.name}")
        classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)]
        found |= {cls.__name__ for cls in classes if cls.__module__ == module.__name__ and cls is not base}
    assert found == set(versions.available())


def test_a_name_that_is_nobodys_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'PreallocTrainPipelineSparseDst'"):
        torchrec_prealloc.PreallocTrainPipelineSparseDst  # noqa: B018
    with pytest.raises(AttributeError, match="knows no TorchRec pipeline Nothing"):
        versions.pipeline_class("Nothing")
