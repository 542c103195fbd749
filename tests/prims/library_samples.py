"""One or more calls of each primitive that is one ATen call: real operands, and the attributes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

Sample = tuple[list[torch.Tensor], dict[str, Any]]
f32 = torch.float32


def rand(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    """Numbers in (0, 1), the same ones for each shape."""
    seed = sum((i + 1) * size for i, size in enumerate(shape)) + 17
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*shape: int, below: int) -> torch.Tensor:
    """int64 positions below a bound."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(3))


def last(x: torch.Tensor) -> torch.Tensor:
    """Channels innermost."""
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def spd(*shape: int) -> torch.Tensor:
    """Symmetric positive definite matrices."""
    x = rand(*shape)
    return x @ x.mT + torch.eye(shape[-1])


@cache
def samples() -> dict[str, tuple[Sample, ...]]:
    """Of every primitive by name."""
    found: dict[str, list[Sample]] = {}
    for table in (_products, _scans_and_order, _places, _pools, _resampling, _transforms, _linalg, _special, _groups):
        for name, operands, attrs in table():
            found.setdefault(name, []).append((operands, attrs))
    return {name: tuple(rows) for name, rows in found.items()}


Rows = Iterator[tuple[str, list[torch.Tensor], dict[str, Any]]]


def _products() -> Rows:
    a, b, row = rand(3, 4), rand(4, 5), rand(5)
    yield "mm", [a, b], {}
    yield "mm", [rand(4, 3).t(), b], {}
    yield "bmm", [rand(2, 3, 4), rand(2, 4, 5)], {}
    yield "mv", [a, rand(4)], {}
    scale: dict[str, Any] = {"beta": 1, "alpha": 2}
    yield "addmm", [row, a, b], scale
    yield "addmm_activation", [row, a, b], {**scale, "use_gelu": False}
    yield "baddbmm", [rand(2, 3, 5), rand(2, 3, 4), rand(2, 4, 5)], scale
    yield "addmv", [rand(3), a, rand(4)], scale
    yield "int_mm", [ints(32, 32, below=9).to(torch.int8), ints(32, 32, below=9).to(torch.int8)], {}
    geometry: dict[str, Any] = {
        "stride": (2, 1), "padding": (1, 1), "dilation": (1, 2), "transposed": False, "output_padding": (0, 0),
        "groups": 1,
    }  # fmt: skip
    x, weight = rand(2, 4, 9, 8), rand(6, 4, 3, 3)
    yield "convolution", [x, weight], {**geometry, "absent": ("bias",)}
    yield "convolution", [x, weight, rand(6)], {**geometry, "absent": ()}
    yield "convolution", [last(x), last(weight), rand(6)], {**geometry, "absent": ()}
    turned = {**geometry, "transposed": True, "output_padding": (1, 0), "dilation": (1, 1), "groups": 2}
    yield "convolution", [x, rand(4, 3, 3, 3), rand(6)], {**turned, "absent": ()}
    one = {"stride": (1,), "padding": (0,), "dilation": (1,), "transposed": False, "output_padding": (0,), "groups": 1}
    yield "convolution", [rand(2, 4, 9), rand(6, 4, 3)], {**one, "absent": ("bias",)}
    grad = rand(2, 6, 5, 6)
    backward = {**geometry, "bias_sizes": (6,), "output_mask": (True, True, True)}
    yield "convolution_backward", [grad, x, weight], backward
    yield "convolution_backward", [grad, x, weight], {**backward, "output_mask": (False, True, False)}
    yield "cdist", [rand(2, 3, 4), rand(2, 5, 4)], {"p": 1.0, "compute_mode": None}
    yield "cdist_backward", [rand(2, 3, 5), rand(2, 3, 4), rand(2, 5, 4), rand(2, 3, 5)], {"p": 1.0}
    q, k, v = rand(2, 3, 4, 8), rand(2, 3, 5, 8), rand(2, 3, 5, 8)
    attend: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, "scale": None}
    yield "attention", [q, k, v], {**attend, "absent": ("attn_mask",)}
    yield "attention", [q, k, v, rand(4, 5)], {**attend, "absent": ()}
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    yield "attention_backward", [rand(2, 3, 4, 8), q, k, v, out, sums], {**attend, "absent": ("attn_mask",)}


