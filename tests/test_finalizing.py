"""What is collected in a forked child is let be there."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from torchrec_prealloc.finalizing import finalize


@pytest.fixture(autouse=True)
def _collected_only_when_asked() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_gone_is_finalized_once() -> None:
    called: list[int] = []
    cycle = Cycle()
    finalize(cycle, called.append, 1)
    gc.collect()
    assert not called
    del cycle
    gc.collect()
    assert called == [1]


def test_a_forked_child_finalizes_nothing_of_its_parents() -> None:
    called: list[int] = []
    finalize(Cycle(), called.append, 1)
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(len(called))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not called
    gc.collect()
    assert called == [1]
