"""The caching allocator behaves as PyTorch's, and says so in the same terms."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

from torchrec_prealloc import simulator

KIB, MIB = 1 << 10, 1 << 20


def block(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


class Change:
    """How the device's statistics change after this was made."""

    def __init__(self) -> None:
        self.before = simulator.stats().devices[0]

    def __getattr__(self, name: str) -> int:
        now = simulator.stats().devices[0]
        return int(getattr(now, name) - getattr(self.before, name))


def unused_stream() -> torch.mtia.Stream:
    """A stream in whose pool no other test, nor what one has left alive, holds a segment."""
    for _ in range(64):
        stream = torch.mtia.Stream()
        held = simulator.stats().streams.get((0, stream.stream_id))
        if held is None or held.reserved == 0:
            return stream
    raise AssertionError("all streams' pools are in use")


@pytest.fixture(autouse=True)
def nothing_cached(device: torch.device) -> None:
    gc.collect()  # what other tests have dropped in cycles
    simulator.empty_cache()


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_as_pytorch_does(device: torch.device, size: int, allocated: int, reserved: int) -> None:
    change = Change()
    side = unused_stream()
    with torch.mtia.stream(side):
        held = block(size, device)
    # A large segment with less than 1 MiB left is not split.
    expected = reserved if reserved - allocated <= MIB < allocated else allocated
    assert (change.allocated, change.reserved) == (expected, reserved)
    del held
    assert (change.allocated, change.reserved) == (0, reserved)


def test_a_block_is_split_and_merged_again(device: torch.device) -> None:
    side = torch.mtia.Stream()
    with torch.mtia.stream(side):
        first, second, third = (block(512 * KIB, device) for _ in range(3))
        assert second.data_ptr() - first.data_ptr() == third.data_ptr() - second.data_ptr() == 512 * KIB
        start, change = first.data_ptr(), Change()
        del first, third
        del second  # joins both neighbours
        assert block(MIB, device).data_ptr() == start
        assert change.reserved == 0


def test_the_smallest_block_that_fits_is_taken(device: torch.device) -> None:
    side = torch.mtia.Stream()
    with torch.mtia.stream(side):
        blocks = [block(size * KIB, device) for size in (300, 1, 200, 1, 400, 1)]
        address = blocks[2].data_ptr()
        blocks[0] = blocks[2] = blocks[4] = None  # type: ignore[call-overload]
        assert block(150 * KIB, device).data_ptr() == address


def test_each_stream_has_its_pool(device: torch.device) -> None:
    side = torch.mtia.Stream()
    first = block(KIB, device)
    address = first.data_ptr()
    del first
    with torch.mtia.stream(side):
        assert block(KIB, device).data_ptr() != address
    assert block(KIB, device).data_ptr() == address
    assert simulator.stats().streams[0, side.stream_id].reserved == 2 * MIB


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_a_recorded_block_comes_back_when_the_stream_has_passed(
    device: torch.device, schedule: simulator.Schedule
) -> None:
    side = torch.mtia.Stream()
    with simulator.checked(schedule):
        held, change = block(KIB, device), Change()
        address = held.data_ptr()
        side.wait_stream(torch.mtia.current_stream())
        with torch.mtia.stream(side):
            held.fill_(1)
            target = torch.empty(KIB, dtype=torch.uint8).pin_memory()
            target.copy_(held, non_blocking=True)
        held.record_stream(side)
        del held
        assert change.allocated == -KIB
        if schedule == "lazy":
            assert change.active == 0
            assert block(KIB, device).data_ptr() != address
            side.synchronize()
        assert block(KIB, device).data_ptr() == address


def test_record_stream_of_the_owning_stream_does_nothing(device: torch.device) -> None:
    with simulator.checked("lazy"):
        held, change = block(KIB, device), Change()
        held.record_stream(torch.mtia.current_stream())
        del held
        assert change.active == -KIB


