"""Whether two runs had the same losses, bit for bit."""

import dataclasses

import torch

from torchrec_prealloc.errors import CommandError


class UnequalLosses(CommandError):
    """Two ways of copying the same batches did not train the same model."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first step (counted from 1) at which losses differ, and both; None where a run had ended before."""

    step: int
    first: float | None
    second: float | None


def first_difference(first: torch.Tensor, second: torch.Tensor) -> Difference | None:
    """Compare two loss sequences by their bits, so that a NaN equals itself and 0.0 does not equal -0.0.

    Args:
        first, second: float32 [steps] on the host

    Returns:
        None if both have the same length and the same bits.
    """
    common = min(len(first), len(second))
    unequal = (first[:common].view(torch.int32) != second[:common].view(torch.int32)).nonzero()
    if len(unequal):
        at = int(unequal[0])
        return Difference(at + 1, float(first[at]), float(second[at]))
    if len(first) == len(second):
        return None
    return Difference(
        common + 1,
        float(first[common]) if len(first) > common else None,
        float(second[common]) if len(second) > common else None,
    )


def explain_difference(name_first: str, name_second: str, difference: Difference) -> str:
    """One line that names the step, both runs and both losses with their bits."""
    return (
        f"losses are not equal at step {difference.step}: "
        f"{name_first} {_show(difference.first)}, {name_second} {_show(difference.second)}"
    )


def _show(loss: float | None) -> str:
    if loss is None:
        return "had ended"
    bits = int(torch.tensor(loss, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF
    return f"{loss:.9g} (0x{bits:08x})"
