"""Windows on memory: what a chain of views makes is a box, others stay primitives; all agree with ATen."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torchlazy.prims import ops
from torchlazy.prims.decompose import decompose
from torchlazy.tests.prims.graphs import aten_graph, check

aten = torch.ops.aten


def random_view(x: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """A few random views of x."""
    for _ in range(chance.randint(1, 4)):
        kind = chance.choice(("transpose", "slice", "select", "unsqueeze", "flatten", "split", "expand"))
        axis = chance.randrange(x.dim()) if x.dim() else 0
        if kind == "transpose" and x.dim() > 1:
            x = x.transpose(axis, chance.randrange(x.dim()))
        elif kind == "slice" and x.dim():
            start = chance.randrange(x.shape[axis])
            stop = chance.randint(start + 1, x.shape[axis])
            x = x[(slice(None),) * axis + (slice(start, stop, chance.choice((1, 1, 2))),)]
        elif kind == "select" and x.dim():
            x = x.select(axis, chance.randrange(x.shape[axis]))
        elif kind == "unsqueeze":
            x = x.unsqueeze(axis)
        elif kind == "flatten" and x.is_contiguous():
            x = x.view(-1)
        elif kind == "split" and x.dim() and x.shape[axis] % 2 == 0:
            x = x.unflatten(axis, (2, -1))
        elif kind == "expand" and x.dim() and x.shape[axis] == 1:
            x = x.expand([2 if i == axis else -1 for i in range(x.dim())])
    return x


@pytest.mark.parametrize("seed", range(60))
def test_windows_of_views(seed: int) -> None:
    chance = random.Random(seed)
    sizes = (4, 3, 6, 2) if seed % 2 else (5, 3, 7, 2)
    base = torch.arange(math.prod(sizes) * 1.0).reshape(sizes)
    if seed % 3 == 0:
        base = base.permute(chance.sample(range(4), 4))
    window = random_view(base, chance)
    geometry = (list(window.shape), list(window.stride()), window.storage_offset())
    check(aten.as_strided.default, base, *geometry)
    if 0 not in window.stride():
        src = -torch.arange(window.numel() * 1.0).reshape(window.shape)
        check(aten.as_strided_scatter.default, base, src, *geometry)


@pytest.mark.parametrize("seed", range(60))
def test_any_windows(seed: int) -> None:
    chance = random.Random(seed)
    base = torch.arange(4 * 3 * 5 * 1.0).reshape(4, 3, 5)
    shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    strides = [chance.choice((0, 1, 1, 2, 3, 4, 5, 10, 15)) for _ in shape]
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if reach < base.numel():
        check(aten.as_strided.default, base, shape, strides, chance.randrange(base.numel() - reach))


def prims_of(x: torch.Tensor, window: torch.Tensor) -> list[object]:
    graph, _, _ = aten_graph(
        aten.as_strided.default, x, list(window.shape), list(window.stride()), window.storage_offset()
    )
    return [node.target for node in decompose(graph, strict=True).nodes if node.op == "call_function"]


def test_usual_views_need_no_memory() -> None:
    x = torch.zeros(4, 6, 8)
    assert prims_of(x, x.permute(2, 0, 1)) == [ops.permute]
    assert prims_of(x, x.view(-1)) == [ops.reshape]
    for window in (x[1], x[:, 2:4], x[:, :, ::2], x[1:3, 4].t(), x.unsqueeze(1).expand(4, 5, 6, 8), x[:, 1::3, ::3]):
        assert ops.as_strided not in prims_of(x, window)
    odd = torch.zeros(5, 7, 3)
    for window in (odd[::2], odd[:, ::2], odd[:, :, ::2], odd[1::2, 1::2, 1::2], odd[1:4, 2:5].transpose(0, 2)):
        assert ops.as_strided not in prims_of(odd, window)
    assert prims_of(x, x.unfold(2, 3, 1)) == [ops.as_strided]