def _scans_and_order() -> Rows:
    x = rand(3, 4)
    for name in ("cumsum", "cumprod"):
        yield name, [x], {"dim": 1, "dtype": f32}
        yield name, [ints(5, below=9).int()], {"dim": 0, "dtype": torch.int32}
    for name in ("cummax", "cummin", "logcumsumexp"):
        yield name, [x], {"dim": 0}
    yield "sort", [x], {"stable": None, "dim": 1, "descending": True}
    yield "topk", [x], {"k": 2, "dim": 1, "largest": True, "sorted": True}
    yield "kthvalue", [x], {"k": 2, "dim": 0, "keepdim": True}
    for name in ("median", "nanmedian", "mode"):
        yield name, [x], {"dim": 1, "keepdim": False}
    yield "median_all", [x], {}
    yield "nanmedian_all", [x], {}
    search: dict[str, Any] = {"out_int32": False, "right": True, "side": None, "absent": ("sorter",)}
    yield "searchsorted", [rand(9).sort().values, x], search
    yield "searchsorted", [rand(9), x, rand(9).argsort()], {**search, "out_int32": True, "absent": ()}
    yield "histc", [x], {"bins": 5, "min": 0, "max": 1}


def _places() -> Rows:
    x, index, src = rand(4, 5), ints(2, 5, below=4), rand(2, 5)
    yield "scatter", [x, index, src], {"dim": 0}
    yield "scatter_value", [x, index], {"dim": 0, "value": 2.0}
    yield "scatter_add", [x, index, src], {"dim": 0}
    yield "scatter_reduce", [x, index, src], {"dim": 0, "reduce": "amax", "include_self": False}
    lines = torch.tensor([3, 0])
    yield "index_add", [x, lines, src], {"dim": 0, "alpha": 2}
    yield "index_copy", [x, lines, src], {"dim": 0}
    yield "index_fill", [x, lines], {"dim": 0, "value": 1.0}
    yield "index_reduce", [x, lines, src], {"dim": 0, "reduce": "prod", "include_self": True}
    yield "index_put", [x, lines, src], {"accumulate": True, "places": (0,)}
    yield "index_put", [rand(4, 3, 5), lines, torch.tensor([1]), rand(2, 3)], {"accumulate": False, "places": (0, 2)}
    yield "put", [x, torch.tensor([7, 0]), rand(2)], {"accumulate": True}
    yield "masked_scatter", [x, x > 0.5, rand(20)], {}
    embed = {"num_weights": 7, "padding_idx": -1, "scale_grad_by_freq": False}
    yield "embedding_backward", [rand(2, 3, 4), ints(2, 3, below=7)], embed
    table, read, starts = rand(10, 4), ints(6, below=10), torch.tensor([0, 2])
    for mode in (0, 1, 2):
        bag: dict[str, Any] = {
            "scale_grad_by_freq": False, "mode": mode, "sparse": False, "include_last_offset": False,
            "padding_idx": -1, "absent": ("per_sample_weights",),
        }  # fmt: skip
        yield "embedding_bag", [table, read, starts], bag
        if mode == 0:
            yield "embedding_bag", [table, read, starts, rand(6)], {**bag, "absent": ()}
    _, bags, sizes, at = torch.ops.aten._embedding_bag(table, read, starts, False, 1)
    wide = {"num_weights": 10, "scale_grad_by_freq": False, "mode": 1, "padding_idx": -1}
    grad = rand(2, 4)
    yield "embedding_bag_backward", [grad, read, bags, sizes, at], {**wide, "absent": ("per_sample_weights",)}
    yield "embedding_bag_weights_backward", [grad, table, read, starts, bags], {"mode": 0, "padding_idx": -1}


