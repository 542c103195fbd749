"""`torchlazy.flops(fn, *args)`: arithmetic and memory traffic of a call as formulas over the sizes of its inputs.

Invariant: a formula gives the exact count for every size that was recorded, at least one of which was not used to find
it; nothing is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, NamedTuple

import sympy
import torch
from torchlazy.inductor.codegen import backends
from torchlazy.lazy.config import config
from torchlazy.lazy.inspect.flops.probe import OTHER_OPERATORS, Constraint, Prober, symbol_of
from torchlazy.lazy.inspect.flops.rules import Call, Operand, Size, evaluate, kind_of, window_sizes, work_of
from torchlazy.lazy.inspect.flops.sizes import NoFormula, SizeFormulas, Vector
from torchlazy.lazy.inspect.flops.trace import CannotCount, UnrunCall
from torchlazy.lazy.plan.pipeline import CompileOptions, plan_trace
from torchlazy.lazy.run.driver import compute_device
from torchlazy.lazy.run.text import table_text
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.trace import CutTrace, Entry, Slot, plain_constant, slots_in
from torchlazy.runtime.program.program import ExternCall, ForeachLaunch, Launch, Program
from torchlazy.runtime.program.steps import bytes_by_name, names_made, names_read


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
    _prober: Prober = field(repr=False, compare=False)

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
        values = self._checked(sizes)
        trace = self._prober.trace_at(tuple(evaluate(size, values) for size in self._prober.names.values()))
        if isinstance(trace, str):
            raise ValueError(f"at these sizes the call would raise: {trace}")
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
        self._check_names(sizes)
        found = self._prober.trace_at(tuple(int(sizes.get(p.name, p.size)) for p in self._prober.places))
        return found if isinstance(found, str) and found != OTHER_OPERATORS else None

    def _check_names(self, sizes: dict[str, int]) -> None:
        names = self._prober.names
        if unknown := [name for name in sizes if name not in names]:
            raise ValueError(f"no input has the sizes {unknown}; there are {', '.join(names) or 'none'}")
        for name, size in sizes.items():
            if not isinstance(size, Integral) or size < 0:
                raise ValueError(f"{name} is {size!r}; sizes are ints that are not negative")

    def _checked(self, sizes: dict[str, int]) -> dict[sympy.Symbol, int]:
        """The value of every symbol at these sizes."""
        self._check_names(sizes)
        values = {symbol_of(name): int(sizes.get(name, size)) for name, size in self.symbols.items()}
        known = {symbol_of(name): formula.subs(values) for name, formula in self._prober.names.items()}
        for name, size in sizes.items():
            if (wanted := known[symbol_of(name)]) != size:
                raise ValueError(f"{name} must be {self._prober.names[name]}, which is {wanted}, not {size}")
        for constraint in self.constraints:
            # All at once: a size of 0 by itself would contradict the symbols, which are positive.
            if constraint.condition.xreplace(known) == sympy.false:
                raise ValueError(f"these sizes break {constraint}")
        return values

    def __str__(self) -> str:
        now = self.at()
        head = f"flops {self.flops}\nof products {self.products}\nbytes {self.bytes}"
        values = {symbol_of(name): size for name, size in self.symbols.items()}
        rows = [("operator", "calls", "flops", "bytes")]
        rows += [
            (w.op, str(w.calls), str(evaluate(w.flops, values)), str(evaluate(w.bytes, values))) for w in self.by_op
        ]
        sizes = ", ".join(f"{name} = {size}" for name, size in self.symbols.items())
        needs = [f"needs {constraint}" for constraint in self.constraints]
        at = f"at {sizes}: {now.flops} flops, {now.bytes} bytes"
        return "\n".join([head, *needs, at, table_text(rows, right=(1, 2, 3))])


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
    prober = Prober(UnrunCall(fn, args, kwargs, _argument_names(fn)))
    symbols = {symbol: vector[0] for symbol, vector in prober.symbols.items()}
    rows = _count(prober)
    return WorkCount(
        flops=_total(row.flops for row in rows),
        products=_total(row.flops for row in rows if row.kind == "product"),
        bytes=_total(row.bytes for row in rows),
        by_op=tuple(sorted(rows, key=lambda row: -evaluate(row.flops, symbols))),
        symbols={str(symbol): size for symbol, size in symbols.items()},
        constraints=prober.constraints,
        _prober=prober,
    )


def _total(expressions: Iterable[Size]) -> sympy.Expr:
    return sympy.expand(sympy.Add(*expressions))


def _argument_names(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # builtins have none
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _count(prober: Prober) -> list[OperatorWork]:
    """Formulas of every call, added up by operator."""
    formulas, vectors, trace = SizeFormulas(prober.symbols), _vectors(prober.traces), prober.traces[0]
    work: dict[torch._ops.OpOverload, list[tuple[Size, Size]]] = {}
    for position, entry in enumerate(trace.entries):
        try:
            found = work_of(_call(trace, entry, vectors, formulas))
        except NoFormula as error:
            frame = trace.frames[position] if position < len(trace.frames) else ""
            raise CannotCount(
                f"torchlazy.flops: {entry.op} at {frame or 'an unknown line'} has {error} in {len(prober.traces)} "
                "recordings, which is no formula of the input sizes that is known here; count it at fixed sizes"
            ) from error
        work.setdefault(entry.op, []).append(found)
    return [
        OperatorWork(str(op), kind_of(op), len(calls), *(_total(counts) for counts in zip(*calls, strict=True)))
        for op, calls in work.items()
    ]


def _vectors(traces: tuple[CutTrace, ...]) -> list[tuple[Vector, ...]]:
    """For each slot the vectors of its dimensions. Slots have the same numbers where the operators are the same, but
    for inputs that are entered at another place; then the recordings do not match.

    What oneDNN's recurrent layers keep for backward counts as nothing: the kernel chooses its size.
    """
    ranks = [[len(geom.shape) for geom in trace.geometries] for trace in traces]
    if any(found != ranks[0] for found in ranks):
        raise CannotCount(
            "torchlazy.flops: the call reads other tensors, or has values of other dimensions, at other sizes; "
            "count it at fixed sizes"
        )
    columns = zip(*(trace.geometries for trace in traces), strict=True)
    vectors = [tuple(zip(*(geom.shape for geom in column), strict=True)) for column in columns]
    for entry in traces[0].entries:
        if str(entry.op) == "aten.mkldnn_rnn_layer.default":
            workspace = entry.outputs[3].number
            vectors[workspace] = ((0,) * len(traces),) * len(vectors[workspace])
    return vectors


def _call(trace: CutTrace, entry: Entry, vectors: list[tuple[Vector, ...]], formulas: SizeFormulas) -> Call:
    """One recorded operator with its shapes as formulas: operands first, so that results are made of them."""
    near: list[Vector] = [vector for found in slots_in(entry.args) for vector in vectors[found.number]]

    def resolve(value: Any, windows: Sequence[tuple[int, int, int]] = ()) -> Any:
        if type(value) is tuple:
            return tuple(resolve(item, windows) for item in value)
        if type(value) is not Slot:
            return plain_constant(value)
        geom = trace.geometries[value.number]
        shape = tuple(formulas.expression(vector, near, windows) for vector in vectors[value.number])
        numel = sympy.Mul(*(size for size, stride in zip(shape, geom.strides, strict=True) if stride))
        return Operand(shape, numel, geom.dtype.itemsize, geom.numel)

    call = Call(entry.op, resolve(entry.args), {name: resolve(value) for name, value in entry.kwargs}, ())
    return replace(call, outputs=resolve((entry.outputs,), window_sizes(call)))


def fused_work(program: Program) -> FusedWork:
    """Launches, library calls, and the bytes of every buffer that each of them gets or makes."""
    sizes = bytes_by_name(program)
    kernels = calls = total = 0
    for step in program.steps:
        if isinstance(step, ExternCall):
            calls += 1
            total += sum(sizes.get(name, 0) for name in (*names_made(step), *names_read(step)))
        elif isinstance(step, (Launch, ForeachLaunch)):
            kernels += 1
            rows = [step.buffers] if isinstance(step, Launch) else [buffers for buffers, _, _ in step.rows]
            total += sum(sizes[name] for buffers in rows for name in buffers)
    return FusedWork(kernels, calls, total)
