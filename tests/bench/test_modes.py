"""What one tensor and the pipelines hold in the three ways, on the simulator."""

import pytest

from torchrec_prealloc.bench import modes
from torchrec_prealloc.bench.table import Row
from torchrec_prealloc.ways import BLOCKING, NON_BLOCKING, PREALLOCATED


@pytest.mark.usefixtures("simulated_accelerator")
def test_ours_holds_nothing_on_side_streams_and_no_more_than_a_blocking_copy_and_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modes, "BATCH_MIB", 12)
    rows = list(modes.run())
    assert modes.missed(rows) == []
    figures = {row.name: row.figures for row in rows}
    for what in (modes.ONE_TENSOR, "TrainPipelineBase", "TrainPipelineSparseDist"):
        theirs, ours = (figures[f"{what}: {way}"] for way in (NON_BLOCKING, PREALLOCATED))
        assert theirs["side"]
        assert theirs["reserved"] > ours["reserved"]  # type: ignore[operator]
    coarse = figures[f"TrainPipelineSparseDist: {PREALLOCATED}, {modes.COARSE}"]
    assert coarse["reserved"] == 3 * 16  # the batches alive, each in a power of two
    assert {row.figures["on"] for row in rows} == {"simulator"}


@pytest.mark.usefixtures("simulated_accelerator")
def test_one_tensor_has_the_figures_of_the_original_report() -> None:
    gigabytes = [
        round(modes._one_tensor(way, modes.simulated_device()).reserved / 1e9, 2)
        for way in (BLOCKING, NON_BLOCKING, PREALLOCATED)
    ]
    assert gigabytes == [0.13, 0.15, 0.13]


@pytest.mark.parametrize(("reserved", "side", "said"), [(90, 2, "side streams hold 2"), (200, 0, "200.0 MiB are too")])
def test_what_ours_holds_too_much_is_said(reserved: int, side: int, said: str) -> None:
    rows = [
        Row(f"P: {BLOCKING}", {"reserved": 100, "side": 0}),
        Row(f"P: {PREALLOCATED}", {"reserved": reserved, "side": side}),
    ]
    (one,) = modes.missed(rows)
    assert said in one


@pytest.mark.parametrize(("way", "reserved"), [(NON_BLOCKING, 128), (PREALLOCATED, 130)])
def test_another_figure_for_the_one_tensor_is_said(way: str, reserved: int) -> None:
    rows = [
        Row(f"{modes.ONE_TENSOR}: {BLOCKING}", {"reserved": 128, "side": 0}),
        Row(f"{modes.ONE_TENSOR}: {way}", {"reserved": reserved, "side": 0}),
    ]
    assert len(modes.missed(rows)) == 1
