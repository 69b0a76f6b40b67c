"""Each ordering of the engine matters: taken away, the race checker or wrong numbers show it.

The orderings are the methods of `Ordering`. Each is taken away in turn, in a scene that depends on it, under every
schedule; at least one must notice. With all of them in place none may.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchrec_prealloc import simulator
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.ordering import Ordering
from torchrec_prealloc.transfer import TransferEngine

SCHEDULES = ("lazy", "eager", "random")
NAMES = [name for name, _ in inspect.getmembers(Ordering, inspect.isfunction)]
BYTES = 1 << 20


def module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def values(number: int) -> torch.Tensor:
    return torch.full((BYTES,), number, dtype=torch.uint8).pin_memory()


# Scenes: what a pipeline does with the engine; each returns what it computed, and what that should be. -------------


def base_loop(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """Copy the next batch while the main stream works on this one."""
    seen = []
    following = engine.start([values(0)]).batch
    for step in range(1, 5):
        current = following
        engine.wait(current, engine.side)
        seen.append(current[0][:4].sum())
        following = None
        del current
        following = engine.start([values(step)]).batch
    engine.wait(following, engine.side)
    return [int(value) for value in seen], [4 * step for step in range(4)]


def memory_in_use(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """The memory that a batch gets was freed by the main stream, whose work on it is still queued."""
    source = torch.ones(BYTES, dtype=torch.uint8).pin_memory()
    scratch = torch.empty(BYTES, dtype=torch.uint8, device=device)
    scratch.copy_(source, non_blocking=True)
    result = torch.empty(BYTES, dtype=torch.uint8, device=device)
    result.copy_(scratch, non_blocking=True)
    del scratch
    batch = engine.start([values(7)]).wait()
    return [int(result[5]), int(batch[0][5])], [1, 7]


def data_dist(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """A second stream reads the batch first; the main stream follows it and drops the batch."""
    reader = module(device).Stream()
    out = torch.empty(BYTES, dtype=torch.uint8, device=device)
    batch = engine.start([values(3)]).batch
    with module(device).stream(reader):
        reader.wait_stream(module(device).default_stream(device))
        engine.wait(batch, engine.side)
        out.copy_(batch[0], non_blocking=True)
    engine.wait(batch, reader)
    del batch
    gc.collect()
    again = torch.full((BYTES,), 9, dtype=torch.uint8, device=device)  # takes the batch's memory
    return [int(out[1]), int(again[1])], [3, 9]


def events(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """As `data_dist`, where the second stream records an event (semi-sync)."""
    reader = module(device).Stream()
    out = torch.empty(BYTES, dtype=torch.uint8, device=device)
    batch = engine.start([values(3)]).batch
    with module(device).stream(reader):
        reader.wait_stream(module(device).default_stream(device))
        engine.wait(batch)
        out.copy_(batch[0], non_blocking=True)
        event = module(device).Event()
        event.record()
    engine.wait(batch, events=[event])
    del batch
    gc.collect()
    again = torch.full((BYTES,), 9, dtype=torch.uint8, device=device)
    return [int(out[1]), int(again[1])], [3, 9]


def unfollowed(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """A second stream reads the batch, and the main stream waits for the copy only (prefetch)."""
    reader = module(device).Stream()
    out = torch.empty(BYTES, dtype=torch.uint8, device=device)
    batch = engine.start([values(3)]).batch
    with module(device).stream(reader):
        reader.wait_stream(module(device).default_stream(device))
        engine.wait(batch)
        out.copy_(batch[0], non_blocking=True)
    engine.wait(batch)
    del batch
    engine.reset()
    again = torch.full((BYTES,), 9, dtype=torch.uint8, device=device)
    return [int(out[1]), int(again[1])], [3, 9]


def dropped_early(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """A batch is let go (reset) before anybody waited for its copy."""
    batch = engine.start([values(3)]).batch
    del batch
    engine.reset()
    gc.collect()
    again = torch.full((BYTES,), 9, dtype=torch.uint8, device=device)
    return [int(again[1])], [9]


def freed_early(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """The data-dist stream frees a KeyedJaggedTensor's memory as soon as its work is queued."""
    from torchrec import KeyedJaggedTensor

    reader = module(device).Stream()
    out = torch.empty(BYTES, dtype=torch.uint8, device=device)
    kjt = KeyedJaggedTensor(["a"], values(3), lengths=torch.tensor([BYTES]).pin_memory())
    batch = engine.start([kjt], isolate=True).batch
    with module(device).stream(reader):
        reader.wait_stream(module(device).default_stream(device))
        engine.wait(batch, engine.side)
        out.copy_(batch[0].values(), non_blocking=True)
        batch[0].values().untyped_storage().resize_(0)
    again = torch.full((BYTES,), 9, dtype=torch.uint8, device=device)
    engine.wait(batch, reader)
    return [int(out[1]), int(again[1])], [3, 9]


