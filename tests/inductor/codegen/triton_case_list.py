"""The kernels that the Triton generator is tested on: see `triton_cases`.

`TRITON_INTERPRET=1 python -m tests.inductor.codegen.triton_case_list [part of a name]...` runs them in the interpreter
and prints one JSON object, case name -> "" or what went wrong. Triton decides at import whether it interprets, so tests
do that in a process of their own.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from torchlazy.inductor.codegen.triton import emit
from torchlazy.inductor.codegen.triton_choices import Blocks
from torchlazy.inductor.index import FloorDiv, Mod
from torchlazy.inductor.ir import Kernel
from torchlazy.inductor.ops_handler import BINARY_OPS, UNARY_OPS

from tests.inductor.codegen.triton_cases import (
    Case,
    KernelBuilder,
    bf16,
    buffer,
    f16,
    f32,
    f64,
    launch_foreach,
    run_case,
)

i8, u8, i16, i32, i64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
INTS = (u8, i8, i16, i32, i64)
N = 24
LOOP = Blocks(2, 4, 1, False, "test")
LOOP_WIDE = Blocks(4, 8, 1, False, "test")
LOOP_IN_FLIGHT = Blocks(2, 4, 1, False, "test", loop_stages=3)

FLOAT_UNARY = [op for op in UNARY_OPS if op not in ("logical_not", "bitwise_not")]
INT_UNARY = [
    "neg",
    "abs",
    "sign",
    "ceil",
    "floor",
    "trunc",
    "round",
    "isnan",
    "isinf",
    "signbit",
    "logical_not",
    "bitwise_not",
]
FLOAT_BINARY = [op for op in BINARY_OPS if not op.startswith(("bitwise", "shift"))]
INT_BINARY = [op for op in BINARY_OPS if op not in ("div", "atan2", "copysign", "hypot", "nextafter", "fmax", "fmin")]
BOOL_BINARY = [
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
]
TO_BOOL = ("isnan", "isinf", "signbit", "logical_not", "eq", "ne", "lt", "le", "gt", "ge")

TORCH_NAME: dict[str, Callable[..., torch.Tensor]] = {
    "floor_div": torch.floor_divide,
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}
ON_BOOL = {
    "add": torch.logical_or,
    "sub": torch.logical_xor,
    "mul": torch.logical_and,
    "maximum": torch.logical_or,
    "minimum": torch.logical_and,
}


def oracle(op: str, *operands: torch.Tensor) -> torch.Tensor:
    """What torch says."""
    if operands[0].dtype == torch.bool and op in ON_BOOL:
        return ON_BOOL[op](*operands)
    return TORCH_NAME[op](*operands) if op in TORCH_NAME else getattr(torch, op)(*operands)


def sample(dtype: torch.dtype, seed: int = 0, n: int = N) -> torch.Tensor:
    """Numbers of both signs; floats with the special ones."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    if not dtype.is_floating_point:
        low = 0 if dtype == u8 else -20
        return torch.randint(low, 21, (n,), generator=generator).to(dtype)
    values = torch.randn(n, generator=generator, dtype=f64).mul(3)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 0.5, 1.5, 2.5, -0.5, -1.5, 1.0, -1.0]
    values[: len(special)] = torch.tensor(special, dtype=f64)
    return values[torch.randperm(n, generator=generator)].to(dtype)


def pointwise_ops(name: str, ops: list[str], dtype: torch.dtype, operands: list[torch.Tensor], rtol: float) -> Case:
    """All of `ops` on the same operands in one kernel."""
    n = operands[0].numel()
    k = KernelBuilder((n,))
    reads = [k.read(f"in{i}", (n,), dtype) for i in range(len(operands))]
    k.sweep(False)
    expected = {}
    for op in ops:
        out = buffer(f"out_{op}", (n,), torch.bool if op in TO_BOOL else dtype)

        def body(ops: Any, idx: Any, op: str = op) -> Any:
            return getattr(ops, op)(*(ops.load(b.name, b.element(idx)) for b in reads))

        k.point(out, body)
        expected[out.name] = oracle(op, *operands)
    inputs = {b.name: t for b, t in zip(reads, operands, strict=True)}
    return Case(name, k.build(), inputs, expected, rtol=rtol)


