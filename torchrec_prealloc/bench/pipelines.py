"""Every pipeline class of the installed TorchRec, its own and ours: steps a second, and a device's memory.

TorchRec's benchmark of its pipelines runs on several GPUs; here is what one machine can say. The model is a DLRM with
sharded tables in one rank. On a CPU, TorchRec's and ours take turns, so that both see the same machine; there TorchRec
copies nothing, and ours copies all the same. Memory is that of the simulator, where both copy. With a GPU both are
measured there, for the classes that its FBGEMM has operators for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchrec_prealloc import third_parties, versions
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.estimation.description import Description
from torchrec_prealloc.estimation.estimate import run_way, simulated_device
from torchrec_prealloc.estimation.footprint import MIB, one_rank
from torchrec_prealloc.ways import Way, ways_of

SUMMARY = "TorchRec's pipelines and ours: steps/s, and peak reserved memory"

COLUMNS = (
    Column("theirs", "TorchRec's", digits=1),
    Column("ours", "ours", digits=1),
    Column("ratio", "ours to baseline", digits=2),
    Column("ratio_min", "ratio min", digits=2),
    Column("ratio_max", "ratio max", digits=2),
    Column("baseline", "baseline"),
    Column("on", "measured on"),
)

PICTURE = ("ratio",)

SPEED, MEMORY = "steps/s", "peak reserved, MiB"
THEIRS = "TorchRec's own"

VOCABULARY = {"user": 1000, "item": 1000}
DENSE = 256
SPEED_BATCH = Description((2048, 2048), {"user": (1, 1), "item": (0, 10)}, DENSE)
MEMORY_BATCH = Description((9216, 12288), {"user": (1, 1), "item": (0, 10)}, DENSE)
"""Of up to 12 MiB, so that the large ones have segments of their own; its size wobbles."""

MEMORY_STEPS = 10
TURNS, STEPS_A_TURN = 7, 8
SLACK_MIB = 14
"""What ours may reserve more: the largest batch and its rounding. The order of requests decides what fits where."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a class is run.

    Attributes:
        options: of its constructor.
        trains: whether it trains; the others evaluate.
        on_cpu: whether its speed is measured on a CPU: not where it asks for streams that a CPU lacks, or compiles.
        not_run: why it is not run here.
    """

    options: Callable[[], dict[str, Any]] = dict
    trains: bool = True
    on_cpu: bool = True
    not_run: str = ""


def _never_compiled() -> dict[str, Any]:
    from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig

    return {"compile_configs": TorchCompileConfig(compile_on_iter=1 << 30)}


def _current() -> dict[str, Any]:
    return {"emb_lookup_stream": "current"}


def _at_a_site() -> dict[str, Any]:
    return {"site_fqn": "model.over_arch"}


_TWO = "needs two ranks"
KINDS: Mapping[str, Kind] = {
    "TrainPipelineBase": Kind(),
    "TrainPipelinePT2": Kind(_never_compiled),
    "TrainPipelineSparseDist": Kind(),
    "TrainPipelineSparseDistLite": Kind(),
    "TrainPipelineSparseDistT": Kind(),
    "TrainPipelineSemiSync": Kind(on_cpu=False),
    "TrainPipelineFusedSparseDist": Kind(_current, on_cpu=False),
    "PrefetchTrainPipelineSparseDist": Kind(on_cpu=False),
    "TrainEvalHybridPipelineBase": Kind(),
    "EvalPipelineSparseDist": Kind(trains=False),
    "EvalPipelineFusedSparseDist": Kind(_current, trains=False, on_cpu=False),
    "TrainPipelineSparseDistEmbStash": Kind(_at_a_site, on_cpu=False),
    "TrainPipelinePrefetchEMS": Kind(_at_a_site, on_cpu=False),
    "TrainPipelinePEC": Kind(on_cpu=False),
    "TrainPipelineSparseDistCompAutograd": Kind(on_cpu=False),
    "EvalPipelineCPUSparse": Kind(not_run="needs its own batches"),
    "StagedTrainPipeline": Kind(not_run="has no model"),
    "TrainPipelineSparseDistBwdOpt": Kind(not_run=_TWO),
    "TrainPipelineSparseDistOptStash": Kind(not_run=_TWO),
}
"""Of `versions.PIPELINES`."""


def missed(rows: Iterable[Row]) -> list[str]:
    """Ours reserves no more than TorchRec's, up to one batch."""
    return [
        f"{row.name}: ours reserves {row.figures['ours']} MiB, TorchRec's {row.figures['theirs']}"
        for row in rows
        if row.name.endswith(MEMORY)
        and float(row.figures["ours"] or 0) > float(row.figures["theirs"] or 0) + SLACK_MIB
    ]


