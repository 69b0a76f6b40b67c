"""Checkpoints: the state at the call, bit for bit, through torch's own writer; failures; kept memory; arrays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_distributed import HERE, torchrun
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torchrec_prealloc import checkpoint, simulator
from torchrec_prealloc.checkpoint import (
    CheckpointError,
    PinnedStager,
    as_numpy,
    async_save,
    close_checkpoints,
    save,
    train_state,
)
from torchrec_prealloc.pinned_memory import MemoryInUse

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage", "ignore:ComplexHalf"
)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_checkpoints()


def a_state(device: torch.device | str = "cpu", number: float = 1.0) -> dict[str, Any]:
    return {
        "table": torch.full((5000, 20), number).to(device),
        "bias": torch.full((7,), number).to(device),
        "half": torch.full((3,), number).bfloat16().to(device),
        "step": int(number),
        "groups": ({"lr": number},),
    }


def loaded(path: Path) -> dict[str, Any]:
    state = a_state(number=-1.0)
    dcp.load(state, checkpoint_id=path)
    return state


def assert_number(state: dict[str, Any], number: float) -> None:
    for name in ("table", "bias", "half"):
        assert torch.equal(state[name].cpu(), torch.full_like(state[name].cpu(), number)), name
    assert state["step"] == int(number)
    assert state["groups"][0]["lr"] == number


def change(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value += 1
    state["groups"][0]["lr"] += 1


class SlowWriter(dcp.FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, *args: Any) -> Any:
        assert self.go.wait(30)
        return super().write_data(*args)


# The state at the call -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_restored_is_the_state_at_the_call_while_training_goes_on(ranks: int, tmp_path: Path) -> None:
    finished = torchrun(ranks, str(HERE / "save_ranks.py"), str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for rank in range(ranks):
        assert f"rank {rank}: equal states" in finished.stdout


def test_later_changes_are_not_in_the_checkpoint(device: torch.device, tmp_path: Path) -> None:
    state = a_state(device)
    writer = SlowWriter(tmp_path)
    saved = async_save(state, tmp_path, storage_writer=writer)
    change(state)
    writer.go.set()
    saved.result()
    assert_number(loaded(tmp_path), 1)


def test_save_waits(device: torch.device, tmp_path: Path) -> None:
    save(a_state(device), tmp_path)
    assert_number(loaded(tmp_path), 1)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_a_stager_of_torch_s_own_async_save_races_with_nothing(
    schedule: Any, simulated_accelerator: torch.device, tmp_path: Path
) -> None:
    stager = PinnedStager()
    assert isinstance(stager, AsyncStager)
    with simulator.checked(schedule=schedule, seed=3):
        state = a_state(simulated_accelerator)
        for number in range(3):
            answer: Any = dcp.async_save(state, checkpoint_id=tmp_path / str(number), async_stager=stager)
            change(state)
            answer.staging_completion.result()
            answer.upload_completion.result()
    assert stager.bytes_pinned == stager.bytes_held > 0
    stager.close()
    assert stager.bytes_held == 0
    for number in range(3):
        assert loaded(tmp_path / str(number))["table"][0, 0] == number + 1


def test_deferred_is_the_caller_s_to_wait_for(simulated_accelerator: torch.device) -> None:
    stager = PinnedStager(deferred=True)
    with simulator.checked(schedule="lazy"):
        state = a_state(simulated_accelerator)
        staged = stager.stage(state)
        state["table"].sum()  # reading is free
        stager.wait()
        change(state)
        assert_number(staged.result(), 1)
    stager.close()


@pytest.mark.parametrize("deferred", [False, True])
def test_a_change_right_after_the_call_races_only_when_deferred(
    deferred: bool, simulated_accelerator: torch.device
) -> None:
    stager = PinnedStager(deferred=deferred)
    before: Future[None] = Future()  # keeps the stager's own thread from waiting for the copies
    with simulator.checked(schedule="lazy", raise_on_report=False) as run:
        state = a_state(simulated_accelerator)
        staged = stager.stage(state, after=before)
        change(state)
        before.set_result(None)
        staged.result()
    assert bool(run.reports) == deferred
    stager.close()


def test_synchronize_staging_lets_every_stream_change_the_state(simulated_accelerator: torch.device) -> None:
    stager = PinnedStager(deferred=True)
    with simulator.checked(schedule="lazy"):
        state = a_state(simulated_accelerator)
        staged = stager.stage(state)
        stager.synchronize_staging()
        change(state)
        assert_number(staged.result(), 1)
    stager.close()


def test_a_process_writes_too(one_rank: None, tmp_path: Path) -> None:
    state = a_state()
    saved = async_save(state, tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    change(state)
    saved.result()
    assert_number(loaded(tmp_path), 1)


# In flight -----------------------------------------------------------------------------------------------------------


def test_a_second_save_does_not_overwrite_the_first(device: torch.device, tmp_path: Path) -> None:
    state = a_state(device)
    writers = [SlowWriter(tmp_path / str(number)) for number in range(2)]
    saves = []
    for number, writer in enumerate(writers):
        saves.append(async_save(state, tmp_path / str(number), storage_writer=writer))
        change(state)
    for writer in writers:
        writer.go.set()
    for number, saved in enumerate(saves):
        saved.result()
        assert_number(loaded(tmp_path / str(number)) | {"step": number + 1}, number + 1)


def test_writes_are_made_in_turn(tmp_path: Path) -> None:
    """Two at a time would mix their collectives."""
    first, second = (SlowWriter(tmp_path / name) for name in "ab")
    saves = [async_save(a_state(), tmp_path / "a", storage_writer=first)]
    second.go.set()
    saves.append(async_save(a_state(), tmp_path / "b", storage_writer=second))
    time.sleep(0.1)
    assert not (tmp_path / "b" / ".metadata").exists()
    first.go.set()
    saves[1].result()
    assert saves[0].done()


def test_more_than_max_in_flight_wait_and_then_say_so() -> None:
    stager = PinnedStager(max_in_flight=1, patience=0.05)
    held: Future[Any] = stager.stage(a_state())
    with pytest.raises(MemoryInUse, match=r"1 states are still in host memory after 0\.05 s"):
        stager.stage(a_state())
    del held
    stager.stage(a_state())
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        PinnedStager(max_in_flight=0)


def test_one_stager_serves_states_that_change_their_tensors(device: torch.device, tmp_path: Path) -> None:
    stager = PinnedStager()
    state = a_state(device)
    for number in range(4):
        state[f"new{number}"] = torch.full((100 * number + 1, 30), float(number)).to(device)
        state["table"] = torch.full((1000 * (number + 1), 20), 1.0).to(device)
        state.pop(f"new{number - 2}", None)
        dcp.save(stager.stage(state).result(), checkpoint_id=tmp_path / str(number))
        back = {name: torch.zeros_like(v) for name, v in state.items() if isinstance(v, torch.Tensor)}
        dcp.load(back, checkpoint_id=tmp_path / str(number))
        assert all(torch.equal(back[name].cpu(), state[name].cpu()) for name in back)
    stager.close()


def test_the_writer_makes_no_copy_of_what_is_staged(device: torch.device) -> None:
    stager = PinnedStager()
    staged = stager.stage(a_state(device)).result()
    assert staged["table"].untyped_storage().nbytes() == staged["table"].nbytes
    assert as_numpy(staged["table"]).ctypes.data == staged["table"].data_ptr()
    del staged
    stager.close()


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_failing_write_raises_in_the_future_and_harms_nothing(device: torch.device, tmp_path: Path) -> None:
    class Full(dcp.FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            raise OSError(28, "No space left on device")

    state = a_state(device)
    async_save(state, tmp_path / "good").result()
    held = checkpoint._saver().stager.bytes_held
    failed = []
    for number in range(4):  # more than there are sets of memory: a failed save's exception holds none
        failed.append(async_save(state, tmp_path / f"bad{number}", storage_writer=Full(tmp_path / f"bad{number}")))
        with pytest.raises(CheckpointException, match="No space left on device"):
            failed[-1].result()
    (tmp_path / "file").touch()
    failed.append(async_save(state, tmp_path / "file" / "below"))
    with pytest.raises(CheckpointException, match=r"Not a directory|File exists"):
        failed[-1].result()
    assert checkpoint._saver().stager.bytes_held <= 2 * held
    change(state)
    assert_number(loaded(tmp_path / "good"), 1)
    async_save(state, tmp_path / "next").result()
    assert loaded(tmp_path / "next")["table"][0, 0] == 2
    with pytest.raises(CheckpointException, match="metadata"):
        loaded(tmp_path / "bad0")


KILLED = """
import sys, time, torch
import torch.distributed.checkpoint as dcp
from torchrec_prealloc.checkpoint import async_save
class Stops(dcp.FileSystemWriter):
    def finish(self, *args, **named):
        print("written", flush=True)
        time.sleep(60)
