"""The numbers of a call template, separate from the rest: sizes, positions, constants that may follow from sizes.

One traversal of a template visits its numbers and traces in a fixed order. With a collector it decomposes the template,
with other numbers it makes the template of a call at other sizes.

Invariant: what the traversal does not visit (which argument, place or state) is the same in both templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.numbers.expr import Applied, SourceRef, places_in
from torchlazy.lazy.plan.joint import Joint, ScalarSource
from torchlazy.lazy.trace.geometry import Geometry, geometry
from torchlazy.lazy.trace.trace import CutTrace


class Numbers(Protocol):
    """A visitor: it receives each number, and returns the one to put in its place."""

    def int(self, value: int) -> int: ...

    def float(self, value: float) -> float: ...

    def trace(self, trace: CutTrace) -> CutTrace: ...


@dataclass(eq=False)
class Collected:
    """Collects the numbers of a template in the order of the traversal, and leaves them as they are."""

    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    traces: list[CutTrace] = field(default_factory=list)

    def int(self, value: int) -> int:
        self.ints.append(value)
        return value

    def float(self, value: float) -> float:
        self.floats.append(value)
        return value

    def trace(self, trace: CutTrace) -> CutTrace:
        self.traces.append(trace)
        return trace


class GivenNumbers:
    """Replaces numbers by others, given in the order of the traversal."""

    def __init__(self, ints: Sequence[int], floats: Sequence[float], traces: Sequence[CutTrace]) -> None:
        self._ints, self._floats, self._traces = iter(ints), iter(floats), iter(traces)

    def int(self, value: int) -> int:
        return next(self._ints)

    def float(self, value: float) -> float:
        return next(self._floats)

    def trace(self, trace: CutTrace) -> CutTrace:
        return next(self._traces)


def with_numbers(template: t.CallTemplate, numbers: Numbers) -> t.CallTemplate:
    """The template with the numbers that `numbers` returns for its own."""
    template = replace(
        template,
        steps=tuple([step_with_numbers(step, numbers) for step in template.steps]),
        checks=checks_with_numbers(template.checks, numbers),
    )
    return ending_with_numbers(template, numbers)


def checks_with_numbers(checks: Sequence[tuple[Any, Any]], numbers: Numbers) -> tuple[tuple[Any, Any], ...]:
    """The same of checks."""
    return tuple([(_expression(e, numbers), _plain(value, numbers)) for e, value in checks])


def ending_with_numbers(template: t.CallTemplate, numbers: Numbers) -> t.CallTemplate:
    """The same of results and effects alone."""
    return replace(
        template,
        results=tuple([_result(result, numbers) for result in template.results]),
        effects=tuple([
            replace(effect, results=tuple([_result(result, numbers) for result in effect.results]))
            for effect in template.effects
        ]),
    )  # fmt: skip


def collected(template: t.CallTemplate) -> Collected:
    """The template's numbers."""
    found = Collected()
    with_numbers(template, found)
    return found


def step_with_numbers(step: t.Step, numbers: Numbers) -> t.Step:
    """The same of one step."""
    if isinstance(step, t.Segment):
        return replace(step, trace=numbers.trace(step.trace), scalars=_expressions(step.scalars, numbers))
    if isinstance(step, t.JointRun):
        return replace(step, joint=_joint(step.joint, numbers), scalars=_expressions(step.scalars, numbers))
    if isinstance(step, t.HostCall):
        return replace(step, args=_plain(step.args, numbers), kwargs=_named(step.kwargs, numbers))
    if isinstance(step, t.LazyCall):
        geometries = tuple([_geometry(geom, numbers) for geom in step.geometries])
        return replace(
            step, args=_plain(step.args, numbers), kwargs=_named(step.kwargs, numbers), geometries=geometries
        )
    if isinstance(step, t.ToLazy):
        return replace(step, kwargs=_named(step.kwargs, numbers))
    if isinstance(step, t.ToHost):
        return replace(step, geometry=_geometry(step.geometry, numbers), kwargs=_named(step.kwargs, numbers))
    if isinstance(step, t.LazyItem):
        return replace(step, geometry=_geometry(step.geometry, numbers))
    return step


def _joint(joint: Joint, numbers: Numbers) -> Joint:
    double = joint.double
    return replace(
        joint,
        forward=numbers.trace(joint.forward),
        results=tuple([replace(r, geometry=_geometry(r.geometry, numbers)) for r in joint.results]),
        outputs=tuple([replace(o, geometry=_geometry(o.geometry, numbers)) for o in joint.outputs]),
        updates=tuple([replace(u, geometry=_geometry(u.geometry, numbers)) for u in joint.updates]),
        backward=None if joint.backward is None else numbers.trace(joint.backward),
        backward_scalars=_sources(joint.backward_scalars, numbers),
        double=None
        if double is None
        else replace(double, joint=_joint(double.joint, numbers), scalars=_sources(double.scalars, numbers)),
    )


def _sources(sources: Sequence[ScalarSource], numbers: Numbers) -> tuple[ScalarSource, ...]:
    return tuple([replace(s, value=_plain(s.value, numbers)) if s.kind == "constant" else s for s in sources])


def _result(result: t.Result, numbers: Numbers) -> t.Result:
    if isinstance(result, t.TensorResult):
        base = None if result.base is None else _result(result.base, numbers)
        return replace(result, geometry=_geometry(result.geometry, numbers), base=base)
    if isinstance(result, t.NumberResult):
        return t.NumberResult(_expression(result.expression, numbers))
    if isinstance(result, t.SameObject) and type(result.value) in (int, float, torch.Size):
        return t.SameObject(_plain(result.value, numbers))
    return result


