"""A YAML config with a pipeline: whether it can be made here, and the batch, where the config says how to get one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchrec_prealloc import versions
from torchrec_prealloc.config import ConfigError, PreallocConfig, check_options, load_config, pipeline_class
from torchrec_prealloc.doctor.advice import Cost
from torchrec_prealloc.doctor.explain import Explanation, explain
from torchrec_prealloc.errors import CommandError

EARLY_FREES = ("free_features_storage_early", "clear_data_dist_inputs")
"""Options of TorchRec's with which each KeyedJaggedTensor has memory of its own."""


@dataclass(frozen=True)
class CheckedConfig:
    """A config whose pipeline can be made here."""

    file: str
    pipeline: type
    options: dict[str, Any]
    prealloc: PreallocConfig
    is_ours: bool
    batch: Any
    """None where the config names none."""

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if name != "prealloc")
        lines = [
            f"{self.file}: {self.pipeline.__module__}.{self.pipeline.__qualname__}"
            + (f" with {given}" if given else "")
            + f", of TorchRec {versions.installed_version()}"
        ]
        if not self.is_ours:
            ours = f"torchrec_prealloc.Prealloc{self.pipeline.__name__}"
            known = self.pipeline.__name__ in versions.PIPELINES
            remedy = f"_target_: {ours}" if known else f"prealloc_pipeline({self.pipeline.__name__})"
            lines.append(f"  It is TorchRec's: its batches are copied as TorchRec does. Ours: {remedy}")
        elif not self.prealloc.enabled:
            lines.append("  prealloc.enabled is false: its batches are copied as TorchRec does.")
        if self.batch is None:
            lines.append("  It names no batch, so none is explained: batch: or batches:, as for `estimate --config`.")
        return "\n".join(lines)

    def explain(self, device: str | None, pinned: bool) -> Explanation:
        """Explain the batch of the config. A described batch has no values to tell anything of."""
        from torchrec_prealloc.estimation.description import DescribedBatch

        isolate = any(self.options.get(name) for name in EARLY_FREES)
        hidden = {Cost.INT64_VALUES} if isinstance(self.batch, DescribedBatch) else set()
        return explain(self.batch, device, self.prealloc, isolate=isolate, pinned=pinned).without(hidden)


def read(file: str, given: Mapping[str, Any]) -> CheckedConfig:
    """Check a config, and get its first batch.

    Args:
        given: options of the plugin's that go before the file's.

    Raises:
        CommandError: it is no such config; a name in it cannot be imported, an option is unknown or wrong.
    """
    try:
        content = load_config(Path(file))
        section = content["pipeline"]
        batch: Any = None
        if "batch" in content or "batches" in content:
            from torchrec_prealloc.estimation.config import read_settings

            batch = next(iter(read_settings(file).batches()))
        cls = _class(section)
        options = {str(name): value for name, value in section.items() if name != "_target_"}
        check_options(cls, options)
        prealloc = replace(PreallocConfig.of(options.get("prealloc")), **given)
        return CheckedConfig(file, cls, options, prealloc, _is_ours(cls), batch)
    except (ConfigError, CommandError) as error:
        text = str(error)
        raise CommandError(text if text.startswith(file) else f"{file}: {text}") from None


def _class(section: Any) -> type:
    """As the config module does; a pipeline of TorchRec's or ours may go without its module."""
    target = section.get("_target_")
    if isinstance(target, str) and "." not in target:
        package = "torchrec_prealloc" if target.startswith("Prealloc") else versions.PACKAGE
        return pipeline_class({"_target_": f"{package}.{target}"})
    return pipeline_class(section)


def _is_ours(cls: type) -> bool:
    from torchrec_prealloc.pipelines import PreallocPipeline

    return issubclass(cls, PreallocPipeline)
