"""Every pipeline class of TorchRec's: with which model and options it runs, and where TorchRec's own does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recsys import Model, data_parallel, make_batches, replicated, sharded, unsharded
from torch import Tensor, nn

from torchrec_prealloc import versions
from torchrec_prealloc.estimation.cuda_names import cuda_means
from torchrec_prealloc.pipelines import prealloc_pipeline

CPU = torch.device("cpu")
ACCUMULATION = "torchrec.distributed.train_pipeline.gradient_accumulation"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to train or evaluate with one class of TorchRec's."""

    cls: str
    make: Callable[[torch.device], tuple[nn.Module, Any]] = sharded
    options: Callable[[], dict[str, Any]] = dict
    on_cpu: str = ""
    """Why TorchRec's own class does not run on a CPU device; empty where it does."""
    trains: bool = True
    names_cuda: bool = False
    """Whether the class names `torch.cuda` whatever its device."""
    wrap: Callable[[Any, nn.Module, Any], Any] = lambda pipeline, model, optimizer: pipeline
    dense_only: bool = False
    since: str = "1.2"
    """The first TorchRec whose class runs so with the torch that is installed."""
    ranks: int = 1
    """How many ranks it takes at least."""
    lookup_races: bool = False
    """Whether TorchRec's embeddings of this pipeline are read by a stream that does not own them, unrecorded."""

    stays: bool = False
    """Whether TorchRec keeps a pipeline alive that nobody refers to, in a hook of autograd or in what is compiled."""

    def lacking(self) -> str | None:
        """Why the installed TorchRec has no such pipeline; None where it has."""
        installed = versions.installed_version()
        if not versions.at_least(self.since, installed):
            return f"{self.cls} of TorchRec {installed} does not run so with torch {torch.__version__}"
        if self.wrap is accumulating and importlib.util.find_spec(ACCUMULATION) is None:
            return f"TorchRec {installed} has no GradientAccumulationWrapper"
        try:
            versions.pipeline_class(self.cls)
        except AttributeError as absent:
            return str(absent)
        return None

    def theirs(self) -> Any:
        """TorchRec's class; skips the test where the installed TorchRec lacks it."""
        reason = self.lacking()
        if reason is not None:
            pytest.skip(reason)
        return versions.pipeline_class(self.cls)

    def ours(self) -> Any:
        return prealloc_pipeline(self.theirs())

    def build(self, cls: Any, device: torch.device, **options: Any) -> Any:
        """A pipeline of a class over a fresh model."""
        with self.names(device):
            model, optimizer = self.make(device)
            if not self.trains:
                model.eval()
            if self.cls == "StagedTrainPipeline":
                return Staged(cls, model, optimizer, device, **options)
            given = {**self.options(), **options}
            return self.wrap(cls(model, optimizer, device, **given), model, optimizer)

    @contextlib.contextmanager
    def names(self, device: torch.device) -> Iterator[None]:
        """CUDA's names mean the simulator's, for classes that have no others; what else a class wants to be set."""
        with cuda_means(device) if self.names_cuda and device.type == "mtia" else contextlib.nullcontext():
            if not self.cls.endswith("CompAutograd"):
                yield
                return
            with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
                yield

    def run(self, cls: Any, device: torch.device, count: int, mode: str = "train", **options: Any) -> list[Any]:
        """Losses, and a sum of the labels that came with them: a piece of the batch, read at the end."""
        pipeline = self.build(cls, device, **options)
        model = pipeline.model if isinstance(pipeline, Staged) else pipeline._model
        iterator, given = iter(self.batches(count, device)), []
        with self.names(device), torch.set_grad_enabled(mode != "eval" and self.trains):
            while True:
                model.train(self.trains and (mode == "train" or (mode == "switched" and len(given) % 6 < 3)))
                try:
                    given.append(pipeline.progress(iterator))
                except StopIteration:
                    break
            return [(float(loss), float(labels.sum())) for loss, labels in given]

    def batches(self, count: int, device: torch.device, seed: int = 1) -> list[Any]:
        made: list[Any] = make_batches(count, seed=seed, wobble=True)
        if self.dense_only:
            made = [DenseFirst.of(batch) for batch in made]
        return made if device.type == "cpu" else [batch.pin_memory() for batch in made]


