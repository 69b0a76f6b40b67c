"""`explain(batch)`: what a batch is made of, how the engine will move it, and what in it costs time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.doctor.advice import Advice, Cost, advise
from torchrec_prealloc.doctor.explained import ExplainedLeaf, ExplainedNode, ExplainedSegment
from torchrec_prealloc.doctor.place import Place
from torchrec_prealloc.doctor.reasons import Route
from torchrec_prealloc.doctor.render import render
from torchrec_prealloc.doctor.tree import Tree
from torchrec_prealloc.doctor.trial import try_out


@dataclass(frozen=True)
class Explanation:
    """How the engine moves a batch: the second of its class and later ones. `str()` is the report."""

    batch_type: str
    device: torch.device
    device_is_here: bool
    """False: the device is not in this machine, and this is what would happen there."""
    can_pin: bool
    """Whether this machine pins memory: without an accelerator nothing is pinned."""
    taken_for_pinned: bool
    config: PreallocConfig
    root: ExplainedNode
    """The batch as a tree."""
    leaves: tuple[ExplainedLeaf, ...]
    """Each distinct tensor once."""
    segments: tuple[ExplainedSegment, ...]
    """The device allocations, each with one copy."""
    advice: tuple[Advice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def copies(self) -> int:
        """Copies to the device, as `TransferStats.copies` counts them."""
        return sum(segment.pieces(self.config.chunk_bytes) for segment in self.segments)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the device, alignment included, as `TransferStats.bytes` counts them."""
        return sum(segment.copied for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Device memory of the segments, rounding included."""
        return sum(segment.nbytes for segment in self.segments)

    def of_route(self, route: Route) -> tuple[ExplainedLeaf, ...]:
        """The leaves that travel in one way."""
        return tuple(leaf for leaf in self.leaves if leaf.route is route)

    def without(self, costs: Collection[Cost]) -> Explanation:
        """The same without advice on some costs."""
        return replace(self, advice=tuple(one for one in self.advice if one.cost not in costs))

    def __str__(self) -> str:
        return render(self)


def explain(
    batch: Any,
    device: torch.device | str | None = None,
    config: PreallocConfig | Mapping[str, Any] | None = None,
    *,
    isolate: bool = False,
    pinned: bool = False,
) -> Explanation:
    """How the engine will move a batch, by its own decisions; nothing is sent, and the batch is left as it is.

    A class' own `to` is run (up to twice), as the engine runs it.

    Args:
        batch: host batch of any type.
        device: where to; by default this machine's accelerator, or CUDA where there is none. Where the device is
            missing, this tells what would happen there.
        config: the engine's options.
        isolate: as in pipelines that free a KeyedJaggedTensor early: each gets memory of its own.
        pinned: take all host tensors for pinned, as those of a loader with `pin_memory=True` will be elsewhere.

    Raises:
        BatchError: the engine would refuse the batch.
        ConfigError: an option is unknown or wrong.
        ValueError: torch knows no such device.
        Exception: what the batch's own `to` raises.
    """
    options = PreallocConfig.of(config)
    place = Place.of(device)
    can_pin = torch.accelerator.is_available()
    trial, walk = try_out(batch, place, options, isolate, pinned)
    tree = Tree(batch, trial, walk, options.direct_bytes, can_pin, pinned)
    return Explanation(
        batch_type=type(batch).__name__,
        device=place.asked,
        device_is_here=place.is_there,
        can_pin=can_pin,
        taken_for_pinned=pinned,
        config=options,
        root=tree.root,
        leaves=tuple(leaf for leaf, _ in tree.tensors),
        segments=tree.segments,
        advice=advise(batch, tree, trial, can_pin, pinned),
    )
