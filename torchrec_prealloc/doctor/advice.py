"""What in a batch costs time, each with its remedy."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrec_prealloc import PackedBatch
from torchrec_prealloc.doctor.explained import ExplainedLeaf
from torchrec_prealloc.doctor.names import JAGGED
from torchrec_prealloc.doctor.reasons import Route, size_text
from torchrec_prealloc.doctor.tree import Tree
from torchrec_prealloc.doctor.trial import Trial
from torchrec_prealloc.unpinned import unpinnable

MANY = 100
"""Tensors from which on each one's way through a DataLoader's worker costs more than its bytes."""
LOOKED_AT = 1 << 22
"""Values of a batch that are looked at: a few milliseconds."""
WORTH = 1 << 10
"""Bytes of int64 values from which on half of them are worth a line."""
LARGE_STORAGE, TIMES_USED = 1 << 20, 4
"""A storage of at least so many bytes, and more than so many times those that leaves view, is worth a line."""
INT32_MAX = (1 << 31) - 1


class Cost(enum.Enum):
    """What costs time."""

    UNPINNABLE = "a class without pin_memory"
    UNPINNED = "memory that is not pinned"
    MANY_TENSORS = "many small tensors"
    INT64_LENGTHS = "int64 lengths"
    INT64_VALUES = "int64 values that fit in int32"
    NOT_DENSE = "gaps between elements"
    REQUIRES_GRAD = "leaves that require grad"
    OTHER_DEVICE = "tensors on another device"
    OWN_TENSOR = "tensors that are more than host memory"
    OWN_TO = "a class whose `to` runs for each batch"
    OPAQUE = "a class whose `to` cannot be observed"
    UNUSED_STORAGE = "large storage viewed in small part"
    NOT_UNDERSTOOD = "a class that is not looked into"


@dataclass(frozen=True)
class Advice:
    """One thing that costs time."""

    cost: Cost
    text: str
    """What it is, where, and how much."""
    remedy: str
    leaves: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.text} -> {self.remedy}"


def advise(batch: Any, tree: Tree, trial: Trial, can_pin: bool, taken_for_pinned: bool) -> tuple[Advice, ...]:
    """What costs time in a batch that was tried, the dearest kinds first.

    Args:
        can_pin: whether this machine pins memory.
        taken_for_pinned: whether the batch's memory is told to be pinned, whatever it is.
    """
    found = (
        *_classes(tree, trial),
        *_pinning(batch, tree, trial, can_pin, taken_for_pinned),
        *_tensors(tree),
        *_many(batch, tree),
        *_integers(tree),
        *_storages(tree),
    )
    return tuple(found)


def _say(cost: Cost, leaves: Sequence[ExplainedLeaf], what: str, effect: str, remedy: str) -> Advice:
    nbytes = sum(leaf.nbytes for leaf in leaves)
    where = leaves[0].path + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")
    text = f"{what}: {where} ({size_text(nbytes)})" + (f", {effect}" if effect else "")
    return Advice(cost, text, remedy, len(leaves), nbytes)


def _classes(tree: Tree, trial: Trial) -> Iterator[Advice]:
    """Classes that go their own way, or none."""
    for path, obj in tree.passed:
        name = type(obj).__name__
        yield Advice(
            Cost.NOT_UNDERSTOOD,
            f"{path}: {name} is passed on as it is, and its tensors stay on the host",
            f"register_batch_type({name}, flatten, unflatten), if they are to travel",
        )
    for cls in {type(ran.obj): None for ran in trial.own.values()}:
        known, name = trial.known[cls], cls.__name__
        remedy = f"let it only move its fields, or say what moves with register_batch_type({name}, flatten, unflatten)"
        if known.opaque:
            text = f"{name}.to cannot run while its copies are observed ({known.failure}), and does not overlap"
            yield Advice(Cost.OPAQUE, text, remedy)
        else:
            text = f"{name}.to does more than to move fields, so it runs for each batch"
            yield Advice(Cost.OWN_TO, text, remedy)


def _pinning(batch: Any, tree: Tree, trial: Trial, can_pin: bool, taken_for_pinned: bool) -> Iterator[Advice]:
    if not trial.place.streams:
        return
    moved = (Route.DIRECT, Route.GATHERED, Route.BACKGROUND)
    loose = [leaf for leaf, _ in tree.tensors if leaf.route in moved and leaf.pinned is not True and leaf.nbytes]
    cls = unpinnable(batch)
    if cls is not None and (loose or taken_for_pinned or not can_pin):
        yield Advice(
            Cost.UNPINNABLE,
            f"DataLoader(pin_memory=True) leaves a batch of class {cls.__name__} unpinned, and says nothing",
            f"give {cls.__name__} a pin_memory() that returns it around pinned tensors",
            len(loose),
            sum(leaf.nbytes for leaf in loose),
        )
    elif loose and can_pin:
        effect = "copied into pinned memory first"
        yield _say(Cost.UNPINNED, loose, "not pinned", effect, "DataLoader(pin_memory=True)")


def _tensors(tree: Tree) -> Iterator[Advice]:
    """Tensors that are more than dense host memory."""
    plain_way = (Route.DIRECT, Route.GATHERED, Route.BACKGROUND)
    loose = [leaf for leaf, _ in tree.tensors if leaf.dense is False and leaf.route in plain_way]
    if loose:
        effect = "read one by one (a slice, an expanded tensor)"
        yield _say(Cost.NOT_DENSE, loose, "gaps between elements", effect, ".contiguous() in the worker that makes it")
    own = [(leaf, tensor) for leaf, tensor in tree.tensors if leaf.route is Route.OWN_TO]
    away = [leaf for leaf, _ in own if leaf.device.type != "cpu"]
    if away:
        effect = "copied from there on the main stream"
        yield _say(Cost.OTHER_DEVICE, away, f"on {away[0].device}", effect, "make it on the host, or on the target")
    graph = [leaf for leaf, _ in own if leaf.device.type == "cpu" and leaf.requires_grad]
    late = "moved by its own `to` on the main stream, not overlapped"
    if graph:
        remedy = ".detach() in the collate function, unless the host wants the gradient"
        yield _say(Cost.REQUIRES_GRAD, graph, "requires grad", late, remedy)
    kinds: dict[str, list[ExplainedLeaf]] = {}
    for leaf, tensor in own:
        if leaf.device.type == "cpu" and not leaf.requires_grad:
            kind = _kind_of_tensor(tensor)
            if kind:
                kinds.setdefault(kind, []).append(leaf)
    for kind, leaves in kinds.items():
        remedy = "plain tensors of its parts in the batch, and it made of them on the device"
        yield _say(Cost.OWN_TENSOR, leaves, kind, late, remedy)


def _kind_of_tensor(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested tensor"
    if type(tensor) is not Tensor:
        return f"a {type(tensor).__name__}, not a Tensor"
    if tensor.is_quantized:
        return "quantized tensor"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    return "conjugate or negative view" if tensor.is_conj() or tensor.is_neg() else ""


def _many(batch: Any, tree: Tree) -> Iterator[Advice]:
    small = [leaf for leaf, _ in tree.tensors if leaf.route is Route.GATHERED]
    if len(small) >= MANY and not isinstance(batch, PackedBatch):
        yield Advice(
            Cost.MANY_TENSORS,
            f"{len(small)} small tensors ({size_text(sum(leaf.nbytes for leaf in small))}): in a DataLoader's worker "
            "each takes shared memory and a file descriptor of its own",
            "collate_fn=packed(collate_fn) hands them over as one",
            len(small),
            sum(leaf.nbytes for leaf in small),
        )


# Integers --------------------------------------------------------------------------------------------------------


def _integers(tree: Tree) -> Iterator[Advice]:
    on_host = ((leaf, tensor) for leaf, tensor in tree.tensors if leaf.device.type == "cpu")
    wide = {id(one): leaf for leaf, one in on_host if leaf.dtype is torch.int64 and id(one) not in tree.sections}
    lengths = [leaf for _, obj in tree.containers for leaf in _lengths_of(obj, wide)]
    if lengths:
        yield _say(
            Cost.INT64_LENGTHS,
            list(dict.fromkeys(lengths)),
            "int64 lengths or offsets",
            "",
            "lengths.to(torch.int32) where the jagged tensors are made: half the bytes",
        )
    known = set(lengths)
    fitting, largest, left = [], 0, LOOKED_AT
    for leaf, tensor in tree.tensors:
        if id(tensor) not in wide or leaf in known or not leaf.dense or not leaf.nbytes or left <= 0:
            continue
        seen = _extremes(tensor, left)
        left -= tensor.numel()
        if max(abs(one) for one in seen) <= INT32_MAX:
            fitting.append(leaf)
            largest = max(largest, *map(abs, seen))
    looked_at = "this batch" if left > 0 else f"the first {LOOKED_AT:,} of this batch"
    if sum(leaf.nbytes for leaf in fitting) >= WORTH:
        yield _say(
            Cost.INT64_VALUES,
            fitting,
            "int64 values",
            f"none beyond {largest:,} in {looked_at}",
            ".to(torch.int32) in the collate function, if that holds for all batches: half the bytes",
        )


def _lengths_of(obj: Any, wide: dict[int, ExplainedLeaf]) -> Iterator[ExplainedLeaf]:
    if type(obj) in JAGGED:
        for name in ("_lengths", "_offsets"):
            leaf = wide.get(id(obj.__dict__.get(name)))
            if leaf is not None:
                yield leaf


def _extremes(tensor: Tensor, most: int) -> tuple[int, int]:
    flat = tensor.as_strided((tensor.numel(),), (1,))[:most]
    low, high = torch.aminmax(flat)
    return int(low), int(high)


# Storages --------------------------------------------------------------------------------------------------------


def _storages(tree: Tree) -> Iterator[Advice]:
    """Storages of which little is used: a worker hands over all of it, and all of it lives as long as the batch."""
    used: Counter[int] = Counter()
    views: dict[int, list[ExplainedLeaf]] = {}
    for leaf, _ in tree.tensors:
        if leaf.storage is not None and leaf.device.type == "cpu":
            used[leaf.storage] += leaf.nbytes
            views.setdefault(leaf.storage, []).append(leaf)
    for storage, leaves in views.items():
        held = leaves[0].storage_nbytes
        if held >= LARGE_STORAGE and held > TIMES_USED * used[storage]:
            effect = f"of a storage of {size_text(held)}, which a worker hands over, and the batch keeps alive, whole"
            yield _say(Cost.UNUSED_STORAGE, leaves, "a small part", effect, ".clone() of the part that is used")
