"""Our promotion and broadcasting against torch's, over all dtypes and ranks of operands."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from torchlazy.prims import ops
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import ScalarMeta, TensorMeta, contiguous_strides, meta_of
from torchlazy.prims.promotion import broadcast_shapes, result_dtype

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


def test_result_dtype() -> None:
    operands = [torch.zeros(shape, dtype=dtype) for shape in ((2,), ()) for dtype in DTYPES] + [True, 1, 1.5, 1j]
    for a, b in itertools.product(operands, operands):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            continue
        metas = [meta_of(x) if isinstance(x, torch.Tensor) else x for x in (a, b)]
        assert result_dtype(metas) == torch.result_type(a, b), (a, b)


def test_runtime_scalars_promote_as_their_kind() -> None:
    x = meta_of(torch.zeros(2, dtype=torch.int32))
    assert result_dtype([x, ScalarMeta(float)]) == torch.float32
    assert result_dtype([x, ScalarMeta(int)]) == torch.int32
    assert result_dtype([meta_of(torch.zeros(2, dtype=torch.bool)), ScalarMeta(int)]) == torch.int64


def test_three_ranks_of_operands() -> None:
    row, scalar = meta_of(torch.zeros(2, dtype=torch.int64)), meta_of(torch.tensor(1.0, dtype=torch.float16))
    assert result_dtype([row, scalar, 2.5]) == torch.float16
    assert result_dtype([meta_of(torch.tensor(1)), 2.5]) == torch.float32


def test_broadcast_shapes() -> None:
    shapes = [(), (1,), (3,), (2, 3), (2, 1), (4, 1, 3), (0,), (2, 0), (1, 1, 1)]
    for a, b in itertools.product(shapes, shapes):
        try:
            expected = tuple(torch.broadcast_shapes(a, b))
        except RuntimeError:
            with pytest.raises(MetaError):
                broadcast_shapes([a, b])
        else:
            assert broadcast_shapes([a, b]) == expected


def test_metadata_rules_work_on_symbols() -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)

    def value(*shape: sympy.Expr | int) -> TensorMeta:
        return TensorMeta(shape, torch.float32, contiguous_strides(shape))

    x = value(n, m)
    assert contiguous_strides((n, m)) == (m, 1)
    assert ops.add.meta(x, x).shape == (n, m)
    assert ops.sum.meta(x, axes=(1,)).shape == (n,)
    assert ops.reshape.meta(x, shape=(m * n,)).shape == (m * n,)
    assert ops.permute.meta(x, dims=(1, 0)).strides == (n, 1)
    assert ops.expand.meta(value(1, m), shape=(n, m)).shape == (n, m)
    assert ops.cat.meta(x, x, axis=0).shape == (2 * n, m)
    assert ops.pad.meta(x, low=(1, 0), high=(2, 0), value=0).shape == (n + 3, m)
    assert ops.slice.meta(x, starts=(1, 0), stops=(n, m), steps=(1, 1)).shape == (n - 1, m)
    assert ops.index.meta(x, TensorMeta((5,), torch.int64, (1,)), dims=(0,)).shape == (5, m)
    with pytest.raises(MetaError):
        ops.add.meta(x, value(m, n))
