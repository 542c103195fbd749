"""The steps of a program as a table: each kind of step once, and for each step its kind and its names, as numbers.

Programs of many equal layers have few kinds of steps. What is written for a step is then a few numbers, and reading it
back is putting names into a step that is there already.

Invariant: `steps_of(kinds, numbers, names)` are the steps that `table_of` was given, to the type of each constant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Reinterpret,
    Step,
    ValueRef,
)

Names: TypeAlias = Sequence[str]


def names_apart(step: Step) -> tuple[Hashable, list[str]]:
    """A step without its names, and these in order; equal keys stand for steps that are equal but for their names.
    No two foreach launches have one key."""
    if isinstance(step, Allocate):
        return (Allocate, step.meta, step.reuse is None), [
            step.name,
            *((step.reuse,) if step.reuse is not None else ()),
        ]
    if isinstance(step, Reinterpret):
        return (Reinterpret, step.meta, step.offset), [step.name, step.source]
    if isinstance(step, Launch):
        key = (Launch, step.kernel, len(step.buffers), len(step.scalars), step.sizes)
        return key, [*step.buffers, *step.scalars]
    if isinstance(step, Free):
        return (Free, len(step.names)), list(step.names)
    if isinstance(step, ExternCall):
        names: list[str] = []
        shape = _shape((step.args, step.kwargs), names)
        names += [name for name in step.outputs if name is not None]
        return (step.op, shape, tuple(name is None for name in step.outputs), step.metas), names
    return id(step), [name for buffers, _, scalars in step.rows for name in (*buffers, *scalars)] + list(step.scalars)


def _shape(value: Any, names: list[str]) -> Hashable:
    kind = type(value)
    if kind is ValueRef:
        names.append(value.name)
        return ValueRef, value.scalar
    if kind is tuple or kind is list:
        return kind, tuple([_shape(item, names) for item in value])
    if isinstance(value, float | complex):
        return kind, repr(value)  # 0.0 and -0.0 are equal, and not the same
    return kind, value if isinstance(value, Hashable) else id(value)


def table_of(steps: Sequence[Step]) -> tuple[list[Step], list[int], list[str]]:
    """A step of each kind, without names; for each step its kind, then its names, as numbers; and all names."""
    kinds: dict[Hashable, int] = {}
    first: list[Step] = []
    names: dict[str, int] = {}
    numbers: list[int] = []
    for step in steps:
        key, own = names_apart(step)
        kind = kinds.setdefault(key, len(first))
        if kind == len(first):
            first.append(_maker(step)[1]([""] * len(own)))
        numbers.append(kind)
        numbers += [names.setdefault(name, len(names)) for name in own]
    return first, numbers, list(names)


def steps_of(kinds: Sequence[Step], numbers: Sequence[int], names: Names) -> tuple[Step, ...]:
    """The steps of a table; ValueError or IndexError where it is none."""
    makers = [_maker(step) for step in kinds]
    steps: list[Step] = []
    place = 0
    while place < len(numbers):
        count, make = makers[numbers[place]]
        own = [names[number] for number in numbers[place + 1 : place + 1 + count]]
        if len(own) != count:
            raise ValueError("the table of steps ends within a step")
        steps.append(make(own))
        place += 1 + count
    return tuple(steps)


def _maker(like: Step) -> tuple[int, Callable[[list[str]], Step]]:
    """How many names a step like this one has, and what makes such a step of others."""
    count = len(names_apart(like)[1])
    if isinstance(like, Allocate):
        meta = like.meta
        if like.reuse is None:
            return count, lambda own: Allocate(own[0], meta)
        return count, lambda own: Allocate(own[0], meta, own[1])
    if isinstance(like, Reinterpret):
        meta, offset = like.meta, like.offset
        return count, lambda own: Reinterpret(own[0], own[1], meta, offset)
    if isinstance(like, Launch):
        kernel, buffers, sizes = like.kernel, len(like.buffers), like.sizes
        return count, lambda own: Launch(kernel, tuple(own[:buffers]), tuple(own[buffers:]), sizes)
    if isinstance(like, Free):
        return count, lambda own: Free(tuple(own))
    if isinstance(like, ExternCall):
        return count, lambda own: _call(like, own)
    return count, lambda own: _foreach(like, own)


def _foreach(like: ForeachLaunch, names: list[str]) -> ForeachLaunch:
    rows = []
    place = 0
    for buffers, sizes, scalars in like.rows:
        middle, end = place + len(buffers), place + len(buffers) + len(scalars)
        rows.append((tuple(names[place:middle]), sizes, tuple(names[middle:end])))
        place = end
    return ForeachLaunch(like.kernel, tuple(rows), tuple(names[place:]))


def _call(like: ExternCall, names: list[str]) -> ExternCall:
    left = iter(names)
    args, kwargs = _filled(like.args, left), _filled(like.kwargs, left)
    outputs = tuple([None if name is None else next(left) for name in like.outputs])
    return ExternCall(like.op, args, kwargs, outputs, like.metas)


def _filled(value: Any, names: Any) -> Any:
    kind = type(value)
    if kind is ValueRef:
        return ValueRef(next(names), value.scalar)
    if kind is tuple:
        return tuple([_filled(item, names) for item in value])
    if kind is list:
        return [_filled(item, names) for item in value]
    return value
