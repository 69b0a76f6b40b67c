"""`torchrec-prealloc demo`: its flags, and what runs when."""

import argparse
import sys
from pathlib import Path

from torchrec_prealloc import third_parties

NAME = "demo"
SUMMARY = "train a DLRM on MovieLens-100K three ways and compare them"

SEED = 20
STEPS = 700
BATCH_SIZE = 256
TEST_BATCH_SIZE = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's flags to `parser`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--pipeline", choices=("base", "sparse_dist"), default="sparse_dist", help="which of TorchRec's pipelines"
    )
    which.add_argument("--config", metavar="FILE", type=Path, help="YAML that names one of our pipelines with options")
    parser.add_argument("--steps", metavar="N", type=_positive, default=STEPS, help="batches to train on (%(default)s)")
    parser.add_argument(
        "--batch-size", metavar="N", type=_positive, default=BATCH_SIZE, help="samples a batch and rank (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo-results"), help="for demo.json and demo.png (%(default)s)"
    )


    parser.add_argument(
        "--simulate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="without a GPU: peaks of a device's memory from the simulator, which takes some seconds",
    )


def run(args: argparse.Namespace) -> None:
    """Run the demo; rank 0 prints the table and writes the files.

    Raises:
        CommandError: the data set is missing, the config does not fit, or losses are not equal bit for bit.
    """
    third_parties.silence()
    import torch
    import torch.distributed as dist

    from torchrec_prealloc.demo.batches import Share, TestBatches, TrainBatches
    from torchrec_prealloc.demo.compare import run_all
    from torchrec_prealloc.demo.movielens import read_movielens
    from torchrec_prealloc.demo.process_group import process_group
    from torchrec_prealloc.demo.report import report, summarise, with_simulated
    from torchrec_prealloc.demo.samples import make_samples
    from torchrec_prealloc.demo.simulated import Simulated, simulate
    from torchrec_prealloc.ways import OURS, read_section, three_ways

    # The model is small: a second thread gives little, and on a machine with other work it costs many times that.
    torch.set_num_threads(1)
    section = read_section(args.config) if args.config else {"_target_": OURS[args.pipeline]}
    ways = three_ways(section)
    samples = make_samples(read_movielens())
    with process_group() as device:
        share = Share(dist.get_rank(), dist.get_world_size())
        pin = device.type == "cuda"
        runs = run_all(
            ways,
            TrainBatches(samples, args.batch_size, args.steps, SEED, share, pin),
            TestBatches(samples, TEST_BATCH_SIZE, share, pin),
            device,
        )
        table = summarise(runs)
        if share.rank == 0:
            settings = {
                "pipeline": section,
                "steps": len(runs[0].losses),
                "batch_size": args.batch_size,
                "ranks": share.ranks,
                "seed": SEED,
                "device": device.type,
                "last_loss": float(runs[0].losses[-1]),
            }
            simulated = Simulated()
            if args.simulate and device.type == "cpu":
                simulated = simulate(section, args.batch_size, SEED, lambda text: print(text, file=sys.stderr))
            report(with_simulated(table, simulated), settings, args.out, simulated.problem)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value
