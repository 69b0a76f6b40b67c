"""What the estimate's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> Iterator[None]:
    """Each run collects garbage before it measures: of what was made here, not of all that was imported before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
