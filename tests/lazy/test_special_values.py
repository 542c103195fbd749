"""Special numbers through compiled kernels, in vectors and in their tails.

NaN, infinities, both zeros, subnormals, the largest and smallest, halves of integers, divisors of -1, shifts beyond the
width. Halves are computed in float32, whose functions are looked at in float32 only.

Operators whose result is exact are compared with eager bit by bit, the sign of zero and NaN included; functions within
four units in the last place, with NaN, infinities and signs of zero as eager's. Where eager's own vectors and tails
differ (which of two zeros a maximum is), either is right. In sums of several elements the order is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F
from torchlazy.inductor.codegen import languages

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)
WHOLE = (torch.float32, torch.bfloat16, torch.int64)  # in the others what depends on the width: all takes minutes
FUNCTIONS_IN = (torch.float32, torch.float64, torch.int64)
LENGTHS = (67, 7, 1)

EXACT_UNARY: dict[str, Callable[[Tensor], Any]] = {
    **{name: getattr(torch, name) for name in (
        "neg", "abs", "sign", "sgn", "ceil", "floor", "trunc", "round", "reciprocal", "isnan", "isinf",
        "isfinite", "isposinf", "isneginf", "signbit", "logical_not", "bitwise_not", "relu", "square", "frac",
        "positive", "nan_to_num", "deg2rad", "rad2deg", "angle",
    )},
    "relu6": F.relu6, "hardtanh": F.hardtanh, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink, "softshrink": F.softshrink, "leaky_relu": F.leaky_relu,
    "threshold": lambda x: F.threshold(x, 1, 2), "clamp_min": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp(max=1), "clamp": lambda x: x.clamp(0, 3),
    "clamp by tensors": lambda x: torch.clamp(x, x.flip(0), x.roll(1)),
    "to bool": lambda x: x.to(torch.bool), "to float32": lambda x: x.to(torch.float32),
    "to float64": lambda x: x.to(torch.float64), "to bfloat16": lambda x: x.to(torch.bfloat16),
    "to float16": lambda x: x.to(torch.float16),
}  # fmt: skip
CLOSE_UNARY: dict[str, Callable[[Tensor], Any]] = {
    **{name: getattr(torch, name) for name in (
        "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma",
        "sigmoid", "logit", "sinc", "i0",
    )},
    "silu": F.silu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "elu": F.elu, "selu": F.selu, "celu": F.celu,
    "mish": F.mish, "softplus": F.softplus, "logsigmoid": F.logsigmoid, "entr": torch.special.entr,
}  # fmt: skip
EXACT_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{name: getattr(torch, name) for name in (
        "add", "sub", "mul", "div", "fmod", "remainder", "floor_divide", "copysign", "nextafter", "maximum", "minimum",
        "fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor",
        "bitwise_left_shift", "bitwise_right_shift", "logical_and", "logical_or", "logical_xor", "heaviside", "rsub",
        "isclose",
    )},
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "where": lambda a, b: torch.where(a > b, a, b),
}  # fmt: skip
CLOSE_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{name: getattr(torch, name) for name in ("pow", "atan2", "hypot", "logaddexp", "xlogy")},
    "xlog1py": torch.special.xlog1py, "lerp": lambda a, b: torch.lerp(a, b, 0.25),
}  # fmt: skip
DIVISIONS = ("floor_divide", "div floor", "div trunc", "remainder", "fmod")
BY_WIDTH = frozenset((
    *DIVISIONS, "add", "sub", "mul", "maximum", "fmax", "lt", "bitwise_left_shift", "bitwise_right_shift", "pow", "neg",
    "abs", "sign", "relu", "clamp", "reciprocal", "round", "nan_to_num", "erf", "log", "nextafter", "amax", "argmax",
    "sum", "prod", "cummax",
))  # fmt: skip
EXACT_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1), "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1), "any": lambda x: x.any(-1), "all": lambda x: x.all(-1),
    "count_nonzero": lambda x: x.count_nonzero(-1), "cummax": lambda x: x.cummax(-1), "cummin": lambda x: x.cummin(-1),
    "max pooling": lambda x: F.max_pool2d(x[:, None], (1, 2), (1, 1)),
}  # fmt: skip
CLOSE_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(-1), "nansum": lambda x: x.nansum(-1), "mean": lambda x: x.mean(-1),
    "prod": lambda x: x.prod(-1), "var": lambda x: x.var(-1, correction=0),
    "logsumexp": lambda x: x.logsumexp(-1), "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1), "cumsum": lambda x: x.cumsum(-1),
}  # fmt: skip


def special(dtype: torch.dtype) -> Tensor:
    """The special numbers of a dtype, and a few ordinary ones."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        wanted = [0, 1, 2, 3, 5, 7, info.bits - 1, info.bits, info.bits + 1, 100, -1, -2, -3, -7, -info.bits]
        edges = [info.max, info.max - 1, info.min, info.min + 1]
        return torch.tensor([n for n in (*wanted, *edges) if info.min <= n <= info.max], dtype=dtype)
    limits = torch.finfo(dtype)
    half = limits.smallest_normal / 2
    numbers = [math.nan, math.inf, 0.0, half, limits.tiny, limits.max, 1.0, 0.5, 1.5, 2.5, 3.0, 7.25, 100.0,
               1 - limits.eps, 1 + limits.eps, 1 / limits.eps + 1]  # fmt: skip
    return torch.tensor([sign * n for n in numbers for sign in (1, -1)], dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Job:
    """A call, its operands, and how its result is to be compared."""

    name: str
    call: Callable[..., Any]
    operands: tuple[Tensor, ...]
    exact: bool
    rows: bool = False


def pieces(x: Tensor) -> Iterator[Tensor]:
    """[n, count] operands in all lengths: one vector with a tail, and tails alone, each value in some of them."""
    count = x.shape[1]
    yield x.repeat(1, -(-67 // count))[:, : max(67, count)]
    for start in range(0, count, max(7, count // 6)):
        yield x[:, start : start + 7]
    for start in range(0, count, max(3, count // 8)):
        yield x[:, start : start + 1]


def pointwise_jobs(dtype: torch.dtype) -> Iterator[Job]:
    numbers = special(dtype)
    for exact, calls in ((True, EXACT_UNARY), (False, CLOSE_UNARY if dtype in FUNCTIONS_IN else {})):
        for name, call in _wanted(calls, dtype):
            yield from (Job(name, call, (piece[0].clone(),), exact) for piece in pieces(numbers[None]))
    pairs = torch.cartesian_prod(numbers, numbers).T
    for exact, calls in ((True, EXACT_BINARY), (False, CLOSE_BINARY if dtype in FUNCTIONS_IN else {})):
        for name, call in _wanted(calls, dtype):
            kept = pairs[:, _is_defined(pairs)] if name in DIVISIONS and dtype in INTS else pairs
            yield from (Job(name, call, (a.clone(), b.clone()), exact) for a, b in pieces(kept))


def _wanted(calls: dict[str, Any], dtype: torch.dtype) -> list[tuple[str, Any]]:
    return [(name, call) for name, call in calls.items() if dtype in WHOLE or name in BY_WIDTH]


def _is_defined(pairs: Tensor) -> Tensor:
    """Integer divisions that eager answers: not by 0, and not the one quotient that overflows."""
    a, b = pairs
    return (b != 0) & ~((b == -1) & (a == torch.iinfo(a.dtype).min))


def row_jobs(dtype: torch.dtype) -> Iterator[Job]:
    numbers = special(dtype)
    if dtype.is_floating_point:
        numbers = numbers[numbers.abs() != torch.finfo(dtype).max]  # their sums depend on the order
    turned = torch.stack([numbers.roll(k) for k in range(len(numbers))])
    for exact, calls in ((True, EXACT_ROWS), (False, CLOSE_ROWS)):
        for name, call in _wanted(calls, dtype):
            for length in (1, 2, 3, len(numbers)):
                yield Job(name, call, (turned[:, :length].clone(),), exact, rows=True)


def _alternatives(job: Job, place: int) -> list[tuple[Tensor, ...]]:
    one = [operand[place : place + 1] for operand in job.operands]
    return [_tuple(job.call(*(x.clone() for x in one))), _tuple(job.call(*(x.repeat(64) for x in one)))]


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def differences(have: Tensor, want: Tensor, job: Job) -> Tensor:
    """Where two results are not the same."""
    if not want.is_floating_point():
        return have != want
    signs = have.signbit() != want.signbit()
    if job.rows or (job.name in ("fmax", "fmin") and want.dtype == torch.bfloat16):  # eager's float32 keeps the other
        signs &= want != 0
    wrong = (have.isnan() != want.isnan()) | (~want.isnan() & (signs | (have.isinf() != want.isinf())))
    finite = ~(want.isnan() | want.isinf()) & ~wrong
    if job.exact:
        return wrong | (finite & (have != want))
    limits = torch.finfo(want.dtype)
    room = 4 * limits.eps * want.double().abs() + (1e-6 if want.dtype != torch.float64 else 1e-14) * job.rows
    return wrong | (finite & ((have.double() - want.double()).abs() > room + 2 * limits.smallest_normal))


def failures(jobs: Iterator[Job]) -> Iterator[str]:
    """What is not as in eager, in words; all jobs are one program."""
    recorded = []
    for job in jobs:
        try:
            want = _tuple(job.call(*job.operands))
        except (RuntimeError, TypeError, NotImplementedError, IndexError):
            continue  # not for this dtype
        recorded.append((job, want, _tuple(job.call(*(x.to("lazy") for x in job.operands)))))
    torchlazy.sync()
    assert recorded
    for job, want, have in recorded:
        for number, (h, w) in enumerate(zip(have, want, strict=True)):
            assert (h.dtype, h.shape) == (w.dtype, w.shape), job.name
            flat, expected = h.cpu().reshape(-1), w.reshape(-1)
            for place in differences(flat, expected, job).nonzero().flatten().tolist():
                if not job.rows:
                    others = [other[number][:1] for other in _alternatives(job, place)]
                    if any(not differences(flat[place : place + 1], other, job).any() for other in others):
                        continue
                source = "" if job.rows else [x.reshape(-1)[place].item() for x in job.operands]
                yield f"{job.name}{source} of {len(flat)}: {flat[place]}, eager {expected[place]}"


@pytest.fixture(autouse=True)
def _each_operator_rounds(compiled: None) -> None:
    torchlazy.config.precision = "eager"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_of_pointwise_operators(dtype: torch.dtype) -> None:
    wrong = list(failures(pointwise_jobs(dtype)))
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:20])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_of_reductions_and_scans(dtype: torch.dtype) -> None:
    wrong = list(failures(row_jobs(dtype)))
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:20])


def _casts(sources: tuple[torch.dtype, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Casts to integers: ours and eager's. Nothing is promised of NaN and of floats that do not fit."""
    for source in sources:
        for target in INTS:
            numbers = special(source)
            if source.is_floating_point:
                low, high = max(torch.iinfo(target).min, -(2**62)) - 1, min(torch.iinfo(target).max, 2**62) + 1
                numbers = numbers[(numbers.double() > low) & (numbers.double() < high)]
            for length in LENGTHS:
                x = numbers.repeat(-(-length // len(numbers)))[:length]
                yield x.to("lazy").to(target), x.to(target)


@pytest.mark.parametrize("sources", (FLOATS, (*INTS, torch.bool)), ids=("floats", "integers"))
def test_casts_to_integers_where_they_are_defined(sources: tuple[torch.dtype, ...]) -> None:
    """Floats towards zero, integers modulo the width."""
    results = list(_casts(sources))
    torchlazy.sync()
    for have, want in results:
        assert have.dtype == want.dtype and torch.equal(have.cpu(), want), (have, want)


def test_gelu_of_large_negative_numbers_is_nothing() -> None:
    """The error function is exactly -1 there: a rest of half a unit, times the number, is seen."""
    x = torch.tensor([-1e4, -100.0, -7.25, -6.0, 7.25, 1e4] * 12)
    torch.testing.assert_close(F.gelu(x.to("lazy")).cpu(), F.gelu(x), rtol=1e-6, atol=1e-7)


def test_zeros_and_large_numbers_through_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice of the above through the other generator for CPUs."""
    pytest.importorskip("numba")
    monkeypatch.setenv("TORCHLAZY_CPU_BACKEND", "numba")
    asked: set[str] = set()
    preludes = languages.preludes
    monkeypatch.setattr(languages, "preludes", lambda language: asked.add(language) or preludes(language))
    numbers = special(torch.float32)
    x = numbers.repeat(3)[:67]
    names = ("relu", "clamp", "clamp_min", "round", "sign", "to bfloat16")
    jobs = [Job(name, EXACT_UNARY[name], (x,), exact=True) for name in names]
    pairs = torch.cartesian_prod(numbers, numbers).T
    a, b = (row.clone() for row in pairs)
    jobs += [Job(name, EXACT_BINARY[name], (a, b), exact=True) for name in ("fmax", "fmin", "fmod")]
    jobs.append(Job("erfinv", torch.erfinv, (x,), exact=False))
    wrong = list(failures(iter(jobs)))
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:20])
    assert asked == {"numba"}


def test_signs_of_complex_zeros_are_kept() -> None:
    """They choose the side of a branch cut: in one trace, in the next, and followed."""
    x = torch.ones(3, dtype=torch.complex64)
    above, below = complex(-1, 0.0), complex(-1, -0.0)
    for numbers in ((above, below), (below, above), (below, below), (above, above), (below, above)):
        expected = [torch.full_like(x, number).angle() for number in numbers]
        found = [torch.full_like(x.to("lazy"), number).angle() for number in numbers]
        assert [value.tolist() for value in found] == [value.tolist() for value in expected]
        torchlazy.sync()
