"""Features and labels of every rating, and their split by time.

One sample is one rating. Its features are known before the rating is given: who, what, when, and what the same user
rated earlier. Sparse features are jagged: titles, genres and histories have as many values as they have.
"""

import bisect
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from torchrec_prealloc.demo.movielens import Item, MovieLens

HISTORY = 20
DENSE_FEATURES = ("age", "year", "hour")
LIKED_STARS = 4.0


@dataclasses.dataclass(frozen=True)
class Jagged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`, both int64."""

    values: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def of(rows: Iterable[Sequence[int]]) -> "Jagged":
        """Rows given one by one."""
        lists = list(rows)
        lengths = torch.tensor([0, *(len(row) for row in lists)])
        return Jagged(torch.tensor([value for row in lists for value in row], dtype=torch.int64), lengths.cumsum(0))

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (int64) and lengths (int64, one for each entry of `rows`) of the named rows, in that order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        ends = lengths.cumsum(0)
        positions = torch.arange(int(ends[-1]) if len(rows) else 0)
        return self.values[positions + torch.repeat_interleave(starts - ends + lengths, lengths)], lengths


@dataclasses.dataclass(frozen=True)
class Samples:
    """All ratings, oldest first, so that row i is not newer than row i + 1. n rows.

    Attributes:
        sparse: feature name -> jagged rows of the table that `row_of` selects from
        row_of: feature name -> row of `sparse[name]` for each sample, int64 [n]
        vocabulary: feature name -> number of different values
        dense: float32 [n, 3], the columns of `DENSE_FEATURES`, zero mean and unit variance over the training rows
        labels: float32 [n], 1 where the user gave at least 4 of 5 stars
        train: number of leading rows to train on; the later rows are for the test
    """

    sparse: Mapping[str, Jagged]
    row_of: Mapping[str, torch.Tensor]
    vocabulary: Mapping[str, int]
    dense: torch.Tensor
    labels: torch.Tensor
    train: int


def make_samples(source: MovieLens, train_share: float = 0.9, history: int = HISTORY) -> Samples:
    """Turn ratings into samples.

    Args:
        source: the ratings, items and users
        train_share: share of the ratings, oldest first, to train on; ratings of the second in which the training
            rows end all go to the test, so that every test rating is later than every training rating
        history: how many of a user's earlier ratings go into the feature `history`
    """
    ratings = sorted(source.ratings, key=lambda rating: rating.timestamp)
    times = [int(rating.timestamp) for rating in ratings]
    users, user_count = _numbered([rating.user for rating in ratings], source.ages)
    items, item_count = _numbered([rating.item for rating in ratings], source.items)
    film_list = list(source.items.values())
    genres = sorted({genre for film in film_list for genre in film.genres})
    words = title_vocabulary(film_list)
    train = bisect.bisect_left(times, times[int(len(times) * train_share)])
    return Samples(
        sparse={
            "user_id": Jagged.of([[number] for number in range(user_count)]),
            "item_id": Jagged.of([[number] for number in range(item_count)]),
            "genres": Jagged.of([[genres.index(genre) for genre in film.genres] for film in film_list]),
            "title": Jagged.of([[words.get(word, 0) for word in title_words(film)] for film in film_list]),
            "history": earlier_items(users, items, times, history),
        },
        row_of={
            "user_id": torch.tensor(users),
            "item_id": torch.tensor(items),
            "genres": torch.tensor(items),
            "title": torch.tensor(items),
            "history": torch.arange(len(ratings)),
        },
        vocabulary={
            "user_id": user_count,
            "item_id": item_count,
            "genres": len(genres),
            "title": len(words) + 1,
            "history": item_count,
        },
        dense=_dense(
            [source.ages[rating.user] for rating in ratings],
            [source.items[rating.item].year for rating in ratings],
            [time // 3600 % 24 for time in times],
            train,
        ),
        labels=torch.tensor([float(rating.stars >= LIKED_STARS) for rating in ratings]),
        train=train,
    )


def earlier_items(users: Sequence[int], items: Sequence[int], times: Sequence[int], limit: int) -> Jagged:
    """For each rating: the last `limit` items which that user rated strictly before it, oldest first.

    Ratings of the same second are no history for one another: nobody knows which of them came first. The arguments
    are of one length, ordered by time (seconds).
    """
    past: dict[int, list[tuple[int, int]]] = {}
    rows = []
    for user, item, time in zip(users, items, times, strict=True):
        rated = past.setdefault(user, [])
        end = len(rated)
        while end and rated[end - 1][0] == time:
            end -= 1
        rows.append([earlier for _, earlier in rated[max(0, end - limit) : end]])
        rated.append((time, item))
    return Jagged.of(rows)


def title_words(film: Item) -> list[str]:
    """The words of a title in lower case, without punctuation."""
    return re.findall(r"[a-z0-9']+", " ".join(film.title).lower())


def title_vocabulary(films: Iterable[Item]) -> dict[str, int]:
    """Words that occur in at least two titles, numbered from 1; number 0 stands for every other word."""
    counts = Counter(word for film in films for word in set(title_words(film)))
    return {word: number for number, word in enumerate(sorted(w for w, n in counts.items() if n > 1), start=1)}


def _numbered(names: list[str], known: Iterable[str]) -> tuple[list[int], int]:
    number_of = {name: number for number, name in enumerate(known)}
    return [number_of[name] for name in names], len(number_of)


def _dense(ages: list[int], years: list[int | None], hours: list[int], train: int) -> torch.Tensor:
    known = [float("nan") if year is None else year for year in years]
    columns = torch.tensor(list(zip(ages, known, hours, strict=True)), dtype=torch.float32)
    seen = columns[:train]
    mean = seen.nanmean(0)
    deviation = (seen - mean).square().nanmean(0).sqrt().clamp_min(1e-6)
    # A film without a year counts as one of the average year.
    return ((columns - mean) / deviation).nan_to_num(0.0)
