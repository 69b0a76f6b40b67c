"""The three ways of copying batches to the device, by the names of the benchmark that first compared them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchrec.datasets.utils import Batch

from torchrec_prealloc.config import ConfigError, PreallocConfig, build_pipeline, load_config, pipeline_class
from torchrec_prealloc.errors import CommandError

BLOCKING = "blocking_copy"
NON_BLOCKING = "non_blocking_copy"
PREALLOCATED = "preallocated_non_blocking_copy"

OURS: Mapping[str, str] = {
    "base": "torchrec_prealloc.PreallocTrainPipelineBase",
    "sparse_dist": "torchrec_prealloc.PreallocTrainPipelineSparseDist",
}
_PREFIX = "Prealloc"
_THEIRS = "torchrec.distributed.train_pipeline.train_pipelines"

Pipeline = Any
BuildPipeline = Callable[[torch.nn.Module, Any, torch.device], Pipeline]
Feed = Callable[[Iterator[Batch], torch.device], Iterator[Batch]]


@dataclasses.dataclass(frozen=True)
class Way:
    """How batches reach the device.

    Attributes:
        name: one of the three above
        build: makes the pipeline from a model, an optimizer and a device
        feed: what happens to batches before the pipeline gets them
    """

    name: str
    build: BuildPipeline
    feed: Feed


def read_section(path: str | Path) -> dict[str, Any]:
    """The `pipeline` section of a YAML file.

    Raises:
        CommandError: it cannot be read, or has no such section.
    """
    try:
        return dict(load_config(path)["pipeline"])
    except ConfigError as error:
        raise CommandError(str(error)) from error


def three_ways(section: Mapping[str, Any]) -> tuple[Way, Way, Way]:
    """The ways to compare, slowest first.

    Args:
        section: the `pipeline` section of a config, whose `_target_` is one of our pipelines. The other two ways use
            TorchRec's pipeline of that name without "Prealloc", with the same options except `prealloc`.

    Raises:
        CommandError: `_target_` is none of our pipelines, TorchRec has no such pipeline, or `prealloc` is wrong.
            Other options are checked when the first pipeline is built.
    """
    target = str(section.get("_target_", ""))
    name = target.rpartition(".")[2]
    if not name.startswith(_PREFIX):
        raise CommandError(
            f"pipeline._target_: {target or 'missing'}; the demo compares one of our pipelines with TorchRec's, "
            f"name one of {', '.join(OURS.values())}"
        )
    theirs = {key: value for key, value in section.items() if key != "prealloc"}
    theirs["_target_"] = f"{_THEIRS}.{name.removeprefix(_PREFIX)}"
    try:
        pipeline_class(section)
        pipeline_class(theirs)
        # Ours comes last, and nobody should wait for two runs to learn of a typing error.
        PreallocConfig.of(section.get("prealloc"))
    except ConfigError as error:
        raise CommandError(str(error)) from error
    return (
        Way(BLOCKING, _builder(theirs), _move_first),
        Way(NON_BLOCKING, _builder(theirs), _as_they_are),
        Way(PREALLOCATED, _builder(section), _as_they_are),
    )


def _builder(section: Mapping[str, Any]) -> BuildPipeline:
    def build(model: torch.nn.Module, optimizer: Any, device: torch.device) -> Pipeline:
        try:
            return build_pipeline({"pipeline": dict(section)}, model, optimizer, device)
        except ConfigError as error:
            raise CommandError(str(error)) from error

    return build


def _move_first(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Blocking copies on the current stream, when the pipeline asks for a batch; its own copy then finds it there."""
    for batch in batches:
        yield batch.to(device)


def _as_they_are(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    return batches
