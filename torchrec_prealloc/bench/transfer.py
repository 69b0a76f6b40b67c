"""One batch to the device: main-thread time and operations, ours beside torch's, TorchRec's and tensordict's ways.

All ways move the same batch in one process, in turns, so that all see the same machine. Main-thread time is that of
the call, with the device idle when it begins: nothing in it waits for what was queued before. On a GPU each batch is
moved once from pinned memory and once from pageable memory, as a DataLoader without `pin_memory=True` gives it, and one
raw copy of as many bytes, from one pinned buffer into one kept on the device, says what the link can do: GB/s count
until everything has arrived.

On a device without streams (the CPU) every way is made to copy: TorchRec's in-place path gets a CPU stream to copy on,
plain `.to` `copy=True`. There is no link then, and no pinned memory.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor
from torchrec.distributed.test_utils.model_input import ModelInput

from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.bench.machine import GPU, measured_on
from torchrec_prealloc.bench.table import Column, Row
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.measured import MeasuredEngine
from torchrec_prealloc.packing import pack
from torchrec_prealloc.transfer import TransferEngine

SUMMARY = "one batch to the device: main-thread time and operations, ours beside others"

MIB = 1 << 20
PLAIN, IN_PLACE, TENSORDICT = "Tensor.to each", "TorchRec in place", "tensordict consolidate"
PER_BATCH, RING, PACKED, PIPELINE = "ours", "ours, ring", "ours, packed", "ours, in a pipeline"
RAW = "one raw copy"
PINNED, PAGEABLE = "pinned", "pageable"
SECONDS, FULL_SECONDS, LEAST_ROUNDS = 6.0, 60.0, 5
"""A slow machine makes fewer rounds with a batch, but never fewer than so many."""

COLUMNS = (
    Column("median", "main thread, µs", digits=0, better="low"),
    Column("min", "min", digits=0),
    Column("max", "max", digits=0),
    Column("ratio", "to baseline", digits=2, better="low"),
    Column("baseline", "baseline"),
    Column("operations", "allocations + copies", better="low"),
    Column("gb_per_second", "GB/s", digits=1, absent="no GPU", better="high"),
    Column("of_raw", "GB/s / one raw copy", digits=2, absent="no GPU", better="high"),
    Column("host", "host memory"),
    Column("on", "measured on"),
)
PICTURE = ("ratio", "gb_per_second", "of_raw")


class Target(NamedTuple):
    """What a row is held to."""

    batch: str
    way: str
    figure: str
    at_most: float = float("inf")
    at_least: float = 0.0


STRESS, MANY, LARGE, KJT, MIX = "600 small + 2 KJTs", "10,000 small", "20 x 10 MB", "1 KJT", "mix"
QUARTER = "2,500 small"
LINEAR = 1.25
"""`MANY` may take so many times as long for each tensor as `QUARTER`: its tensors fit no cache."""

TARGETS = (
    Target(STRESS, PER_BATCH, "operations", 12),
    Target(STRESS, PER_BATCH, "ratio", 0.5),
    Target(STRESS, PACKED, "ratio", 0.25),
    Target(MANY, PER_BATCH, "ratio", 0.4),
    Target(LARGE, PER_BATCH, "ratio", 1.05),
    Target(KJT, PER_BATCH, "ratio", 1.05),
)
GPU_TARGETS = (
    Target(STRESS, PER_BATCH, "ratio", 0.1),
    Target(LARGE, PER_BATCH, "of_raw", at_least=0.97),
    Target(KJT, PER_BATCH, "of_raw", at_least=0.97),
)
"""Beside those above, where a GPU was measured."""


def missed(rows: Iterable[Row]) -> list[str]:
    """The targets that the rows miss, in words."""
    by_name = {row.name: row.figures for row in rows}
    on_gpu = any(figures.get("on") == GPU for figures in by_name.values())
    said = []
    for target in TARGETS + (GPU_TARGETS if on_gpu else ()):
        figure = by_name.get(f"{target.batch}: {target.way}", {}).get(target.figure)
        what = f"{target.batch}: {target.way}: {target.figure}"
        if figure is None:
            said.append(f"{what} was not measured")
        elif float(figure) > target.at_most:
            said.append(f"{what} is {float(figure):.4g}, not at most {target.at_most:g}")
        elif float(figure) < target.at_least:
            said.append(f"{what} is {float(figure):.4g}, not at least {target.at_least:g}")
    quarter, many = (float(by_name.get(f"{name}: {PER_BATCH}", {}).get("min") or 0) for name in (QUARTER, MANY))
    if many > 4 * quarter * LINEAR:
        said.append(f"{MANY}: {PER_BATCH}: {many:.0f} µs at least are more than linear beside {QUARTER}: {quarter:.0f}")
    return said


def run(full: bool = False) -> Iterator[Row]:
    """One row for each batch and way; on a GPU two, of the batch in pinned and in pageable memory.

    Args:
        full: more rounds, and a KeyedJaggedTensor of 1 GB instead of 64 MB.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds = FULL_SECONDS if full else SECONDS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of one thread is what is compared
    try:
        for name, (batch, rounds) in _batches(full).items():
            rounds *= 5 if full else 1
            if device.type != "cuda":
                yield from _compare(name, batch, rounds, device, PAGEABLE, seconds)
                continue
            yield from _compare(name, _pin(batch), rounds, device, PINNED, seconds)
            yield from _compare(f"{name}, {PAGEABLE}", batch, rounds // 2, device, PAGEABLE, seconds / 2)
    finally:
        torch.set_num_threads(threads)


def _batches(full: bool) -> dict[str, tuple[Any, int]]:
    """Each batch, and in how many rounds it is measured."""
    ids = (1024 if full else 64) * MIB // 8
    return {
        STRESS: (_model_input(600), 200),
        QUARTER: (_model_input(2_500), 40),
        MANY: (_model_input(10_000), 20),
        LARGE: ([torch.zeros(10 * 1000 * 1000 // 4) for _ in range(20)], 8),
        KJT: (_kjt(["f"], torch.tensor([ids])), 20),
        MIX: ([*(torch.zeros(16) for _ in range(100)), torch.zeros(4 * MIB), _kjt(["f"], torch.tensor([MIB]))], 50),
    }


def _model_input(small: int) -> ModelInput:
    """TorchRec's own stress batch: `small` tensors of 16 floats, 2 KJTs, dense features and a label."""
    generator = torch.Generator().manual_seed(0)
    kjts = [_kjt([f"f{i}" for i in range(10)], torch.randint(0, 5, (640,), generator=generator)) for _ in range(2)]
    return ModelInput(torch.zeros(64, 16), *kjts, torch.zeros(64), [torch.zeros(16) for _ in range(small)])


def _kjt(keys: list[str], lengths: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths=lengths)


def _ways(batch: Any, device: torch.device, host: str = PAGEABLE) -> dict[str, Callable[[], Any]]:
    """Each way as a function that returns what it moved, which the current stream may read then."""
    engine, ring = TransferEngine(device), TransferEngine(device, config=PreallocConfig(buffers="ring"))
    measured = MeasuredEngine(device)
    tensors = tensors_in(batch)
    ways: dict[str, Callable[[], Any]] = {}
    if isinstance(batch, ModelInput):
        in_place = _in_place_way(batch, device)
        if _runs(in_place):
            ways[IN_PLACE] = in_place
        ways[TENSORDICT] = _tensordict_way(tensors, device)
    ways[PLAIN] = lambda: [tensor.to(device, non_blocking=True, copy=True) for tensor in tensors]
    ways[PER_BATCH] = lambda: engine.start(batch).wait()
    ways[RING] = lambda: ring.start(batch).wait()
    ways[PIPELINE] = lambda: measured.start(batch).wait()
    ways.update(_packed_way(batch, device, host))
    if device.type == "cuda":
        ways[RAW] = _raw_way(sum(tensor.nbytes for tensor in tensors), device)
    return ways


def _in_place_way(batch: ModelInput, device: torch.device) -> Callable[[], Any]:
    module: Any = torch.get_device_module(device)
    stream = module.Stream()

    def move() -> Any:
        moved = batch.to(device, True, stream)
        if device.type != "cpu":
            module.current_stream().wait_stream(stream)  # as TorchRec's pipelines do, by an event
        return moved

    return move


def _runs(move: Callable[[], Any]) -> bool:
    """Whether a way can be gone: older TorchRecs' in-place path asks for a CUDA stream whatever the device."""
    try:
        move()
    except (RuntimeError, AssertionError):
        return False
    return True


def _raw_way(nbytes: int, device: torch.device) -> Callable[[], Any]:
    """What the link can do."""
    host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return lambda: target.copy_(host, non_blocking=True)


def _tensordict_way(tensors: list[Tensor], device: torch.device) -> Callable[[], Any]:
    from tensordict import TensorDict

    together = TensorDict({str(number): tensor for number, tensor in enumerate(tensors)}, batch_size=[])
    if device.type == "cpu":
        return lambda: together.consolidate()  # its `to` has nothing to do there
    return lambda: together.consolidate().to(device, non_blocking=True)


def _packed_way(batch: Any, device: torch.device, host: str) -> dict[str, Callable[[], Any]]:
    engine, packed = TransferEngine(device), pack(batch)
    if host == PINNED:
        packed = packed.pin_memory()
    return {PACKED: lambda: engine.start(packed).wait()}


def _compare(
    name: str, batch: Any, rounds: int, device: torch.device, host: str, seconds_at_most: float = 60.0
) -> Iterator[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = _ways(batch, device, host)
        for move in ways.values():
            for _ in range(3):  # the first batches are learned from
                move()
    times: dict[str, list[float]] = {way: [] for way in ways}
    gc.collect()
    gc.freeze()  # else full collections of all that is loaded fall into one way's turn each time
    end, order = time.monotonic() + seconds_at_most, random.Random(0)
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.monotonic() > end:
            break
        # In another order each time, else a full collection that one way's garbage brings about is always another's.
        for way, move in order.sample(list(ways.items()), len(ways)):
            move()  # else the way that follows one of the same code finds its caches warm, and others do not
            _synchronize(device)  # else a full queue, or memory that is still read, would be in the time
            times[way].append(_timed(move, device))
    gc.unfreeze()
    baseline = IN_PLACE if IN_PLACE in ways else PLAIN
    bytes_moved = sum(tensor.nbytes for tensor in tensors_in(batch))
    rates = {way: _rate(move, bytes_moved, device) for way, move in ways.items()}
    for way, seconds in times.items():
        median = statistics.median(seconds)
        yield Row(
            f"{name}: {way}",
            {
                "median": median * 1e6,
                "min": min(seconds) * 1e6,
                "max": max(seconds) * 1e6,
                "ratio": median / statistics.median(times[baseline]),
                "baseline": baseline,
                "operations": _operations(ways[way]),
                "gb_per_second": rates[way],
                "of_raw": _part(rates[way], rates.get(RAW)),
                "host": PINNED if way == RAW else host,
                "on": measured_on(device),
            },
        )


def _pin(batch: Any) -> Any:
    if isinstance(batch, list):
        return [_pin(one) for one in batch]
    if not isinstance(batch, ModelInput):
        return batch.pin_memory()
    pinned = copy.copy(batch)  # the class has no `pin_memory`
    for name, value in vars(batch).items():
        if isinstance(value, Tensor | KeyedJaggedTensor | list):
            setattr(pinned, name, _pin(value))
    return pinned


def _timed(move: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the call returns, the release of what it moved included."""
    start = time.perf_counter()
    move()
    seconds = time.perf_counter() - start
    _synchronize(device)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _part(rate: float | None, whole: float | None) -> float | None:
    return rate / whole if rate is not None and whole else None


def _rate(move: Callable[[], Any], nbytes: int, device: torch.device) -> float | None:
    """GB/s until everything has arrived; None without a GPU."""
    if device.type != "cuda":
        return None
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        move()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds) / 1e9


def _operations(move: Callable[[], Any]) -> int:
    """Allocations and copies that reach torch's operators, counted."""
    counter = _Operations()
    with counter:
        move()
    return counter.count


class _Operations(TorchDispatchMode):
    """Counts allocations and copies, gathers on the host among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            self.count += 2  # it allocates, and copies
        elif name in ("empty", "empty_like", "empty_strided", "copy_", "_foreach_copy_", "stack", "cat"):
            self.count += 1
        return func(*args, **(kwargs or {}))
