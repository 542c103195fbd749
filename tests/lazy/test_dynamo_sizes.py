"""`torch.compile(backend="torchlazy")` at many sizes, in every mode, and what one call costs beside its programs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torchlazy
from torch import fx, nn
from torch.nn import functional as F
from torchlazy.lazy.dynamo.backend import GraphCall, torchlazy_backend

pytestmark = pytest.mark.usefixtures("fresh_capture")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q = self.q(x).view(b, t, 2, 4).transpose(1, 2)
        mixed = torch.softmax(q @ q.transpose(-1, -2) / 2, -1) @ q
        return self.out(mixed.transpose(1, 2).reshape(b, t, c)).sum(1) / t  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def compiles() -> int:
    return int(torchlazy.metrics()["compiles"])


@pytest.mark.parametrize(("make", "shape"), [(mlp, (8,)), (Attention, (8,))], ids=["mlp", "attention"])
def test_a_new_size_compiles_nothing_after_the_second(
    make: Callable[[], nn.Module], shape: tuple[int, ...], compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchlazy.lazy.dynamo.backend._MAX_KINDS", 4)
    model = make()
    other = copy.deepcopy(model)
    program = torch.compile(model, backend="torchlazy", dynamic=True, fullgraph=True)
    counts = []
    for n in (5, 7, 9, 12, 33, 64, 5):
        x = torch.randn(*((n,) if make is mlp else (2, n)), *shape)
        before = compiles()
        got, want = program(x), other(x)
        got.square().sum().backward()
        want.square().sum().backward()
        counts.append(compiles() - before)
        torch.testing.assert_close(got, want)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
            p.grad = q.grad = None
    assert sum(counts[:2]) <= 4 and not any(counts[2:])  # two halves, for one size and for all


def test_kinds_without_sizes_run_eagerly_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchlazy.lazy.dynamo.backend._MAX_KINDS", 3)
    call = torchlazy_backend(fx.symbolic_trace(lambda x: x.cos().sum(0)), [])
    with pytest.warns(RuntimeWarning, match="called with more than 3 kinds of inputs"):
        for n in range(2, 9):
            x = torch.randn(n, 3)
            torch.testing.assert_close(call(x), x.cos().sum(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.norm(self.conv(x)).relu()
        y = self.norm(y) if twice else y
        return self.head(F.dropout(y.mean((2, 3)), 0.3, self.training))  # type: ignore[no-any-return]


@pytest.mark.parametrize("twice", [False, True])
def test_one_graph_in_every_mode(twice: bool, tier: str) -> None:
    model = Net()
    other = copy.deepcopy(model)
    program = torch.compile(model, backend="torchlazy", fullgraph=True)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return program(x, twice), other(x, twice)

    for turn in range(3):
        x = torch.randn(4, 3, 8, 8)
        model.eval(), other.eval()
        torch.testing.assert_close(*both(x))
        with torch.inference_mode():
            got, want = both(x)
            torch.testing.assert_close(got, want)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = both(x)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
        got, want = both(x)
        got.sum().backward()
        want.sum().backward()
        model.train(), other.train()
        first, second = program(x, twice), program(x, twice)  # the buffers change between the halves of the first
        (first.sum() + second.sum()).backward()
        other(x, twice), other(x, twice)
        for (name, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=f"{name}, turn {turn}")
        assert not torch.equal(first, second)  # dropout draws anew
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = q.grad = None


def test_a_call_asks_little_of_tensors_that_it_knows(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[GraphCall, tuple[Any, ...]]] = []
    original = GraphCall.__call__

    def spied(self: GraphCall, *args: Any) -> Any:
        calls.append((self, args))
        return original(self, *args)

    monkeypatch.setattr(GraphCall, "__call__", spied)
    model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(8, 8), nn.Tanh())])
    program = torch.compile(model, backend="torchlazy")
    for _ in range(3):
        program(torch.randn(4, 8)).sum().backward()
    call, args = calls[-1]
    counted = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        original(call, *args)
    finally:
        sys.setprofile(None)
    # 25 tensors; the program's own calls are among them. 1272 before facts were kept from call to call.
    assert counted < 650, counted


def test_a_tensor_that_changed_behind_the_scenes_is_noticed() -> None:
    model = nn.Linear(3, 3)
    call = torchlazy_backend(fx.symbolic_trace(model), [])
    x = torch.randn(2, 3)
    torch.testing.assert_close(call(x), model(x))
    model.weight.data = torch.randn(3, 3).t()  # other memory, in another order
    torch.testing.assert_close(call(x), model(x))
    model.weight.data = model.bias.data.expand(3, 3)  # it shares memory now
    torch.testing.assert_close(call(x), model(x))
    model.weight.requires_grad_(False)
    call(x).sum().backward()
    assert model.weight.grad is None and model.bias.grad is not None
    assert isinstance(call, GraphCall) and not call.why_eager
