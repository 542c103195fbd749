"""Programs from schedules: shared launches, scalars of rows, donations, views; with a fake and a real back end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchlazy.inductor import grouping, interpret
from torchlazy.inductor.analyses import analyse
from torchlazy.inductor.codegen.kernel import EmittedKernel, name_arguments
from torchlazy.inductor.emit import EmitOptions, emit_program
from torchlazy.inductor.fingerprint import EmitOnce, take_fingerprint
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, Kernel, LoopGraph, LoopNode, ViewNode
from torchlazy.inductor.scheduler import schedule
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    KernelSource,
    Launch,
    Program,
    Reinterpret,
    ValueRef,
)

from tests.inductor.kernel_interpreter import buffer, pointwise, reduction

calls: list[str] = []


def fake_emit(kernel: Kernel, *, foreach: bool = False, row_scalars: frozenset[str] = frozenset()) -> EmittedKernel:
    """Text with canonical names: which ops run on which arguments."""
    arguments = name_arguments(kernel)
    calls.append("foreach" if foreach else "single")
    lines = []
    for sweep in kernel.sweeps:
        for statement in sweep.statements:
            facts = analyse(statement.node, statement.index, statement.reduce_index)
            reads = [(arguments.pointer_of.get(r.name, "register"), str(r.index)) for r in facts.reads]
            stored = [arguments.pointer_of[name] for name in statement.stored]
            lines.append(f"{facts.ops} {reads} {statement.node.reduction} -> {stored}")
    flat = len(kernel.axes) == 1 and not kernel.reduce_axes
    text = "\n".join(lines) + ("" if flat else str([int(a.size) for a in (*kernel.axes, *kernel.reduce_axes)]))
    own = [(name, kind) for name, kind in kernel.scalars if name in row_scalars]
    shared = [(name, kind) for name, kind in kernel.scalars if name not in row_scalars]
    return EmittedKernel(
        KernelSource(
            "cpp", "kernel", text, tuple(b.dtype for b in arguments.buffers), tuple(kind for _, kind in shared),
            1 if flat else 0, foreach, tuple(kind for _, kind in own),
        ),
        tuple(b.name for b in arguments.buffers),
        tuple(name for name, _ in shared),
        tuple(int(a.size) for a in kernel.axes) if flat else (),
        tuple(name for name, _ in own),
    )  # fmt: skip


def steps_of(program: Program, kind: type) -> list:
    return [step for step in program.steps if isinstance(step, kind)]


def half(out: Buffer, source: Buffer) -> LoopNode:
    return pointwise(out, lambda o, i, _: o.mul(o.load(source.name, source.element(i)), o.constant(0.5, torch.float32)))


def adamw(number: int, shape: tuple[int, ...], rate: str) -> tuple[tuple[Buffer, ...], list[LoopNode], dict[str, str]]:
    """One parameter's update as single-op nodes: inputs p, g, m, v; p, m, v are donated."""
    p, g, m, v = (buffer(f"{name}{number}", *shape) for name in "pgmv")
    new_m, new_v, new_p = (buffer(f"new_{name}{number}", *shape) for name in "mvp")
    step = buffer(f"step{number}", *shape)

    def number_of(ops, value: float):
        return ops.constant(value, torch.float32)

    def update_m(o, i, _):
        return o.add(
            o.mul(o.load(m.name, m.element(i)), number_of(o, 0.9)),
            o.mul(o.load(g.name, g.element(i)), number_of(o, 0.1)),
        )

    def update_v(o, i, _):
        grad = o.load(g.name, g.element(i))
        return o.add(
            o.mul(o.load(v.name, v.element(i)), number_of(o, 0.999)), o.mul(o.mul(grad, grad), number_of(o, 0.001))
        )

    def direction(o, i, _):
        root = o.add(o.sqrt(o.load(new_v.name, new_v.element(i))), number_of(o, 1e-8))
        return o.div(o.load(new_m.name, new_m.element(i)), root)

    def update_p(o, i, _):
        rate_ = o.scalar(rate, torch.float32)
        return o.sub(o.load(p.name, p.element(i)), o.mul(rate_, o.load(step.name, step.element(i))))

    nodes = [pointwise(new_m, update_m), pointwise(new_v, update_v), pointwise(step, direction),
             pointwise(new_p, update_p)]  # fmt: skip
    return (p, g, m, v), nodes, {new_p.name: p.name, new_m.name: m.name, new_v.name: v.name}


