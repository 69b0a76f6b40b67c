"""Names for the steps of a copy in `torch.profiler`'s traces."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.profiler import record_function

_NOTHING = contextlib.nullcontext()
_profiler_enabled = torch.autograd._profiler_enabled


def step(name: str) -> Any:
    """A context manager that labels what is done in it `## prealloc: <name> ##`, where a profiler runs.

    Elsewhere it does nothing: `record_function` would cost more than some of the steps.
    """
    return record_function(f"## prealloc: {name} ##") if _profiler_enabled() else _NOTHING
