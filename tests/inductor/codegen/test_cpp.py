"""The C++ generator's scalar language: every op and conversion against torch, accuracy of functions, tails."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cpp_cases import HAS_COMPILER, KernelBuilder, buffer, compile_all, run, run_all
from torchlazy.inductor.codegen.cpp import PRELUDES, emit
from torchlazy.inductor.codegen.cpp_ops import CppOps
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


def test_the_prelude_includes_little() -> None:
    """Every unit parses it: <cmath> alone is about half of what g++ 12 takes for a unit of one or two kernels."""
    assert set(re.findall(r"#include <(\w.*)>", PRELUDES["cpp"])) == {"cstdint", "omp.h"}


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


def pointwise_kernel(op: str, reads: str, out_dtype: torch.dtype, n: int) -> Any:
    """A float32 operator whose result is converted: the widest number decides how many lanes there are."""
    k = KernelBuilder((n,))
    for name in reads:
        k.read(name, (n,), f32)
    k.point(
        buffer("o", (n,), out_dtype),
        lambda ops, i: ops.to_dtype(getattr(ops, op)(*(ops.load(name, i[0]) for name in reads)), out_dtype),
    )
    return k.build()


@pytest.mark.parametrize("out_dtype", [f32, f64], ids=["whole vectors", "half vectors"])
def test_float32_functions_are_accurate(out_dtype: torch.dtype) -> None:
    jobs, wanted = [], []
    for op in ULPS:
        x = arguments_for(op)
        jobs.append((pointwise_kernel(op, "a", out_dtype, len(x)), {"a": torch.from_numpy(x)}, {}))
        wanted.append(exact(op, x))
    wrong = []
    for (op, bound), (_, inputs, _), got, want in zip(ULPS.items(), jobs, run_all(jobs), wanted, strict=True):
        distance = ulps(got["o"].float().numpy(), want)
        worst = int(distance.argmax())
        if distance[worst] > bound:
            x, o = inputs["a"][worst].item(), got["o"][worst].item()
            wrong.append(
                f"{op}({x!r}) = {o!r}, wanted {want[worst]!r}: {distance[worst]:.2f} ulp, {(distance > bound).sum()}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("out_dtype", [f32, f64], ids=["whole vectors", "half vectors"])
def test_float32_pow_is_accurate(out_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    n = 1 << 17
    a = np.concatenate([np.abs(rng.standard_normal(n)) * 5, np.exp(rng.standard_normal(n) * 15)]).astype(np.float32)
    b = np.concatenate([rng.standard_normal(n) * 5, rng.standard_normal(n) * 3]).astype(np.float32)
    kernel = pointwise_kernel("pow", "ab", out_dtype, 2 * n)
    got = run(kernel, {"a": torch.from_numpy(a), "b": torch.from_numpy(b)})["o"].float().numpy()
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
