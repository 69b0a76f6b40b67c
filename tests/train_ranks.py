"""Run by test_distributed.py under torchrun: train with TorchRec's pipeline and with ours, and compare."""

from __future__ import annotations

import inspect
import os
import sys

import torch
import torch.distributed as dist
from recsys import losses, make_batches, pinned, sharded
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_prealloc import PreallocTrainPipelineSparseDist

STEPS = 10
KNOWN = inspect.signature(TrainPipelineSparseDist).parameters
OPTIONS: list[dict[str, bool]] = [
    {},
    *({switch: True} for switch in ("enable_inplace_copy_batch", "free_features_storage_early") if switch in KNOWN),
]


def train(cls: type, device: torch.device, kernel: str, **options: bool) -> list[float]:
    model, optimizer = sharded(device, kernel)
    batches = make_batches(STEPS, seed=10 + dist.get_rank(), wobble=True)
    if device.type != "cpu":
        batches = pinned(batches)
    return losses(cls(model, optimizer, device, **options), batches)


def main(kind: str) -> None:
    if kind == "simulated":
        from torchrec_prealloc import simulator

        device = simulator.device(int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("gloo")
    for kernel in ("fused", "dense"):
        expected = train(TrainPipelineSparseDist, torch.device("cpu"), kernel)
        assert len(set(expected)) == STEPS, expected
        for options in OPTIONS:
            if kind == "simulated":
                for schedule in ("lazy", "eager", "random"):
                    with simulator.checked(schedule=schedule, seed=5):
                        seen = train(PreallocTrainPipelineSparseDist, device, kernel, **options)
                    assert seen == expected, (kernel, options, schedule, seen, expected)
            else:
                seen = train(PreallocTrainPipelineSparseDist, device, kernel, **options)
                assert seen == expected, (kernel, options, seen, expected)
    print(f"rank {dist.get_rank()}: equal losses", flush=True)
    # With TorchRec's pipelines alone, too, gloo's threads abort some processes on their way out ("terminate called
    # without an active exception"). What is to be shown is shown by now.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
