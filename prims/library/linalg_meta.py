"""Metadata rules of complex numbers, Fourier transforms, linear algebra and collectives.

Invariant: as in `prims/library/meta.py`; matrices are the last two dimensions, LAPACK's results lie column-major.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torchlazy.prims.library import math_attrs as la
from torchlazy.prims.library.meta import Metas, Shape, column_major, is_floating, kept, need, need_one_dtype, real_dtype
from torchlazy.prims.meta import Dim, TensorMeta
from torchlazy.prims.meta_rules import like, make

# --- complex numbers and Fourier transforms ---


def complex_of(attrs: Any, real: TensorMeta, imaginary: TensorMeta) -> TensorMeta:
    """Two real operands of one shape -> complex."""
    is_floating(real)
    need_one_dtype(real, imaginary)
    need(real.shape == imaginary.shape, f"shapes {real.shape} and {imaginary.shape} differ; broadcast them first")
    return kept(real, real.dtype.to_complex())


def view_as_real(attrs: Any, x: TensorMeta) -> TensorMeta:
    """complex[...] -> real[..., 2]: real and imaginary part."""
    need(x.dtype.is_complex, f"the operand must be complex, not {x.dtype}")
    strides = tuple(2 * stride for stride in x.strides)
    return TensorMeta((*x.shape, 2), x.dtype.to_real(), (*strides, 1), x.device)


def view_as_complex(attrs: Any, x: TensorMeta) -> TensorMeta:
    """real[..., 2] -> complex[...]."""
    need(x.rank > 0 and x.shape[-1] == 2, f"the last size of {x} must be 2")
    strides = tuple(stride // 2 for stride in x.strides[:-1])
    return TensorMeta(x.shape[:-1], x.dtype.to_complex(), strides, x.device)


def fft_c2c(attrs: la.FftC2cAttrs, x: TensorMeta) -> TensorMeta:
    """complex -> complex, shape kept."""
    return like(x)


def fft_r2c(attrs: la.FftR2cAttrs, x: TensorMeta) -> TensorMeta:
    """real -> complex; onesided leaves n // 2 + 1 of the last axis's n elements."""
    shape = list(x.shape)
    if attrs.onesided:
        shape[attrs.dim[-1]] = shape[attrs.dim[-1]] // 2 + 1
    return like(x, tuple(shape), x.dtype.to_complex())


def fft_c2r(attrs: la.FftC2rAttrs, x: TensorMeta) -> TensorMeta:
    """complex -> real, with the last axis's size as told."""
    shape = list(x.shape)
    shape[attrs.dim[-1]] = attrs.last_dim_size
    return like(x, tuple(shape), real_dtype(x.dtype))


# --- linear algebra: [*batch, n, m] ---


def _square(x: TensorMeta) -> tuple[Shape, Dim]:
    need(x.rank >= 2, f"{x} is no matrix")
    need(x.shape[-1] == x.shape[-2], f"the matrices of {x} are not square")
    return x.shape[:-2], x.shape[-1]


def _info(x: TensorMeta) -> TensorMeta:
    return like(x, x.shape[:-2], torch.int32)


