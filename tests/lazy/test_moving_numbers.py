"""Numbers that are others at each call: after the second value nothing is compiled, and a compiled call is captured
again only until the number is known to move.

Invariant: each program gives what it gives eagerly on the CPU, on the lazy device, in `lazy_mode`, and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("compiled")
CALLS = 7
Play = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]  # a function, and the arguments of call number i
Make = Callable[[str], Play]


def _of(function: Callable[..., Any], value: Callable[[int], Any], *shape: int) -> Make:
    """A function of a tensor and the number."""
    return lambda device: (function, lambda i: (data(device, *(shape or (6, 4)), seed=i), value(i)))


def _trained(function: Callable[..., Any], value: Callable[[int], Any], *shape: int) -> Make:
    """The gradient of a function of a tensor and the number, by a backward inside of the call."""

    def step(x: Tensor, number: Any) -> Tensor | None:
        x = x.requires_grad_()
        function(x, number).sum().backward()
        return x.grad

    return _of(step, value, *shape)


def _dropped(x: Tensor, p: float) -> Tensor:
    """1 where what is kept is scaled as it should be."""
    kept = F.dropout(x * 0 + 1, p, True)
    return ((kept == 0) | ((kept * (1 - p) - 1).abs() < 1e-5)).all()


def _labels(device: str) -> Tensor:
    return (torch.arange(6) % 4).to(device)


def _shares(i: int) -> float:
    return 0.11 + 0.083 * i  # never a default: torch leaves those out


SMALL: dict[str, Make] = {
    "p of a dropout": _of(_dropped, _shares),
    "p of a dropout, trained": _trained(lambda x, p: _dropped(x, p) + (F.dropout(x, p, True) * 0).sum(), _shares),
    "eps of a layer norm": _of(lambda x, v: F.layer_norm(x, (4,), eps=v), _shares),
    "eps of a layer norm, trained": _trained(lambda x, v: F.layer_norm(x, (4,), eps=v) ** 2, _shares),
    "eps of a group norm": _of(lambda x, v: F.group_norm(x, 2, eps=v), _shares),
    "eps of an rms norm": _of(lambda x, v: F.rms_norm(x, (4,), eps=v), _shares),
    "eps of normalize": _of(lambda x, v: F.normalize(x, eps=v), _shares),
    "slope": _of(F.leaky_relu, _shares),
    "slope, trained": _trained(F.leaky_relu, _shares),
    "alpha of elu, trained": _trained(F.elu, _shares),
    "threshold, trained": _trained(lambda x, v: F.threshold(x, v, 0.0), _shares),
    "hardtanh, trained": _trained(lambda x, v: F.hardtanh(x, -v, v), _shares),
    "beta of softplus, trained": _trained(F.softplus, _shares),
    "softshrink, trained": _trained(F.softshrink, _shares),
    "delta of a loss": _of(lambda x, v: F.huber_loss(x, x * 0, delta=v), _shares),
    "delta of a loss, trained": _trained(lambda x, v: F.huber_loss(x, x.detach() * 0, delta=v), _shares),
    "beta of a loss, trained": _trained(lambda x, v: F.smooth_l1_loss(x, x.detach() * 0, beta=v), _shares),
    "two deltas, trained": _trained(
        lambda x, v: F.huber_loss(x, x.detach() * 0, delta=v) + 2 * F.huber_loss(x, x.detach() + 1, delta=0.276),
        _shares,
    ),
    "margin": _of(lambda x, v: F.margin_ranking_loss(x, -x, torch.ones_like(x), margin=v), _shares),
    "compared with": _of(lambda x, v: (x > v).float() + (x <= -v).float(), _shares),
    "where": _of(lambda x, v: torch.where(x > 0, x, v), _shares),
    "filled where masked": _of(lambda x, v: x.masked_fill(x > 0, v), _shares),
    "filled where masked, trained": _trained(lambda x, v: x.masked_fill(x > 0, v) ** 2, _shares),
    "exponent": _of(lambda x, v: x.abs() ** v, _shares),
    "exponent, trained": _trained(lambda x, v: (x.abs() + 0.1) ** v, _shares),
    "exponent of one number": _of(lambda x, v: x.abs().sum().pow(v), _shares),
    "base": _of(lambda x, v: v**x, _shares),
    "base, trained": _trained(lambda x, v: torch.pow(v, x), _shares),
    "temperature": _of(lambda x, v: torch.softmax(x / v, -1), _shares),
    "temperature, trained": _trained(lambda x, v: torch.softmax(x / v, -1) ** 2, _shares),
    "alpha and beta of addmm": _of(lambda x, v: torch.addmm(x, x, x[:4], alpha=v, beta=1 - v), _shares),
    "scale of attention": _of(lambda x, v: F.scaled_dot_product_attention(x, x, x, scale=v), _shares, 2, 2, 4, 8),
    "scale of attention, trained": _trained(
        lambda x, v: F.scaled_dot_product_attention(x, x, x, scale=v) ** 2, _shares, 2, 2, 4, 8
    ),
    "std of noise": _of(lambda x, v: torch.randn_like(x).mul(v).abs().le(9 * v).all() * x, _shares),
    "p of a coin": _of(lambda x, v: torch.empty_like(x).bernoulli_(v).le(1).all() * x, _shares),
    "range": _of(lambda x, v: torch.empty_like(x).uniform_(0, v).le(v).all() * x, _shares),
    "end of a line": _of(lambda x, v: torch.linspace(0, v, 4, device=x.device) + x, _shares),
    "smoothed labels": _of(lambda x, v: F.cross_entropy(x, _labels(x.device.type), label_smoothing=v), _shares),
    "smoothed labels, trained": _trained(
        lambda x, v: F.cross_entropy(x, _labels(x.device.type), label_smoothing=v), _shares
    ),
    "weight by a warm-up": _of(lambda x, i: x * min(1.0, (i + 1) / 4), lambda i: i + 2),
    "weight by a cosine": _of(lambda x, i: x * (0.5 + 0.5 * math.cos(math.pi * i / 20)), lambda i: i),
    "begin of a slice": _of(lambda x, i: x[i : i + 4].sum(0), lambda i: i + 2, 30, 4),
    "end of a slice": _of(lambda x, i: x[:i].sum(0), lambda i: i + 2, 30, 4),
    "row": _of(lambda x, i: x[i] * 2, lambda i: i + 2, 30, 4),
    "written row": _of(lambda x, i: x.clone().index_fill_(0, torch.tensor([1]).to(x.device), 3)[i], lambda i: i + 2),
    "an item as factor": _of(lambda x, _: x * x.sum().item(), lambda i: None),
}
SMALL["written row"] = _of(lambda x, i: _with_row(x, i), lambda i: i + 2, 30, 4)


def _with_row(x: Tensor, row: int) -> Tensor:
    made = x.clone()
    made[row] = 1.0
    return made


def _optimized(kind: type[torch.optim.Optimizer], name: str, value: Callable[[int], Any], **options: Any) -> Make:
    """A training step with a setting of its optimizer that moves; "max norm" and "clip value" are arguments."""

    def make(device: str) -> Play:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]

        def step(x: Tensor, limit: float) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if name == "max norm":
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            if name == "clip value":
                nn.utils.clip_grad_value_(model.parameters(), limit)
            optimizer.step()
            return loss.detach()

        def arguments(i: int) -> tuple[Any, ...]:
            if name in optimizer.param_groups[0]:
                optimizer.param_groups[0][name] = value(i)
            return data(device, 6, 4, seed=i), value(i) if name in ("max norm", "clip value") else 1.0

        return step, arguments

    return make


STEPS: dict[str, Make] = {
    "learning rate": _optimized(torch.optim.AdamW, "lr", lambda i: 0.1 / (i + 1), lr=0.1),
    "warm-up": _optimized(torch.optim.SGD, "lr", lambda i: min(1.0, (i + 1) / 4), lr=0.1),
    "betas": _optimized(torch.optim.Adam, "betas", lambda i: (0.9 - 0.02 * i, 0.99 - 0.01 * i), lr=0.1),
    "eps": _optimized(torch.optim.Adam, "eps", lambda i: 1e-3 * (i + 1), lr=0.1),
    "weight decay": _optimized(torch.optim.AdamW, "weight_decay", lambda i: 0.01 * (i + 1), lr=0.1),
    "momentum": _optimized(torch.optim.SGD, "momentum", lambda i: 0.9 - 0.03 * i, lr=0.1, momentum=0.9),
    "max norm": _optimized(torch.optim.SGD, "max norm", lambda i: 0.1 + 0.1 * i, lr=0.1),
    "clip value": _optimized(torch.optim.SGD, "clip value", lambda i: 0.01 + 0.01 * i, lr=0.1),
}


class Cache(nn.Module):
    """Rows written one after another; the position is a plain int of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.seen = 2, 0
        self.register_buffer("rows", torch.zeros(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.rows[self.position] = x
        self.position += 1
        self.seen += 1
        return self.rows[: self.position].sum(0) + self.seen


class Ring(Cache):
    """The same, from the beginning again after eight rows."""

    def forward(self, x: Tensor) -> Tensor:
        if self.position >= 8:
            self.position = 2
        return super().forward(x) * (2 if self.position % 4 == 3 else 1)


def _kept(kind: type[Cache]) -> Make:
    def make(device: str) -> Play:
        return kind().to(device), lambda i: (data(device, 4, seed=i),)

    return make


def _setting(layer: nn.Module, name: str) -> Make:
    """A layer's own number, set between calls."""

    def make(device: str) -> Play:
        layer.to(device)

        def arguments(i: int) -> tuple[Any, ...]:
            setattr(layer, name, _shares(i))
            return (data(device, 6, 4, seed=i),)

        return (lambda x: layer(x)), arguments

    return make


STATE: dict[str, Make] = {
    "position of a cache": _kept(Cache),
    "eps of a module": _setting(nn.LayerNorm(4), "eps"),
    "eps of a batch norm": _setting(nn.BatchNorm1d(4, affine=False), "eps"),
    "momentum of a batch norm": _setting(nn.BatchNorm1d(4, affine=False), "momentum"),
    "slope of a module": _setting(nn.LeakyReLU(), "negative_slope"),
}
ALL = SMALL | STEPS | STATE


def _played(make: Make, device: str, way: str, calls: int) -> tuple[list[Any], list[int], Any]:
    """The values, how many programs each call compiled, and the compiled callable."""
    torch.manual_seed(1)
    function, arguments = make(device)
    run = torchlazy.compile(function, audit=False) if way == "compile" else function
    values, compiles = [], []
    for i in range(calls):
        given = arguments(i)
        before = torchlazy.metrics()["compiles"]
        if way == "lazy_mode":
            with torchlazy.lazy_mode():
                value = run(*given)
        else:
            value = run(*given)
        values.append(value.detach().cpu().clone())
        torchlazy.flush()
        compiles.append(torchlazy.metrics()["compiles"] - before)
    return values, compiles, run


@pytest.mark.parametrize("way", ["lazy", "lazy_mode", "compile", "compile lazy"])
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_compiled_after_the_first_values(name: str, way: str) -> None:
    with torch.set_grad_enabled(name not in STATE):
        wanted, _, _ = _played(ALL[name], "cpu", "eager", CALLS)
        device = "lazy" if way in ("lazy", "compile lazy") else "cpu"
        found, compiles, run = _played(ALL[name], device, way.split()[0], CALLS)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    first = 4 if name in STEPS or name in STATE else 3  # a step's first call makes the optimizer's state
    assert not any(compiles[first:]), compiles
    if way.startswith("compile"):
        report = run.report()
        assert report.captures <= 4 and report.verified <= (first == 4) and report.replays >= 2, str(report)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_branches_on_a_position_of_the_state_are_noticed(device: str) -> None:
    with torch.no_grad():
        wanted, _, _ = _played(_kept(Ring), "cpu", "eager", 40)
        found, _, run = _played(_kept(Ring), device, "compile", 40)
    torch.testing.assert_close(found, wanted)
    assert run.report().replays >= 20, run.report()


def test_two_equal_positions_are_told_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = 2, 2

        def forward(self, x: Tensor) -> Tensor:
            self.first += 1
            self.second += 2
            return x[self.first] - 2 * x[self.second]

    plain, other = Two(), Two()
    run = torchlazy.compile(other, audit=False)
    for i in range(12):
        plain.first, other.first = 2 + i // 2, 2 + i // 2
        plain.second = other.second = 2 if i == 3 else 2 + i
        x = data("cpu", 40, 3, seed=i)
        torch.testing.assert_close(run(x), plain(x))
        assert (plain.first, plain.second) == (other.first, other.second)
