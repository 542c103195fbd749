"""Gradients of activations computed in place: where eager refuses a negative slope, so do all ways, at `backward()`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchlazy

CASES: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "elu, negative": (True, lambda v: F.elu_(v, alpha=-2.0)),
    "celu, negative": (True, lambda v: F.celu_(v, alpha=-2.0)),
    "leaky relu, negative": (True, lambda v: F.leaky_relu_(v, -2.0)),
    "rrelu in eval, negative": (True, lambda v: F.rrelu_(v, -0.5, -0.2)),
    "elu": (False, lambda v: F.elu_(v, alpha=2.0)),
    "celu": (False, lambda v: F.celu_(v, alpha=2.0)),
    "leaky relu": (False, lambda v: F.leaky_relu_(v, 0.2)),
    "leaky relu, zero": (False, lambda v: F.leaky_relu_(v, 0.0)),
    "not in place, negative": (False, lambda v: F.elu(v, alpha=-2.0)),
    "leaky relu not in place, negative": (False, lambda v: F.leaky_relu(v, -2.0)),
}


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("way", ["device", "mode", "compiled", "compiled, from outside"])
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str, way: str, tiers: str) -> None:
    torchlazy.config.tiers = tiers
    refuses, activate = CASES[name]

    def forward(v: torch.Tensor) -> torch.Tensor:
        return activate(v.clone()).sum()

    def step(v: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor] = forward) -> torch.Tensor:
        return torch.autograd.grad(forward(v), v)[0]

    x = torch.linspace(-2, 2, 7)
    call = {"compiled": torchlazy.compile(step), "mode": torchlazy.lazy_mode()(step)}.get(way, step)
    if way == "compiled, from outside":
        compiled = torchlazy.compile(forward)
        call = lambda v: step(v, compiled)  # noqa: E731
    for _ in range(3):
        v = x.to("lazy" if way == "device" else "cpu").requires_grad_()
        if refuses:
            with pytest.raises(RuntimeError, match="negative slope"):
                call(v)
        else:
            torch.testing.assert_close(call(v).cpu(), step(x.clone().requires_grad_()))


def test_a_slope_that_becomes_negative_is_refused() -> None:
    def step(v: torch.Tensor, slope: float) -> torch.Tensor:
        return torch.autograd.grad(F.leaky_relu_(v.clone(), slope).sum(), v)[0]

    compiled, v = torchlazy.compile(step), torch.linspace(-2, 2, 7).requires_grad_()
    for slope in (0.1, 0.2, 0.3, 0.4, 0.5):
        torch.testing.assert_close(compiled(v, slope), step(v, slope))
    with pytest.raises(RuntimeError, match="negative slope"):
        compiled(v, -0.5)
    torch.testing.assert_close(compiled(v, 0.7), step(v, 0.7))
