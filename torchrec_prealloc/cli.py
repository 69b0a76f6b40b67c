"""The command `torchrec-prealloc`: one subcommand for each entry of `COMMANDS`."""

import argparse
import importlib
import sys
from typing import Any

from torchrec_prealloc.errors import CommandError

COMMANDS = (
    "torchrec_prealloc.demo.command",
    "torchrec_prealloc.estimation.command",
    "torchrec_prealloc.bench.command",
    "torchrec_prealloc.doctor.command",
    "torchrec_prealloc.headroom.command",
    "torchrec_prealloc.launch",
)
"""Modules of the subcommands. Each has `NAME`, `SUMMARY`, `add_arguments(parser)` and `run(args)`, and imports what is
slow to import (torch) only in `run`."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; by default those of this process

    Returns:
        0, or 1 after a failure that was to be expected (`CommandError`), which is printed as one line.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except CommandError as error:
        print(f"torchrec-prealloc {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"torchrec-prealloc {args.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrec-prealloc", description="Preallocated, in-place batch copies for TorchRec's train pipelines."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for path in COMMANDS:
        module: Any = importlib.import_module(path)
        subparser = commands.add_parser(module.NAME, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser
