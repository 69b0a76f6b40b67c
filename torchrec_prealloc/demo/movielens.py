"""MovieLens-100K as columns, read from the files that the PyPI package `recbole` carries.

RecBole ("atomic files") writes each table as tab-separated text whose header gives every column a name and a type,
`rating:float`. The package itself is never imported: only its files are looked up.
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from torchrec_prealloc.errors import CommandError

PACKAGE = "recbole"
REMEDY = "pip install --no-deps recbole"
_FOLDER = "recbole/dataset_example/ml-100k"

Cell = str | float | list[str]

_PARSERS: Mapping[str, Callable[[str], Cell]] = {"token": str, "float": float, "token_seq": str.split}


class DatasetError(CommandError):
    """MovieLens-100K is not installed, or its files are not what they were when this module was written."""


@dataclasses.dataclass(frozen=True)
class Rating:
    """One user's rating of one item: 1 to 5 stars, at a time in seconds since 1970 (UTC)."""

    user: str
    item: str
    stars: float
    timestamp: float


@dataclasses.dataclass(frozen=True)
class Item:
    """A film. The title is a list of words, `year` is None where the file leaves it out."""

    title: list[str]
    year: int | None
    genres: list[str]


@dataclasses.dataclass(frozen=True)
class MovieLens:
    """All ratings in the order of the file, and users' ages (years) and items by their identifier."""

    ratings: list[Rating]
    items: dict[str, Item]
    ages: dict[str, int]


def read_movielens() -> MovieLens:
    """Read the installed copy of MovieLens-100K: 100,000 ratings of 1,682 items by 943 users.

    Raises:
        DatasetError: the package or one of its files is missing (the message says how to install it), or a file
            lacks a column.
    """
    return MovieLens(
        ratings=[
            Rating(_token(row, "user_id"), _token(row, "item_id"), _number(row, "rating"), _number(row, "timestamp"))
            for row in read_rows(_installed("ml-100k.inter"))
        ],
        items={
            _token(row, "item_id"): Item(
                title=_words(row, "movie_title"),
                year=int(year) if (year := _token(row, "release_year")).isdigit() else None,
                genres=_words(row, "class"),
            )
            for row in read_rows(_installed("ml-100k.item"))
        },
        ages={_token(row, "user_id"): int(_token(row, "age")) for row in read_rows(_installed("ml-100k.user"))},
    )


def read_rows(path: Path) -> list[dict[str, Cell]]:
    """Read one table; every cell has the type that the header names (`token`, `float` or `token_seq`).

    Raises:
        DatasetError: an unknown type, a row with too few or too many cells, or a cell that is not of its type.
    """
    header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    columns = [_column(path, text) for text in header.split("\t")]
    rows = []
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise DatasetError(f"{path.name}, line {number}: {len(cells)} cells, the header has {len(columns)}")
        try:
            rows.append({name: parse(cell) for (name, parse), cell in zip(columns, cells, strict=True)})
        except ValueError as error:
            raise DatasetError(f"{path.name}, line {number}: {error}") from error
    return rows


def _column(path: Path, text: str) -> tuple[str, Callable[[str], Cell]]:
    name, _, kind = text.partition(":")
    if kind not in _PARSERS:
        raise DatasetError(f"{path.name}: column {text!r} has no known type, expected NAME:{'|'.join(_PARSERS)}")
    return name, _PARSERS[kind]


def _installed(name: str) -> Path:
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(f"{_FOLDER}/{name}")))
    except importlib.metadata.PackageNotFoundError as error:
        raise DatasetError(f"MovieLens-100K comes with the package {PACKAGE}, which is missing: {REMEDY}") from error
    if not path.is_file():
        remedy = REMEDY.replace("install", "install --force-reinstall")
        raise DatasetError(f"the installed {PACKAGE} has no {_FOLDER}/{name}: {remedy}")
    return path


def _cell(row: dict[str, Cell], name: str) -> Cell:
    if name not in row:
        raise DatasetError(f"a file of MovieLens-100K has no column {name!r}, only {', '.join(row)}")
    return row[name]


def _token(row: dict[str, Cell], name: str) -> str:
    return str(_cell(row, name))


def _number(row: dict[str, Cell], name: str) -> float:
    value = _cell(row, name)
    if not isinstance(value, float):
        raise DatasetError(f"column {name!r} of MovieLens-100K is expected to be of type float")
    return value


def _words(row: dict[str, Cell], name: str) -> list[str]:
    value = _cell(row, name)
    if not isinstance(value, list):
        raise DatasetError(f"column {name!r} of MovieLens-100K is expected to be of type token_seq")
    return value
