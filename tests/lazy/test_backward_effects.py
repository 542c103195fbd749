"""Backwards of compiled calls that change state: hooks of modules and tensors, and functions of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torch import nn

CALLS = 6


class Kept:
    """What a program keeps of its gradients."""

    def __init__(self):
        self.norms, self.by_name, self.last, self.count = [], {}, None, 0

    def of_module(self, module, into, out):
        self.by_name["out"] = out[0].detach()

    def appended(self, module, into, out):
        self.norms.append(out[0].detach().norm())

    def counted(self, module, out):
        self.count += 1

    def of_tensor(self, gradient):
        self.last = gradient

    def all(self):
        return [*self.norms, *self.by_name.values(), self.last, self.count]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.kept.norms.append(gradient.norm())
        return gradient * 2, None


class Called(nn.Linear):
    def __init__(self, kept):
        super().__init__(4, 3)
        self.kept, self.kind = kept, ""

    def forward(self, x):
        found = super().forward(x)
        if self.kind == "tensor":
            found.register_hook(self.kept.of_tensor)
        if self.kind == "function":
            found = Scaled.apply(found, self.kept)
        return found


def made(kind):
    torch.manual_seed(0)
    kept = Kept()
    module = Called(kept)
    module.kind = kind
    if kind == "dict":
        module.register_full_backward_hook(kept.of_module)
    if kind == "list":
        module.register_full_backward_hook(kept.appended)
    if kind == "count":
        module.register_full_backward_pre_hook(kept.counted)
    if kind == "changed":
        module.register_full_backward_hook(lambda module, into, out: tuple(x * 3 for x in into))
    return module, kept


def seen(module, kept, run):
    found = []
    for number in range(CALLS):
        x = torch.full((2, 4), number + 1.0, requires_grad=True)
        run(x).square().sum().backward()
        found.append([x.grad, *(torch.as_tensor(item).clone() for item in kept.all() if item is not None)])
    return found


@pytest.mark.parametrize("kind", ["dict", "list", "count", "tensor", "function"])
def test_the_backward_runs_as_often_as_in_eager(kind):
    module, kept = made(kind)
    expected = seen(module, kept, module)
    module, kept = made(kind)
    compiled = torchlazy.compile(module)
    with pytest.warns(RuntimeWarning, match="the backward changes .*, which a replay would not"):
        found = seen(module, kept, compiled)
    torch.testing.assert_close(found, expected)


def test_a_hook_that_only_changes_gradients_is_replayed():
    module, kept = made("changed")
    expected = seen(module, kept, module)
    module, kept = made("changed")
    compiled = torchlazy.compile(module)
    torch.testing.assert_close(seen(module, kept, compiled), expected)
    assert compiled.report().replays > 0


def test_state_that_holds_tensors_in_pairs_is_compared():
    def paired():
        module, kept = made("changed")
        module.pairs = [(module.weight, module.bias)]
        module.by_weight = {module.weight: module.bias}
        return module, kept

    module, kept = paired()
    expected = seen(module, kept, module)
    module, kept = paired()
    compiled = torchlazy.compile(module)
    torch.testing.assert_close(seen(module, kept, compiled), expected)
    assert compiled.report().replays > 0


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("saves_result", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_a_backward_may_write_to_what_it_saved(device: str, saves_result: bool, part: bool) -> None:
    """Recorded ahead of time, it raised the saved tensor's version, and the call's own backward was refused."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            ctx.save_for_backward(y if saves_result else x.clone())
            return y

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            (saved[1:] if part else saved).mul_(2)
            return grads[0] * saved

    def run(x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x).sum()  # type: ignore[no-untyped-call, no-any-return]

    def gradient(call: Any, on: str) -> torch.Tensor | None:
        x = torch.arange(3.0, device=on).requires_grad_()
        call(x).backward()
        return None if x.grad is None else x.grad.cpu()

    compiled = torchlazy.compile(run)
    for _ in range(6):
        torch.testing.assert_close(gradient(compiled, device), gradient(run, "cpu"))
