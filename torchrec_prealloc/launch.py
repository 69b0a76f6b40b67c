"""Unchanged trainers: TorchRec's pipeline classes replaced by ours, under the names that a trainer imports.

    python -m torchrec_prealloc run [--prealloc-...] trainer.py ARGS...
    torchrun ... -m torchrec_prealloc run trainer.py ARGS...

or `torchrec_prealloc.enable()` in one line of code, before or after the trainer's imports; `disable()`, or the end of
`with enable():`, puts TorchRec's classes back. This is the only module that changes TorchRec: names in its modules, and
in modules that hold the same classes already; never a class.

**What cannot be replaced**: a subclass that was defined before. It stays TorchRec's, and a warning says so: make
`prealloc_pipeline(Subclass)` by hand. A subclass that is defined later derives from ours. Pipelines that exist already
stay as they are, and after `disable()` those of ours stay ours.

**The environment**: with `TORCHREC_PREALLOC=1` (and the launcher's options in `TORCHREC_PREALLOC_OPTIONS`) a process
does the same as soon as it has imported both torchrec and torchrec_prealloc. For a job that imports torchrec alone
something has to import torchrec_prealloc: an entry point of the group `torch.backends` does, at `import torch`.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import shlex
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_prealloc.config import ConfigError, PreallocConfig, add_prealloc_flags
from torchrec_prealloc.errors import CommandError

NAME = "run"
SUMMARY = "Run a trainer with TorchRec's pipelines replaced: run [--prealloc-...] trainer.py ARGS..."
SWITCH, OPTIONS = "TORCHREC_PREALLOC", "TORCHREC_PREALLOC_OPTIONS"
_HOOKED = "torchrec.distributed.train_pipeline"
"""When this has been imported, the pipelines are there, and nobody has their names yet."""


# The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The launcher's options; what follows the trainer is the trainer's."""
    add_prealloc_flags(parser)
    parser.set_defaults(prealloc=True)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="TRAINER is a module's name, as for python -m"
    )
    parser.add_argument("trainer", metavar="TRAINER", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the trainer's own arguments")


def run(args: argparse.Namespace) -> None:
    """Run a trainer as `__main__`, and print one line about its copies when it ends.

    Raises:
        CommandError: there is no such file or module.
    """
    try:
        config = PreallocConfig.from_args(args)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    if args.is_module:
        try:
            found = importlib.util.find_spec(args.trainer) is not None
        except ImportError:
            found = False
        if not found:
            raise CommandError(f"there is no module {args.trainer}")
    elif not Path(args.trainer).is_file():
        raise CommandError(f"there is no file {args.trainer}")
    # For processes that the trainer starts, as far as they import torchrec_prealloc.
    os.environ[SWITCH] = "1"
    os.environ[OPTIONS] = shlex.join(_options(config))
    sys.argv = [args.trainer, *args.arguments]
    enable(config)
    try:
        if args.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(args.trainer, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(args.trainer).resolve().parent))
            runpy.run_path(args.trainer, run_name="__main__")
    finally:
        _print_summary()


def _options(config: PreallocConfig) -> list[str]:
    """`config` as flags."""
    default = PreallocConfig()
    flags = [] if config.enabled else ["--no-prealloc"]
    for name, value in vars(config).items():
        if name != "enabled" and value != getattr(default, name):
            flags += [f"--prealloc-{name.replace('_', '-')}", str(value)]
    return flags


def _print_summary() -> None:
    from torchrec_prealloc.measured import SummedEngine

    if os.environ.get("RANK", "0") == "0":
        print(SummedEngine.summary(), file=sys.stderr, flush=True)


# Names -----------------------------------------------------------------------------------------------------------


class Enabled:
    """TorchRec's names mean our classes until this is exited."""

    def __init__(self) -> None:
        self.ours: dict[int, type] = {}
        """By the `id` of TorchRec's class."""
        self.theirs: dict[int, type] = {}

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exc: object) -> None:
        disable()


