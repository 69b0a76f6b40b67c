"""The demo's model: TorchRec's DLRM, its tables sharded over the ranks, and the optimizers that belong to it."""

import dataclasses
import hashlib
import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Widths of the layers and learning rates. The bottom tower ends, and every table is, `embedding_dim` wide."""

    embedding_dim: int = 32
    dense_hidden: tuple[int, ...] = (64,)
    over_hidden: tuple[int, ...] = (64, 32)
    table_rate: float = 0.02
    dense_rate: float = 1e-3


def build_model(
    vocabulary: Mapping[str, int],
    dense_features: int,
    device: torch.device,
    seed: int,
    sizes: ModelSizes = ModelSizes(),
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A sharded DLRM with its first weights and its optimizer: row-wise Adagrad for tables, Adam for the rest.

    Two calls with one seed give the same weights bit for bit, whatever the number of ranks and whichever rank holds
    which table: see `set_first_weights`.

    Args:
        vocabulary: feature name -> number of rows of its table
        dense_features: number of dense features
        device: where the shards of this rank and the dense layers live
        seed: decides the first weights
        sizes: of the layers
    """
    torch.manual_seed(seed)
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=f"t_{name}",
                        embedding_dim=sizes.embedding_dim,
                        num_embeddings=rows,
                        feature_names=[name],
                        pooling=PoolingType.MEAN,
                    )
                    for name, rows in vocabulary.items()
                ],
                device=torch.device("meta"),
            ),
            dense_in_features=dense_features,
            dense_arch_layer_sizes=[*sizes.dense_hidden, sizes.embedding_dim],
            over_arch_layer_sizes=[*sizes.over_hidden, 1],
            dense_device=device,
        )
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": sizes.table_rate}
    )
    plan = _planner(vocabulary, device).collective_plan(model, [sharder], dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    set_first_weights(sharded, seed)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=sizes.dense_rate),
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def _planner(vocabulary: Mapping[str, int], device: torch.device) -> EmbeddingShardingPlanner:
    """Whole tables, spread over the ranks. Left to itself the planner would copy small tables to every rank, and the
    operator that does so has no autograd kernel on a CPU.
    """
    ranks = dist.get_world_size()
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
            compute_device=device.type,
        ),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
        constraints={
            f"t_{name}": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]) for name in vocabulary
        },
    )


def set_first_weights(model: nn.Module, seed: int) -> None:
    """Fill every table from the seed and its own name, in place.

    A sharded module brings weights along only on some devices, and draws new ones elsewhere, in an order that depends
    on the sharding. Here each rank draws the whole table and keeps its part.
    """
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, ShardedTensor):
            continue
        rows, width = value.metadata().size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        table = (torch.rand(rows, width, generator=generator) * 2 - 1) / rows**0.5
        for shard in value.local_shards():
            first_row, first_column = shard.metadata.shard_offsets
            height, columns = shard.metadata.shard_sizes
            part = table[first_row : first_row + height, first_column : first_column + columns]
            with torch.no_grad():
                shard.tensor.copy_(part)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types and bits of all that this rank holds of a model's state."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        for part in _local(value):
            digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _local(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, torch.Tensor) else []
