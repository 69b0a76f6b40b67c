"""Memory snapshots in PyTorch's format, written by hand, with the totals that they must give."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

Frames = list[dict[str, Any]]
SLOT = 1 << 20
SLOTS = 4


def frame(name: str, filename: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


PIPELINE = "/site-packages/torchrec/distributed/train_pipeline/train_pipelines.py"
COPY = [frame("_to_device", PIPELINE.replace("train_pipelines", "utils"), 144), frame("copy_batch_to_gpu", PIPELINE)]
INPUT_DIST = [frame("forward", "/site-packages/torch/x.py"), frame("start_sparse_data_dist", PIPELINE, 1129)]
OTHER = [frame("forward", "/home/me/model.py", 7)]
STACKS = (COPY, INPUT_DIST, OTHER)


class Written:
    """An allocator whose segments have `SLOTS` slots for one block each, and its history.

    Attributes:
        totals: after each event, by stream: [reserved, allocated, active]
    """

    def __init__(self, stacks: bool = True) -> None:
        self.trace: list[dict[str, Any]] = []
        self.totals: list[dict[int, list[int]]] = []
        self.segments: dict[int, dict[str, Any]] = {}
        self._now: dict[int, list[int]] = {}
        self._stacks = stacks
        self._next = 0x7F00_0000_0000
        self._released: list[int] = []

    def event(self, action: str, stream: int, address: int, size: int, frames: Frames, changes: list[int]) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream}
        entry |= {"time_us": 1_700_000_000_000_000 + 1_000 * len(self.trace), "compile_context": "N/A"}
        if self._stacks:
            entry["frames"] = frames
        self.trace.append(entry)
        total = self._now.setdefault(stream, [0, 0, 0])
        self._now[stream] = [have + sign * size for have, sign in zip(total, changes, strict=True)]
        self.totals.append({number: list(values) for number, values in self._now.items()})

    def segment(self, stream: int, frames: Frames = OTHER) -> int:
        size = SLOT * SLOTS
        if self._released:  # the device's allocator gives it again, as cudaMalloc does
            address = self._released.pop()
        else:
            address, self._next = self._next, self._next + 2 * size
        self.segments[address] = {"stream": stream, "frames": frames, "blocks": [None] * SLOTS}
        self.event("segment_alloc", stream, address, size, frames, [1, 0, 0])
        return address

    def alloc(self, stream: int, size: int, frames: Frames = OTHER) -> int:
        """The address of a block of up to `SLOT` bytes."""
        free = [b for b, segment in self.segments.items() if segment["stream"] == stream and None in segment["blocks"]]
        address = free[0] if free else self.segment(stream, frames)
        slot = self.segments[address]["blocks"].index(None)
        block = {"size": size, "frames": frames, "state": "active_allocated", "stream": stream}
        self.segments[address]["blocks"][slot] = block
        self.event("alloc", stream, address + slot * SLOT, size, frames, [0, 1, 1])
        return address + slot * SLOT

    def free(self, address: int, wait: bool = False) -> None:
        block = self._block(address)
        block["state"] = "active_pending_free"
        self.event("free_requested", block["stream"], address, block["size"], OTHER, [0, -1, 0])
        if not wait:
            self.complete(address)

    def complete(self, address: int) -> None:
        block = self._block(address)
        self.event("free_completed", block["stream"], address, block["size"], OTHER, [0, 0, -1])
        base = max(start for start in self.segments if start <= address)
        self.segments[base]["blocks"][(address - base) // SLOT] = None

    def release(self, address: int) -> None:
        segment = self.segments.pop(address)
        self._released.append(address)
        self.event("segment_free", segment["stream"], address, SLOT * SLOTS, OTHER, [-1, 0, 0])

    def blocks(self, state: str) -> list[int]:
        return [
            base + slot * SLOT
            for base, segment in self.segments.items()
            for slot, block in enumerate(segment["blocks"])
            if block is not None and block["state"] == state
        ]

    def empty_segments(self) -> list[int]:
        return [base for base, segment in self.segments.items() if not any(segment["blocks"])]

    def snapshot(self, first: int = 0, history: bool = True) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot()` gives it; the history without its first entries."""
        segments = []
        for base, segment in self.segments.items():
            blocks = []
            for slot, block in enumerate(segment["blocks"]):
                what = block or {"size": 0, "frames": [], "state": "inactive"}
                blocks.append(
                    {
                        "address": base + slot * SLOT,
                        "size": SLOT,
                        "requested_size": what["size"],
                        "state": what["state"],
                        "frames": what["frames"] if self._stacks else [],
                    }
                )
            segments.append(
                {
                    "device": 0,
                    "address": base,
                    "total_size": SLOT * SLOTS,
                    "stream": segment["stream"],
                    "segment_type": "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": segment["frames"] if self._stacks else [],
                    "blocks": blocks,
                }
            )
        traces = [self.trace[first:]] if history else [[]]
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "roundup_power2_divisions": {"1": 0}}
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": settings,
            "external_annotations": [{"device": 0, "time_us": 1, "stage": "START", "name": "step"}],
        }

    def dump(self, path: Path, **how: Any) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(**how)))
        return path

    def _block(self, address: int) -> dict[str, Any]:
        base = max(start for start in self.segments if start <= address)
        block: dict[str, Any] = self.segments[base]["blocks"][(address - base) // SLOT]
        return block


def random_history(seed: int, events: int = 120, streams: tuple[int, ...] = (0, 7, 94_000_000_000)) -> Written:
    """Allocations, frees that wait and frees that do not, and segments given back, at random."""
    chance = random.Random(seed)
    written = Written()
    while len(written.trace) < events:
        action = chance.choice(["alloc", "alloc", "alloc", "free", "free", "wait", "complete", "release"])
        allocated, pending = written.blocks("active_allocated"), written.blocks("active_pending_free")
        if action == "alloc":
            written.alloc(chance.choice(streams), chance.randrange(1, SLOT), chance.choice(STACKS))
        elif action in ("free", "wait") and allocated:
            written.free(chance.choice(allocated), wait=action == "wait")
        elif action == "complete" and pending:
            written.complete(chance.choice(pending))
        elif action == "release" and written.empty_segments():
            written.release(chance.choice(written.empty_segments()))
    return written
