"""torch's own tracing over lazy tensors: what it records is a program, not the constants of one run."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torchlazy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture(params=["lazy", "lazy_mode", "cpu inside lazy_mode"])
def place(request):
    """A device, and a block to run in."""
    if request.param == "lazy":
        return "lazy", contextlib.nullcontext
    if request.param == "lazy_mode":
        return "cpu", torchlazy.lazy_mode
    return "cpu", contextlib.nullcontext


def body(x, y):
    z = x.sin() * y
    z.add_(1)
    return z[1:] @ y, z.sum()


def test_make_fx(place):
    device, block = place
    with block():
        given = [torch.arange(4.0, device=device) + n for n in range(2)]
        given = [given[0].reshape(2, 2), given[1][:2]]
        graph = make_fx(body)(*given)
        assert "sin" in graph.code and "mul" in graph.code
        for scale in (1.0, 2.0, -3.0):
            args = [t * scale for t in given]
            have, want = graph(*args), body(*[t.cpu() for t in args])
            for a, b in zip(have, want, strict=True):
                torch.testing.assert_close(a.cpu(), b)


def test_linearize(place):
    device, block = place

    def f(x):
        return (x.sin() * x.cos()).sum(), x * x

    with block():
        x = torch.arange(3.0, device=device)
        values, tangent_of = torch.func.linearize(f, x)
        for tangent in (torch.ones(3, device=device), torch.tensor([1.0, -2.0, 0.5], device=device)):
            want_values, want = torch.func.jvp(f, (x.cpu(),), (tangent.cpu(),))
            for a, b in zip((*values, *tangent_of(tangent)), (*want_values, *want), strict=True):
                torch.testing.assert_close(a.cpu(), b)


def test_what_is_pending_is_traced_with_its_value():
    weight = torch.ones(2)
    with torchlazy.lazy_mode():
        weight.add_(1)
        graph = make_fx(lambda x: x * weight)(torch.ones(2))
        weight.add_(1)
        assert torch.equal(graph(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 6.0]))


def test_fake_tensors_inside_lazy_mode():
    with torchlazy.lazy_mode():
        real = torch.ones(2, 3) + 1
        with FakeTensorMode() as mode:
            fake = torch.empty(4, 3)
            assert type(fake @ fake.T).__name__ == "FakeTensor"
            assert (fake @ fake.T).shape == (4, 4)
        with mode:
            assert type(torch.ones(3)).__name__ == "FakeTensor"
        assert torch.equal(real * 2, torch.full((2, 3), 4.0))
