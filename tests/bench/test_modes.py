"""What the pipelines hold, on the simulator."""

import pytest

from torchrec_prealloc.bench import modes
from torchrec_prealloc.bench.table import Row


@pytest.mark.usefixtures("simulated_accelerator")
def test_ours_holds_nothing_on_the_copy_stream_and_no_more_than_a_blocking_copy_and_one_batch() -> None:
    rows = list(modes.run())
    assert modes.missed(rows) == []
    figures = {row.name: row.figures for row in rows}
    for pipeline in ("TrainPipelineBase", "TrainPipelineSparseDist"):
        theirs, ours = (figures[f"{pipeline}: {way}"] for way in (modes.NON_BLOCKING, modes.OURS))
        assert theirs["copy_stream"]
        assert theirs["reserved"] > ours["reserved"]


@pytest.mark.parametrize(
    ("reserved", "copy_stream", "said"), [(90, 2, "copy stream holds 2"), (200, 0, "200 MiB are more")]
)
def test_what_ours_holds_too_much_is_said(reserved: int, copy_stream: int, said: str) -> None:
    rows = [
        Row(f"P: {modes.BLOCKING}", {"reserved": 100, "copy_stream": 0}),
        Row(f"P: {modes.OURS}", {"reserved": reserved, "copy_stream": copy_stream}),
    ]
    (one,) = modes.missed(rows)
    assert said in one
