"""The C++ generator's loops: reductions, layouts, masked and indirect access, foreach, donation, golden texts."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cpp_cases import HAS_COMPILER, KernelBuilder, bits_of, buffer, compile_all, run, run_all
from torchlazy.inductor.codegen import cpp_plan
from torchlazy.inductor.codegen.cpp import emit
from torchlazy.inductor.codegen.cpp_ops import literal
from torchlazy.inductor.index import FloorDiv, Mod

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
i8, u8, i16, i32, i64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64


def sample(dtype: torch.dtype, seed: int, n: int) -> torch.Tensor:
    """Numbers that every dtype holds."""
    values = torch.randint(-9, 10, (n,), generator=torch.Generator().manual_seed(seed))
    return (values > 0) if dtype is torch.bool else values.to(dtype)


def exp_kernel(n: int) -> Any:
    k = KernelBuilder((n,))
    k.read("a", (n,))
    k.point(buffer("o", (n,)), lambda ops, i: ops.exp(ops.load("a", i[0])))
    return k.build()


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
    wanted = a.double().softmax(1).float()  # eager's own is off by 3e-5 in the longest row
    torch.testing.assert_close(run(softmax_kernel(*shape), {"a": a})["o"], wanted, rtol=5e-6, atol=1e-7)


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


def test_threads_stand_where_tasks_may_be_shared() -> None:
    """Else the body is called once, and compiled into the entry."""
    header = (Path(cpp_plan.__file__).parent / "cpp_reduce.h").read_text()
    assert "work_each >= (1 << 18)" in header and cpp_plan.SHARED_WORK == 1 << 18
    for rows, shared in ((1, False), (4, False), (4096, True)):
        text = emit(softmax_kernel(rows, 1000)).source.text
        assert ("omp parallel" in text) == ("TL_APART" in text) == shared, rows
    assert "omp parallel" in emit(adam_kernel(64)).source.text  # of any size
    assert "omp parallel" in emit(adam_kernel(64), foreach=True).source.text


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


@pytest.mark.parametrize("shape", [(4, 8), (300, 200), (3, 3)])
def test_foreach_of_equal_reductions(shape: tuple[int, int]) -> None:
    emitted = emit(softmax_kernel(*shape), foreach=True)
    assert emitted.source.foreach and emitted.sizes == ()
    (function,) = compile_all([emitted.source])
    tensors = {name: [torch.randn(shape) for _ in range(5)] for name in emitted.buffers}
    table = torch.tensor([[tensors[name][k].data_ptr() for name in emitted.buffers] for k in range(5)], dtype=i64)
    first, last = emitted.buffers[0], emitted.buffers[-1]
    assert function(table.data_ptr(), 5) == 0
    for source, out in zip(tensors[first], tensors[last], strict=True):
        torch.testing.assert_close(out, source.softmax(1))


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
    assert emit(k.build()).source.text == emit(exp_kernel(83)).source.text


GOLDEN = Path(__file__).parents[2] / "golden" / "cpp"
GOLDEN_KERNELS: dict[str, Callable[[], Any]] = {
    "flat": lambda: exp_kernel(1000),
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
