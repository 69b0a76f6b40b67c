"""A small recommendation model and its batches, which the pipeline tests train."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_stand_ins import has_kernels
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch

ROWS, WIDTH, DENSE = 64, 16, 8
FEATURES = ("f1", "f2")
FREES_EARLY = hasattr(KeyedJaggedTensor, "clear_storage")
"""Whether this TorchRec has `free_features_storage_early`; it came with 1.7."""


def make_batches(count: int, seed: int = 1, size: int = 32, wobble: bool = False) -> list[Batch]:
    """`count` host batches; with `wobble` of up to twice the `size` of the smallest, the same for every `seed`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.Generator().manual_seed(0)  # ranks' batches must be of one size
    batches = []
    for _ in range(count):
        rows = size + int(torch.randint(size, (), generator=sizes)) if wobble else size
        lengths = torch.randint(0, 4, (len(FEATURES) * rows,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        batches.append(
            Batch(
                dense_features=torch.randn(rows, DENSE, generator=generator),
                sparse_features=KeyedJaggedTensor(list(reversed(FEATURES)), values, lengths=lengths),
                labels=torch.rand(rows, generator=generator),
            )
        )
    return batches


@dataclasses.dataclass
class PlainBatch:
    """A batch class without a `to`."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class OnlyTo:
    """A batch class with nothing but `to(device, non_blocking)`: TorchRec's in-place path raises a TypeError on it."""

    def __init__(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.dense_features, self.sparse_features, self.labels = dense_features, sparse_features, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> OnlyTo:
        return OnlyTo(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )


class ComputesInTo(OnlyTo):
    """Its `to` reads what it has just moved, keeps one tensor on the host, and changes a dtype."""

    def to(self, device: torch.device, non_blocking: bool = False) -> ComputesInTo:
        moved = ComputesInTo(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, torch.float64, non_blocking=non_blocking).float(),
        )
        moved.dense_features = moved.dense_features * 1.0
        return moved


NamedBatch = namedtuple("NamedBatch", ["dense_features", "sparse_features", "labels"])


def _fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("dense_features", "sparse_features", "labels")}


def _from_keys(batch: Any) -> PlainBatch:  # key by key: TorchRec traces the model with torch.fx
    return PlainBatch(batch["dense_features"], batch["sparse_features"], batch["labels"])


def _from_items(batch: Any) -> PlainBatch:
    return PlainBatch(batch[0], batch[1], batch[2])


# How a batch is wrapped, and how the model gets at its parts.
CONTAINERS: dict[str, tuple[Callable[[Batch], Any], Callable[[Any], Any]]] = {
    "Batch": (lambda batch: batch, lambda batch: batch),
    "dataclass": (lambda batch: PlainBatch(**_fields(batch)), lambda batch: batch),
    "dict": (_fields, _from_keys),
    "OrderedDict": (lambda batch: OrderedDict(_fields(batch)), _from_keys),
    "list": (lambda batch: list(_fields(batch).values()), _from_items),
    "tuple": (lambda batch: tuple(_fields(batch).values()), _from_items),
    "named tuple": (lambda batch: NamedBatch(**_fields(batch)), lambda batch: batch),
    "nested": (lambda batch: {"a": [{"b": (batch, "x", None)}]}, lambda batch: batch["a"][0]["b"][0]),
    "only to": (lambda batch: OnlyTo(**_fields(batch)), lambda batch: batch),
    "computes in to": (lambda batch: ComputesInTo(**_fields(batch)), lambda batch: batch),
}


class Model(nn.Module):
    """Embeddings, one hidden layer, a loss. `forward` gives (loss of shape [1], (loss, labels))."""

    def __init__(self, unwrap: Callable[[Any], Any] = lambda batch: batch, embeddings_on: str = "cpu") -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=WIDTH, name=f"t_{name}", feature_names=[name])
                for name in FEATURES
            ],
            device=torch.device(embeddings_on),
        )
        self.hidden = nn.Linear(len(FEATURES) * WIDTH + DENSE, 32)
        self.out = nn.Linear(32, 1)
        self._unwrap = unwrap

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch = self._unwrap(batch)
        embedded = self.ebc(batch.sparse_features).values()
        hidden = torch.relu(self.hidden(torch.cat([embedded, batch.dense_features], dim=1)))
        loss = nn.functional.binary_cross_entropy_with_logits(self.out(hidden).squeeze(1), batch.labels)
        return loss.unsqueeze(0), (loss.detach(), batch.labels.detach())