def op_cases() -> Iterator[Case]:
    """Every pointwise op on every dtype that it takes."""
    for dtype, rtol in ((f32, 2e-6), (f64, 1e-13)):
        x = sample(dtype)
        y = sample(dtype, 1)
        tag = str(dtype).removeprefix("torch.")
        yield pointwise_ops(f"unary_{tag}", FLOAT_UNARY, dtype, [x], rtol)
        yield pointwise_ops(f"binary_{tag}", FLOAT_BINARY, dtype, [x, y], rtol)
    for dtype in INTS:
        x, y = sample(dtype), sample(dtype, 1)
        y = torch.where(y == 0, torch.ones_like(y), y)
        if dtype == u8:
            y = y.clamp(max=7)
        tag = str(dtype).removeprefix("torch.")
        unary = [op for op in INT_UNARY if not (dtype == u8 and op == "neg")]
        yield pointwise_ops(f"unary_{tag}", unary, dtype, [x], 0)
        yield pointwise_ops(f"binary_{tag}", [op for op in INT_BINARY if op != "pow"], dtype, [x, y], 0)
        yield pointwise_ops(f"pow_{tag}", ["pow"], dtype, [x, y.abs()], 0)
    x, y = sample(torch.bool), sample(torch.bool, 1)
    yield pointwise_ops("unary_bool", ["logical_not", "bitwise_not", "sign"], torch.bool, [x], 0)
    yield pointwise_ops("binary_bool", BOOL_BINARY, torch.bool, [x, y], 0)


CONVERT_TO = (torch.bool, u8, i8, i32, i64, f16, bf16, f32, f64)


def convert_cases() -> Iterator[Case]:
    """to_dtype between all kinds of dtypes, bitcasts, where, constants, scalars, index values."""
    for source in (torch.bool, u8, i32, i64, f16, bf16, f32, f64):
        x = torch.tensor([0, 1, 2, 3, 100, 7, 5, 9] if source == u8 else [0, 1, -2, 3.5, 100, -7.25, 0.1, 1e-3]).to(
            source
        )
        k = KernelBuilder((8,))
        a = k.read("a", (8,), source)
        k.sweep(False)
        expected = {}
        for target in CONVERT_TO:
            if source.is_floating_point and target == u8:
                continue  # negative to unsigned: undefined in torch
            out = buffer(f"out_{target}".replace("torch.", ""), (8,), target)
            k.point(out, lambda ops, idx, t=target, a=a: ops.to_dtype(ops.load("a", a.element(idx)), t))
            expected[out.name] = x.to(target)
        yield Case(f"convert_{source}".replace("torch.", ""), k.build(), {"a": x}, expected)

    k = KernelBuilder((8,), scalars=(("lr", float), ("step", int)))
    a = k.read("a", (8,), f32)
    k.sweep(False)
    load = lambda ops, idx: ops.load("a", a.element(idx))  # noqa: E731
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, math.inf, math.nan, 3.5, 1e-30])
    k.point(buffer("bits", (8,), i32), lambda ops, idx: ops.bitcast(load(ops, idx), i32))
    k.point(buffer("back", (8,), f32), lambda ops, idx: ops.bitcast(ops.bitcast(load(ops, idx), i32), f32))
    k.point(
        buffer("picked", (8,), f32),
        lambda ops, idx: ops.where(
            ops.gt(load(ops, idx), ops.constant(0.0, f32)), load(ops, idx), ops.constant(-math.inf, f32)
        ),
    )
    k.point(
        buffer("scaled", (8,), f32),
        lambda ops, idx: ops.mul(load(ops, idx), ops.mul(ops.scalar("lr", f32), ops.scalar("step", f32))),
    )
    k.point(buffer("position", (8,), i64), lambda ops, idx: ops.index_expr(idx[0] * 3 + 1, i64))
    k.point(buffer("far", (8,), i64), lambda ops, idx: ops.index_expr(idx[0] * 2**33 + 1, i64))
    k.point(buffer("nan", (8,), f32), lambda ops, idx: ops.constant(math.nan, f32))
    k.point(buffer("rounded", (8,), f32), lambda ops, idx: ops.to_dtype(ops.constant(1.7, f32), f16))
    expected = {
        "bits": x.view(i32),
        "back": x,
        "picked": torch.where(x > 0, x, -math.inf),
        "scaled": x * 1.5,
        "position": torch.arange(8) * 3 + 1,
        "far": torch.arange(8) * 2**33 + 1,
        "nan": torch.full((8,), math.nan),
        "rounded": torch.full((8,), 1.7).half().float(),
    }
    yield Case("memory_ops", k.build(), {"a": x}, expected, scalars={"lr": 0.5, "step": 3})


