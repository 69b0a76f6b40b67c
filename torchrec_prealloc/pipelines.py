"""TorchRec's pipelines with the engine in place of their copy.

TorchRec's pipelines move a batch by calling `_to_device`, and wait for it by calling `_wait_for_batch` or
`_wait_for_events`. `prealloc_pipeline(cls)` makes a subclass of a pipeline class that runs the class' own methods with
those names bound to the engine. Nothing of TorchRec is patched: the methods that use the names are overridden by the
same code over other globals, everything else is inherited, and so every switch of TorchRec's keeps its meaning.

Some copies are made in threads: the eval pipelines', and those of the pipelines with an executor. The thread's and the
executor's classes are replaced in the same way, by ones that know for which pipeline, and which stream, they copy.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
from torchrec.distributed.train_pipeline import DataLoadingThread, TrainPipeline
from torchrec.distributed.train_pipeline import utils as torchrec_utils
from torchrec.streamable import Multistreamable

from torchrec_prealloc import versions
from torchrec_prealloc.batch import tensors_in
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.finalizing import finalize
from torchrec_prealloc.measured import MeasuredEngine
from torchrec_prealloc.rebinding import Rebinding
from torchrec_prealloc.stats import TransferStats
from torchrec_prealloc.transfer import TransferEngine

P = TypeVar("P")


class PipelineError(TypeError):
    """A class is no pipeline whose copy can be replaced. The message names it and says why."""


# Which pipeline, and which stream, a call is made for ------------------------------------------------------------


class _Call:
    """A method of a pipeline is running: `owner` is the stream that was current when the outermost one was called."""

    pipeline: PreallocPipeline
    owner: Any

    def __init__(self, pipeline: PreallocPipeline) -> None:
        same = [call for call in _active.stack if call.pipeline is pipeline]
        self.pipeline = pipeline
        self.owner = same[-1].owner if same else pipeline._owner_stream()

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method` as a part of this one."""
        stack = _active.stack
        depth = len(stack)
        try:  # not `with`: Ctrl-C can come before an `__exit__` has done anything
            stack.append(self)
            return method(*args, **kwargs)
        finally:
            del stack[depth:]


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Call] = []


_active = _Active()


def _call() -> _Call | None:
    """The innermost call of this thread, if its pipeline copies in our way."""
    call = _active.stack[-1] if _active.stack else None
    return call if call is not None and call.pipeline.prealloc.enabled else None


# What TorchRec's pipelines call ----------------------------------------------------------------------------------


def _to_device(batch: Any, device: torch.device, non_blocking: bool = True, data_copy_stream: Any = None) -> Any:
    call = _call()
    if call is None:
        return torchrec_utils._to_device(batch, device, non_blocking, **_given(data_copy_stream=data_copy_stream))
    transfer = call.pipeline._engine.start(batch, call.owner, call.pipeline._frees_early)
    # Nobody waits for what was asked for as a blocking copy.
    return transfer.batch if non_blocking else transfer.wait_on_host()


def _wait_for_batch(batch: Any, stream: Any, *args: Any, **kwargs: Any) -> None:
    call = _call()
    if call is not None and call.pipeline._engine.wait(batch, stream):
        return
    # Not one of ours, or another stream reads it after its owner: as TorchRec does it.
    _record_stream(batch, lambda batch: torchrec_utils._wait_for_batch(batch, stream, *args, **kwargs))


def _wait_for_events(batch: Any, context: Any, stream: Any) -> None:
    call = _call()
    if call is not None and call.pipeline._engine.wait(batch, None, context.events):
        context.events.clear()
        return
    _record_stream(batch, lambda batch: torchrec_utils._wait_for_events(batch, context, stream))


def _get_h2d_func(batch: Any, device: torch.device) -> Any:
    """A stage's runnable: the stream of the stage, which is current, goes on after the copy."""
    call = _call()
    if call is None:
        return torchrec_utils.get_h2d_func(batch, device)
    transfer = call.pipeline._engine.start(batch, call.owner)
    call.pipeline._engine.follow(transfer)
    return transfer.batch


def _given(**options: Any) -> dict[str, Any]:
    """Options that are not None: older TorchRecs do not have the later ones."""
    return {name: value for name, value in options.items() if value is not None}


