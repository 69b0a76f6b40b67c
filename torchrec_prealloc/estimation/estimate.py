"""What a batch costs in a pipeline, copied in three ways, by running that pipeline for a few steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data._utils.pin_memory import pin_memory

from torchrec_prealloc import simulator
from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.bench.table import Table
from torchrec_prealloc.errors import CommandError
from torchrec_prealloc.estimation.cuda_names import cuda_means
from torchrec_prealloc.estimation.footprint import COLUMNS, MIB, Footprint, footprint, one_rank
from torchrec_prealloc.estimation.stand_in import stand_in
from torchrec_prealloc.ways import Way, ways_of

STEPS = 12

Batches = Callable[[], Iterable[Any]]
MakeModel = Callable[[torch.device], tuple[nn.Module, Any]]


class EstimateError(CommandError):
    """A pipeline, a batch or a model does not run, or there is no simulator. The message says which, and why."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the three ways hold of a device's memory.

    Attributes:
        pipeline: name of the class
        ways: by name, slowest first
        batch_bytes: of the largest batch, on the device's side of its copy
        steps: that were run
    """

    pipeline: str
    ways: Mapping[str, Footprint]
    batch_bytes: int
    steps: int

    @property
    def on(self) -> str:
        """ "simulator" or "GPU"."""
        return next(iter(self.ways.values())).on

    def table(self) -> Table:
        """The ways as rows."""
        rows = (footprint.row(name, self.batch_bytes) for name, footprint in self.ways.items())
        return Table("way", COLUMNS, tuple(rows))

    def __str__(self) -> str:
        marked = "simulated" if self.on == "simulator" else "measured on a GPU"
        what = f"batches of up to {self.batch_bytes / MIB:,.1f} MiB, {self.steps} steps"
        return f"{self.pipeline}, {what} ({marked})\n\n{self.table().text()}"


def estimate(
    pipeline_class: type,
    batch: Any,
    *,
    model: MakeModel = stand_in,
    options: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    ahead: bool = True,
    device: torch.device | None = None,
) -> Estimate:
    """What batches cost in a pipeline, under a blocking, a non-blocking and a preallocated copy.

    The pipeline class itself is run for `steps` steps in each way: TorchRec's for the first two, ours for the third.
    What it holds then is read from the device's caching allocator, per stream; the memory of the model is not counted.
    Nothing is scaled: the simulator keeps a device's memory on the host, which needs room for some batches.

    Call it before the process' first backward pass: autograd does not learn of the simulator later.

    Args:
        pipeline_class: a pipeline class of TorchRec's or ours, or a subclass.
        batch: a host batch, which each step gets; or, for sizes that change from step to step, a function without
            arguments that gives such batches, called once for each way. They are pinned as a DataLoader pins them.
        model: makes the model and the optimizer on a device; by default a model that reads the batch and has no
            tables. Name your own, sharded one to count its activations and its input dist. A process group of one
            rank is there.
        options: of the pipeline's constructor; `prealloc` goes to ours.
        steps: how many; a pipeline's first two or three fill it.
        ahead: the host is one step ahead of the device, as where nothing makes it wait. False: it waits for each step,
            as where the trainer reads each loss; memory that `record_stream` holds back then returns a step earlier.
        device: a simulated or a CUDA device; by default the simulator's.

    Raises:
        EstimateError: there is no simulator (the message has the remedy), or a way does not run.
        CommandError: an option is wrong, or nothing in the class copies batches.
    """
    ways = ways_of(pipeline_class, options)
    device = simulated_device() if device is None else device
    sizes: list[int] = []
    found = {}
    for way in ways:
        try:
            with one_rank():
                batches = _pinned(_stream(batch), sizes)
                found[way.name] = run_way(way, model, batches, device, steps, ahead)
        except CommandError:
            raise
        except Exception as error:  # of the pipeline, the model, or what makes the batches
            said = " ".join(str(error).split())
            raise EstimateError(
                f"{way.name} of {pipeline_class.__name__} does not run: {type(error).__name__}: {said}"
            ) from error
    if not sizes:
        raise EstimateError(f"no batch: {batch!r} gave none")
    return Estimate(pipeline_class.__name__, found, max(sizes), steps)


def run_way(
    way: Way,
    model: MakeModel,
    batches: Iterator[Any],
    device: torch.device,
    steps: int,
    ahead: bool = True,
    strict: bool = False,
    count_model: bool = False,
) -> Footprint:
    """What one way holds in `steps` steps of a fresh model and pipeline. `torch.compile` does nothing here.

    Args:
        way, model, device, steps, ahead: as above.
        batches: host batches.
        strict: on the simulator, raise `RaceError` where accesses are not ordered.
        count_model: the memory of the model counts, too.
    """
    fed = way.feed(batches, device)

    @functools.cache
    def pipeline() -> Any:
        return way.build(*model(device), device)

    # No compiler knows the simulated device, and some of TorchRec's classes name CUDA's streams.
    with torch.compiler.set_stance("force_eager"), cuda_means(device):
        if not count_model:
            pipeline()
        found = footprint(lambda: pipeline().progress(fed), device, steps, ahead, strict)
        if hasattr(pipeline(), "reset"):  # an eval pipeline's thread would load on; TorchRec 1.2 has none
            pipeline().reset()
    return found


def simulated_device(say: Callable[[str], object] = lambda text: None) -> torch.device:
    """The simulator's device; builds the simulator where that was not done yet.

    Args:
        say: gets one line where it has to be built first.

    Raises:
        EstimateError: it cannot be built here; the message has the remedy.
    """
    usable, reason = simulator.available()
    if not usable:
        raise EstimateError(f"no simulator: {reason}")
    if not simulator.built():
        say("building the simulator (once; about half a minute) ...")
    try:
        return simulator.device()
    except simulator.BuildError as error:
        raise EstimateError(f"no simulator: {error}") from error


def _stream(batch: Any) -> Iterator[Any]:
    if not callable(batch) or isinstance(batch, nn.Module):
        return itertools.repeat(batch)
    return iter(batch())


def _pinned(batches: Iterator[Any], sizes: list[int]) -> Iterator[Any]:
    last, pinned = None, None
    for batch in batches:
        if batch is not last:
            last, pinned = batch, pin_memory(batch)
            sizes.append(sum(tensor.nbytes for tensor in tensors_in(batch)))
        yield pinned
