"""TorchRec's pipeline classes, and the TorchRec versions that have them."""

from __future__ import annotations

import dis
import importlib
from types import FrameType
from typing import Any

PACKAGE = "torchrec.distributed.train_pipeline"

PIPELINES: dict[str, tuple[str, str]] = {
    "TrainPipelineBase": ("train_pipelines", "1.2"),
    "TrainPipelinePT2": ("train_pipelines", "1.2"),
    "TrainPipelineSparseDist": ("train_pipelines", "1.2"),
    "TrainPipelineSemiSync": ("train_pipelines", "1.2"),
    "PrefetchTrainPipelineSparseDist": ("train_pipelines", "1.2"),
    "EvalPipelineSparseDist": ("train_pipelines", "1.2"),
    "StagedTrainPipeline": ("train_pipelines", "1.2"),
    "TrainPipelineSparseDistCompAutograd": ("train_pipelines", "1.2"),
    "TrainPipelineFusedSparseDist": ("train_pipelines", "1.3"),
    "TrainPipelineSparseDistLite": ("train_pipelines", "1.6"),
    "EvalPipelineFusedSparseDist": ("train_pipelines", "1.6"),
    "TrainEvalHybridPipelineBase": ("experimental_pipelines", "1.6"),
    "EvalPipelineCPUSparse": ("experimental_pipelines", "1.6"),
    "TrainPipelineSparseDistT": ("experimental_pipelines", "1.6"),
    "TrainPipelineSparseDistBwdOpt": ("experimental_pipelines", "1.6"),
    "TrainPipelineSparseDistOptStash": ("experimental_pipelines", "1.6"),
    "TrainPipelineSparseDistEmbStash": ("experimental_pipelines", "1.6"),
    "TrainPipelinePrefetchEMS": ("experimental_pipelines", "1.7"),
    "TrainPipelinePEC": ("pec_train_pipeline", "1.9"),
}
"""For each class its module in `PACKAGE`, and the first TorchRec that has it."""


def pipeline_class(name: str) -> type:
    """One of TorchRec's pipeline classes.

    Raises:
        AttributeError: there is none of that name, or not in the TorchRec that is installed.
    """
    if name not in PIPELINES:
        raise AttributeError(f"torchrec_prealloc knows no TorchRec pipeline {name}; there are: {', '.join(PIPELINES)}")
    module, since = PIPELINES[name]
    try:
        cls: Any = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    except (ImportError, AttributeError) as error:
        installed = installed_version()
        problem = f"TorchRec {installed} has no {name}: it came with TorchRec {since}"
        if at_least(since, installed):
            problem = f"TorchRec {installed} should have {name}, but importing it failed: {error}"
        raise AttributeError(problem) from error
    found: type = cls
    return found


def for_statement(absent: AttributeError, frame: FrameType) -> AttributeError | ImportError:
    """`absent` for an expression; what tells its reason too where `frame` is at a `from ... import name`.

    Python turns an AttributeError there into "cannot import name", whatever its text; an ImportError passes.
    """
    if frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]:
        return ImportError(str(absent))
    return absent


def available() -> dict[str, type]:
    """The pipeline classes of the installed TorchRec."""
    found = {}
    for name in PIPELINES:
        try:
            found[name] = pipeline_class(name)
        except AttributeError:
            continue
    return found


def installed_version() -> str:
    """TorchRec's version as it says it itself: its distribution may be another than the one that is imported."""
    import torchrec

    return str(getattr(torchrec, "__version__", "of unknown version"))


def at_least(wanted: str, installed: str) -> bool:
    """Whether `installed` is `wanted` or later, by their first two numbers; False if it has none."""
    numbers = [part for part in installed.split(".")[:2] if part.isdigit()]
    return len(numbers) == 2 and [int(part) for part in numbers] >= [int(part) for part in wanted.split(".")]
