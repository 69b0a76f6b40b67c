"""The YAML of `torchrec-prealloc estimate`: a pipeline, its batches and, if wanted, a model.

::

    pipeline:
      _target_: torchrec.distributed.train_pipeline.TrainPipelineSparseDist     # or ours, or a subclass; options follow
    batch:                                  # a description ...
      rows: [6144, 8192]                    # drawn for each step; or one number
      sparse: {user: 1, history: [0, 100]}  # ids of a row
      dense: 13                             # float32 columns
      tensors: {image: [3, 32, 32, uint8]}  # what a row has in other tensors; float32 where no type is named
    batch: {_target_: trainer.batches.make_batch, rows: 8192}    # ... or a function, called for each step
    batches: {_target_: trainer.loader.make_loader}              # ... or one that gives an iterable, e.g. a DataLoader
    model: {_target_: trainer.model.build}  # called with device=...; gives (model, optimizer). Without: one that reads
    steps: 12                               # the batch
    host_ahead: true                        # false: the host waits for each step

`_target_` is a dotted path, or `module:function`; the other keys are passed to it by name. A pipeline class of
TorchRec's or ours may be named without its module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchrec_prealloc import versions
from torchrec_prealloc.config import ConfigError, _did_you_mean, load_config, pipeline_class
from torchrec_prealloc.estimation.description import Description, Range, draw
from torchrec_prealloc.estimation.estimate import STEPS, EstimateError, MakeModel
from torchrec_prealloc.estimation.stand_in import stand_in

_KEYS = ("pipeline", "batch", "batches", "model", "steps", "host_ahead")
_DESCRIPTION_KEYS = ("rows", "sparse", "dense", "tensors")


class Settings(NamedTuple):
    """The arguments of `estimate`."""

    pipeline_class: type
    options: dict[str, Any]
    batches: Callable[[], Iterable[Any]]
    model: MakeModel
    steps: int
    ahead: bool


def read_settings(source: str | Path | Mapping[str, Any], wobble: float = 0.0) -> Settings:
    """A YAML file, or a mapping that was read from one.

    Args:
        source: of the file.
        wobble: batches have from `1 - wobble` to all of the rows that the file names; 0: as the file says.

    Raises:
        EstimateError: something is missing, unknown or wrong; the message names the key and what would be right.
    """
    try:
        content = load_config(source)
        _known(content, _KEYS, "")
        section = content["pipeline"]
        options = {str(key): value for key, value in section.items() if key != "_target_"}
        return Settings(
            _pipeline_class(section),
            options,
            _batches(content, wobble),
            _model(content.get("model")),
            _whole(content.get("steps", STEPS), "steps", 1),
            _switch(content.get("host_ahead", True), "host_ahead"),
        )
    except ConfigError as error:
        raise EstimateError(str(error)) from error


def _pipeline_class(section: Mapping[str, Any]) -> type:
    target = str(section.get("_target_") or "")
    module, _, name = target.rpartition(".")
    known = name.removeprefix("Prealloc")
    elsewhere = module and not (known in versions.PIPELINES and module.startswith(("torchrec.", "torchrec_prealloc")))
    if elsewhere or not target:
        return pipeline_class(section)
    try:
        return versions.pipeline_class(known)
    except AttributeError as error:
        raise ConfigError(f"pipeline._target_: {target}: {error}") from None


def _batches(content: Mapping[str, Any], wobble: float) -> Callable[[], Iterable[Any]]:
    if ("batch" in content) == ("batches" in content):
        raise ConfigError("batch: missing; write batch: (a description, or a function that gives one) or batches:")
    key = "batch" if "batch" in content else "batches"
    section = content[key]
    if not isinstance(section, Mapping) or (key == "batches" and "_target_" not in section):
        raise ConfigError(f"{key}: {section!r} is no mapping with _target_" + " or rows" * (key == "batch"))
    rows = _wobbling(section, key, wobble)
    if "_target_" not in section:
        return _described(section, rows)
    make = _target(section, key)
    options = {str(name): value for name, value in section.items() if name not in ("_target_", "rows")}
    if key == "batches":
        given = {**options, "rows": section["rows"]} if "rows" in section else options
        return lambda: _repeated(lambda: _call(make, given, key), key)
    return lambda: _one_by_one(make, options, rows)


def _described(section: Mapping[str, Any], rows: Range | None) -> Callable[[], Iterable[Any]]:
    _known(section, _DESCRIPTION_KEYS, "batch.")
    if rows is None:
        raise ConfigError("batch.rows: missing; write the number of samples, or [smallest, largest]")
    sparse = {name: _range(ids, f"batch.sparse.{name}", 0) for name, ids in _mapping(section, "sparse").items()}
    tensors = {name: _tensor(given, f"batch.tensors.{name}") for name, given in _mapping(section, "tensors").items()}
    dense = _whole(section.get("dense", 0), "batch.dense", 0)
    return Description(rows, sparse, dense, tensors).batches


def _one_by_one(make: Callable[..., Any], options: dict[str, Any], rows: Range | None) -> Iterator[Any]:
    torch.manual_seed(0)  # the same for each way
    generator = torch.Generator().manual_seed(0)
    while True:
        drawn = {} if rows is None else {"rows": draw(rows, generator)}
        yield _call(make, {**options, **drawn}, "batch")


def _repeated(make: Callable[[], Any], key: str) -> Iterator[Any]:
    """The batches of a loader, over and over."""
    torch.manual_seed(0)
    while True:
        loader = make()
        if not isinstance(loader, Iterable):
            raise EstimateError(f"{key}._target_: a {type(loader).__name__} is no iterable of batches")
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise EstimateError(f"{key}._target_: gave no batch")


def _model(section: Any) -> MakeModel:
    if section is None:
        return stand_in
    if not isinstance(section, Mapping):
        raise ConfigError(f"model: {section!r} is no mapping with _target_")
    make = _target(section, "model")
    options = {str(name): value for name, value in section.items() if name != "_target_"}

    def build(device: torch.device) -> Any:
        made = _call(make, {**options, "device": device}, "model")
        if not isinstance(made, tuple) or len(made) != 2:
            raise EstimateError(f"model._target_: gave a {type(made).__name__}; return (model, optimizer)")
        return made

    return build


def _target(section: Mapping[str, Any], key: str) -> Callable[..., Any]:
    target = section.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(f"{key}._target_: missing; name a function, e.g. trainer.batches.make_batch")
    module_name, _, name = target.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key}._target_: cannot import {module_name or target}: {error}") from None
    made = getattr(module, name, None)
    if not callable(made):
        raise ConfigError(f"{key}._target_: {module_name} has no function {name}")
    return made  # type: ignore[no-any-return]


def _call(make: Callable[..., Any], options: Mapping[str, Any], key: str) -> Any:
    try:
        return make(**options)
    except Exception as error:
        name, said = getattr(make, "__qualname__", repr(make)), " ".join(str(error).split())
        raise EstimateError(f"{key}._target_: {name} failed: {type(error).__name__}: {said}") from error


def _wobbling(section: Mapping[str, Any], key: str, wobble: float) -> Range | None:
    rows = _range(section["rows"], f"{key}.rows", 1) if "rows" in section and key == "batch" else None
    if not wobble:
        return rows
    if rows is None:
        raise ConfigError(f"{key}.rows: missing; a wobble needs the number of rows that it may take from")
    return max(1, round(rows[1] * (1 - wobble))), rows[1]


def _range(value: Any, key: str, least: int) -> Range:
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2 or any(type(end) is not int or end < least for end in ends) or ends[0] > ends[1]:
        raise ConfigError(f"{key}: {value!r} is neither a whole number of at least {least} nor [smallest, largest]")
    return ends[0], ends[1]


def _tensor(value: Any, key: str) -> tuple[tuple[int, ...], torch.dtype]:
    parts = list(value) if isinstance(value, list) else [value]
    dtype: Any = torch.float32
    if parts and isinstance(parts[-1], str):
        dtype = getattr(torch, parts.pop(), None)
    if not isinstance(dtype, torch.dtype) or any(type(part) is not int or part < 0 for part in parts):
        raise ConfigError(f"{key}: {value!r} is no shape and type; write e.g. [3, 32, 32, uint8]")
    return tuple(parts), dtype


def _mapping(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = section.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"batch.{name}: {value!r} is no mapping of names")
    return {str(key): entry for key, entry in value.items()}


def _whole(value: Any, key: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{key}: {value!r} is not a whole number of at least {least}")
    return value


def _switch(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: {value!r} is not a bool; write true or false")
    return value


def _known(section: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in section:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: unknown{_did_you_mean(str(key), list(known))}")
