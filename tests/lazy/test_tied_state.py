"""Modules whose parameters and buffers share memory: trained lazily, under `lazy_mode` and compiled, as eagerly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torchlazy
from torch import Tensor, nn

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("operator_by_operator", "one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's batch norm writes its channels in parallel: statistics that overlap are another each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.a(x).tanh()))  # type: ignore[no-any-return]


def one_buffer(net: Net) -> None:
    net.norm.running_mean = net.norm.running_var


def one_memory(net: Net) -> None:
    net.norm.running_mean.data = net.norm.running_var.data  # type: ignore[union-attr]


def windows_on_one_buffer(net: Net) -> None:
    net.register_buffer("flat", torch.cat([torch.zeros(4), torch.ones(4)]).to(net.a.weight.device))
    net.norm.running_mean, net.norm.running_var = net.flat[:4], net.flat[4:]  # type: ignore[index]


def overlapping_windows(net: Net) -> None:
    net.register_buffer("flat", torch.ones(6).to(net.a.weight.device))
    net.norm.running_mean, net.norm.running_var = net.flat[:4], net.flat[2:]  # type: ignore[index]


def one_parameter(net: Net) -> None:
    net.b.weight = net.a.weight


def data_transposed(net: Net) -> None:
    net.b.weight.data = net.a.weight.data.t()


def windows_on_one_vector(net: Net) -> None:
    flat = torch.arange(40.0).sin().to(net.a.weight.device)
    net.a.weight.data, net.b.weight.data, net.a.bias.data = flat[:16].view(4, 4), flat[16:32].view(4, 4), flat[32:36]


def _trained(tie: Callable[[Net], None], device: str, way: str) -> tuple[list[list[Tensor]], str]:
    net = Net().to(device)
    tie(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=False)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean() + net.a.weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torchlazy.compile(step) if way == "compiled" else step
    found = []
    for number in range(6):
        x = data(device, 8, 4, seed=number)
        with torchlazy.lazy_mode() if way == "mode" else contextlib.nullcontext():
            loss = run(x)
        found.append([value.detach().cpu().clone() for value in (loss, *net.parameters(), *net.buffers())])
    if way == "compiled":
        report = run.report()  # type: ignore[attr-defined]
        assert tie is overlapping_windows or (report.replays and report.verified <= 1 and not report.alarm), report
    return found, way


@pytest.mark.parametrize("device, way", [("lazy", ""), ("cpu", "mode"), ("cpu", "compiled"), ("lazy", "compiled")])
@pytest.mark.parametrize(
    "tie",
    [one_buffer, one_memory, windows_on_one_buffer, overlapping_windows, one_parameter, data_transposed,
     windows_on_one_vector],
)  # fmt: skip
def test_training_is_eagers(tie: Callable[[Net], None], device: str, way: str) -> None:
    have, _ = _trained(tie, device, way)
    want, _ = _trained(tie, "cpu", "")
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
