"""The Numba generator: every op against torch, loop shapes, reductions, foreach, index checks, and the text itself."""

from __future__ import annotations

import functools
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cpp_cases import KernelBuilder, buffer, storage
from test_cpp import (
    BOOL_BINARY,
    FLOAT_BINARY,
    FLOAT_UNARY,
    INT_BINARY,
    INT_UNARY,
    INTS,
    MEMORY_OPS,
    POINTWISE_OPS,
    SPECIAL,
    N,
    bf16,
    f16,
    f32,
    f64,
    i32,
    i64,
    oracle,
    sample,
    u8,
)
from test_cpp_loops import softmax_kernel
from torchlazy.inductor.codegen.numba_ import emit
from torchlazy.inductor.codegen.numba_ops import NumbaOps
from torchlazy.inductor.index import FloorDiv, Mod
from torchlazy.inductor.ir import Kernel
from torchlazy.prims.random_bits import MULTIPLIERS, WEYL
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.toolchain import LoadedKernel, has_numba, load_kernels

pytestmark = pytest.mark.skipif(not has_numba(), reason="needs numba")
_folder = tempfile.TemporaryDirectory(prefix="torchlazy-test-numba-")
_PRELUDE = Path(__file__).resolve().parents[3] / "inductor/codegen/numba_prelude.py"
_SPECIAL_PAIRS = [(a, b) for a in SPECIAL for b in SPECIAL]


@functools.cache
def cache() -> KernelCache:
    return open_cache(f"{_folder.name}/cache")


def load(source: Any) -> LoadedKernel:
    (kernel,) = load_kernels([source], cache=cache(), preludes={"numba": _PRELUDE.read_text()})
    return kernel


def run(
    kernel: Kernel, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any] | None = None, status: int = 0
) -> dict[str, torch.Tensor]:
    """Emit, compile, run; the written tensors by name."""
    emitted = emit(kernel)
    tensors = dict(inputs)
    for written, read in kernel.aliases:
        tensors[written] = tensors[read]
    for meta in kernel.writes:
        tensors.setdefault(meta.name, storage(meta))
    pointers = [tensors[name].data_ptr() for name in emitted.buffers]
    got = load(emitted.source)(*pointers, *((scalars or {})[name] for name in emitted.scalars), *emitted.sizes)
    assert got == status, f"status {got}, wanted {status}"
    return {meta.name: tensors[meta.name] for meta in kernel.writes}


def test_the_handler_has_every_op() -> None:
    for op in (*POINTWISE_OPS, *MEMORY_OPS):
        assert callable(getattr(NumbaOps, op, None)), op


Operands = tuple[torch.Tensor, ...]


def check_ops(wanted: Mapping[str, torch.Tensor], operands: Operands | Mapping[str, Operands]) -> None:
    """All ops in one kernel, on the same operands or each on its own; those that are one tensor are read once."""
    of = operands if isinstance(operands, Mapping) else dict.fromkeys(wanted, operands)
    n = len(of[next(iter(wanted))][0])
    k = KernelBuilder((n,))
    inputs: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for op in wanted:
        for operand in of[op]:
            if id(operand) not in names:
                names[id(operand)] = f"a{len(names)}"
                inputs[names[id(operand)]] = operand
                k.read(names[id(operand)], (n,), operand.dtype)
    for op, want in wanted.items():

        def body(ops: Any, i: Any, op: str = op) -> Any:
            return getattr(ops, op)(*(ops.load(names[id(operand)], i[0]) for operand in of[op]))

        k.point(buffer(f"o_{op}", (n,), want.dtype), body)
    got = run(k.build(), inputs)
    wrong = []
    for op, want in wanted.items():
        rtol, atol = {f32: (3e-6, 1e-45), f64: (1e-12, 0)}.get(want.dtype, (0, 0))
        try:
            torch.testing.assert_close(got[f"o_{op}"], want, rtol=rtol, atol=atol, equal_nan=True)
            if op in ("neg", "ceil", "floor", "trunc", "round", "sqrt", "copysign"):
                assert torch.equal(got[f"o_{op}"].signbit() & (want == 0), want.signbit() & (want == 0)), "zero's sign"
        except AssertionError as error:
            wrong.append(f"{op}: {error}")
    assert not wrong, "\n".join(wrong)


