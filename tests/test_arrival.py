"""Everything that a batch may be made of, sent by the engine and compared with what `.to` gives."""

from __future__ import annotations

import dataclasses
import enum
import gc
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from arrivals import CPU, assert_same, check, engine_for, race_free, reference, send
from recsys import FREES_EARLY
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_prealloc.batch_types import BatchError

MIB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:batch of class"),  # unpinned memory: test_unpinned.py
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

# What `.to` needs on the way to a device and the simulator has no operator for.
NOT_SIMULATED = {
    "sparse COO": "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "sparse CSR": "aten::sparse_compressed_tensor",
    "nested, strided": "aten::_to_copy of nested tensors",
    "quantized": "aten::empty_quantized",
}


def pinned(tensor: Tensor) -> Tensor:
    """In pinned memory where there is such a thing; it keeps the strides."""
    if not torch.accelerator.is_available():
        return tensor
    whole = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, pin_memory=True).view(tensor.dtype)
    place = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return place.copy_(tensor)


def skip_what_is_not_simulated(name: str, device: torch.device) -> None:
    if device.type == "mtia" and name in NOT_SIMULATED:
        pytest.skip(f"the simulator has no {NOT_SIMULATED[name]}")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count) % 120).reshape(shape).to(dtype)


# Jagged tensors --------------------------------------------------------------------------------------------------


def kjt(count: int = 2, stride: int = 5, offsets: bool = False, both: bool = False, **options: Any) -> Any:
    lengths = options.pop("lengths", torch.arange(count * stride) % 4)
    total = int(lengths.sum())
    given: dict[str, Any] = {"values": torch.arange(total), **options}
    if offsets or both:
        given["offsets"] = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0).to(lengths.dtype)])
    if not offsets:
        given["lengths"] = lengths
    return KeyedJaggedTensor([f"f{i}" for i in range(count)], **given)


def weighted(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: kjt(weights=numbers(int((torch.arange(10) % 4).sum()), dtype=dtype))


def variable() -> Any:
    return KeyedJaggedTensor(
        ["f", "g"],
        torch.arange(10),
        lengths=torch.tensor([1, 2, 3, 4]),
        stride_per_key_per_rank=[[3], [1]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 1, 2], [0, 0, 0]])),
    )


def with_caches() -> Any:
    made = kjt()
    made.length_per_key(), made.offset_per_key(), made._key_indices(), made.lengths_offset_per_key()
    return made


def over_slices() -> Any:
    large = torch.arange(100)
    return KeyedJaggedTensor(["f"], large[10:16], lengths=torch.arange(50)[1:4], weights=numbers(40)[7:13])


def sharing_lengths() -> Any:
    lengths = torch.tensor([1, 2, 0])
    return [kjt(1, lengths=lengths), kjt(1, lengths=lengths, weights=numbers(3))]


JAGGED: dict[str, Callable[[], Any]] = {
    "lengths": kjt,
    "offsets": lambda: kjt(offsets=True),
    "lengths and offsets": lambda: kjt(both=True),
    "int32 lengths": lambda: kjt(lengths=(torch.arange(10) % 3).int()),
    "no keys": lambda: KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0, dtype=torch.int64)),
    "features without values": lambda: kjt(lengths=torch.tensor([0, 0, 0, 0, 0, 1, 2, 1, 0, 0])),
    "all features without values": lambda: kjt(lengths=torch.zeros(10, dtype=torch.int64)),
    "float16 weights": weighted(torch.float16),
    "bfloat16 weights": weighted(torch.bfloat16),
    "float64 weights": weighted(torch.float64),
    "variable batch": variable,
    "caches": with_caches,
    "slices of larger tensors": over_slices,
    "two that share lengths": sharing_lengths,
    "large": lambda: kjt(lengths=torch.full((1000,), 3)),
    "JaggedTensor": lambda: JaggedTensor(numbers(6), lengths=torch.tensor([1, 2, 3]), weights=numbers(6)),
    "JaggedTensor with offsets": lambda: JaggedTensor(numbers(6), offsets=torch.tensor([0, 1, 3, 6])),
    "KeyedTensor": lambda: KeyedTensor(["a", "b"], [2, 3], numbers(4, 5)),
}