async_save({"table": torch.ones(5000, 20)}, sys.argv[1] + "/first").result()
async_save({"table": torch.ones(5000, 20)}, sys.argv[1] + "/last", storage_writer=Stops(sys.argv[1] + "/last")).result()
"""


def test_a_process_killed_in_the_middle_leaves_nothing_that_loads(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list((tmp_path / "last").glob("*.distcp"))
    state = {"table": torch.zeros(5000, 20)}
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(state, checkpoint_id=tmp_path / "last")
    dcp.load(state, checkpoint_id=tmp_path / "first")
    assert float(state["table"].sum()) == 100_000


def test_memory_is_given_back_at_exit(tmp_path: Path) -> None:
    code = (
        "import torch; from torchrec_prealloc import simulator; device = simulator.device()\n"
        "from torchrec_prealloc import async_save\n"
        f"async_save({{'t': torch.ones(5000, device=device)}}, {str(tmp_path)!r})\n"  # nobody waits for it
    )
    if not simulator.available()[0]:
        pytest.skip("no simulator")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    state = {"t": torch.zeros(5000)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert float(state["t"].sum()) == 5000


# Versions ------------------------------------------------------------------------------------------------------------


def test_a_torch_without_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(dcp.state_dict_saver, "AsyncSaveResponse")
        with pytest.raises(CheckpointError, match=r"torch .* has no .*async_save\(async_stager=.*torch 2.9"):
            PinnedStager()
    monkeypatch.setattr(dcp, "async_save", lambda state_dict, *, checkpoint_id=None, storage_writer=None: None)
    with pytest.raises(CheckpointError, match=r"came with torch 2\.9"):
        PinnedStager()


def test_the_state_of_an_optimizer_among_more(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert "state" not in train_state(layer, optimizer)["optimizer"]
    assert type(train_state(layer, optimizer)["optimizer"]["param_groups"]) is tuple
    with pytest.raises(CheckpointError, match="schedule is a dict without tensors; give it in a tuple"):
        train_state(layer, schedule={"epoch": 3})
    save(train_state(layer, optimizer, schedule=({"epoch": 3},)), tmp_path)
    state = train_state(layer, optimizer, schedule=({"epoch": 0},))
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["schedule"] == ({"epoch": 3},)


# Arrays --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float16])
def test_an_array_shares_the_tensor_s_memory(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4).to(dtype).t()
    array = as_numpy(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert torch.from_numpy(array).dtype == dtype
    assert torch.equal(torch.from_numpy(array), tensor)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, np.uint16), (torch.float8_e4m3fn, np.uint8), (torch.float8_e5m2, np.uint8)],
)
def test_what_numpy_lacks_comes_as_its_bits(dtype: torch.dtype, kind: type) -> None:
    tensor = torch.randn(3, 4).to(dtype)
    array = as_numpy(torch.nn.Parameter(tensor))
    assert array.dtype == kind
    assert array.ctypes.data == tensor.data_ptr()
    assert torch.equal(torch.from_numpy(array).view(dtype).float(), tensor.float())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(3, device="meta"), "it is on meta"),
        (torch.eye(3).to_sparse(), "not strided"),
        (torch.ones(3, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
        (torch.ones(2, dtype=torch.int32).view(torch.complex32), "numpy has no such dtype"),
    ],
    ids=["device", "sparse", "conjugate", "half complex"],
)
def test_what_would_need_a_copy_is_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be read without a copy: .*{reason}"):
        as_numpy(tensor)
