"""Padded products: the same values, through the compiler, and operands that are padded once."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch import fx
from torchlazy.lazy.plan import pipeline
from torchlazy.prims.passes import pad_products as stage
from torchlazy.prims.verify import PRIMS, verify


@pytest.fixture
def eager_to_pad(monkeypatch):
    """Pad small products on the CPU too."""
    made = []

    def pad(graph):
        padded = stage.pad_products(graph, least_work=1, device="cpu")
        verify(padded, PRIMS)
        made.append(padded)
        return padded

    monkeypatch.setattr(pipeline, "pad_products", pad)
    return made


def _step(device: str, bias: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(13, 16)
    head = torch.nn.Linear(16, 13, bias=bias)
    model = torch.nn.Sequential(embedding, head).to(device)
    tokens = torch.randint(0, 13, (3, 8)).to(device)
    with torch.autocast(device, dtype=dtype):
        logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    loss.backward()
    return [logits.detach().float().cpu(), loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


@pytest.mark.parametrize("bias", [False, True])
def test_training_of_a_head_of_odd_width(eager_to_pad, compiled_at_once, bias):
    wanted = _step("cpu", bias, torch.bfloat16)
    found = _step("lazy", bias, torch.bfloat16)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
    graph = next(g for g in eager_to_pad if any(_name(n) == "mm" for n in g.nodes))
    products = [n for n in graph.nodes if _name(n) in ("mm", "addmm")]
    for product in products:
        assert stage._missing(*(operand.meta["val"] for operand in product.args[-2:])) == (0, 0, 0), product
    for seen in (n for n in graph.nodes if _name(n) == "permute" and _name(n.args[0]) == "pad"):
        assert seen.meta["val"].strides[0] == 1, "read where it lies: row-major strides would cost a transposed copy"
    pads = [n for n in graph.nodes if _name(n) == "pad" and len(n.meta["val"].shape) == 2]
    assert len(pads) == 2, "the weight and the gradient of the logits, once each"
    if bias:
        (gradient,) = (n for n in pads if n.meta["val"].shape[0] == 24)
        windows = [n for n in gradient.users if _name(n) == "slice"]
        assert windows, "the bias' gradient sums what was written for the products"


def test_float32_and_small_products_stay(eager_to_pad, compiled_at_once):
    wanted = _step("cpu", True, torch.float16)
    graph = fx.Graph()
    assert stage.pad_products(graph) is graph
    found = _step("lazy", True, torch.float16)
    torch.testing.assert_close(found[1], wanted[1], rtol=2e-2, atol=2e-3)
    for padded in eager_to_pad:
        assert stage.pad_products(padded, least_work=1, device="cuda") is padded
        assert stage.pad_products(padded, least_work=1 << 32, device="cpu") is padded


@pytest.fixture
def compiled_at_once():
    before = torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store
    torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store = "off", True, "off"
    yield
    torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store = before


def _name(node) -> str:
    return getattr(node.target, "name", "")
