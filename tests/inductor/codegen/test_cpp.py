"""The C++ generator: every op against torch, every loop shape, edges, foreach, and the text itself."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cpp_cases import HAS_COMPILER, KernelBuilder, bits_of, buffer, compile_all, run, run_all
from torchlazy.inductor.codegen.cpp import emit
from torchlazy.inductor.codegen.cpp_ops import CppOps, literal
from torchlazy.inductor.index import FloorDiv, Mod
from torchlazy.inductor.ops_handler import BINARY_OPS, MEMORY_OPS, POINTWISE_OPS, UNARY_OPS

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
i8, u8, i16, i32, i64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
INTS = (u8, i8, i16, i32, i64)
N = 83  # whole vectors and a tail

PREDICATES = ("isnan", "isinf", "signbit", "logical_not", "eq", "ne", "lt", "le", "gt", "ge")
INT_UNARY = ("neg", "abs", "sign", "ceil", "floor", "trunc", "round", "isnan", "isinf", "signbit", "logical_not",
             "bitwise_not")  # fmt: skip
FLOAT_UNARY = tuple(op for op in UNARY_OPS if op not in ("bitwise_not",))
FLOAT_BINARY = tuple(op for op in BINARY_OPS if not op.startswith(("bitwise", "shift")))
INT_BINARY = tuple(
    op for op in BINARY_OPS if op not in ("div", "atan2", "copysign", "hypot", "nextafter", "fmax", "fmin")
)
BOOL_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "floor_div": torch.floor_divide,
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "maximum": lambda a, b: torch.maximum(a, b),
}


def oracle(op: str, *operands: torch.Tensor) -> torch.Tensor:
    if op in ("fmod", "remainder") and operands[0].dtype.is_floating_point:
        # ATen's vector form gives nan for quotients that are huge; libm is exact
        a, b = (x.numpy() for x in operands)
        with np.errstate(all="ignore"):
            rest = np.fmod(a, b)
            wraps = (op == "remainder") & (rest != 0) & ((rest < 0) != (b < 0))
            return torch.from_numpy(np.where(wraps, rest + b, rest))
    return TORCH[op](*operands) if op in TORCH else getattr(torch, op)(*operands)


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 2.0, 1e-40, -1e-40, 1e-10, 3e38, -3e38,
           100.0, -100.0, 88.9, -88.9, 1e5, -7.5, 2.5, 1.5, -2.5]  # fmt: skip


def sample(dtype: torch.dtype, seed: int = 0, n: int = N) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        values = torch.randint(0 if dtype is u8 else -20, 21, (n,), generator=generator).to(dtype)
        values[:3] = torch.tensor([info.min, info.max, 1]).to(dtype)[:n]
        return values[torch.randperm(n, generator=generator)]
    values = torch.randn(n, generator=generator, dtype=f64) * 3
    k = min(n, len(SPECIAL))
    values[:k] = torch.tensor(SPECIAL[:k], dtype=f64)
    return values[torch.randperm(n, generator=generator)].to(dtype)


def unary_kernel(op: str, dtype: torch.dtype, out_dtype: torch.dtype, n: int = N) -> Any:
    k = KernelBuilder((n,))
    k.read("a", (n,), dtype)
    k.point(buffer("o", (n,), out_dtype), lambda ops, i: getattr(ops, op)(ops.load("a", i[0])))
    return k.build()


def binary_kernel(op: str, dtype: torch.dtype, out_dtype: torch.dtype, n: int = N) -> Any:
    k = KernelBuilder((n,))
    k.read("a", (n,), dtype)
    k.read("b", (n,), dtype)
    k.point(buffer("o", (n,), out_dtype), lambda ops, i: getattr(ops, op)(ops.load("a", i[0]), ops.load("b", i[0])))
    return k.build()


def close(op: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong, or nothing."""
    rtol = {f32: 2e-6, f64: 1e-13}.get(got.dtype, 0)
    atol = 1e-45 if got.dtype is f32 else 0  # denormals may differ in their last bit
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol if rtol else 0, equal_nan=True)
        if got.dtype.is_floating_point and op in (
            "neg",
            "ceil",
            "floor",
            "trunc",
            "round",
            "sqrt",
            "sin",
            "tanh",
            "erf",
        ):
            zeros = want == 0
            assert torch.equal(got.signbit() & zeros, want.signbit() & zeros), "sign of zero"
    except AssertionError as error:
        return str(error)
    return ""


def test_the_handler_has_every_op() -> None:
    for op in (*POINTWISE_OPS, *MEMORY_OPS):
        assert callable(getattr(CppOps, op, None)), op


@pytest.mark.parametrize("dtype", [f32, f64, *INTS, torch.bool])
def test_unary_ops(dtype: torch.dtype) -> None:
    ops = FLOAT_UNARY if dtype.is_floating_point else INT_UNARY
    if dtype is torch.bool:
        ops = ("logical_not", "bitwise_not")
    a = sample(dtype)
    jobs, wanted = [], []
    for op in ops:
        x = a.clamp(-60, 60) if op in ("sinh", "cosh") and dtype is f32 else a
        want = oracle(op, x) if not (op in ("ceil", "floor", "trunc", "round") and dtype is torch.bool) else x
        jobs.append((unary_kernel(op, dtype, want.dtype), {"a": x}, {}))
        wanted.append(want)
    results = run_all(jobs)
    wrong = {op: text for op, r, w in zip(ops, results, wanted, strict=True) if (text := close(op, r["o"], w))}
    assert not wrong, "\n".join(f"{op}: {text}" for op, text in wrong.items())


