"""Memory snapshots of the three ways to copy, by the device's allocator while a pipeline trains.

    python .ci/gpu_snapshots.py FOLDER

Writes FOLDER/WAY.pickle for each way, as `torch.cuda.memory._dump_snapshot` does, and FOLDER/snapshots.json with the
peaks. Without a GPU the allocator is the simulator's; without a compiler there is none, and nothing is written.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchrec import KeyedJaggedTensor  # noqa: E402
from torchrec.datasets.utils import Batch  # noqa: E402

from torchrec_prealloc import simulator  # noqa: E402
from torchrec_prealloc.ways import OURS, Way, three_ways  # noqa: E402

MIB = 1 << 20
BATCH_MIB, STEPS = 32, 12
PIPELINE = OURS["sparse_dist"]
ENTRIES = 100_000
"""Of the history; these runs have some hundreds."""


class Gpu:
    """The caching allocator of a GPU."""

    on = "GPU"
    device = torch.device("cuda", 0)

    def start(self) -> None:
        """Forget what was, and record from here."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=ENTRIES)

    def running(self) -> Any:
        """While the device works."""
        return contextlib.nullcontext()

    def dump(self, path: Path) -> None:
        """Write what was recorded, and stop."""
        torch.cuda.synchronize()
        dump: Any = torch.cuda.memory._dump_snapshot
        dump(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)

    def peaks(self) -> tuple[int, int]:
        """Bytes allocated and reserved."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class Simulated:
    """The simulator's, which has the same rules."""

    on = "simulator"

    def __init__(self) -> None:
        self.device = simulator.device()

    def start(self) -> None:
        """Forget what was, and record from here."""
        torch.get_device_module(self.device).synchronize()
        simulator.empty_cache()
        simulator.reset_peak_stats()
        simulator.record_memory_history(True, ENTRIES)

    def running(self) -> Any:
        """While the device works: when it is waited for, as a busy GPU."""
        return simulator.checked(schedule="lazy", raise_on_report=False)

    def dump(self, path: Path) -> None:
        """Write what was recorded, and stop."""
        simulator.dump_snapshot(path)
        simulator.record_memory_history(False)

    def peaks(self) -> tuple[int, int]:
        """Bytes allocated and reserved."""
        total = simulator.stats().devices[0]
        return total.peak_allocated, total.peak_reserved


class Model(nn.Module):
    """A loss that reads the whole batch, and needs little memory itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = (batch.dense_features.sum(0) * self.weight).sum().reshape(1)
        return loss, loss.detach()


def batches() -> Iterator[Batch]:
    """Pinned, of three quarters to all of `BATCH_MIB`."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = int(torch.randint(BATCH_MIB * 3 // 4, BATCH_MIB + 1, (), generator=generator)) * MIB // 4 // 64
        sparse = KeyedJaggedTensor(["f"], torch.zeros(8, dtype=torch.int64), lengths=torch.ones(8, dtype=torch.int64))
        yield Batch(torch.zeros(rows, 64), sparse, torch.zeros(8)).pin_memory()


def train(way: Way, device: torch.device) -> None:
    """All steps; the host is one step ahead of the device."""
    model = Model().to(device)
    pipeline = way.build(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    iterator = way.feed(batches(), device)
    module: Any = torch.get_device_module(device)
    before = module.Event()
    for _ in range(STEPS):
        pipeline.progress(iterator)
        done = module.Event()
        done.record()
        before.synchronize()
        before = done


def main(folder: Path) -> int:
    if torch.cuda.is_available():
        allocator: Any = Gpu()
    elif simulator.available()[0]:
        allocator = Simulated()
    else:
        print(f"gpu_snapshots: no GPU, and no simulator: {simulator.available()[1]}", file=sys.stderr)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for way in three_ways({"_target_": PIPELINE}):
        gc.collect()
        allocator.start()
        with allocator.running():
            train(way, allocator.device)
        allocator.dump(folder / f"{way.name}.pickle")
        allocated, reserved = allocator.peaks()
        found.append({"way": way.name, "on": allocator.on, "peak_allocated": allocated, "peak_reserved": reserved})
        print(f"{way.name}: {allocated / MIB:.0f} MiB allocated, {reserved / MIB:.0f} MiB reserved at most", flush=True)
    (folder / "snapshots.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
