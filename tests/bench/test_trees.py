"""The benchmark of finding and rebuilding runs, and says what misses its targets. No time is tested here."""

from __future__ import annotations

from torchrec_prealloc.bench.table import Row, Table
from torchrec_prealloc.bench.trees import COLUMNS, STEPS, TARGETS, run


def test_each_batch_has_all_figures() -> None:
    rows = run(rounds=3)
    assert [row.figures["leaves"] for row in rows] == [600, 606, 600, 10_000]
    assert Table("batch", COLUMNS, tuple(rows)).text().count("\n") > len(rows)
    for row in rows:
        for step in STEPS:
            least, middle, most = (float(row.figures[step + end] or 0) for end in ("_min", "", "_max"))
            assert 0 < least <= middle <= most


def test_what_misses_its_target_is_said() -> None:
    def missed(**figures: float) -> list[str]:
        return TARGETS.missed([Row("b", {"leaves": 100, "find": 1.2, "flatten": 2.0, "rebuild": 1.0, **figures})])

    assert missed() == []
    assert missed(find=1.6) == ["b: find takes 1.600 µs a tensor, not under 1.500"]
    assert missed(flatten=1.1) == ["b: find takes 1.200 µs a tensor, tree_flatten 1.100"]
    assert missed(rebuild=1.5) == ["b: rebuild takes 1.500 µs a tensor, not under 1.5"]
