"""A small sharded model, and runs of TorchRec's own pipelines with it, on the CPU or on a simulated device.

As a program it is one rank: ``python reference.py PIPELINE STORE RANK WORLD``; the last line that it prints is JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

ROWS, DIM, BATCH, STEPS = 64, 16, 32, 6


@dataclass
class Batch(Pipelineable):
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: torch.Stream | None = None
    ) -> Batch:
        source = [self.dense, self.sparse.values(), self.sparse.lengths(), self.label]
        if data_copy_stream is None:
            target = [t.to(device, non_blocking=non_blocking) for t in source]
        else:  # TorchRec's in-place protocol: memory of the current stream, filled by the given one
            module = torch.get_device_module(device)
            target = [torch.empty_like(t, device=device, pin_memory=False) for t in source]
            data_copy_stream.wait_stream(module.current_stream())
            with module.stream(data_copy_stream):
                for t, s in zip(target, source, strict=True):
                    t.copy_(s, non_blocking=non_blocking)
        sparse = KeyedJaggedTensor(self.sparse.keys(), target[1], lengths=target[2], stride=BATCH)
        return Batch(target[0], sparse, target[3])

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.label.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory())


def batches(seed: int, steps: int = STEPS) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (2 * BATCH,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        sparse = KeyedJaggedTensor(["f0", "f1"], values, lengths=lengths, stride=BATCH)
        yield Batch(torch.randn(BATCH, 8, generator=generator), sparse, torch.rand(BATCH, generator=generator))


class Model(nn.Module):
    def __init__(self, device: torch.device, sparse_device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"t{i}", feature_names=[f"f{i}"])
            for i in range(2)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=sparse_device)
        self.hidden = nn.Linear(2 * DIM + 8, 16, device=device)
        self.out = nn.Linear(16, 1, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.cat([self.ebc(batch.sparse).values(), batch.dense], 1)
        logits = self.out(torch.relu(self.hidden(features))).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, loss.detach()


class Sharder(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused"]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise"]


def sharded(device: torch.device) -> DistributedModelParallel:
    """The model, always with the same weights, on the ranks of the default process group."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    initial = Model(cpu, cpu)
    model = Model(device, torch.device("meta"))
    model.hidden.load_state_dict(initial.hidden.state_dict())
    model.out.load_state_dict(initial.out.state_dict())
    sharder = Sharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    shards = {
        "t0": row_wise(compute_kernel="fused") if world > 1 else table_wise(rank=0, compute_kernel="fused"),
        "t1": table_wise(rank=world - 1, compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        model.ebc, shards, local_size=world, world_size=world, device_type=device.type, sharder=sharder
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    result = DistributedModelParallel(
        model, env=env, device=device, plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    with torch.no_grad():
        for name, value in result.state_dict().items():
            if "ebc" in name:
                full = initial.state_dict()[name.replace("module.", "")]
                for shard in value.local_shards():
                    row, column = shard.metadata.shard_offsets
                    rows, columns = shard.metadata.shard_sizes
                    shard.tensor.copy_(full[row : row + rows, column : column + columns])
    return result


MakePipeline = Callable[..., Any]
PIPELINES: dict[str, MakePipeline] = {
    "base": train_pipelines.TrainPipelineBase,
    "base, in place": lambda *a: train_pipelines.TrainPipelineBase(*a, enable_inplace_copy_batch=True),
    "sparse dist": train_pipelines.TrainPipelineSparseDist,
    "sparse dist, in place": lambda *a: train_pipelines.TrainPipelineSparseDist(*a, enable_inplace_copy_batch=True),
    "fused sparse dist": train_pipelines.TrainPipelineFusedSparseDist,
    "fused sparse dist, new stream": lambda *a: train_pipelines.TrainPipelineFusedSparseDist(
        *a, emb_lookup_stream="new"
    ),
    "semi-sync": lambda *a: train_pipelines.TrainPipelineSemiSync(*a, start_batch=0),
    "semi-sync, in place": lambda *a: train_pipelines.TrainPipelineSemiSync(
        *a, start_batch=0, enable_inplace_copy_batch=True
    ),
    "prefetch": train_pipelines.PrefetchTrainPipelineSparseDist,
}


def losses(make: MakePipeline, device: torch.device, steps: int = STEPS) -> list[float]:
    """Trains on `device`, reading every loss after the last step only, so that the host runs ahead."""
    model = sharded(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    pipeline = make(model, optimizer, device)
    source = batches(seed=10 + dist.get_rank(), steps=steps)
    if device.type != "cpu":
        source = (batch.pin_memory() for batch in source)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in itertools.count():
            try:
                found.append(pipeline.progress(source))
            except StopIteration:
                break
    return [loss.item() for loss in found]


def main(name: str, store: str, rank: int, world: int) -> None:
    from torchrec_prealloc import simulator

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    device = simulator.device(rank)
    torch.mtia.set_device(device)
    result: dict[str, Any] = {"cpu": losses(PIPELINES["base"], torch.device("cpu"))}  # some crash on a CPU device
    for schedule in ("lazy", "eager", "random"):
        with simulator.checked(schedule, raise_on_report=False) as run:
            result[schedule] = losses(PIPELINES[name], device)
        result[f"{schedule} reports"] = [str(report) for report in run.reports]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
