"""The transfer benchmark counts and compares what it says."""

import pytest
import torch

from torchrec_prealloc.bench import transfer
from torchrec_prealloc.bench.table import Row

CPU = torch.device("cpu")


def test_torchrec_in_place_makes_two_operations_a_tensor_and_ours_a_handful() -> None:
    ways = transfer._ways(transfer._model_input(600), CPU)
    for move in ways.values():
        move()
    assert transfer._operations(ways[transfer.IN_PLACE]) >= 1200
    assert transfer._operations(ways[transfer.PER_BATCH]) <= 12
    assert transfer._operations(ways[transfer.RING]) <= 12


def test_every_way_moves_the_whole_batch() -> None:
    batch = transfer._model_input(20)
    for name, move in transfer._ways(batch, CPU).items():
        moved = move()
        assert sum(tensor.nbytes for tensor in transfer.tensors_in(moved)) >= 20 * 64 + 64 * 17 * 4, name


def test_each_row_has_a_baseline_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {transfer.STRESS: (transfer._model_input(30), 3), transfer.MIX: ([torch.zeros(9)], 3)}
    monkeypatch.setattr(transfer, "_batches", lambda full: small)
    rows = {row.name: row.figures for row in transfer.run()}
    assert {figures["baseline"] for figures in rows.values()} == {transfer.IN_PLACE, transfer.PLAIN}
    for name, figures in rows.items():
        batch = name.partition(": ")[0]
        baseline = rows[f"{batch}: {figures['baseline']}"]
        assert figures["ratio"] == pytest.approx(figures["median"] / baseline["median"])
        assert figures["min"] <= figures["median"] <= figures["max"]


def test_targets_that_are_missed_are_named() -> None:
    rows = [Row(f"{target.batch}: {target.way}", {target.figure: target.at_most}) for target in transfer.TARGETS[1:]]
    rows.append(Row(f"{transfer.STRESS}: {transfer.PER_BATCH}", {"operations": 13, "ratio": 0.3}))
    assert transfer.missed(rows) == [f"{transfer.STRESS}: {transfer.PER_BATCH}: operations is 13, not at most 12"]
