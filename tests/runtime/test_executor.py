"""The executor: generated functions against torch, on hand-built programs with hand-written kernels."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.runtime import executor
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.executor import Executable, load
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Program,
    Reinterpret,
    ValueRef,
)
from torchlazy.runtime.program.steps import _BOUND, quickest_call, without_defaults
from torchlazy.runtime.program.symbolic import SizeName
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.toolchain import has_cpp, load_kernels

from .tiny_sources import PRELUDES, cpp_foreach, cpp_gather, cpp_scale

needs_cpp = pytest.mark.skipif(not has_cpp(), reason="no C++ compiler")


@pytest.fixture(params=["Python", "C++"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs the program."""
    if request.param == "C++" and (not has_cpp() or LIBRARY.wait() is None):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(executor, "_RUNS_IN_PYTHON", -1 if request.param == "C++" else 1 << 30)
    return str(request.param)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return open_cache(tmp_path_factory.mktemp("cache"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, dtype, contiguous_strides(shape))


def make(cache: KernelCache | None, **fields: object) -> Executable:
    fields = {"inputs": (), "scalars": (), "kernels": (), "steps": (), "outputs": (), "output_metas": ()} | fields
    program = Program(**fields)  # type: ignore[arg-type]
    kernels = load_kernels(program.kernels, cache=cache, preludes=PRELUDES) if program.kernels else []
    return load(program, kernels)


@needs_cpp
def test_launch_extern_window_and_scalars(cache: KernelCache) -> None:
    executable = make(
        cache,
        inputs=(("x", meta(4, 3)),),
        scalars=(("lr", float),),
        kernels=(cpp_scale(),),
        steps=(
            Allocate("buf0", meta(4, 3)),
            Launch(0, ("x", "buf0"), ("lr",), (12,)),
            Reinterpret("t", "buf0", TensorMeta((3, 4), torch.float32, (1, 3)), 0),
            ExternCall("aten.mm.default", (ValueRef("x"), ValueRef("t")), (), ("out",), (meta(4, 4),)),
            Free(("x", "t", "buf0")),
        ),
        outputs=("out",),
        output_metas=(meta(4, 4),),
    )
    x = torch.randn(4, 3)
    (out,) = executable.run([x], [0.5])
    torch.testing.assert_close(out, x @ (2 * x + 0.5).T)
    assert executable.counts.extern_calls == {"aten.mm.default": 1}
    assert executable.counts.launches == 1 and executable.counts.allocated_bytes == 48
    assert "buf0 = empty_strided((3, 4), (1, 3)" in executable.source, "as the window that is read, made at once"


@needs_cpp
def test_address_arithmetic_and_reuse_between_dtypes(cache: KernelCache) -> None:
    """A window that only kernels touch, and a dead int64 buffer whose bytes become a float32 output's source."""
    executable = make(
        cache,
        inputs=(("x", meta(8)), ("index", meta(4, dtype=torch.int64))),
        kernels=(cpp_gather(), cpp_scale()),
        scalars=(("zero", float),),
        steps=(
            ExternCall("aten.clone.default", (ValueRef("index"),), (), ("own",), (meta(4, dtype=torch.int64),)),
            Reinterpret("half", "x", meta(4), 4),
            Allocate("picked", meta(4)),
            Launch(0, ("half", "own", "picked"), (), (4,)),
            Allocate("scaled", meta(4), reuse="own"),
            Launch(1, ("picked", "scaled"), ("zero",), (4,)),
            ExternCall("aten.neg.default", (ValueRef("scaled"),), (), ("out",), (meta(4),)),
        ),
        outputs=("out",),
        output_metas=(meta(4),),
    )
    x, index = torch.randn(8), torch.tensor([3, -4, 1, 1])
    (out,) = executable.run([x, index], [0.0])
    torch.testing.assert_close(out, -2 * x[4:][index])
    assert "half_p = x_p + 16" in executable.source


@needs_cpp
def test_sizes_that_a_run_computes(cache: KernelCache, way: str) -> None:
    """In each place of each step: sizes, strides, offsets, loop bounds, rows, arguments of library calls, lists."""
    n, half, rest, two = (SizeName.of(name, value) for name, value in (("n0", 6), ("n1", 3), ("n2", 2), ("n3", 12)))

    def of(*sizes: int, strides: tuple[int, ...] | None = None) -> TensorMeta:
        return TensorMeta(sizes, torch.float32, strides or contiguous_strides(sizes))

    executable = make(
        cache,
        inputs=(("x", of(n)),),
        scalars=(("lr", float), ("shift", int), ("s", int)),
        symbols=("s",),
        sizes=(
            ("n0", ("+", (1, "s"))),
            ("n1", ("+", (1, ("//", ("+", (1, "s")), ("+", (2,)))))),
            ("n2", ("+", (1, ("%", ("+", (1, "s"), (2,)), ("+", (3,)))), (-1,), (1,))),
            ("n3", ("+", (2, "s"))),
        ),
        kernels=(cpp_scale(), cpp_foreach()),
        steps=(
            Allocate("scaled", of(n)),
            Launch(0, ("x", "scaled"), ("lr",), (n,)),  # 2 x + lr
            Reinterpret("second", "scaled", of(half), half),
            Allocate("rows", of(n)),
            ForeachLaunch(1, ((("x", "rows"), (n,), ("lr",)), (("scaled", "rows"), (half,), ("lr",))), ("shift",)),
            ExternCall(
                "aten.expand.default",
                (ValueRef("second"), (two, half)),
                (),
                ("wide",),
                (of(two, half, strides=(half, 1)),),
            ),
            ExternCall("aten.narrow.default", (ValueRef("x"), 0, rest, 1), (), ("one",), (of(1),)),
            Allocate("again", of(half, 2, strides=(1, half)), reuse="scaled"),
            ExternCall("aten.neg.default", (ValueRef("rows"),), (), ("minus",), (of(n),)),
        ),
        outputs=("wide", "one", "minus"),
        output_metas=(of(two, half, strides=(half, 1)), of(1), of(n)),
    )
    for size in (6, 4, 10):
        x = torch.randn(size)
        wide, one, minus = executable.run([x], [0.5, 3, size])
        scaled, half_size = 2 * x + 0.5, size // 2
        torch.testing.assert_close(wide, scaled[half_size:][:half_size].expand(2 * size, half_size))
        torch.testing.assert_close(one, x[(size + 2) % 3 :][:1])
        rows = x * 0.5 + 3
        rows[:half_size] = scaled[:half_size] * 0.5 + 3
        torch.testing.assert_close(minus, -rows)
    assert way == "Python" or (executable.native is not None and executable.native.has_run)


@needs_cpp
def test_index_error_names_the_access(cache: KernelCache) -> None:
    executable = make(
        cache,
        inputs=(("x", meta(4)), ("index", meta(1, dtype=torch.int64))),
        kernels=(cpp_gather(),),
        steps=(Allocate("out", meta(1)), Launch(0, ("x", "index", "out"), (), (1,))),
        outputs=("out",),
        output_metas=(meta(1),),
    )
    with pytest.raises(IndexError, match="gather: index of dimension 0 with size 4"):
        executable.run([torch.ones(4), torch.tensor([4])])


@needs_cpp
def test_foreach_rows_with_row_scalars_and_an_empty_row(cache: KernelCache) -> None:
    executable = make(
        cache,
        inputs=(("a", meta(3)), ("b", meta(0)), ("c", meta(5))),
        scalars=(("lr", float), ("step", int)),
        kernels=(cpp_foreach(),),
        steps=(
            *(Allocate(f"{name}_new", meta(size)) for name, size in (("a", 3), ("b", 0), ("c", 5))),
            ForeachLaunch(
                0,
                tuple(((name, f"{name}_new"), (size,), ("lr",)) for name, size in (("a", 3), ("b", 0), ("c", 5))),
                ("step",),
            ),
        ),
        outputs=("a_new", "b_new", "c_new"),
        output_metas=(meta(3), meta(0), meta(5)),
    )
    tensors = [torch.randn(size) for size in (3, 0, 5)]
    outputs = executable.run(list(tensors), [0.25, 7])
    for tensor, output in zip(tensors, outputs, strict=True):
        torch.testing.assert_close(output, tensor * 0.25 + 7)
    assert executable.counts.foreach_rows == 3


@needs_cpp
def test_donated_output_is_the_input(cache: KernelCache) -> None:
    executable = make(
        cache,
        inputs=(("p", meta(6)), ("q", meta(2, 3))),
        scalars=(("lr", float),),
        kernels=(cpp_scale(),),
        steps=(
            Reinterpret("new_p", "p", meta(6), 0),
            Launch(0, ("p", "new_p"), ("lr",), (6,)),
            ExternCall("aten.neg.default", (ValueRef("q"),), (), ("new_q",), (meta(2, 3),)),
            Free(("p", "q")),
        ),
        outputs=("new_q", "new_p"),
        output_metas=(meta(2, 3), meta(6)),
        donations=((1, 0), (0, 1)),
    )
    p, q = torch.randn(6), torch.randn(2, 3)
    expected_p, expected_q = 2 * p + 1, -q
    new_q, new_p = executable.run([p, q], [1.0])
    assert new_p is p and new_q is q
    torch.testing.assert_close(p, expected_p)
    torch.testing.assert_close(q, expected_q)


def test_donated_output_of_another_shape_is_a_view_of_the_input() -> None:
    executable = make(
        None,
        inputs=(("p", meta(2, 3)),),
        steps=(
            ExternCall("aten.neg.default", (ValueRef("p"),), (), ("n",), (meta(2, 3),)),
            Reinterpret("out", "n", meta(6), 0),
        ),
        outputs=("out",),
        output_metas=(meta(6),),
        donations=((0, 0),),
    )
    p = torch.randn(2, 3)
    expected = -p.reshape(6)
    (out,) = executable.run([p])
    assert out.data_ptr() == p.data_ptr() and out.shape == (6,)
    torch.testing.assert_close(out, expected)


def test_other_strides_are_copied_into_the_promised_ones() -> None:
    promised = TensorMeta((4, 4), torch.float32, (1, 4))
    executable = make(
        None,
        inputs=(("x", meta(4, 4)),),
        steps=(ExternCall("aten.neg.default", (ValueRef("x"),), (), ("out",), (promised,)),),
        outputs=("out",),
        output_metas=(promised,),
    )
    x = torch.randn(4, 4)
    (out,) = executable.run([x])
    assert out.stride() == (1, 4)
    torch.testing.assert_close(out, -x)


def test_strides_of_unit_dimensions_cost_no_copy() -> None:
    promised = TensorMeta((1, 4), torch.float32, (99, 1))
    executable = make(
        None,
        inputs=(("x", meta(1, 4)),),
        steps=(ExternCall("aten.neg.default", (ValueRef("x"),), (), ("out",), (promised,)),),
        outputs=("out",),
        output_metas=(promised,),
    )
    (out,) = executable.run([torch.randn(1, 4)])
    assert out.stride() == (99, 1) and out.untyped_storage().nbytes() == 16


def test_many_outputs_lists_and_scalars_in_extern_arguments() -> None:
    pair = (meta(2, dtype=torch.float32), meta(2, dtype=torch.int64))
    executable = make(
        None,
        inputs=(("x", meta(2, 3)), ("y", meta(2, 3))),
        scalars=(("alpha", float), ("seed", int)),
        steps=(
            ExternCall(
                "aten.mul.Tensor", (ValueRef("x"), ValueRef("alpha", scalar=True)), (), ("scaled",), (meta(2, 3),)
            ),
            ExternCall(
                "aten.full.default", ((1,), ValueRef("seed", scalar=True)),
                (("dtype", torch.int64), ("device", "cpu")), ("seeded",), (meta(1, dtype=torch.int64),),
            ),
            ExternCall("aten.cat.default", ((ValueRef("x"), ValueRef("y")), 1), (), ("both",), (meta(2, 6),)),
            ExternCall(
                "aten.add.Tensor", (ValueRef("x"), ValueRef("y")), (("alpha", ValueRef("alpha", scalar=True)),),
                ("sum",), (meta(2, 3),),
            ),
            ExternCall("aten.max.dim", (ValueRef("both"), 1), (), ("values", None), (pair[0], None)),
            ExternCall("aten.clamp.default", (ValueRef("sum"), float("-inf"), 1.0), (), ("low",), (meta(2, 3),)),
            ExternCall(
                "aten.zeros.default", ((2, 2),), (("dtype", torch.int64), ("device", "cpu")),
                ("zeros",), (meta(2, 2, dtype=torch.int64),),
            ),
        ),
        outputs=("values", "low", "zeros", "scaled", "seeded"),
        output_metas=(
            pair[0], meta(2, 3), meta(2, 2, dtype=torch.int64), meta(2, 3), meta(1, dtype=torch.int64),
        ),
    )  # fmt: skip
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    seed = (1 << 62) + 1  # more digits than a float has
    values, low, zeros, scaled, seeded = executable.run([x, y], [0.5, seed])
    torch.testing.assert_close(scaled, x * 0.5)
    assert seeded.item() == seed
    torch.testing.assert_close(values, torch.cat((x, y), 1).max(1).values)
    torch.testing.assert_close(low, (x + 0.5 * y).clamp(max=1.0))
    assert zeros.dtype is torch.int64 and not zeros.any()


def test_inputs_are_released_after_their_last_reader() -> None:
    alive: list[bool] = []
    library = torch.library.Library("torchlazy_test_executor", "DEF")
    library.define("probe(Tensor x) -> Tensor")
    references: list[weakref.ref[torch.Tensor]] = []

    def probe(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(references[0]() is not None)
        return x.clone()

    library.impl("probe", probe, "CompositeExplicitAutograd")
    executable = make(
        None,
        inputs=(("x", meta(3)),),
        steps=(
            ExternCall("torchlazy_test_executor.probe.default", (ValueRef("x"),), (), ("a",), (meta(3),)),
            ExternCall("aten.neg.default", (ValueRef("x"),), (), ("b",), (meta(3),)),
            Free(("x", "a")),
            ExternCall("torchlazy_test_executor.probe.default", (ValueRef("b"),), (), ("out",), (meta(3),)),
        ),
        outputs=("out",),
        output_metas=(meta(3),),
    )
    inputs = [torch.randn(3)]
    references.append(weakref.ref(inputs[0]))
    executable.run(inputs)
    assert inputs == [] and alive == [True, False]


def test_modes_and_autograd_do_not_see_the_run() -> None:
    executable = make(
        None,
        inputs=(("x", meta(3)),),
        steps=(ExternCall("aten.exp.default", (ValueRef("x"),), (), ("out",), (meta(3),)),),
        outputs=("out",),
        output_metas=(meta(3),),
    )
    seen: list[object] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class WatchFunctions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True)
    with Watch(), WatchFunctions():
        (out,) = executable.run([x])
    assert not out.requires_grad and seen == []


def test_names_that_are_not_identifiers_or_collide() -> None:
    executable = make(
        None,
        inputs=(("class", meta(2)), ("float32", meta(2)), ("a.b", meta(2)), ("a_b", meta(2)), ("inputs", meta(2))),
        steps=(
            ExternCall(
                "aten.stack.default",
                (tuple(ValueRef(name) for name in ("class", "float32", "a.b", "a_b", "inputs")),), (),
                ("aten_stack",), (meta(5, 2),),
            ),
            Allocate("unused", meta(2)),
        ),
        outputs=("aten_stack",),
        output_metas=(meta(5, 2),),
    )  # fmt: skip
    tensors = [torch.randn(2) for _ in range(5)]
    (out,) = executable.run(list(tensors))
    torch.testing.assert_close(out, torch.stack(tensors))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((ExternCall("aten.no_such_op.default", (), (), ("out",), (meta(1),)),), "no operator"),
        ((Allocate("out", meta(1)), Free(("x",)), Reinterpret("w", "x", meta(1), 0)), "freed"),
        ((), "made by no step"),
    ],
)
def test_malformed_programs_are_refused_at_load(steps: tuple[object, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        make(None, inputs=(("x", meta(1)),), steps=steps, outputs=("out",), output_metas=(meta(1),))


def _described(results: object) -> list[object]:
    listed = results if isinstance(results, (tuple, list)) else [results]
    return [(r.shape, r.stride(), r.dtype) if isinstance(r, torch.Tensor) else (type(r), r) for r in listed]


def test_the_quickest_call_of_an_operator_is_that_operator() -> None:
    heads = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, device="meta")
    image, filters = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    a, b, batch = torch.randn(2, 3), torch.randn(3, 4), torch.randn(5, 2, 3)
    calls: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
        "mm": ((a, b), {}),
        "bmm": ((batch, batch.mT), {}),
        "addmm": ((torch.randn(4), a, b), {"beta": 2, "alpha": 0.5}),
        "baddbmm": ((torch.randn(5, 2, 2), batch, batch.mT), {"alpha": 3}),
        "convolution": ((image, filters, None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1), {}),
        "_scaled_dot_product_efficient_attention": ((heads, heads, heads, None, True, 0.0, True), {"scale": 0.25}),
        "_scaled_dot_product_flash_attention": ((heads, heads, heads, 0.1, True), {"scale": 0.25}),
        "_scaled_dot_product_cudnn_attention": ((heads, heads, heads, None, True, 0.0, True, False), {}),
        "native_layer_norm": ((a, [3], None, None, 1e-5), {}),
    }
    assert set(_BOUND) <= calls.keys()
    for name, (args, kwargs) in calls.items():
        overload = getattr(torch.ops.aten, name).default
        with torch._C._AutoDispatchBelowAutograd():
            found, wanted = quickest_call(f"aten.{name}.default")(*args, **kwargs), overload(*args, **kwargs)
        assert _described(found) == _described(wanted), name
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(found, wanted), name
    defaults = without_defaults(torch.ops.aten.addmm.default, (("beta", 1), ("alpha", 1.0)))
    assert defaults == (("alpha", 1.0),), "another number is another argument, however equal it is"
