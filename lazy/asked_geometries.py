"""Operators that lead to sizes which a captured call's Python reads: whether they give at other sizes what is claimed.

A size that is read is an expression over few symbols, and right for the calls that were captured. At other sizes it is
a guess; here each view, and each operator whose result's size is read or leads to one that is, is inferred at the
sizes that the expressions claim, from the arguments on.

Invariant: what a template for all sizes takes for the size of a tensor is that tensor's size, where inference can tell
the operators' results at all; operators that it cannot tell at the captured sizes are left to those who check traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.asked_sizes import Given, Look, SizesAsked, look
from torchlazy.lazy.geometry import Geometry, geometry, geometry_like
from torchlazy.lazy.op_plan import IDENTITY_OPS, OpPlan
from torchlazy.lazy.size_fit import DoesNotFit, SizeFit, function_of, symbols_in
from torchlazy.lazy.sized_workspaces import shown_results, takes_workspace
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.trace_fit import result_of
from torchlazy.lazy.traced_numbers import node_of


def tell_sizes(asked: SizesAsked, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """An operator has run while somebody listens. A view that is no other than its tensor is not recorded, nor one that
    is only given back; at other sizes they may be otherwise."""
    made = list(result) if isinstance(result, (list, tuple)) else [result]
    if plan.op in IDENTITY_OPS or takes_workspace(plan.op) or not made or not all(type(x) is LazyTensor for x in made):
        return
    found = tuple([x._geometry for x in made])
    varying = () if plan.kind == "view" else plan.varying | plan.followed
    names = [*plan.names, *[""] * (len(args) - len(plan.names))]
    given = tuple([_looked_at(value, found[0], name in varying) for name, value in zip(names, args, strict=False)])
    named = {name: _looked_at(value, found[0], name in varying) for name, value in kwargs.items()}
    results = shown_results(plan.op, found) if isinstance(result, (list, tuple)) else found[0]
    asked.gave(plan.op, plan.kind == "view", given, named, results)


def _looked_at(value: Any, made: Geometry, is_number: bool) -> Any:
    """Geometries in place of tensors, and 1 in place of a number that decides of no size."""
    if isinstance(value, torch.Tensor):
        own = getattr(value, "_geometry", None)
        return geometry_like(value, made.device, made.compute) if own is None else own
    if isinstance(value, (list, tuple)):
        return tuple([_looked_at(item, made, is_number) for item in value])
    if is_number and type(value) in (int, float):
        return type(value)(1)
    node = node_of(value)
    return value if node is None else type(node.value)(1)


class Shown:
    """An operator at one place of all calls that were listened to. `is_told` is False where inference does not give
    what the calls had."""

    def __init__(self, given: Sequence[Given], fit: SizeFit) -> None:
        self._given = first = given[0]
        if len({(g.op, _marked(g.args), _marked(g.kwargs), _marked(g.results)) for g in given}) > 1:
            raise DoesNotFit("its views depend on the sizes")
        columns = zip(*map(_ints_of, given), strict=True)
        texts = [fit.text(column, "a number of a view" if first.is_view else "a size") for column in columns]
        self._values = function_of(len(fit.symbols), texts)
        self.reads = frozenset().union(*map(symbols_in, texts))
        self.is_told = all(self.stays(symbols) for symbols in zip(*fit.symbols, strict=True))

    def stays(self, symbols: Sequence[int]) -> bool:
        """Whether it gives at these sizes what the expressions say."""
        try:
            ints = iter(self._values(*symbols))
        except ArithmeticError:
            return False
        given = self._given
        args, kwargs, results = _filled(given.args, ints), _filled(given.kwargs, ints), _filled(given.results, ints)
        one = results if type(results) is Geometry else results[0]
        return shown_results(given.op, result_of(given.op, args, kwargs, one.device, one.compute)) == results


def shown_at_all_sizes(asked: Sequence[SizesAsked], fit: SizeFit) -> list[Shown]:
    """The views, and the operators that lead to what was looked at."""
    if len({len(one.ran) for one in asked}) > 1 or len({len(one.looked_at) for one in asked}) > 1:
        raise DoesNotFit("its views depend on the sizes")
    wanted: set[tuple[Look, ...]] = set(zip(*(one.looked_at for one in asked), strict=True))
    kept: dict[tuple[Given, ...], None] = {}
    for given in reversed(list(zip(*(one.ran for one in asked), strict=True))):
        if given in kept or not (given[0].is_view or not wanted.isdisjoint(_looks([one.results for one in given]))):
            continue
        kept[given] = None  # layers take the same views, at all sizes
        wanted.update(_looks([(one.args, one.kwargs) for one in given]))
    found = [Shown(given, fit) for given in reversed(kept)]
    if any(not shown.is_told and given[0].is_view for shown, given in zip(found, reversed(kept), strict=True)):
        raise DoesNotFit("what a view of it shows cannot be told")
    return [shown for shown in found if shown.is_told]


def _looks(values: Sequence[Any]) -> list[tuple[Look, ...]]:
    """The tensors in values of one form, each as it was in all calls."""
    found = list(map(_geometries, values))
    return list(zip(*found, strict=True)) if len(set(map(len, found))) == 1 else []


def _geometries(value: Any) -> list[Look]:
    if type(value) is tuple:
        return [found for item in value for found in _geometries(item)]
    return [look(value)] if type(value) is Geometry else []


def _ints_of(given: Given) -> list[int]:
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


__all__ = ["Shown", "shown_at_all_sizes", "tell_sizes"]
