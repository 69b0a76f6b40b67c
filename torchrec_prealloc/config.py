"""The plugin's options: from code, from YAML, from a trainer's command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # slow to import, and a command's --help has our flags
    import torch


class ConfigError(ValueError):
    """An option is unknown, of the wrong type or out of range. The message names the key and what would be right."""


def _option(default: Any, metavar: str, text: str, at_least: int = 0) -> Any:
    return dataclasses.field(default=default, metadata={"metavar": metavar, "help": text, "at_least": at_least})


@dataclass(frozen=True)
class PreallocConfig:
    """How batches travel. The defaults suit most jobs.

    Raises:
        ConfigError: an option has the wrong type or is out of range.
    """

    enabled: bool = True
    """False: TorchRec's own copy and waits, as if the pipeline were TorchRec's."""
    direct_bytes: int = _option(128 << 10, "BYTES", "tensors of at least this size travel by themselves", at_least=1)
    """Tensors of at least this many bytes travel from their own pinned memory into an allocation of their own;
    smaller ones are gathered into one arena. The default is where gathering begins to cost the main thread more than
    one more allocation and copy (`torchrec-prealloc bench threshold`)."""
    size_rounding: int = _option(8, "N", "round allocations up to 1/N of a power of two; 0: not at all")
    """Device allocations are rounded up to a multiple of 1/N of the power of two below them (waste at most 1/N): so
    batches of wobbling size fit the memory that earlier ones gave back. 0: not rounded."""
    buffers: str = "per_batch"
    """Where device memory comes from: `per_batch`, the pool of the owner stream at each batch; or `ring`, memory kept
    for `ring_slots` batches at stable addresses, whose next copy may start while the owner stream is still busy."""
    ring_slots: int = _option(4, "N", "batches that `ring` keeps memory for: the pipeline's depth + 1", at_least=1)
    chunk_bytes: int = _option(0, "BYTES", "cut larger copies into pieces of this size; 0: not at all")
    """Copies of more bytes are cut into pieces of this size, with a tiny kernel between them, so that a small copy of
    the main stream does not wait behind a gigabyte. 0: never."""
    log_every: int = _option(0, "N", "log a line on every N batches; 0: never")
    """Every so many batches a line with `transfer_stats` is logged, at level INFO by the logger
    `torchrec_prealloc.measured`. 0: never."""

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"prealloc.enabled: {self.enabled!r} is not a bool; write true or false")
        if self.buffers not in ("per_batch", "ring"):
            raise ConfigError(f"prealloc.buffers: {self.buffers!r} is unknown; write per_batch or ring")
        for field in _numbers():
            value, least = getattr(self, field.name), field.metadata["at_least"]
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"prealloc.{field.name}: {value!r} is not an int of at least {least}")

    @classmethod
    def of(cls, value: PreallocConfig | Mapping[str, Any] | None) -> PreallocConfig:
        """`value` as a config: None is the default; a mapping (YAML, Hydra) names options.

        Raises:
            ConfigError: a key is unknown, or a value is wrong.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"prealloc: {value!r} is a {type(value).__name__}; give a mapping or a PreallocConfig")
        options = {str(key): option for key, option in value.items() if key != "_target_"}
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise ConfigError(f"prealloc.{key}: unknown option{_did_you_mean(key, known)}")
        return cls(**options)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PreallocConfig:
        """The options that `add_prealloc_flags` put into a trainer's parsed arguments.

        Raises:
            ConfigError: the flags were not added to the parser, or a value is out of range.
        """
        if not hasattr(args, "prealloc"):
            raise ConfigError("the arguments have no --prealloc; call add_prealloc_flags(parser) before parse_args()")
        named = {field.name: getattr(args, f"prealloc_{field.name}", None) for field in dataclasses.fields(cls)}
        given = {name: value for name, value in named.items() if value is not None}
        return cls(**{**given, "enabled": bool(args.prealloc)})


