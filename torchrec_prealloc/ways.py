"""The three ways of copying batches to the device, by the names of the benchmark that first compared them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchrec_prealloc.config import ConfigError, PreallocConfig, load_config, make_pipeline, pipeline_class
from torchrec_prealloc.errors import CommandError
from torchrec_prealloc.pipelines import PipelineError, PreallocPipeline, _rebinding, prealloc_pipeline

BLOCKING = "blocking_copy"
NON_BLOCKING = "non_blocking_copy"
PREALLOCATED = "preallocated_non_blocking_copy"

OURS: Mapping[str, str] = {
    "base": "torchrec_prealloc.PreallocTrainPipelineBase",
    "sparse_dist": "torchrec_prealloc.PreallocTrainPipelineSparseDist",
}
"""Short names of the two usual pipelines."""

Pipeline = Any
BuildPipeline = Callable[[torch.nn.Module, Any, torch.device], Pipeline]
Feed = Callable[[Iterator[Any], torch.device], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class Way:
    """How batches reach the device.

    Attributes:
        name: one of the three above
        build: makes the pipeline from a model, an optimizer and a device
        feed: what happens to batches before the pipeline gets them; call it where the pipeline's main stream is current
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
        section: the `pipeline` section of a config, whose `_target_` is a pipeline class of TorchRec's or ours, or a
            subclass of one. The first two ways use TorchRec's, the third ours; all have the same options, except
            `prealloc`, which only ours has.

    Raises:
        CommandError: `_target_` is missing, or no such class, or `prealloc` is wrong. Other options are checked when
            the first pipeline is built.
    """
    options = {str(key): value for key, value in section.items() if key != "_target_"}
    try:
        return ways_of(pipeline_class(section), options)
    except ConfigError as error:
        raise CommandError(str(error)) from error


def ways_of(cls: type, options: Mapping[str, Any] | None = None) -> tuple[Way, Way, Way]:
    """The ways to compare with a pipeline class, TorchRec's or ours, or a subclass of one.

    Args:
        cls: the class.
        options: of its constructor; `prealloc`, if there, goes to ours alone.

    Raises:
        CommandError: nothing in the class copies batches, or `prealloc` is wrong.
    """
    given = dict(options or {})
    try:
        # Ours comes last, and nobody should wait for two runs to learn of a typing error.
        prealloc = PreallocConfig.of(given.pop("prealloc", None))
        theirs, ours = _pair(cls)
    except (ConfigError, PipelineError) as error:
        raise CommandError(str(error)) from error
    own = {**given, "prealloc": prealloc}
    if issubclass(theirs, PreallocPipeline):
        given["prealloc"] = PreallocConfig(enabled=False)
    return (
        Way(BLOCKING, _builder(theirs, given), _move_first),
        Way(NON_BLOCKING, _builder(theirs, given), _as_they_are),
        Way(PREALLOCATED, _builder(ours, own), _as_they_are),
    )


def _pair(cls: Any) -> tuple[Any, Any]:
    """TorchRec's class (or the trainer's own), and ours. A trainer's subclass of ours is both: it can be switched."""
    if not issubclass(cls, PreallocPipeline):
        return cls, prealloc_pipeline(cls)
    for base in cls.__mro__:
        if issubclass(base, PreallocPipeline) or base in _rebinding.made:
            continue
        with contextlib.suppress(PipelineError):
            if prealloc_pipeline(base) is cls:
                return base, cls
    return cls, cls


def _builder(cls: type, options: Mapping[str, Any]) -> BuildPipeline:
    def build(model: torch.nn.Module, optimizer: Any, device: torch.device) -> Pipeline:
        try:
            return make_pipeline(cls, options, model, optimizer, device)
        except ConfigError as error:
            raise CommandError(str(error)) from error

    return build


def _move_first(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Blocking copies into memory of the main stream, when the pipeline asks for a batch; its own copy then finds it
    there. The main stream is named, since some of TorchRec's pipelines ask while their copy stream is current.
    """
    module = torch.get_device_module(device)
    main = module.current_stream()

    def move() -> Iterator[Any]:
        for batch in batches:
            with module.stream(main):
                moved = batch.to(device)
            yield moved

    return move()


def _as_they_are(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    return batches
