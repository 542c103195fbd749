"""Programs for all sizes: the names of sizes that a run computes from the program's symbols.

A planned program holds tracked sizes (prims/size_int.py). `finish` puts a `SizeName` in the place of each: data, with
the value that planning saw for reports. The symbols are the program's last scalars; what a name stands for is in
`Program.sizes`, and `Program.guards` says for which symbols the program is right.

Invariant: a finished program refers to sizes by name only, names are numbered in the order in which the program uses
them, and two plannings that decided alike give equal programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torchlazy.prims.size_expr import Structure, python_text
from torchlazy.prims.size_int import SizeFloat, SizeInt, SizeSpace
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.program import KernelSource, Program


class SizeName(int):
    """The name of a size that each run computes; as a number, the size that planning saw. Equal by name."""

    name: str

    @staticmethod
    def of(name: str, value: int) -> SizeName:
        """A name and its value at planning."""
        self = int.__new__(SizeName, value)
        self.name = name
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is SizeName and other.name == self.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


class FloatName(float):
    """A float that each run computes from sizes; its text is Python. Equal by text."""

    name: str

    @staticmethod
    def of(name: str, value: float) -> FloatName:
        """The text and its value at planning."""
        self = float.__new__(FloatName, value)
        self.name = name
        return self

    def __eq__(self, other: object) -> bool:
        return type(other) is FloatName and other.name == self.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


def finish(program: Program, space: SizeSpace) -> Program:
    """The program with names for its tracked sizes, its symbols as scalars, and the guards of its planning."""
    names: dict[SizeInt, SizeName] = {}

    def name(size: SizeInt) -> SizeName:
        if size not in names:
            names[size] = SizeName.of(f"n{len(names)}", size.hint)
        return names[size]

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is SizeInt:
            return name(value)
        if kind is SizeFloat:
            return FloatName.of(value.text(lambda size: str(name(size))), float.__add__(value, 0.0))
        if kind is tuple:
            walked = tuple([walk(item) for item in value])
            return walked if any(a is not b for a, b in zip(walked, value, strict=True)) else value
        if kind is list:
            return [walk(item) for item in value]
        if is_dataclass(value) and not isinstance(value, type) and kind is not KernelSource:
            changed = {}
            for item in fields(value):
                old = getattr(value, item.name)
                new = walk(old)
                if new is not old:
                    changed[item.name] = new
            return replace(value, **changed) if changed else value
        return value

    finished: Program = walk(program)
    exprs = space.exprs
    return replace(
        finished,
        scalars=(*finished.scalars, *((symbol.name, int) for symbol in exprs.symbols)),
        symbols=tuple(symbol.name for symbol in exprs.symbols),
        sizes=tuple((made.name, exprs.structure(size.poly)) for size, made in names.items()),
        guards=tuple((guard.kind, guard.expr) for guard in space.guards.values()),
    )


def size_lines(program: Program) -> list[str]:
    """Python assignments of the program's sizes, to stand after those of its scalars."""
    return [f"{name} = {python_text(structure)}" for name, structure in program.sizes]


_RELATIONS = {"eq": "== 0", "ne": "!= 0", "ge": ">= 0"}
_FLOAT_RELATIONS = ("<", "<=", ">", ">=", "==")


def guard_text(kind: str, expr: Structure) -> str:
    """A guard as a Python expression over the symbols."""
    if kind in _RELATIONS:
        return f"{python_text(expr)} {_RELATIONS[kind]}"
    relation, left, right = expr
    if relation not in _FLOAT_RELATIONS or kind not in ("flt", "fnot"):
        raise ProgramError(f"guard: no relation {relation!r} of the kind {kind!r}; compile the program anew")
    text = f"{_float_text(left)} {relation} {_float_text(right)}"
    return text if kind == "flt" else f"not ({text})"


def _float_text(tree: Structure) -> str:
    if isinstance(tree, (tuple, list)):
        if tree[0] == "size":
            return f"({python_text(tree[1])})"
        symbol, left, right = tree
        if symbol not in ("+", "-", "*", "/"):
            raise ProgramError(f"guard: no operation {symbol!r}; compile the program anew")
        return f"({_float_text(left)} {symbol} {_float_text(right)})"
    return f"({float(tree)!r})"


def guard_function(program: Program) -> Callable[..., bool]:
    """Whether the program is right for these values of its symbols."""
    texts = dict.fromkeys(guard_text(kind, expr) for kind, expr in program.guards)
    test = "\n        and ".join(f"({text})" for text in texts) or "True"
    names: dict[str, Any] = {}
    exec(f"def holds({', '.join(program.symbols)}):\n    return (\n        {test}\n    )\n", names)
    return names["holds"]  # type: ignore[no-any-return]
