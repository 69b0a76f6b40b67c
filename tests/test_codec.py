"""One message for related objects: what is shared, what arrives, what is refused."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import pickle
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)

from torchrec_prealloc.codec import PATIENCE, CodecError, dumps_all, loads_all
from torchrec_prealloc.stream import Decoder, Encoder

NAMES = [f"feature_{index}" for index in range(500)]


def fresh(names: list[str]) -> list[str]:
    """Equal strings in an equal list, none of them the same object."""
    return ["".join([name, "_x"]) for name in names]


class Mesh:
    """Something like a DeviceMesh: compared by identity."""

    def __init__(self, devices: int = 64) -> None:
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.names = ("data", "model")


@dataclasses.dataclass(frozen=True)
class Sharding:
    mesh: Mesh
    spec: tuple[Any, ...]


class Reduced:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Reduced, (self.value,)


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        raise AssertionError("copyreg goes first")


copyreg.pickle(Registered, lambda obj: (Registered, (obj.value,)))


class Slots:
    __slots__ = ("one", "two")


class Color(enum.Enum):
    RED = 1


Point = namedtuple("Point", ["x", "fn"])


def in_one(*members: Any) -> Any:
    return loads_all(dumps_all(members))


def in_stream(*members: Any) -> Any:
    """Each member as a message of its own."""
    encoder, decoder = Encoder(), Decoder()
    return [decoder.loads(encoder.dumps(member)) for member in members]


BOTH = pytest.mark.parametrize("travel", [in_one, in_stream])


@BOTH
def test_a_shared_object_stays_one(travel: Callable[..., Any]) -> None:
    mesh = Mesh()
    one, two, three = travel(Sharding(mesh, ("a",)), [Sharding(mesh, ("b",)), {"mesh": mesh}], mesh)
    assert one.mesh is two[0].mesh is two[1]["mesh"] is three
    assert (one.spec, two[0].spec, three.names) == (("a",), ("b",), mesh.names)
    assert three.devices == mesh.devices


@BOTH
@pytest.mark.parametrize("container", [dict, list, set, Slots, Mesh, bytearray, OrderedDict])
def test_whatever_it_is(travel: Callable[..., Any], container: type) -> None:
    shared = container()
    one, two = travel([shared, 1], {"x": shared})
    assert one[0] is two["x"]
    assert type(one[0]) is container


@BOTH
@pytest.mark.parametrize(
    "make",
    [
        lambda: tuple(fresh(NAMES)),
        lambda: "".join(NAMES),
        lambda: "".join(NAMES).encode(),
        lambda: tuple(range(1000, 1100)),
    ],
)
def test_equal_immutables_become_one(travel: Callable[..., Any], make: Callable[[], Any]) -> None:
    members = [{"x": make(), "step": step} for step in range(5)]
    assert members[0]["x"] is not members[1]["x"]
    arrived = travel(*members)
    assert arrived == members
    assert len({id(one["x"]) for one in arrived}) == 1


@BOTH
def test_equal_lists_stay_apart(travel: Callable[..., Any]) -> None:
    shared = fresh(NAMES)
    one, two, three = travel([shared], [fresh(NAMES)], [shared, fresh(NAMES)])
    assert one[0] == two[0] == three[1]
    assert one[0] is three[0]
    assert len({id(keys) for keys in (one[0], two[0], three[1])}) == 3


@BOTH
def test_equal_mutables_stay_apart(travel: Callable[..., Any]) -> None:
    one, two = travel([{"a": 1}, Mesh(1)], [{"a": 1}, Mesh(1)])
    assert one[0] == two[0]
    assert one[0] is not two[0]
    assert one[1] is not two[1]


@BOTH
@pytest.mark.parametrize("values", [((1,) * 9, (True,) * 9), ((0.0,) * 9, (-0.0,) * 9), ((1,) * 9, (1.0,) * 9)])
def test_equal_is_not_always_the_same(travel: Callable[..., Any], values: Any) -> None:
    arrived = travel(*([value] for value in values))
    assert [repr(one[0]) for one in arrived] == [repr(value) for value in values]


def test_equal_lists_are_written_once() -> None:
    members = [{"keys": fresh(NAMES), "step": step} for step in range(100)]
    assert len(dumps_all(members)) < 0.05 * sum(len(pickle.dumps(one)) for one in members)
    encoder = Encoder()
    assert sum(len(encoder.dumps(one)) for one in members) < 0.1 * sum(len(pickle.dumps(one)) for one in members)


def test_the_search_for_equals_goes_on_as_long_as_it_finds_some() -> None:
    members = [{"keys": fresh(NAMES[:20])} for _ in range(4 * PATIENCE)]
    assert len(dumps_all(members)) < 0.3 * len(pickle.dumps(members))
    hidden = [{"step": step} for step in range(2 * PATIENCE)]
    buried = [{"a": [fresh(NAMES)]}, *hidden, {"a": [fresh(NAMES)]}]
    assert in_one(*buried) == buried


@BOTH
def test_cycles(travel: Callable[..., Any]) -> None:
    mesh = Mesh()
    mesh.self, mesh.list, mesh.dict = mesh, [mesh], {"mesh": mesh, "names": fresh(NAMES)}  # type: ignore[attr-defined]
    other = {"mesh": mesh}
    mesh.other = other  # type: ignore[attr-defined]
    [[one, two, again]] = travel([mesh, other, mesh])
    assert one is again is one.self is one.list[0] is one.dict["mesh"] is two["mesh"]
    assert one.other is two


def test_a_large_cycle_in_a_stream() -> None:
    class Node:
        def __init__(self, parent: Any) -> None:
            self.parent, self.children = parent, [] if parent is None else None

    root = Node(None)
    root.children = [Node(root) for _ in range(100)]
    [arrived] = in_stream(root)
    assert all(child.parent is arrived for child in arrived.children)


@BOTH
def test_functions_and_local_classes(travel: Callable[..., Any]) -> None:
    offset = [3]

    class Local:
        def double(self, value: int) -> int:
            return 2 * value + offset[0]

    def closure(value: int) -> int:
        return value + offset[0]

    one, two = travel([closure, lambda value: -value, Local()], {"fn": closure, "offset": offset})
    assert one[0] is two["fn"]
    assert (one[0](1), one[1](1), one[2].double(2)) == (4, -1, 7)
    two["offset"][0] = 5
    assert one[0](1) == 6


@BOTH
def test_what_reduces_itself(travel: Callable[..., Any]) -> None:
    shared = Registered(Reduced([1]))
    one, two = travel([shared, shared.value], [shared, Color.RED, torch.float16, torch.Size([2, 3])])
    assert one[0] is two[0]
    assert one[1] is one[0].value
    assert one[1].value == [1]
    assert two[1:] == [Color.RED, torch.float16, torch.Size([2, 3])]


@BOTH
def test_plans(travel: Callable[..., Any]) -> None:
    spec = EnumerableShardingSpec([ShardMetadata([0, 0], [4, 4], "rank:0/cuda:0")])
    sharding = ParameterSharding("table_wise", "fused", [0], spec)
    plan = ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"t1": sharding, "t2": sharding})})
    one, two = travel(plan, {"again": plan, "spec": spec})
    assert one == plan
    assert two["again"] is one
    assert one.plan["ebc"]["t1"] is one.plan["ebc"]["t2"]
    assert two["spec"] is one.plan["ebc"]["t1"].sharding_spec


@BOTH
@pytest.mark.usefixtures("one_rank")
def test_an_env_leaves_its_process_group(travel: Callable[..., Any]) -> None:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    one, two = travel([env], [env])
    assert one[0] is two[0]
    assert (one[0].world_size, one[0].rank, one[0].process_group) == (1, 0, None)
    assert env.process_group is dist.group.WORLD


@BOTH
@pytest.mark.usefixtures("one_rank")
def test_a_device_mesh(travel: Callable[..., Any]) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    one, two = travel({"in": mesh}, {"out": [mesh]})
    assert one["in"] is two["out"][0]
    assert one["in"] == mesh
    assert one["in"].mesh_dim_names == ("dp",)


@BOTH
def test_a_jagged_batch(travel: Callable[..., Any]) -> None:
    kjt = KeyedJaggedTensor(fresh(NAMES), torch.arange(1000), lengths=torch.full((500,), 2))
    one, two = travel({"kjt": kjt}, {"kjt": kjt})
    assert one["kjt"] is two["kjt"]
    assert one["kjt"].keys() == kjt.keys()
    assert torch.equal(one["kjt"].values(), kjt.values())


class Spec:
    """Something in it cannot be pickled."""

    def __init__(self, fn: Any) -> None:
        self.out = [1, 2, 3, Point(0, {"a": fn})]


def test_a_refusal_names_the_path() -> None:
    with pytest.raises(CodecError, match=r"^spec\.out\[3\]\.fn\['a'\]: a _thread\.lock cannot be pickled"):
        dumps_all({"x": 1, "spec": Spec(threading.Lock())})
    with pytest.raises(CodecError, match=r"^\[1\]\.out\[3\]"):
        dumps_all([1, Spec(threading.Lock())])
    with pytest.raises(CodecError, match=r"^\[0\]\.out\[3\]\.fn\['a'\]: a _thread\.lock"):
        Encoder().dumps(Spec(threading.Lock()))


@pytest.mark.parametrize("dump", [lambda obj: dumps_all({"deep": obj}), Encoder().dumps])
def test_too_deep(dump: Callable[[Any], bytes]) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CodecError, match=r"^(deep|\[0\]): nests deeper than"):
        dump(deep)
    while deep:  # freed one by one
        deep = deep.pop()


# What may be imported --------------------------------------------------------------------------------------------


def test_plain_values_import_nothing() -> None:
    types = [torch.float32, torch.Size([1]), torch.device("cpu"), OrderedDict(a=1), {1, 2}, bytearray(b"x")]
    members = [*types, fresh(NAMES)]
    assert loads_all(dumps_all(members), allowed=()) == members
    encoder, decoder = Encoder(), Decoder(allowed=())
    assert [decoder.loads(encoder.dumps(one)) for one in members] == members


def test_nothing_else_is_imported() -> None:
    message = dumps_all([Mesh(1)])
    with pytest.raises(CodecError, match=r"wants to import \S+\.Mesh, which is not among the allowed"):
        loads_all(message, allowed=())
    with pytest.raises(CodecError, match="Mesh"):
        Decoder(allowed=[Point]).loads(Encoder().dumps(Mesh(1)))
    for allowed in (Mesh, f"{__name__}.Mesh", f"{__name__}.*"):
        assert loads_all(message, allowed=[allowed])[0].devices == [torch.device("cuda", 0)]


def importing(module: str, name: str) -> bytes:
    """A message that calls a function of any name."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return pickle.dumps(()) + b"\x80\x04" + names + b"\x93\x8c\x04true\x85R."


