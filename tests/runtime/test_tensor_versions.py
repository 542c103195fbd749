"""Versions of tensors, noted and compared: natively what Python says, for tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchlazy.lazy.torch_private.dispatch import tensor_readers
from torchlazy.runtime.native.identity_check import is_available
from torchlazy.runtime.native.tensor_versions import TensorVersions

COUNT = 12  # more than are asked one by one
CHANGES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda tensor: tensor.add_(1),
    lambda tensor: tensor.detach().zero_(),
    lambda tensor: tensor.view(2)[0].fill_(3),
    lambda tensor: torch._foreach_add_([tensor], 1.0),
    lambda tensor: torch.autograd.graph.increment_version(tensor),
    lambda tensor: torch.utils.swap_tensors(tensor, torch.zeros(2).add_(1).add_(1).add_(1)),
)


def _versions(tensors: list[torch.Tensor], *, native: bool) -> TensorVersions:
    found = TensorVersions(tensors, tensor_readers if native else lambda: None)
    assert not found.hold()  # nothing was noted
    for _ in range(3):
        found.note()
        assert found.hold()
    assert (found._pass is not None) == native
    return found


@pytest.mark.parametrize("native", [pytest.param(True, marks=pytest.mark.skipif(not is_available(), reason="")), False])
def test_each_write_is_noticed(native: bool) -> None:
    tensors = [torch.zeros(2) for _ in range(COUNT - 1)] + [torch.zeros(1).squeeze().expand(2).clone()]
    found = _versions(tensors, native=native)
    for place, change in enumerate(CHANGES):
        change(tensors[place])
        assert not found.hold(), place
        found.note()
        assert found.hold()
    before = tensors[0]._version
    tensors[0].data = torch.ones(2)
    assert found.hold() == (tensors[0]._version == before)


@pytest.mark.skipif(not is_available(), reason="no C++ compiler here")
def test_tensors_without_versions_never_hold() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(2) for _ in range(COUNT)]
    found = TensorVersions(tensors, tensor_readers)
    found._go_native()
    found.note()
    assert not found.hold()


def test_few_are_asked_in_python() -> None:
    found = TensorVersions([torch.zeros(2)], tensor_readers)
    for _ in range(4):
        found.note()
    assert found._pass is None and found.hold()
