"""A trainer run until its first batches were copied: the first is explained, and the trainer is stopped."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from torchrec_prealloc import launch
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.doctor.explain import Explanation, explain
from torchrec_prealloc.errors import CommandError


class TrainerStoppedError(BaseException):
    """Ends a trainer that has copied enough batches. No `except Exception` of the trainer's takes it for its own."""


class Watch:
    """Explains the first batch that an engine is given, and stops the trainer after some.

    Args:
        steps: batches to copy.
        device: where to explain the batch for; None: the trainer's device, or CUDA if that has no streams.
        pinned: take the batch's memory for pinned.
    """

    def __init__(self, steps: int, device: str | None, pinned: bool) -> None:
        self.explanation: Explanation | None = None
        self.trains_on: torch.device | None = None
        self.error = ""
        """Why the batch could not be explained."""
        self.copied = 0
        self._steps = steps
        self._device = device
        self._pinned = pinned

    def __str__(self) -> str:
        number = "1 batch" if self.copied == 1 else f"{self.copied} batches"
        ended = "was stopped" if self.copied >= self._steps else "ended"
        head = f"The trainer (on {self.trains_on}) {ended} after {number}. The first:"
        return f"{head}\n\n{self.explanation or self.error}"

    def before(self, engine: Any, batch: Any, isolate: bool) -> None:
        """An engine is given a batch."""
        if self.trains_on is not None:
            return
        self.trains_on = engine.device
        device = self._device if self._device is not None else engine.device if engine.has_streams else None
        try:
            self.explanation = explain(batch, device, engine.config, isolate=isolate, pinned=self._pinned)
        except Exception as error:  # the engine is about to raise it, too
            self.error = f"{type(error).__name__}: {error}"

    def after(self) -> None:
        """A batch's copy is queued.

        Raises:
            TrainerStoppedError: it is the last.
        """
        self.copied += 1
        if self.copied >= self._steps:
            raise TrainerStoppedError


def run_until_stopped(args: argparse.Namespace, watch: Watch) -> None:
    """Run a trainer as the launcher does, until `watch` stops it.

    Args:
        args: the launcher's.

    Raises:
        CommandError: the trainer ended without a batch through a pipeline; there is no such trainer.
        BaseException: the trainer's own.
    """
    from torchrec_prealloc.pipelines import PreallocPipeline

    launch.enable(PreallocConfig.from_args(args))
    PreallocPipeline.engine_type = _watched(PreallocPipeline.engine_type, watch)
    try:
        launch.run(args)
    except TrainerStoppedError:
        return
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise
    finally:
        launch.disable()
    if watch.trains_on is None:
        raise CommandError(
            f"{args.trainer} ended, and gave no batch to one of TorchRec's pipelines; does it use one, with these "
            "arguments?"
        )


def _watched(base: type, watch: Watch) -> Any:
    class WatchedEngine(base):
        """The launcher's engine, watched."""

        def start(self, batch: Any, owner: Any = None, isolate: bool = False) -> Any:
            watch.before(self, batch, isolate)
            transfer = super().start(batch, owner, isolate)
            watch.after()
            return transfer

    return WatchedEngine


def leave_process_group(problem: str) -> None:
    """After a stopped trainer: leave its process group when all ranks do.

    With other ranks this ends the process, and says what is to be said before: their threads abort some processes on
    the way out.

    Args:
        problem: what the process is to end with, with status 1; empty: with status 0.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # another rank is gone
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
            return
        dist.barrier()
    if problem:
        print(problem, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if problem else 0)
