"""Separates the numbers of a trace from its structure.

`decompose_trace` splits a trace into a skeleton (operators, wiring, dtypes, devices, outputs, donations) and its
numbers: sizes, strides, offsets, and the integer, float and complex arguments that the operators' schemas call sizes or
numbers. `assemble_trace` is its inverse, for other numbers: tracked sizes among the integers, runtime scalars among the
floats. Complex numbers are listed among the floats.

Invariant: traces of equal skeletons have their numbers at the same positions, and differ in these numbers only.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.geometry import geometry as interned
from torchlazy.lazy.trace.trace import Complex, CutTrace, Entry, Float, Slot
from torchlazy.prims.meta import TensorMeta


class _Mark:
    """Stands in a skeleton where a number was."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


INT, FLOAT, COMPLEX = _Mark("<int>"), _Mark("<float>"), _Mark("<complex>")


@dataclass(frozen=True, slots=True, eq=False)
class DecomposedTrace:
    """A decomposed trace. Integers are in this order: geometries of all slots, of inputs, of outputs, entries."""

    skeleton: tuple[Any, ...]
    ints: tuple[int, ...]
    floats: tuple[complex, ...]  # floats and complex numbers


def bits(number: complex) -> str:
    """A float or complex number exactly, as text: the signs of zeros differ."""
    return number.hex() if type(number) is float else f"{number.real.hex()} {number.imag.hex()}"


_GEOMETRIES: weakref.WeakKeyDictionary[Geometry, tuple[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _geometry_parts(geom: Geometry) -> tuple[Any, tuple[int, ...]]:
    found = _GEOMETRIES.get(geom)
    if found is None:
        facts = (len(geom.shape), geom.dtype, geom.device, geom.compute)
        found = _GEOMETRIES[geom] = (facts, (*geom.shape, *geom.strides, geom.offset))
    return found


# A number passed as a tensor argument (x * 3) is one.
_NUMBER_KINDS = ("SymIntType", "NumberType", "FloatType", "SymFloatType", "TensorType")


def _innermost_kind(kind: Any) -> str:
    """The name of a schema type without its Optional and List."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return str(kind.kind())


@functools.cache
def number_arguments(op: torch._ops.OpOverload) -> tuple[frozenset[int], frozenset[str]]:
    """Positions, and names, of the arguments whose numbers are sizes or values; other ints (dimensions, modes, kernel
    sizes) choose what an operator does and are structure."""
    positions, names = set(), set()
    for position, argument in enumerate(op._schema.arguments):
        if _innermost_kind(argument.real_type) in _NUMBER_KINDS:
            positions.add(position)
            names.add(argument.name)
    return frozenset(positions), frozenset(names)


def decompose_trace(trace: CutTrace) -> DecomposedTrace:
    """The trace's skeleton and numbers."""
    ints: list[int] = []
    floats: list[complex] = []
    facts: list[Any] = []
    for geom in trace.geometries:
        fact, numbers = _geometry_parts(geom)
        facts.append(fact)
        ints += numbers
    ends = []
    for number, geom in (*trace.inputs, *trace.outputs):
        fact, numbers = _geometry_parts(geom)
        ends.append((number, fact))
        ints += numbers

    def argument(value: Any) -> Any:
        kind = type(value)
        if kind is int:
            ints.append(value)
            return INT
        if kind is Float:
            floats.append(value.value)
            return FLOAT
        if kind is Complex:
            floats.append(complex(value))
            return COMPLEX
        if kind is tuple:
            return tuple([argument(item) for item in value])
        return value

    entries: list[Any] = []
    for op, args, kwargs, outputs in trace.entries:
        positions, names = number_arguments(op)
        entries.append((
            op,
            tuple([argument(a) if i in positions and type(a) is not Slot else a for i, a in enumerate(args)]),
            tuple([(name, argument(value) if name in names else value) for name, value in kwargs]) if kwargs else (),
            outputs,
        ))  # fmt: skip
    skeleton = (
        tuple(entries), tuple(facts), tuple(ends), len(trace.inputs), trace.scalar_kinds, trace.donations,
        torch.get_default_dtype(),
    )  # fmt: skip
    return DecomposedTrace(skeleton, tuple(ints), tuple(floats))


def skeleton_digest(parts: DecomposedTrace) -> str:
    """A name for the skeleton, the same in every process."""
    return hashlib.sha256(repr(parts.skeleton).encode()).hexdigest()


def assemble_trace(trace: CutTrace, ints: Sequence[int], floats: Sequence[Any], *, plain: bool = False) -> CutTrace:
    """The trace with other numbers: `floats` holds numbers or ScalarSlots; `plain`: all ints are plain ones, so that
    geometries are those of a recorded trace."""
    source, values = iter(ints), iter(floats)
    made: dict[tuple[Any, ...], Geometry] = {}

    def geometry(old: Geometry) -> Geometry:
        rank = len(old.shape)
        shape = tuple([next(source) for _ in range(rank)])
        strides = tuple([next(source) for _ in range(rank)])
        offset = next(source)
        if plain:
            return interned(shape, strides, offset, old.dtype, old.device, old.compute)
        key = (*map(id, (*shape, *strides, offset)), old.dtype, old.device, old.compute)
        if key not in made:
            made[key] = _raw_geometry(old, shape, strides, offset)
        return made[key]

    def argument(value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return next(source)
        if kind is Float:
            number = next(values)
            return Float(number) if type(number) is float else number
        if kind is Complex:
            number = next(values)
            return Complex(number) if type(number) is complex else number
        if kind is tuple:
            return tuple([argument(item) for item in value])
        return value

    geometries = tuple([geometry(geom) for geom in trace.geometries])
    inputs = tuple([(number, geometry(geom)) for number, geom in trace.inputs])
    outputs = tuple([(number, geometry(geom)) for number, geom in trace.outputs])
    entries = []
    for op, args, kwargs, results in trace.entries:
        positions, names = number_arguments(op)
        new_args = tuple([argument(a) if i in positions and type(a) is not Slot else a for i, a in enumerate(args)])
        new_kwargs = tuple([(name, argument(value) if name in names else value) for name, value in kwargs])
        entries.append(Entry(op, new_args, new_kwargs, results))
    return replace(trace, entries=tuple(entries), geometries=geometries, inputs=inputs, outputs=outputs)


def _raw_geometry(old: Geometry, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Geometry:
    """A geometry of tracked sizes: not interned, and its numbers are not compared with anything."""
    geom = Geometry()
    geom.shape, geom.strides, geom.offset = shape, strides, offset
    geom.dtype, geom.device, geom.compute = old.dtype, old.device, old.compute
    geom.numel = prod(shape)
    geom.meta = TensorMeta(shape, old.dtype, strides, old.compute)
    geom.is_plain, geom._span, geom.making = False, None, None
    return geom


def entry_numbers(entry: Entry) -> Iterator[Any]:
    """The ints and Floats of one entry's arguments in the order of `decompose_trace`, with the argument's name."""
    positions, names = number_arguments(entry.op)
    arguments = entry.op._schema.arguments

    def walk(value: Any, name: str) -> Iterator[Any]:
        if type(value) is int or type(value) is Float:
            yield name, value
        elif type(value) is tuple:
            for item in value:
                yield from walk(item, name)

    for i, value in enumerate(entry.args):
        if i in positions and type(value) is not Slot:
            yield from walk(value, arguments[i].name)
    for name, value in entry.kwargs:
        if name in names:
            yield from walk(value, name)