_enabled: Enabled | None = None


def enable(prealloc: PreallocConfig | Mapping[str, Any] | None = None) -> Enabled:
    """Let TorchRec's names of pipeline classes mean ours, in all modules but this package's.

    Args:
        prealloc: the options of pipelines that are given none: all those of an unchanged trainer.

    Returns:
        A context manager, whose end is `disable()`.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    global _enabled
    from torchrec_prealloc import versions
    from torchrec_prealloc.measured import SummedEngine
    from torchrec_prealloc.pipelines import PreallocPipeline, prealloc_pipeline

    PreallocPipeline.default_config = PreallocConfig.of(prealloc)
    if _enabled is None:
        SummedEngine.timings = []
        PreallocPipeline.engine_type = SummedEngine
        _enabled = Enabled()
    for theirs in versions.available().values():
        if issubclass(theirs, PreallocPipeline):
            continue  # replaced already
        ours: Any = prealloc_pipeline(theirs)
        _enabled.ours[id(theirs)], _enabled.theirs[id(ours)] = ours, theirs
        _warn_of_subclasses(theirs)
    for names, name in _names_of(_enabled.ours):
        names[name] = _enabled.ours[id(names[name])]
    return _enabled


def disable() -> None:
    """Let TorchRec's names mean TorchRec's classes again. Pipelines and subclasses of ours stay ours."""
    global _enabled
    from torchrec_prealloc.measured import MeasuredEngine
    from torchrec_prealloc.pipelines import PreallocPipeline

    if _enabled is None:
        return
    for names, name in _names_of(_enabled.theirs):
        if name != names[name].__name__:  # a module that imports ours by its own name means it
            names[name] = _enabled.theirs[id(names[name])]
    PreallocPipeline.default_config, PreallocPipeline.engine_type = PreallocConfig(), MeasuredEngine
    _enabled = None


def _names_of(classes: Mapping[int, type]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where modules hold one of `classes`: their globals, and a name."""
    package = __name__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or module_name.partition(".")[0] == package:
            continue
        names = vars(module)
        # By type(): a module's values may be anything, and some warn when they are asked for their class.
        for name, value in list(names.items()):
            if issubclass(type(value), type) and id(value) in classes:
                yield names, name


def _warn_of_subclasses(theirs: type) -> None:
    from torchrec_prealloc.pipelines import PreallocPipeline, _rebinding

    subclasses: list[type] = type.__subclasses__(theirs)
    for cls in subclasses:
        foreign = cls.__module__.partition(".")[0] != "torchrec"
        if foreign and not issubclass(cls, PreallocPipeline) and cls not in _rebinding.made:
            warnings.warn(
                f"{cls.__module__}.{cls.__qualname__} was defined before torchrec_prealloc.enable(), and stays a "
                f"subclass of TorchRec's {theirs.__name__}; use prealloc_pipeline({cls.__name__})",
                stacklevel=3,
            )


# The environment -------------------------------------------------------------------------------------------------


def arm() -> None:
    """Enable as the environment says, when torchrec has been imported. Without `TORCHREC_PREALLOC=1`, nothing."""
    if os.environ.get(SWITCH) != "1" or any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return
    if _HOOKED in sys.modules:
        _enable_from_environment()
    else:
        sys.meta_path.insert(0, _AfterImport(_HOOKED, _enable_from_environment))


def _enable_from_environment() -> None:
    if _enabled is not None:
        return
    parser = argparse.ArgumentParser(prog=OPTIONS, add_help=False)
    add_prealloc_flags(parser)
    parser.set_defaults(prealloc=True)
    enable(PreallocConfig.from_args(parser.parse_args(shlex.split(os.environ.get(OPTIONS, "")))))
    atexit.register(_print_summary)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then` once when a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenLoader(spec.loader, self._then)
        return spec


class _ThenLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
