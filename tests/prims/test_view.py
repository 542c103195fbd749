"""Rules of views, joins, partial writes and creation against ATen on CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torchlazy.tests.prims.graphs import Runtime, aten_graph, check, run_decomposed

aten = torch.ops.aten
X = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
EMPTY = torch.zeros(2, 0, 3)
SCALAR = torch.tensor(3.0)


def test_other_sizes() -> None:
    check(aten.view.default, X, [6, -1])
    check(aten.view.default, EMPTY, [0, 6])
    check(aten._unsafe_view.default, X, [120])
    check(aten.view.default, SCALAR, [1, 1])
    check(aten.unsqueeze.default, X, -2)
    check(aten.unsqueeze.default, SCALAR, 0)
    y = X[:1, :, :1]
    for overload, args in ((aten.squeeze.default, ()), (aten.squeeze.dim, (2,)), (aten.squeeze.dims, ([0, 1, 2],))):
        check(overload, y, *args)
    check(aten.expand.default, y, [4, -1, 7, 5])
    check(aten.expand.default, X, [2, 2, 3, 4, 5])
    check(aten.expand.default, SCALAR, [2, 3])
    check(aten.view.dtype, X, torch.int32)
    check(aten.view.dtype, X, torch.int16, allow_extern=True)


def test_orders_of_axes() -> None:
    check(aten.permute.default, X, [2, -1, 0, 1])
    check(aten.transpose.int, X, -1, 1)
    check(aten.transpose.int, SCALAR, 0, -1)
    check(aten.t.default, X[0, 0])
    check(aten.t.default, X[0, 0, 0])
    check(aten.flip.default, X, [0, -1])
    check(aten.flip.default, X, [])
    for k in range(-1, 4):
        check(aten.rot90.default, X, k, [1, -1])


def test_parts() -> None:
    for dim, index in itertools.product((0, -1, 2), (0, 1, -2)):
        check(aten.select.int, X, dim, index)
    for start, end, step in (
        (0, 9223372036854775807, 1),
        (1, -1, 2),
        (None, None, 3),
        (-3, None, 1),
        (3, 1, 1),
        (-9, 9, 2),
    ):
        check(aten.slice.Tensor, X, -1, start, end, step)
        check(aten.slice.Tensor, EMPTY, 1, start, end, step)
    check(aten.split.Tensor, X, 2, -1)
    check(aten.split_with_sizes.default, X, [1, 0, 2], 1)
    check(aten.unbind.int, X, 2)
    for offset, (dim1, dim2) in itertools.product((0, 1, -1, 3, -2, 9), ((0, 1), (-1, 1), (2, 3))):
        check(aten.diagonal.default, X, offset, dim1, dim2)


def test_windows_on_memory() -> None:
    check(aten.as_strided.default, X, [3, 2], [1, 7])
    check(aten.as_strided.default, X, [3, 2], [5, 0], 4)
    check(aten.as_strided.default, X, [2, 3, 4, 5], [60, 20, 5, 1])
    check(aten.unfold.default, X, 2, 3, 1)
    check(aten.unfold.default, X.transpose(1, 3), 1, 2, 2)
    check(aten.unfold.default, torch.arange(7.0), 0, 3, 2)
    check(aten.as_strided_scatter.default, X, torch.ones(3, 2), [3, 2], [1, 7])
    check(aten.as_strided_scatter.default, X, torch.ones(3, 2), [3, 2], [1, 7], 5)


def test_joins() -> None:
    check(aten.cat.default, [X, X * 2, X[:, :1]], 1)
    check(aten.cat.default, [X.half(), X.double(), X.long()], -1)
    check(aten.cat.default, [torch.zeros(0), X], 0)
    check(aten.cat.default, [torch.zeros(0), torch.zeros(0)], 0)
    check(aten.cat.default, [torch.arange(3), torch.zeros(0), torch.arange(2)], 0)
    check(aten.stack.default, [X, X + 1], -1)
    check(aten.stack.default, [SCALAR], 0)
    check(aten.repeat.default, X, [2, 1, 3, 1, 2])
    check(aten.repeat.default, X[0, 0], [0, 2])
    check(aten.repeat.default, SCALAR, [2, 3])
    check(aten.roll.default, X, [1, -2], [0, -1])
    check(aten.roll.default, X, [7])
    check(aten.roll.default, X, [5], [3])
    check(aten.roll.default, EMPTY, [5], [0])


def test_padding_and_masks() -> None:
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        x = X.to(dtype)
        check(aten.constant_pad_nd.default, x, [1, 2], 1)
        check(aten.constant_pad_nd.default, x, [-1, 2, 0, -1], 0)
        check(aten.constant_pad_nd.default, x, [-1, -2])
        for diagonal in (0, 2, -1):
            check(aten.tril.default, x, diagonal)
            check(aten.triu.default, x, diagonal)
    check(aten.constant_pad_nd.default, X, [0, 3], Runtime(-1.5))


@pytest.mark.parametrize("dtype", (torch.float32, torch.int64))
def test_parts_replaced(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    for start, end, step in ((1, 4, 1), (0, 5, 2), (None, None, 1), (-2, None, 1), (2, 2, 1)):
        check(aten.slice_scatter.default, x, torch.ones_like(x[..., slice(start, end, step)]), -1, start, end, step)
    check(aten.select_scatter.default, x, torch.ones_like(x[:, :, 1]), 2, -3)
    for offset, (dim1, dim2) in itertools.product((0, 1, -1, 3), ((0, 1), (-1, 1), (2, 3))):
        src = (
            torch.arange(x.diagonal(offset, dim1, dim2).numel()).to(dtype).reshape(x.diagonal(offset, dim1, dim2).shape)
        )
        check(aten.diagonal_scatter.default, x, src, offset, dim1, dim2)
        check(aten.diagonal_backward.default, src, [2, 3, 4, 5], offset, dim1, dim2)
    check(aten.diag_embed.default, x[0, 0], 1, 0, 2)
    for start, end, step in ((1, 4, 1), (0, 5, 2), (0, 9223372036854775807, 1)):
        check(aten.slice_backward.default, x[..., slice(start, end, step)].clone(), [2, 3, 4, 5], 3, start, end, step)
    check(aten.select_backward.default, x[:, 1].clone(), [2, 3, 4, 5], 1, -2)
    check(aten.select_backward.default, torch.tensor(2).to(dtype), [4], 0, 1)


def test_constants() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        check(aten.zeros.default, [2, 3], dtype=dtype)
        check(aten.ones.default, [2, 3], dtype=dtype)
        check(aten.full.default, [2, 0], 3, dtype=dtype)
        check(aten.full_like.default, X.transpose(0, 1), 1, dtype=dtype)
        check(aten.new_full.default, X, [3], 1.7, dtype=dtype)
        check(aten.new_zeros.default, X, [3], dtype=dtype)
        check(aten.eye.default, 3, dtype=dtype)
        check(aten.eye.m, 3, 5, dtype=dtype)
    check(aten.full.default, [2], True)
    check(aten.full.default, [2], Runtime(2.5))
    check(aten.ones_like.default, X, memory_format=torch.channels_last)
    check(aten.scalar_tensor.default, 2.5, dtype=torch.float64)
    check(aten.scalar_tensor.default, Runtime(3))
    graph, inputs, expected = aten_graph(aten.empty_strided.default, [2, 3], [1, 2])
    (actual,) = run_decomposed(graph, inputs)
    assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_sequences() -> None:
    check(aten.arange.default, 7)
    check(aten.arange.default, 5.5)
    check(aten.arange.default, 5, dtype=torch.float16)
    check(aten.arange.start, 3, 9)
    check(aten.arange.start_step, 10, -5, -3)
    check(aten.arange.start_step, 0.1, 100.0, 0.1)  # float32 in ATen's vector loop, float64 here
    check(aten.arange.start_step, 0.1, 2.0, 0.1, dtype=torch.float64)
    check(aten.arange.default, 0)
    for steps in (0, 1, 2, 7, 100):
        check(aten.linspace.default, -1.3, 2.9, steps)
        check(aten.linspace.default, -1, 2, steps, dtype=torch.float64)
    check(aten.linspace.default, 0, 9, 4, dtype=torch.int64, allow_extern=True)


def test_blocks_along_the_diagonal_and_chunks() -> None:
    check(aten.block_diag.default, [torch.randn(2, 3), torch.randn(1, 2), torch.randn(4), torch.tensor(2.0)])
    check(aten.block_diag.default, [torch.randn(2, 3)])
    check(aten.block_diag.default, [torch.randn(2, 3), torch.randn(0, 2)])
    check(aten.block_diag.default, [torch.ones(2, 2, dtype=torch.int64), torch.randn(1, 1)])
    check(aten._chunk_cat.default, [torch.randn(5, 3), torch.randn(4, 2), torch.randn(2)], 0, 2)
    check(aten._chunk_cat.default, [torch.randn(1, 2, 3), torch.randn(1, 2, 4)], -1, 5)