def unsharded(device: torch.device, unwrap: Callable[[Any], Any] = lambda batch: batch) -> tuple[nn.Module, Any]:
    """The model of seed 0 and its optimizer."""
    torch.manual_seed(0)
    model = Model(unwrap).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sharded(
    device: torch.device,
    kernel: str = "fused",
    unwrap: Callable[[Any], Any] = lambda batch: batch,
    average_gradients: bool = True,
) -> tuple[nn.Module, Any]:
    """The model of seed 0 over the ranks of the default process group: one table row-wise, one table-wise.

    On a GPU for which FBGEMM has no kernels it is not sharded: embeddings of torch's own, no input dist.
    """
    if not has_kernels(device):
        return unsharded(device, unwrap)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    world = dist.get_world_size()
    torch.manual_seed(0)
    reference = Model(unwrap)
    model = Model(unwrap, embeddings_on="meta")
    model.hidden, model.out = copy.deepcopy(reference.hidden).to(device), copy.deepcopy(reference.out).to(device)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1} if kernel == "fused" else {}

    class Sharder(EmbeddingBagCollectionSharder):
        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return [kernel]

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "row_wise"]

    sharder = Sharder(fused_params=fused)
    if "compute_kernel" in inspect.signature(row_wise).parameters:
        rows_by = row_wise(compute_kernel=kernel)
    else:  # TorchRec 1.2 asks the sharder, which knows only this one
        rows_by = row_wise()
    first = rows_by if world > 1 else table_wise(rank=0, compute_kernel=kernel)
    plan = construct_module_sharding_plan(
        model.ebc,
        {"t_f1": first, "t_f2": table_wise(rank=world - 1, compute_kernel=kernel)},
        local_size=world,
        world_size=world,
        device_type=device.type,
        sharder=sharder,
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
        init_data_parallel=average_gradients,
    )
    with torch.no_grad():  # TorchRec copies the weights itself only on CUDA and MTIA
        for name, value in dmp.state_dict().items():
            if "ebc" in name:
                full = reference.state_dict()[name.replace("module.", "")]
                for shard in value.local_shards():
                    (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    shard.tensor.copy_(full[row : row + rows, column : column + columns])
    dense = [parameter for parameter in dmp.parameters() if parameter.requires_grad]
    return dmp, torch.optim.SGD(dense, lr=0.1)


def replicated(device: torch.device) -> tuple[nn.Module, Any]:
    """The model of seed 0 with 2-D sharding: each rank has all tables, and ranks average them when they are told to."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DMPCollection
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan

    torch.manual_seed(0)
    reference, model = Model(), Model(embeddings_on="meta")
    model.hidden, model.out = copy.deepcopy(reference.hidden).to(device), copy.deepcopy(reference.out).to(device)
    sharder: Any = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    )
    plan = construct_module_sharding_plan(
        model.ebc,
        {f"t_{name}": table_wise(rank=0, compute_kernel="fused") for name in FEATURES},
        local_size=1,
        world_size=1,
        device_type=device.type,
        sharder=sharder,
    )
    dmp = DMPCollection(
        module=model,
        device=device,
        plan=ShardingPlan({"ebc": plan}),
        world_size=dist.get_world_size(),
        sharding_group_size=1,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
    )
    with torch.no_grad():
        for name, value in dmp.state_dict().items():
            if "ebc" in name:
                value.to_local().local_shards()[0].copy_(reference.state_dict()[name.replace("module.", "")])
    dense = [parameter for parameter in dmp.parameters() if parameter.requires_grad]
    return dmp, torch.optim.SGD(dense, lr=0.1)


def data_parallel(device: torch.device) -> tuple[nn.Module, Any]:
    """The model of seed 0, its embeddings sharded data-parallel over CPUs, the rest on `device`."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    torch.manual_seed(0)
    model = Model()
    model.hidden, model.out = model.hidden.to(device), model.out.to(device)
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ebc,
        {f"t_{name}": data_parallel() for name in FEATURES},
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
        sharder=sharder,
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
        init_data_parallel=False,
        init_parameters=False,
    )
    return dmp, torch.optim.SGD(dmp.parameters(), lr=0.1)


def pinned(batches: Iterable[Any]) -> list[Any]:
    return [batch.pin_memory() for batch in batches]


def outputs(pipeline: Any, batches: Iterable[Any] | Iterator[Any]) -> list[Any]:
    """What `progress` gives until it raises StopIteration. Read only then: reading makes the host wait."""
    iterator = iter(batches)
    collected = []
    while True:
        try:
            collected.append(pipeline.progress(iterator))
        except StopIteration:
            return collected


def losses(pipeline: Any, batches: Iterable[Any]) -> list[float]:
    """The loss of each step."""
    return [float(loss) for loss, _ in outputs(pipeline, batches)]
