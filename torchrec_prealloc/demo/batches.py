"""Batches of samples, in an order that only the seed decides, one share for each rank."""

import dataclasses
from collections.abc import Iterator

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_prealloc.demo.samples import Samples
from torchrec_prealloc.errors import CommandError


@dataclasses.dataclass(frozen=True)
class Share:
    """Which part of every batch this process trains on."""

    rank: int = 0
    ranks: int = 1


@dataclasses.dataclass(frozen=True)
class TrainBatches:
    """`steps` batches of shuffled training samples; iterating again gives the same batches again.

    Each epoch has its own order; samples that fill no whole batch at its end are left out. Ranks get different
    samples of the same order.

    Attributes:
        samples: where they come from
        batch_size: samples in one batch of one rank
        steps: number of batches
        seed: decides the order
        share: this process' part
        pin: put the batches into pinned memory, which copies to a GPU need to be asynchronous
    """

    samples: Samples
    batch_size: int
    steps: int
    seed: int = 0
    share: Share = Share()
    pin: bool = False

    def __post_init__(self) -> None:
        if self.batch_size * self.share.ranks > self.samples.train:
            raise CommandError(
                f"a batch of {self.batch_size} on each of {self.share.ranks} ranks is more than "
                f"the {self.samples.train} training samples: choose a smaller --batch-size"
            )

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        together = self.batch_size * self.share.ranks
        per_epoch = self.samples.train // together
        for step in range(self.steps):
            if step % per_epoch == 0:
                order = torch.randperm(self.samples.train, generator=generator)
            start = step % per_epoch * together + self.share.rank * self.batch_size
            batch = make_batch(self.samples, order[start : start + self.batch_size])
            yield batch.pin_memory() if self.pin else batch


@dataclasses.dataclass(frozen=True)
class TestBatches:
    """The test samples, oldest first, in batches of at most `batch_size`.

    All ranks get equally many batches of equal sizes, as the collectives of a sharded model require; at most
    `ranks - 1` samples are left out for that.
    """

    __test__ = False

    samples: Samples
    batch_size: int
    share: Share = Share()
    pin: bool = False

    def __iter__(self) -> Iterator[Batch]:
        rows = torch.arange(self.samples.train, len(self.samples.labels))
        usable = len(rows) // self.share.ranks * self.share.ranks
        for part in torch.split(rows[self.share.rank : usable : self.share.ranks], self.batch_size):
            batch = make_batch(self.samples, part)
            yield batch.pin_memory() if self.pin else batch


def make_batch(samples: Samples, rows: torch.Tensor) -> Batch:
    """The batch of the named samples, on the host.

    Args:
        samples: where they come from
        rows: which of them, int64 [B]

    Returns:
        dense float32 [B, 3]; a KeyedJaggedTensor of five keys with int64 values and int32 lengths [5 * B];
        labels float32 [B].
    """
    values, lengths = zip(*(samples.sparse[key].take(samples.row_of[key][rows]) for key in samples.sparse), strict=True)
    return Batch(
        dense_features=samples.dense[rows],
        sparse_features=KeyedJaggedTensor(
            keys=list(samples.sparse), values=torch.cat(values), lengths=torch.cat(lengths).to(torch.int32)
        ),
        labels=samples.labels[rows],
    )
