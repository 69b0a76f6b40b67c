"""Preallocated batches for TorchRec's train pipelines.

The names below are imported when they are first used: a command's `--help`, or the simulator, which has to be there
before anything asks for an accelerator, do not wait for TorchRec.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from torchrec_prealloc.versions import PIPELINES

if TYPE_CHECKING:
    from torchrec_prealloc.batch_types import BatchError, register_batch_type
    from torchrec_prealloc.checkpoint import CheckpointError, PinnedStager, as_numpy, async_save, save, train_state
    from torchrec_prealloc.codec import CodecError, dumps_all, loads_all
    from torchrec_prealloc.config import ConfigError, PreallocConfig, add_prealloc_flags, build_pipeline
    from torchrec_prealloc.doctor.explain import Explanation, explain
    from torchrec_prealloc.estimation.estimate import Estimate, EstimateError, estimate
    from torchrec_prealloc.launch import disable, enable
    from torchrec_prealloc.loader import PackedBatch, pack, packed
    from torchrec_prealloc.one_batch import to_device
    from torchrec_prealloc.own_copies import PreallocStage
    from torchrec_prealloc.pipelines import PipelineError, prealloc_pipeline
    from torchrec_prealloc.stats import TransferStats
    from torchrec_prealloc.stream import Decoder, Encoder, MissingError
    from torchrec_prealloc.to_host import HostCopy, ToHost, to_pinned_host
    from torchrec_prealloc.transfer import Transfer

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CheckpointError",
    "CodecError",
    "ConfigError",
    "Decoder",
    "Encoder",
    "Estimate",
    "EstimateError",
    "Explanation",
    "HostCopy",
    "MissingError",
    "PackedBatch",
    "PinnedStager",
    "PipelineError",
    "PreallocConfig",
    "PreallocStage",
    "ToHost",
    "Transfer",
    "TransferStats",
    "add_prealloc_flags",
    "as_numpy",
    "async_save",
    "build_pipeline",
    "disable",
    "dumps_all",
    "enable",
    "estimate",
    "explain",
    "loads_all",
    "pack",
    "packed",
    "prealloc_pipeline",
    "register_batch_type",
    "save",
    "to_device",
    "to_pinned_host",
    "train_state",
]

_MODULES = {
    "batch_types": ("BatchError", "register_batch_type"),
    "checkpoint": ("CheckpointError", "PinnedStager", "as_numpy", "async_save", "save", "train_state"),
    "codec": ("CodecError", "dumps_all", "loads_all"),
    "config": ("ConfigError", "PreallocConfig", "add_prealloc_flags", "build_pipeline"),
    "doctor.explain": ("Explanation", "explain"),
    "estimation.estimate": ("Estimate", "EstimateError", "estimate"),
    "loader": ("PackedBatch", "pack", "packed"),
    "launch": ("disable", "enable"),
    "own_copies": ("PreallocStage",),
    "pipelines": ("PipelineError", "prealloc_pipeline"),
    "stream": ("Decoder", "Encoder", "MissingError"),
    "to_host": ("HostCopy", "ToHost", "to_pinned_host"),
    "one_batch": ("to_device",),
    "stats": ("TransferStats",),
    "transfer": ("Transfer",),
}


_PIPELINES = tuple("Prealloc" + name for name in PIPELINES)
"""Not in `__all__`: which of them there are depends on the installed TorchRec."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if name in _PIPELINES:
        try:
            return getattr(importlib.import_module(f"{__name__}.pipelines"), name)
        except AttributeError as absent:  # from the installed TorchRec
            raise importlib.import_module(f"{__name__}.versions").for_statement(absent, sys._getframe(1)) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_PIPELINES]


if os.environ.get("TORCHREC_PREALLOC") == "1":
    importlib.import_module(f"{__name__}.launch").arm()
