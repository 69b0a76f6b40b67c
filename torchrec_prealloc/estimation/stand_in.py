"""A model for pipelines that are looked at for their batches alone: it reads any batch, and needs no memory itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrec_prealloc.batch import tensors_in


@torch.fx.wrap
def read(batch: Any) -> Tensor:
    """A number to which each of a batch's tensors on the device contributes, float32 [].

    One call for TorchRec's tracer, which runs a model with a stand-in for the batch to find its sharded modules.
    """
    # Largest elements: of the operators that read everything one of the cheapest on a CPU, whatever the type.
    tensors = [tensor.detach() for tensor in tensors_in(batch) if tensor.device.type != "cpu" and tensor.numel()]
    found = [(tensor.real if tensor.is_complex() else tensor).amax().float() for tensor in tensors]
    return torch.stack(found).sum() if found else torch.zeros(())


class StandIn(nn.Module):
    """Its loss depends on every tensor of the batch, and on one weight. `forward` gives (loss [1], the loss detached).

    It has no tables, so what a pipeline's input dist makes of a sharded model's ids is not in its memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss = self.weight * read(batch)
        return loss, loss.detach()


def stand_in(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on a device, and an optimizer."""
    model = StandIn().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
