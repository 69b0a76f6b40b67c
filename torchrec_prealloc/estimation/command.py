"""`torchrec-prealloc estimate`: its flags, and what it prints."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torchrec_prealloc import third_parties

NAME = "estimate"
SUMMARY = "what batches cost of a device's memory in a pipeline, copied in three ways (simulated)"

_MEANING = """\
Peaks beyond the model's own memory, by PyTorch's allocator rules on a simulated device; not measured on a GPU.
What side streams hold stays theirs; what lies in the main stream's pool serves its activations too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="YAML: pipeline, batch, model")
    parser.add_argument(
        "--wobble", metavar="SHARE", type=_share, default=0.0, help="batches lack up to this share of rows, e.g. 0.25"
    )
    parser.add_argument("--steps", metavar="N", type=_positive, help="to run (by default as in FILE, or 12)")
    parser.add_argument("--in-step", action="store_true", help="the host waits for each step, as where it reads losses")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write the table there as JSON and Markdown")


def run(args: argparse.Namespace) -> None:
    """Print the table, and write it.

    Raises:
        CommandError: the config does not fit, the pipeline does not run, or there is no simulator.
    """
    third_parties.silence()
    sys.path.insert(0, os.getcwd())  # a trainer's own modules, as for its scripts

    from torchrec_prealloc.bench.machine import describe_machine
    from torchrec_prealloc.estimation.config import read_settings
    from torchrec_prealloc.estimation.estimate import estimate, simulated_device

    device = simulated_device(lambda text: print(text, file=sys.stderr))
    settings = read_settings(args.config, args.wobble)
    steps = args.steps or settings.steps
    found = estimate(
        settings.pipeline_class,
        settings.batches,
        model=settings.model,
        options=settings.options,
        steps=steps,
        ahead=settings.ahead and not args.in_step,
        device=device,
    )
    machine = describe_machine()
    print(f"\n{found}\n\n{_MEANING}\nMachine: {machine.line()}")
    if args.out is not None:
        kept = {"pipeline": found.pipeline, "batch_bytes": found.batch_bytes, "steps": steps, "wobble": args.wobble}
        found.table().write_json(args.out / "estimate.json", machine, kept)
        (args.out / "estimate.md").write_text(found.table().markdown() + "\n", encoding="utf-8")
        print(f"Written: {args.out / 'estimate.json'}, {args.out / 'estimate.md'}")


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to below 1")
    return value
