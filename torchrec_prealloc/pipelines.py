"""TorchRec's pipelines with the engine in place of their copy.

TorchRec's pipelines move a batch by calling `_to_device`, and wait for it by calling `_wait_for_batch` or
`_wait_for_events`. `prealloc_pipeline(cls)` makes a subclass of a pipeline class that runs the class' own methods with
those names bound to the engine. Nothing of TorchRec is patched: the methods that use the names are overridden by the
same code over other globals, everything else is inherited, and so every switch of TorchRec's keeps its meaning.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline import utils as torchrec_utils

from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.transfer import TransferEngine, TransferStats

P = TypeVar("P")


class PipelineError(TypeError):
    """A class is no pipeline whose copy can be replaced. The message names it and says why."""


# What TorchRec's pipelines call ----------------------------------------------------------------------------------


def _to_device(batch: Any, device: torch.device, non_blocking: bool = True, data_copy_stream: Any = None) -> Any:
    pipeline = _active.stack[-1].pipeline
    if not pipeline.prealloc.enabled:
        return torchrec_utils._to_device(batch, device, non_blocking, **_given(data_copy_stream=data_copy_stream))
    return pipeline._engine.start(batch, _active.stack[-1].owner, pipeline._frees_early).batch


def _wait_for_batch(batch: Any, stream: Any, *args: Any, **kwargs: Any) -> None:
    pipeline = _active.stack[-1].pipeline
    if not pipeline._engine.wait(batch, stream):
        # Not one of ours, or the owner stream is already ordered after it: as TorchRec does it.
        torchrec_utils._wait_for_batch(batch, stream, *args, **kwargs)


def _wait_for_events(batch: Any, context: Any, stream: Any) -> None:
    pipeline = _active.stack[-1].pipeline
    if not pipeline._engine.wait(batch, None):
        torchrec_utils._wait_for_events(batch, context, stream)


def _given(**options: Any) -> dict[str, Any]:
    """Options that are not None: older TorchRecs do not have the later ones."""
    return {name: value for name, value in options.items() if value is not None}


_REPLACED: dict[Any, Any] = {
    getattr(torchrec_utils, name): ours
    for name, ours in (
        ("_to_device", _to_device),
        ("_wait_for_batch", _wait_for_batch),
        ("_wait_for_events", _wait_for_events),
    )
    if hasattr(torchrec_utils, name)
}


# Which pipeline, and which stream, a call is made for ------------------------------------------------------------


class _Call:
    """A method of a pipeline is running: `owner` is the stream that was current when the outermost one was called."""

    pipeline: PreallocPipeline
    owner: Any

    def __init__(self, pipeline: PreallocPipeline) -> None:
        stack = _active.stack
        same = next((call for call in reversed(stack) if call.pipeline is pipeline), None)
        self.pipeline = pipeline
        self.owner = same.owner if same is not None else pipeline._engine.current_stream()

    def __enter__(self) -> None:
        _active.stack.append(self)

    def __exit__(self, *exc: object) -> None:
        _active.stack.pop()


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Call] = []


_active = _Active()


# The same method over other globals ------------------------------------------------------------------------------


class _Globals(dict[str, Any]):
    """A module's globals, seen live, with some names replaced."""

    def __init__(self, replaced: Mapping[str, Any], module: dict[str, Any]) -> None:
        super().__init__(replaced, __builtins__=module["__builtins__"])
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


def _rebound(function: Any) -> Any:
    """`function` with TorchRec's copy and waits replaced; None if it (or what it decorates) uses none of them."""
    if not isinstance(function, types.FunctionType):
        return None
    module = function.__globals__
    replaced = {}
    for name in _names(function.__code__):
        value = module.get(name)
        if isinstance(value, types.FunctionType) and value in _REPLACED:
            replaced[name] = _REPLACED[value]
    # A decorated method is in its wrapper's closure.
    cells = [_rebound_cell(cell) for cell in function.__closure__ or ()]
    if not replaced and not any(cells):
        return None
    closure = tuple(new or old for new, old in zip(cells, function.__closure__ or (), strict=True))
    scope = _Globals(replaced, module) if replaced else module
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(new, function)


