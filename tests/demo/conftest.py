"""What the demo's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrec_prealloc.demo.movielens import MovieLens, read_movielens
from torchrec_prealloc.demo.samples import Samples, make_samples


@pytest.fixture(scope="session")
def movielens() -> MovieLens:
    """The real data set."""
    return read_movielens()


@pytest.fixture(scope="session")
def samples(movielens: MovieLens) -> Samples:
    """Samples of the real data set."""
    return make_samples(movielens)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A second thread gives these small tensors nothing, and on a busy machine costs many times that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