@pytest.mark.parametrize("name", JAGGED)
def test_jagged_tensors_arrive_as_to_gives_them(name: str, device: torch.device) -> None:
    check(JAGGED[name], device)


def test_to_dict_on_the_device_gives_device_tensors_whatever_was_asked_on_the_host(device: torch.device) -> None:
    host = kjt()
    host.to_dict()
    arrived = send(host, device)
    jagged = arrived.to_dict()["f1"]
    assert jagged.values().device.type == device.type
    assert torch.equal(jagged.values().cpu(), host.to_dict()["f1"].values())
    assert host._jt_dict is not None
    if device == CPU:
        assert jagged.values().untyped_storage()._cdata == arrived.values().untyped_storage()._cdata


def test_kjts_that_share_lengths_share_them_on_the_device(device: torch.device) -> None:
    one, two = send(sharing_lengths(), device)
    assert one.lengths() is two.lengths()


def test_a_kjt_that_may_be_freed_early_shares_memory_with_nothing(device: torch.device) -> None:
    lengths = torch.tensor([1, 2, 0])
    values = torch.arange(3)
    host = {
        "one": kjt(1, lengths=lengths),
        "two": KeyedJaggedTensor(["f"], values, lengths=lengths),
        "view": values[1:],
    }
    host["again"] = host["one"]
    arrived = send(host, device, isolate=True)
    assert arrived["again"] is arrived["one"]
    parts = [
        [arrived["one"].values(), arrived["one"].lengths()],
        [arrived["two"].values(), arrived["two"].lengths()],
        [arrived["view"]],
    ]
    storages = [{tensor.untyped_storage()._cdata for tensor in part} for part in parts]
    assert not storages[0] & storages[1]
    assert not storages[2] & (storages[0] | storages[1])
    if not FREES_EARLY:
        return
    wanted = [tensor.cpu().clone() for tensor in (arrived["two"].values(), arrived["view"])]
    arrived["one"].clear_storage()
    assert torch.equal(arrived["two"].values().cpu(), wanted[0])
    arrived["two"].clear_storage()
    assert torch.equal(arrived["view"].cpu(), wanted[1])


# Tensors ---------------------------------------------------------------------------------------------------------


class Subclass(Tensor):
    """A tensor class of a user."""


def subclass() -> Any:
    return numbers(4).as_subclass(Subclass)


def complex_numbers() -> Tensor:
    return torch.complex(numbers(6), -numbers(6))


def channels_last() -> Tensor:
    return numbers(2, 3, 4, 5).to(memory_format=torch.channels_last)


