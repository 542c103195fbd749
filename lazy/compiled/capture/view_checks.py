"""Whether the geometries of a trace at other sizes are those that its operators give; also for sizes that Python reads.

The trace of a call at other sizes is made from recorded ones by expressions. Here every operator's result is inferred
from its operands and constants, as the recorder would have done.

A size that Python reads is an expression over few symbols, and right for the calls that were captured; at other sizes
it is a guess. Each view, and each operator whose result's size is read or leads to one that is, is inferred at the
sizes that the expressions claim, from the arguments on.

No expression gives the size of a workspace: the library's kernel does.

Invariant: a trace fits only if each result whose geometry inference gives for the recorded trace is inferred equal for
this one. What a template for all sizes uses as the size of a tensor is that tensor's size, where inference can give the
operators' results at all; operators that it cannot infer at the captured sizes are left to the checks of traces. The
size of a workspace is asked of the operator itself, at the sizes that its operands have; Python never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.numbers.fit import Column, DoesNotFit, SizeFit, function_of, symbols_in
from torchlazy.lazy.numbers.questions import OperatorRun, ShapeAndStrides, SizeQuestions, shape_and_strides_of
from torchlazy.lazy.numbers.tracked import node_of
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.shapes.infer import CannotInfer, infer
from torchlazy.lazy.trace.geometry import Geometry, base_of, geometry, geometry_like
from torchlazy.lazy.trace.op_schema import IDENTITY_OPS, OpPlan
from torchlazy.lazy.trace.trace import Complex, CutTrace, Entry, Float, ScalarSlot, Slot, slots_in

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_WORKSPACE = 3  # its position among the layer's results


def shown_results(op: Any, results: Any) -> Any:
    """The results whose sizes Python may come to see; None in place of a workspace."""
    if op is not _LAYER or type(results) is not tuple or len(results) <= _WORKSPACE:
        return results
    return (*results[:_WORKSPACE], None, *results[_WORKSPACE + 1 :])


def reads_workspace(op: Any) -> bool:
    """Whether a workspace is among the operator's operands."""
    return op is _BACKWARD


class Workspaces:
    """Those of several traces of one skeleton: which symbol of the traces is the size of which operator's. A backward
    reads what an operator of its forward left, which is a trace `before` it in the calls."""

    def __init__(self, traces: Sequence[CutTrace], before: Sequence[Workspaces]) -> None:
        self._before = before
        self._sizes: dict[Column, int] = {}  # the operator's position
        self._symbols: list[tuple[int, int]] = []
        self._handed: list[tuple[int, int, int]] = []  # symbols that are sizes of an earlier trace's
        for position, entry in enumerate(traces[-1].entries):
            if entry.op is _LAYER and entry.outputs[_WORKSPACE] is not None:
                numbers = [trace.entries[position].outputs[_WORKSPACE].number for trace in traces]
                sizes = [trace.geometries[number].shape for trace, number in zip(traces, numbers, strict=True)]
                if all(len(shape) == 1 for shape in sizes):
                    self._sizes.setdefault(tuple([shape[0] for shape in sizes]), position)

    def take(self, symbol: int, column: Column) -> bool:
        """Whether this symbol, which had these values, is the size of a workspace."""
        position = self._sizes.get(column)
        if position is not None:
            self._symbols.append((symbol, position))
            return True
        for number, other in enumerate(self._before):
            if column in other._sizes:
                self._handed.append((symbol, number, other._sizes[column]))
                return True
        return False

    def handed(self, before: Sequence[CutTrace | None]) -> tuple[int, ...] | None:
        """The sizes of workspaces that earlier traces of the same call left; None where such a trace is missing."""
        found = []
        for _, number, position in self._handed:
            trace = before[number] if number < len(before) else None
            if trace is None:
                return None
            found.append(trace.geometries[trace.entries[position].outputs[_WORKSPACE].number].shape[0])
        return tuple(found)

    def filled(
        self,
        symbols: Sequence[int],
        handed: Sequence[int],
        made: Callable[[Sequence[int]], CutTrace],
        results: Callable[[CutTrace, Any], Any],
    ) -> Sequence[int] | None:
        """The symbols with the sizes that the operators give, where `made` makes the trace for symbols; None where
        they give none."""
        found = list(symbols)
        for (symbol, _, _), size in zip(self._handed, handed, strict=True):
            found[symbol] = size
        trace = made(found) if self._symbols else None
        for symbol, position in self._symbols:
            assert trace is not None
            inferred = results(trace, trace.entries[position])
            if inferred is None:
                return None
            found[symbol] = inferred[_WORKSPACE].shape[0]
        return found


_COPY = torch.ops.aten.copy.default
_MOST_REMEMBERED = 65536
_remembered: dict[Any, Any] = {}  # results of inference, for all traces


class TraceFit:
    """Made from a recorded trace; tests whether others of its skeleton fit."""

    def __init__(self, trace: CutTrace) -> None:
        inferred = [_lies_as_target(trace, entry) or self.results(trace, entry) for entry in trace.entries]
        self._inferred = [
            found is not None and found == _result_geometries(trace, entry.outputs)
            for found, entry in zip(inferred, trace.entries, strict=True)
        ]
        self._recorded = trace

    def misfit(self, trace: CutTrace) -> str:
        """The first operator whose result differs, or cannot be inferred and has another geometry than the recorded
        one; empty where all fit."""
        for position, (entry, is_inferred) in enumerate(zip(trace.entries, self._inferred, strict=True)):
            wanted = _result_geometries(trace, entry.outputs)
            if is_inferred:
                if _lies_as_target(trace, entry) != wanted and self.results(trace, entry) != wanted:
                    return f"{entry.op} gives another size{_at(trace, position)}"
            elif wanted != _result_geometries(self._recorded, self._recorded.entries[position].outputs):
                return f"the size of what {entry.op} gives cannot be inferred{_at(trace, position)}"
        return ""

    def results(self, trace: CutTrace, entry: Entry) -> Any:
        """The geometries that inference gives the entry's results; None where it cannot."""
        first = next(iter(slots_in(entry.outputs)), None)
        if first is None:
            return None
        own = trace.geometries[first.number]
        args = tuple([_argument(trace, value) for value in entry.args])
        kwargs = tuple([(name, _argument(trace, value)) for name, value in entry.kwargs])
        return result_of(entry.op, args, kwargs, own.device, own.compute)


def _lies_as_target(trace: CutTrace, entry: Entry) -> Geometry | None:
    """What is written to a view: the recorder gives it the view's own geometry, with or without its offset in the
    memory."""
    if entry.op is not _COPY or type(entry.args[0]) is not Slot or type(entry.outputs) is not Slot:
        return None
    target, source = trace.geometries[entry.args[0].number], trace.geometries[entry.args[1].number]
    made = trace.geometries[entry.outputs.number]
    fits = len(source.shape) <= len(target.shape) and all(
        size in (1, own) for size, own in zip(reversed(source.shape), reversed(target.shape), strict=False)
    )
    return made if fits and made in (target, base_of(target)) else None


def result_of(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    device: torch.device,
    compute: str,
) -> Any:
    """The geometries that inference gives the operator's results on this device; None where it cannot. `args` and
    `kwargs` hold Geometries and constants, in tuples."""
    key = (op, args, kwargs, device, compute, _signs(args), _signs(kwargs))
    if key in _remembered:
        return _remembered[key]
    try:
        found, _ = infer(op, tuple(map(_listed, args)), {n: _listed(value) for n, value in kwargs}, device, compute)
    except CannotInfer:
        found = None
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.clear()
    _remembered[key] = found
    return found


def _at(trace: CutTrace, position: int) -> str:
    frame = trace.frames[position] if position < len(trace.frames) else ""
    return f" at {frame}" if frame else ""


def _result_geometries(trace: CutTrace, outputs: Any) -> Any:
    if type(outputs) is Slot:
        return trace.geometries[outputs.number]
    return tuple([_result_geometries(trace, item) for item in outputs]) if type(outputs) is tuple else outputs


def _argument(trace: CutTrace, value: Any) -> Any:
    kind = type(value)
    if kind is Slot:
        return trace.geometries[value.number]
    if kind is ScalarSlot:
        return value.kind(1)
    if kind is Float:
        return value.value
    if kind is Complex:
        return complex(value)
    return tuple([_argument(trace, item) for item in value]) if kind is tuple else value


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if type(value) is tuple else value


def _signs(values: Any) -> Any:
    """Types of constants: 1, True and 1.0 are equal, and promote otherwise."""
    if type(values) is tuple:
        return tuple(map(_signs, values))
    return None if type(values) is Geometry else type(values)