@pytest.mark.parametrize(
    ("module", "name"), [("os", "system"), ("builtins", "eval"), ("torch", "os.system"), ("copyreg", "sys.exit")]
)
def test_no_way_around(module: str, name: str) -> None:
    with pytest.raises(CodecError, match="wants to import"):
        loads_all(importing(module, name), allowed=["torch.*", "copyreg.*", Mesh])


def test_what_a_module_imported_is_not_its_own() -> None:
    with pytest.raises(CodecError, match="ShardMetadata"):
        loads_all(importing(__name__, "ShardMetadata"), allowed=[f"{__name__}.*"])


def test_references_into_nothing() -> None:
    with pytest.raises(pickle.UnpicklingError, match="persistent"):
        loads_all(b"\x80\x04K\x00Q.")


# Any objects -----------------------------------------------------------------------------------------------------

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=80))


@st.composite
def graphs(draw: Any) -> Any:
    """Members that share objects, hold themselves, and hold equal ones."""
    objects: list[Any] = [[], {}, Mesh(2), ("a",) * 10]
    for kind in draw(st.lists(st.sampled_from(["list", "dict", "tuple", "names", "text", "dataclass"]), max_size=12)):
        picked = [objects[draw(st.integers(0, len(objects) - 1))] for _ in range(2)]
        value = draw(scalars)
        objects.append(
            {
                "list": lambda p=picked, v=value: [*p, v],
                "dict": lambda p=picked, v=value: {"a": p[0], "b": p[1], 3: v},
                "tuple": lambda p=picked, v=value: (*p, v),
                "names": lambda: fresh(NAMES[:10]),
                "text": lambda: "".join(["ab"] * 40),
                "dataclass": lambda p=picked: Sharding(*p),
            }[kind]()
        )
    if draw(st.booleans()):
        objects[0].append(objects[-1])
    return [objects[draw(st.integers(0, len(objects) - 1))] for _ in range(4)]


def shape(obj: Any, seen: dict[int, int]) -> Any:
    """A graph as a tree, in which what was met before is its number."""
    if isinstance(obj, (Mesh, Sharding)):
        return type(obj).__name__, shape(vars(obj), {**seen}) if id(obj) not in seen else seen[id(obj)]
    if isinstance(obj, (list, dict)) or (isinstance(obj, tuple) and obj):
        if isinstance(obj, (list, dict)):
            if id(obj) in seen:
                return seen[id(obj)]
            seen[id(obj)] = len(seen)
        items = obj.items() if isinstance(obj, dict) else obj
        return type(obj).__name__, [shape(item, seen) for item in items]
    return repr(obj)


@BOTH
@settings(max_examples=100, deadline=None)
@given(members=graphs())
def test_any_graph_arrives(travel: Callable[..., Any], members: Any) -> None:
    arrived = travel(*members) if travel is in_one else in_stream(members)[0]
    assert shape(arrived, {}) == shape(members, {})
