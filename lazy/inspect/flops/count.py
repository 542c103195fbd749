"""`torchlazy.flops(fn, *args)`: arithmetic and memory traffic of a call as formulas over the sizes of its inputs.

Invariant: a formula gives the exact count for every size that was recorded, at least one of which was not used to find
it; nothing is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import sympy
import torch
from torchlazy.inductor.codegen import backends
from torchlazy.lazy.config import config
from torchlazy.lazy.inspect.flops.probe import OTHER_OPERATORS, Constraint, Prober, Probes
from torchlazy.lazy.inspect.flops.rules import Call, Operand, Size, bytes_of, evaluate, flops_of, kind_of, window_sizes
from torchlazy.lazy.inspect.flops.sizes import NoFormula, SizeFormulas, Vector
from torchlazy.lazy.inspect.flops.trace import CannotCount, UnrunCall
from torchlazy.lazy.plan.pipeline import CompileOptions, plan_trace
from torchlazy.lazy.run.driver import compute_device
from torchlazy.lazy.run.text import table_text
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.trace import CutTrace, Float, Slot, slots_in
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Launch,
    Program,
    Reinterpret,
    ValueRef,
)
from torchlazy.runtime.program.steps import span_bytes


class Work(NamedTuple):
    """Counts at some sizes. `products` are the floating point operations of matrix products and their like alone."""

    flops: int
    products: int
    bytes: int


class FusedWork(NamedTuple):
    """The compiled program at some sizes: generated kernels, library calls, and bytes that they read and write."""

    kernels: int
    library_calls: int
    bytes: int


@dataclass(frozen=True)
class OperatorWork:
    """All calls of one operator together."""

    op: str
    kind: str  # "product", "pointwise", "movement", "view", "other"
    calls: int
    flops: sympy.Expr
    bytes: sympy.Expr


@dataclass(frozen=True)
class WorkCount:
    """Formulas over the sizes of a call's inputs; print it for a table.

    `symbols` maps each size that varies by itself, "x_0" for dimension 0 of argument x, to what it was in the call.
    `flops`, `products` and `bytes` are SymPy expressions over them; `by_op` has one row an operator, most work first.
    `constraints` say for which sizes the call would raise, or would be another program: equal sizes, divisibility, and
    the least and greatest size (up to 65536) of each symbol with the others as in the call.
    """

    flops: sympy.Expr
    products: sympy.Expr
    bytes: sympy.Expr
    by_op: tuple[OperatorWork, ...]
    symbols: dict[str, int]
    constraints: tuple[Constraint, ...]
    _names: dict[str, sympy.Expr] = field(repr=False, default_factory=dict)
    _base: dict[str, int] = field(repr=False, default_factory=dict)
    _prober: Prober | None = field(repr=False, compare=False, default=None)

    def at(self, **sizes: int) -> Work:
        """The counts at these sizes; sizes that are not given are those of the call, or follow from the others.

        Raises ValueError for a name that no input has, or sizes that break a constraint.
        """
        values = self._checked(sizes)
        return Work(*(evaluate(formula, values) for formula in (self.flops, self.products, self.bytes)))

    def fused(self, **sizes: int) -> FusedWork:
        """What the compiled program does at these sizes. Plans a program: takes as long as compiling without kernels.

        Raises ValueError as `at` does, and RuntimeError where there is no code generator.
        """
        trace = self._record(sizes)
        device = compute_device(trace)
        language = backends.language_for(device)
        if not language:
            raise RuntimeError(f"fused: no code generator for {device}: install a C++ compiler, Numba or Triton")
        with below_autograd():
            program = plan_trace(trace, CompileOptions(language, config.precision, config.recompute)).program
        return fused_work(program)

    def raises_for(self, **sizes: int) -> str | None:
        """What the call would raise at these sizes, with the user's line; None if it would not.

        Found by recording the call at these very sizes, without running it; sizes that are not given stay as they
        were. Raises ValueError for a name that no input has.
        """
        assert self._prober is not None
        found = self._prober.trace_at(self._places(sizes))
        return None if not isinstance(found, str) or found == OTHER_OPERATORS else found

    def _record(self, sizes: dict[str, int]) -> CutTrace:
        assert self._prober is not None
        values = self._checked(sizes)
        every = {name: evaluate(formula, values) for name, formula in self._names.items()}
        found = self._prober.trace_at(self._places(every))
        if isinstance(found, str):
            raise ValueError(f"at these sizes the call would raise: {found}")
        return found

    def _places(self, sizes: dict[str, int]) -> tuple[int, ...]:
        assert self._prober is not None
        self._check_names(sizes)
        return tuple(int(sizes.get(place.name, place.size)) for place in self._prober.places)

    def _check_names(self, sizes: dict[str, int]) -> None:
        unknown = [name for name in sizes if name not in self._names]
        if unknown:
            raise ValueError(f"no input has the sizes {unknown}; there are {', '.join(self._names) or 'none'}")
        for name, size in sizes.items():
            if not isinstance(size, Integral) or size < 0:
                raise ValueError(f"{name} is {size!r}; sizes are ints that are not negative")

    def _checked(self, sizes: dict[str, int]) -> dict[sympy.Symbol, int]:
        self._check_names(sizes)
        symbols = {str(symbol): symbol for symbol in map(_symbol, self.symbols)}
        values = {symbol: int(sizes.get(name, self.symbols[name])) for name, symbol in symbols.items()}
        for name, size in sizes.items():
            if name not in symbols:
                wanted = self._names[name].subs(values)
                if wanted != size:
                    raise ValueError(f"{name} must be {self._names[name]}, which is {wanted}, not {size}")
        known = {**values, **{_symbol(name): formula.subs(values) for name, formula in self._names.items()}}
        known = {symbol: sympy.Integer(value) for symbol, value in known.items()}
        for constraint in self.constraints:
            # All at once: a size of 0 by itself would contradict the symbols, which are positive.
            if constraint.condition.xreplace(known) == sympy.false:
                raise ValueError(f"these sizes break {constraint}")
        return values

    def __str__(self) -> str:
        now = self.at()
        head = f"flops {self.flops}\nof products {self.products}\nbytes {self.bytes}"
        rows = [("operator", "calls", "flops", "bytes")]
        values = {_symbol(name): size for name, size in self.symbols.items()}
        rows += [
            (w.op, str(w.calls), str(evaluate(w.flops, values)), str(evaluate(w.bytes, values))) for w in self.by_op
        ]
        sizes = ", ".join(f"{name} = {size}" for name, size in self.symbols.items())
        table = table_text(rows, right=(1, 2, 3))
        conditions = [f"needs {constraint}" for constraint in self.constraints]
        return "\n".join([head, *conditions, f"at {sizes}: {now.flops} flops, {now.bytes} bytes", table])


def flops(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> WorkCount:
    """Count the floating point operations and bytes of `fn(*args, **kwargs)` as formulas over the sizes of its tensors.

    The call is recorded at several sizes and never computed: tensors, gradients, optimizer state and random generators
    are as before afterwards. Its own Python runs each time: prints and counters in it happen.

    Counted: 2 for each multiplication with its sum in matrix products, recurrent layers and convolutions (each gradient
    as much again) and attention (2 products forward, 5 backward, whether causal or not); 1 for each result element of
    an elementwise operator; 1 for each element of the largest tensor of any other (reductions, softmax, norms); nothing
    for views and for what only moves or fills memory. `bytes` are what each recorded operator by itself reads and
    writes, unfused; `fused()` counts those of the compiled program. Backward and optimizer steps count where the call
    has them.

    Every dimension of every tensor argument is a symbol, named after the argument: "x_0". Those that must be equal or
    in proportion are one symbol. Choose sizes above 1, and different ones where they are unrelated. Sizes that
    are Python ints, or belong to tensors that are no arguments, are constants.

    Libraries that check `torch.compiler.is_exporting()` before they read values (masks of transformers) see True where
    the call cannot be counted otherwise.

    Raises CannotCount where the call needs a value on the host, or where a size follows no formula known here.
    """
    call = UnrunCall(fn, args, kwargs, _argument_names(fn))
    prober = Prober(call)
    probes = prober.probe()
    rows = _count(probes)
    return WorkCount(
        flops=_total(row.flops for row in rows),
        products=_total(row.flops for row in rows if row.kind == "product"),
        bytes=_total(row.bytes for row in rows),
        by_op=tuple(sorted(rows, key=lambda row: -_now(row.flops, probes))),
        symbols={str(symbol): vector[0] for symbol, vector in probes.symbols.items()},
        constraints=probes.constraints,
        _names=probes.names,
        _base=probes.base,
        _prober=prober,
    )


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def _total(expressions: Any) -> sympy.Expr:
    return sympy.expand(sympy.Add(*expressions))


def _now(expression: sympy.Expr, probes: Probes) -> int:
    return evaluate(expression, {symbol: vector[0] for symbol, vector in probes.symbols.items()})


def _argument_names(fn: Callable[..., Any]) -> list[str]:
    try:
        named = fn.forward if isinstance(fn, torch.nn.Module) else fn
        parameters = inspect.signature(named).parameters.values()
    except (TypeError, ValueError):  # builtins have none
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _count(probes: Probes) -> list[OperatorWork]:
    """Formulas of every call, added up by operator."""
    formulas = SizeFormulas(probes.symbols)
    vectors = _without_workspaces(probes.traces[0], _shapes_of_slots(probes.traces))
    work: dict[str, list[tuple[Size, Size]]] = {}
    kinds: dict[str, str] = {}
    first = probes.traces[0]
    for position, entry in enumerate(first.entries):
        name = str(entry.op)
        kinds[name] = kind_of(entry.op)
        found = work.setdefault(name, [])
        if kinds[name] == "view":
            found.append((0, 0))
        try:
            call = _call(first, position, vectors, formulas)
        except NoFormula as error:
            frame = first.frames[position] if position < len(first.frames) else ""
            raise CannotCount(
                f"torchlazy.flops: {name} at {frame or 'an unknown line'} has {error} in {len(probes.traces)} "
                "recordings, which is no formula of the input sizes that is known here; count it at fixed sizes"
            ) from error
        if kinds[name] != "view":
            found.append((flops_of(call), bytes_of(call)))
    return [
        OperatorWork(
            name, kinds[name], len(calls), _total(flops for flops, _ in calls), _total(size for _, size in calls)
        )
        for name, calls in work.items()
    ]


def _shapes_of_slots(traces: tuple[CutTrace, ...]) -> list[tuple[Vector, ...]]:
    """For each slot the vectors of its dimensions. Slots have the same numbers where the operators are the same, but
    for inputs that are entered at another place; then the recordings do not match."""
    count = len(traces[0].geometries)
    if any(len(trace.geometries) != count for trace in traces):
        raise CannotCount("torchlazy.flops: the call reads other tensors at other sizes; count it at fixed sizes")
    found = []
    for number in range(count):
        shapes = [trace.geometries[number].shape for trace in traces]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            raise CannotCount("torchlazy.flops: a value has other dimensions at other sizes; count it at fixed sizes")
        found.append(tuple(zip(*shapes, strict=True)))
    return found


def _without_workspaces(trace: CutTrace, vectors: list[tuple[Vector, ...]]) -> list[tuple[Vector, ...]]:
    """What oneDNN's recurrent layers keep for backward counts as nothing: the kernel chooses its size."""
    found = list(vectors)
    for entry in trace.entries:
        if str(entry.op) == "aten.mkldnn_rnn_layer.default":
            workspace = entry.outputs[3]
            found[workspace.number] = tuple((0,) * len(vector) for vector in vectors[workspace.number])
    return found