def optimizer(rates: list[str], shapes: list[tuple[int, ...]]) -> LoopGraph:
    inputs: list[Buffer] = []
    nodes: list[LoopNode] = []
    donations: dict[str, str] = {}
    for number, (rate, shape) in enumerate(zip(rates, shapes, strict=True)):
        buffers, update, donated = adamw(number, shape, rate)
        inputs += buffers
        nodes += update
        donations |= donated
    scalars = tuple((name, float) for name in dict.fromkeys(rates))
    return LoopGraph(tuple(inputs), scalars, tuple(nodes), tuple(donations), donations)


SHAPES = [(4, 6), (5,), (), (2, 3, 4)] * 5


def test_adamw_over_twenty_parameters_is_one_launch() -> None:
    graph = optimizer(["lr"] * 20, SHAPES)
    calls.clear()
    program = emit_program(schedule(graph), graph, fake_emit)
    assert not steps_of(program, Launch) and not steps_of(program, Allocate)
    (launch,) = steps_of(program, ForeachLaunch)
    assert len(launch.rows) == 20 and launch.scalars == ("lr",)
    assert sorted(launch.rows[0][0]) == ["g0", "m0", "new_m0", "new_p0", "new_v0", "p0", "v0"]
    assert launch.rows[0][1:] == ((24,), ())
    assert launch.rows[2][1] == (1,)
    assert len(program.kernels) == 1 and program.kernels[0].foreach
    assert len(program.donations) == 60
    assert len(calls) <= 8, "equal kernels are emitted once a shape"


def test_scalars_that_differ_between_rows_are_columns() -> None:
    graph = optimizer(["lr", "slow", "lr", "slow"], [(4,), (5,), (6,), (7,)])
    program = emit_program(schedule(graph), graph, fake_emit)
    (launch,) = steps_of(program, ForeachLaunch)
    assert launch.scalars == ()
    assert [row[2] for row in launch.rows] == [("lr",), ("slow",), ("lr",), ("slow",)]
    assert program.kernels[launch.kernel].row_scalars == (float,)


def test_dependent_kernels_do_not_share_a_launch() -> None:
    x, y, z, w = buffer("x", 8), buffer("y", 8), buffer("z", 8), buffer("w", 8)
    opaque = ExternNode(torch.ops.aten.neg.default, (BufferRef("y"),), {}, (z,))
    graph = LoopGraph((x,), (), (half(y, x), opaque, half(w, z)), ("w",))
    program = emit_program(schedule(graph), graph, fake_emit)
    assert len(steps_of(program, Launch)) == 2 and not steps_of(program, ForeachLaunch)
    assert len(program.kernels) == 1, "equal kernels are one source"


def test_conversions_of_weights_are_launched_together_before_their_uses() -> None:
    x, w1, w2 = buffer("x", 4, 4), buffer("w1", 4, 4), buffer("w2", 4, 4)
    h1, h2, y, z = (buffer(name, 4, 4) for name in ("h1", "h2", "y", "z"))

    def mm(a: str, b: str, out: Buffer) -> ExternNode:
        return ExternNode(torch.ops.aten.mm.default, (BufferRef(a), BufferRef(b)), {}, (out,))

    graph = LoopGraph((x, w1, w2), (), (half(h1, w1), mm("x", "h1", y), half(h2, w2), mm("y", "h2", z)), ("z",))
    program = emit_program(schedule(graph), graph, fake_emit)
    (launch,) = steps_of(program, ForeachLaunch)
    assert len(launch.rows) == 2
    assert program.steps.index(launch) < program.steps.index(steps_of(program, ExternCall)[0])


def test_a_reader_of_donated_memory_stays_before_its_overwriter() -> None:
    """The second update would join the first one's launch, but a product still needs the old second parameter."""
    p, q, g, out = (buffer(name, 4, 4) for name in ("p", "q", "g", "out"))
    new_p, new_q = buffer("new_p", 4, 4), buffer("new_q", 4, 4)
    nodes = (
        half(new_p, p),
        ExternNode(torch.ops.aten.mm.default, (BufferRef("q"), BufferRef("g")), {}, (out,)),
        half(new_q, q),
    )
    graph = LoopGraph((p, q, g), (), nodes, ("new_p", "new_q", "out"), {"new_p": "p", "new_q": "q"})
    program = emit_program(schedule(graph), graph, fake_emit)
    call = program.steps.index(steps_of(program, ExternCall)[0])
    writer = next(
        n for n, step in enumerate(program.steps)
        if (isinstance(step, Launch) and "new_q" in step.buffers)
        or (isinstance(step, ForeachLaunch) and any("new_q" in row[0] for row in step.rows))
    )  # fmt: skip
    assert call < writer


def test_views_externs_and_donations_as_steps() -> None:
    x, y, out = buffer("x", 4, 6), buffer("y", 4, 6), buffer("out", 3, 3)
    window = Buffer("window", torch.float32, (3, 4), (1, 6), "cpu", 2)
    nodes = (
        half(y, x),
        ViewNode(window, "y"),
        ExternNode(torch.ops.aten.mm.default, (BufferRef("window"), BufferRef("window2")), {}, (out,)),
    )
    other = Buffer("window2", torch.float32, (4, 3), (6, 1), "cpu", 1)
    graph = LoopGraph((x,), (), (nodes[0], nodes[1], ViewNode(other, "y"), nodes[2]), ("out",))
    program = emit_program(schedule(graph), graph, fake_emit, EmitOptions(plan_memory=False))
    assert [type(step) for step in program.steps] == [Allocate, Launch, Reinterpret, Reinterpret, ExternCall]
    view = program.steps[2]
    assert isinstance(view, Reinterpret) and (view.source, view.offset) == ("y", 2)
    assert steps_of(program, ExternCall)[0].args == (ValueRef("window"), ValueRef("window2"))


def test_kernels_read_windows_from_the_start_of_their_memory() -> None:
    x, y = buffer("x", 4, 6), buffer("y", 4, 3)
    window = Buffer("window", torch.float32, (4, 3), (6, 1), "cpu", 2)
    graph = LoopGraph((x,), (), (ViewNode(window, "x"), half(y, window)), ("y",))
    program = emit_program(schedule(graph), graph, fake_emit, EmitOptions(plan_memory=False))
    (launch,) = steps_of(program, Launch)
    assert launch.buffers == ("window_memory", "y")
    memory = steps_of(program, Reinterpret)[1]
    assert (memory.name, memory.source, memory.offset) == ("window_memory", "window", -2)


def test_a_kernel_over_nothing_is_not_launched() -> None:
    x, y = buffer("x", 0, 4), buffer("y", 0, 4)
    graph = LoopGraph((x,), (), (half(y, x),), ("y",))
    program = emit_program(schedule(graph), graph, fake_emit)
    assert steps_of(program, Allocate) and not steps_of(program, Launch)


