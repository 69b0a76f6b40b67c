"""Checkpoints that do not stop the training: torch.distributed.checkpoint with staging in one transfer a tensor.

    from torchrec_prealloc import async_save, train_state

    saved = async_save(train_state(model, optimizer), f"checkpoints/{step}")   # the training goes on
    ...
    saved.result()                                                              # written, or raises what went wrong

    state = train_state(model, optimizer)                                       # to restore, on any number of ranks
    torch.distributed.checkpoint.load(state, checkpoint_id="checkpoints/100")   # fills the model's own tensors
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])                               # not needed for the fused one

Planner, writer, format and executors are torch's own. What is ours is the copy to the host (`to_host.py`), as a stager
that `torch.distributed.checkpoint.async_save(..., async_stager=PinnedStager())` takes too.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.errors import CommandError
from torchrec_prealloc.to_host import HostCopy, HostOrdering, ToHost

State = dict[str, Any]


class CheckpointError(CommandError):
    """A checkpoint cannot be made as asked; the message says what to change."""


class PinnedStager:
    """A stager for `torch.distributed.checkpoint.async_save(async_stager=...)`.

    `stage` queues one transfer a tensor, all at once, into pinned memory that is kept from save to save, and returns a
    future of the state in host memory: `async_save` then answers with an `AsyncSaveResponse`, on every device.
    One stager serves any number of saves, also of states that change their tensors; `close` it after the last.

    Args:
        max_in_flight: how many staged states may be in host memory at a time, each in memory of its own. The next
            save waits until a writer is done with one.
        patience: seconds that it waits before it raises `MemoryInUse`.
        deferred: leave it to the caller to call `wait` before tensors are changed. Work that only reads them (the
            next forward pass) then runs beside the transfers. By default the current stream is ordered after them by
            `stage` itself; the host does not wait for a device in either case.
        ordering: for tests.

    Raises:
        CheckpointError: this torch's `async_save` takes no stager.
    """

    _synchronize_after_execute = False  # torch's name for it, part of the protocol

    def __init__(
        self,
        max_in_flight: int = 2,
        patience: float = 600.0,
        deferred: bool = False,
        ordering: type[HostOrdering] = HostOrdering,
    ) -> None:
        _check_protocol()
        self.deferred = deferred
        self._to_host = ToHost(max_in_flight, patience, ordering=ordering)
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="PinnedStager")
        self._last: HostCopy | None = None

    @property
    def bytes_pinned(self) -> int:
        """Bytes of pinned host memory that are kept."""
        return self._to_host.memory.bytes_pinned

    @property
    def bytes_held(self) -> int:
        """Bytes of host memory that are kept, pinned or not."""
        return self._to_host.memory.nbytes

    @property
    def transfers(self) -> int:
        """Transfers queued so far."""
        return self._to_host.stats.transfers

    def stage(self, state_dict: State, after: Future[Any] | None = None) -> Future[State]:
        """Queue the copy of a state, as it is at this moment; everything in it that is no tensor is copied at once.

        Args:
            state_dict: a tree of containers, tensors and other objects.
            after: the future is done only when this one is, too (be it with an exception).

        Returns:
            A future of the same tree in host memory.

        Raises:
            MemoryInUse: `max_in_flight` states are still held by their writers.
        """
        unique = {id(tensor): tensor for tensor in tensors_in(state_dict)}
        staging = self._to_host.start(list(unique.values()))
        memo: dict[int, Any] = dict(zip(unique, staging.tensors, strict=True))
        staging.tree = copy.deepcopy(state_dict, memo)
        if not self.deferred:
            staging.wait()
        self._last = staging.without_tensors()
        if after is None and staging.done():
            staged: Future[State] = Future()
            staged.set_result(staging.result())
            return staged
        return self._waiting.submit(_when_there, staging, after)

    def wait(self) -> None:
        """Order the current streams after the last copy; they may change the tensors from here. The host goes on."""
        if self._last is not None:
            self._last.wait()

    def synchronize_staging(self) -> None:
        """Make the host wait for the last copy."""
        if self._last is not None:
            self._last.synchronize()

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` has to call `synchronize_staging`: no, the future says when the copy is there."""
        return False

    def close(self) -> None:
        """Give the kept memory back, when the copies that were queued have run. Not to be used afterwards."""
        self._waiting.shutdown(wait=True)
        self._to_host.close()


