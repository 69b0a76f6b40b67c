"""What memory was allocated for, by the Python frames under which it was."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an allocation is for; the value is its name in reports."""

    COPY = "TorchRec's copy"
    INPUT_DIST = "input dist"
    LOOKUP = "embedding prefetch"
    OUTPUT_DIST = "output dist"
    OURS = "torchrec_prealloc"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """One reason for allocations.

    Attributes:
        kind: what for
        site: the frame that says so, as `function, file:line`; of `OTHER` the innermost frame that is not torch's
    """

    kind: Kind
    site: str = ""


UNKNOWN = Cause(Kind.UNKNOWN)
"""No stack was recorded, or the allocation is older than the history."""

_COPIES = frozenset({"copy_batch_to_gpu", "_copy_batch_to_gpu", "inplace_copy_batch_to_gpu"})
_COPIES_OF_TORCHREC = frozenset({"_to_device", "get_h2d_func"})
"""Names that others have too, so that the file is asked."""
_INPUT_DIST = frozenset(
    {
        "start_sparse_data_dist",
        "_start_sparse_data_dist",
        "wait_sparse_data_dist",
        "_start_data_dist",
        "_fuse_input_dist_splits",
        "start_sparse_data_dist_stage",
        "input_dist",
        "dist_init",
    }
)
_LOOKUP = frozenset(
    {
        "prefetch",
        "_prefetch",
        "prefetch_embeddings",
        "_prefetch_embeddings",
        "start_embedding_lookup",
        "_start_embedding_lookup",
    }
)
# The modules of ours that allocate a batch; the launcher and the pipelines are in every stack of a run with them.
_OURS = re.compile(
    r"(^|/)torchrec_prealloc/(buffers|capture|memory|one_batch|own_copies|own_to|packed_kind|packing|plain|ring|runs"
    r"|shipment|transfer|unpinned)\.py$"
)
_TORCH = re.compile(r"(^|/)(torch|torchrec)/|^<|^\?\?|\.(cpp|cc|c|cu|h)$|^$")


@dataclass(frozen=True)
class Frame:
    """One frame: what it says of an allocation under it, and how it is shown.

    Attributes:
        kind: `OTHER` where it says nothing
        site: as in `Cause`; empty where it is torch's own, or C++
    """

    kind: Kind
    site: str

    @staticmethod
    def of(name: str, filename: str, line: int) -> Frame:
        kind = _kind(name, filename)
        named = kind is not Kind.OTHER or _TORCH.search(filename) is None
        return Frame(kind, f"{name}, {'/'.join(filename.split('/')[-2:])}:{line}" if named else "")


def cause_of(frames: Iterable[Frame]) -> Cause:
    """The cause of what was allocated under `frames`, innermost first: the innermost that says something decides."""
    site = ""
    for frame in frames:
        if frame.kind is not Kind.OTHER:
            return Cause(frame.kind, frame.site)
        site = site or frame.site
    return Cause(Kind.OTHER, site)


def _kind(name: str, filename: str) -> Kind:
    if _OURS.search(filename):
        return Kind.OURS
    if name in _COPIES:
        return Kind.COPY
    if name in _INPUT_DIST:
        return Kind.INPUT_DIST
    if "torchrec/distributed/train_pipeline" in filename:
        # DataLoadingThread.run is the only function of that name there.
        if name in _COPIES_OF_TORCHREC or name == "run":
            return Kind.COPY
        if name in _LOOKUP:
            return Kind.LOOKUP
    if filename.endswith("torchrec/distributed/comm_ops.py"):
        return Kind.OUTPUT_DIST
    # The awaitables of KJTAllToAll allocate there; those of embeddings in comm_ops.py, which is further in.
    if filename.endswith("torchrec/distributed/dist_data.py") and name in ("__init__", "_wait_impl"):
        return Kind.INPUT_DIST
    return Kind.OTHER