class Staged:
    """The loop that TorchRec leaves to the trainer with `StagedTrainPipeline`."""

    def __init__(
        self, cls: Any, model: nn.Module, optimizer: Any, device: torch.device, runnable: Any = None, **options: Any
    ) -> None:
        try:
            from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
        except ImportError:  # until TorchRec 1.2
            from torchrec.distributed.train_pipeline.utils import PipelineStage, SparseDataDistUtil

        module = torch.get_device_module(device)
        self.model, self.optimizer = model, optimizer
        sdd: Any = SparseDataDistUtil(model, module.Stream(), apply_jit=False)
        copy = PipelineStage("copy", runnable or by_name(device), module.Stream())
        filled = getattr(sdd, "wait_sdd_fill_callback", sdd.wait_sparse_data_dist)  # the latter until TorchRec 1.2
        dist = PipelineStage("dist", sdd.start_sparse_data_dist, sdd.data_dist_stream, fill_callback=filled)
        self.pipeline = cls([copy, dist], **options)

    def progress(self, iterator: Iterator[Any]) -> Any:
        batch = self.pipeline.progress(iterator)
        if batch is None:
            raise StopIteration
        if self.model.training:
            self.optimizer.zero_grad()
        loss, output = self.model(batch)
        if self.model.training:
            torch.sum(loss, dim=0).backward()
            self.optimizer.step()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["pipeline"], name)


def by_name(device: torch.device) -> Callable[[Any], Any]:
    from torchrec.distributed.train_pipeline.utils import get_h2d_func

    return lambda batch: get_h2d_func(batch, device)


class DenseFirst:
    """A batch class as `EvalPipelineCPUSparse` asks for: its `to` can leave the sparse features on the host."""

    def __init__(self, dense_features: Tensor, sparse_features: Any, labels: Tensor) -> None:
        self.dense_features, self.sparse_features, self.labels = dense_features, sparse_features, labels

    @classmethod
    def of(cls, batch: Any) -> DenseFirst:
        return cls(batch.dense_features, batch.sparse_features, batch.labels)

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: Any = None, dense_only: bool = False
    ) -> DenseFirst:
        move = {"device": device, "non_blocking": non_blocking}
        sparse = self.sparse_features if dense_only else self.sparse_features.to(**move)
        return DenseFirst(self.dense_features.to(**move), sparse, self.labels.to(**move))

    def pin_memory(self) -> DenseFirst:
        return DenseFirst(self.dense_features.pin_memory(), self.sparse_features, self.labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        self.dense_features.record_stream(stream)
        self.labels.record_stream(stream)


def never_compiled() -> dict[str, Any]:
    from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig

    return {"compile_configs": TorchCompileConfig(compile_on_iter=1 << 30)}


def eager_autograd(device: torch.device) -> tuple[nn.Module, Any]:
    model, optimizer = sharded(device)
    model._compiled_autograd_options = {"backend": "eager", "dynamic": True}  # type: ignore[assignment]
    return model, optimizer


def accumulating(pipeline: Any, model: nn.Module, optimizer: Any) -> Any:
    gradient_accumulation = importlib.import_module(ACCUMULATION)
    config = gradient_accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=3)
    return gradient_accumulation.GradientAccumulationWrapper(pipeline, optimizer, model, config)


def dense_kernel(device: torch.device) -> tuple[nn.Module, Any]:
    # Without DDP: the optimizer's step within the backward pass does not wait for averaged gradients.
    return sharded(device, "dense", average_gradients=False)


OURS = ("transfer.py", "shipment.py", "buffers.py", "memory.py", "held.py", "staging.py")


