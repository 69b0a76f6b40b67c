"""Preallocated batches for TorchRec's train pipelines.

The names below are imported when they are first used: a command's `--help`, or the simulator, which has to be there
before anything asks for an accelerator, do not wait for TorchRec.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchrec_prealloc.versions import PIPELINES

if TYPE_CHECKING:
    from torchrec_prealloc.batch_types import BatchError, register_batch_type
    from torchrec_prealloc.config import ConfigError, PreallocConfig, add_prealloc_flags, build_pipeline
    from torchrec_prealloc.own_copies import PreallocStage
    from torchrec_prealloc.pipelines import PipelineError, prealloc_pipeline
    from torchrec_prealloc.transfer import Transfer, TransferStats, to_device

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "ConfigError",
    "PipelineError",
    "PreallocConfig",
    "PreallocStage",
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
    "own_copies": ("PreallocStage",),
    "pipelines": ("PipelineError", "prealloc_pipeline"),
    "transfer": ("Transfer", "TransferStats", "to_device"),
}


_PIPELINES = tuple("Prealloc" + name for name in PIPELINES)
"""Not in `__all__`: which of them there are depends on the installed TorchRec."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if name in _PIPELINES:
        return getattr(importlib.import_module(f"{__name__}.pipelines"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_PIPELINES]
