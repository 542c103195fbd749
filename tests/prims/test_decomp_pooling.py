"""Pooling of fixed and of a given number of windows: values, positions and strides against ATen eager."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import eager
from torchlazy.prims.decompose import decompose
from torchlazy.prims.decomps import cpu_kernels
from torchlazy.prims.meta import meta_of

from tests.prims.graphs import aten_graph, check, externs

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def rules_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that are left to ATen on the CPU are tested there all the same."""
    monkeypatch.setattr(cpu_kernels, "ENABLED", False)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


MAX_2D = [  # kernel, stride, padding, dilation, ceil_mode
    ([2, 2],),
    ([3],),
    ([3, 3], [2, 2], [1, 1]),
    ([3, 2], [2, 1], [1, 0], [1, 2]),
    ([3, 3], [1, 1], [1, 1], [2, 2]),
    ([2, 3], [2, 3], [1, 1], [1, 1], True),
    ([3, 3], [2, 2], [0, 1], [1, 1], True),
    ([2, 2], [3, 3], [0, 0], [1, 1], False),
    ([1, 1], [2, 2]),
    ([5, 5], [1, 1], [2, 2]),
]


def filled(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments, *([[], [0, 0], [1, 1], False][len(arguments) - 1 :]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arguments", MAX_2D)
def test_max_pool2d(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    for x in (sample(2, 3, 8, 7, dtype=dtype), sample(3, 7, 8, dtype=dtype), last(sample(2, 3, 7, 9, dtype=dtype))):
        check(aten.max_pool2d_with_indices.default, x, *arguments)
        values, indices = aten.max_pool2d_with_indices(x, *arguments)
        grad = sample(*values.shape, dtype=dtype, seed=1)
        full = filled(arguments)
        check(aten.max_pool2d_with_indices_backward.default, grad, x, *full, indices, **close(dtype))
        graph, _, _ = aten_graph(aten.max_pool2d_with_indices.default, x, *arguments)
        assert externs(decompose(graph, strict=True)) == []


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8))
def test_max_pool2d_of_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 9, (2, 3, 6, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
    least = torch.full_like(x, torch.iinfo(dtype).min)
    for case in (x, least):
        try:
            aten.max_pool2d_with_indices(case, [3, 3], [2, 2], [1, 1])
        except (RuntimeError, NotImplementedError):
            continue
        check(aten.max_pool2d_with_indices.default, case, [3, 3], [2, 2], [1, 1])


@pytest.mark.parametrize("padding", (0, 1))
def test_max_pool2d_of_odd_numbers(padding: int) -> None:
    """The last NaN of a window names its position; windows of -inf name their first element."""
    x = sample(1, 2, 7, 7)
    x[0, 0, 1:4, 2:5] = NAN
    x[0, 0, 2, 3] = 5.0
    x[0, 1] = -INF
    x[0, 1, 5, 5] = INF
    for case in (x, last(x), x.to(torch.bfloat16)):
        for stride, dilation in ((1, 1), (2, 1), (1, 2)):
            check(aten.max_pool2d_with_indices.default, case, [3, 3], [stride], [padding], [dilation])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_max_pool3d(dtype: torch.dtype) -> None:
    for x in (sample(2, 3, 5, 6, 7, dtype=dtype), sample(3, 5, 6, 7, dtype=dtype), last(sample(1, 3, 5, 6, 7))):
        for arguments in (([2, 2, 2], [2, 2, 2], [0, 0, 0]), ([3, 2, 3], [2, 1, 2], [1, 1, 0]), ([3, 3, 3], [2], [1])):
            check(aten.max_pool3d_with_indices.default, x, *arguments)
            values, indices = aten.max_pool3d_with_indices(x, *arguments)
            rest = ([1, 1, 1], False, indices)
            spread = close(dtype)
            check(aten.max_pool3d_with_indices_backward.default, values, x, *arguments, *rest, **spread)


def test_large_windows_stay_with_aten() -> None:
    x = sample(1, 1, 20, 20)
    graph, _, _ = aten_graph(aten.max_pool2d_with_indices.default, x, [7, 7], [1, 1])
    assert externs(decompose(graph, strict=True)) == ["max_pool2d"]
    graph, _, _ = aten_graph(aten.avg_pool2d.default, x, [7, 7], [1, 1])
    assert externs(decompose(graph, strict=True)) == ["avg_pool2d"]
    check(aten.avg_pool2d.default, x, [10, 10])


AVG_2D = [  # kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
    ([2, 2],),
    ([2],),
    ([2, 3], [2, 3]),
    ([3, 3], [2, 2], [1, 1]),
    ([3, 3], [2, 2], [1, 1], False, False),
    ([3, 2], [2, 2], [1, 1], True),
    ([3, 2], [2, 2], [1, 0], True, False),
    ([2, 2], [3, 3], [0, 0], True, False),
    ([3, 3], [1, 1], [1, 1], False, True, 5),
    ([2, 2], [2, 2], [0, 0], False, True, 3),
    ([4, 6],),
    ([5, 4], [3, 2], [2, 1], True, True),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arguments", AVG_2D)
def test_avg_pool2d(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    for x in (sample(2, 3, 8, 6, dtype=dtype), sample(3, 7, 8, dtype=dtype), last(sample(2, 3, 8, 6, dtype=dtype))):
        check(aten.avg_pool2d.default, x, *arguments, **close(dtype))
        rest = (*arguments, *([[], [0, 0], False, True, None][len(arguments) - 1 :]))
        grad = aten.avg_pool2d(x, *arguments)
        check(aten.avg_pool2d_backward.default, grad, x, *rest, **close(dtype))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(
    "arguments",
    [
        ([2, 2, 2],),
        ([3, 2, 3], [2, 1, 2], [1, 1, 0]),
        ([3, 3, 3], [2, 2, 2], [1, 1, 1], True, False),
        ([2, 2, 2], [2, 2, 2], [0, 0, 0], True, True, 3),
    ],
)
def test_avg_pool3d(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    for x in (sample(2, 3, 5, 6, 7, dtype=dtype), sample(3, 4, 6, 8, dtype=dtype), last(sample(1, 3, 5, 6, 7))):
        check(aten.avg_pool3d.default, x, *arguments, **close(dtype))
        rest = (*arguments, *([[], [0, 0, 0], False, True, None][len(arguments) - 1 :]))
        check(aten.avg_pool3d_backward.default, aten.avg_pool3d(x, *arguments), x, *rest, **close(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", ([4, 3], [1, 1], [8, 2], [5, 4], [3, 7], [11, 9]))
def test_adaptive_pooling(size: list[int], dtype: torch.dtype) -> None:
    for x in (sample(2, 3, 8, 6, dtype=dtype), sample(3, 7, 8, dtype=dtype), last(sample(2, 3, 8, 6, dtype=dtype))):
        check(aten._adaptive_avg_pool2d.default, x, size, **close(dtype))
        grad = aten._adaptive_avg_pool2d(x, size)
        check(aten._adaptive_avg_pool2d_backward.default, grad, x, **close(dtype))
        check(aten.adaptive_max_pool2d.default, x, size)
        values, indices = aten.adaptive_max_pool2d(x, size)
        check(aten.adaptive_max_pool2d_backward.default, values, x, indices, **close(dtype))
        graph, _, _ = aten_graph(aten.adaptive_max_pool2d.default, x, size)
        assert externs(decompose(graph, strict=True)) == []


@pytest.mark.parametrize("size", ([2, 3, 4], [3, 2, 5], [1, 1, 1]))
def test_adaptive_pooling_of_volumes(size: list[int]) -> None:
    for x in (sample(2, 3, 4, 6, 8), sample(3, 5, 6, 7)):
        check(aten._adaptive_avg_pool3d.default, x, size, rtol=1e-5, atol=1e-6)
        check(aten._adaptive_avg_pool3d_backward.default, aten._adaptive_avg_pool3d(x, size), x, rtol=1e-5, atol=1e-6)
        check(aten.adaptive_max_pool3d.default, x, size)
        values, indices = aten.adaptive_max_pool3d(x, size)
        check(aten.adaptive_max_pool3d_backward.default, values, x, indices, rtol=1e-5, atol=1e-6)


def test_adaptive_max_pool_of_odd_numbers() -> None:
    x = sample(1, 2, 7, 7)
    x[0, 0, 1:4, 2:5] = NAN
    x[0, 0, 2, 3] = 5.0
    x[0, 1] = -INF
    for size in ([3, 3], [2, 5], [7, 7], [1, 1]):
        check(aten.adaptive_max_pool2d.default, x, size)


def test_what_the_cpu_leaves_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "ENABLED", True)
    x = sample(1, 2, 7, 7)
    values, indices = aten.max_pool2d_with_indices(x, [3], [2])
    rest = ([3], [2], [0], [1], False, indices)
    graph, _, _ = aten_graph(aten.max_pool2d_with_indices_backward.default, values, x, *rest)
    assert externs(decompose(graph, strict=True)) == ["max_pool2d_backward"]
    graph, _, _ = aten_graph(aten.upsample_bilinear2d.default, x, [9, 9], False)
    assert externs(decompose(graph, strict=True)) == ["resample_linear2d"]
    graph, _, _ = aten_graph(aten.max_pool2d_with_indices.default, x, [3], [2])
    assert externs(decompose(graph, strict=True)) == []


@pytest.mark.parametrize("kind", ["gauss", "odd", "ties"])
@pytest.mark.parametrize("arguments", MAX_2D)
def test_max_pool2d_and_its_backward_in_one_graph(arguments: tuple[Any, ...], kind: str) -> None:
    """The backward looks at the numbers in the windows that forward kept, and at no position."""
    x = sample(2, 3, 9, 11)
    if kind == "odd":
        x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = NAN
        x[0, 0], x[1, 2, 3:] = -INF, -INF
    elif kind == "ties":
        x = x.round()
    full = filled(arguments)
    values, indices = aten.max_pool2d_with_indices(x, *full)
    grad = sample(*values.shape, seed=2)
    wanted = aten.max_pool2d_with_indices_backward(grad, x, *full, indices)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "grad")]
    for node, tensor in zip(nodes, (x, grad), strict=True):
        node.meta["val"] = meta_of(tensor)
    both = graph.call_function(aten.max_pool2d_with_indices.default, (nodes[0], *full))
    both.meta["val"] = (meta_of(values), meta_of(indices))
    parts = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for part, meta in zip(parts, both.meta["val"], strict=True):
        part.meta["val"] = meta
    back = graph.call_function(aten.max_pool2d_with_indices_backward.default, (nodes[1], nodes[0], *full, parts[1]))
    back.meta["val"] = meta_of(wanted)
    graph.output((*parts, back))
    made = decompose(graph)
    found = eager.run(made, [x, grad])
    for a, b in zip(found, (values, indices, wanted), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    has_small_numbers = any(node.meta["val"].dtype == torch.int8 for node in made.nodes if node.op == "call_function")
    assert has_small_numbers