def host_reuse(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """A batch class whose `to` overwrites the host's tensor once it is moved."""

    class Overwrites:  # a new class each time: nothing is known of it
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def to(self, device: torch.device, non_blocking: bool = False) -> Overwrites:
            moved = Overwrites(self.tensor.to(device, non_blocking=non_blocking))
            self.tensor.fill_(0)
            return moved

    batch = engine.start(Overwrites(values(5))).wait()
    return [int(batch.tensor[3])], [5]


def registered_host(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """Host memory pinned by others, which no allocator of torch's guards, is dropped by the loader at once."""
    host = torch.full((BYTES,), 5, dtype=torch.uint8)
    simulator.register_host(host)
    handle = engine.start([host])
    del host
    gc.collect()
    seen = int(handle.wait()[0][3])
    module(device).synchronize()
    engine.close()
    return [seen], [5]


def kept_memory(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """Kept memory is written again while the main stream's work on the batch before is queued."""
    ring = TransferEngine(device, config=PreallocConfig(buffers="ring"), ordering=type(engine._order))
    out = [torch.empty(BYTES, dtype=torch.uint8, device=device) for _ in range(6)]
    for step, result in enumerate(out):
        batch = ring.start([values(step)]).wait()
        result.copy_(batch[0], non_blocking=True)
        del batch
    return [int(result[4]) for result in out], list(range(6))


def staged(engine: TransferEngine, device: torch.device) -> tuple[list[int], list[int]]:
    """Small tensors are gathered, batch after batch, while the copies from the memory they were gathered in wait."""
    out = []
    for step in range(6):
        arrived = engine.start([torch.tensor([step + number]).pin_memory() for number in range(3)]).wait()
        out.append(torch.stack(arrived).sum())
    return [int(value) for value in out], [3 * step + 3 for step in range(6)]


SCENES: dict[str, Callable[[TransferEngine, torch.device], tuple[list[int], list[int]]]] = {
    "copy_after_allocation": memory_in_use,
    "copy_after_last_use": kept_memory,
    "reader_after_copy": base_loop,
    "reader_after_reader": data_dist,
    "reader_after_event": events,
    "owner_after_read": unfollowed,
    "owner_after_copy": dropped_early,
    "free_after_reader": freed_early,
    "host_after_copy": host_reuse,
    "copy_reads": staged,
    "keep": registered_host,
}


def notices(scene: Any, ordering: type[Ordering], schedule: Any, device: torch.device) -> bool:
    """Whether the checker reports something, or the numbers are wrong."""
    with simulator.checked(schedule=schedule, seed=1, raise_on_report=False) as run:
        seen, expected = scene(TransferEngine(device, ordering=ordering), device)
        module(device).synchronize()
    return bool(run.reports) or seen != expected


def test_every_ordering_has_a_scene() -> None:
    assert sorted(SCENES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_with_every_ordering_in_place_nothing_is_noticed(name: str, simulated_accelerator: torch.device) -> None:
    for schedule in SCHEDULES:
        assert not notices(SCENES[name], Ordering, schedule, simulated_accelerator), schedule


@pytest.mark.parametrize("name", NAMES)
def test_an_ordering_taken_away_is_noticed(name: str, simulated_accelerator: torch.device) -> None:
    def nothing(self: Ordering, *args: Any) -> list[Any]:
        return []

    faulty = type("Without_" + name, (Ordering,), {name: nothing})
    assert any(notices(SCENES[name], faulty, schedule, simulated_accelerator) for schedule in SCHEDULES)
