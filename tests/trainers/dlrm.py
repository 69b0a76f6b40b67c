"""A trainer as they are written against TorchRec: argparse, a class imported by name, two pipelines over one model.

As the public DLRM trainer does, it fills a pipeline anew for each pass by clearing `_connected`, appends batches that
keep it full to the end, calls `progress` until it stops, and validates within an epoch. It knows nothing of
torchrec_prealloc.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recsys import make_batches, sharded
from torchrec.distributed import TrainPipelineSparseDist

STAGES = 3


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="batches of an epoch")
    parser.add_argument("--validate-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--validation-steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", type=Path, required=True, help="file that is written, for each rank")
    return parser.parse_args(arguments)


def passing(pipeline: Any, batches: list[Any]) -> Iterator[float]:
    """The loss of each batch, and of the first ones again."""
    pipeline._connected = False
    iterator = itertools.chain(batches, itertools.islice(batches, STAGES - 1))
    while True:
        try:
            loss = pipeline.progress(iterator)[0]
        except StopIteration:
            return
        yield float(loss)


def run(pipeline_class: Any, args: argparse.Namespace, device: torch.device) -> tuple[Any, list[float]]:
    """The pipeline that trains, and all losses."""
    model, optimizer = sharded(device)
    training, validation = (pipeline_class(model, optimizer, device) for _ in range(2))
    seed = args.seed + 100 * dist.get_rank()
    batches = make_batches(args.steps, seed=seed, wobble=True)
    unseen = make_batches(args.validation_steps, seed=seed + 1, wobble=True)
    losses = []
    for _ in range(args.epochs):
        model.train()
        for step, loss in enumerate(passing(training, batches), 1):
            losses.append(loss)
            if step % args.validate_every == 0:
                model.eval()
                with torch.no_grad():
                    losses += passing(validation, unseen)
                model.train()
    return training, losses


def train(pipeline_class: Any, args: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{args.losses}.rendezvous", rank=0, world_size=1)
    pipeline, losses = run(pipeline_class, args, torch.device("cpu"))
    args.losses.with_suffix(f".{dist.get_rank()}").write_text(
        f"{type(pipeline).__name__} {[cls.__name__ for cls in type(pipeline).__mro__]}\n" + repr(losses)
    )
    dist.barrier()
    if dist.get_world_size() > 1:
        os._exit(0)  # gloo's threads abort some processes on their way out
    dist.destroy_process_group()


if __name__ == "__main__":
    train(TrainPipelineSparseDist, parse_args())
