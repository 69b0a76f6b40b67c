"""What is told of a batch: its leaves, the tree that they are in, and the segments that they travel in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchrec_prealloc.doctor.reasons import Route


@dataclass(frozen=True)
class ExplainedLeaf:
    """One tensor of the host's batch."""

    path: str
    """Where it is, as in `batch.features[0]`; the first place, if it is in several."""
    type: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    """None for a nested tensor."""
    nbytes: int
    """Of its elements."""
    device: torch.device
    pinned: bool | None
    """None where that cannot be asked: no accelerator, no elements, or no plain host memory."""
    dense: bool | None
    """Whether its elements lie side by side; None where it is more than strided memory."""
    requires_grad: bool
    storage: int | None
    """Number of its storage among the batch's; None where it is more than strided memory."""
    storage_nbytes: int
    shared: int
    """Leaves that view that storage."""
    route: Route
    segment: int | None
    """Index of its `ExplainedSegment`; None where it does not travel with the batch's copies."""
    why: str


@dataclass(frozen=True)
class ExplainedNode:
    """A leaf, or a container of some."""

    name: str
    """What follows its parent's path."""
    path: str
    type: str
    note: str = ""
    children: tuple[ExplainedNode, ...] = ()
    leaf: ExplainedLeaf | None = None
    again: str = ""
    """Where the same object was met before; its children are there."""

    def nodes(self) -> Iterator[ExplainedNode]:
        """This one, and all below it."""
        yield self
        for child in self.children:
            yield from child.nodes()


@dataclass(frozen=True)
class ExplainedSegment:
    """One device allocation, and the copy into it."""

    route: Route
    nbytes: int
    """Allocated."""
    copied: int
    """Bytes of the copy: alignment included, rounding not."""
    itemsize: int
    """Of what is copied: pieces end between items."""
    leaves: int

    def pieces(self, chunk_bytes: int) -> int:
        """The copies that it takes, in pieces of at most `chunk_bytes`; 0: in one."""
        items, piece = self.copied // self.itemsize, max(chunk_bytes // self.itemsize, 1)
        return -(-items // piece) if chunk_bytes and items > piece else 1
