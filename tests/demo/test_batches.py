"""The seed alone decides the batches; ranks share them without overlap and in step."""

from __future__ import annotations

import pytest
import torch
from torchrec.datasets.utils import Batch

from torchrec_prealloc.demo.batches import Share, TestBatches, TrainBatches, make_batch
from torchrec_prealloc.demo.samples import Samples
from torchrec_prealloc.errors import CommandError


def same(first: Batch, second: Batch) -> bool:
    return (
        torch.equal(first.dense_features, second.dense_features)
        and torch.equal(first.labels, second.labels)
        and torch.equal(first.sparse_features.values(), second.sparse_features.values())
        and torch.equal(first.sparse_features.lengths(), second.sparse_features.lengths())
    )


def test_same_seed_same_batches(samples: Samples) -> None:
    batches = TrainBatches(samples, 32, 5, seed=1)
    assert all(same(a, b) for a, b in zip(batches, batches, strict=True))


def test_another_seed_other_batches(samples: Samples) -> None:
    first, second = (next(iter(TrainBatches(samples, 32, 1, seed=seed))) for seed in (1, 2))
    assert not same(first, second)


def test_an_epoch_holds_every_sample_once(samples: Samples) -> None:
    size = 4096
    steps = samples.train // size
    users = torch.cat([batch.sparse_features["user_id"].values() for batch in TrainBatches(samples, size, steps)])
    order = torch.randperm(samples.train, generator=torch.Generator().manual_seed(0))
    assert torch.equal(users, samples.row_of["user_id"][order[: steps * size]])


def test_the_next_epoch_has_another_order(samples: Samples) -> None:
    size = samples.train // 2
    first, _, third, _ = TrainBatches(samples, size, 4)
    assert not same(first, third)


def test_lengths_and_values_of_the_jagged_tensor_agree(samples: Samples) -> None:
    rows = torch.tensor([5, 99_000, 42_000])
    batch = make_batch(samples, rows)
    jagged = batch.sparse_features
    assert jagged.keys() == ["user_id", "item_id", "genres", "title", "history"]
    assert jagged.stride() == 3
    assert jagged.values().dtype == torch.int64
    assert jagged.lengths().dtype == torch.int32
    assert int(jagged.lengths().sum()) == len(jagged.values())
    for key in samples.sparse:
        values, lengths = samples.sparse[key].take(samples.row_of[key][rows])
        assert jagged[key].values().tolist() == values.tolist()
        assert jagged[key].lengths().tolist() == lengths.tolist()
    assert jagged["user_id"].lengths().tolist() == [1, 1, 1]
    assert batch.dense_features.shape == (3, 3)
    assert batch.labels.shape == (3,)


def test_features_are_jagged_indeed(samples: Samples) -> None:
    jagged = next(iter(TrainBatches(samples, 256, 1))).sparse_features
    for key in ("genres", "title", "history"):
        assert len(jagged[key].lengths().unique()) > 2


def test_ranks_get_the_two_halves_of_what_one_rank_would_get(samples: Samples) -> None:
    (whole,) = TrainBatches(samples, 64, 1)
    (left,), (right,) = (TrainBatches(samples, 32, 1, share=Share(rank, 2)) for rank in (0, 1))
    assert torch.equal(torch.cat([left.labels, right.labels]), whole.labels)
    assert torch.equal(torch.cat([left.dense_features, right.dense_features]), whole.dense_features)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_test_equally_many_batches_of_equal_sizes(samples: Samples, ranks: int) -> None:
    sizes = [[len(b.labels) for b in TestBatches(samples, 1000, Share(rank, ranks))] for rank in range(ranks)]
    assert all(one == sizes[0] for one in sizes)
    left_out = len(samples.labels) - samples.train - ranks * sum(sizes[0])
    assert 0 <= left_out < ranks


def test_no_test_sample_is_trained_on(samples: Samples) -> None:
    tested = torch.cat([batch.dense_features for batch in TestBatches(samples, 1024)])
    assert torch.equal(tested, samples.dense[samples.train :])


def test_a_batch_larger_than_the_training_set_is_refused(samples: Samples) -> None:
    with pytest.raises(CommandError, match="smaller --batch-size"):
        TrainBatches(samples, 50_000, 1, share=Share(0, 2))
