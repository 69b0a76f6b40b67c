"""A factory as TorchEasyRec has one: the trainer asks it for a pipeline; its own subclass is preallocated too."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from torchrec_prealloc import prealloc_pipeline


class CheckedPipeline(TrainPipelineSparseDist):  # type: ignore[type-arg]
    """The trainer's own: it looks at each batch before it is copied."""

    def __init__(self, *args: Any, check: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._check = check

    def _next_batch(self, dataloader_iter: Any) -> Any:
        batch = super()._next_batch(dataloader_iter)
        if batch is not None and self._check is not None:
            self._check(batch)
        return batch


def create_train_pipeline(
    model: Any, optimizer: Any, device: Any, sharded: bool, preallocate: bool, **options: Any
) -> Any:
    """The pipeline that suits the model; with `preallocate` ours of the same class."""
    cls: Any = CheckedPipeline if sharded else TrainPipelineBase
    if preallocate:
        cls = prealloc_pipeline(cls)
    return cls(model, optimizer, device, **options)