def test_storage_resize_frees_and_allocates(device: torch.device) -> None:
    held, change = block(KIB, device), Change()
    held.untyped_storage().resize_(0)
    assert change.allocated == -KIB
    held.untyped_storage().resize_(KIB)
    assert change.allocated == 0


def test_resize_keeps_the_old_bytes(device: torch.device) -> None:
    with simulator.checked("lazy"):
        held = torch.arange(4.0, device=device)
        held.resize_(1000)
        assert held[:4].tolist() == [0, 1, 2, 3]


def test_peaks_stay_until_reset(device: torch.device) -> None:
    simulator.reset_peak_stats()
    before = simulator.stats().devices[0]
    assert before.peak_allocated == before.allocated
    held = block(30 * MIB, device)
    del held
    after = simulator.stats().devices[0]
    assert after.allocated == before.allocated
    assert after.peak_allocated == before.peak_allocated + 30 * MIB
    assert after.peak_reserved == before.peak_reserved + 30 * MIB
    simulator.empty_cache()
    simulator.reset_peak_stats()
    assert simulator.stats().devices[0].peak_reserved == before.reserved


def test_statistics_have_the_keys_of_torch(device: torch.device) -> None:
    held = block(3 * MIB, device)
    ours = simulator.stats().devices[0].memory_stats
    assert ours["allocated_bytes.large_pool.current"] >= held.nbytes
    assert ours["inactive_split_bytes.large_pool.current"] == 17 * MIB
    theirs = torch.accelerator.memory_stats(device)
    assert {key: theirs[key] for key in ours} == ours
    assert torch.accelerator.memory_allocated(device) == ours["allocated_bytes.all.current"]


def test_empty_cache_gives_back_whole_segments_only(device: torch.device) -> None:
    change = Change()
    with torch.mtia.stream(unused_stream()):
        held, freed = block(MIB, device), block(30 * MIB, device)
    del freed
    assert change.reserved == 32 * MIB
    torch.mtia.empty_cache()
    assert change.reserved == 2 * MIB
    del held
    simulator.empty_cache()
    assert change.reserved == 0


def test_the_limit_empties_the_cache_and_then_raises(device: torch.device) -> None:
    change = Change()
    del_me = block(30 * MIB, device)
    del del_me
    retries = simulator.stats().devices[0].memory_stats["num_alloc_retries"]
    simulator.set_memory_limit(simulator.stats().devices[0].reserved + 10 * MIB)
    held = block(36 * MIB, device)  # in place of the cached 30
    assert simulator.stats().devices[0].memory_stats["num_alloc_retries"] == retries + 1
    assert change.reserved == 36 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="limit"):
        block(36 * MIB, device)
    assert change.allocated == 36 * MIB
    simulator.set_memory_limit(None)
    assert block(36 * MIB, device).nbytes == held.nbytes


def test_a_snapshot_is_one_of_pytorchs(device: torch.device, tmp_path: Path) -> None:
    side = torch.mtia.Stream()
    simulator.record_memory_history(True)
    try:
        with torch.mtia.stream(side):
            held, freed = block(3 * MIB, device), block(MIB, device)
            del freed
        simulator.dump_snapshot(tmp_path / "snapshot.pickle")
    finally:
        simulator.record_memory_history(False)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    segments = [segment for segment in snapshot["segments"] if segment["stream"] == side.stream_id]
    assert [(s["segment_type"], s["total_size"]) for s in segments if s["allocated_size"]] == [("large", 20 * MIB)]
    actions = [e["action"] for e in snapshot["device_traces"][0] if e["stream"] == side.stream_id]
    assert actions == ["segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed"]
    (allocated,) = [b for s in segments for b in s["blocks"] if b["address"] == held.data_ptr()]
    assert allocated["state"] == "active_allocated"
    assert allocated["frames"][0]["filename"] == __file__
    assert _memory_viz.segsum(snapshot)  # PyTorch's own readers take it
    assert "alloc" in _memory_viz.trace(snapshot)