def run(full: bool = False) -> Iterator[Row]:
    """For each class a row of speed, where it runs on the device, and one of memory; or one that says why not.

    Args:
        full: three times as many steps.

    Raises:
        CommandError: there is no GPU, and the simulator cannot be built.
    """
    third_parties.silence()
    gpu = torch.cuda.is_available()
    # The simulator first, whichever row is next: autograd does not learn of it after a backward pass.
    memory_device = torch.device("cuda", 0) if gpu else simulated_device()
    speed_device = memory_device if gpu else torch.device("cpu")
    scale = 3 if full else 1
    with one_rank(), _one_thread():
        for name, cls in versions.available().items():
            kind = KINDS.get(name, Kind(not_run="not known here"))
            if kind.not_run:
                yield Row(name, {"baseline": THEIRS, "on": f"not run: {kind.not_run}"})
                continue
            try:
                _, theirs, ours = ways_of(cls, kind.options())
                if gpu or kind.on_cpu:
                    yield _speed(name, kind, theirs, ours, speed_device, scale)
                yield _memory(name, kind, theirs, ours, memory_device, scale)
            # TorchRec's class, with this torch or on this device
            except (RuntimeError, AttributeError, AssertionError) as error:
                reason = str(error).strip().partition("\n")[0][:60]
                yield Row(name, {"baseline": THEIRS, "on": f"not run: {reason}"})


def _speed(name: str, kind: Kind, theirs: Way, ours: Way, device: torch.device, scale: int) -> Row:
    made = list(itertools.islice(SPEED_BATCH.batches(), 4))
    if device.type == "cuda":
        made = [batch.pin_memory() for batch in made]
    turns, steps = TURNS * scale, STEPS_A_TURN
    pipelines = []
    for way in (theirs, ours):
        batches: Iterator[Any] = itertools.islice(itertools.cycle(made), (turns + 1) * steps)
        pipelines.append((way.build(*_model(kind)(device), device), way.feed(batches, device)))
    speeds: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for number in (0, 1) if turn % 2 else (1, 0):
            pipeline, batches = pipelines[number]
            start = time.perf_counter()
            for _ in range(steps):
                pipeline.progress(batches)
            _synchronize(device)
            if turn:  # the first is a warm-up
                speeds[number].append(steps / (time.perf_counter() - start))
    for pipeline, _ in pipelines:
        if hasattr(pipeline, "reset"):
            pipeline.reset()
    ratios = [mine / other for other, mine in zip(*speeds, strict=True)]
    figures = {
        "theirs": statistics.median(speeds[0]),
        "ours": statistics.median(speeds[1]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "baseline": THEIRS,
        "on": "GPU" if device.type == "cuda" else "CPU",
    }
    return Row(f"{name}: {SPEED}", figures)


def _memory(name: str, kind: Kind, theirs: Way, ours: Way, device: torch.device, scale: int) -> Row:
    steps = MEMORY_STEPS * scale
    made = [batch.pin_memory() for batch in itertools.islice(MEMORY_BATCH.batches(), steps)]
    held = [run_way(way, _model(kind), itertools.cycle(made), device, steps) for way in (theirs, ours)]
    first, second = (one.reserved / MIB for one in held)
    figures = {
        "theirs": first,
        "ours": second,
        "ratio": second / first if first else None,
        "baseline": THEIRS,
        "on": held[0].on,
    }
    return Row(f"{name}: {MEMORY}", figures)


def _model(kind: Kind) -> Callable[[torch.device], tuple[Any, Any]]:
    from torchrec_prealloc.demo.model import build_model

    def build(device: torch.device) -> tuple[Any, Any]:
        model, optimizer = build_model(VOCABULARY, DENSE, device, seed=0)
        return model.train(kind.trains), optimizer

    return build


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread an operator: a pipeline that computes in two threads would have two teams that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
