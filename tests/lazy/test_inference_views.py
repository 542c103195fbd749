"""Views of tensors of `inference_mode`, made where the mode is off, are tensors of the mode themselves, as in eager.

Invariant: every program runs several times, so that it is recorded, followed and walked to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def made(device: str) -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0).to(device) * 1


def kinds_of_views(device):
    x = made(device)
    views = [x[1:], x.view(2, 3), x.detach(), x.t(), *x.chunk(2), x.unsqueeze(0), x.expand(2, 6), x.data, x[1:][:2]]
    views += [
        x.as_strided((2,), (1,)),
        x.reshape(3, 2),
        x[1:].detach_(),
        torch.nn.Parameter(x[1:], requires_grad=False),
    ]
    return [view.is_inference() for view in views]


def views_in_the_mode_of_ordinary_tensors(device):
    x = torch.arange(6.0).to(device)
    with torch.inference_mode():
        view = x[1:]
        twice = view.view(5, 1)
        view.add_(1)
    twice.add_(1)
    return view.is_inference(), twice.is_inference(), view[1:].is_inference(), x.cpu()


def results_are_ordinary(device):
    x = made(device)
    return [y.is_inference() for y in (x + 1, x[1:].clone(), copy.copy(x), copy.deepcopy(x))]


def writes_to_a_view(device):
    made(device)[1:].add_(1)


def writes_to_a_view_without_grad(device):
    with torch.no_grad():
        made(device).view(2, 3)[0].mul_(2)


def writes_to_a_part(device):
    made(device).chunk(2)[1].zero_()


def writes_by_index(device):
    made(device)[1] = 4


def writes_to_a_list(device):
    torch._foreach_add_([made(device)[1:]], 1)


def writes_to_out(device):
    x = made(device)
    torch.add(x[1:], 1, out=x[1:])


def saves_a_view(device):
    return made(device)[1:] * torch.ones(5, device=device, requires_grad=True)


def needs_a_gradient(device):
    made(device)[1:].requires_grad_()


def makes_a_parameter(device):
    return torch.nn.Parameter(made(device)[1:])


def asks_the_version(device):
    return made(device)[1:]._version


def adds_a_view_to_what_needs_a_gradient(device):
    weight = torch.ones(5, device=device, requires_grad=True)
    (made(device)[1:] + weight).sum().backward()
    return weight.grad.cpu()


def writes_in_the_mode(device):
    x = made(device)
    view = x[1:]
    with torch.inference_mode():
        view.add_(1)
    return x.cpu()


PROGRAMS: list[Callable[[str], Any]] = [
    kinds_of_views,
    views_in_the_mode_of_ordinary_tensors,
    results_are_ordinary,
    writes_to_a_view,
    writes_to_a_view_without_grad,
    writes_to_a_part,
    writes_by_index,
    writes_to_a_list,
    writes_to_out,
    saves_a_view,
    needs_a_gradient,
    makes_a_parameter,
    asks_the_version,
    adds_a_view_to_what_needs_a_gradient,
    writes_in_the_mode,
]


def told(program: Callable[[str], Any], device: str) -> Any:
    try:
        return program(device)
    except RuntimeError as error:
        return str(error)[:60]


@pytest.mark.parametrize("form", ["device", "mode"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_in_eager(program: Callable[[str], Any], form: str, way: str) -> None:
    expected = told(program, "cpu")
    for _ in range(4):
        if form == "device":
            found = told(program, "lazy")
            torchlazy.sync()
        else:
            with torchlazy.lazy_mode():
                found = told(program, "cpu")
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected)


def test_a_known_trace_makes_views_of_either_kind(way: str) -> None:
    with torch.inference_mode():
        of_the_mode = torch.ones(2, 3).to("lazy")
    ordinary = torch.ones(2, 3).to("lazy")
    torchlazy.sync()
    for given in (ordinary, ordinary, ordinary, of_the_mode, ordinary, of_the_mode):
        (given * 2).sum()
        views = [given[1:], given.t(), given.t()[0], *given.split(1), given.detach()]
        results = [view + 1 for view in views]
        wanted = given.is_inference()
        assert [view.is_inference() for view in views] == [wanted] * len(views)
        assert not any(result.is_inference() for result in results)
        torchlazy.sync()