class _Leaves(Multistreamable):
    """Stands for a batch that TorchRec's waits do not accept: one without `record_stream`."""

    def __init__(self, batch: Any) -> None:
        self.tensors = [tensor for tensor in tensors_in(batch) if tensor.device.type != "cpu"]

    def record_stream(self, stream: Any) -> None:
        for tensor in self.tensors:
            tensor.record_stream(stream)


def _record_stream(batch: Any, wait: Callable[[Any], None]) -> None:
    wait(batch if isinstance(batch, (torch.Tensor, Multistreamable)) else _Leaves(batch))


# Threads that copy -----------------------------------------------------------------------------------------------


class _Executor(ThreadPoolExecutor):
    """Runs what a pipeline submits as a part of the pipeline's call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = _active.stack[-1] if _active.stack else None
        return super().submit(_as_part_of, call, fn, args, kwargs)


def _as_part_of(call: _Call | None, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return call.run(fn, *args, **kwargs) if call is not None else fn(*args, **kwargs)


class _LoadingThread(DataLoadingThread):
    """The eval pipelines' thread: it calls each batch's `to`, which here is the engine's, for the consumer's stream."""

    def __init__(self, device: torch.device, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> None:
        call = _call()
        self._prealloc_error: BaseException | None = None
        self._prealloc_stopped = False
        if call is not None:
            dataloader_iter = _Travelling(dataloader_iter, call, self)
        super().__init__(device, dataloader_iter, *args, **kwargs)

    def run(self) -> None:
        super().run()
        if self._prealloc_stopped:
            self._buffered = None

    def stop(self) -> None:
        self._prealloc_stopped = True
        super().stop()

    def get_next_batch(self, none_throws: bool = False) -> Any:
        batch = super().get_next_batch(none_throws)
        if batch is None and self._prealloc_error is not None:
            error, self._prealloc_error = self._prealloc_error, None
            raise error
        return batch


class _Travelling:
    """A loader whose batches have the engine's copy for their `to`."""

    def __init__(self, batches: Iterator[Any], call: _Call, thread: _LoadingThread) -> None:
        self._batches, self._call, self._thread = batches, call, weakref.ref(thread)

    def __iter__(self) -> _Travelling:
        return self

    def __next__(self) -> _Traveller:
        thread = self._thread()
        try:
            return _Traveller(next(self._batches), self._call, thread)
        except StopIteration:
            raise
        except Exception as error:
            if thread is None or hasattr(thread, "_exception"):
                raise  # TorchRec hands it over, or tries again
            thread._prealloc_error = error  # its older threads would end, and leave the consumer waiting
            raise StopIteration from None


class _Traveller:
    def __init__(self, batch: Any, call: _Call, thread: _LoadingThread | None) -> None:
        self._batch, self._call, self._thread = batch, call, thread

    def to(self, device: torch.device, non_blocking: bool) -> Any:
        thread = self._thread
        if thread is None or thread._prealloc_stopped:
            return None
        try:
            return self._call.run(_to_device, self._batch, device, non_blocking)
        except BaseException as error:
            # In TorchRec's thread it would end the thread, and leave the consumer waiting.
            thread._prealloc_error = error
            thread._stop = True
            return None


# Our classes -----------------------------------------------------------------------------------------------------


def _in_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: PreallocPipeline, *args: Any, **kwargs: Any) -> Any:
        return _Call(self).run(method, self, *args, **kwargs)

    return call


_COPIES = {
    getattr(torchrec_utils, name): ours
    for name, ours in (
        ("_to_device", _to_device),
        ("_wait_for_batch", _wait_for_batch),
        ("_wait_for_events", _wait_for_events),
        ("get_h2d_func", _get_h2d_func),
        ("DataLoadingThread", _LoadingThread),
    )
    if hasattr(torchrec_utils, name)
}
_rebinding = Rebinding({**_COPIES, ThreadPoolExecutor: _Executor}, frozenset(_COPIES), _in_call)