def layout_cases() -> Iterator[Case]:
    """Broadcast, transpose, views that need divisions, padding, gather, halves, aliases."""
    x = torch.randn(6, 4)
    k = KernelBuilder((4, 6))
    a = k.read("a", (6, 4))
    bias = k.read("bias", (4,))
    k.sweep(False)
    k.point(
        buffer("out", (4, 6)),
        lambda ops, i, a=a: ops.add(ops.load("a", a.element((i[1], i[0]))), ops.load("bias", bias.element(i[:1]))),
    )
    b = torch.randn(4)
    yield Case("transpose_bias", k.build(), {"a": x, "bias": b}, {"out": (x.t() + b[:, None]).contiguous()})

    k = KernelBuilder((24,))
    a = k.read("a", (6, 4))
    k.sweep(False)
    k.point(buffer("out", (24,)), lambda ops, i, a=a: ops.load("a", a.element((Mod(i[0], 6), FloorDiv(i[0], 6)))))
    yield Case("view_divisions", k.build(), {"a": x}, {"out": x.t().reshape(-1)})

    k = KernelBuilder((9,))
    a = k.read("a", (6,))
    k.sweep(False)

    def padded(ops: Any, i: Any, a: Any = a) -> Any:
        inside = ops.bitwise_and(
            ops.ge(ops.index_expr(i[0], i64), ops.constant(2, i64)),
            ops.lt(ops.index_expr(i[0], i64), ops.constant(8, i64)),
        )
        return ops.masked(inside, lambda: ops.exp(ops.load("a", a.element((i[0] - 2,)))), -1.5)

    k.point(buffer("out", (9,)), padded)
    v = torch.randn(6)
    pad = torch.full((9,), -1.5)
    pad[2:8] = v.exp()
    yield Case("masked", k.build(), {"a": v}, {"out": pad})

    k = KernelBuilder((5, 4))
    table, index = k.read("table", (6, 4)), k.read("index", (5,), i64)
    k.sweep(False)

    def gathered(ops: Any, i: Any, table: Any = table, index: Any = index) -> Any:
        row = ops.indirect(ops.load("index", index.element(i[:1])), sympy.Integer(6), "index 0")
        return ops.load("table", table.element((row, i[1])))

    k.point(buffer("out", (5, 4)), gathered)
    where = torch.tensor([0, -1, 5, 2, 99])  # 99 is clamped
    yield Case("indirect", k.build(), {"table": x, "index": where}, {"out": x[where.clamp(max=5)]})

    k = KernelBuilder((40,), aliases=(("new", "old"),))
    old, g = k.read("old", (40,), bf16), k.read("g", (40,), f16)
    k.sweep(False)
    k.point(buffer("half", (40,), bf16), lambda ops, i: ops.to_dtype(ops.load("g", g.element(i)), bf16), stored=False)
    k.point(
        buffer("new", (40,), bf16), lambda ops, i, a=a: ops.add(ops.load("old", old.element(i)), ops.load("half", i[0]))
    )
    a16, b16 = torch.arange(40).to(bf16), torch.arange(-20, 20).half()
    yield Case("halves_donated", k.build(), {"old": a16, "g": b16}, {"new": a16 + b16.to(bf16)})

    k = KernelBuilder((2, 3, 4))  # logical order with channels-last memory: axes must be put in memory order
    a = k.read("a", (2, 3, 4), f32, strides=(12, 1, 3))
    k.sweep(False)
    k.point(buffer("out", (2, 3, 4), f32, (12, 1, 3)), lambda ops, i, a=a: ops.neg(ops.load("a", a.element(i))))
    c = torch.randn(2, 3, 4)
    yield Case("channels_last", k.build(), {"a": c}, {"out": -c})

    k = KernelBuilder((5,))
    zero = k.read("zero", (), f32)
    k.sweep(False)
    k.point(buffer("out", (5,)), lambda ops, i: ops.add(ops.load("zero", zero.element(())), ops.constant(1.0, f32)))
    yield Case("scalar_load", k.build(), {"zero": torch.tensor(2.5)}, {"out": torch.full((5,), 3.5)})


def softmax_kernel(n: int, m: int, dtype: torch.dtype) -> Kernel:
    """Three sweeps over the rows of [n, m]."""
    k = KernelBuilder((n,), (m,))
    a = k.read("a", (n, m), dtype)
    mx, s = buffer("mx", (n,)), buffer("s", (n,))

    def weight(ops: Any, i: Any, r: Any) -> Any:
        return ops.exp(ops.sub(ops.load("a", a.element((*i, *r))), ops.load("mx", mx.element(i))))

    def normal(ops: Any, i: Any) -> Any:
        return ops.div(weight(ops, i[:1], i[1:]), ops.load("s", s.element(i[:1])))

    k.sweep(True)
    k.reduce([mx], "max", lambda ops, i, r: ops.load("a", a.element((*i, *r))), stored=False)
    k.sweep(True)
    k.reduce([s], "sum", weight, stored=False)
    k.sweep(True)
    k.point(buffer("out", (n, m), dtype), normal)
    return k.build()


def softmax(n: int, m: int, dtype: torch.dtype, blocks: Blocks | None, name: str) -> Case:
    """Softmax of rows."""
    x = torch.randn(n, m).to(dtype)
    return Case(name, softmax_kernel(n, m, dtype), {"a": x}, {"out": x.softmax(1)}, blocks=blocks)


def layer_norm_kernel(n: int, m: int, dtype: torch.dtype) -> Kernel:
    """welford, a point sweep for rstd (stored), and the normalised rows."""
    k = KernelBuilder((n,), (m,))
    a, w, b = k.read("a", (n, m), dtype), k.read("w", (m,)), k.read("b", (m,))
    mean, m2, count, rstd = (buffer(t, (n,)) for t in ("mean", "m2", "count", "rstd"))

    def inverse(ops: Any, i: Any) -> Any:
        variance = ops.div(ops.load("m2", m2.element(i)), ops.load("count", count.element(i)))
        return ops.rsqrt(ops.add(variance, ops.constant(1e-5, f32)))

    def normal(ops: Any, i: Any) -> Any:
        centred = ops.sub(ops.load("a", a.element(i)), ops.load("mean", mean.element(i[:1])))
        scaled = ops.mul(ops.mul(centred, ops.load("rstd", rstd.element(i[:1]))), ops.load("w", w.element(i[1:])))
        return ops.add(scaled, ops.load("b", b.element(i[1:])))

    k.sweep(True)
    k.reduce([mean, m2, count], "welford", lambda ops, i, r: ops.load("a", a.element((*i, *r))), stored=False)
    k.sweep(False)
    k.point(rstd, inverse)
    k.sweep(True)
    k.point(buffer("out", (n, m), dtype), normal)
    return k.build()


def layer_norm(n: int, m: int, dtype: torch.dtype, blocks: Blocks | None, name: str) -> Case:
    """Layer norm of rows; 1 / deviation is an output too."""
    x, w, b = torch.randn(n, m).to(dtype), torch.randn(m), torch.randn(m)
    expected = {
        "out": torch.nn.functional.layer_norm(x.float(), (m,), w, b).to(dtype),
        "rstd": torch.rsqrt(x.float().var(1, unbiased=False) + 1e-5),
    }
    inputs = {"a": x, "w": w, "b": b}
    return Case(name, layer_norm_kernel(n, m, dtype), inputs, expected, blocks=blocks, rtol=2e-5, atol=2e-6)


def reduction_cases() -> Iterator[Case]:
    """Every reduction, persistent and looping, along either side."""
    yield softmax(5, 11, f32, None, "softmax_persistent")
    yield softmax(5, 11, bf16, None, "softmax_bf16")
    yield softmax(5, 11, f32, LOOP, "softmax_loop")
    yield softmax(3, 8, f32, LOOP_WIDE, "softmax_loop_even")
    yield layer_norm(3, 10, f32, None, "layer_norm_persistent")
    yield layer_norm(3, 10, f16, LOOP, "layer_norm_loop")
    yield layer_norm(3, 16, f32, LOOP_WIDE, "layer_norm_loop_even")

    # Blocks within one chunk: the chunk's number is one number in a program, and so are loads along it.
    for tag, blocks in (("loop", Blocks(4, 4, 1, False, "test")), ("persistent", Blocks(4, 8, 1, True, "test"))):
        x, mean, scale = torch.randn(3, 6, 8), torch.randn(3, 6), torch.randn(3)
        k = KernelBuilder((3, 8), (6,))
        a, m, c = k.read("a", (3, 6, 8)), k.read("mean", (3, 6)), k.read("scale", (3,))
        k.sweep(True)

        def centred(ops, i, r, a=a, m=m, c=c):
            less = ops.sub(ops.load("a", a.element((i[0], r[0], i[1]))), ops.load("mean", m.element((i[0], r[0]))))
            return ops.mul(less, ops.load("scale", c.element((i[0],))))

        k.reduce([buffer("out", (3, 8))], "sum", centred)
        wanted = ((x - mean[..., None]) * scale[:, None, None]).sum(1)
        yield Case(
            f"chunk_sum_{tag}", k.build(), {"a": x, "mean": mean, "scale": scale}, {"out": wanted}, blocks=blocks
        )

    for tag, blocks in (("persistent", None), ("loop", LOOP), ("loop_in_flight", LOOP_IN_FLIGHT)):
        x = torch.randn(9, 5)
        k = KernelBuilder((5,), (9,))
        a = k.read("a", (9, 5))
        k.sweep(True)
        k.reduce([buffer("out", (5,))], "sum", lambda ops, i, r, a=a: ops.load("a", a.element((r[0], i[0]))))
        yield Case(f"column_sum_{tag}", k.build(), {"a": x}, {"out": x.sum(0)}, blocks=blocks)

        x = torch.randn(3, 2, 7)
        x[0, 1, 3] = x[0, 0, 2] = math.nan
        x[1, 0, 5] = x[1, 1, 1] = 9.0
        y = torch.randint(-5, 5, (3, 2, 7), dtype=i32)
        k = KernelBuilder((3,), (2, 7))
        a, b = k.read("a", (3, 2, 7)), k.read("b", (3, 2, 7), i32)
        k.sweep(True)
        expected: dict[str, torch.Tensor] = {}
        flat, flat_int = x.reshape(3, 14), y.reshape(3, 14)

        def load(ops: Any, i: Any, r: Any, a: Any = a) -> Any:
            return ops.load("a", a.element((*i, *r)))

        def load_int(ops: Any, i: Any, r: Any, b: Any = b) -> Any:
            return ops.load("b", b.element((*i, *r)))

        def positive(ops: Any, i: Any, r: Any) -> Any:
            return ops.gt(load_int(ops, i, r), ops.constant(-5, i32))

        for kind in ("max", "min", "argmax", "argmin", "prod", "sum"):
            out_dtype = i64 if kind.startswith("arg") else f32
            k.reduce([buffer(f"f_{kind}", (3,), out_dtype)], kind, load, accumulate=f32)
            k.reduce([buffer(f"i_{kind}", (3,), i64)], kind, load_int, accumulate=i64)
            name = {"max": "amax", "min": "amin"}.get(kind, kind)
            expected[f"f_{kind}"] = getattr(torch, name)(flat, dim=1)
            expected[f"i_{kind}"] = getattr(torch, name)(flat_int.long(), dim=1)
        k.reduce([buffer("any", (3,), torch.bool)], "any", positive, accumulate=torch.bool)
        k.reduce([buffer("all", (3,), torch.bool)], "all", positive, accumulate=torch.bool)
        expected |= {"any": (flat_int > -5).any(1), "all": (flat_int > -5).all(1)}
        first = flat_int == flat_int.amax(1, keepdim=True)  # torch does not promise the first on ties
        expected["i_argmax"] = first.int().argmax(1)
        expected["i_argmin"] = (flat_int == flat_int.amin(1, keepdim=True)).int().argmax(1)
        yield Case(f"every_reduction_{tag}", k.build(), {"a": x, "b": y}, expected, blocks=blocks)

        k = KernelBuilder((), (3, 6))  # a full reduction of a transposed reader, float64, stored and loaded later
        a = k.read("a", (6, 3), f64)
        total, out = buffer("total", (), f64), buffer("out", (3, 6), f64)
        k.sweep(True)
        k.reduce([total], "sum", lambda ops, i, r, a=a: ops.load("a", a.element((r[1], r[0]))), accumulate=f64)
        k.reduce(
            [buffer("at", (), i64)],
            "argmax",
            lambda ops, i, r, a=a: ops.load("a", a.element((r[1], r[0]))),
            accumulate=f64,
        )
        k.sweep(True)
        k.point(
            out,
            lambda ops, i, a=a: ops.div(ops.load("a", a.element((i[1], i[0]))), ops.load("total", sympy.Integer(0))),
        )
        x = torch.randn(6, 3, dtype=f64)
        blocks = blocks and Blocks(1, 4, 1, False, "test")
        yield Case(
            f"full_reduction_{tag}",
            k.build(),
            {"a": x},
            {"total": x.sum(), "out": (x.t() / x.sum()).contiguous(), "at": x.t().reshape(-1).argmax()},
            blocks=blocks,
        )

        k = KernelBuilder((3,), (6,))  # a value stored in one sweep over r and loaded in the next
        a = k.read("a", (3, 6))
        mid = k.read("mid", (3, 6))
        k.sweep(True)
        k.point(mid, lambda ops, i, a=a: ops.mul(ops.load("a", a.element(i)), ops.constant(2.0, f32)))
        k.reduce(
            [buffer("s", (3,))], "sum", lambda ops, i, r, mid=mid: ops.load("mid", mid.element((*i, *r))), stored=False
        )
        k.sweep(True)
        k.point(
            buffer("out", (3, 6)), lambda ops, i, mid=mid: ops.sub(ops.load("mid", mid.element(i)), ops.load("s", i[0]))
        )
        x = torch.randn(3, 6)
        yield Case(
            f"stored_between_sweeps_{tag}",
            k.build(),
            {"a": x},
            {"mid": 2 * x, "out": 2 * x - (2 * x).sum(1, keepdim=True)},
            blocks=blocks and LOOP,
        )


def philox_word0(seed: int, stream: int, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10 in Python, from its definition."""
    mask = 0xFFFFFFFF
    words = []
    for n in counter.tolist():
        k0, k1 = seed & mask, (seed >> 32) & mask
        c = [n & mask, (n >> 32) & mask, stream & mask, 0]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(p1 >> 32) ^ c[1] ^ k0, p1 & mask, (p0 >> 32) ^ c[3] ^ k1, p0 & mask]
            k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
        words.append(c[0])
    return np.array(words, dtype=np.uint32).view(np.int32)


def philox_cases() -> Iterator[Case]:
    """Random bits from a scalar seed, and the known answer of key 0, counter 0."""
    k = KernelBuilder((16,), scalars=(("seed", int),))
    k.sweep(False)
    bits = lambda ops, seed, stream, count: ops.random_bits(seed, ops.constant(stream, i32), count)  # noqa: E731
    k.point(buffer("out", (16,), i32), lambda ops, i: bits(ops, ops.scalar("seed", i64), 7, ops.index_expr(i[0], i64)))
    k.point(
        buffer("far", (16,), i32),
        lambda ops, i: bits(ops, ops.scalar("seed", i64), -3, ops.index_expr(i[0] * 2**33, i64)),
    )
    k.point(buffer("zero", (16,), i32), lambda ops, i: bits(ops, ops.constant(0, i64), 0, ops.constant(0, i64)))
    seed = 0x1234_5678_9ABC_DEF0
    yield Case(
        "philox",
        k.build(),
        {},
        {
            "out": torch.from_numpy(philox_word0(seed, 7, np.arange(16))),
            "far": torch.from_numpy(philox_word0(seed, -3, np.arange(16) * 2**33)),
            "zero": torch.full((16,), 0x6627E8D5, dtype=i32),
        },
        scalars={"seed": seed},
    )


def adam_kernel(numel: int) -> KernelBuilder:
    """p -= lr * m / (sqrt(v) + eps) with new m and v, all in place; lr shared, the step size its row's own."""
    k = KernelBuilder(
        (numel,), scalars=(("lr", float), ("correction", float)), aliases=(("p1", "p"), ("m1", "m"), ("v1", "v"))
    )
    g, p, m, v = (k.read(name, (numel,), bf16 if name == "g" else f32) for name in ("g", "p", "m", "v"))
    m1, v1, p1 = (buffer(name, (numel,)) for name in ("m1", "v1", "p1"))
    k.sweep(False)

    def blend(ops: Any, old: Any, new: Any, beta: float) -> Any:
        return ops.add(ops.mul(old, ops.constant(beta, f32)), ops.mul(new, ops.constant(1 - beta, f32)))

    k.point(m1, lambda ops, i: blend(ops, ops.load("m", m.element(i)), ops.load("g", g.element(i)), 0.9))
    k.point(
        v1,
        lambda ops, i: blend(
            ops, ops.load("v", v.element(i)), ops.mul(ops.load("g", g.element(i)), ops.load("g", g.element(i))), 0.99
        ),
    )

    def step(ops: Any, i: Any) -> Any:
        size = ops.div(
            ops.load("m1", m1.element(i)), ops.add(ops.sqrt(ops.load("v1", v1.element(i))), ops.constant(1e-8, f32))
        )
        scale = ops.mul(ops.scalar("lr", f32), ops.scalar("correction", f32))
        return ops.sub(ops.load("p", p.element(i)), ops.mul(scale, size))

    k.point(p1, step)
    return k


def check_foreach(device: str, folder: Path) -> None:
    """Rows of several sizes and alignments against eager."""
    emitted = emit(
        adam_kernel(9).build(),
        foreach=True,
        row_scalars=frozenset({"correction"}),
        blocks=Blocks(16, 0, 1, False, "test"),
    )
    assert emitted.source.foreach and emitted.scalars == ("lr",) and emitted.row_scalars == ("correction",)
    rows, expected, own = [], [], []
    for n, size in enumerate((1, 16, 37, 64)):
        base = torch.randn(4, size + 1, device=device)
        skip = 1 if size == 37 else 0  # a row whose pointers are not aligned
        p, m, v = (base[i, skip : skip + size].clone() if not skip else base[i, 1 : 1 + size] for i in range(3))
        v.abs_()
        g = base[3, :size].to(bf16)
        own.append({"correction": 1.0 + n})
        m1 = m * 0.9 + g.float() * (1 - 0.9)
        v1 = v * 0.99 + g.float() * g.float() * (1 - 0.99)
        expected.append((p - 0.1 * (1.0 + n) * (m1 / (v1.sqrt() + 1e-8)), m1, v1))
        rows.append({"g": g, "p": p, "m": m, "v": v, "p1": p, "m1": m, "v1": v})
    launch_foreach(emitted, rows, {"lr": 0.1}, own, folder)
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in zip(("p", "m", "v"), wanted, strict=True):
            torch.testing.assert_close(row[name], value, rtol=1e-5, atol=1e-6)


def square_sum_kernel(numel: int) -> KernelBuilder:
    """The root of a sum of squares."""
    k = KernelBuilder((), (numel,))
    a = k.read("a", (numel,), bf16)
    k.sweep(True)
    value = lambda ops, i, r: ops.mul(ops.load("a", a.element(r)), ops.load("a", a.element(r)))  # noqa: E731
    (total,) = k.reduce([buffer("total", ())], "sum", value, stored=False)
    k.sweep(False)
    k.point(buffer("norm", ()), lambda ops, i: ops.sqrt(ops.load("total", total.element(i))))
    return k


def column_sum_kernel(rows: int, columns: int) -> KernelBuilder:
    """The second stage of a bias gradient."""
    k = KernelBuilder((columns,), (rows,))
    a = k.read("a", (rows, columns))
    k.sweep(True)
    k.reduce([buffer("out", (columns,))], "sum", lambda ops, i, r: ops.load("a", a.element((*r, *i))))
    return k


def check_foreach_norms(device: str, folder: Path) -> None:
    """Reductions to one result are one text for all lengths; a row that is not aligned among them."""
    lengths = (2, 5, 1024, 2500, 4096)
    emitted = [emit(square_sum_kernel(length).build(), foreach=True) for length in lengths]
    assert {one.source.key for one in emitted} == {emitted[0].source.key}
    assert [one.sizes for one in emitted] == [(1, length) for length in lengths]
    rows = []
    for length in lengths:
        values = torch.randn(length + 1, device=device).to(bf16)
        rows.append({"a": values[1:] if length == 5 else values[:length], "norm": torch.empty((), device=device)})
    launch_foreach(emitted[0], rows, {}, [{}] * len(rows), folder, [one.sizes for one in emitted])
    for row in rows:
        torch.testing.assert_close(row["norm"], row["a"].float().norm(), rtol=1e-5, atol=1e-6)


def check_foreach_columns(device: str, folder: Path) -> None:
    """Column sums of one shape, with columns that do not fill a block."""
    emitted = emit(column_sum_kernel(9, 40).build(), foreach=True, blocks=Blocks(16, 4, 1, False, "test"))
    rows = [{"a": torch.randn(9, 40, device=device), "out": torch.empty(40, device=device)} for _ in range(3)]
    launch_foreach(emitted, rows, {}, [{}] * 3, folder, [emitted.sizes] * 3)
    for row in rows:
        torch.testing.assert_close(row["out"], row["a"].sum(0), rtol=1e-5, atol=1e-5)


def check_foreach_sweeps(device: str, folder: Path) -> None:
    """A kernel of several sweeps over rows of a table."""
    emitted = emit(softmax_kernel(6, 48, f32), foreach=True)
    rows = [{"a": torch.randn(6, 48, device=device), "out": torch.empty(6, 48, device=device)} for _ in range(2)]
    launch_foreach(emitted, rows, {}, [{}] * 2, folder, [emitted.sizes] * 2)
    for row in rows:
        torch.testing.assert_close(row["out"], row["a"].softmax(1), rtol=1e-5, atol=1e-6)


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "foreach_adam": check_foreach,
    "foreach_norms": check_foreach_norms,
    "foreach_columns": check_foreach_columns,
    "foreach_sweeps": check_foreach_sweeps,
}


def all_cases() -> list[Case]:
    """Every case, with the same random inputs each time."""
    torch.manual_seed(0)
    return [*op_cases(), *convert_cases(), *layout_cases(), *reduction_cases(), *philox_cases()]


def main() -> None:
    """Run the cases, or those whose names contain an argument, in the interpreter; print a JSON object."""
    report: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs: dict[str, Callable[[], None]] = {
            case.name: partial(run_case, case, "cpu", folder) for case in all_cases()
        }
        jobs |= {name: partial(check, "cpu", folder) for name, check in CHECKS.items()}
        for name, job in jobs.items():
            if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
                continue
            try:
                job()
                report[name] = ""
            except Exception as error:
                report[name] = "".join(traceback.format_exception(error))[-3000:]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
