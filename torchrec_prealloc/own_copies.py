"""Pipelines that copy in ways of their own, not by calling TorchRec's functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.pipelines import PreallocPipeline, _active, _rebinding
from torchrec_prealloc.stats import TransferStats
from torchrec_prealloc.transfer import TransferEngine
from torchrec_prealloc.versions import available


class PreallocStages(PreallocPipeline):
    """`StagedTrainPipeline`: the stage that runs `get_h2d_func` copies in our way.

    The runnable may be that function itself, a `functools.partial` of it, or a function that calls it by name.
    """

    def __init__(self, pipeline_stages: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        stages = [dataclasses.replace(stage, runnable=_rebinding.callable(stage.runnable)) for stage in pipeline_stages]
        super().__init__(stages, *args, **kwargs)

    def _place(self) -> tuple[torch.device, Any]:
        pipeline: Any = self
        stream = pipeline._pipeline_stages[0].stream
        return stream.device, stream

    def _owner_stream(self) -> Any:
        pipeline: Any = self
        return pipeline._compute_stream

    def progress(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super().progress(dataloader_iter, *args, **kwargs)
        if batch is not None and self.prealloc.enabled:
            pipeline: Any = self
            with pipeline._stream_context(pipeline._compute_stream):
                self._engine.wait(batch)
        return batch


class PreallocStage:
    """A stage's runnable in place of TorchRec's `get_h2d_func`, for TorchRec's own `StagedTrainPipeline`.

    Args:
        device: the target.
        compute_stream: the stream that will use the batches, and own their memory; by default the one that is current
            now, as in the pipeline.
        prealloc: options.
    """

    def __init__(self, device: torch.device | str, compute_stream: Any = None, prealloc: Any = None) -> None:
        self._engine = TransferEngine(torch.device(device), None, PreallocConfig.of(prealloc))
        self._owner = compute_stream if compute_stream is not None else self._engine.current_stream()

    @property
    def transfer_stats(self) -> TransferStats:
        """Batches, bytes, copies and device allocations so far."""
        return self._engine.stats

    def __call__(self, batch: Any) -> Any:
        """The device's batch, for streams that follow the stage's."""
        transfer = self._engine.start(batch, self._owner)
        self._engine.follow(transfer)
        return transfer.batch


class _DenseOnly(tuple[Any]):
    """Moves what a batch's `to(dense_only=True)` moves.

    A tuple, so that its fields are not walked in place of it: the batch has another `to`, which moves more.
    """

    def to(self, device: torch.device, non_blocking: bool = False) -> _DenseOnly:
        (batch,) = self
        return _DenseOnly((batch.to(device=device, non_blocking=non_blocking, dense_only=True),))


class PreallocCPUSparse(PreallocPipeline):
    """`EvalPipelineCPUSparse`: looked-up embeddings and the batch's dense tensors travel together."""

    def copy_data_to_gpu(self, batch: Any, context: Any) -> Any:
        """The batch with its dense tensors on the device; the embeddings are put into `context`."""
        pipeline: Any = self
        if not self.prealloc.enabled:
            theirs: Any = super()
            return theirs.copy_data_to_gpu(batch, context)
        embeddings = {name: looked_up.wait() for name, looked_up in context.embedding_a2a_requests.items()}
        transfer = self._engine.start((_DenseOnly((batch,)), embeddings), _active.stack[-1].owner)
        if pipeline._memcpy_stream is None:
            transfer.wait()  # TorchRec waits for that stream
        (moved_batch,), moved = transfer.batch
        context.gpu_embedding_outputs.update(moved)
        return moved_batch

    def _get_or_alloc_pinned(self, name: str, tensor: Tensor) -> Tensor:
        # TorchRec has one buffer for each module, and writes the next embeddings into it while these are copied.
        # Memory that torch has pinned is not used again before its copies have run.
        return torch.empty_like(tensor, pin_memory=torch.accelerator.is_available())


def _kinds() -> dict[type, type[PreallocPipeline]]:
    ours = {"StagedTrainPipeline": PreallocStages, "EvalPipelineCPUSparse": PreallocCPUSparse}
    return {cls: ours[name] for name, cls in available().items() if name in ours}


KINDS: dict[type, type[PreallocPipeline]] = _kinds()
"""For a class of TorchRec's (and subclasses of it) what it has in place of `PreallocPipeline`."""