slow = pytest.mark.slow
# One dtype of a kind in the usual run: Numba takes seconds for each kernel.
DTYPES = [f32, i64, u8, torch.bool, *(pytest.param(dtype, marks=slow) for dtype in (f64, torch.int8, torch.int16, i32))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unary_ops(dtype: torch.dtype) -> None:
    names = FLOAT_UNARY if dtype.is_floating_point else INT_UNARY
    if dtype is torch.bool:
        names = ("logical_not", "bitwise_not")
    a = sample(dtype)
    if dtype.is_floating_point:
        a = a.clamp(-80, 80)
    check_ops({op: oracle(op, a) for op in names}, (a,))


@pytest.mark.parametrize("dtype", [f32, pytest.param(f64, marks=slow)])
def test_functions_on_special_values(dtype: torch.dtype) -> None:
    a = torch.tensor(SPECIAL, dtype=dtype)
    names = [op for op in FLOAT_UNARY if op not in ("sin", "cos", "tan", "erfinv", "sinh", "cosh")]
    check_ops({op: oracle(op, a) for op in names}, (a,))


def test_erfinv_near_the_ends() -> None:
    x = torch.tensor([0.0, 1e-30, -1e-8, 0.3, 0.49999, 0.5, 0.7, -0.9, 0.999, 1 - 1e-9, 1.0, -1.0, 1.5], dtype=f64)
    want = torch.special.erfinv(x)
    check_ops({"erfinv": want}, (x,))
    check_ops({"erfinv": torch.special.erfinv(x.float())}, (x.float(),))


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_ops(dtype: torch.dtype) -> None:
    names = FLOAT_BINARY if dtype.is_floating_point else INT_BINARY
    if dtype is torch.bool:
        names = BOOL_BINARY
    a, b = sample(dtype, 1, 600), sample(dtype, 2, 600)
    if dtype.is_floating_point:
        pairs = torch.tensor(_SPECIAL_PAIRS, dtype=dtype)
        a[: len(pairs)], b[: len(pairs)] = pairs[:, 0], pairs[:, 1]
    is_integer = not dtype.is_floating_point and dtype is not torch.bool
    divisor = torch.where(b == 0, torch.ones_like(b), b) if is_integer else b
    divisor = torch.where(divisor == -1, torch.full_like(b, 3), divisor) if dtype in (i32, i64) else divisor
    power = b.abs() % 7 if is_integer else b
    bits = b % 12 if dtype is u8 else b.abs() % 12 if is_integer else b
    operands, wanted = {}, {}
    for op in names:
        y = divisor if op in ("floor_div", "trunc_div", "remainder", "fmod") else power if op == "pow" else b
        operands[op] = (a, bits if "shift" in op else y)
        if dtype is torch.bool and op in ("maximum", "minimum"):
            wanted[op] = a | b if op == "maximum" else a & b
        else:
            wanted[op] = oracle(op, *operands[op])
    check_ops(wanted, operands)


def test_integer_division_never_traps() -> None:
    for dtype in (i32, i64):
        least = torch.iinfo(dtype).min
        a = torch.tensor([least, least, 7, 0], dtype=dtype)
        b = torch.tensor([-1, 0, 0, 0], dtype=dtype)
        zero = torch.zeros(4, dtype=dtype)
        quotient = torch.tensor([least, 0, 0, 0], dtype=dtype)
        check_ops({"floor_div": quotient, "trunc_div": quotient, "remainder": zero, "fmod": zero}, (a, b))


def test_where_masked_constants_and_scalars() -> None:
    k = KernelBuilder((N,), scalars=(("alpha", float), ("step", int), ("flag", bool)))
    k.read("a", (N,))

    def body(ops: Any, i: Any) -> Any:
        a = ops.load("a", i[0])
        inside = ops.lt(ops.index_expr(i[0], i64), ops.constant(10, i64))
        shifted = ops.masked(inside, lambda: ops.load("a", i[0] + N - 10), 7.5)
        chosen = ops.where(ops.gt(a, ops.constant(0.0, f32)), a, ops.scalar("alpha", f32))
        flag = ops.where(ops.scalar("flag", torch.bool), shifted, a)
        return ops.add(ops.add(chosen, flag), ops.mul(ops.scalar("step", f32), ops.constant(float("inf"), f32)))

    k.point(buffer("o", (N,)), body)
    a = torch.randn(N)
    for flag in (True, False):
        shifted = torch.cat((a[N - 10 :], torch.full((N - 10,), 7.5)))
        got = run(k.build(), {"a": a}, {"alpha": 0.25, "step": 2, "flag": flag})["o"]
        want = torch.where(a > 0, a, torch.tensor(0.25)) + (shifted if flag else a) + float("inf")
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("source", [bf16, *DTYPES])
def test_conversions(source: torch.dtype) -> None:
    a = sample(source)
    if source.is_floating_point:
        a = torch.where(a.isfinite() & (a.abs() < 120), a, torch.tensor(3.75, dtype=source)).abs()
    if source is u8:
        a = a % 100
    targets = (f32, f64, f16, bf16, *INTS, torch.bool)
    k = KernelBuilder((N,))
    k.read("a", (N,), source)
    for target in targets:
        k.point(buffer(f"o{target}", (N,), target), lambda ops, i, t=target: ops.to_dtype(ops.load("a", i[0]), t))
    got = run(k.build(), {"a": a})
    for target in targets:
        torch.testing.assert_close(got[f"o{target}"], a.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_halves_round_to_nearest_even_for_every_pattern(dtype: torch.dtype) -> None:
    edges = torch.arange(0, 1 << 16, dtype=i32)
    random_bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(3)).to(i32)
    patterns = [random_bits, edges << 16, (edges << 16) | 0x8000, edges << 13, (edges << 13) | 0x1000, edges]
    x = torch.cat(patterns).view(f32)
    every = torch.arange(0, 1 << 16, dtype=i32).to(torch.int16).view(dtype).repeat(6)
    n = len(x)
    k = KernelBuilder((n,))
    k.read("a", (n,), f32)
    k.read("h", (n,), dtype)
    k.point(buffer("o", (n,), dtype), lambda ops, i: ops.load("a", i[0]))
    k.point(buffer("p", (n,), f32), lambda ops, i: ops.to_dtype(ops.load("a", i[0]), dtype))
    k.point(buffer("w", (n,), f32), lambda ops, i: ops.load("h", i[0]))
    got = run(k.build(), {"a": x, "h": every})
    torch.testing.assert_close(got["o"], x.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got["p"], x.to(dtype).to(f32), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got["w"], every.to(f32), rtol=0, atol=0, equal_nan=True)


def test_bitcast_and_random_bits() -> None:
    k = KernelBuilder((N,), scalars=(("seed", int),))
    k.read("a", (N,))
    k.point(buffer("bits", (N,), i32), lambda ops, i: ops.bitcast(ops.load("a", i[0]), i32))
    k.point(buffer("back", (N,)), lambda ops, i: ops.bitcast(ops.bitcast(ops.load("a", i[0]), i32), f32))
    k.point(
        buffer("random", (N,), i32),
        lambda ops, i: ops.random_bits(ops.scalar("seed", i64), ops.constant(3, i32), ops.index_expr(i[0], i64)),
    )
    a, seed = sample(f32), 0x1234_5678_9ABC_DEF0
    got = run(k.build(), {"a": a}, {"seed": seed})
    assert torch.equal(got["bits"], a.view(i32))
    assert torch.equal(got["back"].view(i32), a.view(i32))
    assert got["random"].tolist() == [philox(seed, 3, counter) for counter in range(N)]


def philox(seed: int, stream: int, counter: int) -> int:
    low = 2**32 - 1
    key, block = [seed & low, seed >> 32], [counter & low, counter >> 32, stream, 0]
    for _ in range(10):
        p, q = block[0] * int(MULTIPLIERS[0]), block[2] * int(MULTIPLIERS[1])
        block = [(q >> 32) ^ block[1] ^ key[0], q & low, (p >> 32) ^ block[3] ^ key[1], p & low]
        key = [(key[0] + int(WEYL[0])) & low, (key[1] + int(WEYL[1])) & low]
    return block[0] - 2**32 if block[0] >= 2**31 else block[0]


# ---- loops


@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 6, 7), (1, 9, 1), (200, 300)])
def test_transposed_and_floor_divided_indices(shape: tuple[int, ...]) -> None:
    k = KernelBuilder(shape)
    strides = torch.empty(tuple(reversed(shape))).permute(*reversed(range(len(shape)))).stride()
    a = torch.randn(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
    source = k.read("a", shape, f32, strides)
    k.point(buffer("o", shape), lambda ops, i: ops.neg(ops.load("a", source.element(i))))
    torch.testing.assert_close(run(k.build(), {"a": a})["o"], -a)


def test_flat_kernels_of_every_size_share_one_text_and_write_nothing_else() -> None:
    def kernel(n: int) -> Kernel:
        k = KernelBuilder((n,))
        k.read("a", (n,))
        k.point(buffer("o", (n,)), lambda ops, i: ops.mul(ops.load("a", i[0]), ops.constant(3.0, f32)))
        return k.build()

    text = emit(kernel(4)).source.text
    loaded = load(emit(kernel(4)).source)
    for n in (1, 2, 7, 1000, 65535, 65536, 300001):
        assert emit(kernel(n)).source.text == text and emit(kernel(n)).sizes == (n,)
        a, out = torch.randn(n), torch.full((n + 8,), -1.0)
        assert loaded(a.data_ptr(), out.data_ptr(), n) == 0
        torch.testing.assert_close(out[:n], a * 3)
        assert (out[n:] == -1).all()


def test_a_modulus_and_a_division_in_one_flat_kernel() -> None:
    k = KernelBuilder((60,))
    k.read("a", (5,))
    k.read("b", (12,))
    k.point(buffer("o", (60,)), lambda ops, i: ops.add(ops.load("a", Mod(i[0], 5)), ops.load("b", FloorDiv(i[0], 5))))
    a, b = torch.randn(5), torch.randn(12)
    torch.testing.assert_close(run(k.build(), {"a": a, "b": b})["o"].view(12, 5), a[None] + b[:, None])


def test_in_place_through_a_donated_pair() -> None:
    k = KernelBuilder((N,), aliases=(("new", "p"),))
    k.read("p", (N,))
    k.read("g", (N,))
    k.point(buffer("new", (N,)), lambda ops, i: ops.sub(ops.load("p", i[0]), ops.load("g", i[0])))
    p, g = torch.randn(N), torch.randn(N)
    want = p - g
    got = run(k.build(), {"p": p, "g": g})["new"]
    assert got.data_ptr() == p.data_ptr()
    torch.testing.assert_close(got, want)


# ---- reductions


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("shape", [(7, 33), (300, 1000), (1, 5000)])
def test_softmax(shape: tuple[int, int], dtype: torch.dtype) -> None:
    a = (torch.randn(shape) * 4).to(dtype)
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if dtype is bf16 else {}
    torch.testing.assert_close(run(softmax_kernel(*shape, dtype), {"a": a})["o"], a.softmax(1), **tolerance)


@pytest.mark.parametrize("dtype", [f32, pytest.param(f64, marks=slow), i64, pytest.param(torch.bool, marks=slow)])
def test_reductions(dtype: torch.dtype) -> None:
    """Every kind over both axes of a middle pair, in one kernel, with NaN among the floats; a sum alone, too."""
    a = sample(dtype, 3, 4 * 5 * 6).view(4, 5, 6)
    if dtype.is_floating_point:
        a = a.clamp(-2, 2)
    flat = a.reshape(4, 30)
    places = flat.to(u8 if dtype is torch.bool else dtype)
    want = {
        "sum": flat.sum(1), "prod": flat.prod(1), "max": flat.amax(1), "min": flat.amin(1),
        "any": flat.bool().any(1), "all": flat.bool().all(1), "argmax": places.argmax(1), "argmin": places.argmin(1),
    }  # fmt: skip
    for kinds in (tuple(want), ("sum",)):
        k = KernelBuilder((4,), (5, 6))
        source = k.read("a", (4, 5, 6), dtype).element((*k.x, *k.r))
        k.sweep(True)
        for kind in kinds:
            accumulate = i64 if kind in ("sum", "prod") and not dtype.is_floating_point else dtype
            out_dtype = i64 if kind.startswith("arg") else torch.bool if kind in ("any", "all") else accumulate
            out = buffer(f"o_{kind}", (4,), out_dtype)
            k.reduce([out], kind, lambda ops, i, r, at=source: ops.load("a", at), accumulate=accumulate)
        for name, mine in run(k.build(), {"a": a}).items():
            wanted = want[name.removeprefix("o_")].to(mine.dtype)
            torch.testing.assert_close(mine, wanted, equal_nan=True, msg=f"{name}: {mine}, wanted {wanted}")


def test_welford_feeds_a_later_point_sweep() -> None:
    k = KernelBuilder((6,), (1000,))
    k.read("a", (6, 1000))
    results = [buffer(name, (6,)) for name in ("mean", "m2", "count")]
    k.sweep(True).reduce(results, "welford", lambda ops, i, r: ops.load("a", i[0] * 1000 + r[0]))
    k.sweep(False).point(buffer("var", (6,)), lambda ops, i: ops.div(ops.load("m2", i[0]), ops.load("count", i[0])))
    a = torch.randn(6, 1000) + 100
    got = run(k.build(), {"a": a})
    torch.testing.assert_close(got["mean"], a.mean(1))
    torch.testing.assert_close(got["var"], a.var(1, correction=0))


def test_long_sums_are_accurate_and_empty_ones_give_the_identity() -> None:
    k = KernelBuilder((2,), (300000,))
    k.read("a", (2, 300000))
    k.sweep(True).reduce([buffer("o", (2,))], "sum", lambda ops, i, r: ops.load("a", i[0] * 300000 + r[0]))
    a = torch.rand(2, 300000)
    torch.testing.assert_close(run(k.build(), {"a": a})["o"], a.double().sum(1).float(), rtol=1e-6, atol=0)
    for kind, identity in (("sum", 0.0), ("prod", 1.0), ("max", float("-inf"))):
        k = KernelBuilder((3,), (0,))
        k.read("a", (3, 0))
        k.sweep(True).reduce([buffer("o", (3,))], kind, lambda ops, i, r: ops.load("a", i[0] + r[0]))  # type: ignore[arg-type]
        assert run(k.build(), {"a": torch.empty(3, 0)})["o"].tolist() == [identity] * 3


# ---- checks, foreach


def gather_kernel(n: int, size: int) -> Kernel:
    k = KernelBuilder((n,))
    k.read("a", (size,))
    k.read("index", (n,), i64)

    def body(ops: Any, i: Any) -> Any:
        return ops.load("a", ops.indirect(ops.load("index", i[0]), size, "gather"))

    k.point(buffer("o", (n,)), body)
    return k.build()


def test_indices_wrap_and_are_checked() -> None:
    a = torch.randn(5)
    index = torch.tensor([0, 4, -1, -5, 2])
    kernel = gather_kernel(5, 5)
    assert emit(kernel).source.index_checks == ("gather",)
    torch.testing.assert_close(run(kernel, {"a": a, "index": index})["o"], a[index])
    for bad in (5, -6, 2**40):
        run(kernel, {"a": a, "index": torch.tensor([0, 0, 0, 0, bad])}, status=1)
    many = torch.zeros(100_000, dtype=i64)
    many[77_777] = 9
    run(gather_kernel(100_000, 5), {"a": a, "index": many}, status=1)


def test_a_foreach_kernel_runs_over_rows() -> None:
    def kernel(n: int) -> Kernel:
        k = KernelBuilder((n,), scalars=(("lr", float), ("step", int)))
        k.read("p", (n,))
        k.point(
            buffer("o", (n,)),
            lambda ops, i: ops.add(ops.mul(ops.load("p", i[0]), ops.scalar("lr", f32)), ops.scalar("step", f32)),
        )
        return k.build()

    emitted = emit(kernel(10), foreach=True, row_scalars=frozenset(("lr",)))
    assert emitted.source.foreach and emitted.source.row_scalars == (float,) and emitted.source.scalars == (int,)
    assert emitted.row_scalars == ("lr",) and emitted.scalars == ("step",)
    assert emitted.source == emit(kernel(99), foreach=True, row_scalars=frozenset(("lr",))).source
    tensors = [torch.randn(n) for n in (3, 1, 100_000)]
    outs = [torch.empty_like(t) for t in tensors]
    rates = [0.5, -1.0, 3.0]
    words = [
        word
        for t, o, lr in zip(tensors, outs, rates, strict=True)
        for word in (t.data_ptr(), o.data_ptr(), t.numel(), *struct.unpack("q", struct.pack("d", lr)))
    ]
    loaded = load(emitted.source)
    assert loaded(torch.tensor(words).data_ptr(), 3, 7) == 0
    for t, o, lr in zip(tensors, outs, rates, strict=True):
        torch.testing.assert_close(o, t * lr + 7)
    assert loaded(struct.pack(f"{len(words)}q", *words), 3, 8) == 0
    torch.testing.assert_close(outs[0], tensors[0] * 0.5 + 8)


def test_foreach_needs_a_flat_kernel() -> None:
    with pytest.raises(ValueError, match="flat"):
        emit(softmax_kernel(3, 4), foreach=True)


def test_the_text_of_a_kernel() -> None:
    k = KernelBuilder((N,))
    k.read("first", (N,))
    k.point(buffer("second", (N,)), lambda ops, i: ops.exp(ops.load("first", i[0])))
    text = emit(k.build()).source.text
    assert text.startswith("# prelude: numba\n") and "first" not in text and "second" not in text
    assert "def kernel(in_ptr0, out_ptr0, size0):" in text
    assert "t0 = load_float32(in_ptr0, x0)" in text and "store_float32(out_ptr0, x0, t1)" in text
