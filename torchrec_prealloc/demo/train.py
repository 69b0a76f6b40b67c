"""One run: a fresh model, trained with batches that reach the device in one way, and tested."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torchmetrics.functional import auroc
from tqdm import tqdm

from torchrec_prealloc.bench.counting import count_to
from torchrec_prealloc.demo.batches import TestBatches, TrainBatches
from torchrec_prealloc.demo.measure import Peaks, watch_memory
from torchrec_prealloc.demo.model import build_model, weights_digest
from torchrec_prealloc.demo.process_group import gather
from torchrec_prealloc.demo.samples import DENSE_FEATURES
from torchrec_prealloc.ways import Pipeline, Way

WARM_UP_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """What one way gave on this rank.

    Attributes:
        way: its name
        first_weights: digest of the weights before the first step
        losses: of each step, float32 [steps], on the host
        steps_per_second: of training, after the first steps, until the device has finished
        copies: host-to-device copies for one batch
        allocations: device allocations for one batch
        peaks: of memory during training
        auc: area under the ROC curve on the test samples of all ranks
    """

    way: str
    first_weights: str
    losses: torch.Tensor
    steps_per_second: float
    copies: float
    allocations: float
    peaks: Peaks
    auc: float


def run_way(way: Way, train: TrainBatches, test: TestBatches, device: torch.device) -> Run:
    """Train a model from scratch on `train` in this way, then test it.

    Every call with the same batches starts from the same weights and sees the same batches in the same order; only
    the way of copying differs. All ranks call it together.
    """
    with watch_memory(device) as peaks:
        model, optimizer = build_model(train.samples.vocabulary, len(DENSE_FEATURES), device, train.seed)
        first_weights = weights_digest(model)
        pipeline = way.build(model, optimizer, device)
        losses, speed = _train(pipeline, way, train, device)
    copies, allocations = _operations(pipeline, train, device)
    model.eval()
    _rewind(pipeline)
    with torch.no_grad():
        auc = _auc(pipeline, way.feed(iter(test), device))
    return Run(way.name, first_weights, losses, speed, copies, allocations, peaks, auc)


def _rewind(pipeline: Pipeline) -> None:
    """Make a pipeline whose iterator has ended ready for another.

    TorchRec 1.2 has no `reset()`, 1.3 is the first: there the base pipeline has `_reset_data_iter()` for it, and the
    others notice a new iterator by themselves.
    """
    for name in ("reset", "_reset_data_iter"):
        method = getattr(pipeline, name, None)
        if method is not None:
            method()


def _train(pipeline: Pipeline, way: Way, batches: TrainBatches, device: torch.device) -> tuple[torch.Tensor, float]:
    """Losses (float32 [steps], host) and steps a second."""
    warm_up = min(WARM_UP_STEPS, len(batches) // 2)
    losses: list[torch.Tensor] = []
    started = _now(device)
    # A bar that is written to a file has a line for every refresh, so it does without most of them.
    bar = tqdm(total=len(batches), desc=f"{way.name:<31}", unit="step", mininterval=0.5, disable=batches.share.rank > 0)
    with bar:
        for loss, *_ in _outputs(pipeline, way.feed(iter(batches), device)):
            losses.append(loss)
            bar.update()
            if len(losses) == warm_up:
                started = _now(device)
        seconds = _now(device) - started
    return torch.stack(losses).float().cpu(), (len(losses) - warm_up) / seconds


def _outputs(pipeline: Pipeline, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            return
        yield output


def _operations(pipeline: Pipeline, batches: TrainBatches, device: torch.device) -> tuple[float, float]:
    """Copies and allocations of a batch: by our pipeline's own count, or of the batch's `.to` as TorchRec calls it."""
    stats = getattr(pipeline, "transfer_stats", None)
    if stats is not None and stats.batches:
        return stats.copies / stats.batches, stats.allocations / stats.batches
    counts = count_to(next(iter(batches)), device)
    return counts.copies, counts.allocations


def _auc(pipeline: Pipeline, batches: Iterator[Any]) -> float:
    logits, labels = [], []
    for _, batch_logits, batch_labels in _outputs(pipeline, batches):
        logits.append(batch_logits.cpu())
        labels.append(batch_labels.cpu())
    parts = gather((torch.cat(logits), torch.cat(labels)))
    all_logits, all_labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return float(auroc(all_logits.sigmoid(), all_labels.int(), task="binary"))


def _now(device: torch.device) -> float:
    """Seconds, when all that was queued on the device has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
