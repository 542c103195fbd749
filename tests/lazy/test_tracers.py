"""torch's own tracing over lazy tensors, and modes of others: what tracing records is a program, not the constants of
one run, and a mode sees each operator."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torchlazy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


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


class _Seen(TorchDispatchMode):
    """Notes the operators that it sees, and doubles what products give."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(str(func))
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.mm.default else result


def _trained(block, places):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=0.1), torch.randn(3, 4)

    def step():
        loss = (model(x) @ torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    found = []
    for number in range(6):
        with contextlib.ExitStack() as stack:
            for place in places if number in (0, 3, 5) else ():
                mode = stack.enter_context(_Seen() if place == "mode" else block())
            stack.enter_context(block())
            found.append((step(), list(mode.operators) if number in (0, 3, 5) and places[-1] == "mode" else None))
    return found


@pytest.mark.parametrize("places", [("mode",), ("block", "mode"), ("mode", "mode")], ids="-".join)
def test_a_mode_that_was_entered_before_sees_each_operator(places):
    want, have = _trained(contextlib.nullcontext, places), _trained(torchlazy.lazy_mode, places)
    assert [seen for _, seen in have] == [seen for _, seen in want] and any(seen for _, seen in have)
    torch.testing.assert_close([loss for loss, _ in have], [loss for loss, _ in want], rtol=1e-4, atol=1e-5)


def test_operations_are_counted_outside_of_the_block():
    model, x = torch.nn.Linear(8, 4), torch.ones(3, 8)
    call = torchlazy.compile(model)
    for run in (model, call, call, call, call, copy.deepcopy(model).to("lazy")):
        with FlopCounterMode(display=False) as counter, torchlazy.lazy_mode():
            run(x.to(next(run.parameters()).device)).sum().backward()
        assert counter.get_total_flops() == 2 * 2 * 3 * 8 * 4


def test_what_waits_when_a_mode_is_entered_is_not_its():
    with torchlazy.lazy_mode():
        w = torch.ones(2, 2)
        w.mul_(3)
        q = w + 1
        with _Seen() as mode, torchlazy.lazy_mode():
            r = q @ w
        assert (r + w).tolist() == [[51.0, 51.0]] * 2 and mode.operators == ["aten.mm.default"]


def test_torch_traces_inside_a_compiled_call():
    """Fake tensors and their numbers are not the call's: writing them down ended the process."""

    @torchlazy.compile
    def call(x):
        exported = torch.export.export(torch.nn.Sequential(torch.nn.Tanh()), (torch.ones(2),))
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = (torch.ones(2, 3) @ torch.ones(3, 4)).shape
        return exported.module()(x) * shape[1]

    with pytest.warns(RuntimeWarning, match="torch is tracing|untyped_storage"):
        for _ in range(4):
            torch.testing.assert_close(call(torch.ones(2)), torch.ones(2).tanh() * 4)


@pytest.mark.usefixtures("device_in_python")
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