class PreallocPipeline:
    """What our pipelines have beyond TorchRec's.

    Args:
        prealloc: options; a mapping of them, or None for the defaults. All other arguments are TorchRec's.
    """

    default_config = PreallocConfig()
    """What a pipeline has whose `prealloc` is None."""
    engine_type: type[TransferEngine] = MeasuredEngine
    prealloc: PreallocConfig = default_config
    _lazy_engine: TransferEngine | None = None

    def __init__(self, *args: Any, prealloc: PreallocConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.prealloc = PreallocPipeline.default_config if prealloc is None else PreallocConfig.of(prealloc)
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A trainer's subclass of one of ours may call TorchRec's functions itself.
        _rebinding.in_place(cls)

    @property
    def transfer_stats(self) -> TransferStats:
        """What was copied so far, counted and timed."""
        return self._engine.stats

    @property
    def _engine(self) -> TransferEngine:
        if self._lazy_engine is None:
            device, side = self._place()
            self._lazy_engine = engine = PreallocPipeline.engine_type(device, side, self.prealloc)
            # A pipeline that is dropped in the middle: its batches go after their copies and readers.
            finalize(self, engine.reset, at_exit=False)
        return self._lazy_engine

    def _place(self) -> tuple[torch.device, Any]:
        """The device, and the stream to copy on where TorchRec has made one."""
        pipeline: Any = self
        return pipeline._device, getattr(self, "_memcpy_stream", None)

    def _owner_stream(self) -> Any:
        """The stream that is to own the batches' memory: the one which is current when a call comes from outside."""
        return self._engine.current_stream()

    @property
    def _frees_early(self) -> bool:
        """Whether TorchRec frees what is in a `KeyedJaggedTensor` before the batch is done with."""
        switches = ("_free_features_storage_early", "_clear_data_dist_inputs")
        return any(getattr(self, switch, False) for switch in switches)

    def progress(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = super()
        return _Call(self).run(theirs.progress, dataloader_iter, *args, **kwargs)

    def reset(self) -> None:
        """TorchRec's reset (1.2's base pipeline has none); batches in flight go after their copies and readers."""
        theirs = getattr(super(), "reset", None)
        if theirs is not None:
            theirs()
        if self._lazy_engine is not None:
            self._lazy_engine.reset()


def prealloc_pipeline(cls: type[P]) -> type[P]:
    """The subclass of a TorchRec pipeline class (or of a user's subclass of one) that preallocates its batches.

    It takes the same arguments plus `prealloc: PreallocConfig | None`, and is named `Prealloc` + the class' name.
    Device memory comes from the stream that is current when a method of the pipeline is called from outside
    (`progress`, mostly); the pipeline's copy stream fills it in place; each consuming stream waits for that copy.

    A `functools.partial` of a class gives a partial of its subclass.

    Raises:
        PipelineError: the class is no pipeline, or no method of it copies or waits by TorchRec's functions, so that
            there is nothing to replace.
    """
    given: Any = cls
    if isinstance(given, functools.partial):
        made: Any = functools.partial(_subclass(given.func), *given.args, **given.keywords)
        return cast("type[P]", made)
    return cast("type[P]", _subclass(given))


@functools.cache
def _subclass(cls: Any) -> type:
    if not isinstance(cls, type):
        raise PipelineError(f"prealloc_pipeline: {cls!r} is no class; give a pipeline class")
    if issubclass(cls, PreallocPipeline):
        return cls
    overridden = _rebinding.subclass(cls)
    own = _with_own_copies(cls)
    if not issubclass(cls, TrainPipeline) or (overridden is cls and own is PreallocPipeline):
        raise PipelineError(
            f"prealloc_pipeline: no method of {cls.__name__} calls torchrec's _to_device or _wait_for_batch; give a "
            "subclass of a TorchRec train pipeline"
        )
    doc = f"TorchRec's `{cls.__name__}` with preallocated batches: see `prealloc_pipeline`.\n\n{cls.__doc__ or ''}"
    name = "Prealloc" + cls.__name__
    return type(name, (own, overridden), {"__doc__": doc, "__module__": __name__, "__qualname__": name})


def _with_own_copies(cls: type) -> type[PreallocPipeline]:
    from torchrec_prealloc.own_copies import KINDS

    return next((ours for theirs, ours in KINDS.items() if issubclass(cls, theirs)), PreallocPipeline)


def __getattr__(name: str) -> Any:
    """`Prealloc` + the name of a pipeline class of the installed TorchRec."""
    if not name.startswith("Prealloc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return prealloc_pipeline(versions.pipeline_class(name.removeprefix("Prealloc")))
