"""A trainer as they are written against TorchRec: argparse, a class imported by name, `progress` until it stops.

It knows nothing of torchrec_prealloc.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recsys import make_batches, sharded
from torchrec.distributed import TrainPipelineSparseDist


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", type=Path, required=True, help="file that is written, for each rank")
    return parser.parse_args(arguments)


def train(pipeline_class: Any, args: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{args.losses}.rendezvous", rank=0, world_size=1)
    device = torch.device("cpu")
    model, optimizer = sharded(device)
    pipeline = pipeline_class(model, optimizer, device, execute_all_batches=True)
    batches = iter(make_batches(args.steps, seed=args.seed + dist.get_rank(), wobble=True))
    losses = []
    while True:
        try:
            losses.append(float(pipeline.progress(batches)[0]))
        except StopIteration:
            break
    args.losses.with_suffix(f".{dist.get_rank()}").write_text(
        f"{type(pipeline).__name__} {[cls.__name__ for cls in type(pipeline).__mro__]}\n" + repr(losses)
    )
    dist.barrier()
    if dist.get_world_size() > 1:
        os._exit(0)  # gloo's threads abort some processes on their way out
    dist.destroy_process_group()


if __name__ == "__main__":
    train(TrainPipelineSparseDist, parse_args())
