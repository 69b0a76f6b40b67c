"""The transfer benchmark counts and compares what it says."""

import pytest
import torch

from torchrec_prealloc import simulator
from torchrec_prealloc.bench import transfer
from torchrec_prealloc.bench.table import Row

CPU = torch.device("cpu")


def _goes_in_place() -> bool:
    """Whether TorchRec's in-place path can be gone on a CPU; older ones ask for a CUDA stream there too."""
    return transfer._runs(transfer._in_place_way(transfer._model_input(1), CPU))


needs_in_place = pytest.mark.skipif(not _goes_in_place(), reason="this TorchRec copies in place on CUDA only")


@needs_in_place
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


@needs_in_place
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
        assert (figures["host"], figures["on"]) == (transfer.PAGEABLE, "CPU")
        assert figures["gb_per_second"] is figures["of_raw"] is None


def test_a_way_that_older_torchrecs_cannot_go_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cuda(*args: object, **options: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(transfer.ModelInput, "to", no_cuda)
    assert not {transfer.IN_PLACE} & set(transfer._ways(transfer._model_input(3), CPU))


@pytest.mark.usefixtures("simulated_accelerator")
def test_on_a_device_each_way_goes_from_pinned_and_from_pageable_memory(simulated_accelerator: torch.device) -> None:
    """A rehearsal of the calls that a GPU gets; times mean nothing on the simulator."""
    batch = transfer._model_input(20)
    for host, given in ((transfer.PINNED, transfer._pin(batch)), (transfer.PAGEABLE, batch)):
        with simulator.checked("random", 3):
            rows = list(transfer._compare("b", given, 2, simulated_accelerator, host))
        pins = [tensor.is_pinned() for tensor in transfer.tensors_in(given)]
        assert pins == [host == transfer.PINNED] * len(pins)
        assert {row.figures["host"] for row in rows} == {host}
        assert {row.figures["on"] for row in rows} == {"simulator"}
        assert any(row.name.endswith(transfer.PACKED) for row in rows)
    nbytes = 1000
    assert transfer._raw_way(nbytes, simulated_accelerator)().numel() == nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_measured_against_a_raw_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_batches", lambda full: {transfer.MIX: ([torch.zeros(1 << 20)], 3)})
    rows = list(transfer.run())
    assert {row.figures["host"] for row in rows} == {transfer.PINNED, transfer.PAGEABLE}
    raw = [row for row in rows if row.name.endswith(transfer.RAW)]
    assert [row.figures["of_raw"] for row in raw] == [1.0, 1.0]
    assert all(float(row.figures["gb_per_second"] or 0) > 0 for row in rows)


def test_targets_that_are_missed_are_named() -> None:
    rows = [Row(f"{target.batch}: {target.way}", {target.figure: target.at_most}) for target in transfer.TARGETS[1:]]
    rows.append(Row(f"{transfer.STRESS}: {transfer.PER_BATCH}", {"operations": 13, "ratio": 0.3}))
    assert transfer.missed(rows) == [f"{transfer.STRESS}: {transfer.PER_BATCH}: operations is 13, not at most 12"]


def test_a_gpus_own_targets_are_held_to_where_one_was_measured() -> None:
    rows = [Row(f"{target.batch}: {target.way}", {target.figure: target.at_most}) for target in transfer.TARGETS[2:5]]
    good = {"operations": 12, "ratio": 0.1, "of_raw": 0.97, "on": "GPU"}
    names = [f"{batch}: {transfer.PER_BATCH}" for batch in (transfer.STRESS, transfer.LARGE, transfer.KJT)]
    rows = [row for row in rows if row.name not in names] + [Row(name, good) for name in names]
    assert transfer.missed(rows) == []
    rows[-1] = Row(names[-1], {**good, "of_raw": 0.9})
    assert transfer.missed(rows) == ["1 KJT: ours: of_raw is 0.9, not at least 0.97"]
    rows[-1] = Row(names[-1], {**good, "of_raw": 0.9, "on": "CPU"})
    assert len(transfer.missed(rows)) == 1  # the other rows are a GPU's


def test_time_that_grows_more_than_linearly_is_named() -> None:
    good = [Row(f"{one.batch}: {one.way}", {one.figure: one.at_most}) for one in transfer.TARGETS[2:]]
    good.append(Row(f"{transfer.STRESS}: {transfer.PER_BATCH}", {"operations": 3, "ratio": 0.3}))
    quarter = Row(f"{transfer.QUARTER}: {transfer.PER_BATCH}", {"min": 100.0})

    def many(least: float) -> Row:
        return Row(f"{transfer.MANY}: {transfer.PER_BATCH}", {"ratio": 0.4, "min": least})

    assert transfer.missed([*good, quarter, many(490.0)]) == []
    assert "more than linear" in transfer.missed([*good, quarter, many(510.0)])[0]
