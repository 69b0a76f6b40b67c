"""A train loop of each pipeline that one rank can run, for `torch.cuda._sanitizer`.

    TORCH_CUDA_SANITIZER=1 python .ci/gpu_loops.py FILE

The sanitizer looks at the accesses of each tensor by its address, and raises where two streams are not ordered. Our
engine lets many tensors share an arena, of which the sanitizer sees no more than the first; so each loop runs once as
it is, and once with every tensor in memory of its own. A loop that races on purpose comes first: it must be found.

Where FBGEMM has no kernels for the GPU, the models are unsharded.

Without a GPU the same loops run on the simulator, whose race checker takes the sanitizer's place, and without a
compiler on the CPU. FILE becomes a JSON list of what was run, after each loop anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from gpu_stand_ins import PRETEND, backend, stand_in  # noqa: E402
from torch import distributed as dist  # noqa: E402

from torchrec_prealloc import PreallocConfig, simulator  # noqa: E402

STEPS = 8
CONFIGS = {"arenas": PreallocConfig(), "each alone": PreallocConfig(direct_bytes=1)}


@dataclasses.dataclass
class Loop:
    """One line of the result. `outcome`: passed, failed or skipped; `said`: why not passed."""

    pipeline: str
    memory: str
    on: str
    outcome: str
    seconds: float = 0.0
    said: str = ""


def the_device() -> tuple[torch.device, str]:
    """Where to run, and its name for people."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0), "GPU"
    if simulator.available()[0]:
        return simulator.device(), "simulator"
    return torch.device("cpu"), "CPU"


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Raise where two streams race."""
    if device.type != "mtia":  # on a GPU the sanitizer watches from the import of torch on
        yield
        return
    with simulator.checked("random", seed=7):
        yield


def race(device: torch.device) -> None:
    """Write on a side stream what the main stream reads, without a wait."""
    module: Any = torch.get_device_module(device)
    host, target = torch.ones(1 << 20).pin_memory(), torch.zeros(1 << 20, device=device)
    with module.stream(module.Stream()):
        target.copy_(host, non_blocking=True)
    (target + 1).sum().item()


def control(device: torch.device, on: str) -> Loop:
    """Whether a race is found."""
    result = Loop("a race on purpose", "", on, "skipped", said="a CPU has no streams")
    if device.type == "cpu":
        return result
    try:
        with watched(device):
            race(device)
    except Exception as error:
        found = type(error).__name__ in ("CUDASanitizerErrors", "RaceError")
        result.outcome, result.said = ("passed", "") if found else ("failed", _line(error))
    else:
        result.outcome, result.said = "failed", "nothing was found"
    module: Any = torch.get_device_module(device)
    module.synchronize()
    return result


def loops(device: torch.device, on: str) -> Iterator[Loop]:
    """Run each pipeline with each way of keeping memory."""
    from kinds import KINDS

    for name, kind in KINDS.items():
        reason = kind.lacking()
        if reason is None and kind.ranks > 1:
            reason = f"it takes {kind.ranks} ranks"
        if reason is None and device.type == "cpu":
            reason = kind.on_cpu or None
        for memory, config in CONFIGS.items() if reason is None else [("", PreallocConfig())]:
            result = Loop(name, memory, on, "skipped", said=reason or "")
            if reason is None:
                started = time.monotonic()
                result.outcome, result.said = _run(kind, device, config)
                result.seconds = round(time.monotonic() - started, 2)
            yield result


def _run(kind: Any, device: torch.device, config: PreallocConfig) -> tuple[str, str]:
    """Outcome, and what is said of it. What TorchRec's own class cannot do either is no failure of ours."""
    failure = _failure(kind, kind.ours(), device, prealloc=config)
    if not failure:
        return "passed", ""
    theirs = _failure(kind, kind.theirs(), device)
    if theirs.partition(":")[0] == failure.partition(":")[0]:
        return "skipped", f"TorchRec's own class fails too: {theirs}"
    return "failed", failure


def _failure(kind: Any, cls: Any, device: torch.device, **options: Any) -> str:
    """What went wrong in a train loop, in one line; empty where nothing did."""
    try:
        with watched(device):
            found = kind.run(cls, device, STEPS, **options)
    except Exception as error:
        traceback.print_exc()
        return _line(error)
    return "" if len(found) == STEPS else f"{len(found)} steps, not {STEPS}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def main(path: Path) -> int:
    torch.set_num_threads(1)
    device, on = the_device()
    if device.type == "cuda" and "TORCH_CUDA_SANITIZER" not in os.environ:
        print("gpu_loops: set TORCH_CUDA_SANITIZER=1, or nobody watches", file=sys.stderr)
        return 2
    os.environ[PRETEND] = "1"  # the simulator does what a GPU does on which FBGEMM has no kernels
    stand_in(device)
    done: list[Loop] = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend(device), init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        first = control(device, on)
        for result in (one for part in ([first], loops(device, on)) for one in part):
            done.append(result)
            path.write_text(json.dumps([dataclasses.asdict(one) for one in done], indent=1), encoding="utf-8")
            print(f"{result.pipeline:28} {result.memory:12} {result.outcome:8} {result.said}", flush=True)
    return int(any(one.outcome == "failed" for one in done))


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort an interpreter that ends
