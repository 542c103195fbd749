"""Small models and helpers that the tests of modules, training and inference share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.lazy.compare import compare, data

Make = Callable[[], nn.Module]
# Moving a module, or autograd's sum of gradients, may write in another way than eager does on the CPU.
LOOSE = ("version", "storage_offset", "requires_grad", "is_leaf")


def built(make: Make, device: str) -> nn.Module:
    """The module that `make` builds, with equal parameters on every device."""
    torch.manual_seed(0)
    return make().to(device)


def mlp(device: str = "cpu") -> nn.Module:
    """Two linear layers with batch norm: parameters, float buffers and an integer buffer."""
    return built(
        lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)), device
    )


def convnet(device: str = "cpu") -> nn.Module:
    """Convolution, batch norm, pooling and a linear head for (n, 1, 8, 8) inputs."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip
    return built(layers, device)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(3))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(codes))


def devices(module: nn.Module) -> set[str]:
    """Device types of the module's parameters and buffers."""
    return {t.device.type for t in (*module.parameters(), *module.buffers())}


def forward_backward(module: nn.Module, *inputs: torch.Tensor) -> Any:
    """The output, the gradients of the inputs and of the parameters, and the buffers afterwards."""
    out = module(*inputs)
    first = out[0] if isinstance(out, tuple) else out
    (first * data(first.device.type, *first.shape, seed=9)).sum().backward()
    gradients = [x.grad for x in inputs if x.requires_grad]
    return out, gradients, {n: p.grad for n, p in module.named_parameters()}, dict(module.named_buffers())


def host(value: Any) -> Any:
    """The same structure with every tensor on the CPU and apart from autograd."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: host(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [host(v) for v in value]
    return value


def same(have: Any, want: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Equal values, shapes and dtypes, wherever they are."""
    compare(host(have), host(want), rtol=rtol, atol=atol, ignore=(*LOOSE, "stride", "is_contiguous"))


def mean_square_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """A training step that makes the model's results smaller; it gives the loss."""

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
