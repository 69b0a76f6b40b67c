"""Run by test_checkpoint.py under torchrun: save while the training goes on, restore, compare with a plain save."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recsys import Model, make_batches
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from torchrec_prealloc.checkpoint import async_save, close_checkpoints, train_state

BEFORE, DURING = 3, 4


def tensors(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """This rank's tensors of a state, by their path."""
    if isinstance(tree, dict):
        return {key: value for name, item in tree.items() for key, value in tensors(item, f"{prefix}/{name}").items()}
    if isinstance(tree, (list, tuple)):
        return tensors(dict(enumerate(tree)), prefix)
    if hasattr(tree, "local_shards"):
        return {f"{prefix}#{number}": shard.tensor for number, shard in enumerate(tree.local_shards())}
    return {prefix: tree} if isinstance(tree, Tensor) else {}


def copied(tree: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(tree).items()}


def assert_equal(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor), name


def training() -> tuple[Any, Any, Any]:
    """A model with one table row-wise and one table-wise, whose fused optimizer has a state; its dense one; a step."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    model = Model()
    sharder: Any = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    plan = construct_module_sharding_plan(
        model.ebc,
        {
            "t_f1": row_wise(compute_kernel="fused"),
            "t_f2": table_wise(rank=world - 1, compute_kernel="fused"),
        },
        local_size=world,
        world_size=world,
        device_type="cpu",
        sharder=sharder,
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    dense = [value for name, value in dmp.named_parameters() if "ebc" not in name]
    optimizer = torch.optim.Adam(dense, lr=0.01)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss, _ = dmp(batch)
        loss.sum().backward()
        optimizer.step()

    return dmp, optimizer, step


def check(folder: str) -> None:
    model, optimizer, step = training()
    batches = make_batches(BEFORE + 2 * DURING, seed=10 + dist.get_rank())
    for batch in batches[:BEFORE]:
        step(batch)
    expected = []
    saves = []
    for number in range(2):  # the second is asked for while the first may still be written
        state = train_state(model, optimizer, step=torch.tensor(BEFORE + number * DURING))
        expected.append(copied(state))
        dcp.save(state, checkpoint_id=f"{folder}/plain{number}")
        saves.append(async_save(state, f"{folder}/ours{number}"))
        for batch in batches[BEFORE + number * DURING :][:DURING]:
            step(batch)
    moved = copied(train_state(model, optimizer))
    assert any(not torch.equal(moved[name], tensor) for name, tensor in expected[1].items() if name in moved)
    for saved in saves:
        saved.result()
    dist.barrier()
    for number in range(2):
        for kind in ("plain", "ours"):
            restored, its_optimizer, its_step = training()
            its_step(batches[0])  # so that the optimizer has its state
            state = train_state(restored, its_optimizer, step=torch.tensor(0))
            dcp.load(state, checkpoint_id=f"{folder}/{kind}{number}")
            assert_equal(copied(state), expected[number])
            restored.load_state_dict(state["model"])
            its_optimizer.load_state_dict(state["optimizer"])
            assert_equal(copied(train_state(restored, its_optimizer, step=state["step"])), expected[number])
        dist.barrier()


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    check(folder)
    close_checkpoints()
    print(f"rank {dist.get_rank()}: equal states", flush=True)
    # As in train_ranks.py: gloo's threads abort some processes on their way out.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
