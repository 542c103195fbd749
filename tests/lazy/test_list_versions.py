"""Writes to lists of tensors are counted, so that a backward that needs what they replaced says so, as eager's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchlazy

from tests.lazy.known_traces import known

pytestmark = pytest.mark.usefixtures("way", "operator_by_operator")
Tensors = list[torch.Tensor]


def step_of(kind: str, weight: torch.nn.Parameter) -> Callable[[], None]:
    weight.grad = torch.ones_like(weight)
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    return make([weight], lr=0.1, foreach=True).step


WRITES: dict[str, Callable[[Tensors], None]] = {
    "a number": lambda tensors: torch._foreach_add_(tensors, 1.0),
    "a list": lambda tensors: torch._foreach_mul_(tensors, [torch.full_like(tensor, 2.0) for tensor in tensors]),
    "copied": lambda tensors: torch._foreach_copy_(tensors, [torch.zeros_like(tensor) for tensor in tensors]),
    "windows": lambda tensors: torch._foreach_add_([tensor[1:] for tensor in tensors], 1.0),
    "shared": lambda tensors: torch._foreach_mul_([tensors[0], tensors[0].view(3)], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_versions_are_eagers(name: str) -> None:
    def counted(device: str) -> list[int]:
        tensors = [torch.ones(3, device=device), torch.ones(3, device=device)]
        for _ in range(5):
            WRITES[name](tensors)
            torchlazy.sync()
        return [tensor._version for tensor in tensors]

    assert counted("lazy") == counted("cpu")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_between_forward_and_backward_is_an_error(kind: str) -> None:
    w = torch.nn.Parameter(torch.ones(3, device="lazy"))
    step = step_of(kind, w)

    def program() -> None:
        loss = (w * w).sum()
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    known(program)
    program()
