"""A sample knows nothing of what comes after it, and the test ratings come after the training ratings."""

from __future__ import annotations

import pytest
import torch

from torchrec_prealloc.demo.movielens import Item, MovieLens, Rating
from torchrec_prealloc.demo.samples import Jagged, Samples, earlier_items, make_samples, title_vocabulary


def rows_of(jagged: Jagged) -> list[list[int]]:
    values, lengths = jagged.take(torch.arange(len(jagged.offsets) - 1))
    return [part.tolist() for part in values.split(lengths.tolist())]


def test_history_holds_only_strictly_earlier_ratings_of_the_same_user() -> None:
    users = [1, 1, 2, 1, 1, 2]
    items = [10, 11, 20, 12, 13, 21]
    times = [100, 100, 100, 101, 101, 102]
    assert rows_of(earlier_items(users, items, times, limit=9)) == [[], [], [], [10, 11], [10, 11], [20]]


def test_history_holds_the_latest_items() -> None:
    assert rows_of(earlier_items([1] * 4, [5, 6, 7, 8], [1, 2, 3, 4], limit=2)) == [[], [5], [5, 6], [6, 7]]


def test_histories_of_the_real_data_agree_with_a_search_through_all_ratings(
    movielens: MovieLens, samples: Samples
) -> None:
    ratings = sorted(movielens.ratings, key=lambda rating: rating.timestamp)
    item_numbers = {name: number for number, name in enumerate(movielens.items)}
    for row in torch.randint(len(ratings), (40,), generator=torch.Generator().manual_seed(0)).tolist():
        this = ratings[row]
        earlier = [
            item_numbers[other.item]
            for other in ratings
            if other.user == this.user and other.timestamp < this.timestamp
        ]
        values, lengths = samples.sparse["history"].take(torch.tensor([row]))
        assert values.tolist() == earlier[-20:]
        assert lengths.tolist() == [len(earlier[-20:])]


def test_every_test_rating_is_later_than_every_training_rating(movielens: MovieLens, samples: Samples) -> None:
    times = sorted(rating.timestamp for rating in movielens.ratings)
    assert times[samples.train - 1] < times[samples.train]
    assert samples.train == pytest.approx(90_000, abs=200)


def test_ratings_of_the_second_of_the_split_all_go_to_the_test() -> None:
    source = tiny(times=[1, 2, 3, 3, 3, 3, 3, 3, 3, 4])
    assert make_samples(source, train_share=0.5).train == 2


def test_normalisation_looks_at_training_rows_only() -> None:
    late = tiny(times=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    other = MovieLens([*late.ratings[:9], Rating("old", "1", 5.0, 10.0)], late.items, {**late.ages, "old": 99})
    kept, changed = (make_samples(source, train_share=0.9) for source in (late, other))
    assert torch.equal(kept.dense[:9], changed.dense[:9])
    assert kept.dense[9, 0] != changed.dense[9, 0]


def test_dense_columns_of_the_training_rows_have_mean_0_and_variance_1(samples: Samples) -> None:
    seen = samples.dense[: samples.train]
    torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen.var(0), torch.ones(3), atol=1e-2, rtol=0)


def test_a_film_without_a_year_counts_as_average() -> None:
    source = tiny(times=[1, 2, 3, 4])
    undated = MovieLens(source.ratings, {**source.items, "1": Item(["A"], None, ["Drama"])}, source.ages)
    assert make_samples(undated, train_share=0.5).dense[0, 1] == 0


def test_four_stars_are_a_positive_label() -> None:
    source = MovieLens(
        [Rating("u", "1", stars, time) for time, stars in enumerate([1.0, 3.0, 4.0, 5.0])],
        {"1": Item(["A"], 1990, ["Drama"])},
        {"u": 30},
    )
    assert make_samples(source).labels.tolist() == [0, 0, 1, 1]


def test_rare_title_words_share_number_0() -> None:
    films = [Item(["The", "Rock"], 1996, []), Item(["The,", "rock!"], 1997, []), Item(["The", "The"], 1998, [])]
    assert title_vocabulary([*films, Item(["Fargo", "Fargo"], 1996, [])]) == {"rock": 1, "the": 2}


def test_values_are_within_the_vocabulary(samples: Samples) -> None:
    for name, jagged in samples.sparse.items():
        assert int(jagged.values.min()) >= 0
        assert int(jagged.values.max()) < samples.vocabulary[name]


def test_rows_are_taken_in_the_order_asked_for() -> None:
    jagged = Jagged.of([[1, 2], [], [3], [4, 5, 6]])
    values, lengths = jagged.take(torch.tensor([3, 1, 0, 3]))
    assert values.tolist() == [4, 5, 6, 1, 2, 4, 5, 6]
    assert lengths.tolist() == [3, 0, 2, 3]
    assert [part.tolist() for part in jagged.take(torch.tensor([], dtype=torch.int64))] == [[], []]


def tiny(times: list[int]) -> MovieLens:
    """Ratings of one film by two users at these times."""
    return MovieLens(
        [Rating("ab"[number % 2], "1", 4.0, float(time)) for number, time in enumerate(times)],
        {"1": Item(["A"], 1990, ["Drama"])},
        {"a": 20, "b": 40},
    )
