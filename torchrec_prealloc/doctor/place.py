"""Where a batch is to go, and which device is there to try that out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchrec_prealloc.transfer import TransferEngine


class Place(NamedTuple):
    """Where a batch is to go, and the device that allocates for it here."""

    asked: torch.device
    used: torch.device
    streams: bool
    """Whether the device copies while the host goes on."""

    @property
    def is_there(self) -> bool:
        """Whether the device is, and not one that stands in for it."""
        return self.used.type != "meta"

    @classmethod
    def of(cls, device: torch.device | str | None) -> Place:
        """The place that a device names; None: this machine's accelerator, or CUDA where there is none.

        Raises:
            ValueError: no device of that name is known to torch.
        """
        if device is None:
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cuda"
        try:
            asked = torch.device(device)  # type: ignore[arg-type]
            module: Any = torch.get_device_module(asked)
        except RuntimeError as error:
            raise ValueError(f"device {device!r}: {str(error).splitlines()[0]}") from None
        if getattr(module, "is_available", lambda: True)():
            engine = TransferEngine(asked)
            return cls(engine.device, engine.device, engine.has_streams)
        return cls(asked, torch.device("meta"), hasattr(module, "Stream") and hasattr(module, "Event"))
