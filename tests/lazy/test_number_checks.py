"""Numbers that ATen's CPU kernels refuse are refused where they are computed, with eager's type of error.

Each program runs with numbers that are right, where it must give eager's values, and with wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F

DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor": lambda a, b: a // b,
    "truncated": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "of a number": lambda a, b: 7 % b,
    "in place": lambda a, b: a.clone().floor_divide_(b),
    "summed": lambda a, b: (a // b).sum(0),
    "behind a choice": lambda a, b: torch.where(b != 0, a // b, 0),
    "padded": lambda a, b: F.pad(a % b, (1, 2)),
}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.fixture(params=["cpp", "numba"])
def cpu_language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("TORCHLAZY_CPU_BACKEND", request.param)


def _fails_as_eager(call: Callable[..., Any], *operands: Tensor) -> None:
    with pytest.raises(RuntimeError) as wanted:
        call(*operands)
    with pytest.raises(type(wanted.value)) as found:
        kept = call(*[x.to("lazy") for x in operands])  # what nobody holds is not computed
        torchlazy.sync()
        del kept
    if "ZeroDivisionError" in str(wanted.value):
        assert "ZeroDivisionError" in str(found.value)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_divided_by_zero(dtype: torch.dtype, compiled: None, cpu_language: None) -> None:
    a = torch.randint(0, 100, (5, 37)).to(dtype)
    b = torch.randint(1, 9, (5, 37)).to(dtype)
    one_zero = b.clone()
    one_zero[4, 36] = 0  # in the tail of a vector
    for name, call in DIVISIONS.items():
        assert torch.equal(call(a.to("lazy"), b.to("lazy")).cpu(), call(a, b)), name
        _fails_as_eager(call, a, one_zero)


def test_integers_divided_by_the_number_zero(tier: str) -> None:
    _fails_as_eager(lambda a: a // 0, torch.arange(3))
    _fails_as_eager(lambda a: a % 0, torch.arange(3))
    x = torch.arange(3.0)
    assert torch.equal((x.to("lazy") // 0).cpu(), x // 0) or (x // 0).isnan().any()


def test_binary_cross_entropy_of_numbers_that_are_no_probabilities(tier: str) -> None:
    right, wrong = torch.tensor([[0.0, 0.25], [1.0, 0.5]]), torch.tensor([[0.0, 0.25], [1.5, 0.5]])
    for reduction in ("mean", "none"):
        loss = lambda p, t: F.binary_cross_entropy(p, t, reduction=reduction)  # noqa: B023, E731
        torch.testing.assert_close(loss(right.to("lazy"), right.to("lazy")).cpu(), loss(right, right))
        _fails_as_eager(loss, wrong, right)
        _fails_as_eager(loss, right, -wrong)


def test_chances_out_of_range(tier: str) -> None:
    for p in (torch.tensor([0.5, 1.5]), torch.tensor([-0.1, 0.5]), torch.tensor([float("nan"), 0.5])):
        _fails_as_eager(torch.bernoulli, p)
        _fails_as_eager(lambda p: torch.zeros_like(p).bernoulli_(p), p)
    assert torch.bernoulli(torch.tensor([0.0, 1.0]).to("lazy")).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("call", [
    lambda x: x.exponential_(-1), lambda x: x.exponential_(0), lambda x: x.cauchy_(0, 0), lambda x: x.geometric_(1.0),
    lambda x: x.geometric_(0.0),
])  # fmt: skip
def test_parameters_of_distributions_are_refused_at_the_call(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError):
        call(torch.zeros(3))
    with pytest.raises(RuntimeError):
        call(torch.zeros(3, device="lazy"))
