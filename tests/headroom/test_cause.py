"""What memory is for is seen in the frames of TorchRec's pipelines as they are installed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from recsys import losses, make_batches, pinned, sharded, unsharded
from torchrec.distributed import train_pipeline as theirs

from torchrec_prealloc import prealloc_pipeline, simulator
from torchrec_prealloc.headroom.analysis import Headroom, analyse
from torchrec_prealloc.headroom.cause import Cause, Frame, Kind, cause_of

PIPELINE = "/x/site-packages/torchrec/distributed/train_pipeline/"
UTILS, DATA, COMM = PIPELINE + "utils.py", "/x/torchrec/distributed/dist_data.py", "/x/torchrec/distributed/comm_ops.py"
OURS = "/x/site-packages/torchrec_prealloc/"
INNER = [("to", "/x/torch/tensor.py"), ("at::native::empty_cuda", "/b/Empty.cpp"), ("<lambda>", "??")]


@pytest.mark.parametrize(
    ("frames", "kind", "site"),
    [
        ([("_to_device", UTILS), ("copy_batch_to_gpu", PIPELINE + "train_pipelines.py")], Kind.COPY, "_to_device"),
        ([("to", "/me/batch.py"), ("copy_batch_to_gpu", "/me/pipeline.py")], Kind.COPY, "copy_batch_to_gpu"),
        ([("inplace_copy_batch_to_gpu", PIPELINE + "train_pipelines.py")], Kind.COPY, "inplace_copy_batch_to_gpu"),
        ([("get_h2d_func", UTILS)], Kind.COPY, "get_h2d_func"),
        ([("to", "/me/batch.py"), ("run", UTILS), ("_bootstrap", "/x/threading.py")], Kind.COPY, "run"),
        ([("run", "/me/train_pipeline.py")], Kind.OTHER, "run"),
        ([("_to_device", "/me/accelerate.py")], Kind.OTHER, "_to_device"),
        ([("__init__", DATA), ("forward", DATA), ("_start_data_dist", UTILS)], Kind.INPUT_DIST, "__init__"),
        ([("_wait_impl", DATA), ("wait", "/x/torchrec/distributed/types.py")], Kind.INPUT_DIST, "_wait_impl"),
        ([("permute", "/x/torchrec/s.py"), ("start_sparse_data_dist", "/me/p.py")], Kind.INPUT_DIST, "start_sparse"),
        ([("cat", "/me/c.py"), ("forward", DATA), ("output_dist", "/x/torchrec/e.py")], Kind.OTHER, "cat"),
        ([("forward", COMM), ("_wait_impl", DATA)], Kind.OUTPUT_DIST, "forward"),
        ([("split", "/x/fbgemm.py"), ("prefetch", PIPELINE + "pipeline_stage.py")], Kind.LOOKUP, "prefetch"),
        ([("allocate", OURS + "buffers.py"), ("copy_batch_to_gpu", PIPELINE + "t.py")], Kind.OURS, "allocate"),
        ([("forward", "/me/model.py"), ("run", OURS + "launch.py")], Kind.OTHER, "forward"),
        ([("forward", "/x/torch/nn/linear.py")], Kind.OTHER, ""),
        ([], Kind.OTHER, ""),
    ],
)
def test_the_innermost_frame_that_says_something_decides(frames: list[Any], kind: Kind, site: str) -> None:
    cause = cause_of([Frame.of(name, filename, 1) for name, filename in INNER + frames])
    assert cause.kind is kind
    assert cause.site.startswith(site)


def test_a_site_is_shown_with_the_last_folder() -> None:
    assert cause_of([Frame.of("_to_device", UTILS, 144)]) == Cause(Kind.COPY, "_to_device, train_pipeline/utils.py:144")


def recorded(pipeline: Any, device: torch.device, path: Path) -> Headroom:
    """A training of eight wobbling batches, of which a snapshot was written."""
    gc.collect()
    simulator.empty_cache()
    simulator.record_memory_history(True)
    try:
        losses(pipeline, pinned(make_batches(8, size=4_096, wobble=True)))
        simulator.dump_snapshot(path)
    finally:
        simulator.record_memory_history(False)
    (found,) = analyse(path)
    return found


def sides(found: Headroom) -> dict[Kind, int]:
    """Peak bytes allocated on side streams during the history, by what for. Other tests may have left something."""
    peaks: dict[Kind, int] = {}
    for curves in found.sides:
        for kind, curve in curves.by_kind.items():
            peaks[kind] = peaks.get(kind, 0) + curve.peak - curve.start
    return {kind: peak for kind, peak in peaks.items() if peak}


def test_train_pipeline_base(simulated_accelerator: torch.device, tmp_path: Path) -> None:
    model, optimizer = unsharded(simulated_accelerator)
    pipeline = theirs.TrainPipelineBase(model, optimizer, simulated_accelerator)
    found = recorded(pipeline, simulated_accelerator, tmp_path / "s.pickle")
    copies = next(curves for curves in found.sides if curves.stream == pipeline._memcpy_stream.stream_id)
    assert set(sides(found)) == {Kind.COPY}
    assert copies.sites[0][0].site.startswith("_to_device, train_pipeline/utils.py:")


@pytest.mark.usefixtures("one_rank")
def test_train_pipeline_sparse_dist(simulated_accelerator: torch.device, tmp_path: Path) -> None:
    model, optimizer = sharded(simulated_accelerator)
    pipeline = theirs.TrainPipelineSparseDist(model, optimizer, simulated_accelerator, execute_all_batches=True)
    found = recorded(pipeline, simulated_accelerator, tmp_path / "s.pickle")
    by_stream = {curves.stream: curves for curves in found.sides}
    copies = by_stream[pipeline._memcpy_stream.stream_id]
    dist = by_stream[pipeline._data_dist_stream.stream_id]
    assert {kind for kind, curve in copies.by_kind.items() if curve.peak} == {Kind.COPY}
    assert dist.by_kind[Kind.INPUT_DIST].peak > 0.9 * dist.allocated.peak
    assert found.estimate.copies_reserved == copies.reserved.peak  # the input dist's stays where it is


def test_eval_pipeline_copies_in_its_thread(simulated_accelerator: torch.device, tmp_path: Path) -> None:
    from torchrec.distributed.train_pipeline import utils

    assert hasattr(utils.DataLoadingThread, "run")
    batch = make_batches(1, size=4_096)[0].pin_memory()
    simulator.empty_cache()
    simulator.record_memory_history(True)
    try:
        thread = utils.DataLoadingThread(
            device=simulated_accelerator,
            dataloader_iter=iter([batch]),
            to_device_non_blocking=True,
            memcpy_stream=torch.get_device_module(simulated_accelerator).Stream(),
        )
        thread.start()
        moved = thread.get_next_batch()
        thread.stop()  # it cannot be joined: TorchRec's attribute `_stop` hides the Thread's method
        simulator.dump_snapshot(tmp_path / "s.pickle")
    finally:
        simulator.record_memory_history(False)
    assert moved is not None
    (found,) = analyse(tmp_path / "s.pickle")
    assert sides(found)[Kind.COPY] > 4_096 * 4
    sites = {cause.site.partition(":")[0] for curves in found.sides for cause, _ in curves.sites}
    assert "run, train_pipeline/utils.py" in sites


@pytest.mark.parametrize("name", ["TrainPipelineBase", "TrainPipelineSparseDist"])
@pytest.mark.usefixtures("one_rank")
def test_ours_has_no_copy_on_a_side_stream(name: str, simulated_accelerator: torch.device, tmp_path: Path) -> None:
    model, optimizer = (unsharded if name == "TrainPipelineBase" else sharded)(simulated_accelerator)
    pipeline = prealloc_pipeline(getattr(theirs, name))(model, optimizer, simulated_accelerator)
    found = recorded(pipeline, simulated_accelerator, tmp_path / "s.pickle")
    assert not {Kind.COPY, Kind.OURS} & set(sides(found))
    assert found.of_main is not None
    batch = 4_096 * 4 * 8  # at the least
    assert found.of_main.by_kind[Kind.OURS].peak > batch


def test_the_names_that_are_looked_for_are_torchrecs() -> None:
    import inspect

    from torchrec.distributed.train_pipeline import train_pipelines, utils

    source = inspect.getsource(train_pipelines) + inspect.getsource(utils)
    for name in ("_to_device", "copy_batch_to_gpu", "start_sparse_data_dist", "_start_data_dist", "get_h2d_func"):
        assert f"def {name}(" in source