def _when_there(staging: HostCopy, after: Future[Any] | None) -> State:
    if after is not None:
        wait_for([after])  # what went wrong there is told there
    state: State = staging.result()
    return state


def _check_protocol() -> None:
    """Look for what `stage` relies on: `async_save` takes a stager, and a future from it.

    Raises:
        CheckpointError: it does not.
    """
    if "async_stager" in inspect.signature(dcp.async_save).parameters and hasattr(
        dcp.state_dict_saver, "AsyncSaveResponse"
    ):
        return
    raise CheckpointError(
        f"torch {torch.__version__} has no torch.distributed.checkpoint.async_save(async_stager=...) that takes a "
        "future; it came with torch 2.9. Use torch.distributed.checkpoint.save, or a newer torch"
    )


# One line for a save ---------------------------------------------------------------------------------------------


def train_state(model: Any, optimizer: Any = None, **more: Any) -> State:
    """What a checkpoint of a training holds: the tree to save, and for `torch.distributed.checkpoint.load` to fill.

    Args:
        model: a `DistributedModelParallel` or any module. The state of fused optimizers (`model.fused_optimizer`) goes
            with it, unless `optimizer` contains it.
        optimizer: of the dense part; anything with `state_dict`. To restore, it must have its state already
            (`KeyedOptimizer.init_state`, or one step): `load` fills what is there.
        more: other things to save, by name: tensors, numbers, strings, tuples, containers of tensors.

    Lists and dicts without tensors are no part of it: an optimizer's `param_groups` become a tuple, an empty `state` is
    left out. Where a table lies on some ranks only, torch's `load` would take their names for those of a checkpoint
    from torch 2.3, and find none of them.

    Raises:
        CheckpointError: `more` has a list or dict without tensors.
    """
    state: State = {"model": model.state_dict()}
    fused = getattr(model, "fused_optimizer", None)
    if fused is not None and not any(fused is inner for _, inner in getattr(optimizer, "optimizers", ())):
        state["fused_optimizer"] = _optimizer_state(fused)
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(optimizer)
    for name, value in more.items():
        if isinstance(value, (dict, list)) and not tensors_in(value):
            raise CheckpointError(
                f"train_state: {name} is a {type(value).__name__} without tensors; give it in a tuple"
            )
        state[name] = value
    return state


def _optimizer_state(optimizer: Any) -> State:
    state: State = {name: value for name, value in optimizer.state_dict().items() if value}
    if "state" in state:
        state["state"] = {name: of for name, of in state["state"].items() if of}
    if "param_groups" in state:
        state["param_groups"] = tuple(state["param_groups"])
    return {name: value for name, value in state.items() if value}


class _Saver:
    """What successive saves share: the stager, a process group of their own, and the order of their writes."""

    def __init__(self) -> None:
        self.stager = PinnedStager()
        self.last: Future[Any] | None = None
        self._group: dist.ProcessGroup | None = None
        self._of: Any = None

    def group(self) -> dist.ProcessGroup | None:
        """A gloo group for the collectives of saves: on the trainer's they would meet its own, in another thread."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if self._of is not dist.group.WORLD:
            self._group, self._of = dist.new_group(backend="gloo"), dist.group.WORLD
        return self._group


_lock = threading.Lock()
_savers: list[_Saver] = []


def _saver() -> _Saver:
    with _lock:
        if not _savers:
            _savers.append(_Saver())
        return _savers[0]


class _InTurn:
    """A stager whose states are handed out when the save before is done: collectives of two would mix."""

    _synchronize_after_execute = should_synchronize_after_execute = False

    def __init__(self, stager: PinnedStager, after: Future[Any] | None) -> None:
        self.stage = lambda state_dict: stager.stage(state_dict, after)
        self.synchronize_staging = stager.synchronize_staging

    def close(self) -> None:
        """The stager is not this object's."""


