"""Calls that write to windows or to several lists, followed as one step: windows, clipped gradients, fused optimizers.

Invariant: every tensor, read through any alias, holds what eager's does, whatever differs from the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder

from tests.lazy.known_traces import known

pytestmark = pytest.mark.usefixtures("way")
TURNS = (0, 0, 0, 0, *range(1, 13), 1, 2, 1, 2, 5, 5, 5)
Tensors = list[torch.Tensor]


def slices(x: torch.Tensor, turn: int) -> Tensors:
    """Other windows, other numbers, a source that overlaps or is the very window, a window read before."""
    y = x * 2
    y[1:3] = x[:2] if turn % 4 else y[:2] + 0
    first = y[0]
    y[:, turn % 3 == 2] += (1.0, 2)[turn % 2]
    y.view(2, 8)[1] = 3.0 if turn % 5 else first[0]
    first.mul_(2).sub_(first if turn % 7 == 6 else y[1])
    if turn % 6 == 5:
        y[2:].copy_(y[:2])
    return [y, first, y[:, 1] + 0]


def twice_the_same_memory(x: torch.Tensor, turn: int) -> Tensors:
    """Of two windows that were on two storages, both are on one, or change places."""
    y, z = x * 2, x * 3
    one, other = y[:2], (z if turn % 3 else y)[2:]
    if turn % 4 == 3:
        one, other = other, one
    one.add_(other)
    other.copy_(one if turn % 5 else x[:2])
    torch._foreach_mul_([one, other], 2.0)
    return [y, z, one, other]


def lists(x: torch.Tensor, turn: int) -> Tensors:
    """Windows and whole tensors in lists; the same length with other members; numbers that vary."""
    whole, base = x * 1, x * 4
    flat = (x + 1).view(-1)
    written = [whole, base[1], flat] if turn % 3 else [base[1], whole, flat]
    torch._foreach_mul_(written, 0.5 + turn % 4)
    torch._foreach_add_(written, [one + 1 for one in written])
    torch._foreach_clamp_max_(written, x.sum() if turn % 5 == 4 else 9.0)  # type: ignore[arg-type]
    return [whole, base, flat, *torch._foreach_norm([base[1], flat[2:]])]


def optimized(x: torch.Tensor, turn: int) -> Tensors:
    """A fused optimizer over new memory, windows among the gradients; now and then two parameters are one."""
    params = [x * 1, x + 1]
    grads = [(x * 2).view(4, 4), (x * 3).view(16).view(4, 4)]
    first, second = [x * 0, x * 0.5], [x * 0, x * x]
    steps = [torch.zeros((), device=x.device) + 1 for _ in params]
    if turn % 6 == 5:
        grads[1] = grads[0] * 2
    kept = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": turn % 4 == 3}
    torch._fused_adamw_(params, grads, first, second, [], steps, lr=0.1 * (1 + turn % 3), **kept)  # type: ignore[arg-type]
    return [*params, *first, *second]


def scaled(x: torch.Tensor, turn: int) -> Tensors:
    """A gradient scaler's operators; some gradients are not finite."""
    grads = [x * 2, (x * 3).view(-1), (x + 1)[1]]
    if turn % 4 == 3:
        grads[1][0] = float("inf")
    found, scale = torch.zeros(1, device=x.device), torch.full((1,), 8.0, device=x.device)
    growth = torch.zeros(1, dtype=torch.int32, device=x.device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
    torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 1 + turn % 2)
    return [*grads, found, scale, growth]


def read_anew(x: torch.Tensor, turn: int) -> Tensors:
    """Windows of two memories that were written to since: one or the other, read before or not."""
    y, z, total = x * 2, x * 3, x[0] * 1
    one, other = y[1], z[1]
    y.add_(1)
    z.sub_(1)
    if turn % 4 == 3:
        other = other * 1 if turn % 5 else z[1]
    total.add_(one if turn % 2 else other)
    total.mul_(other if turn % 3 else one)
    return [total, one, other]