def test_fingerprints_see_what_code_generators_see() -> None:
    def kernel(constant: float, size: int, dtype: torch.dtype = torch.float32) -> Kernel:
        x, y = buffer(f"x{size}", size, dtype=dtype), buffer(f"y{size}", size)
        node = pointwise(y, lambda o, i, _: o.mul(o.load(x.name, i[0]), o.constant(constant, torch.float32)))
        return schedule(LoopGraph((x,), (), (node,), (y.name,))).kernels[0]

    base = take_fingerprint(kernel(0.5, 8))
    assert base.is_flat and base.key == take_fingerprint(kernel(0.5, 8)).key
    assert base.key != take_fingerprint(kernel(0.25, 8)).key
    assert take_fingerprint(kernel(0.0, 8)).key != take_fingerprint(kernel(-0.0, 8)).key
    assert base.key != take_fingerprint(kernel(0.5, 9)).key
    assert base.key != take_fingerprint(kernel(0.5, 8, torch.bfloat16)).key


def test_equal_kernels_are_emitted_once_under_their_own_names() -> None:
    graph = optimizer(["lr", "slow"], [(4, 6), (4, 6)])
    kernels = schedule(graph).kernels
    once = EmitOnce(fake_emit)
    calls.clear()
    first, second = once(kernels[0]), once(kernels[1])
    assert calls == ["single"] and first.source is second.source
    assert second == fake_emit(kernels[1])


# ---- with the C++ back end


@pytest.fixture(scope="module")
def run_cpp(tmp_path_factory: pytest.TempPathFactory):
    toolchain = pytest.importorskip("torchlazy.runtime.toolchains.toolchain")
    if not toolchain.has_cpp():
        pytest.skip("no C++ compiler")
    from torchlazy.inductor.codegen import cpp
    from torchlazy.runtime.executor import load
    from torchlazy.runtime.toolchains.kernel_cache import open_cache

    cache = open_cache(Path(tmp_path_factory.mktemp("cache")))

    def run(graph: LoopGraph, inputs: list[torch.Tensor], scalars: tuple = ()) -> Program:
        program = emit_program(schedule(graph), graph, cpp.emit)
        kernels = toolchain.load_kernels(program.kernels, cache=cache, preludes=cpp.PRELUDES)
        wanted = interpret.run(graph, [tensor.clone() for tensor in inputs], scalars)
        got = load(program, kernels).run([tensor.clone() for tensor in inputs], scalars)
        for have, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
        return program

    return run


def test_cpp_optimizer(run_cpp) -> None:
    graph = optimizer(["lr", "slow", "lr", "lr"], [(4, 6), (5,), (), (2, 3, 40)])
    inputs = [torch.rand(tuple(b.shape)) for b in graph.inputs]
    program = run_cpp(graph, inputs, (0.1, 0.01))
    assert len(steps_of(program, ForeachLaunch)) == 1


def test_cpp_softmax_view_and_product(run_cpp) -> None:
    x, m, e, s, y, out = (
        buffer("x", 6, 8), buffer("m", 6), buffer("e", 6, 8), buffer("s", 6), buffer("y", 6, 8), buffer("out", 6, 6)
    )  # fmt: skip
    turned = Buffer("turned", torch.float32, (8, 6), (1, 8), "cpu")
    nodes = (
        reduction("max", m, (8,), lambda o, i, r: o.load("x", x.element((i[0], r[0])))),
        pointwise(e, lambda o, i, _: o.exp(o.sub(o.load("x", x.element(i)), o.load("m", i[0])))),
        reduction("sum", s, (8,), lambda o, i, r: o.load("e", e.element((i[0], r[0])))),
        pointwise(y, lambda o, i, _: o.div(o.load("e", e.element(i)), o.load("s", i[0]))),
        ViewNode(turned, "y"),
        ExternNode(torch.ops.aten.mm.default, (BufferRef("x"), BufferRef("turned")), {}, (out,)),
    )
    run_cpp(LoopGraph((x,), (), nodes, ("out", "y")), [torch.randn(6, 8)])


# ---- kernels that wait for others of their kind


