"""All ways one after another, checked on every rank to have trained the same model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrec_prealloc.demo.batches import TestBatches, TrainBatches
from torchrec_prealloc.demo.losses import UnequalLosses, explain_difference, first_difference
from torchrec_prealloc.demo.process_group import gather
from torchrec_prealloc.demo.train import Run, run_way
from torchrec_prealloc.ways import Way


def run_all(ways: Sequence[Way], train: TrainBatches, test: TestBatches, device: torch.device) -> list[Run]:
    """Run every way, and compare each with the first one as soon as it has run. All ranks call it together.

    Raises:
        UnequalLosses: first weights or losses of two ways differ, on whichever rank. It is raised on all ranks.
    """
    runs: list[Run] = []
    for way in ways:
        runs.append(run_way(way, train, test, device))
        found = gather(_problem(runs[0], runs[-1]))
        # A rank's wrong batch spoils the other ranks' next step, so the earliest step is where it began.
        step, rank = min((problem.step, rank) for rank, problem in enumerate(found))
        if step < _NEVER:
            where = f"rank {rank}: " if len(found) > 1 else ""
            raise UnequalLosses(f"{where}{found[rank].text}")
    return runs


class _Problem(NamedTuple):
    """Why two runs did not train the same model, and since which step; 0 is before the first."""

    step: float
    text: str


_NEVER = math.inf


def _problem(reference: Run, latest: Run) -> _Problem:
    if latest.first_weights != reference.first_weights:
        return _Problem(0, f"{latest.way} did not start from the weights of {reference.way}")
    difference = first_difference(reference.losses, latest.losses)
    if difference is None:
        return _Problem(_NEVER, "")
    return _Problem(difference.step, explain_difference(reference.way, latest.way, difference))
