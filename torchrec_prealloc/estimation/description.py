"""Batches made of a description, for whoever has no code at hand that makes them: sizes count, values do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

Range = tuple[int, int]
"""Smallest and largest, both of them possible."""


class DescribedBatch(Pipelineable):
    """`dense_features` float32 [rows, dense], `sparse_features`, `labels` float32 [rows], and other tensors by name."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"the batch has no {name}") from None

    def to(self, device: torch.device, non_blocking: bool = False) -> DescribedBatch:
        return DescribedBatch({n: value.to(device, non_blocking=non_blocking) for n, value in self.fields.items()})

    def pin_memory(self) -> DescribedBatch:
        return DescribedBatch({name: value.pin_memory() for name, value in self.fields.items()})

    def record_stream(self, stream: Any) -> None:
        for value in self.fields.values():
            value.record_stream(stream)


@dataclasses.dataclass(frozen=True)
class Description:
    """What is in a batch.

    Attributes:
        rows: samples of a batch, drawn for each.
        sparse: of each feature the ids of a row, drawn for each row.
        dense: float32 columns.
        tensors: by name, the shape that a row has in them, and their type.
    """

    rows: Range
    sparse: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    dense: int = 0
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = dataclasses.field(default_factory=dict)

    def batches(self, seed: int = 0) -> Iterator[DescribedBatch]:
        """Without end; one seed gives the same batches."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.batch(draw(self.rows, generator), generator)

    def batch(self, rows: int, generator: torch.Generator) -> DescribedBatch:
        """One host batch. All ids are 0, which every table has."""
        fields: dict[str, Any] = {}
        if self.dense:
            fields["dense_features"] = torch.zeros(rows, self.dense)
        if self.sparse:
            fields["sparse_features"] = self._sparse(rows, generator)
        fields["labels"] = torch.zeros(rows)
        fields.update({name: torch.zeros(rows, *shape, dtype=dtype) for name, (shape, dtype) in self.tensors.items()})
        return DescribedBatch(fields)

    def _sparse(self, rows: int, generator: torch.Generator) -> KeyedJaggedTensor:
        lengths: list[Tensor] = [
            torch.randint(least, most + 1, (rows,), generator=generator, dtype=torch.int32)
            for least, most in self.sparse.values()
        ]
        together = torch.cat(lengths)
        ids = torch.zeros(int(together.sum()), dtype=torch.int64)
        return KeyedJaggedTensor(list(self.sparse), ids, lengths=together)


def draw(span: Range, generator: torch.Generator) -> int:
    """A number of the range, both ends included."""
    return int(torch.randint(span[0], span[1] + 1, (), generator=generator))
