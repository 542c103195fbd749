"""Loss functions: values, dtypes and shapes against ATen eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.prims.graphs import check

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
REDUCTIONS = (0, 1, 2)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def probabilities(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(dtype: torch.dtype) -> dict[str, Any]:
    """ATen rounds each element of a half before it reduces."""
    return {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}


ELEMENTWISE = {
    "mse_loss": (),
    "smooth_l1_loss": (0.7,),
    "huber_loss": (0.7,),
    "soft_margin_loss": (),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name: str, reduction: int, dtype: torch.dtype) -> None:
    x, target = sample(3, 4, dtype=dtype), sample(3, 4, dtype=dtype, seed=1)
    target[0, 0] = x[0, 0]
    grad = sample(3, 4, dtype=dtype, seed=2) if reduction == 0 else sample(dtype=dtype, seed=2)
    forward = getattr(aten, name).default
    backward = getattr(aten, f"{name}_backward").default
    arguments = ELEMENTWISE[name]
    check(forward, x, target, reduction, *arguments, **close(dtype))
    check(backward, grad, x, target, reduction, *arguments, **close(dtype))
    check(forward, x[:0], target[:0], reduction, *arguments)


def test_smooth_l1_with_beta_zero_is_l1() -> None:
    x, target = sample(6), sample(6, seed=1)
    target[0] = x[0]
    check(aten.smooth_l1_loss.default, x, target, 1, 0.0)
    check(aten.smooth_l1_loss_backward.default, torch.ones(()), x, target, 1, 0.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy(reduction: int, dtype: torch.dtype) -> None:
    x, target = probabilities(3, 4, dtype=dtype), probabilities(3, 4, dtype=dtype, seed=1)
    x[0, 0], x[0, 1] = 0.0, 1.0
    weight = probabilities(4, dtype=dtype, seed=2)
    grad = sample(3, 4, dtype=dtype) if reduction == 0 else sample(dtype=dtype)
    logits = sample(3, 4, dtype=dtype) * 5
    for w in (None, weight.expand(3, 4).contiguous()):
        check(aten.binary_cross_entropy.default, x, target, w, reduction, **close(dtype))
        check(aten.binary_cross_entropy_backward.default, grad, x[1:], target[1:], w if w is None else w[1:], reduction,
              **close(dtype)) if reduction else None  # fmt: skip
    for pos_weight in (None, weight):
        arguments = (logits, target, weight, pos_weight, reduction)
        check(aten.binary_cross_entropy_with_logits.default, *arguments, **close(dtype))


@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_and_l1(log_target: bool) -> None:
    x, target = sample(3, 4), probabilities(3, 4, seed=1)
    target[0, 0] = 0.0
    for reduction in REDUCTIONS:
        check(aten.kl_div.default, x, target, reduction, log_target=log_target)
        check(aten.l1_loss.default, x, target, reduction)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(weighted: bool, reduction: int, dtype: torch.dtype) -> None:
    scores = sample(6, 5, dtype=dtype).log_softmax(1)
    target = torch.tensor([1, 0, -100, 4, 3, 3])
    weight = probabilities(5, dtype=dtype) if weighted else None
    for ignored in (-100, 3):
        t = target.clamp_min(0) if ignored == 3 else target
        check(aten.nll_loss_forward.default, scores, t, weight, reduction, ignored, **close(dtype))
        total = aten.nll_loss_forward(scores, t, weight, reduction, ignored)[1]
        grad = sample(6, dtype=dtype) if reduction == 0 else sample(dtype=dtype)
        check(aten.nll_loss_backward.default, grad, scores, t, weight, reduction, ignored, total, **close(dtype))
    check(aten.nll_loss_forward.default, scores[0], target[0], weight, reduction, -100, **close(dtype))
    one = aten.nll_loss_forward(scores[0], target[0], weight, reduction, -100)[1]
    check(aten.nll_loss_backward.default, sample(dtype=dtype), scores[0], target[0], weight, reduction, -100, one,
          **close(dtype))  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss_where_nothing_counts(reduction: int) -> None:
    scores = sample(3, 5)
    check(aten.nll_loss_forward.default, scores, torch.full((3,), -100), None, reduction, -100)
    check(aten.nll_loss_forward.default, scores[:0], torch.empty(0, dtype=torch.int64), None, reduction, -100)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss2d(weighted: bool, reduction: int) -> None:
    scores = sample(2, 5, 3, 4)
    target = torch.randint(0, 5, (2, 3, 4), generator=torch.Generator().manual_seed(3))
    target[0, 0, 0] = -100
    weight = probabilities(5) if weighted else None
    check(aten.nll_loss2d_forward.default, scores, target, weight, reduction, -100)
    total = aten.nll_loss2d_forward(scores, target, weight, reduction, -100)[1]
    grad = sample(2, 3, 4) if reduction == 0 else sample()
    check(aten.nll_loss2d_backward.default, grad, scores, target, weight, reduction, -100, total)


def test_margins_between_classes() -> None:
    x, target = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    weight = torch.rand(4)
    for p in (1, 2):
        for each in (None, weight):
            for reduction in (0, 1, 2):
                check(aten.multi_margin_loss.default, x, target, p, 0.5, each, reduction, rtol=1e-5, atol=1e-6)
                grad = torch.randn(5) if reduction == 0 else torch.randn(())
                backward = aten.multi_margin_loss_backward.default
                check(backward, grad, x, target, p, 0.5, each, reduction, rtol=1e-5, atol=1e-6)
    check(aten.multi_margin_loss.default, x[0], torch.tensor(2), rtol=1e-5, atol=1e-6)
    check(
        aten.multi_margin_loss_backward.default, torch.tensor(1.5), x[0], torch.tensor(2), 1, 1.0, rtol=1e-5, atol=1e-6
    )
