"""All ways one after another, checked on every rank to have trained the same model."""

from collections.abc import Sequence

import torch

from torchrec_prealloc.demo.batches import TestBatches, TrainBatches
from torchrec_prealloc.demo.losses import UnequalLosses, explain_difference, first_difference
from torchrec_prealloc.demo.process_group import gather
from torchrec_prealloc.demo.train import Run, run_way
from torchrec_prealloc.demo.ways import Way


def run_all(ways: Sequence[Way], train: TrainBatches, test: TestBatches, device: torch.device) -> list[Run]:
    """Run every way, and compare each with the first one as soon as it has run. All ranks call it together.

    Raises:
        UnequalLosses: first weights or losses of two ways differ, on whichever rank. It is raised on all ranks.
    """
    runs: list[Run] = []
    for way in ways:
        runs.append(run_way(way, train, test, device))
        problems = gather(_problem(runs[0], runs[-1]))
        for rank, problem in enumerate(problems):
            if problem:
                raise UnequalLosses(problem if len(problems) == 1 else f"rank {rank}: {problem}")
    return runs


def _problem(reference: Run, latest: Run) -> str:
    """Why the two did not train the same model; empty if they did."""
    if latest.first_weights != reference.first_weights:
        return f"{latest.way} did not start from the weights of {reference.way}"
    difference = first_difference(reference.losses, latest.losses)
    return explain_difference(reference.way, latest.way, difference) if difference else ""
