"""TorchRec's own switches keep their meaning in our pipelines; semi-sync in place is ordered."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kinds import CPU, KINDS, Kind, of_batches
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.streamable import Pipelineable

from torchrec_prealloc import simulator, versions

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 10
ON = {
    "enable_inplace_copy_batch": True,
    "inplace_copy_batch_to_gpu": True,
    "async_inplace_copy": True,
    "free_features_storage_early": True,
    "clear_data_dist_inputs": True,
    "enqueue_batch_after_forward": True,
    "execute_all_batches": False,
    "pipeline_postproc": True,
    "emb_lookup_stream": "new",
    "embedding_lookup_after_data_dist": True,
    "enable_embedding_lookup_prefetch": True,
    "multi_thread": True,
    "pipeline_depth": 1,
    "delay_stash": True,
    "stash_gradients": True,
    "dmp_collection_sync_interval_batches": None,
}
# Async copies are made only of in-place copies.
TOGETHER = {"async_inplace_copy": {"enable_inplace_copy_batch": True}}
INPLACE = ("enable_inplace_copy_batch", "inplace_copy_batch_to_gpu", "async_inplace_copy")


def options_of(cls: type) -> set[str]:
    named: set[str] = set()
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}
        named |= set(parameters)
        if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return named


def _cases() -> Iterator[Any]:
    for name, kind in KINDS.items():
        cls = versions.available().get(kind.cls)
        for switch in ON:
            if kind.ranks == 1 and (cls is None or switch in options_of(cls)):
                yield pytest.param(kind, switch, id=f"{name}-{switch}")


CASES = list(_cases())


def switched(kind: Kind, switch: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options for ours, and those for TorchRec's: without its in-place copy, which its batches do not support."""
    kind.theirs()
    ours = {switch: ON[switch], **TOGETHER.get(switch, {})}
    return ours, {name: value for name, value in ours.items() if name not in INPLACE}


def outcome(kind: Kind, cls: Any, device: torch.device, steps: int, options: Any) -> Any:
    """What a run gives, or what it raises."""
    try:
        return kind.run(cls, device, steps, **options)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(("kind", "switch"), CASES)
def test_a_switch_gives_torchrecs_outputs_without_a_race(
    kind: Kind, switch: str, simulated_accelerator: torch.device
) -> None:
    ours, theirs = switched(kind, switch)
    if switch == "multi_thread":
        theirs = {}  # TorchRec's thread writes embeddings into memory that is being copied
    with simulator.checked(raise_on_report=False):
        expected = outcome(kind, kind.theirs(), simulated_accelerator, STEPS, theirs)
    races = kind.lookup_races or "emb" in switch
    for schedule, seed in (("lazy", 0), ("eager", 0), ("random", 7)):
        with simulator.checked(schedule, seed, raise_on_report=False) as run:  # type: ignore[arg-type]
            assert outcome(kind, kind.ours(), simulated_accelerator, STEPS, ours) == expected
        assert not (of_batches(run.reports) if races else run.reports)


@pytest.mark.parametrize(("kind", "switch"), CASES)
def test_a_switch_gives_torchrecs_outputs_on_the_cpu(kind: Kind, switch: str) -> None:
    ours, theirs = switched(kind, switch)
    if kind.on_cpu:
        pytest.skip(f"{kind.cls} on a CPU device: {kind.on_cpu}")
    assert outcome(kind, kind.ours(), CPU, 6, ours) == outcome(kind, kind.theirs(), CPU, 6, theirs)


def test_switches_that_fail_are_known_and_do_so_in_torchrec() -> None:
    """The eval pipeline starts the first batch's input dist twice, after the first of which the features are gone."""
    failing = {
        (kind.cls, switch)
        for kind, switch in (case.values for case in CASES)
        if not kind.on_cpu and kind.cls in versions.available()
        if isinstance(outcome(kind, kind.theirs(), CPU, 3, switched(kind, switch)[1]), type)
    }
    known = {("EvalPipelineSparseDist", "free_features_storage_early")}
    if versions.installed_version().startswith("1.6"):
        known.add(("EvalPipelineFusedSparseDist", "pipeline_postproc"))
    assert failing <= known


class InPlace(Pipelineable):  # type: ignore[misc]
    """A batch as TorchRec's in-place copy asks for: allocated on the current stream, filled on the copy stream."""

    def __init__(self, batch: Any) -> None:
        self.dense_features, self.sparse_features, self.labels = (
            batch.dense_features,
            batch.sparse_features,
            batch.labels,
        )

    def to(self, device: torch.device, non_blocking: bool = False, data_copy_stream: Any = None) -> InPlace:
        from torchrec import KeyedJaggedTensor

        module = torch.get_device_module(device)
        if data_copy_stream is None:
            return InPlace(_map(self, lambda part: part.to(device, non_blocking=non_blocking)))
        sparse = self.sparse_features
        moved = _map(
            self, lambda part: torch.empty_like(part, device=device) if isinstance(part, torch.Tensor) else part
        )
        lengths = torch.empty_like(sparse.lengths(), device=device)
        values = torch.empty_like(sparse.values(), device=device)
        moved.sparse_features = KeyedJaggedTensor(sparse.keys(), values, lengths=lengths)
        with module.stream(data_copy_stream):
            data_copy_stream.wait_stream(module.default_stream(device))
            for target, source in (
                (moved.dense_features, self.dense_features),
                (moved.labels, self.labels),
                (values, sparse.values()),
                (lengths, sparse.lengths()),
            ):
                target.copy_(source, non_blocking=non_blocking)
        return InPlace(moved)

    def record_stream(self, stream: Any) -> None:
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> InPlace:
        return InPlace(_map(self, lambda part: part.pin_memory()))


