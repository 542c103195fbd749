"""`x.conj()`, `x.mH` and the parts of complex numbers are views: what is written to one is seen in the other, on the
lazy device, in `lazy_mode`, and in compiled calls.

Invariant: each program gives what it gives eagerly, the errors among it; its argument is written to as there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor

pytestmark = [pytest.mark.usefixtures("operator_by_operator"), pytest.mark.filterwarnings("ignore")]


def written_by_its_conjugate(x):
    y = x.conj()
    y.mul_(2j)
    return y, y.is_conj(), y[0].is_conj(), y.resolve_conj().is_conj(), y.is_neg()


def written_behind_its_conjugate(x):
    y = x.conj()
    x.mul_(3j)
    return y, y * 1, y.sum(), y.flatten()[1:3]


def parts(x):
    x.real.mul_(2)
    x.imag.add_(1)
    y = x.conj().imag
    y.sub_(0.5)
    return y, y.is_neg(), y.t().is_neg(), x.conj().real.is_neg()


def adjoint(x):
    x.mH.mul_(2j)
    x.mH[0] = 1 + 2j
    return x.mH @ x, x.adjoint() + x.mT


def as_real(x):
    torch.view_as_complex(torch.view_as_real(x)).mul_(1j)
    return torch.view_as_real(x.conj())


def another_dtype(x):
    return x.conj().view(torch.float32)


def back_and_forth(x):
    y = x.conj().t().conj()
    y.add_(1)
    negative = torch._neg_view(x)
    negative.mul_(2)
    return y, y.is_conj(), negative, negative.is_neg(), negative.conj()


def resolved_is_a_copy(x):
    y = x.conj().resolve_conj()
    y.zero_()
    return y, x.conj().clone().zero_(), x.conj().imag.resolve_neg().zero_()


def copied_into_it(x):
    y = x.conj()
    y.copy_(x * 2)
    torch.add(x, 1, out=y)
    torch._foreach_mul_([y, x[0]], 2)
    return y


def sliced(x):
    y = x.conj()[:, 1]
    y.fill_(1 + 2j)
    y.t_()
    x.conj().masked_fill_(x.abs() > 2, 5j)
    return y, [part.is_conj() for part in x.conj().unbind()], x.conj().detach().is_conj()


def of_what_it_made(x):
    made = x * 2
    y = made.conj()
    made += 1
    return made, y, copy.copy(y), copy.deepcopy(y)


def gradients(x):
    x = x.detach().requires_grad_()
    y = x * 2j
    z = y.conj()
    y.mul_(3)
    return torch.autograd.grad((z * y.real).abs().sum(), x)[0].clone(), z.is_conj()


def a_conjugate_that_needs_gradients(x):
    return (x.detach().requires_grad_() * 2).conj().detach()


PROGRAMS: list[Callable[[Tensor], Any]] = [
    written_by_its_conjugate, written_behind_its_conjugate, parts, adjoint, as_real, another_dtype, back_and_forth,
    resolved_is_a_copy, copied_into_it, sliced, of_what_it_made, gradients, a_conjugate_that_needs_gradients,
]  # fmt: skip
WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "lazy": ("lazy", lambda program: program),
    "lazy_mode": ("cpu", lambda program: torchlazy.lazy_mode()(program)),
    "compiled": ("cpu", torchlazy.compile),
    "compiled lazy": ("lazy", torchlazy.compile),
}


def _data(number: int, device: str) -> Tensor:
    real = torch.arange(6.0).reshape(2, 3) + number
    return torch.complex(real, 1 - real.flip(1)).to(device)


def _plain(value: Any) -> Any:
    return value.detach().cpu().resolve_conj().resolve_neg().clone() if isinstance(value, Tensor) else value


def _sights(program: Any, device: str) -> list[Any]:
    """Results, the argument, and both once more when the results, and then the argument, were written to."""
    found: list[Any] = []
    for number in range(3):
        x = _data(number, device)
        try:
            results = torch.utils._pytree.tree_leaves(program(x))
        except RuntimeError as error:
            found.append(str(error).split("\n")[0])
            continue
        tensors = [one for one in (*results, x) if isinstance(one, Tensor)]
        found += [*map(_plain, (*results, x)), [(one.is_conj(), one.is_neg(), one.stride()) for one in tensors]]
        for one in tensors:
            one.add_(1)
            found += map(_plain, tensors)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_write_to_one_is_seen_in_the_other(program: Callable[[Tensor], Any], way: str) -> None:
    device, change = WAYS[way]
    found, expected = _sights(change(program), device), _sights(program, "cpu")
    assert [x for x in found if not isinstance(x, Tensor)] == [x for x in expected if not isinstance(x, Tensor)]
    torch.testing.assert_close(*([x for x in one if isinstance(x, Tensor)] for one in (found, expected)))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_calls_that_give_and_write_conjugates_are_replayed(device: str) -> None:
    call = torchlazy.compile(written_by_its_conjugate)
    for number in range(6):
        found, expected = _data(number, device), _data(number, "cpu")
        told, wanted = call(found), written_by_its_conjugate(expected)
        torch.testing.assert_close([*map(_plain, (found, *told))], [*map(_plain, (expected, *wanted))])
    assert call.report().replays


def test_in_a_loop_that_is_followed() -> None:
    """The second and later traces find the first one's steps, where the operators have plain operands."""
    x, plain = _data(0, "lazy"), _data(0, "cpu")
    for turn in range(4):
        for one in (x, plain):
            view = one if turn % 2 else one.conj()
            view.mul_(1j).add_(1)
            one.add_(view.clone())
        torchlazy.flush()
    assert torch.equal(x.cpu(), plain)
