"""The stand-ins for FBGEMM's CUDA operators give what its CPU operators give; without FBGEMM a model is unsharded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_stand_ins import PRETEND, complete_cumsum, has_kernels, permute_2d

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_FBGEMM = """
import torch
from torchrec_prealloc import simulator
device = simulator.device()
from gpu_stand_ins import STAND_INS, stand_in
called = []
def counted(name, function):
    return lambda *args, **options: (called.append(name), function(*args, **options))[1]
STAND_INS.update({name: counted(name, function) for name, function in STAND_INS.items()})
stand_in(device)
from recsys import Model, make_batches, sharded
model, _ = sharded(device)
assert type(model) is Model
(batch,) = make_batches(1)
host, there = batch.sparse_features, batch.to(device).sparse_features
loss, _ = model(batch.to(device))
there = torch.ops.fbgemm.asynchronous_complete_cumsum(there.lengths()), there.permute([1, 0]).values()
here = torch.ops.fbgemm.asynchronous_complete_cumsum(host.lengths()), host.permute([1, 0]).values()
assert [one.cpu().tolist() for one in there] == [one.tolist() for one in here]
assert sorted(set(called)) == sorted(STAND_INS), called
"""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_of_lengths(dtype: torch.dtype) -> None:
    lengths = torch.tensor([3, 0, 2, 5], dtype=dtype)
    for of in (lengths, lengths[:0], lengths.reshape(2, 2)):
        wanted = torch.ops.fbgemm.asynchronous_complete_cumsum(of)
        assert torch.equal(complete_cumsum(of), wanted)
        assert complete_cumsum(of).dtype is wanted.dtype


@pytest.mark.parametrize("order", [[2, 0, 1], [1], [0, 0, 2, 1]])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_rows_in_another_order(order: list[int], weighted: bool) -> None:
    lengths = torch.tensor([[1, 0], [2, 3], [0, 1]])
    values = torch.arange(7)
    weights = torch.rand(7) if weighted else None
    permute = torch.tensor(order, dtype=torch.int32)
    wanted = torch.ops.fbgemm.permute_2D_sparse_data(permute, lengths, values, weights)
    for got, want in zip(permute_2d(permute, lengths, values, weights), wanted, strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


def test_the_simulator_and_the_cpu_have_fbgemms_kernels() -> None:
    assert has_kernels(torch.device("cpu"))
    assert has_kernels(torch.device("mtia"))


@pytest.mark.usefixtures("simulated_accelerator")
def test_without_fbgemm_a_model_is_unsharded_and_the_stand_ins_are_called() -> None:
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, PRETEND: "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_FBGEMM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
