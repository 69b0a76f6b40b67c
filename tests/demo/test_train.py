"""The three ways train the same model, bit for bit; where they do not, the demo says at which step."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch

from torchrec_prealloc.demo import compare as compare_module
from torchrec_prealloc.demo import train as train_module
from torchrec_prealloc.demo.batches import TestBatches, TrainBatches
from torchrec_prealloc.demo.compare import run_all
from torchrec_prealloc.demo.losses import UnequalLosses
from torchrec_prealloc.demo.model import build_model, weights_digest
from torchrec_prealloc.demo.process_group import process_group
from torchrec_prealloc.demo.report import summarise
from torchrec_prealloc.demo.samples import Samples
from torchrec_prealloc.ways import BLOCKING, NON_BLOCKING, OURS, PREALLOCATED, Way, three_ways

STEPS = 12
CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[torch.device]:
    with process_group() as device:
        yield device


@pytest.fixture
def batches(samples: Samples, group: torch.device) -> tuple[TrainBatches, TestBatches]:
    pin = group.type == "cuda"
    return TrainBatches(samples, 64, STEPS, pin=pin), TestBatches(samples, 1024, pin=pin)


def ways(pipeline: str) -> tuple[Way, Way, Way]:
    return three_ways({"_target_": OURS[pipeline]})


def with_label_flipped_in_batch(number: int, way: Way) -> Way:
    """`way`, but one label of one batch arrives wrong."""

    def feed(source: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
        for count, batch in enumerate(way.feed(source, device), start=1):
            if count == number:
                batch.labels[7] = 1 - batch.labels[7]
            yield batch

    return dataclasses.replace(way, feed=feed)


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist"])
def test_three_ways_have_equal_losses(
    pipeline: str, batches: tuple[TrainBatches, TestBatches], group: torch.device
) -> None:
    runs = run_all(ways(pipeline), *batches, group)
    assert [run.way for run in runs] == [BLOCKING, NON_BLOCKING, PREALLOCATED]
    for run in runs:
        assert len(run.losses) == STEPS
        assert torch.equal(run.losses, runs[0].losses)
        assert run.first_weights == runs[0].first_weights
        assert run.auc == runs[0].auc
        assert run.steps_per_second > 0
    assert len(runs[0].losses.unique()) == STEPS


def test_ours_copies_a_batch_at_once(batches: tuple[TrainBatches, TestBatches], group: torch.device) -> None:
    rows = summarise(run_all(ways("sparse_dist"), *batches, group)).rows
    assert [row.figures["copies"] for row in rows] == [4, 4, 1]
    assert [row.figures["allocations"] for row in rows] == [4, 4, 1]
    if group.type == "cpu":
        assert all(row.figures["gpu_reserved_mib"] is None for row in rows)


def test_a_pipeline_is_rewound_by_whichever_names_its_torchrec_has() -> None:
    class Newer:
        def __init__(self) -> None:
            self.called: list[str] = []

        def reset(self) -> None:
            self.called.append("reset")

    class Oldest(Newer):  # ours on TorchRec 1.2: its own reset, and TorchRec's base pipeline's
        def _reset_data_iter(self) -> None:
            self.called.append("iterator")

    for pipeline, called in ((Newer(), ["reset"]), (Oldest(), ["reset", "iterator"])):
        train_module._rewind(pipeline)
        assert pipeline.called == called
    train_module._rewind(object())  # TorchRec 1.2's sparse-dist has neither, and needs none


@pytest.mark.parametrize("wrong", [1, STEPS])
def test_one_wrong_label_is_noticed_at_its_step(
    wrong: int, batches: tuple[TrainBatches, TestBatches], group: torch.device
) -> None:
    first, second, third = ways("base")
    message = rf"^losses are not equal at step {wrong}: {BLOCKING} \S+ \(0x\w+\), {PREALLOCATED} \S+ \(0x\w+\)$"
    with pytest.raises(UnequalLosses, match=message):
        run_all((first, second, with_label_flipped_in_batch(wrong, third)), *batches, group)


def test_a_way_that_loses_a_batch_is_noticed(batches: tuple[TrainBatches, TestBatches], group: torch.device) -> None:
    first, _, third = ways("base")

    def feed(source: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
        next(source)
        return source

    with pytest.raises(UnequalLosses, match="at step 1"):
        run_all((first, dataclasses.replace(third, feed=feed)), *batches, group)


def test_other_first_weights_are_noticed(
    batches: tuple[TrainBatches, TestBatches], group: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = iter([1, 2])

    def build(vocabulary: Any, dense: int, device: torch.device, seed: int) -> Any:
        return build_model(vocabulary, dense, device, next(seeds))

    monkeypatch.setattr(train_module, "build_model", build)
    with pytest.raises(UnequalLosses, match=f"{NON_BLOCKING} did not start from the weights of {BLOCKING}"):
        run_all(ways("base"), *batches, group)


def test_same_seed_same_weights(samples: Samples, group: torch.device) -> None:
    digests = [weights_digest(build_model(samples.vocabulary, 3, group, seed)[0]) for seed in (5, 5, 6)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def tables(vocabulary: dict[str, int], device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """The first weights of each table."""
    state = build_model(vocabulary, 3, device, seed)[0].state_dict()
    return {name: value.local_shards()[0].tensor for name, value in state.items() if hasattr(value, "local_shards")}


def test_a_tables_first_weights_depend_on_seed_and_name_alone(group: torch.device) -> None:
    forward = tables({"user_id": 40, "title": 50}, group, 5)
    backward = tables({"title": 50, "user_id": 40}, group, 5)
    reseeded = tables({"user_id": 40, "title": 50}, group, 6)
    assert len(forward) == 2
    for name, table in forward.items():
        assert torch.equal(table, backward[name])
        assert not torch.equal(table, reseeded[name])


def test_the_digest_sees_every_weight(samples: Samples, group: torch.device) -> None:
    model, _ = build_model(samples.vocabulary, 3, group, 5)
    before = weights_digest(model)
    for value in model.state_dict().values():
        tensor = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        after = weights_digest(model)
        assert after != before
        before = after


def test_the_model_learns(samples: Samples, group: torch.device) -> None:
    train, test = TrainBatches(samples, 256, 120), TestBatches(samples, 1024)
    (run,) = run_all(ways("base")[2:], train, test, group)
    assert run.auc > 0.65
    assert run.losses[-20:].mean() < run.losses[:20].mean()


def torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_two_ranks_started_by_torchrun_have_equal_losses(tmp_path: Path) -> None:
    script = tmp_path / "demo.py"
    script.write_text(
        "from torchrec_prealloc.cli import main\n"
        "flags = ['--steps', '8', '--batch-size', '32', '--no-simulate', '--out']\n"
        f"raise SystemExit(main(['demo', *flags, {str(tmp_path / 'out')!r}]))\n"
    )
    done = torchrun(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal bit for bit") == 1
    assert "2 x CPU" in done.stdout


def test_the_rank_with_the_earliest_difference_is_named(
    batches: tuple[TrainBatches, TestBatches], group: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if this rank found one at step 4, a second rank one at step 3, and a third none.
    def gather(own: Any) -> list[Any]:
        return [own, own._replace(step=own.step - 1, text="of the other"), own._replace(step=float("inf"))]

    monkeypatch.setattr(compare_module, "gather", gather)
    first, _, third = ways("base")
    with pytest.raises(UnequalLosses, match=r"^rank 1: of the other$"):
        run_all((first, with_label_flipped_in_batch(4, third)), *batches, group)


@pytest.mark.long
def test_unequal_losses_of_one_rank_fail_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        textwrap.dedent(
            """
            import dataclasses, os
            import torchrec_prealloc.ways as ways
            from torchrec_prealloc.cli import main

            def feed(source, device):
                for number, batch in enumerate(source, start=1):
                    if number == 3 and os.environ["RANK"] == "1":
                        batch.labels[0] = 1 - batch.labels[0]
                    yield batch

            sound = ways.three_ways
            ways.three_ways = lambda section: (sound(section)[0], dataclasses.replace(sound(section)[2], feed=feed))
            code = main(["demo", "--steps", "5", "--batch-size", "32"])
            print(f"rank {os.environ['RANK']} ended with {code}")
            raise SystemExit(code)
            """
        )
    )
    done = torchrun(script)
    assert done.returncode != 0
    assert "rank 1: losses are not equal at step 3" in done.stderr
    assert "equal bit for bit" not in done.stdout
    assert "rank 0 ended with 1" in done.stdout or "rank 1 ended with 1" in done.stdout