def add_prealloc_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--prealloc` / `--no-prealloc` (off unless given) and one `--prealloc-...` for each option to `parser`."""
    group = parser.add_argument_group("preallocated batches (torchrec-prealloc)")
    group.add_argument(
        "--prealloc",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="copy batches in place into memory of the main stream",
    )
    group.add_argument(
        "--prealloc-buffers",
        choices=("per_batch", "ring"),
        help=f"allocate device memory at each batch, or keep it (default {PreallocConfig.buffers})",
    )
    for field in _numbers():
        group.add_argument(
            f"--prealloc-{field.name.replace('_', '-')}",
            type=int,
            metavar=field.metadata["metavar"],
            help=f"{field.metadata['help']} (default {field.default})",
        )


def _numbers() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(PreallocConfig) if field.metadata]


def load_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A YAML file, or a mapping that was read from one, with a `pipeline` section.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or has no `pipeline` mapping.
    """
    if isinstance(source, Mapping):
        content: Any = source
        name = "config"
    else:
        import yaml

        name = str(source)
        try:
            content = yaml.safe_load(Path(source).read_text())
        except OSError as error:
            raise ConfigError(f"{name}: cannot be read ({error.strerror}); give the path of a YAML file") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("pipeline"), Mapping):
        raise ConfigError(f"{name}: no `pipeline:` mapping; write pipeline: {{_target_: <dotted path of a class>}}")
    return {str(key): value for key, value in content.items()}


def build_pipeline(
    config: str | Path | Mapping[str, Any], model: torch.nn.Module, optimizer: Any, device: torch.device
) -> Any:
    """Make the pipeline that a config names.

    Args:
        config: path of a YAML file, or a mapping, with `pipeline: {_target_: <dotted path>, <option>: <value>, ...}`.
            `_target_` is TorchRec's class or ours, or a subclass; the options are its constructor's; `prealloc` is a
            mapping of `PreallocConfig`'s options.
        model, optimizer, device: as the pipeline's constructor takes them.

    Raises:
        ConfigError: a key is missing, unknown or of the wrong type, or the class is no train pipeline.
    """
    section = load_config(config)["pipeline"]
    options = {str(key): value for key, value in section.items() if key != "_target_"}
    return make_pipeline(pipeline_class(section), options, model, optimizer, device)


def make_pipeline(
    cls: type, options: Mapping[str, Any], model: torch.nn.Module, optimizer: Any, device: torch.device
) -> Any:
    """Make a pipeline of a class, with options of its constructor as `build_pipeline` takes them.

    Raises:
        ConfigError: an option is unknown or of the wrong type.
    """
    given = dict(options)
    check_options(cls, given)
    if "prealloc" in given:
        given["prealloc"] = PreallocConfig.of(given["prealloc"])
    return cls(model=model, optimizer=optimizer, device=device, **given)


def pipeline_class(section: Mapping[str, Any]) -> type:
    """The class that `_target_` of a `pipeline` section names.

    Raises:
        ConfigError: `_target_` is missing, cannot be imported, or is no train pipeline.
    """
    from torchrec.distributed.train_pipeline import TrainPipeline

    target = section.get("_target_")
    if not isinstance(target, str):
        raise ConfigError("pipeline._target_: missing; name a class, e.g. torchrec_prealloc.PreallocTrainPipelineBase")
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"pipeline._target_: cannot import {module_name or target}: {error}") from None
    try:
        cls = getattr(module, name)
    except AttributeError as error:
        if "TorchRec" in str(error):  # one of ours whose base this TorchRec has not
            raise ConfigError(f"pipeline._target_: {target}: {error}") from None
        near = _did_you_mean(name, [key for key in dir(module) if "Pipeline" in key])
        raise ConfigError(f"pipeline._target_: {module_name} has no {name}{near}") from None
    if not (isinstance(cls, type) and issubclass(cls, TrainPipeline)):
        raise ConfigError(f"pipeline._target_: {target} is no train pipeline (no subclass of TorchRec's TrainPipeline)")
    return cls


def constructor_options(cls: type) -> dict[str, inspect.Parameter]:
    """The keyword options of a pipeline class, those that are passed on to its bases included."""
    options: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if init is None or base is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                options.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return options


def check_options(cls: type, options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor of a pipeline class has not, or scalars of another type.

    Raises:
        ConfigError: the message names the option, and what would be right.
    """
    known = constructor_options(cls)
    for fixed in ("model", "optimizer", "device"):
        known.pop(fixed, None)
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"pipeline.{key}: {cls.__name__} has no such option{_did_you_mean(key, list(known))}")
        wanted = _plain_types(known[key])
        # YAML gives no object: an option whose type is none of these cannot be checked, only passed on.
        if wanted and type(value) not in wanted:
            names = " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in wanted))
            raise ConfigError(f"pipeline.{key}: {value!r} is a {type(value).__name__}; give {names}")


def _plain_types(parameter: inspect.Parameter) -> set[type]:
    """The scalar types of a parameter's annotation; empty where it allows anything else."""
    annotation = parameter.annotation
    kinds = set(typing.get_args(annotation)) or {annotation}
    return kinds if kinds <= {bool, int, float, str, type(None)} else set()


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(known))}"