def _expressions(expressions: Sequence[Any], numbers: Numbers) -> tuple[Any, ...]:
    return tuple([_expression(expression, numbers) for expression in expressions])


def _expression(expression: Any, numbers: Numbers) -> Any:
    if isinstance(expression, Applied):
        return Applied(expression.operation, _expressions(expression.operands, numbers))
    return _plain(expression, numbers)


def _named(values: Sequence[tuple[str, Any]], numbers: Numbers) -> tuple[tuple[str, Any], ...]:
    return tuple([(name, _plain(value, numbers)) for name, value in values])


def _plain(value: Any, numbers: Numbers) -> Any:
    """A constant, or a nest of constants, numbers and host tensors."""
    kind = type(value)
    if kind is int:
        return numbers.int(value)
    if kind is float:
        return numbers.float(value)
    if kind in (tuple, torch.Size):
        return kind([_plain(item, numbers) for item in value])
    if kind is t.TensorOperand:
        return t.TensorOperand(value.memory, _geometry(value.geometry, numbers))
    if kind is t.HostNumber:
        return t.HostNumber(_expression(value.expression, numbers))
    return value


def _geometry(geom: Geometry, numbers: Numbers) -> Geometry:
    shape = tuple([numbers.int(size) for size in geom.shape])
    strides = tuple([numbers.int(stride) for stride in geom.strides])
    return geometry(shape, strides, numbers.int(geom.offset), geom.dtype, geom.device, geom.compute, geom.bits)


# ---- unbacked sizes


def unbacked_sources_of(step: t.Step, taken: Mapping[int, Any]) -> tuple[int, ...]:
    """The number sources of unbacked sizes that the step gives: those of an operator that runs at once, and ints that
    Python read from a tensor and used as they were. `taken`: `numbers_taken` of the step's template."""
    if isinstance(step, t.LazyCall):
        return step.sources
    if isinstance(step, (t.LazyItem, t.HostItem)) and type(taken.get(step.source)) is int:
        return (step.source,)
    return ()


def unbacked_sources(template: t.CallTemplate) -> tuple[int, ...]:
    """Those of all steps, in order."""
    taken = numbers_taken(template)
    return tuple([source for step in template.steps for source in unbacked_sources_of(step, taken)])


def unbacked_sizes(template: t.CallTemplate) -> tuple[int, ...]:
    """What they were in the captured call."""
    taken = numbers_taken(template)
    return tuple([taken[source] for source in unbacked_sources(template)])


def unbacked_kind(template: t.CallTemplate) -> tuple[Any, ...]:
    """What of the data selects what else is done: sizes of 0 and 1 (None for each other one), branches, and plain
    values that Python took."""
    asked = [value for expression, value in template.checks if type(value) in (bool, str) and places_in(expression)]
    return (*kinds_of_sizes(unbacked_sizes(template)), *asked)


def kind_of_size(size: Any) -> Any:
    """None for each size that is neither 0 nor 1; another value is its own kind."""
    return None if type(size) is int and size > 1 else size


def kinds_of_sizes(sizes: Sequence[int]) -> list[int | None]:
    return [kind_of_size(size) for size in sizes]


def numbers_taken(template: t.CallTemplate) -> dict[int, Any]:
    """The values of number sources that the call used as they were: their plain value was read."""
    return {e.place: value for e, value in template.checks if isinstance(e, SourceRef)}


# ---- the numbers of a call's arguments


@dataclass(frozen=True, slots=True)
class CallSizes:
    """What distinguishes calls beside sizes (`kind`, which hashes), and the sizes: those of the arguments' dimensions
    and their integers first (`sizes`), then what mostly follows from them (strides, bytes)."""

    kind: tuple[Any, ...]
    sizes: tuple[int, ...]
    others: tuple[int, ...]


def sizes_of(facts: Sequence[Any]) -> CallSizes:
    """Facts of arguments as `facts_of` gives them, and their sizes as separate numbers. Sizes and strides of 0 and 1,
    and integers below 2, belong to the kind, since they are special-cased."""
    kinds: list[Any] = []
    sizes: list[int] = []
    others: list[int] = []
    for fact in facts:
        if type(fact) is not tuple or not fact:
            kinds.append(fact)
        elif type(fact[0]) is Geometry:
            geom, base, *rest = fact
            kinds.append((*_kind_of_geometry(geom, sizes, others), *_kind_of_geometry(base, others, others), *rest))
        elif len(fact) > 7 and isinstance(fact[1], torch.Size):
            kind, shape, strides, offset, dtype, device, nbytes, *rest = fact
            others += (offset, nbytes)
            kinds.append(
                (kind, tuple(_small(shape, sizes)), tuple(_small(strides, others)), dtype, device, *rest)
            )  # fmt: skip
        elif fact[0] is int and len(fact) == 2 and type(fact[1]) is int:
            kinds.append((int, *_small((fact[1],), sizes)))
        else:
            kinds.append(fact)
    return CallSizes(tuple(kinds), tuple(sizes), tuple(others))


def _kind_of_geometry(geom: Geometry, sizes: list[int], others: list[int]) -> tuple[Any, ...]:
    others.append(geom.offset)
    shape, strides = tuple(_small(geom.shape, sizes)), tuple(_small(geom.strides, others))
    return shape, strides, geom.dtype, geom.device, geom.compute


def _small(values: Sequence[int], rest: list[int]) -> Iterator[int | None]:
    """The values below 2, None for each other one, which goes to `rest`."""
    for value in values:
        if value < 2:
            yield value
        else:
            rest.append(value)
            yield None