def _rebound_cell(cell: types.CellType) -> types.CellType | None:
    try:
        new = _rebound(cell.cell_contents)
    except ValueError:  # an empty cell
        return None
    return types.CellType(new) if new is not None else None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _in_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: PreallocPipeline, *args: Any, **kwargs: Any) -> Any:
        with _Call(self):
            return method(self, *args, **kwargs)

    return call


@functools.cache
def _overridden(cls: type) -> type:
    """A subclass of `cls` with the methods rebound that `cls` itself and each of its bases define.

    A base's methods are placed after `cls` and before the base, so that `super()` in `cls` finds them.
    """
    bases = tuple(new for base in cls.__bases__ if (new := _overridden(base)) is not base)
    methods = {name: _in_call(new) for name, value in vars(cls).items() if (new := _rebound(value)) is not None}
    if not methods and not bases:
        return cls
    return type(cls.__name__, (cls, *bases), {**methods, "__module__": __name__, "__doc__": cls.__doc__})


class PreallocPipeline:
    """What our pipelines have beyond TorchRec's.

    Args:
        prealloc: options; a mapping of them, or None for the defaults. All other arguments are TorchRec's.
    """

    def __init__(self, *args: Any, prealloc: PreallocConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.prealloc = PreallocConfig.of(prealloc)
        self._lazy_engine: TransferEngine | None = None
        super().__init__(*args, **kwargs)

    @property
    def transfer_stats(self) -> TransferStats:
        """Batches, bytes, copies and device allocations so far."""
        return self._engine.stats

    @property
    def _engine(self) -> TransferEngine:
        if self._lazy_engine is None:
            pipeline: Any = self
            self._lazy_engine = engine = TransferEngine(
                pipeline._device, getattr(self, "_memcpy_stream", None), self.prealloc
            )
            # A pipeline that is dropped in the middle: its batches go after their copies and readers.
            weakref.finalize(self, engine.reset).atexit = False
        return self._lazy_engine

    @property
    def _frees_early(self) -> bool:
        return bool(getattr(self, "_free_features_storage_early", False))

    def progress(self, dataloader_iter: Any) -> Any:
        with _Call(self):
            return super().progress(dataloader_iter)  # type: ignore[misc]

    def reset(self) -> None:
        """TorchRec's reset; the batches in flight go after their copies and readers."""
        super().reset()  # type: ignore[misc]
        self._engine.reset()


def prealloc_pipeline(cls: type[P]) -> type[P]:
    """The subclass of a TorchRec pipeline class (or of a user's subclass of one) that preallocates its batches.

    It takes the same arguments plus `prealloc: PreallocConfig | None`, and is named `Prealloc` + the class' name.
    Device memory comes from the stream that is current when a method of the pipeline is called from outside
    (`progress`, mostly); the pipeline's copy stream fills it in place; each consuming stream waits for that copy.

    Raises:
        PipelineError: no method of the class copies or waits by TorchRec's functions, so there is nothing to replace.
    """
    return cast("type[P]", _subclass(cls))  # type: ignore[arg-type]  # mypy takes no class for hashable


@functools.cache
def _subclass(cls: Any) -> type:
    if not isinstance(cls, type):
        raise PipelineError(f"prealloc_pipeline: {cls!r} is no class; give a pipeline class")
    if issubclass(cls, PreallocPipeline):
        return cls
    overridden = _overridden(cls)  # type: ignore[arg-type]
    if overridden is cls:
        raise PipelineError(
            f"prealloc_pipeline: no method of {cls.__name__} calls torchrec's _to_device or _wait_for_batch; give a "
            "subclass of a TorchRec train pipeline"
        )
    doc = f"TorchRec's `{cls.__name__}` with preallocated batches: see `prealloc_pipeline`.\n\n{cls.__doc__ or ''}"
    return type("Prealloc" + cls.__name__, (PreallocPipeline, overridden), {"__doc__": doc, "__module__": __name__})


PreallocTrainPipelineBase = prealloc_pipeline(TrainPipelineBase)
PreallocTrainPipelineSparseDist = prealloc_pipeline(TrainPipelineSparseDist)
