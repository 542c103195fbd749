"""Views whose graph torch refuses to tell, as results of compiled calls and in the state: as eager gives them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchlazy

pytestmark = [pytest.mark.usefixtures("operator_by_operator"), pytest.mark.filterwarnings("ignore:torchlazy.compile")]


def _written(leaf: torch.Tensor, number: int) -> list[torch.Tensor]:
    row, part = leaf.select(0, 0), leaf.chunk(2, 0)[0]
    with torch.no_grad():
        row.add_(number)
    return [row, part]


def of_an_argument(x, held):
    return _written(x, 2)


def of_a_leaf_that_it_makes(x, held):
    leaf = x.detach().clone().requires_grad_()
    return [leaf, *_written(leaf, 3), leaf * x]


def left_in_the_state(x, held):
    held.part = _written(x, 4)[1]
    return [x * 2]


def given_to_it(x, held):
    return [x.detach() * 2, *held.inner(_written(x, 4)[1])]


def _given(part):
    return [part, part.detach() + 1]


def _sights(function: Any, device: str, compiled: bool) -> list[Any]:
    held = SimpleNamespace(part=None, inner=_given)
    if compiled and function is given_to_it:
        held.inner = torchlazy.compile(_given)
    elif compiled:
        function = torchlazy.compile(function)
    found: list[Any] = []
    for turn in range(3):
        x = torch.arange(8.0).add(turn).reshape(4, 2).to(device).requires_grad_()
        results = [*function(x, held), *([] if held.part is None else [held.part])]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for tensor in results:
                found += [tensor.requires_grad, tensor._is_view(), tensor.detach().cpu().clone()]
                try:
                    found.append((tensor * 2).sum().detach().cpu())
                except RuntimeError as error:
                    found.append(str(error).split(" and ")[0])
    return found


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("function", [of_an_argument, of_a_leaf_that_it_makes, left_in_the_state, given_to_it])
def test_given_as_eager_gives_it(function: Any, device: str) -> None:
    expected = _sights(function, "cpu", compiled=False)
    assert "Output 0 of Split is a view" in expected
    assert _same(_sights(function, device, compiled=True), expected)


def _same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in zip(found, expected, strict=True)
    )


def test_the_report_says_why_its_python_runs() -> None:
    call = torchlazy.compile(of_an_argument)
    for _ in range(3):
        call(torch.ones(4, 2, requires_grad=True), None)
    assert any("one of several views" in why for why in call.report().reasons)