def _pools() -> Rows:
    pool: dict[str, Any] = {
        "kernel_size": (3,), "stride": (2,), "padding": (1,), "dilation": (1,), "ceil_mode": False
    }  # fmt: skip
    mean: dict[str, Any] = {
        "kernel_size": (3,), "stride": (2,), "padding": (1,), "ceil_mode": False, "count_include_pad": True,
        "divisor_override": None,
    }  # fmt: skip
    for n, x in ((2, rand(2, 3, 7, 8)), (2, last(rand(2, 3, 7, 8))), (3, rand(2, 3, 5, 7, 8))):
        full = {key: v * n if isinstance(v, tuple) else v for key, v in pool.items()}
        values, at = getattr(torch.ops.aten, f"max_pool{n}d_with_indices")(x, [3], [2], [1])
        yield f"max_pool{n}d", [x], {**full, "stride": ()}
        yield f"max_pool{n}d", [x], {**full, "ceil_mode": True}
        yield f"max_pool{n}d", [x], full
        yield f"max_pool{n}d_backward", [values, x, at], full
        average = {key: v * n if isinstance(v, tuple) else v for key, v in mean.items()}
        yield f"avg_pool{n}d", [x], average
        yield f"avg_pool{n}d_backward", [values, x], average
        values, at = getattr(torch.ops.aten, f"adaptive_max_pool{n}d")(x, [3, 4, 2][:n])
        yield f"adaptive_max_pool{n}d", [x], {"output_size": (3, 4, 2)[:n]}
        yield f"adaptive_max_pool{n}d_backward", [values, x, at], {}
        sizes: dict[str, Any] = {"kernel_size": (2,) * n, "output_size": (3, 4, 2)[:n]}
        if x.is_contiguous():
            yield f"fractional_max_pool{n}d", [x, rand(2, 3, n)], sizes
    small, at = rand(2, 3, 2, 2), ints(2, 3, 2, 2, below=16)
    yield "max_unpool2d", [small, at], {"output_size": (4, 4)}
    spread = {"output_size": (4, 4, 4), "stride": (2, 2, 2), "padding": (0, 0, 0)}
    yield "max_unpool3d", [rand(2, 3, 2, 2, 2), ints(2, 3, 2, 2, 2, below=64)], spread
    windows: dict[str, Any] = {"kernel_size": (2, 3), "dilation": (1, 1), "padding": (1, 0), "stride": (2, 1)}
    image = rand(2, 3, 6, 7)
    yield "im2col", [image], windows
    yield "im2col", [image[0]], windows
    columns = torch.ops.aten.im2col(image, [2, 3], [1, 1], [1, 0], [2, 1])
    yield "col2im", [columns], {**windows, "output_size": (6, 7)}


def _resampling() -> Rows:
    grids = ((2, rand(2, 3, 5, 6), rand(2, 4, 7, 2)), (3, rand(2, 3, 5, 6, 4), rand(2, 4, 7, 3, 3)))
    for n, x, grid in grids:
        look: dict[str, Any] = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False}
        yield f"grid_sample{n}d", [x, grid], look
        grad = rand(2, 3, *grid.shape[1:-1])
        yield f"grid_sample{n}d_backward", [grad, x, grid], {**look, "output_mask": (True, True)}
        yield f"grid_sample{n}d_backward", [grad, x, grid], {**look, "output_mask": (False, True)}
    scales = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
    for name, n in (
        ("linear1d", 1), ("linear2d", 2), ("linear3d", 3), ("cubic2d", 2), ("linear2d_smooth", 2), ("cubic2d_smooth", 2)
    ):  # fmt: skip
        size, output = (5, 6, 4)[:n], (8, 3, 9)[:n]
        attrs: dict[str, Any] = {"output_size": output, "align_corners": False, **dict.fromkeys(scales[n])}
        x, grad = rand(2, 3, *size), rand(2, 3, *output)
        yield f"resample_{name}", [x], attrs
        if n == 2 and "smooth" not in name:
            yield f"resample_{name}", [last(x)], attrs
        yield f"resample_{name}_backward", [grad], {**attrs, "input_size": (2, 3, *size)}


def _transforms() -> Rows:
    z = rand(3, 8, dtype=torch.complex64)
    yield "complex", [rand(3, 4), rand(3, 4)], {}
    yield "view_as_real", [z], {}
    yield "view_as_complex", [rand(3, 4, 2)], {}
    yield "fft_c2c", [z], {"dim": (1,), "normalization": 0, "forward": True}
    yield "fft_r2c", [rand(3, 8)], {"dim": (1,), "normalization": 0, "onesided": True}
    yield "fft_r2c", [rand(3, 8)], {"dim": (1,), "normalization": 0, "onesided": False}
    yield "fft_c2r", [z], {"dim": (1,), "normalization": 2, "last_dim_size": 14}