def _call(trace: CutTrace, position: int, vectors: list[tuple[Vector, ...]], formulas: SizeFormulas) -> Call:
    """One recorded operator with its shapes as formulas: operands first, so that results are made of them."""
    entry = trace.entries[position]
    near: list[Vector] = [vector for found in slots_in(entry.args) for vector in vectors[found.number]]

    def resolve(value: Any, windows: Any = ()) -> Any:
        if type(value) is Slot:
            return _operand(trace, value, vectors, formulas, near, windows)
        if type(value) is tuple:
            return tuple(resolve(item, windows) for item in value)
        return value.value if type(value) is Float else value

    args = tuple(map(resolve, entry.args))
    kwargs = {name: resolve(value) for name, value in entry.kwargs}
    call = Call(entry.op, args, kwargs, ())
    outputs = resolve(entry.outputs, window_sizes(call))
    return Call(entry.op, args, kwargs, outputs if type(outputs) is tuple else (outputs,))


def _operand(
    trace: CutTrace,
    number: Slot,
    vectors: list[tuple[Vector, ...]],
    formulas: SizeFormulas,
    near: list[Vector],
    windows: Any,
) -> Operand:
    geom = trace.geometries[number.number]
    shape = tuple(formulas.expression(vector, near, windows) for vector in vectors[number.number])
    numel: Size = 1
    for size, stride in zip(shape, geom.strides, strict=True):
        numel = numel * size if stride else numel
    return Operand(shape, numel, geom.dtype.itemsize, geom.numel)


def fused_work(program: Program) -> FusedWork:
    """Launches, library calls, and the bytes of every buffer that each of them gets or makes."""
    sizes = {name: span_bytes(meta) for name, meta in program.inputs}
    kernels = calls = total = 0
    for step in program.steps:
        if isinstance(step, (Allocate, Reinterpret)):
            sizes[step.name] = span_bytes(step.meta)
        elif isinstance(step, Launch):
            kernels += 1
            total += sum(sizes[name] for name in step.buffers)
        elif isinstance(step, ForeachLaunch):
            kernels += 1
            total += sum(sizes[name] for buffers, _, _ in step.rows for name in buffers)
        elif isinstance(step, ExternCall):
            calls += 1
            made = {n: span_bytes(m) for n, m in zip(step.outputs, step.metas, strict=True) if n is not None and m}
            sizes |= made
            read = dict.fromkeys(_values_in((step.args, tuple(value for _, value in step.kwargs))))
            total += sum(made.values()) + sum(sizes[name] for name in read)
    return FusedWork(kernels, calls, total)


def _values_in(value: Any) -> list[str]:
    if isinstance(value, ValueRef):
        return [] if value.scalar else [value.name]
    return [name for item in value for name in _values_in(item)] if isinstance(value, tuple) else []
