"""Lengths on the host: the CTC loss in all its forms, on the lazy device and under `lazy_mode`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F

SYMBOLS, STEPS = 20, 50
FORMS: dict[str, dict[str, Any]] = {
    "tensors": {"input_lengths": torch.full((4,), STEPS), "target_lengths": torch.full((4,), 10)},
    "numbers": {"input_lengths": (STEPS,) * 4, "target_lengths": (10,) * 4},
    "sum": {"input_lengths": [50, 40, 30, 20], "target_lengths": [10, 5, 10, 0], "reduction": "sum"},
    "too short": {
        "input_lengths": [50, 40, 3, 20], "target_lengths": [10, 5, 10, 0], "reduction": "none", "zero_infinity": True,
    },
    "blank": {"input_lengths": torch.full((4,), STEPS), "target_lengths": torch.full((4,), 7), "blank": SYMBOLS - 1},
}  # fmt: skip


_DRAWN = torch.Generator().manual_seed(0)
SCORES = torch.randn(STEPS, 4, SYMBOLS, generator=_DRAWN)
TARGETS = torch.randint(1, SYMBOLS - 1, (4, 10), generator=_DRAWN)


def run(device: str, form: str, rows: int | None = None) -> tuple[torch.Tensor, ...]:
    scores, targets = SCORES.clone(), TARGETS
    arguments = dict(FORMS[form])
    if rows is not None:
        scores, targets = scores[:, rows], targets[rows]
        arguments |= {name: [arguments[name][rows]] for name in ("input_lengths", "target_lengths")}
    x = scores.to(device).requires_grad_()
    loss = F.ctc_loss(x.log_softmax(-1), targets.to(device), **arguments)
    loss.sum().backward()
    assert x.grad is not None
    return loss.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("way", ["lazy", "mode"])
@pytest.mark.parametrize("form", FORMS)
def test_ctc_loss(form: str, way: str) -> None:
    expected = run("cpu", form)
    if way == "lazy":
        have = run("lazy", form)
    else:
        with torchlazy.lazy_mode():
            have = run("cpu", form)
    for mine, theirs in zip(have, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", ["numbers", "too short"])
def test_one_sequence_without_a_batch(form: str) -> None:
    expected = run("cpu", form, rows=0)
    with torchlazy.lazy_mode():
        have = run("cpu", form, rows=0)
    for mine, theirs in zip(have, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_unknown_reduction_is_refused_by_torch() -> None:
    x = torch.randn(STEPS, 4, SYMBOLS).log_softmax(-1)
    with torchlazy.lazy_mode(), pytest.raises(ValueError, match="not a valid value for reduction"):
        F.ctc_loss(x, torch.ones(4, 10, dtype=torch.long), [50] * 4, [10] * 4, reduction="max")


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_lengths_that_a_compiled_step_computes_are_not_read(device: str) -> None:
    def step(x: torch.Tensor, targets: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x.detach().requires_grad_()
        is_symbol = targets > 0
        loss = F.ctc_loss(
            scores.log_softmax(-1), targets.masked_select(is_symbol), seen.sum(-1), is_symbol.sum(-1),
            zero_infinity=True,
        )  # fmt: skip
        loss.backward()
        return loss.detach(), scores.grad

    run = torchlazy.compile(step, audit=False)
    for symbols in (4, 7, 4, 4, 7, 4):
        targets = TARGETS.clone()
        targets[1, symbols:] = 0
        seen = torch.ones(4, STEPS, dtype=torch.int64)
        seen[2, symbols * 5 :] = 0
        have = run(SCORES.to(device), targets.to(device), seen.to(device))
        for mine, theirs in zip(have, step(SCORES, targets, seen), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)
    assert run.report().replays >= 3, run.report()
