"""Pytest fixtures. In a ``conftest.py`` or a test file: ``from torchrec_prealloc.simulator.testing import *``, or name
the module in ``pytest_plugins``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from torchrec_prealloc import simulator

__all__ = ["simulated_accelerator"]


@pytest.fixture
def simulated_accelerator() -> Iterator[torch.device]:
    """The first simulated device, with an empty cache and peaks at zero.

    Where it cannot be built the test is skipped, with the remedy; with ``CI=true`` in the environment it fails.
    """
    usable, reason = simulator.available()
    if not usable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run the simulated tests: {reason}")
        pytest.skip(reason)
    device = simulator.device()
    with torch.get_device_module(device).device(device):
        simulator.empty_cache()
        simulator.reset_peak_stats()
        yield device
        torch.get_device_module(device).synchronize()
        simulator.set_memory_limit(None)
