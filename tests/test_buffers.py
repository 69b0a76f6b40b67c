"""Tensors that view one allocation behave like tensors of their own."""

from __future__ import annotations

import torch

from torchrec_prealloc.buffers import Views, allocate, host_bytes
from torchrec_prealloc.layout import Unit

FLOATS = (torch.float32, torch.Size((4,)), (1,))


def views(nbytes: int = 256) -> Views:
    return Views(allocate(nbytes, torch.device("cpu")).zero_())


def test_a_view_has_the_dtype_shape_strides_and_place_asked_for() -> None:
    base = views()
    tensor = base.at(64, (torch.int64, torch.Size((2, 3)), (1, 2)))
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (torch.int64, torch.Size((2, 3)), (1, 2))
    assert tensor.data_ptr() == base.base.data_ptr() + 64


def test_a_run_is_what_single_views_at_equal_distances_are() -> None:
    base = views()
    base.base.copy_(torch.arange(256, dtype=torch.uint8))
    run = base.run(64, 64, 3, FLOATS)
    for number, tensor in enumerate(run):
        single = base.at(64 + 64 * number, FLOATS)
        assert tensor.equal(single)
        assert tensor.stride() == single.stride()


def test_changing_one_view_in_place_does_not_spoil_the_backward_pass_of_another() -> None:
    one, two = views().run(0, 64, 2, FLOATS)
    weight = torch.ones(4, requires_grad=True)
    product = (weight * one).sum()
    two.add_(1)  # tracked views of one base would share a version counter: backward would refuse
    product.backward()
    assert weight.grad is not None


def test_a_view_may_be_changed_in_place_by_what_needs_a_gradient() -> None:
    one, _ = views().run(0, 64, 2, FLOATS)
    weight = torch.ones(4, requires_grad=True)
    one.mul_(weight)  # torch refuses this for tracked views made without a gradient, or by unbind
    one.sum().backward()
    assert weight.grad is not None


def test_a_view_is_no_view_to_autograd() -> None:
    tensor = views().at(0, FLOATS)
    assert tensor._base is None
    assert tensor._version == 0


def test_host_bytes_are_the_storages_own_memory() -> None:
    tensor = torch.arange(10, dtype=torch.int32)
    unit = Unit(start=tensor.data_ptr() + 8, nbytes=12, members=[0, 1])
    assert host_bytes(unit, tensor[3:]).view(torch.int32).tolist() == [2, 3, 4]