TENSORS: dict[str, Callable[[], Any]] = {
    "0-d": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "empty, transposed": lambda: torch.empty(0, 3).t(),
    "every other column": lambda: numbers(8, 8)[:, ::2],
    "every other column, large": lambda: numbers(100, 100)[:, ::2],
    "transposed": lambda: numbers(3, 5).t(),
    "transposed, large": lambda: numbers(30, 50).t(),
    "permuted": lambda: numbers(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: numbers(3, 1).expand(3, 4),
    "0-d expanded": lambda: torch.tensor(2).expand(5),
    "channels last": channels_last,
    "channels last, every other image": lambda: numbers(4, 3, 4, 5).to(memory_format=torch.channels_last)[::2],
    "channels last 3d": lambda: numbers(2, 2, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "overlapping itself": lambda: numbers(10).as_strided((3, 3), (2, 1)),
    "odd strides of size 1": lambda: numbers(10).as_strided((3, 1), (1, 7)),
    "view with an offset": lambda: numbers(20)[7:11],
    "at an odd address": lambda: torch.arange(41, dtype=torch.uint8)[1:].view(torch.uint8),
    "conjugate view": lambda: complex_numbers().conj(),
    "negative view": lambda: complex_numbers().conj().imag,
    "requires grad": lambda: numbers(4).requires_grad_(),
    "requires grad, no leaf": lambda: numbers(4).requires_grad_() * 2,
    "sparse COO": lambda: torch.eye(3).to_sparse(),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "nested, jagged": lambda: torch.nested.nested_tensor([numbers(2), numbers(3)], layout=torch.jagged),
    "nested, strided": lambda: torch.nested.nested_tensor([numbers(2), numbers(3)]),
    "quantized": lambda: torch.quantize_per_tensor(numbers(4), 0.5, 0, torch.qint8),
    "subclass": subclass,
    "Parameter": lambda: torch.nn.Parameter(numbers(4)),
    "made in inference mode": lambda: torch.inference_mode()(numbers)(4),
    "NaN and infinities": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "from numpy": lambda: torch.from_numpy(np.arange(5.0)),
    "pinned": lambda: pinned(numbers(40)),
    "pinned, large": lambda: pinned(numbers(1000)),
    "pinned, large, transposed": lambda: pinned(numbers(30, 50).t()),
    "pinned, large, every other column": lambda: pinned(numbers(100, 100)[:, ::2]),
    "packed sequence": lambda: pack_padded_sequence(numbers(3, 2), torch.tensor([3, 2])),
}

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantize")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_to_gives_them(name: str, device: torch.device) -> None:
    skip_what_is_not_simulated(name, device)
    check(lambda: {"alone": TENSORS[name](), "other": numbers(3)}, device, times=1)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantize")
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_known_of_earlier_batches_does_not_mislead(name: str, device: torch.device) -> None:
    skip_what_is_not_simulated(name, device)
    engine = engine_for(device)
    odd = TENSORS[name]()
    form = odd.detach() if isinstance(odd, Tensor) and odd.layout is torch.strided and not odd.is_nested else numbers(3)
    plain = [torch.zeros(form.shape, dtype=torch.float32 if form.is_quantized else form.dtype) for _ in range(20)]
    for host in (
        plain,
        [*plain[:4], *(TENSORS[name]() for _ in range(16))],
        [TENSORS[name]() for _ in range(20)],
        plain,
    ):
        assert_same(send(list(host), device, engine=engine), reference(list(host), device))


def test_what_is_shared_or_freed_is_noticed_after_batches_in_which_nothing_was(device: torch.device) -> None:
    engine = engine_for(device)

    def plain() -> list[Tensor]:
        return [numbers(6) + index for index in range(20)]

    send(plain(), device, engine=engine)
    one = numbers(6)
    twice = [*plain()[:18], one, one]
    arrived = send(twice, device, engine=engine)
    assert arrived[18] is arrived[19]
    send(plain(), device, engine=engine)
    aliases = send([*plain()[:18], one, one.view(6)], device, engine=engine)
    assert aliases[18].untyped_storage()._cdata == aliases[19].untyped_storage()._cdata
    send(plain(), device, engine=engine)
    whole = numbers(120)
    parts = send([whole[start : start + 6] for start in range(0, 120, 6)], device, engine=engine)
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
    assert_same(parts, [whole[start : start + 6].to(device) for start in range(0, 120, 6)])
    assert parts[1].storage_offset() - parts[0].storage_offset() == 6
    send(plain(), device, engine=engine)
    for left in (0, 8):
        freed = plain()
        freed[5].untyped_storage().resize_(left)
        with pytest.raises(BatchError, match="its memory was freed"):
            engine.start(freed)
    assert_same(send(plain(), device, engine=engine), [tensor.to(device) for tensor in plain()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives(dtype: torch.dtype, device: torch.device) -> None:
    check(lambda: [numbers(7).to(dtype), numbers(3, 4).to(dtype).t(), numbers(6, 6).to(dtype)[:, ::2]], device, times=1)


def test_a_gradient_flows_back_to_the_host_as_through_to(device: torch.device) -> None:
    leaf = numbers(4).requires_grad_()
    engine = engine_for(device)
    arrived = engine.start({"x": leaf}).wait()["x"]
    (arrived * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0] * 4
    engine.close()


def test_a_tensor_on_the_target_already_is_passed_on(device: torch.device) -> None:
    here = numbers(4).to(device)
    arrived = send({"here": here, "there": numbers(3)}, device)
    if device != CPU:  # on the CPU nothing is: see capture.RealCopies
        assert arrived["here"] is here
    assert_same(arrived["here"], here)


def test_a_tensor_on_another_device_comes_over(device: torch.device) -> None:
    if device == CPU or torch.get_device_module(device).device_count() < 2:
        pytest.skip("no other device")
    other = torch.device(device.type, 1)
    there = numbers(4).to(other)
    torch.get_device_module(device).synchronize(other)
    assert_same(send([there], device), [numbers(4).to(device)])


def test_a_tensor_on_meta_fails_as_in_to_and_the_engine_goes_on(device: torch.device) -> None:
    engine = engine_for(device)
    with pytest.raises(NotImplementedError, match="no data"):
        engine.start({"a": numbers(3), "b": numbers(3).to("meta")})
    assert not engine._pending
    assert_same(engine.start([numbers(3)]).wait(), [numbers(3).to(device)])
    engine.close()


def test_memory_mapped_tensors_arrive(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(np.arange(32, dtype=np.float32).tobytes())
    check(lambda: [torch.from_file(str(tmp_path / "values"), size=32)[4:9]], device)


class Color(enum.Enum):
    """A flag."""

    RED = 1


def test_what_is_no_tensor_passes_through_untouched(device: torch.device) -> None:
    passed = [np.arange(3), "text", b"bytes", None, 1, 2.5, Color.RED, {1, 2}, object(), torch.Size([2]), range(3)]
    host = [numbers(2), *passed]
    assert all(one is other for one, other in zip(send(host, device)[1:], passed, strict=True))


# Sharing ---------------------------------------------------------------------------------------------------------


def test_one_tensor_in_several_places_is_one_copy_and_one_tensor(device: torch.device) -> None:
    same = numbers(2 * MIB // 4)
    engine = engine_for(device)
    arrived = engine.start({"a": same, "b": [same, (same,)], "c": numbers(2)}).wait()
    assert arrived["a"] is arrived["b"][0] is arrived["b"][1][0]
    assert engine.stats.bytes == 2 * MIB + 64
    engine.close()


@pytest.mark.parametrize("count", [100, MIB])
def test_views_of_one_storage_are_copied_once_and_stay_views(count: int, device: torch.device) -> None:
    whole = torch.arange(count)
    engine = engine_for(device)
    with race_free(device):
        host = {"head": whole[: count // 2 + 3], "tail": whole[count // 2 :], "whole": whole}
        arrived = engine.start(host).wait()
        assert len({view.untyped_storage()._cdata for view in arrived.values()}) == 1
        assert engine.stats.bytes - 8 * count < 64
        arrived["whole"].add_(1)
        assert torch.equal(arrived["tail"].cpu(), whole[count // 2 :] + 1)
        engine.close()


def test_negative_views_of_one_storage_arrive_with_their_values(device: torch.device) -> None:
    def make() -> Any:
        whole = torch._neg_view(numbers(6))
        return [whole, whole[1:], complex_numbers().conj()[:3]]

    check(make, device)


def test_a_small_slice_of_a_large_storage_brings_only_itself(device: torch.device) -> None:
    engine = engine_for(device)
    large = torch.zeros(8 * MIB)
    arrived = engine.start([large[5 * MIB : 5 * MIB + 4], large[MIB : MIB + 4]]).wait()
    assert engine.stats.bytes == 128
    assert_same(arrived, [torch.zeros(4).to(device)] * 2)
    engine.close()


def test_shared_and_cyclic_containers_keep_their_shape(device: torch.device) -> None:
    shared = [numbers(3)]
    host: dict[str, Any] = {"a": shared, "b": (shared, None)}
    host["self"] = host
    shared.append(host)
    arrived = send(host, device)
    assert arrived["a"] is arrived["b"][0]
    assert arrived["self"] is arrived
    assert arrived["a"][1] is arrived
    assert arrived is not host
    assert_same(arrived["a"][0], numbers(3).to(device))
    assert host["self"] is shared[1] is host
    assert host["a"] is shared


def test_a_cycle_through_a_tuple_is_refused_by_name(device: torch.device) -> None:
    inner: list[Any] = [numbers(2)]
    engine = engine_for(device)
    inner.append((inner,))
    with pytest.raises(BatchError, match="a tuple in the batch holds itself"):
        engine.start(inner[1])
    assert not engine._pending
    engine.close()


def test_nesting_deeper_than_python_allows_is_refused_by_name(device: torch.device) -> None:
    host: Any = numbers(1)
    for _ in range(1000):
        host = [host]
    engine = engine_for(device)
    with pytest.raises(BatchError, match=r"the batch \(list\) nests deeper than"):
        engine.start(host)
    assert_same(engine.start([numbers(1)]).wait(), [numbers(1).to(device)])
    engine.close()


def test_ten_thousand_leaves_arrive_in_one_copy(device: torch.device) -> None:
    host = {f"k{i}": [torch.full((2,), float(10 * i + j)) for j in range(10)] for i in range(1000)}
    engine = engine_for(device)
    arrived = engine.start(host).wait()
    engine.close()
    assert engine.stats.copies == engine.stats.allocations == 1
    assert list(arrived) == list(host)
    got = torch.stack([leaf for leaves in arrived.values() for leaf in leaves]).cpu()
    assert torch.equal(got, torch.stack([leaf for leaves in host.values() for leaf in leaves]))


# Containers ------------------------------------------------------------------------------------------------------

Named = namedtuple("Named", ["x", "y"])


class Computes:
    """Its invariant depends on values that its constructor may not see again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> Computes:
        moved = Computes(self.x.to(device, non_blocking=non_blocking))
        moved.x = moved.x * 2 + self.x.to(device, torch.float64, non_blocking=non_blocking)
        return moved


@dataclasses.dataclass
class Plain:
    """A dataclass that counts in `__post_init__`."""

    x: Any
    y: Any = None

    def __post_init__(self) -> None:
        self.count = getattr(self, "count", 0) + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be assigned to."""

    x: Any
    y: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without `__dict__`."""

    x: Any
    y: Any = None


@attrs.define
class Attrs:
    """An attrs class with slots."""

    x: Any
    y: Any = None


@attrs.frozen(slots=False)
class FrozenAttrs:
    """An attrs class without slots."""

    x: Any
    y: Any = None


class Keyed(dict[str, Any]):
    """A dict with an attribute."""

    name = "class"


def keyed(x: Any, y: Any) -> Keyed:
    made = Keyed(x=x, y=y)
    made.name = "object"
    return made


def counted(x: Any, y: Any) -> defaultdict[str, Any]:
    return defaultdict(list, x=x, y=y)


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "defaultdict": counted,
    "dict subclass": keyed,
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "named tuple": Named,
    "return type": lambda x, y: torch.max(numbers(3, 2), dim=0),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "attrs class": Attrs,
    "frozen attrs class": FrozenAttrs,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_arrive_as_what_they_were(name: str, device: torch.device) -> None:
    def make(there: torch.device = CPU) -> Any:
        return CONTAINERS[name](numbers(3).to(there), [numbers(2, 2).to(there), None, "text"])

    host = make()
    if dataclasses.is_dataclass(host) and hasattr(host, "__dict__"):
        object.__setattr__(host, "extra", "an attribute")
    arrived = send(host, device)
    if name == "return type":
        assert type(arrived) is type(host)
        assert_same(tuple(arrived), tuple(item.to(device) for item in host))
        return
    wanted = make(device)
    if dataclasses.is_dataclass(host) and hasattr(host, "__dict__"):
        object.__setattr__(wanted, "extra", "an attribute")
    assert_same(arrived, wanted)
    if name == "defaultdict":
        assert arrived.default_factory is list
    if name == "dict subclass":
        assert arrived.name == "object"


def test_a_container_without_tensors_is_passed_on_as_it_is(device: torch.device) -> None:
    names = {"keys": ["a", "b"]}
    assert send([numbers(1), names], device)[1] is names


@tensorclass
class Classy:
    """A tensorclass."""

    x: Tensor
    name: str


def locked() -> Any:
    return TensorDict({"a": numbers(3, 4)}, batch_size=[3]).lock_()


def nested_tensordict() -> Any:
    inner = TensorDict({"b": numbers(3), "c": numbers(3, 2)}, batch_size=[3])
    return TensorDict(
        {"a": numbers(3, 4), "n": inner, "s": "text", "t": NonTensorData(5, batch_size=[3])},
        batch_size=[3],
        names=["rows"],
    )


TENSORDICTS: dict[str, Callable[[], Any]] = {
    "flat": lambda: TensorDict({"a": numbers(3, 4), "b": numbers(3)}, batch_size=[3]),
    "no batch size": lambda: TensorDict({"a": numbers(3, 4), "b": numbers(2)}, batch_size=[]),
    "with a device": lambda: TensorDict({"a": numbers(3)}, batch_size=[3], device="cpu"),
    "nested, with names and no tensors": nested_tensordict,
    "locked": locked,
    "lazily stacked": lambda: lazy_stack([TensorDict({"a": numbers(2)}, []), TensorDict({"a": numbers(3)}, [])]),
    "locked inside": lambda: TensorDict({"a": numbers(3, 4), "n": locked()}, batch_size=[3]),
    "memory-mapped": lambda: TensorDict({"a": numbers(3, 4)}, batch_size=[3]).memmap_(),
    "without tensors of its own": lambda: TensorDict({"n": locked(), "s": "text"}, batch_size=[3]),
    "tensorclass": lambda: Classy(x=numbers(3, 2), name="text", batch_size=[3]),
    "in a dict": lambda: {"td": TensorDict({"a": numbers(3)}, [3]), "t": numbers(2)},
}


@pytest.mark.parametrize("name", TENSORDICTS)
def test_tensordicts_arrive_as_to_gives_them(name: str, device: torch.device) -> None:
    if name == "memory-mapped" and device == CPU:
        pytest.skip("on the CPU already: its to() gives the same object")
    check(TENSORDICTS[name], device)


def test_what_to_computes_is_computed_from_moved_values(device: torch.device) -> None:
    check(lambda: {"c": Computes(numbers(5)), "t": numbers(2)}, device)


@pytest.mark.parametrize("make", [TENSORS["Parameter"], TENSORS["conjugate view"], Computes])
def test_what_the_owner_stream_does_itself_is_ordered_for_other_streams(
    make: Callable[..., Any], simulated_accelerator: torch.device
) -> None:
    """Tensors that go their own way are copied, and results of a `to` computed, on the stream that owns them."""
    module = torch.get_device_module(simulated_accelerator)
    engine = engine_for(simulated_accelerator)
    reader = module.Stream()
    with race_free(simulated_accelerator):
        for _ in range(3):
            transfer = engine.start([Computes(numbers(5)) if make is Computes else make()])
            with module.stream(reader):
                arrived = transfer.wait()[0]
                total = (arrived.x if make is Computes else arrived).sum()
            del transfer, arrived
            torch.zeros(500, device=simulated_accelerator)
        engine.close()
        module.synchronize()
        assert bool(total != 0)


# Memory ----------------------------------------------------------------------------------------------------------


def test_nothing_is_held_when_a_batch_is_dropped(simulated_accelerator: torch.device) -> None:
    from torchrec_prealloc import simulator

    def allocated() -> int:
        gc.collect()
        return simulator.stats().devices[0].allocated if simulator.stats().devices else 0

    engine = engine_for(simulated_accelerator)
    before = allocated()
    with race_free(simulated_accelerator):
        for make in [*JAGGED.values(), TENSORS["expanded"], TENSORS["Parameter"]]:
            engine.start([make(), numbers(500)]).wait()
    engine.close()
    assert allocated() == before


def test_the_reference_is_told_apart_from_something_else() -> None:
    """The comparison itself: each kind of difference fails it."""
    right = {"t": numbers(3), "k": kjt()}
    for wrong in (
        {"t": numbers(3) + 1, "k": kjt()},
        {"t": numbers(3).double(), "k": kjt()},
        {"t": numbers(1, 3).t()[:, 0].unsqueeze(0), "k": kjt()},
        {"t": numbers(3), "k": with_caches()},
        {"k": kjt(), "t": numbers(3)},
        {"t": numbers(3).requires_grad_(), "k": kjt()},
        OrderedDict(right),
    ):
        with pytest.raises(AssertionError):
            assert_same(wrong, right)
    assert_same(reference(right, CPU), right)
