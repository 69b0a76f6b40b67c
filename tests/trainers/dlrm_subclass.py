"""As `dlrm.py`, with a pipeline of its own: a subclass that copies by TorchRec's function, and counts."""

from __future__ import annotations

from typing import Any

from dlrm import parse_args, train
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _to_device


class CountingPipeline(TrainPipelineSparseDist):  # type: ignore[type-arg]
    def __init__(self, model: Any, optimizer: Any, device: Any, execute_all_batches: bool = False) -> None:
        super().__init__(model, optimizer, device, execute_all_batches)
        self.copied = 0

    def copy_batch_to_gpu(self, dataloader_iter: Any) -> Any:
        context = self._create_context() if hasattr(self, "_create_context") else None
        with self._stream_context(self._memcpy_stream):
            batch = self._next_batch(dataloader_iter)
            if batch is not None:
                batch = _to_device(batch, self._device, non_blocking=True)
                self.copied += 1
        return batch, context

    def progress(self, dataloader_iter: Any) -> Any:
        output = super().progress(dataloader_iter)
        assert self.copied > 0
        return output


if __name__ == "__main__":
    train(CountingPipeline, parse_args())
