"""Writes to ordinary tensors are counted once, when they are recorded, so that autograd notices what it would in eager.

Invariant: a tensor written before it is saved for a backward outside of the recording does not spoil it; one written
afterwards does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchlazy
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda w: w.add_(0.1),
    "data": lambda w: w.data.add_(0.1),
    "view": lambda w: w[0].mul_(2),
    "view of a view": lambda w: w.view(2, 2).t()[0].mul_(2),
    "detached": lambda w: w.detach().mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "setitem": lambda w: w.__setitem__(1, 3.0),
}


def play(write: Callable[[Tensor], object], first: bool, way: str) -> list[object]:
    torch.manual_seed(0)
    linear, weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def run(x: Tensor) -> Tensor:
        def change() -> None:
            with torch.no_grad():
                write(weight)

        hidden = linear(x)
        if first:
            change()
        y = hidden * weight
        if not first:
            change()
        return y

    compiled = torchlazy.compile(run, audit=False) if way == "compiled" else run
    found: list[object] = []
    for call in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(call))
        if way == "lazy_mode":
            with torchlazy.lazy_mode():
                y = run(x)
        else:
            y = compiled(x)
        linear.zero_grad()
        try:
            y.sum().backward()
            found.append(linear.weight.grad.clone())  # type: ignore[union-attr]
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append("refused")
    return found


@pytest.mark.parametrize("way", ["lazy_mode", "compiled"])
@pytest.mark.parametrize("first", [True, False], ids=["written, then used", "used, then written"])
@pytest.mark.parametrize("name", WRITES)
def test_a_backward_outside_is_as_in_eager(name: str, first: bool, way: str) -> None:
    want = play(WRITES[name], first, "eager")
    assert any(isinstance(found, Tensor) for found in want) or not first
    for mine, theirs in zip(play(WRITES[name], first, way), want, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs
