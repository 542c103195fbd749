"""Chains of pointwise operators in a half: with `config.precision = "eager"` the fused program gives eager's very bits.

A chain is two to four operators of the database's pointwise part, the one in question at a place of its own among
others drawn at random; each rounds to the half, and none of the roundings may be lost or added.
Invariant: chains depend on the operator's name and the dtype alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo

from tests.opinfo.batch import Case
from tests.opinfo.compare import Difference
from tests.opinfo.samples import database, name_of, on_cpu, on_lazy

Step = Callable[..., torch.Tensor]
SHAPE = (8, 64)  # whole vectors: eager's own kernels round otherwise in a remainder

# Of three operands at most: what has arguments of its own, or is no "ufunc" of the database.
_OTHERS: dict[str, Step] = {
    "where": lambda x, y, z: torch.where(x > 0, y, z),
    "clamp": lambda x: torch.clamp(x, -0.5, 1.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=2),
    "masked_fill": lambda x, y: x.masked_fill(y < 0, 1.5),
    "add": lambda x, y: torch.add(x, y, alpha=0.25),
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x: 1 - x,
    "div.floor_rounding": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div.trunc_rounding": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=0.5, posinf=3.0, neginf=-3.0),
    "nn.functional.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "nn.functional.leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "nn.functional.hardtanh": lambda x: F.hardtanh(x, -0.5, 0.5),
    "nn.functional.threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "nn.functional.softplus": lambda x: F.softplus(x),
    "nn.functional.hardswish": lambda x: F.hardswish(x),
}

# Where eager's digits depend on the place of an element (the remainder of a vector loop), on the vector library's last
# digit, or on doubles, and what draws at random or gives complex numbers.
LEFT_OUT: dict[str, str] = {
    "erf": "eager's vector kernel is a polynomial that loses all digits near 0",
    "special.erfcx": "a series: the last digit of float32 differs",
    "lgamma": "a series: the last digit of float32 differs",
    "sinc": "the last digit of float32 differs",
    "special.ndtr": "the last digit of float32 differs",
    "nn.functional.mish": "the last digit of float32 differs",
    "float_power": "a power of doubles: the last digit differs",
    "cosh": "eager overflows at 89, before the half does",
    "sinh": "eager overflows at 89, before the half does",
}
# Sign of a zero: eager's depends on the place of an element, or its maximum keeps that of the operand.
_LAST = frozenset({"nn.functional.relu", "nn.functional.relu6", "nn.functional.softshrink"})


def steps(dtype: torch.dtype) -> dict[str, tuple[Step, int]]:
    """The pointwise operators that take this dtype, each with its number of operands."""
    found: dict[str, tuple[Step, int]] = {}
    for name, op in database().items():
        if name in LEFT_OUT or dtype not in op.supported_dtypes("cpu"):
            continue
        if name in _OTHERS:
            found[name] = _OTHERS[name], _OTHERS[name].__code__.co_argcount
        elif isinstance(op, UnaryUfuncInfo) and not _keeps_no_half(op, dtype, 1):
            found[name] = op, 1
        elif isinstance(op, BinaryUfuncInfo) and not _keeps_no_half(op, dtype, 2):
            found[name] = op, 2
    return found


def _keeps_no_half(op: OpInfo, dtype: torch.dtype, operands: int) -> bool:
    """Whether it gives no single tensor of real numbers, or is not one of elementwise operators alone."""
    try:
        result = op(*[torch.ones(2, dtype=dtype)] * operands)
    except Exception:
        return True
    return not isinstance(result, torch.Tensor) or result.dtype.is_complex or result.dtype == torch.float64


def precision_cases(op: OpInfo, dtype: torch.dtype, limit: int) -> list[Case]:
    """`limit` chains (0: eight) through this operator."""
    known = steps(dtype)
    name = name_of(op)
    if name not in known:
        return []
    return [_case(name, number, known, dtype) for number in range(limit or 8)]


def _case(name: str, number: int, known: dict[str, tuple[Step, int]], dtype: torch.dtype) -> Case:
    draw = random.Random(zlib.crc32(f"{name} {dtype} {number}".encode()))
    partners = [other for other in known if other not in _LAST]
    chain = [draw.choice(partners) for _ in range(draw.randint(1, 3))]
    chain.insert(len(chain) if name in _LAST else draw.randint(0, len(chain)), name)
    picks = [[draw.randint(0, 2) for _ in range(2)] for _ in chain]
    inputs = _inputs(zlib.crc32(name.encode()) + number, dtype)

    def run(place: Callable[[Any], Any]) -> torch.Tensor:
        operands = [place(x) for x in inputs]
        value = operands[0]
        for link, others in zip(chain, picks, strict=True):
            step, count = known[link]
            value = step(value, *[operands[i] for i in others[: count - 1]]).to(dtype)
        return value

    want = run(on_cpu)

    def check(have: torch.Tensor) -> bool:
        real = have.detach().cpu()
        if real.dtype != want.dtype or real.stride() != want.stride():
            raise Difference("dtype", f"{real.dtype} {real.stride()}, eager's {want.dtype} {want.stride()}")
        wrong = ~((real == want) | (real.isnan() & want.isnan()))
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            told = (
                f"{int(wrong.sum())} of {wrong.numel()} differ, first {real[at].item()!r}, eager's {want[at].item()!r}"
            )
            raise Difference("value", told)
        return True

    return Case(number, " > ".join(chain), lambda: run(on_lazy), check)


def _inputs(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Normal numbers of several sizes, among them a few that are special."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for scale in (1.0, 3.0, 0.1):
        x = torch.randn(SHAPE, generator=generator) * scale
        x[0, :6] = torch.tensor([1.0, -1.0, 0.5, 2.0, float("inf"), float("nan")])[
            torch.randperm(6, generator=generator)
        ]
        made.append(x.to(dtype))
    return made
