"""A batch sent by the engine, beside what `.to` gives, compared down to the last bit."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase, is_tensorclass
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchrec import KeyedJaggedTensor

from torchrec_prealloc.batch_types import field_names, kind_of, structure
from torchrec_prealloc.config import PreallocConfig
from torchrec_prealloc.transfer import TransferEngine

CPU = torch.device("cpu")


# The reference: `.to` itself -------------------------------------------------------------------------------------


class _Copies(TorchFunctionMode):
    """`.to(<CPU>)` copies: what it gives on the way to another device, where that device is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to and isinstance(kwargs.get("device", args[1] if len(args) > 1 else None), torch.device):
            kwargs["copy"] = True
        return func(*args, **kwargs)


def reference(batch: Any, device: torch.device) -> Any:
    """The batch with its own `to`, or each part's in a container without one, in place of the engine."""
    with _Copies() if device == CPU else contextlib.nullcontext():
        return _moved(batch, device, {})


def _moved(obj: Any, device: torch.device, done: dict[int, Any]) -> Any:
    if id(obj) not in done:
        done[id(obj)] = obj
        done[id(obj)] = _moved_once(obj, device, done)
    return done[id(obj)]


def _moved_once(obj: Any, device: torch.device, done: dict[int, Any]) -> Any:
    if callable(getattr(type(obj), "to", None)):
        return obj.to(device=device)
    if isinstance(obj, dict):
        copied = copy.copy(obj)
        copied.update((key, _moved(value, device, done)) for key, value in obj.items())
        return copied
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*(_moved(item, device, done) for item in obj))
    if type(obj) in (list, tuple):
        return type(obj)(_moved(item, device, done) for item in obj)
    if dataclasses.is_dataclass(obj) or attrs.has(type(obj)):
        new = object.__new__(type(obj))
        for name in field_names(obj):
            object.__setattr__(new, name, _moved(getattr(obj, name), device, done))
        return new
    return obj


# The engine ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def race_free(device: torch.device, seed: int = 0) -> Iterator[None]:
    """On the simulator: what runs inside has no race, and copies run at random moments."""
    if device.type != "mtia":
        yield
        return
    from torchrec_prealloc import simulator

    with simulator.checked(schedule="random", seed=seed):
        yield


def engine_for(device: torch.device, direct_bytes: int = 1024) -> TransferEngine:
    """An engine for which a tensor of 1 KiB is large, so that small batches go each way."""
    return TransferEngine(device, config=PreallocConfig(direct_bytes=direct_bytes))


def send(
    batch: Any, device: torch.device, isolate: bool = False, seed: int = 0, engine: TransferEngine | None = None
) -> Any:
    """What an engine (a new one by default) makes of a batch; it must have forgotten it then."""
    engine = engine or engine_for(device)
    with race_free(device, seed):
        arrived = engine.start(batch, isolate=isolate).wait()
        engine.close()
    assert not engine._pending
    assert not engine._staging.reading
    return arrived


def check(make: Callable[[], Any], device: torch.device, times: int = 3, seed: int = 0) -> Any:
    """Send what `make` makes by one engine, several times: the first teaches it what the others rely on.

    Returns:
        The last arrival.
    """
    engine = engine_for(device)
    for _ in range(times):
        host, same = make(), make()
        arrived = send(host, device, seed=seed, engine=engine)
        assert_same(arrived, reference(host, device))
        assert_same(host, same)
    return arrived


# Comparing -------------------------------------------------------------------------------------------------------


def assert_same(got: Any, wanted: Any, path: str = "batch") -> None:
    """Equal classes, metadata, attributes and bits, all the way down."""
    _assert_same(got, wanted, path, set())


def _assert_same(got: Any, wanted: Any, path: str, seen: set[tuple[int, int]]) -> None:
    if (id(got), id(wanted)) in seen:
        return
    seen.add((id(got), id(wanted)))
    assert type(got) is type(wanted), path
    if isinstance(wanted, Tensor):
        _assert_same_tensor(got, wanted, path)
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(got, wanted), path
    elif is_tensorclass(wanted) or isinstance(wanted, TensorDictBase):
        _assert_same_tensordict(got, wanted, path, seen)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), path
        for key in wanted:
            _assert_same(got[key], wanted[key], f"{path}[{key!r}]", seen)
        _assert_same_fields(got, wanted, path, seen)
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), path
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            _assert_same(one, other, f"{path}[{index}]", seen)
        _assert_same_fields(got, wanted, path, seen)
    elif kind_of(type(wanted)) is not None:
        _assert_same_fields(got, wanted, path, seen)
        children = structure(type(wanted)).flatten(wanted)[0]
        for index, child in enumerate(structure(type(wanted)).flatten(got)[0]):
            _assert_same(child, children[index], f"{path}<{index}>", seen)
    else:
        assert got is wanted or got == wanted or (got != got and wanted != wanted), path


def _assert_same_fields(got: Any, wanted: Any, path: str, seen: set[tuple[int, int]]) -> None:
    fields = dict(getattr(wanted, "__dict__", {}))
    assert list(getattr(got, "__dict__", {})) == list(fields), path
    if isinstance(wanted, KeyedJaggedTensor):
        fields.pop("_jt_dict")  # forgotten on the way: see batch_types.py
    for name, value in fields.items():
        _assert_same(getattr(got, name), value, f"{path}.{name}", seen)


def _assert_same_tensordict(got: Any, wanted: Any, path: str, seen: set[tuple[int, int]]) -> None:
    for name in ("batch_size", "device", "names", "is_locked"):
        assert getattr(got, name) == getattr(wanted, name), f"{path}.{name}"
    if isinstance(wanted, NonTensorData):
        assert got.data == wanted.data, path
    elif hasattr(wanted, "tensordicts"):  # lazily stacked
        assert got.stack_dim == wanted.stack_dim, path
        _assert_same(got.tensordicts, wanted.tensordicts, path, seen)
    else:
        keys = list(wanted.keys())
        assert list(got.keys()) == keys, path
        for key in keys:
            one, other = ((td._tensordict if is_tensorclass(td) else td)._get_str(key, None) for td in (got, wanted))
            _assert_same(one, other, f"{path}[{key!r}]", seen)


def _assert_same_tensor(got: Tensor, wanted: Tensor, path: str) -> None:
    described = [_described(tensor) for tensor in (got, wanted)]
    assert described[0] == described[1], path
    if got.is_meta:
        return
    for one, other in zip(_parts(got), _parts(wanted), strict=True):
        assert one.dtype == other.dtype, path
        assert torch.equal(_bits(one), _bits(other)), f"{path}: {one} is not {other}"


def _described(tensor: Tensor) -> Mapping[str, Any]:
    seen: dict[str, Any] = {
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "requires_grad": tensor.requires_grad,
        "leaf": tensor.is_leaf,
        "edge": type(tensor.grad_fn).__name__,
    }
    if not tensor.is_nested:
        seen["shape"] = tensor.shape
        seen["conj"], seen["neg"] = tensor.is_conj(), tensor.is_neg()
    if tensor.layout is torch.strided and not tensor.is_nested:
        # A stride along a dimension of one row is never used, and not kept where tensors are viewed in bulk.
        seen["strides"] = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return seen


def _parts(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.detach()
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.int_repr(), torch.tensor([tensor.q_scale()])]
    return [tensor]


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.cpu().resolve_conj().resolve_neg().as_subclass(Tensor)
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
