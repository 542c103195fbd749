"""Compiled modules that read on the host before their results are there, and whose results need gradients.

Invariant: values, gradients and state after each call are eager's, and most calls are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("operator_by_operator")

CALLS = 8
Forward = Callable[["Net", Tensor], Any]
FORWARDS: dict[str, Forward] = {}


def forward(function: Forward) -> Forward:
    FORWARDS[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers and a buffer; what is done with them is given."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@forward
def a_branch(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    return net.b(h) if h.sum().item() > 0 else net.b(h * 2) + 1


@forward
def an_early_exit(net: Net, x: Tensor) -> tuple[Tensor, int]:
    for depth in range(3):
        x = net.a(x).tanh() * 1.7
        if x.norm().item() > 6:
            return x, depth
    return net.b(x), 3


@forward
def numbers_in_both_programs(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    scale = h.std().item()
    h = (h / scale).tanh()
    return net.b(h - h.mean().item()) * scale


@forward
def windows_on_what_was_read(net: Net, x: Tensor) -> tuple[Tensor, ...]:
    h = net.a(x).tanh()
    assert h.sum().item() < 1000
    return h[:2], h[2:5], h.t(), net.b(h)


@forward
def written_after_the_read(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.a(x) + 1
    assert h.sum().item() < 1000
    h += 1
    h[0] = 3
    return h, h[1]


@forward
def state_before_the_read(net: Net, x: Tensor) -> Tensor:
    net.seen.mul_(0.9).add_(x.detach().mean(0) * 0.1)
    h = net.a(x).tanh()
    assert h.sum().item() < 1000
    return net.b(h) * net.seen


@forward
def counts(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h * torch.bincount(h.argmax(-1), minlength=4) / 12)


@forward
def gradient_penalty(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    y = net.b(h * h.abs().max().item()).tanh()
    return y + torch.autograd.grad(y.sum(), net.a.weight, create_graph=True)[0].norm()


@forward
def a_hook_within(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    h.register_hook(lambda gradient: gradient * 2)
    assert h.sum().item() < 1000
    return net.b(h)


@forward
def waves(net: Net, x: Tensor) -> Tensor:
    window = torch.hann_window(8, device=x.device)
    bins = torch.stft(x.flatten(), 8, 4, window=window, return_complex=True)
    return torch.istft(bins * net.a.weight.mean(), 8, 4, window=window, length=x.numel())


@forward
def rows_of_a_mask(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h[h[:, 0] > 0])


@forward
def rows_written_back(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    mask = h[:, 0] > 0
    made = torch.zeros_like(h)
    made[mask] = net.b(h[mask])
    return made


SIZES_VARY = {"rows_of_a_mask", "rows_written_back"}


def _played(net: Any, device: str, module: nn.Module, calls: int) -> list[Any]:
    found = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for number in range(calls):
        x = data(device, 12, 4, seed=number, grad=True)
        results = net(x)
        results = results if isinstance(results, tuple) else (results,)
        optimizer.zero_grad()
        sum(result.square().sum() for result in results if isinstance(result, Tensor)).backward()  # type: ignore[union-attr]
        optimizer.step()
        state = [*module.parameters(), *module.buffers()]
        found.append([v.detach().cpu().clone() if isinstance(v, Tensor) else v for v in (*results, x.grad, *state)])
    return found


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("name", FORWARDS)
def test_values_gradients_and_state_are_eagers(name: str, device: str) -> None:
    eager, net = Net(FORWARDS[name]), Net(FORWARDS[name]).to(device)
    run = torchlazy.compile(net)
    calls = 2 * CALLS if name in SIZES_VARY else CALLS
    have, want = _played(run, device, net, calls), _played(eager, "cpu", eager, calls)
    for number, pair in enumerate(zip(have, want, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"call {n}: {text}")
    report = run.report()
    assert report.captures <= calls // 2 and report.replays >= 1 and not report.verified and not report.alarm, str(
        report
    )


def test_gradients_of_gradients_of_a_replay_come_from_the_call_run_again() -> None:
    net = Net(FORWARDS["a_branch"])
    run = torchlazy.compile(net, audit=False)
    for seed in range(3):
        x = data("cpu", 12, 4, seed=seed)
        run(x).sum().backward()
    first = [torch.autograd.grad(f(x).square().sum(), net.a.weight, create_graph=True)[0] for f in (run, net)]
    second = [torch.autograd.grad(one.square().sum(), net.b.weight)[0] for one in first]
    torch.testing.assert_close(*first)
    torch.testing.assert_close(*second)


def test_a_program_raises_the_versions_of_what_it_writes_and_not_later() -> None:
    net = Net(FORWARDS["state_before_the_read"])
    run = torchlazy.compile(net, audit=False)
    for seed in range(4):
        x = data("cpu", 12, 4, seed=seed)
        before = net.seen._version
        y = run(x)
        assert net.seen._version > before
        y.sum().backward()  # what it holds of the state was not written since
    assert run.report().replays >= 2
    y = run(x)
    net.seen.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def _dropped(w: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda z: F.dropout(z * 2, 0.5), w, use_reentrant=reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_numbers_again_behind_lazy_mode(reentrant: bool) -> None:
    w = torch.ones(64, requires_grad=True)
    with torchlazy.lazy_mode():
        y = _dropped(w, reentrant)
    y.sum().backward()
    torch.testing.assert_close(w.grad, y.detach())


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.usefixtures("recorded_in_python")
def test_a_checkpoint_draws_the_same_numbers_again_in_replays(device: str, reads: bool) -> None:
    def call(w: Tensor) -> Tensor:
        y = _dropped(w, False)
        return y if not reads or y.sum().item() > 1000 else y * 1

    run = torchlazy.compile(call)
    seen = []
    torch.manual_seed(0)
    for _ in range(6):
        w = torch.ones(64, device=device).requires_grad_()
        y = run(w)
        y.sum().backward()
        torch.testing.assert_close(w.grad, y.detach())
        seen.append((y.detach().cpu(), torch.get_rng_state()))
    assert run.report().replays >= 1 and not run.report().verified, run.report()
    torch.manual_seed(0)
    for y, state in seen:
        with torchlazy.lazy_mode() if device == "cpu" else torch.device(device):
            again = call(torch.ones(64, device=device))
        torch.testing.assert_close(again.cpu(), y)
        assert torch.equal(torch.get_rng_state(), state)