PROGRAMS: dict[str, Callable[[torch.Tensor, int], Tensors]] = {
    program.__name__: program for program in (slices, twice_the_same_memory, lists, optimized, scaled, read_anew)
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_values_are_eager_s_whatever_differs(name: str, mode: str) -> None:
    x = torch.rand(4, 4)
    lazy = x.to("lazy")
    with torch.set_grad_enabled(mode == "grad"):
        for turn in TURNS:
            mine, theirs = PROGRAMS[name](lazy, turn), PROGRAMS[name](x, turn)
            if turn % 2:
                torchlazy.flush()
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one.cpu(), other, msg=lambda text, turn=turn: f"turn {turn}: {text}")


def test_gradients_flow_through_written_windows() -> None:
    weight = torch.rand(4, 4)
    mine, theirs = weight.to("lazy").requires_grad_(), weight.clone().requires_grad_()
    for turn in (0, 0, 0, 0, 1, 0, 2, 0):
        for w in (mine, theirs):
            y = w * 2
            y[1:3] = w[:2] * 3
            y[:, turn] += 1.0
            (y * y).sum().backward()
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)  # type: ignore[union-attr]
        mine.grad = theirs.grad = None


def test_an_alias_made_before_sees_what_a_followed_write_left() -> None:
    x = torch.rand(4, 4).to("lazy")
    seen: list[Any] = []

    def program() -> Tensors:
        y = x * 2
        rows, column = list(y), y[:, 1]
        rows[1].zero_()
        y[2:] = 5.0
        seen[:] = [column + 0, rows[1] + 0, rows[3] + 0]
        return [y, *rows, column]

    known(program, 5)
    kept = program()
    want = x.cpu() * 2
    want[1], want[2:] = 0.0, 5.0
    for one, other in zip((*seen, *kept), (want[:, 1], want[1], want[3], want, *want, want[:, 1]), strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_the_version_of_a_window_s_tensor_rises_as_ever() -> None:
    x = torch.rand(4, 4).to("lazy")
    versions = []

    def program() -> torch.Tensor:
        y = x * 2
        y[1:3] = 1.0
        y[0].add_(1)
        versions.append((y._version, y._storage_.version))  # type: ignore[attr-defined]
        return y

    known(program, 6)
    assert set(versions) == {(2, 2)}
    assert recorder.left_at is None


def test_windows_that_are_kept_from_step_to_step_are_read_anew() -> None:
    """As gradients are that a cut left as windows: their memory is an input, or was written to meanwhile."""
    start = [torch.rand(4, 4) for _ in range(3)]
    sides = []
    for device in ("lazy", "cpu"):
        bases = [one.clone().to(device) for one in start]
        windows = [bases[0][1], bases[1][:, 2], bases[2].view(16)[:4], bases[0][2]]
        sides.append((bases, windows, [torch.zeros(4).to(device) for _ in range(3)]))
    for turn in (0, 0, 0, 0, 0, *range(1, 25), 12, 12, 12, 1, 1, 5, 5):
        for bases, (a, b, c, d), (p, q, r) in sides:
            if turn % 4 == 3:
                bases[1].mul_(0.5)  # in the trace then, and the window's own value is not
            if turn % 5 == 4:
                a = a * 1 if turn % 2 else d  # no window, or another one
            torch._foreach_add_([p, q, r], [a, b, c] if turn % 3 else [a, b, d], alpha=1.0 + turn % 2)
            p.add_(d if turn % 7 else p)
            torch._foreach_mul_([q, r], [b, a])
            if turn % 6 == 5:
                b.copy_(c)
            r.sub_(b).clamp_(-4, 4)
        if turn % 11:
            torchlazy.flush()
        for one, other in zip(*([*bases, *windows, *params] for bases, windows, params in sides), strict=True):
            torch.testing.assert_close(one.cpu() if turn % 8 == 7 else one.clone().cpu(), other, msg=f"turn {turn}")


def test_a_kept_window_that_was_read_holds_its_value_in_the_trace() -> None:
    base, total = torch.rand(4, 4).to("lazy"), torch.zeros(4).to("lazy")
    row, want = base[1], torch.zeros(4)

    def program() -> torch.Tensor:
        total.add_(row)
        row.mul_(2)  # of the value that was just read
        return row + total

    for _ in range(8):
        before = row.cpu()
        made = program()
        torchlazy.flush()
        want = want + before
        torch.testing.assert_close(made.cpu(), before * 2 + want)
        torch.testing.assert_close(base[1].cpu(), before * 2)
