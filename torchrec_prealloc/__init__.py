"""Preallocated batches for TorchRec's train pipelines.

The names below are imported when they are first used: a command's `--help`, or the simulator, which has to be there
before anything asks for an accelerator, do not wait for TorchRec.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_prealloc.batch_types import BatchError, register_batch_type
    from torchrec_prealloc.config import ConfigError, PreallocConfig, add_prealloc_flags, build_pipeline
    from torchrec_prealloc.pipelines import (
        PipelineError,
        PreallocTrainPipelineBase,
        PreallocTrainPipelineSparseDist,
        prealloc_pipeline,
    )
    from torchrec_prealloc.transfer import Transfer, TransferStats, to_device

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "ConfigError",
    "PipelineError",
    "PreallocConfig",
    "PreallocTrainPipelineBase",
    "PreallocTrainPipelineSparseDist",
    "Transfer",
    "TransferStats",
    "add_prealloc_flags",
    "build_pipeline",
    "prealloc_pipeline",
    "register_batch_type",
    "to_device",
]

_MODULES = {
    "batch_types": ("BatchError", "register_batch_type"),
    "config": ("ConfigError", "PreallocConfig", "add_prealloc_flags", "build_pipeline"),
    "pipelines": (
        "PipelineError",
        "PreallocTrainPipelineBase",
        "PreallocTrainPipelineSparseDist",
        "prealloc_pipeline",
    ),
    "transfer": ("Transfer", "TransferStats", "to_device"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
