"""Peaks of some steps, by stream, and nothing of what was there before."""

from __future__ import annotations

import pytest
import torch

from torchrec_prealloc import simulator
from torchrec_prealloc.estimation.footprint import MIB, Footprint, footprint


def on_side(size: int, device: torch.device, stream: torch.Stream) -> None:
    with torch.get_device_module(device).stream(stream):
        torch.zeros(size, dtype=torch.uint8, device=device)


def test_what_side_streams_hold_is_told_from_the_main_stream(simulated_accelerator: torch.device) -> None:
    device, side = simulated_accelerator, torch.get_device_module(simulated_accelerator).Stream()

    def step() -> None:
        torch.zeros(40 * MIB, dtype=torch.uint8, device=device)
        on_side(30 * MIB, device, side)

    assert footprint(step, device, 3) == Footprint(40 * MIB, 70 * MIB, 30 * MIB, "simulator")


def test_what_was_there_before_does_not_count(simulated_accelerator: torch.device) -> None:
    device, side = simulated_accelerator, torch.get_device_module(simulated_accelerator).Stream()
    kept = torch.zeros(50 * MIB, dtype=torch.uint8, device=device)
    torch.zeros(60 * MIB, dtype=torch.uint8, device=device)  # its segment is free, and given back
    on_side(60 * MIB, device, side)
    with torch.get_device_module(device).stream(side):
        also_kept = torch.zeros(30 * MIB, dtype=torch.uint8, device=device)
    found = footprint(lambda: torch.zeros(20 * MIB, dtype=torch.uint8, device=device), device, 2)
    assert found.allocated == found.reserved == 20 * MIB
    assert found.side == 0
    del kept, also_kept


@pytest.mark.parametrize(("ahead", "blocks"), [(True, 2), (False, 1)])
def test_a_host_that_is_ahead_gets_recorded_memory_back_a_step_late(
    ahead: bool, blocks: int, simulated_accelerator: torch.device
) -> None:
    device = simulated_accelerator
    module = torch.get_device_module(device)
    side, host = module.Stream(), torch.zeros(20 * MIB, dtype=torch.uint8).pin_memory()

    def step() -> None:
        with module.stream(side):
            batch = host.to(device, non_blocking=True)
        module.current_stream().wait_stream(side)
        batch.record_stream(module.current_stream())
        batch.add_(1)

    assert footprint(step, device, 6, ahead=ahead).side == blocks * 20 * MIB


def test_a_stop_ends_the_run_and_a_race_is_raised_where_asked(simulated_accelerator: torch.device) -> None:
    device = simulated_accelerator
    module = torch.get_device_module(device)
    steps = iter([None, None])
    assert footprint(lambda: next(steps), device, 10).reserved == 0
    side, host = module.Stream(), torch.zeros(20 * MIB, dtype=torch.uint8).pin_memory()

    def unordered() -> None:
        batch = torch.empty_like(host, device=device)
        with module.stream(side):
            batch.copy_(host, non_blocking=True)
        batch.add_(1)

    assert footprint(unordered, device, 2).reserved == 20 * MIB
    with pytest.raises(simulator.RaceError):
        footprint(unordered, device, 2, strict=True)


def test_a_row_has_mebibytes_and_batches() -> None:
    row = Footprint(3 * MIB, 6 * MIB, 2 * MIB, "simulator").row("way", 4 * MIB)
    assert row.figures == {"allocated": 3, "reserved": 6, "side": 2, "batches": 1.5, "on": "simulator"}
