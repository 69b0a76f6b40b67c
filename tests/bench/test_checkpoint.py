"""The checkpoint benchmark runs, and says what misses its targets. No time is tested here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_prealloc.bench import checkpoint as bench
from torchrec_prealloc.bench.table import Row, Table


def test_each_way_has_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "_peak_in_child", lambda name, nbytes: None)
    rows = bench.run()
    assert [row.name for row in rows] == list(bench.ways(torch.device("cpu")))
    assert Table("stager", bench.COLUMNS, tuple(rows)).text().count("\n") > len(rows)
    for row in rows:
        least, middle, most = (float(row.figures[key] or 0) for key in ("later_min", "later", "later_max"))
        assert 0 < least <= middle <= most
        assert float(row.figures["step"] or 0) > 0
        assert row.figures["peak"] is None
    # One for each table that is large enough to travel alone, one for all the rest.
    assert 2 <= int(rows[-1].figures["copies"] or 0) <= bench.TABLES + 1


def test_every_way_stages_what_is_there() -> None:
    state = bench.a_state(1 << 20, torch.device("cpu"))
    for make in bench.ways(torch.device("cpu")).values():
        stager = make()
        staged = stager.stage(state)
        staged = staged if isinstance(staged, dict) else staged.result()
        assert all(torch.equal(staged[name], tensor) for name, tensor in state.items())
        assert all(staged[name].data_ptr() != tensor.data_ptr() for name, tensor in state.items())
        stager.close()


def test_a_stager_that_serves_one_save_only_is_made_anew_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(bench.DefaultStager):  # type: ignore[misc]
        """As torch 2.11's."""

        def _stage(self, state_dict: Any, **options: Any) -> Any:
            staged = super()._stage(state_dict, **options)
            self._state_dict_stager.close()
            return staged

    monkeypatch.setattr(bench, "DefaultStager", Once)
    state = bench.a_state(1 << 20, torch.device("cpu"))
    for name in ("DefaultStager", "DefaultStager, thread"):
        stager = bench.ways(torch.device("cpu"))[name]()
        assert isinstance(stager, bench.NewEachTime)
        for _ in range(3):
            staged = stager.stage(state)
            staged = staged if isinstance(staged, dict) else staged.result()
            assert torch.equal(staged["dense.1"], state["dense.1"])
        stager.close()


def test_what_misses_its_target_is_said() -> None:
    def missed(**figures: float) -> list[str]:
        ours = {"against_best": 0.7, "first_against_best": 1.0, "peak": 850.0, **figures}
        return bench.TARGETS.missed([Row("DefaultStager", {"peak": 850.0}), Row("ours", ours)])

    assert missed() == []
    assert missed(against_best=0.95) == ["later saves: stopped 0.95 of the best other way's time, not 0.9"]
    assert missed(first_against_best=1.2) == ["the first save: stopped 1.20 of the best other way's time, not 1.05"]
    assert missed(peak=852.0) == ["peak RSS 852 MiB, above DefaultStager's 850"]
