"""Whole training steps: their ATen graphs, decomposed and passed over, give eager's losses and gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call, functionalize, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx
from torchlazy.prims import eager
from torchlazy.prims.builder import Fallback
from torchlazy.prims.decompose import decompose
from torchlazy.prims.meta import meta_of
from torchlazy.prims.passes.graph_passes import run_passes
from torchlazy.prims.verify import ATEN, PRIMS, verify

F = nn.functional


class _Stamp(fx.Interpreter):
    """Runs an ATen graph and notes each node's metadata."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = self._meta(result)
            n.meta["frame"] = "model.py:1"
        return result

    def _meta(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return meta_of(result)
        return None if result is None else tuple(map(self._meta, result))


def trace(step: Callable[..., Any], inputs: list[torch.Tensor]) -> fx.Graph:
    """The functional ATen graph of `step` on flat inputs."""
    module = make_fx(functionalize(step))(*inputs)
    module.graph.eliminate_dead_code()
    assert not [node for node in module.graph.nodes if node.op == "get_attr"]
    _Stamp(module, garbage_collect_values=False).run(*inputs)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is not operator.getitem and not node.users:
            module.graph.erase_node(node)
    return module.graph


def training_step(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Callable[..., Any], Any]:
    """(function of x and the parameters giving the loss and its gradients, the parameters)."""
    named = dict(model.named_parameters())

    def value_of(values: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        return loss(functional_call(model, dict(zip(named, values, strict=True)), (x,)))

    def step(x: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients, value = grad_and_value(value_of)(values, x)
        return (value, *gradients)

    return step, [parameter.detach() for parameter in named.values()]


class Attention(nn.Module):
    """A pre-norm transformer block over embeddings, with explicit attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16), nn.SiLU())
        self.head = nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 2.0
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, -float("inf")).softmax(-1)
        h = h + self.out((weights @ v).transpose(1, 2).flatten(2))
        h = h + self.mlp(self.norm2(h))
        return self.head(h)


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Hardswish(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3),
        nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(72, 5), nn.ELU(), nn.Softplus(),
    )  # fmt: skip


def attention_loss(logits: torch.Tensor) -> torch.Tensor:
    target = torch.arange(logits.shape[0] * logits.shape[1]) % 11
    return F.cross_entropy(logits.flatten(0, 1), target)


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
] = {
    "attention": (Attention, lambda: torch.randint(0, 11, (2, 6)), attention_loss),
    "convnet": (convnet, lambda: torch.randn(2, 3, 10, 10), lambda y: y.square().mean()),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid()),
        lambda: torch.randn(5, 6),
        lambda y: F.huber_loss(y, torch.full_like(y, 0.3)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_training_step(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, sample, loss = MODELS[name]
    model = make().to(dtype)
    step, parameters = training_step(model, loss)
    x = sample()
    inputs = [x.to(dtype) if x.is_floating_point() else x, *parameters]
    try:
        graph = trace(step, inputs)
    except AssertionError:
        pytest.skip("tensor constants in the trace")
    verify(graph, ATEN)
    expected = step(*inputs)
    report: list[Fallback] = []
    prims = decompose(graph, report=report, strict=True)
    allowed = ("aten.convolution", "aten.mm", "aten.bmm", "aten.addmm", "aten.embedding_dense", "aten.index_put")
    assert all(fallback.op.startswith(allowed) for fallback in report), report
    verify(prims, PRIMS)
    for precision in ("eager", "fused"):
        passed = run_passes(prims, precision)  # type: ignore[arg-type]
        verify(passed, PRIMS)
        assert len(passed.nodes) < len(prims.nodes)
        actual = eager.run(passed, inputs)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(actual, expected, **tolerance)
