"""Preallocated batches for TorchRec's train pipelines."""

from torchrec_prealloc.batch import BatchError, register_batch_type
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