@pytest.mark.parametrize("dtype", [f32, f64, *INTS, torch.bool])
def test_binary_ops(dtype: torch.dtype) -> None:
    ops = FLOAT_BINARY if dtype.is_floating_point else INT_BINARY
    if dtype is torch.bool:
        ops = BOOL_BINARY
    n = 600
    jobs, wanted = [], []
    for op in ops:
        a, b = sample(dtype, 1, n), sample(dtype, 2, n)
        if dtype.is_floating_point:  # every pair of special values
            pairs = torch.cartesian_prod(
                torch.tensor(SPECIAL[:24], dtype=dtype), torch.tensor(SPECIAL[:24], dtype=dtype)
            )
            a[: len(pairs)], b[: len(pairs)] = pairs[:, 0], pairs[:, 1]
        if op in ("floor_div", "trunc_div", "remainder", "fmod") and not dtype.is_floating_point:
            b = torch.where(b == 0, torch.ones_like(b), b)
            if dtype in (i32, i64):  # the machine's own trap in the oracle
                b = torch.where(b == -1, torch.full_like(b, 3), b)
        if op == "pow" and not dtype.is_floating_point:
            b = b.abs() % 7
        if op.startswith("shift"):
            b = b.abs() % 12 if dtype is not u8 else b % 12
        if op in ("maximum", "minimum") and dtype is torch.bool:
            want = torch.logical_or(a, b) if op == "maximum" else torch.logical_and(a, b)
        else:
            want = oracle(op, a, b)
        jobs.append((binary_kernel(op, dtype, want.dtype, n), {"a": a, "b": b}, {}))
        wanted.append(want)
    results = run_all(jobs)
    wrong = {op: text for op, r, w in zip(ops, results, wanted, strict=True) if (text := close(op, r["o"], w))}
    assert not wrong, "\n".join(f"{op}: {text}" for op, text in wrong.items())


@pytest.mark.parametrize("source", [f32, f64, f16, bf16, *INTS, torch.bool])
def test_conversions(source: torch.dtype) -> None:
    a = sample(source)
    if source.is_floating_point:
        a = torch.where(a.isfinite() & (a.abs() < 120), a, torch.tensor(3.75, dtype=source))
    if source is u8:
        a = a % 100
    jobs, wanted = [], []
    for target in (f32, f64, f16, bf16, *INTS, torch.bool):
        x = a.abs() if target is u8 and source is not torch.bool else a
        k = KernelBuilder((N,))
        k.read("a", (N,), source)
        k.point(buffer("o", (N,), target), lambda ops, i, t=target: ops.to_dtype(ops.load("a", i[0]), t))
        jobs.append((k.build(), {"a": x}, {}))
        wanted.append(x.to(target))
    for got, want in zip(run_all(jobs), wanted, strict=True):
        torch.testing.assert_close(got["o"], want, rtol=0, atol=0, equal_nan=True)