class Parts:
    pass


def _map(batch: Any, function: Any) -> Any:
    parts: Any = Parts()
    for name in ("dense_features", "sparse_features", "labels"):
        setattr(parts, name, function(getattr(batch, name)))
    return parts


@dataclasses.dataclass(frozen=True)
class InPlaceKind(Kind):
    def batches(self, count: int, device: torch.device, seed: int = 1) -> list[Any]:
        return [InPlace(batch) for batch in super().batches(count, device, seed)]


def test_semi_sync_in_place_races_in_torchrec_and_not_in_ours(simulated_accelerator: torch.device) -> None:
    kind = InPlaceKind("TrainPipelineSemiSync")
    if "enable_inplace_copy_batch" not in options_of(kind.theirs()):
        pytest.skip("no in-place copy in this TorchRec")
    plain = kind.run(kind.theirs(), simulated_accelerator, STEPS)
    options = {"enable_inplace_copy_batch": True}
    with simulator.checked("lazy", raise_on_report=False) as theirs:
        kind.run(kind.theirs(), simulated_accelerator, STEPS, **options)
    assert theirs.reports
    for schedule, seed in (("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)):
        with simulator.checked(schedule, seed, repair=False):  # type: ignore[arg-type]
            assert kind.run(kind.ours(), simulated_accelerator, STEPS, **options) == plain


# Methods ---------------------------------------------------------------------------------------------------------

HAVE_DETACH = ("sparse_dist", "sparse_dist_lite", "fused_current", "semi_sync", "threaded", "hybrid")


def scripted(kind: Kind, cls: Any, device: torch.device, script: str) -> list[Any]:
    """Some steps, something in between, some more steps."""
    pipeline = kind.build(cls, device)
    first, second = kind.batches(8, device), kind.batches(6, device, seed=2)
    iterator, losses = iter(first), list[Any]()

    def step(count: int) -> None:
        for _ in range(count):
            try:
                losses.append(pipeline.progress(iterator)[0])
            except Exception as error:
                losses.append(type(error))

    with kind.names(device):
        step(3)
    if script in ("detach", "detach and forward"):
        model = pipeline.detach()
        if script == "detach and forward":
            losses.append(model(first[0].to(device))[1][0])
        pipeline.attach(model)
    elif script == "reset":
        pipeline.reset()
    if script != "detach":
        iterator = iter(second)
    with kind.names(device):
        step(12)
    return [float(loss) if isinstance(loss, torch.Tensor) else loss for loss in losses]


@pytest.mark.parametrize("script", ["new iterator", "reset", "detach", "detach and forward"])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.ranks == 1 and not kind.names_cuda])
def test_a_scripted_run_goes_as_torchrecs(name: str, script: str, device: torch.device) -> None:
    kind = KINDS[name]
    theirs = kind.theirs()
    if device == CPU and kind.on_cpu:
        pytest.skip(f"{kind.cls} on a CPU device: {kind.on_cpu}")
    if script.startswith("detach") and name not in HAVE_DETACH:
        pytest.skip(f"{kind.cls}: nothing to detach")
    if script == "reset" and not hasattr(theirs, "reset"):
        pytest.skip(f"{kind.cls} has no reset")
    if device.type != "mtia":
        assert scripted(kind, kind.ours(), device, script) == scripted(kind, theirs, device, script)
        return
    with simulator.checked(raise_on_report=False):
        expected = scripted(kind, theirs, device, script)
    with simulator.checked("random", 5, raise_on_report=not kind.lookup_races):
        assert scripted(kind, kind.ours(), device, script) == expected


def test_a_custom_forward_is_called(device: torch.device) -> None:
    kind = KINDS["sparse_dist"]
    seen = []
    for cls in (kind.theirs(), kind.ours()):
        calls = []
        model, optimizer = kind.make(device)

        def forward(batch: Any, model: Any = model, calls: Any = calls) -> Any:
            calls.append(1)
            return model(batch)

        pipeline = cls(model, optimizer, device, custom_model_fwd=forward)
        iterator = iter(kind.batches(5, device))
        seen.append([[float(pipeline.progress(iterator)[0]) for _ in range(5)], len(calls)])
    assert seen[0] == seen[1]
    assert seen[0][1] == 5


def test_a_compiled_model_gives_torchrecs_outputs() -> None:
    """Dynamo and autograd's tracing look at what a tensor is: dtype, strides, whether it is a view."""
    from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig

    kind, seen = KINDS["pt2"], []
    for cls in (kind.theirs(), kind.ours()):
        torch.compiler.reset()
        compiled = CompileCounterWithBackend("aot_eager")
        configs = TorchCompileConfig(backend=compiled, compile_on_iter=2)  # type: ignore[arg-type]
        seen.append(kind.run(cls, CPU, STEPS, compile_configs=configs))
        assert compiled.frame_count
    assert seen[0] == seen[1]


def test_where_torchrec_makes_no_streams_ours_copies_on_its_own(simulated_accelerator: torch.device) -> None:
    """As on a device type that is neither cuda nor mtia."""
    for name in ("base", "sparse_dist", "sparse_dist_lite", "hybrid", "eval"):
        kind = KINDS[name]
        expected = kind.run(kind.theirs(), simulated_accelerator, STEPS)

        class Bare(kind.ours()):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self._memcpy_stream = self._data_dist_stream = None
                self._stream_context = torch.cuda.stream

        for schedule in ("lazy", "eager", "random"):
            with simulator.checked(schedule, 3):  # type: ignore[arg-type]
                assert kind.run(Bare, simulated_accelerator, STEPS) == expected
