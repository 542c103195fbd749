"""Fused chains of halves: what a comparison sees is rounded as in eager, what smooth operations see is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torchlazy
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.passes.graph_passes import run_passes

from tests.lazy.compare import data


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    kept = torchlazy.config.tiers, torchlazy.config.strict
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    yield
    torchlazy.config.tiers, torchlazy.config.strict = kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_element_equals_the_largest(dtype: torch.dtype) -> None:
    """The gradient of an induced norm divides by the number of rows that attain it: never by zero."""

    def gradient(device: str) -> torch.Tensor:
        x = data(device, 6, 5, dtype=dtype).requires_grad_()
        torch.linalg.matrix_norm(x, 1).backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("lazy"), gradient("cpu"))


def test_overflow_of_a_half_is_infinite() -> None:
    x = torch.full((4,), 300.0, dtype=torch.float16)
    lazy = x.to("lazy")
    assert torch.isinf(lazy * lazy).tolist() == torch.isinf(x * x).tolist() == [True] * 4


def test_floor_sees_the_rounded_value() -> None:
    x = torch.tensor([2.999, 1024.6], dtype=torch.float16)
    y = torch.tensor([1.0, 1.001], dtype=torch.float16)
    assert (x.to("lazy") * y.to("lazy")).floor().tolist() == (x * y).floor().tolist()


def _chain(last: ops.Prim) -> fx.Graph:
    """exp(x) rounded to a half, then `last` of it in float32."""
    graph = fx.Graph()
    half, full = (TensorMeta((8,), dtype, (1,)) for dtype in (torch.float16, torch.float32))

    def node(prim: ops.Prim, *operands: fx.Node, val: TensorMeta, **attrs: object) -> fx.Node:
        made = graph.call_function(prim, operands, attrs)
        made.meta["val"] = val
        return made

    x = graph.placeholder("x")
    x.meta["val"] = full
    rounded = node(ops.convert, node(ops.exp, x, val=full), val=half, dtype=torch.float16)
    wide = node(ops.convert, rounded, val=full, dtype=torch.float32)
    graph.output((node(last, wide, val=full),))
    return graph


@pytest.mark.parametrize(
    ("last", "converts"), [(ops.sin, 0), (ops.floor, 2), (ops.sign, 2)], ids=["sin", "floor", "sign"]
)
def test_only_jumps_keep_the_rounding(last: ops.Prim, converts: int) -> None:
    folded = run_passes(_chain(last), "fused")
    assert sum(node.target is ops.convert for node in folded.nodes) == converts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_that_the_program_writes_rounds(dtype: torch.dtype) -> None:
    """As arithmetic of narrow formats is tried out, in float32."""
    x = torch.linspace(0.9, 3.1, 100)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).to(dtype).float() + 1

    assert torch.equal(rounded(x.to("lazy")).cpu(), rounded(x))