def test_halves_round_to_nearest_even_for_every_pattern() -> None:
    generator = torch.Generator().manual_seed(3)
    random_bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(i32)
    edges = torch.arange(0, 1 << 16, dtype=i32)
    x = torch.cat(
        [random_bits, edges << 16, (edges << 16) | 0x8000, (edges << 13), (edges << 13) | 0x1000, edges]
    ).view(f32)
    for dtype in (f16, bf16):
        for n in (len(x), 5):
            k = KernelBuilder((n,))
            k.read("a", (n,), f32)
            k.point(buffer("o", (n,), dtype), lambda ops, i: ops.load("a", i[0]))
            k.point(buffer("p", (n,), f32), lambda ops, i, d=dtype: ops.to_dtype(ops.load("a", i[0]), d))
            got = run(k.build(), {"a": x[:n].clone()})
            torch.testing.assert_close(got["o"], x[:n].to(dtype), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(got["p"], x[:n].to(dtype).to(f32), rtol=0, atol=0, equal_nan=True)
        every = torch.arange(0, 1 << 16, dtype=i32).to(i16).view(dtype)
        k = KernelBuilder((1 << 16,))
        k.read("a", (1 << 16,), dtype)
        k.point(buffer("o", (1 << 16,), f32), lambda ops, i: ops.load("a", i[0]))
        torch.testing.assert_close(run(k.build(), {"a": every})["o"], every.to(f32), rtol=0, atol=0, equal_nan=True)


# ulp bounds against float64 over the whole range of arguments
ULPS = {"exp": 1.5, "exp2": 1.5, "expm1": 2.0, "log": 1.5, "log2": 2.0, "log10": 2.0, "log1p": 2.0, "sin": 2.0,
        "cos": 2.0, "tanh": 2.5, "erf": 2.0, "sqrt": 0.51, "rsqrt": 1.6, "reciprocal": 0.51}  # fmt: skip


def arguments_for(op: str, n: int = 1 << 17) -> np.ndarray:
    rng = np.random.default_rng(5)
    everything = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    usual = (rng.standard_normal(n) * 4).astype(np.float32)
    near = (1 + rng.standard_normal(n) * 0.1).astype(np.float32)
    wide = (rng.standard_normal(n) * 60).astype(np.float32)
    x = np.concatenate([everything, usual, near, wide])
    if op in ("log", "log2", "log10", "sqrt", "rsqrt"):
        x = np.abs(x)
    if op in ("sin", "cos"):
        x = x[np.abs(x) < 1e6]
    return x[np.isfinite(x)]


def exact(op: str, x: np.ndarray) -> np.ndarray:
    wide = torch.from_numpy(x.astype(np.float64))
    return getattr(torch, op)(wide).numpy()


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The distance in units in the last place of float32."""
    with np.errstate(all="ignore"):
        rounded = want.astype(np.float32)
        unit = np.maximum(
            np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, np.float32(3e38)))), np.float32(1e-45)
        )
        error = np.abs(got.astype(np.float64) - want) / unit.astype(np.float64)
    same = (got == rounded) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0, np.where(np.isfinite(got) & np.isfinite(rounded), error, np.inf))


def test_float32_functions_are_accurate() -> None:
    jobs, wanted = [], []
    for op in ULPS:
        x = arguments_for(op)
        jobs.append((unary_kernel(op, f32, f32, len(x)), {"a": torch.from_numpy(x)}, {}))
        wanted.append(exact(op, x))
    wrong = []
    for (op, bound), (_, inputs, _), got, want in zip(ULPS.items(), jobs, run_all(jobs), wanted, strict=True):
        distance = ulps(got["o"].numpy(), want)
        worst = int(distance.argmax())
        if distance[worst] > bound:
            x, o = inputs["a"][worst].item(), got["o"][worst].item()
            wrong.append(
                f"{op}({x!r}) = {o!r}, wanted {want[worst]!r}: {distance[worst]:.2f} ulp, {(distance > bound).sum()}"
            )
    assert not wrong, "\n".join(wrong)


def test_float32_pow_is_accurate() -> None:
    rng = np.random.default_rng(6)
    n = 1 << 17
    a = np.concatenate([np.abs(rng.standard_normal(n)) * 5, np.exp(rng.standard_normal(n) * 15)]).astype(np.float32)
    b = np.concatenate([rng.standard_normal(n) * 5, rng.standard_normal(n) * 3]).astype(np.float32)
    got = run(binary_kernel("pow", f32, f32, 2 * n), {"a": torch.from_numpy(a), "b": torch.from_numpy(b)})["o"].numpy()
    with np.errstate(all="ignore"):
        want = np.power(a.astype(np.float64), b.astype(np.float64))
    assert ulps(got, want).max() <= 1.0


@pytest.mark.parametrize("dtype", [f32, bf16, f64, i8, torch.bool])
def test_tails(dtype: torch.dtype) -> None:
    jobs, wanted = [], []
    for n in range(1, 41):
        a = sample(dtype, n, n)
        k = KernelBuilder((n,))
        k.read("a", (n,), dtype)
        k.point(buffer("o", (n,), dtype), lambda ops, i: ops.load("a", i[0]))
        jobs.append((k.build(), {"a": a}, {}))
        wanted.append(a)
    assert emit(jobs[3][0]).source.text == emit(jobs[30][0]).source.text  # the size is a parameter
    emitted = emit(jobs[0][0])
    (function,) = compile_all([emitted.source])
    for (_, inputs, _), want in zip(jobs, wanted, strict=True):
        out = torch.empty(64, dtype=dtype).fill_(True)
        before = out.clone()
        assert function(inputs["a"].data_ptr(), out.data_ptr(), len(want)) == 0
        torch.testing.assert_close(out[: len(want)], want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(out[len(want) :], before[len(want) :], rtol=0, atol=0)


# ---------------------------------------------------------------------- reductions
def softmax_kernel(rows: int, columns: int, dtype: torch.dtype = f32) -> Any:
    k = KernelBuilder((rows,), (columns,))
    k.read("a", (rows, columns), dtype)

    def a(ops: Any, i: Any, r: Any) -> Any:
        return ops.load("a", i * columns + r)

    def e(ops: Any, i: Any, r: Any) -> Any:
        return ops.exp(ops.sub(a(ops, i, r), ops.load("m", i)))

    k.sweep(True).reduce([buffer("m", (rows,))], "max", lambda ops, i, r: a(ops, i[0], r[0]), stored=False)
    k.sweep(True).reduce([buffer("s", (rows,))], "sum", lambda ops, i, r: e(ops, i[0], r[0]), stored=False)
    k.sweep(True).point(
        buffer("o", (rows, columns), dtype), lambda ops, i: ops.div(e(ops, i[0], i[1]), ops.load("s", i[0]))
    )
    return k.build()


@pytest.mark.parametrize("shape", [(7, 33), (3, 1000), (50, 5), (1, 300001), (2, 200000), (33, 16)])
def test_softmax_rows(shape: tuple[int, int]) -> None:
    a = torch.randn(shape) * 4
    torch.testing.assert_close(run(softmax_kernel(*shape), {"a": a})["o"], a.softmax(1))


def test_softmax_bfloat16() -> None:
    a = torch.randn(9, 77).bfloat16()
    torch.testing.assert_close(run(softmax_kernel(9, 77, bf16), {"a": a})["o"], a.softmax(1), rtol=1e-2, atol=1e-4)


def layer_norm_kernel(rows: int, columns: int) -> Any:
    k = KernelBuilder((rows,), (columns,))
    k.read("a", (rows, columns))
    k.read("w", (columns,))
    k.read("b", (columns,))
    outs = [buffer(name, (rows,)) for name in ("mean", "m2", "count")]
    k.sweep(True).reduce(outs, "welford", lambda ops, i, r: ops.load("a", i[0] * columns + r[0]), stored=False)

    def inverse(ops: Any, i: Any) -> Any:
        variance = ops.div(ops.load("m2", i[0]), ops.load("count", i[0]))
        return ops.rsqrt(ops.add(variance, ops.constant(1e-5, f32)))

    k.sweep(False).point(buffer("inv", (rows,)), inverse)

    def normal(ops: Any, i: Any) -> Any:
        centred = ops.sub(ops.load("a", i[0] * columns + i[1]), ops.load("mean", i[0]))
        scaled = ops.mul(ops.mul(centred, ops.load("inv", i[0])), ops.load("w", i[1]))
        return ops.add(scaled, ops.load("b", i[1]))

    k.sweep(True).point(buffer("o", (rows, columns)), normal)
    return k.build()


@pytest.mark.parametrize("shape", [(5, 768), (3, 40), (2, 7), (1, 262145)])
def test_layer_norm(shape: tuple[int, int]) -> None:
    a, w, b = torch.randn(shape) + 5, torch.randn(shape[1]), torch.randn(shape[1])
    got = run(layer_norm_kernel(*shape), {"a": a, "w": w, "b": b})
    want = torch.nn.functional.layer_norm(a, shape[1:], w, b)
    torch.testing.assert_close(got["o"], want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got["inv"], (a.var(1, correction=0) + 1e-5).rsqrt())


def reduce_kernel(
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    out: torch.dtype,
    accumulate: torch.dtype,
) -> Any:
    """Reduce a contiguous tensor over the axes that are not in `kept`."""
    reduced = tuple(n for n in range(len(shape)) if n not in kept)
    k = KernelBuilder(tuple(shape[n] for n in kept), tuple(shape[n] for n in reduced))
    a = k.read("a", shape, dtype)

    def body(ops: Any, i: Any, r: Any) -> Any:
        place = dict(zip((*kept, *reduced), (*i, *r), strict=True))
        value = ops.load("a", a.element(tuple(place[n] for n in range(len(shape)))))
        return ops.to_dtype(value, accumulate) if kind in ("sum", "prod") else value

    names = ("o", "m2", "count") if kind == "welford" else ("o",)
    k.sweep(True).reduce([buffer(n, k.xs, out) for n in names], kind, body, accumulate=accumulate)
    return k.build()


CASES = [
    ((40, 70), (1,)), ((40, 70), (0,)), ((5000, 3), (1,)), ((6, 50, 37), (1,)), ((6, 50, 37), (0, 2)),
    ((9000, 300), (1,)), ((400000,), ()), ((3, 5, 7, 11), (1,)), ((300, 2000), ()), ((70000, 20), (1,)),
    ((2, 3, 40000), (0, 1)), ((17, 4), (0,)),
]  # fmt: skip


@pytest.mark.parametrize("shape,kept", CASES)
def test_reductions(shape: tuple[int, ...], kept: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    reduced = [n for n in range(len(shape)) if n not in kept]
    x = torch.randn(shape, generator=generator)
    ints = torch.randint(-9, 10, shape, generator=generator).to(i32)
    flags = torch.randint(0, 50, shape, generator=generator) == 0
    jobs: list[Any] = []
    wanted: list[torch.Tensor] = []

    def case(kind: str, a: torch.Tensor, accumulate: torch.dtype, want: torch.Tensor) -> None:
        jobs.append((reduce_kernel(shape, kept, kind, a.dtype, want.dtype, accumulate), {"a": a}, {}))
        wanted.append(want)

    flat = x.permute(*kept, *reduced).reshape(*(shape[n] for n in kept), -1)
    flat_int = ints.permute(*kept, *reduced).reshape(*(shape[n] for n in kept), -1)
    case("sum", x, f32, x.double().sum(reduced).float())
    case("sum", x.double(), f64, x.double().sum(reduced))
    case("sum", ints, i64, ints.sum(reduced))
    case("sum", x.bfloat16(), f32, x.bfloat16().double().sum(reduced).float())
    case("prod", 1 + x / 1000, f32, (1 + x.double() / 1000).reshape(shape).permute(*kept, *reduced)
         .reshape(flat.shape).prod(-1).float())  # fmt: skip
    case("max", x, f32, x.amax(reduced))
    case("min", ints, i64, ints.amin(reduced))
    case("any", flags, torch.bool, flags.permute(*kept, *reduced).reshape(flat.shape).any(-1))
    case("all", ~flags, torch.bool, (~flags).permute(*kept, *reduced).reshape(flat.shape).all(-1))
    case("argmax", x, f32, flat.argmax(-1))
    case("argmin", ints, i64, flat_int.argmin(-1))
    case("welford", x, f32, x.double().mean(reduced).float())
    for (_, kind_want), got in zip(enumerate(wanted), run_all(jobs), strict=True):
        if kind_want.dtype is f32:
            torch.testing.assert_close(got["o"], kind_want, rtol=3e-6, atol=3e-6 * math.sqrt(flat.shape[-1]))
        else:
            torch.testing.assert_close(got["o"], kind_want)
        if "m2" in got:
            wide = flat.double()
            m2 = (wide - wide.mean(-1, keepdim=True)).square().sum(-1).float()
            torch.testing.assert_close(got["m2"], m2, rtol=1e-5, atol=1e-5)
            assert (got["count"] == flat.shape[-1]).all()


def test_nan_wins_and_the_first_extremum_counts() -> None:
    a = torch.randn(4, 100)
    a[0, 37] = a[0, 61] = math.nan
    a[1, 99] = math.nan
    a[2, 5] = a[2, 21] = a[2, 90] = 50.0
    a[3] = math.inf
    for layout in ("rows", "columns"):
        kept = (0,) if layout == "rows" else (1,)
        x = a if layout == "rows" else a.t().contiguous()
        jobs = []
        for kind in ("max", "min", "argmax", "argmin"):
            out = i64 if kind.startswith("arg") else f32
            jobs.append((reduce_kernel(tuple(x.shape), kept, kind, f32, out, f32), {"a": x}, {}))
        got = [r["o"] for r in run_all(jobs)]
        for result, want in zip(got, (a.amax(1), a.amin(1), a.argmax(1), a.argmin(1)), strict=True):
            torch.testing.assert_close(result, want, equal_nan=True, rtol=0, atol=0)


def test_long_sums_are_accurate_and_do_not_depend_on_threads() -> None:
    x = torch.rand(1 << 22) + 1
    kernel = reduce_kernel((1 << 22,), (), "sum", f32, f32, f32)
    got = run(kernel, {"a": x})["o"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = run(kernel, {"a": x})["o"]
    torch.set_num_threads(threads)
    assert torch.equal(got, alone)
    assert abs(got.double() / x.double().sum() - 1) < 2e-7
    wide = torch.rand(1 << 18, 32) + 1
    columns = run(reduce_kernel((1 << 18, 32), (1,), "sum", f32, f32, f32), {"a": wide})["o"]
    assert (columns.double() / wide.double().sum(0) - 1).abs().max() < 5e-7


def test_softmax_over_channels() -> None:
    batch, channels, pixels = 3, 19, 90
    k = KernelBuilder((batch, pixels), (channels,))
    k.read("a", (batch, channels, pixels))

    def a(ops: Any, b: Any, p: Any, c: Any) -> Any:
        return ops.load("a", b * channels * pixels + c * pixels + p)

    def e(ops: Any, b: Any, p: Any, c: Any) -> Any:
        return ops.exp(ops.sub(a(ops, b, p, c), ops.load("m", b * pixels + p)))

    k.sweep(True).reduce([buffer("m", k.xs)], "max", lambda ops, i, r: a(ops, *i, *r), stored=False)
    k.sweep(True).reduce([buffer("s", k.xs)], "sum", lambda ops, i, r: e(ops, *i, *r), stored=False)
    k.sweep(False).point(
        buffer("inv", k.xs), lambda ops, i: ops.reciprocal(ops.load("s", i[0] * pixels + i[1])), stored=False
    )
    out = buffer("o", (batch, channels, pixels))
    k.sweep(True).point(
        out, lambda ops, i: ops.mul(e(ops, i[0], i[2], i[1]), ops.load("inv", i[0] * pixels + i[2])),
        index=(k.x[0], k.r[0], k.x[1]),
    )  # fmt: skip
    x = torch.randn(batch, channels, pixels)
    torch.testing.assert_close(run(k.build(), {"a": x})["o"], x.softmax(1))


# ---------------------------------------------------------------------- memory
def test_layouts() -> None:
    x = torch.randn(37, 45)
    jobs: list[Any] = []
    wanted: list[torch.Tensor] = []
    k = KernelBuilder((45, 37))  # transposed read
    k.read("a", (37, 45))
    k.point(buffer("o", (45, 37)), lambda ops, i: ops.load("a", i[1] * 45 + i[0]))
    jobs.append((k.build(), {"a": x}, {}))
    wanted.append(x.t())
    k = KernelBuilder((37, 45))  # transposed write
    k.read("a", (37, 45))
    k.point(buffer("o", (37, 45), strides=(1, 37)), lambda ops, i: ops.load("a", i[0] * 45 + i[1]))
    jobs.append((k.build(), {"a": x}, {}))
    wanted.append(x)
    k = KernelBuilder((37, 45))  # both broadcasts
    k.read("a", (37,))
    k.read("b", (45,))
    k.point(buffer("o", (37, 45)), lambda ops, i: ops.add(ops.load("a", i[0]), ops.load("b", i[1])))
    jobs.append((k.build(), {"a": x[:, 0].contiguous(), "b": x[0].contiguous()}, {}))
    wanted.append(x[:, :1] + x[:1])
    k = KernelBuilder((37 * 45,))  # divided indices, a strided read, flipped
    k.read("a", (37, 45))
    k.point(
        buffer("o", (37 * 45,)),
        lambda ops, i: ops.add(
            ops.load("a", Mod(i[0], 37) * 45 + FloorDiv(i[0], 37)), ops.load("a", 37 * 45 - 1 - i[0])
        ),
    )
    jobs.append((k.build(), {"a": x}, {}))
    wanted.append(x.t().reshape(-1) + x.reshape(-1).flip(0))
    k = KernelBuilder((500, 3))  # a short inner axis
    k.read("a", (500, 3))
    k.read("b", (3,))
    k.point(buffer("o", (500, 3)), lambda ops, i: ops.mul(ops.load("a", i[0] * 3 + i[1]), ops.load("b", i[1])))
    y, b = torch.randn(500, 3), torch.randn(3)
    jobs.append((k.build(), {"a": y, "b": b}, {}))
    wanted.append(y * b)
    k = KernelBuilder((1, 9, 1, 20))  # axes of one point, and none that are longer in the end
    k.read("a", (1, 9, 1, 20))
    k.point(buffer("o", (1, 9, 1, 20)), lambda ops, i: ops.neg(ops.load("a", i[1] * 20 + i[3])))
    z = torch.randn(1, 9, 1, 20)
    jobs.append((k.build(), {"a": z}, {}))
    wanted.append(-z)
    k = KernelBuilder(())
    k.read("a", ())
    k.point(buffer("o", ()), lambda ops, i: ops.exp(ops.load("a", 0)))
    jobs.append((k.build(), {"a": torch.tensor(0.5)}, {}))
    wanted.append(torch.tensor(0.5).exp())
    for got, want in zip(run_all(jobs), wanted, strict=True):
        torch.testing.assert_close(got["o"], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [f32, f64, bf16, i8, i64, torch.bool])
def test_turned_loads(dtype: torch.dtype) -> None:
    """Reads along one axis, writes along the other: squares are turned in registers, with tails on both sides."""
    jobs, wanted = [], []
    for rows, columns in ((64, 64), (70, 45), (9, 200), (200, 9), (16, 17)):
        x = sample(dtype, 1, 3 * rows * columns).reshape(3, rows, columns)
        k = KernelBuilder((3, columns, rows))
        k.read("a", (3, rows, columns), dtype)
        k.read("b", (3, columns, rows), dtype)

        def body(ops: Any, i: Any, rows: int = rows, columns: int = columns) -> Any:
            turned = ops.load("a", (i[0] * rows + i[2]) * columns + i[1])
            straight = ops.load("b", (i[0] * columns + i[1]) * rows + i[2])
            return ops.where(ops.eq(turned, straight), turned, straight)

        k.point(buffer("o", k.xs, dtype), body)
        k.point(buffer("p", k.xs, dtype), lambda ops, i, r=rows, c=columns: ops.load("a", (i[0] * r + i[2]) * c + i[1]))
        y = sample(dtype, 2, 3 * rows * columns).reshape(3, columns, rows)
        jobs.append((k.build(), {"a": x, "b": y}, {}))
        wanted.append((y, x.transpose(1, 2)))
    assert "load_transposed" in emit(jobs[0][0]).source.text
    for got, (straight, turned) in zip(run_all(jobs), wanted, strict=True):
        torch.testing.assert_close(got["o"], straight, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got["p"], turned.contiguous(), rtol=0, atol=0, equal_nan=True)


def test_masked_pads_and_never_reads_outside() -> None:
    rows, columns = 6, 50
    x = torch.randn(rows, columns)
    k = KernelBuilder((rows + 4, columns + 9))
    k.read("a", (rows, columns))

    def padded(ops: Any, i: Any) -> Any:
        y, z = ops.index_expr(i[0], i64), ops.index_expr(i[1], i64)
        inside_rows = ops.bitwise_and(ops.ge(y, ops.constant(3, i64)), ops.lt(y, ops.constant(3 + rows, i64)))
        inside_columns = ops.bitwise_and(ops.ge(z, ops.constant(5, i64)), ops.lt(z, ops.constant(5 + columns, i64)))
        return ops.masked(
            inside_rows,
            lambda: ops.masked(inside_columns, lambda: ops.load("a", (i[0] - 3) * columns + i[1] - 5), -1.5),
            -1.5,
        )

    k.point(buffer("o", k.xs), padded)
    want = torch.nn.functional.pad(x, (5, 4, 3, 1), value=-1.5)
    torch.testing.assert_close(run(k.build(), {"a": x})["o"], want)


def test_masked_with_a_mask_from_memory() -> None:
    n = 100
    k = KernelBuilder((n,))
    k.read("c", (n,), torch.bool)
    k.read("a", (n,), f32)
    k.read("i", (n,), i64)

    def body(ops: Any, i: Any) -> Any:
        def inside() -> Any:
            j = ops.indirect(ops.load("i", i[0]), n, "gather(a)")
            return ops.add(ops.load("a", i[0]), ops.load("a", j))

        return ops.masked(ops.load("c", i[0]), inside, 7.0)

    k.point(buffer("o", (n,)), body)
    a, c, index = torch.randn(n), torch.rand(n) > 0.5, torch.randint(-n, n, (n,))
    index[~c] = 10**12  # never used
    want = torch.where(c, a + a[torch.where(c, index, 0)], 7.0)
    torch.testing.assert_close(run(k.build(), {"a": a, "c": c, "i": index})["o"], want)


def embedding_kernel(tokens: int, width: int, rows: int, dtype: torch.dtype = i64) -> Any:
    k = KernelBuilder((tokens, width))
    k.read("i", (tokens,), dtype)
    k.read("w", (rows, width))
    k.point(
        buffer("o", (tokens, width)),
        lambda ops, i: ops.load("w", ops.indirect(ops.load("i", i[0]), rows, "embedding(weight)") * width + i[1]),
    )
    return k.build()


@pytest.mark.parametrize("dtype", [i64, i32])
def test_embedding(dtype: torch.dtype) -> None:
    w, index = torch.randn(30, 70), torch.randint(-30, 30, (11,)).to(dtype)
    kernel = embedding_kernel(11, 70, 30, dtype)
    assert "gather" not in emit(kernel).source.text  # the inner axis stays a vector
    torch.testing.assert_close(run(kernel, {"i": index, "w": w})["o"], w[index.long()])
    index[4] = 30
    run(kernel, {"i": index, "w": w}, status=1)
    index[4] = -31
    run(kernel, {"i": index, "w": w}, status=1)
    assert emit(kernel).source.index_checks == ("embedding(weight)",)


def test_gather_along_the_vector_axis() -> None:
    n, m = 77, 40
    k = KernelBuilder((n,))
    k.read("i", (n,), i64)
    k.read("w", (m,))
    k.read("v", (m,), bf16)
    k.point(
        buffer("o", (n,)),
        lambda ops, i: ops.add(
            ops.load("w", ops.indirect(ops.load("i", i[0]), m, "first")),
            ops.load("v", ops.indirect(ops.neg(ops.load("i", i[0])), m, "second")),
        ),
    )
    w, v, index = torch.randn(m), torch.randn(m).bfloat16(), torch.randint(-m + 1, m, (n,))
    torch.testing.assert_close(run(k.build(), {"i": index, "w": w, "v": v})["o"], w[index] + v[-index].float())
    index[70] = m
    run(k.build(), {"i": index, "w": w, "v": v}, status=1)
    index[70] = -m
    run(k.build(), {"i": index, "w": w, "v": v}, status=2)


def test_an_index_into_nothing_is_reported() -> None:
    kernel = embedding_kernel(4, 20, 0)
    run(kernel, {"i": torch.zeros(4, dtype=i64), "w": torch.empty(0, 20)}, status=1)


def test_scalars_constants_and_index_values() -> None:
    n = 50
    k = KernelBuilder((n,), scalars=(("lr", float), ("steps", int), ("flag", bool)))
    k.read("a", (n,))

    def body(ops: Any, i: Any) -> Any:
        x = ops.mul(ops.load("a", i[0]), ops.scalar("lr", f32))
        x = ops.add(x, ops.scalar("steps", f32))
        x = ops.add(x, ops.index_expr(i[0] * 2 + 1, f32))
        return ops.where(ops.scalar("flag", torch.bool), x, ops.constant(math.inf, f32))

    k.point(buffer("o", (n,)), body)
    k.point(buffer("p", (n,), i32), lambda ops, i: ops.index_expr(FloorDiv(i[0], 3), i32))
    k.point(buffer("q", (n,), f64), lambda ops, i: ops.constant(0.1, f64))
    a = torch.randn(n)
    got = run(k.build(), {"a": a}, {"lr": 0.1, "steps": 3, "flag": True})
    torch.testing.assert_close(got["o"], a * 0.1 + 3 + torch.arange(n) * 2 + 1)
    assert torch.equal(got["p"], torch.arange(n).div(3, rounding_mode="floor").to(i32))
    assert (got["q"] == 0.1).all()
    assert run(k.build(), {"a": a}, {"lr": 0.1, "steps": 3, "flag": False})["o"].isinf().all()


def test_where_and_bitcast() -> None:
    n = 45
    k = KernelBuilder((n,))
    k.read("c", (n,), torch.bool)
    k.read("a", (n,), f32)
    k.read("b", (n,), f32)
    k.read("w", (n,), f64)

    def c(ops: Any, i: Any) -> Any:
        return ops.load("c", i[0])

    k.point(buffer("o", (n,)), lambda ops, i: ops.where(c(ops, i), ops.load("a", i[0]), ops.load("b", i[0])))
    k.point(buffer("p", (n,), i32), lambda ops, i: ops.bitcast(ops.load("a", i[0]), i32))
    k.point(buffer("q", (n,), f64), lambda ops, i: ops.where(c(ops, i), ops.load("w", i[0]), ops.constant(1, f64)))
    k.point(
        buffer("s", (n,), torch.bool),
        lambda ops, i: ops.where(
            c(ops, i), ops.gt(ops.load("a", i[0]), ops.load("b", i[0])), ops.constant(True, torch.bool)
        ),
    )
    k.point(buffer("u", (n,), u8), lambda ops, i: ops.where(c(ops, i), ops.constant(3, u8), ops.constant(250, u8)))
    a, b, w, m = torch.randn(n), torch.randn(n), torch.randn(n, dtype=f64), torch.rand(n) > 0.5
    got = run(k.build(), {"a": a, "b": b, "w": w, "c": m})
    assert torch.equal(got["o"], torch.where(m, a, b))
    assert torch.equal(got["p"], a.view(i32))
    assert torch.equal(got["q"], torch.where(m, w, 1.0))
    assert torch.equal(got["s"], torch.where(m, a > b, True))
    assert torch.equal(got["u"], torch.where(m, 3, 250).to(u8))


def philox(seed: int, stream: int, counter: int) -> int:
    mask = 0xFFFFFFFF
    c = [counter & mask, (counter >> 32) & mask, stream & mask, 0]
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k0, q & mask, (p >> 32) ^ c[3] ^ k1, p & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c[0] - (1 << 32) if c[0] >= 1 << 31 else c[0]


def test_random_bits() -> None:
    n, seed, stream = 39, -123456789012345, 7
    k = KernelBuilder((n,), scalars=(("seed", int),))
    k.point(
        buffer("o", (n,), i32),
        lambda ops, i: ops.random_bits(
            ops.scalar("seed", i64), ops.constant(stream, i32), ops.index_expr(i[0] + 2**33, i64)
        ),
    )
    got = run(k.build(), {}, {"seed": seed})["o"]
    assert got.tolist() == [philox(seed & (2**64 - 1), stream, i + 2**33) for i in range(n)]


# ---------------------------------------------------------------------- foreach, donation, text
def adam_kernel(n: int, aliases: bool = False) -> Any:
    scalars = (("lr", float), ("step", int))
    k = KernelBuilder((n,), scalars=scalars, aliases=(("o", "p"),) if aliases else ())
    k.read("p", (n,))
    k.read("g", (n,), bf16)
    k.point(
        buffer("o", (n,)),
        lambda ops, i: ops.sub(
            ops.load("p", i[0]),
            ops.mul(ops.load("g", i[0]), ops.div(ops.scalar("lr", f32), ops.scalar("step", f32))),
        ),
    )
    return k.build()


@pytest.mark.parametrize("sizes", [(1, 3, 16, 17, 1024, 1025, 5000), (70000, 2, 130000), ()])
def test_foreach(sizes: tuple[int, ...]) -> None:
    emitted = emit(adam_kernel(64), foreach=True, row_scalars=frozenset(["step"]))
    assert (emitted.scalars, emitted.row_scalars, emitted.source.sizes) == (("lr",), ("step",), 1)
    (function,) = compile_all([emitted.source])
    rows = [(torch.randn(n), torch.randn(n).bfloat16(), torch.zeros(n)) for n in sizes]
    table = torch.tensor(
        [[p.data_ptr(), g.data_ptr(), o.data_ptr(), len(p), bits_of(1 + k)] for k, (p, g, o) in enumerate(rows)],
        dtype=i64,
    )
    assert function(table.data_ptr(), len(rows), 0.5) == 0
    for k, (p, g, o) in enumerate(rows):
        torch.testing.assert_close(o, p - g.float() * (0.5 / (1 + k)))


def test_foreach_wants_a_flat_kernel() -> None:
    with pytest.raises(ValueError, match="flat"):
        emit(softmax_kernel(4, 8), foreach=True)


def test_donation() -> None:
    p, g = torch.randn(100), torch.randn(100).bfloat16()
    want = p - g.float() * 0.25
    got = run(adam_kernel(100, aliases=True), {"p": p, "g": g}, {"lr": 0.5, "step": 2})
    assert got["o"] is p
    torch.testing.assert_close(p, want)
    assert "__restrict" not in emit(adam_kernel(100, aliases=True)).source.text


def test_literals() -> None:
    assert literal(0.1, f32) == "0.1f"
    assert literal(3, f32) == "3.0f"
    assert literal(-math.inf, f64) == "-__builtin_inf()"
    assert literal(1e300, f32) == "__builtin_inff()"
    assert literal(-(2**63), i64) == "INT64_MIN"
    assert literal(True, torch.bool) == "true"


def test_text_does_not_depend_on_names_or_sizes_of_flat_kernels() -> None:
    k = KernelBuilder((999,))
    k.read("other", (999,))
    k.point(buffer("elsewhere", (999,)), lambda ops, i: ops.exp(ops.load("other", i[0])))
    assert emit(k.build()).source.text == emit(unary_kernel("exp", f32, f32)).source.text


GOLDEN = Path(__file__).parents[2] / "golden" / "cpp"
GOLDEN_KERNELS: dict[str, Callable[[], Any]] = {
    "gelu_like": lambda: unary_kernel("erf", f32, f32, 1000),
    "softmax_rows": lambda: softmax_kernel(8, 1000),
    "layer_norm": lambda: layer_norm_kernel(8, 768),
    "column_sum": lambda: reduce_kernel((16384, 1024), (1,), "sum", f32, f32, f32),
    "full_sum": lambda: reduce_kernel((1 << 20,), (), "sum", f32, f32, f32),
    "embedding": lambda: embedding_kernel(64, 768, 30000),
}


@pytest.mark.parametrize("name", GOLDEN_KERNELS)
def test_golden(name: str) -> None:
    """Set UPDATE_GOLDEN=1 in the environment to write the files anew."""
    text = emit(GOLDEN_KERNELS[name]()).source.text
    path = GOLDEN / f"{name}.cpp"
    if os.environ.get("UPDATE_GOLDEN") == "1" or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; UPDATE_GOLDEN=1 accepts the new text"