def _smaller(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if a == b:
        return a
    return sympy.Min(a, b)


def cholesky_ex(attrs: la.CholeskyAttrs, x: TensorMeta) -> Metas:
    """The factor, and where it failed."""
    _square(x)
    return column_major(like(x)), _info(x)


def square_row_major(attrs: Any, x: TensorMeta) -> TensorMeta:
    """A square matrix in, one of the same size out."""
    _square(x)
    return like(x)


def square_column_major(attrs: Any, x: TensorMeta) -> TensorMeta:
    """A square matrix in, one of the same size out, column-major."""
    _square(x)
    return column_major(like(x))


def inverse_ex(attrs: la.CheckErrorsAttrs, x: TensorMeta) -> Metas:
    """The inverse, and where it failed."""
    _square(x)
    return column_major(like(x)), _info(x)


def eig(attrs: Any, x: TensorMeta) -> Metas:
    """Complex eigenvalues and eigenvectors."""
    batch, n = _square(x)
    dtype = x.dtype if x.dtype.is_complex else x.dtype.to_complex()
    return like(x, (*batch, n), dtype), column_major(like(x, dtype=dtype))


def eigvals(attrs: Any, x: TensorMeta) -> TensorMeta:
    """Complex eigenvalues."""
    batch, n = _square(x)
    return like(x, (*batch, n), x.dtype if x.dtype.is_complex else x.dtype.to_complex())


def eigh(attrs: la.EighAttrs, x: TensorMeta) -> Metas:
    """Real eigenvalues, and eigenvectors (none: size 0)."""
    batch, n = _square(x)
    values = like(x, (*batch, n), real_dtype(x.dtype))
    return values, column_major(like(x)) if attrs.compute_v else like(x, (0,))


def svd(attrs: la.SvdAttrs, x: TensorMeta) -> Metas:
    """U, singular values, V^H; without vectors the first and last have size 0."""
    *batch, n, m = x.shape
    k = _smaller(n, m)
    values = like(x, (*batch, k), real_dtype(x.dtype))
    if not attrs.compute_uv:
        return like(x, (0,)), values, like(x, (0,))
    left = like(x, (*batch, n, n if attrs.full_matrices else k))
    right = like(x, (*batch, m if attrs.full_matrices else k, m))
    return column_major(left), values, column_major(right)


def qr(attrs: la.QrAttrs, x: TensorMeta) -> Metas:
    """Q and R; mode r has no Q (size 0)."""
    *batch, n, m = x.shape
    k = n if attrs.mode == "complete" else _smaller(n, m)
    q = like(x, (0,)) if attrs.mode == "r" else column_major(like(x, (*batch, n, k)))
    return q, column_major(like(x, (*batch, k, m)))


def lu(attrs: la.PivotAttrs, x: TensorMeta) -> Metas:
    """P, L and U."""
    *batch, n, m = x.shape
    k = _smaller(n, m)
    p = like(x, (*batch, n, n)) if attrs.pivot else like(x, (0,))
    return p, like(x, (*batch, n, k)), like(x, (*batch, k, m))


def lu_factor_ex(attrs: la.PivotCheckAttrs, x: TensorMeta) -> Metas:
    """L and U in one matrix, int32 pivots, and where it failed."""
    *batch, n, m = x.shape
    return column_major(like(x)), like(x, (*batch, _smaller(n, m)), torch.int32), _info(x)


def lu_solve(attrs: la.LuSolveAttrs, lu_: TensorMeta, pivots: TensorMeta, b: TensorMeta) -> TensorMeta:
    """The solution, in the shape of the right side."""
    return column_major(like(b)) if attrs.left else like(b)


def lu_unpack(attrs: la.LuUnpackAttrs, data: TensorMeta, pivots: TensorMeta) -> Metas:
    """P, L and U; what is not asked for has size 0."""
    *batch, n, m = data.shape
    k = _smaller(n, m)
    empty = like(data, (0,))
    p = like(data, (*batch, n, n)) if attrs.unpack_pivots else empty
    if not attrs.unpack_data:
        return p, empty, empty
    return p, like(data, (*batch, n, k)), like(data, (*batch, k, m))


def solve_ex(attrs: la.SolveAttrs, a: TensorMeta, b: TensorMeta) -> Metas:
    """The solution, the factors, int32 pivots, and where it failed."""
    batch, n = _square(a)
    lead = like(b)
    solution = column_major(lead) if attrs.left and b.rank >= 2 and b.rank == a.rank else lead
    factors = column_major(like(a))
    return solution, factors, like(a, (*batch, n), torch.int32), _info(a)


def solve_triangular(attrs: la.SolveTriangularAttrs, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """The solution, in the shape of the right side."""
    _square(a)
    return column_major(like(b)) if attrs.left else like(b)


def householder_product(attrs: Any, x: TensorMeta, tau: TensorMeta) -> TensorMeta:
    """Q, in the shape of the reflectors."""
    return column_major(like(x))


def ldl_factor_ex(attrs: la.HermitianCheckAttrs, x: TensorMeta) -> Metas:
    """The factors in one matrix, int32 pivots, and where it failed."""
    batch, n = _square(x)
    return column_major(like(x)), like(x, (*batch, n), torch.int32), _info(x)


def ldl_solve(attrs: la.HermitianAttrs, ld: TensorMeta, pivots: TensorMeta, b: TensorMeta) -> TensorMeta:
    """The solution, in the shape of the right side."""
    return column_major(like(b))


def det(attrs: Any, x: TensorMeta) -> Metas:
    """The determinant, the factors, int32 pivots."""
    batch, n = _square(x)
    return like(x, batch), column_major(like(x)), like(x, (*batch, n), torch.int32)


def slogdet(attrs: Any, x: TensorMeta) -> Metas:
    """The determinant's sign and the logarithm of its absolute value, the factors, int32 pivots."""
    batch, n = _square(x)
    values = like(x, batch), like(x, batch, real_dtype(x.dtype))
    return *values, column_major(like(x)), like(x, (*batch, n), torch.int32)


def geqrf(attrs: Any, x: TensorMeta) -> Metas:
    """Reflectors over R in one matrix, and their factors."""
    *batch, n, m = x.shape
    return column_major(like(x)), like(x, (*batch, _smaller(n, m)))


def ormqr(attrs: la.OrmqrAttrs, x: TensorMeta, tau: TensorMeta, other: TensorMeta) -> TensorMeta:
    """The product, in the shape of the other factor."""
    return column_major(like(other))


def cholesky_solve(attrs: la.UpperAttrs, b: TensorMeta, factor: TensorMeta) -> TensorMeta:
    """The solution, in the shape of the right side."""
    return column_major(like(b))


# --- collectives: every process gives its operand ---


def collective(attrs: Any, x: TensorMeta) -> TensorMeta:
    """Shape and dtype kept."""
    return kept(x)


def all_gather(attrs: la.AllGatherAttrs, x: TensorMeta) -> TensorMeta:
    """Operands of all processes, one after the other along the first axis."""
    return make((x.shape[0] * attrs.group_size, *x.shape[1:]), x.dtype, x.device)


def reduce_scatter(attrs: la.ReduceScatterAttrs, x: TensorMeta) -> TensorMeta:
    """This process's part of the reduced operands, cut along the first axis."""
    return make((x.shape[0] // attrs.group_size, *x.shape[1:]), x.dtype, x.device)


def all_to_all(attrs: la.AllToAllAttrs, x: TensorMeta) -> TensorMeta:
    """The rows that the other processes send."""
    total: Dim = 0
    for size in attrs.output_split_sizes:
        total = total + size
    return make((total, *x.shape[1:]), x.dtype, x.device)