def async_save(state: Mapping[str, Any], path: str | os.PathLike[str], **options: Any) -> Future[Any]:
    """Write a checkpoint in the background, of the state as it is at this moment.

    Writes happen one after the other. All ranks call this, in the same order. The first call of a process pins memory
    and makes a gloo process group; later ones reuse both until `close_checkpoints`.

    Args:
        state: the tree, of `train_state` for example.
        path: a new folder; torch's `checkpoint_id`.
        options: further arguments of `torch.distributed.checkpoint.async_save`: `storage_writer`, `planner`,
            `process_group`, `async_checkpointer_type`. With process-based execution torch copies the staged state once
            more, into memory that it shares with that process.

    Returns:
        A future: `result()` waits until the checkpoint is complete and gives torch's metadata, or raises what went
        wrong in writing it. No checkpoint is readable before it is complete.

    Raises:
        MemoryInUse: two earlier saves are not written yet, after 10 minutes.
    """
    saver = _saver()
    if "process_group" not in options:
        options["process_group"] = saver.group()
    previous = saver.last if saver.last is not None and not saver.last.done() else None
    stager: Any = _InTurn(saver.stager, previous)
    answer: Any = dcp.async_save(dict(state), checkpoint_id=path, async_stager=stager, **options)
    written: Future[Any] = Future()
    answer.upload_completion.add_done_callback(lambda upload: _pass_on(upload, written))
    saver.last = written
    return written


def save(state: Mapping[str, Any], path: str | os.PathLike[str], **options: Any) -> Any:
    """As `async_save`, and wait until the checkpoint is written; returns torch's metadata."""
    return async_save(state, path, **options).result()


def close_checkpoints() -> None:
    """Wait for the saves that are under way, and give back the host memory that `save` and `async_save` keep."""
    with _lock:
        while _savers:
            saver = _savers.pop()
            if saver.last is not None:
                wait_for([saver.last])
            saver.stager.close()


def _pass_on(upload: Future[Any], written: Future[Any]) -> None:
    """Give a save's outcome on; a failed save's exception without what it keeps alive: the staged state.

    Its tracebacks do, by their frames' functions. Their text stays.
    """
    error = upload.exception()
    if error is None:
        written.set_result(upload.result())
        return
    # torch's CheckpointException has the exception of each rank, and their tracebacks in its message.
    failures = [failure[0] for failure in getattr(error, "failures", {}).values()]
    if not failures and hasattr(error, "add_note"):  # Python 3.11 on
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    for one in [error, error.__cause__, error.__context__, *failures]:
        if one is not None:
            one.__traceback__ = None
    written.set_exception(error)


# Reading without a copy ------------------------------------------------------------------------------------------

_AS_BYTES = {1: np.uint8, 2: np.uint16}


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A host tensor's memory as an array: never a copy.

    A dtype that numpy lacks comes as the unsigned integers of its size: `bfloat16` as `uint16` (the upper half of a
    float32), the `float8` kinds as `uint8`. `torch.from_numpy(array).view(tensor.dtype)` is the way back.

    Raises:
        ValueError: the tensor cannot be seen without a copy; the message says what makes it so.
    """
    reason = _not_readable(tensor)
    if reason:
        raise ValueError(f"a tensor of {tensor.dtype} {tuple(tensor.shape)} cannot be read without a copy: {reason}")
    tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:
        pass
    kind = _AS_BYTES.get(tensor.element_size())
    if kind is None or tensor.dtype.is_complex:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be read without a copy: numpy has no such dtype")
    return tensor.view(getattr(torch, kind.__name__)).numpy()


def _not_readable(tensor: Tensor) -> str:
    if not tensor.is_cpu:
        return f"it is on {tensor.device}; copy it with to_pinned_host"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "it is not strided memory"
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return "its values are not what its memory holds; use resolve_conj(), resolve_neg() or clone()"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__} wraps other tensors"
    return ""