def of_batches(reports: Any) -> list[Any]:
    """Those reports that are about a batch's memory or copies."""
    return [report for report in reports if any(_is_ours(access.stack) for access in (report.first, report.second))]


def _is_ours(stack: Any) -> bool:
    return any(frame.filename.endswith(tuple("torchrec_prealloc/" + name for name in OURS)) for frame in stack)


OLD = not versions.at_least("1.3", versions.installed_version())
CURRENT = "TorchRec's class needs streams that the CPU has not"
KINDS = {
    "base": Kind("TrainPipelineBase", unsharded),
    "pt2": Kind("TrainPipelinePT2", unsharded, never_compiled),
    "sparse_dist": Kind("TrainPipelineSparseDist"),
    "sparse_dist_lite": Kind("TrainPipelineSparseDistLite"),
    "fused": Kind("TrainPipelineFusedSparseDist", on_cpu=CURRENT, lookup_races=True),
    "fused_current": Kind(
        "TrainPipelineFusedSparseDist", options=lambda: {"emb_lookup_stream": "current"}, on_cpu=CURRENT
    ),
    "semi_sync": Kind("TrainPipelineSemiSync", on_cpu=CURRENT, names_cuda=OLD),
    "semi_sync_from_0": Kind(
        "TrainPipelineSemiSync", options=lambda: {"start_batch": 0}, on_cpu=CURRENT, names_cuda=OLD
    ),
    "prefetch": Kind("PrefetchTrainPipelineSparseDist", on_cpu="its context is lost there"),
    "eval": Kind("EvalPipelineSparseDist", trains=False),
    "eval_fused": Kind("EvalPipelineFusedSparseDist", on_cpu=CURRENT, trains=False, lookup_races=True),
    "staged": Kind("StagedTrainPipeline", on_cpu=CURRENT),
    "compiled_autograd": Kind("TrainPipelineSparseDistCompAutograd", eager_autograd, since="1.7", stays=True),
    "hybrid": Kind("TrainEvalHybridPipelineBase"),
    "eval_cpu_sparse": Kind(
        "EvalPipelineCPUSparse",
        data_parallel,
        on_cpu="pinned memory needs an accelerator",
        trains=False,
        dense_only=True,
    ),
    "threaded": Kind("TrainPipelineSparseDistT"),
    "backward_optimizer": Kind("TrainPipelineSparseDistBwdOpt", dense_kernel, lambda: {"site_fqn": "ebc"}, ranks=2),
    "optimizer_stash": Kind(
        "TrainPipelineSparseDistOptStash",
        dense_kernel,
        lambda: {"site_fqn": "ebc"},
        on_cpu=CURRENT,
        names_cuda=True,
        ranks=2,
    ),
    "embedding_stash": Kind(
        "TrainPipelineSparseDistEmbStash",
        options=lambda: {"site_fqn": "hidden"},
        on_cpu=CURRENT,
        names_cuda=True,
        stays=True,
    ),
    "prefetch_ems": Kind(
        "TrainPipelinePrefetchEMS",
        options=lambda: {"site_fqn": "hidden"},
        on_cpu=CURRENT,
        names_cuda=True,
        stays=True,
    ),
    "pec": Kind("TrainPipelinePEC", on_cpu=CURRENT, names_cuda=True),
    **{
        f"replicated_{interval}": Kind(
            "TrainPipelineSparseDist",
            replicated,
            lambda interval=interval: {"dmp_collection_sync_interval_batches": interval},  # type: ignore[misc]
            on_cpu="2-D sharding needs a device",
            since="1.4",
            ranks=2,
        )
        for interval in (1, 3)
    },
    "accumulated_base": Kind("TrainPipelineBase", unsharded, wrap=accumulating),
    "accumulated_sparse_dist": Kind("TrainPipelineSparseDist", wrap=accumulating),
}
__all__ = ["CPU", "KINDS", "DenseFirst", "Kind", "Model", "Staged", "of_batches"]
