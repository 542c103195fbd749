"""Removes views that need not be made: memory is allocated as the first view of it that is read; equal ones are one.

To make a view costs the host as much as to make a tensor. A kernel does not care which shape the tensor has whose
memory it writes, so where only library calls read it, and through views, it gets the shape of such a view at once. A
value that takes over memory in the same shape keeps its name.

Invariant: the program does the same with the same bytes; outputs, and whatever shares memory with an input, keep their
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)
from torchlazy.runtime.program.steps import names_read, span_bytes


def without_spare_windows(program: Program, read_as_tensors: Set[str]) -> Program:
    """The program with fewer windows; `read_as_tensors` are the names that library calls or the caller get."""
    wanted = _first_windows(program.steps, read_as_tensors)
    steps = [
        replace(step, meta=wanted[step.name]) if isinstance(step, Allocate) and step.name in wanted else step
        for step in program.steps
    ]
    same = _equal_windows(steps, set(program.outputs))
    if not wanted and not same:
        return program
    return replace(program, steps=_renamed(steps, same))


def _first_windows(steps: Sequence[Step], read: Set[str]) -> dict[str, TensorMeta]:
    """For memory that nobody reads as the tensor that it is allocated as: the first window on all of it that is."""
    made: dict[str, TensorMeta] = {}
    found: dict[str, TensorMeta] = {}
    for step in steps:
        if isinstance(step, Allocate) and step.name not in read:
            made[step.name] = step.meta
        elif isinstance(step, Reinterpret) and step.name in read and step.source in made:
            whole, meta = made.pop(step.source), step.meta
            is_same_memory = (meta.dtype, meta.device) == (whole.dtype, whole.device) and _is_start(step.offset)
            if is_same_memory and _is_fixed(whole) and _is_fixed(meta) and span_bytes(meta) == span_bytes(whole):
                found[step.source] = meta
    return found


def _equal_windows(steps: Sequence[Step], outputs: Set[str]) -> dict[str, str]:
    """Windows that show what their source shows, and what takes over memory as it is: the name that is there before."""
    metas: dict[str, TensorMeta | None] = {}
    same: dict[str, str] = {}
    for step in steps:
        if isinstance(step, ExternCall):
            metas.update((name, meta) for name, meta in zip(step.outputs, step.metas, strict=True) if name)
            continue
        if not isinstance(step, Allocate | Reinterpret):
            continue
        source = step.source if isinstance(step, Reinterpret) else step.reuse
        if source is not None and source not in metas:
            continue  # memory of an input
        metas[step.name] = step.meta
        is_start = isinstance(step, Allocate) or _is_start(step.offset)
        if source is not None and is_start and metas[source] == step.meta and outputs.isdisjoint((step.name, source)):
            same[step.name] = same.get(source, source)
    return same


def _renamed(steps: Sequence[Step], same: Mapping[str, str]) -> tuple[Step, ...]:
    """The steps without those that make what is in `same`; a name is freed with the last that it stands for."""
    alive: dict[str, set[str]] = {name: {name} for name in same.values()}
    for name, source in same.items():
        alive[source].add(name)
    written: list[Step] = []
    for step in steps:
        if isinstance(step, Free):
            freed = []
            for name in step.names:
                names = alive.get(same.get(name, name), {name})
                names.discard(name)
                if not names:
                    freed.append(same.get(name, name))
            written.append(Free(tuple(freed)))
            continue
        if isinstance(step, Allocate) and step.reuse is not None:
            alive.get(same.get(step.reuse, step.reuse), set()).discard(step.reuse)  # it is given away, not freed
        if not (isinstance(step, Allocate | Reinterpret) and step.name in same):
            written.append(_with_names(step, same) if not same.keys().isdisjoint(names_read(step)) else step)
    return tuple(written)


def _with_names(step: Step, names: Mapping[str, str]) -> Step:
    if isinstance(step, Reinterpret):
        return replace(step, source=names[step.source])
    if isinstance(step, Allocate):
        return replace(step, reuse=names[step.reuse or ""])
    if isinstance(step, Launch):
        return replace(step, buffers=tuple(names.get(name, name) for name in step.buffers))
    if isinstance(step, ForeachLaunch):
        rows = ((tuple(names.get(name, name) for name in buffers), *rest) for buffers, *rest in step.rows)
        return replace(step, rows=tuple(rows))  # type: ignore[arg-type]
    assert isinstance(step, ExternCall)
    return replace(step, args=_in_value(step.args, names), kwargs=_in_value(step.kwargs, names))


def _in_value(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, ValueRef):
        return value if value.scalar else ValueRef(names.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(_in_value(item, names) for item in value)
    if isinstance(value, list):
        return [_in_value(item, names) for item in value]
    return value


def _is_start(offset: int) -> bool:
    return type(offset) is int and offset == 0


def _is_fixed(meta: TensorMeta) -> bool:
    """No size is one that each run computes: such a size is a kind of int of its own."""
    return all(type(size) is int for size in (*meta.shape, *meta.strides))
