"""Generated C++ kernels against torch eager on this CPU: time ratios, alternating runs, medians.

python benchmarks/cpp_kernels.py [--seconds 1.0] [--threads 1] [names ...]

Prints one line a kernel: our milliseconds, eager's, and their ratio (below 1: we are faster), of the fastest run (what
the code can do) and of the median. Eager writes into memory that is there already, as we do. Then compile time, when
all kernels stand in one translation unit. On a machine that others use, --threads 1 is the figure to trust.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "inductor" / "codegen"))
from cpp_cases import KernelBuilder, buffer, call, compile_all
from torchlazy.inductor.codegen.cpp import emit
from torchlazy.inductor.ir import Kernel

f32, bf16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Bench:
    """A kernel, its tensors, and the eager call that writes the same result (into its argument, where torch can)."""

    name: str
    kernel: Kernel
    tensors: dict[str, torch.Tensor]
    eager: Callable[[torch.Tensor], Any]
    scalars: dict[str, float]


def gelu(n: int, dtype: torch.dtype = f32) -> Bench:
    k = KernelBuilder((n,))
    k.read("a", (n,), dtype)

    def body(ops: Any, i: Any) -> Any:
        x = ops.load("a", i[0])
        half = ops.mul(x, ops.constant(0.5, f32))
        inner = ops.erf(ops.mul(x, ops.constant(0.7071067811865476, f32)))
        return ops.mul(half, ops.add(inner, ops.constant(1.0, f32)))

    k.point(buffer("o", (n,), dtype), body)
    a = torch.randn(n).to(dtype)
    return Bench(f"gelu {dtype} {n >> 20}M", k.build(), {"a": a, "o": torch.empty_like(a)},
                 lambda out: torch._C._nn.gelu(a, out=out), {})  # fmt: skip


def add(n: int) -> Bench:
    k = KernelBuilder((n,))
    k.read("a", (n,))
    k.read("b", (n,))
    k.point(buffer("o", (n,)), lambda ops, i: ops.add(ops.load("a", i[0]), ops.load("b", i[0])))
    a, b = torch.randn(n), torch.randn(n)
    return Bench(
        f"add {n >> 20}M",
        k.build(),
        {"a": a, "b": b, "o": torch.empty(n)},
        lambda out: torch.add(a, b, out=out),
        {},
    )


def softmax(rows: int, columns: int, dtype: torch.dtype = f32) -> Bench:
    k = KernelBuilder((rows,), (columns,))
    k.read("a", (rows, columns), dtype)

    def e(ops: Any, i: Any, r: Any) -> Any:
        return ops.exp(ops.sub(ops.load("a", i * columns + r), ops.load("m", i)))

    load = lambda ops, i, r: ops.load("a", i[0] * columns + r[0])  # noqa: E731
    k.sweep(True).reduce([buffer("m", (rows,))], "max", load, stored=False)
    k.sweep(True).reduce([buffer("s", (rows,))], "sum", lambda ops, i, r: e(ops, i[0], r[0]), stored=False)
    out = buffer("o", (rows, columns), dtype)
    k.sweep(True).point(out, lambda ops, i: ops.div(e(ops, i[0], i[1]), ops.load("s", i[0])))
    a = torch.randn(rows, columns).to(dtype)
    return Bench(f"softmax {dtype} {rows}x{columns}", k.build(), {"a": a, "o": torch.empty_like(a)},
                 lambda out: torch._softmax(a, 1, False, out=out), {})  # fmt: skip


def layer_norm(rows: int, columns: int) -> Bench:
    k = KernelBuilder((rows,), (columns,))
    k.read("a", (rows, columns))
    k.read("w", (columns,))
    k.read("b", (columns,))
    load = lambda ops, i, r: ops.load("a", i[0] * columns + r[0])  # noqa: E731
    k.sweep(True).reduce([buffer(n, (rows,)) for n in ("mean", "m2", "count")], "welford", load, stored=False)

    def inverse(ops: Any, i: Any) -> Any:
        variance = ops.div(ops.load("m2", i[0]), ops.load("count", i[0]))
        return ops.rsqrt(ops.add(variance, ops.constant(1e-5, f32)))

    k.sweep(False).point(buffer("inv", (rows,)), inverse)

    def normal(ops: Any, i: Any) -> Any:
        x = ops.sub(ops.load("a", i[0] * columns + i[1]), ops.load("mean", i[0]))
        return ops.add(ops.mul(ops.mul(x, ops.load("inv", i[0])), ops.load("w", i[1])), ops.load("b", i[1]))

    k.sweep(True).point(buffer("o", (rows, columns)), normal)
    a, w, b = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    tensors = {"a": a, "w": w, "b": b, "o": torch.empty_like(a), "inv": torch.empty(rows)}
    return Bench(f"layer_norm {rows}x{columns}", k.build(), tensors,
                 lambda out: torch.native_layer_norm(a, [columns], w, b, 1e-5), {})  # fmt: skip


def adamw(n: int) -> Bench:
    names = ("lr", "correction1", "correction2")
    k = KernelBuilder((n,), scalars=tuple((name, float) for name in names),
                      aliases=(("p2", "p"), ("m2", "m"), ("v2", "v")))  # fmt: skip
    for name in ("p", "g", "m", "v"):
        k.read(name, (n,))

    def c(ops: Any, value: float) -> Any:
        return ops.constant(value, f32)

    def moment(ops: Any, i: Any) -> Any:
        return ops.add(ops.mul(ops.load("m", i[0]), c(ops, 0.9)), ops.mul(ops.load("g", i[0]), c(ops, 0.1)))

    def second(ops: Any, i: Any) -> Any:
        g = ops.load("g", i[0])
        return ops.add(ops.mul(ops.load("v", i[0]), c(ops, 0.999)), ops.mul(ops.mul(g, g), c(ops, 0.001)))

    def update(ops: Any, i: Any) -> Any:
        lr = ops.scalar("lr", f32)
        decayed = ops.mul(ops.load("p", i[0]), ops.sub(c(ops, 1.0), ops.mul(lr, c(ops, 0.01))))
        root = ops.div(ops.sqrt(ops.load("v2", i[0])), ops.scalar("correction2", f32))
        step = ops.div(ops.load("m2", i[0]), ops.add(root, c(ops, 1e-8)))
        return ops.sub(decayed, ops.mul(step, ops.div(lr, ops.scalar("correction1", f32))))

    k.point(buffer("m2", (n,)), moment)
    k.point(buffer("v2", (n,)), second)
    k.point(buffer("p2", (n,)), update)
    p, g, m, v = torch.randn(n), torch.randn(n), torch.zeros(n), torch.zeros(n)
    tensors = {"p": p, "g": g, "m": m, "v": v, "p2": p, "m2": m, "v2": v}
    step = torch.tensor(10.0)

    def eager(out: torch.Tensor) -> None:
        torch._fused_adamw_([p], [g], [m], [v], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01,
                            eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip

    return Bench(f"adamw (eager: fused) {n >> 20}M", k.build(), tensors, eager,
                 {"lr": 1e-3, "correction1": 0.65, "correction2": 0.1})  # fmt: skip


def column_sum(rows: int, columns: int) -> Bench:
    k = KernelBuilder((columns,), (rows,))
    k.read("a", (rows, columns))
    k.sweep(True).reduce([buffer("o", (columns,))], "sum", lambda ops, i, r: ops.load("a", r[0] * columns + i[0]))
    a = torch.randn(rows, columns)
    return Bench(
        f"column sum {rows}x{columns}", k.build(), {"a": a, "o": torch.empty(columns)}, lambda out: a.sum(0), {}
    )


def row_sum(rows: int, columns: int) -> Bench:
    k = KernelBuilder((rows,), (columns,))
    k.read("a", (rows, columns))
    k.sweep(True).reduce([buffer("o", (rows,))], "sum", lambda ops, i, r: ops.load("a", i[0] * columns + r[0]))
    a = torch.randn(rows, columns)
    return Bench(f"row sum {rows}x{columns}", k.build(), {"a": a, "o": torch.empty(rows)}, lambda out: a.sum(1), {})


def full_sum(n: int) -> Bench:
    k = KernelBuilder((), (n,))
    k.read("a", (n,))
    k.sweep(True).reduce([buffer("o", ())], "sum", lambda ops, i, r: ops.load("a", r[0]))
    a = torch.randn(n)
    return Bench(f"full sum {n >> 20}M", k.build(), {"a": a, "o": torch.empty(())}, lambda out: a.sum(), {})


def transpose(rows: int, columns: int) -> Bench:
    k = KernelBuilder((columns, rows))
    k.read("a", (rows, columns))
    k.point(buffer("o", (columns, rows)), lambda ops, i: ops.load("a", i[1] * columns + i[0]))
    a = torch.randn(rows, columns)
    return Bench(f"transpose {rows}x{columns}", k.build(), {"a": a, "o": torch.empty(columns, rows)},
                 lambda out: out.copy_(a.t()), {})  # fmt: skip


def embedding(tokens: int, width: int) -> Bench:
    k = KernelBuilder((tokens, width))
    k.read("i", (tokens,), torch.int64)
    k.read("w", (50000, width))
    k.point(
        buffer("o", (tokens, width)),
        lambda ops, i: ops.load("w", ops.indirect(ops.load("i", i[0]), 50000, "embedding") * width + i[1]),
    )
    index, w = torch.randint(0, 50000, (tokens,)), torch.randn(50000, width)
    return Bench(f"embedding {tokens}x{width}", k.build(), {"i": index, "w": w, "o": torch.empty(tokens, width)},
                 lambda out: torch.index_select(w, 0, index, out=out), {})  # fmt: skip


def function(name: str, n: int) -> Bench:
    k = KernelBuilder((n,))
    k.read("a", (n,))
    k.point(buffer("o", (n,)), lambda ops, i: getattr(ops, name)(ops.load("a", i[0])))
    a = torch.randn(n).abs()
    return Bench(
        f"{name} {n >> 20}M",
        k.build(),
        {"a": a, "o": torch.empty(n)},
        lambda out: getattr(torch, name)(a, out=out),
        {},
    )


def dropout_bits(n: int) -> Bench:
    k = KernelBuilder((n,), scalars=(("seed", int),))
    k.read("a", (n,))

    def body(ops: Any, i: Any) -> Any:
        counter = ops.index_expr(i[0], torch.int64)
        bits = ops.random_bits(ops.scalar("seed", torch.int64), ops.constant(0, torch.int32), counter)
        keep = ops.gt(bits, ops.constant(-(2**31) + 429496730, torch.int32))
        return ops.where(keep, ops.mul(ops.load("a", i[0]), ops.constant(1 / 0.9, f32)), ops.constant(0.0, f32))

    k.point(buffer("o", (n,)), body)
    a = torch.randn(n)
    return Bench(f"dropout {n >> 20}M", k.build(), {"a": a, "o": torch.empty(n)},
                 lambda out: torch.nn.functional.dropout(a, 0.1), {"seed": 5})  # fmt: skip


M = 1 << 20
ALL: tuple[Callable[[], Bench], ...] = (
    lambda: add(M),
    lambda: add(16 * M),
    lambda: gelu(M),
    lambda: gelu(16 * M),
    lambda: gelu(4 * M, bf16),
    lambda: softmax(4096, 1024),
    lambda: softmax(128, 30522),
    lambda: softmax(4096, 1024, bf16),
    lambda: softmax(65536, 64),
    lambda: layer_norm(4096, 768),
    lambda: layer_norm(1024, 4096),
    lambda: adamw(M),
    lambda: adamw(8 * M),
    lambda: column_sum(16384, 1024),
    lambda: column_sum(65536, 64),
    lambda: column_sum(1024, 16384),
    lambda: row_sum(4096, 1024),
    lambda: full_sum(16 * M),
    lambda: transpose(2048, 2048),
    lambda: embedding(4096, 768),
    lambda: dropout_bits(4 * M),
    *(lambda name=name: function(name, 4 * M) for name in ("exp", "log", "sin", "tanh", "sqrt")),
)


def time_pair(ours: Callable[[], Any], eager: Callable[[], Any], seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds of both, runs alternating so that noise of the machine meets both."""
    for warm in (ours, eager, ours, eager):
        warm()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for samples, run in zip(times, (ours, eager), strict=True):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
    return [t * 1e3 for t in times[0]], [t * 1e3 for t in times[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="run only benchmarks whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    texts = []
    for make in ALL:
        bench = make()
        if options.names and not any(name in bench.name for name in options.names):
            continue
        emitted = emit(bench.kernel)
        texts.append(emitted.source)
        (compiled,) = compile_all([emitted.source])
        out = torch.empty_like(next(t for name, t in bench.tensors.items() if name in ("o", "p")))
        ours, eager = time_pair(
            lambda f=compiled, e=emitted, b=bench: call(f, e, b.tensors, b.scalars),
            lambda b=bench, out=out: b.eager(out),
            options.seconds,
        )
        best, eager_best = min(ours), min(eager)
        middle = statistics.median(ours) / statistics.median(eager)
        print(
            f"{bench.name:34s} ours {best:8.3f} ms   eager {eager_best:8.3f} ms   "
            f"ratio {best / eager_best:5.2f}   (medians {middle:5.2f})",
            flush=True,
        )
    start = time.perf_counter()
    compile_all(texts[::-1])
    print(f"compile: {(time.perf_counter() - start) / len(texts):.3f} s a kernel, {len(texts)} in one unit")


if __name__ == "__main__":
    main()