def record_sizes(asked: SizeQuestions, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """An operator has run while `asked` listens. A view that equals its tensor is not recorded, nor one that is only
    returned; at other sizes they may differ."""
    made = list(result) if isinstance(result, (list, tuple)) else [result]
    if plan.op in IDENTITY_OPS or reads_workspace(plan.op) or not made or not all(type(x) is LazyTensor for x in made):
        return
    found = tuple([x._geometry for x in made])
    varying = () if plan.kind == "view" else plan.varying | plan.followed
    names = [*plan.names, *[""] * (len(args) - len(plan.names))]
    given = tuple([_looked_at(value, found[0], name in varying) for name, value in zip(names, args, strict=False)])
    named = {name: _looked_at(value, found[0], name in varying) for name, value in kwargs.items()}
    results = shown_results(plan.op, found) if isinstance(result, (list, tuple)) else found[0]
    asked.record_operator(plan.op, plan.kind == "view", given, named, results)


def _looked_at(value: Any, made: Geometry, is_number: bool) -> Any:
    """Geometries in place of tensors, and 1 in place of a number that no size depends on."""
    if isinstance(value, torch.Tensor):
        own = getattr(value, "_geometry", None)
        return geometry_like(value, made.device, made.compute) if own is None else own
    if isinstance(value, (list, tuple)):
        return tuple([_looked_at(item, made, is_number) for item in value])
    if is_number and type(value) in (int, float):
        return type(value)(1)
    node = node_of(value)
    return value if node is None else type(node.value)(1)


class SizedOperator:
    """An operator at one position of all calls that were listened to. `is_inferred` is False where inference does not
    give what the calls had."""

    def __init__(self, given: Sequence[OperatorRun], fit: SizeFit) -> None:
        self._given = first = given[0]
        if len({(g.op, _marked(g.args), _marked(g.kwargs), _marked(g.results)) for g in given}) > 1:
            raise DoesNotFit("its views depend on the sizes")
        columns = zip(*map(_ints_of, given), strict=True)
        texts = [fit.text(column, "a number of a view" if first.is_view else "a size") for column in columns]
        self._values = function_of(len(fit.symbols), texts)
        self.reads = frozenset().union(*map(symbols_in, texts))
        self.is_inferred = all(self.stays(symbols) for symbols in zip(*fit.symbols, strict=True))

    def stays(self, symbols: Sequence[int]) -> bool:
        """Whether inference gives at these sizes what the expressions say."""
        try:
            ints = iter(self._values(*symbols))
        except ArithmeticError:
            return False
        given = self._given
        args, kwargs, results = _filled(given.args, ints), _filled(given.kwargs, ints), _filled(given.results, ints)
        one = results if type(results) is Geometry else results[0]
        return shown_results(given.op, result_of(given.op, args, kwargs, one.device, one.compute)) == results


def sized_operators(asked: Sequence[SizeQuestions], fit: SizeFit) -> list[SizedOperator]:
    """The views, and the operators that lead to what was looked at."""
    if len({len(one.ran) for one in asked}) > 1 or len({len(one.looked_at) for one in asked}) > 1:
        raise DoesNotFit("its views depend on the sizes")
    wanted: set[tuple[ShapeAndStrides, ...]] = set(zip(*(one.looked_at for one in asked), strict=True))
    kept: dict[tuple[OperatorRun, ...], None] = {}
    for given in reversed(list(zip(*(one.ran for one in asked), strict=True))):
        if given in kept or not (given[0].is_view or not wanted.isdisjoint(_looks([one.results for one in given]))):
            continue
        kept[given] = None  # layers have the same views, at all sizes
        wanted.update(_looks([(one.args, one.kwargs) for one in given]))
    found = [SizedOperator(given, fit) for given in reversed(kept)]
    if any(not shown.is_inferred and given[0].is_view for shown, given in zip(found, reversed(kept), strict=True)):
        raise DoesNotFit("what a view of it shows cannot be inferred")
    return [shown for shown in found if shown.is_inferred]


def _looks(values: Sequence[Any]) -> list[tuple[ShapeAndStrides, ...]]:
    """The tensors in values of one form, each as it was in all calls."""
    found = list(map(_geometries, values))
    return list(zip(*found, strict=True)) if len(set(map(len, found))) == 1 else []


def _geometries(value: Any) -> list[ShapeAndStrides]:
    if type(value) is tuple:
        return [found for item in value for found in _geometries(item)]
    return [shape_and_strides_of(value)] if type(value) is Geometry else []


def _ints_of(given: OperatorRun) -> list[int]:
    found: list[int] = []
    for part in (given.args, given.kwargs, given.results):
        _collect(part, found)
    return found


def _collect(value: Any, found: list[int]) -> None:
    if type(value) is int:
        found.append(value)
    elif type(value) is Geometry:
        found += (*value.shape, *value.strides, value.offset)
    elif type(value) is tuple:
        for item in value:
            _collect(item, found)


def _marked(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_marked, value))
    if type(value) is Geometry:
        return len(value.shape), value.dtype, value.bits
    return int if type(value) is int else value


def _filled(value: Any, ints: Iterator[int]) -> Any:
    if type(value) is tuple:
        return tuple([_filled(item, ints) for item in value])
    if type(value) is Geometry:
        shape, strides = tuple([next(ints) for _ in value.shape]), tuple([next(ints) for _ in value.strides])
        return geometry(shape, strides, next(ints), value.dtype, value.device, value.compute, value.bits)
    return next(ints) if type(value) is int else value


__all__ = ["SizedOperator", "Workspaces", "reads_workspace", "record_sizes", "shown_results", "sized_operators"]
