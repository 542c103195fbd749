"""Complex numbers in compiled modules that are trained: `1j * x`, complex parameters, real parts as results.

Invariant: values, strides, gradients and parameters after each call are eager's, and the calls are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("operator_by_operator")

Forward = Callable[["Net", Tensor], Any]
FORWARDS: dict[str, Forward] = {
    "real part": lambda net, x: torch.exp(1j * net.a(x)).real,
    "both parts": lambda net, x: (lambda z: (z.real, z.imag))((2 + 3j) * (net.a(x) + 1j * x)),
    "a parameter": lambda net, x: ((x + 0j) @ net.w).abs(),
    "a divisor": lambda net, x: (1j / (net.a(x) + 2j)).real,
    "a complex result": lambda net, x: net.w * (net.a(x)[:4] + 1j),
    "powers": lambda net, x: ((net.a(x) + 0.5j) ** 2).real + ((net.a(x) + 0.5j) ** (1 + 1j)).imag,
    "phases": lambda net, x: torch.fft.irfft(torch.fft.rfft(x, dim=0) * torch.exp(-2j * net.a.bias), n=12, dim=0),
    "behind a read": lambda net, x: (1j * net.a(x) * net.a(x).abs().max().item()).imag,
}


class Net(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.a = function, nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _played(net: Any, device: str, module: nn.Module) -> list[Any]:
    found = []
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for number in range(5):
        results = net(data(device, 12, 4, seed=number))
        results = results if isinstance(results, tuple) else (results,)
        optimizer.zero_grad()
        sum(result.abs().square().sum() for result in results).backward()
        optimizer.step()
        facts = [(result.stride(), result.storage_offset(), result.is_complex()) for result in results]
        found.append((facts, [v.detach().cpu().clone() for v in (*results, *module.parameters())]))
    return found


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("name", FORWARDS)
def test_values_gradients_and_parameters_are_eagers(name: str, device: str) -> None:
    eager, net = Net(FORWARDS[name]), Net(FORWARDS[name]).to(device)
    run = torchlazy.compile(net)
    have, want = _played(run, device, net), _played(eager, "cpu", eager)
    for number, ((facts, values), (true_facts, true_values)) in enumerate(zip(have, want, strict=True)):
        assert facts == true_facts
        torch.testing.assert_close(values, true_values, rtol=1e-4, atol=1e-5, msg=lambda m, n=number: f"call {n}: {m}")
    report = run.report()
    assert report.replays >= 1 and not report.verified and not report.alarm, str(report)


def test_a_steps_backward_by_an_imaginary_number_is_recorded() -> None:
    x = data("cpu", 4, grad=True)
    with torchlazy.lazy_mode():
        torchlazy.reset_metrics()
        (1j * x).real.sum().backward()
        assert not torchlazy.metrics()["cuts"]
    torch.testing.assert_close(x.grad, torch.zeros(4))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_values_saved_on_the_host_come_back_in_replays(device: str) -> None:
    class Saved(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return torch.tanh(self.a(x).tanh() * x)

    eager, net = Saved(FORWARDS["powers"]), Saved(FORWARDS["powers"]).to(device)
    eager.w.requires_grad_(False), net.w.requires_grad_(False)
    run = torchlazy.compile(net)
    torch.testing.assert_close(_played(run, device, net), _played(eager, "cpu", eager))
    assert run.report().replays and not run.report().verified, run.report()
