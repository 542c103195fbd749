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


def test_torch_traces_inside_a_compiled_call():
    """Fake tensors and their numbers are not the call's: writing them down ended the process."""

    @torchlazy.compile
    def call(x):
        exported = torch.export.export(torch.nn.Sequential(torch.nn.Tanh()), (torch.ones(2),))
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = (torch.ones(2, 3) @ torch.ones(3, 4)).shape
        return exported.module()(x) * shape[1]

    with pytest.warns(RuntimeWarning, match="torch is tracing"):
        for _ in range(4):
            torch.testing.assert_close(call(torch.ones(2)), torch.ones(2).tanh() * 4)


def test_scripted_modules_move_to_the_lazy_device_and_back():
    module = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()))
    want = module(torch.ones(2, 3))
    module.to("lazy")
    have = module(torch.ones(2, 3, device="lazy"))
    have.sum().backward()
    torch.testing.assert_close(have.detach().cpu(), want.detach())
    with pytest.raises(RuntimeError, match=r"move the module first: module.cpu\(\)"):
        module.save_to_buffer()
    torch.testing.assert_close(module.to("cpu")(torch.ones(2, 3)), want)
    assert module.save_to_buffer()


def test_scripted_modules_made_in_lazy_mode_are_saved(tmp_path):
    with torchlazy.lazy_mode():
        module = torch.jit.script(torch.nn.Linear(3, 2))
        module(torch.ones(2, 3)).sum().backward()
        want = module(torch.ones(2, 3)).detach() * 1
        module.save(tmp_path / "it.pt")
        loaded = torch.jit.load(tmp_path / "it.pt")
        torch.testing.assert_close(loaded(torch.ones(2, 3)).detach(), want)
    torch.testing.assert_close(torch.jit.load(tmp_path / "it.pt")(torch.ones(2, 3)).detach(), want + 0)
