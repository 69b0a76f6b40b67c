"""`StagedTrainPipeline`: the stage that copies is either TorchRec's function, replaced by our pipeline, or ours."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.train_pipeline import StagedTrainPipeline
from torchrec.distributed.train_pipeline.utils import get_h2d_func

try:
    from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
except ImportError:  # until TorchRec 1.2
    from torchrec.distributed.train_pipeline.utils import PipelineStage

from torchrec_prealloc import PreallocStage, prealloc_pipeline


def replaced(device: torch.device) -> Any:
    """Our class: stages as they are, `get_h2d_func` in any of them is replaced."""
    stream = torch.get_device_module(device).Stream()
    stages = [PipelineStage("copy", lambda batch: get_h2d_func(batch, device), stream)]
    return prealloc_pipeline(StagedTrainPipeline)(stages)


def with_our_stage(device: torch.device) -> Any:
    """TorchRec's class, with our runnable."""
    stream = torch.get_device_module(device).Stream()
    return StagedTrainPipeline([PipelineStage("copy", PreallocStage(device), stream)])
