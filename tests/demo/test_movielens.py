"""The files of MovieLens-100K are read as their headers say; what is missing is named with its remedy."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_prealloc.demo import movielens as module
from torchrec_prealloc.demo.movielens import DatasetError, MovieLens, read_movielens, read_rows


def test_the_data_set_is_complete(movielens: MovieLens) -> None:
    assert len(movielens.ratings) == 100_000
    assert len(movielens.items) == 1_682
    assert len(movielens.ages) == 943
    assert {rating.stars for rating in movielens.ratings} == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert movielens.items["1"].title == ["Toy", "Story"]
    assert movielens.items["1"].year == 1995
    assert movielens.items["1"].genres == ["Animation", "Children's", "Comedy"]


def test_every_rating_is_of_a_known_user_and_item(movielens: MovieLens) -> None:
    assert {rating.user for rating in movielens.ratings} == set(movielens.ages)
    assert {rating.item for rating in movielens.ratings} == set(movielens.items)


def test_a_film_without_a_year_has_none(movielens: MovieLens) -> None:
    assert sum(item.year is None for item in movielens.items.values()) in range(1, 20)


def test_recbole_is_not_imported() -> None:
    code = (
        "import sys; from torchrec_prealloc.demo.movielens import read_movielens; read_movielens(); "
        "sys.exit('recbole' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(DatasetError, match=r"recbole.*missing: pip install --no-deps recbole"):
        read_movielens()


def test_a_missing_file_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLDER", "recbole/elsewhere")
    with pytest.raises(DatasetError, match=r"no recbole/elsewhere/ml-100k.inter: pip install --force-reinstall"):
        read_movielens()


def test_cells_have_the_types_of_the_header(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("name:token\tstars:float\twords:token_seq\n7\t3\tEl Niño\n8\t4.5\t\n", encoding="utf-8")
    assert read_rows(table) == [
        {"name": "7", "stars": 3.0, "words": ["El", "Niño"]},
        {"name": "8", "stars": 4.5, "words": []},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name:token\tstars\n", "column 'stars' has no known type"),
        ("name:token\tstars:int\n", "column 'stars:int' has no known type"),
        ("name:token\tstars:float\n7\n", "line 2: 1 cells, the header has 2"),
        ("stars:float\n3\nthree\n", "line 3: could not convert string to float: 'three'"),
        ("", "column '' has no known type"),
    ],
)
def test_a_malformed_file_is_refused_where_it_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "table"
    table.write_text(text, encoding="utf-8")
    with pytest.raises(DatasetError, match=message):
        read_rows(table)


def test_a_missing_column_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("user_id:token\titem_id:token\n1\t2\n", encoding="utf-8")
    monkeypatch.setattr(module, "_installed", lambda name: table)
    with pytest.raises(DatasetError, match=r"no column 'rating', only user_id, item_id"):
        read_movielens()
