"""`torchrec-prealloc doctor [TARGET]`: what a trainer's batches are made of, and what its environment is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrec_prealloc import third_parties
from torchrec_prealloc.config import add_prealloc_flags
from torchrec_prealloc.errors import CommandError

NAME = "doctor"
SUMMARY = "explain a trainer's first batch, and its environment: doctor [TARGET ARGS...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; what follows TARGET is the trainer's."""
    add_prealloc_flags(parser)
    parser.set_defaults(prealloc=True)
    parser.add_argument("--device", metavar="DEVICE", help="explain for it (by default the trainer's, or cuda)")
    parser.add_argument(
        "--pinned", action="store_true", help="take the batch for pinned, as on a machine with an accelerator"
    )
    parser.add_argument(
        "--steps", metavar="N", type=_positive, default=1, help="batches to copy before the trainer is stopped (1)"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="TARGET is a module's name, as for python -m"
    )
    parser.add_argument(
        "trainer",
        metavar="TARGET",
        nargs="?",
        help="a trainer (a Python file), or a YAML config with a pipeline; without: the environment only",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the trainer's own arguments")


def run(args: argparse.Namespace) -> None:
    """Print the environment, and what TARGET's first batch is made of.

    Raises:
        CommandError: the environment is broken; there is no such target; it gave no batch.
    """
    from torchrec_prealloc.doctor.environment import environment

    problem = ""
    if _speaks():
        found = environment()
        problem = _in_one_line(found.problems)
        print(found, flush=True)
        if any(one.error for one in found.imports.values()):
            raise CommandError(problem)
    if args.trainer is not None:
        third_parties.silence()
        _check_device(args.device)
        is_config = not args.is_module and Path(args.trainer).suffix in (".yaml", ".yml")
        (_explain_config if is_config else _explain_trainer)(args, problem)
    if problem:
        raise CommandError(problem)


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _in_one_line(problems: Sequence[str]) -> str:
    if len(problems) > 1:
        return f"{len(problems)} problems in this environment: see PROBLEM above"
    return problems[0] if problems else ""


def _explain_config(args: argparse.Namespace, problem: str) -> None:
    from torchrec_prealloc.batch_types import BatchError
    from torchrec_prealloc.doctor import pipeline_config

    if args.arguments:
        raise CommandError(f"{' '.join(args.arguments)}: what follows a config is nobody's; flags go before it")
    sys.path.insert(0, os.getcwd())  # a trainer's own modules, as for its scripts
    prefix = "prealloc_"
    flags = {name: value for name, value in vars(args).items() if name.startswith(prefix) and value is not None}
    checked = pipeline_config.read(args.trainer, {name[len(prefix) :]: value for name, value in flags.items()})
    print(f"\n{checked}", flush=True)
    if checked.batch is not None:
        try:
            explanation = checked.explain(args.device, args.pinned)
        except BatchError as error:
            raise CommandError(f"{args.trainer}: {error}") from None
        print(f"\n{explanation}", flush=True)


def _explain_trainer(args: argparse.Namespace, problem: str) -> None:
    from torchrec_prealloc.doctor import trainer

    args.prealloc = True  # without it there is nothing of ours to explain
    watch = trainer.Watch(args.steps, args.device, args.pinned)
    try:
        trainer.run_until_stopped(args, watch)
    finally:
        if _speaks() and watch.trains_on is not None:
            print(f"\n{watch}", flush=True)
    trainer.leave_process_group(f"torchrec-prealloc {NAME}: {problem}" if problem else "")


def _check_device(name: str | None) -> None:
    from torchrec_prealloc.doctor.place import Place

    try:
        Place.of(name)
    except ValueError as error:
        raise CommandError(f"--device: {error}") from None


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value