def _linalg() -> Rows:
    a, wide, b = spd(2, 3, 3), rand(2, 3, 5), rand(2, 3, 4)
    yield "cholesky", [a], {"upper": False, "check_errors": False}
    yield "cholesky_inverse", [a], {"upper": False}
    yield "cholesky_solve", [b, a], {"upper": False}
    yield "inverse", [a], {"check_errors": False}
    yield "eig", [a], {}
    yield "eigvals", [a], {}
    for vectors in (True, False):
        yield "eigh", [a], {"UPLO": "L", "compute_v": vectors}
        yield "svd", [wide], {"full_matrices": vectors, "compute_uv": True, "driver": None}
        yield "lu", [wide], {"pivot": True}
    yield "svd", [wide], {"full_matrices": False, "compute_uv": False, "driver": None}
    for mode in ("reduced", "complete", "r"):
        yield "qr", [rand(2, 5, 3)], {"mode": mode}
    yield "geqrf", [wide], {}
    reflectors, factors = torch.geqrf(rand(2, 5, 3))
    yield "ormqr", [reflectors, factors, rand(2, 5, 4)], {"left": True, "transpose": False}
    yield "householder_product", [reflectors, factors], {}
    yield "lu_factor", [wide], {"pivot": True, "check_errors": False}
    packed, pivots, _ = torch.linalg.lu_factor_ex(a)
    yield "lu_unpack", [packed, pivots], {"unpack_data": True, "unpack_pivots": True}
    yield "lu_unpack", [packed, pivots], {"unpack_data": False, "unpack_pivots": True}
    yield "lu_solve", [packed, pivots, b], {"left": True, "adjoint": False}
    yield "solve", [a, b], {"left": True, "check_errors": False}
    yield "solve_triangular", [a, b], {"upper": True, "left": True, "unitriangular": False}
    yield "ldl_factor", [a], {"hermitian": False, "check_errors": False}
    factored, pivots, _ = torch.linalg.ldl_factor_ex(a)
    yield "ldl_solve", [factored, pivots, b], {"hermitian": False}
    yield "det", [a], {}
    yield "slogdet", [a], {}
    yield "matrix_exp", [a], {}


UNARY_SPECIAL = (
    "digamma", "i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0",
    "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1", "spherical_bessel_j0", "airy_ai", "ndtri", "log_ndtr", "erfcx",
)  # fmt: skip
BINARY_SPECIAL = (
    "zeta", "igamma", "igammac", "chebyshev_t", "chebyshev_u", "chebyshev_v", "chebyshev_w", "shifted_chebyshev_t",
    "shifted_chebyshev_u", "shifted_chebyshev_v", "shifted_chebyshev_w", "hermite_h", "hermite_he", "laguerre_l",
    "legendre_p",
)  # fmt: skip


def _special() -> Rows:
    x = rand(2, 3)
    for name in UNARY_SPECIAL:
        yield name, [x], {}
    for name in BINARY_SPECIAL:
        yield name, [x, (rand(2, 3) * 4).floor() + 1], {}
    yield "polygamma", [x], {"n": 2}
    yield "frexp", [x], {}
    yield "gcd", [ints(4, below=30), ints(4, below=12)], {}
    yield "lcm", [ints(4, below=30), ints(4, below=12)], {}


def _groups() -> Rows:
    """Metadata only: no process group is needed for it."""
    x = rand(6, 3)
    yield "all_reduce", [x], {"reduce_op": "sum", "group_name": "0"}
    yield "all_gather", [x], {"group_size": 2, "group_name": "0"}
    yield "reduce_scatter", [x], {"reduce_op": "sum", "group_size": 2, "group_name": "0"}
    split = {"output_split_sizes": (1, 3), "input_split_sizes": (4, 2), "group_name": "0"}
    yield "all_to_all", [x], split
    yield "broadcast", [x], {"src": 0, "group_name": "0"}
    yield "wait_tensor", [x], {}