def bias_gradients(layers: int, rows: int = 6, columns: int = 8) -> tuple[LoopGraph, list[torch.Tensor]]:
    """A backward: each layer's gradient is a product with the one before, its column sums are read at the end only."""
    x, g = buffer("x", columns, columns), buffer("g0", rows, columns)
    nodes: list = []
    outputs = []
    for layer in range(layers):
        grad, total, out = (
            buffer(f"g{layer}", rows, columns),
            buffer(f"s{layer}", columns),
            buffer(f"u{layer}", columns),
        )
        following = buffer(f"g{layer + 1}", rows, columns)
        nodes.append(reduction("sum", total, (rows,), lambda o, i, r, b=grad: o.load(b.name, b.element((r[0], i[0])))))
        nodes.append(ExternNode(torch.ops.aten.mm.default, (BufferRef(grad.name), BufferRef("x")), {}, (following,)))
        outputs.append((total, out))
    for total, out in outputs:  # by one operator a result, as a foreign optimizer would
        nodes.append(ExternNode(torch.ops.aten.neg.default, (BufferRef(total.name),), {}, (out,)))
    names = (*(out.name for _, out in outputs), f"g{layers}")
    inputs = [torch.randn(columns, columns) / columns, torch.randn(rows, columns)]
    return LoopGraph((x, g), (), tuple(nodes), names), inputs


def test_sums_that_are_read_late_share_a_launch(run_cpp) -> None:
    graph, inputs = bias_gradients(5)
    program = run_cpp(graph, inputs)
    (launch,) = steps_of(program, ForeachLaunch)
    assert len(launch.rows) == 5 and not steps_of(program, Launch)
    calls = [program.steps.index(call) for call in steps_of(program, ExternCall) if "mm" in call.op]
    assert program.steps.index(launch) > calls[3]


def test_a_kernel_that_holds_much_memory_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = bias_gradients(4)
    monkeypatch.setattr(grouping, "WAITING_KERNEL_BYTES", 16)
    program = emit_program(schedule(graph), graph, fake_emit)
    # The first sum reads an input, so it holds nothing of the program's own, and meets the second.
    assert [len(launch.rows) for launch in steps_of(program, ForeachLaunch)] == [2]
    assert len(steps_of(program, Launch)) == 2
    monkeypatch.setattr(grouping, "WAITING_KERNEL_BYTES", 1 << 20)
    monkeypatch.setattr(grouping, "WAITING_BYTES", 2 * 6 * 8 * 4)
    program = emit_program(schedule(graph), graph, fake_emit)
    assert {len(launch.rows) for launch in steps_of(program, ForeachLaunch)} == {4}


def test_kernels_of_one_kind_that_need_each_other_run_apart(run_cpp) -> None:
    """Sums of sums: the second kernel waits, the first must not drag it along."""
    x, y, z, w = buffer("x", 4, 4, 4), buffer("y", 4, 4), buffer("z", 4), buffer("w", 4, 4)
    first = reduction("sum", y, (4,), lambda o, i, r: o.load("x", x.element((*i, r[0]))))
    beside = reduction("sum", w, (4,), lambda o, i, r: o.load("x", x.element((r[0], *i))))
    second = reduction("sum", z, (4,), lambda o, i, r: o.load("y", y.element((i[0], r[0]))))
    run_cpp(LoopGraph((x,), (), (first, second, beside), ("z", "w")), [torch.randn(4, 4, 4)])


def test_reductions_of_equal_text_share_a_launch_whatever_else_differs(run_cpp) -> None:
    shapes = [(40, 8), (40, 8), (40, 9)]
    inputs = tuple(buffer(f"x{n}", *shape) for n, shape in enumerate(shapes))
    nodes = tuple(
        reduction(
            "sum", buffer(f"y{n}", shape[0]), (shape[1],), lambda o, i, r, b=b: o.load(b.name, b.element((*i, *r)))
        )
        for n, (shape, b) in enumerate(zip(shapes, inputs, strict=True))
    )
    graph = LoopGraph(inputs, (), nodes, ("y0", "y1", "y2"))
    program = run_cpp(graph, [torch.randn(shape) for shape in shapes])
    (launch,) = steps_of(program, ForeachLaunch)
    assert len(launch.rows) == 2 and len(steps_of(program, Launch)) == 1
