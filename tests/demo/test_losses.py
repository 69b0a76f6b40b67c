"""Losses are compared by their bits, and the first difference is named."""

from __future__ import annotations

import math

import pytest
import torch

from torchrec_prealloc.demo.losses import Difference, explain_difference, first_difference

LOSSES = torch.tensor([0.7, 0.6, 0.5])


def test_equal_losses_have_no_difference() -> None:
    assert first_difference(LOSSES, LOSSES.clone()) is None


def test_the_last_bit_counts() -> None:
    other = LOSSES.clone()
    other[1] = torch.nextafter(other[1], torch.tensor(1.0))
    difference = first_difference(LOSSES, other)
    assert difference == Difference(2, float(LOSSES[1]), float(other[1]))


def test_the_first_of_several_differences_is_named() -> None:
    difference = first_difference(LOSSES, LOSSES + 1)
    assert difference is not None
    assert difference.step == 1


def test_nan_equals_itself_and_the_sign_of_zero_counts() -> None:
    assert first_difference(torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    assert first_difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None


@pytest.mark.parametrize("swap", [False, True])
def test_a_run_that_ended_early_differs(swap: bool) -> None:
    first, second = (LOSSES[:2], LOSSES) if swap else (LOSSES, LOSSES[:2])
    difference = first_difference(first, second)
    assert difference is not None
    assert difference.step == 3
    assert "had ended" in explain_difference("a", "b", difference)


def test_the_explanation_names_step_runs_and_both_values_with_their_bits() -> None:
    assert explain_difference("old", "new", Difference(7, 0.5, 1.0)) == (
        "losses are not equal at step 7: old 0.5 (0x3f000000), new 1 (0x3f800000)"
    )
