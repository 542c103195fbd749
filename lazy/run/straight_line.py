"""Tier 0 for a trace that comes again: its operators as straight-line Python, at the cost of eager's own calls.

A trace's first run is interpreted (run/interpreter.py) and shows which outputs can go to donated memory early. What
holds of that run holds of each: an operator's aliases follow from geometries, which a trace fixes.

Invariant: results, memory and errors are the interpreter's. Where an operator raises, the interpreter goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchlazy.lazy.run.interpreter import (
    LAYS_OUT,
    Frame,
    Move,
    Value,
    last_uses,
    run_entries,
    run_rest,
    value_of,
)
from torchlazy.lazy.trace.to_fx import needed_entries
from torchlazy.lazy.trace.trace import CutTrace, Entry, ScalarSlot, Slot, operands
from torchlazy.runtime.program.steps import CALLED_AS

FIRST = 3  # the run for which the text is compiled: most traces have their program soon
_FILE = "<torchlazy: operators of a trace>"


class ByOperators:
    """Runs the traces of one structure operator by operator."""

    def __init__(self) -> None:
        self._runs = 0
        self._moves: list[Move] = []
        self._line: _StraightLine | None = None

    def run(self, trace: CutTrace, inputs: Sequence[Value], scalars: Sequence[Any]) -> list[Value]:
        """Like `run_entries`."""
        memories = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
        if len(memories) < len(inputs):  # one is lost, or what is early for one value is too early for another
            return run_entries(trace, inputs, scalars)
        if self._line is not None:
            return self._line.run(trace, inputs, scalars)
        self._runs += 1
        if self._runs >= FIRST:
            self._line = _StraightLine(trace, self._moves)
            return self._line.run(trace, inputs, scalars)
        moves: list[Move] = []
        values = run_entries(trace, inputs, scalars, moves)
        self._moves = moves
        if not all(isinstance(value, torch.Tensor) for value in values):
            self._runs = 0  # not all moves were made
        return values


class _StraightLine:
    def __init__(self, trace: CutTrace, moves: Sequence[Move]) -> None:
        self._last_use = last_uses(trace)
        text = _Text(trace, self._last_use, moves)
        self._positions = text.positions
        exec(compile(text.source(), _FILE, "exec"), text.names)
        self._code: Callable[..., None] = text.names["run"]

    def run(self, trace: CutTrace, inputs: Sequence[Value], scalars: Sequence[Any]) -> list[Value]:
        frame = Frame(trace, inputs, self._last_use)
        failure = None
        try:
            self._code(frame.values, scalars, frame.move)
        except Exception as error:
            position = self._where(error)
            if position is None:
                raise
            error.__traceback__ = None  # its frames hold values
            failure = run_rest(frame, scalars, position)
        return frame.results(failure)

    def _where(self, error: Exception) -> int | None:
        """The position of the operator that raised; None where it was not one of them."""
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != _FILE:
            at = at.tb_next
        return None if at is None else self._positions[at.tb_lineno]


class _Text:
    """The function's lines, and the names that they use. `positions`: by line, the entry that it calls."""

    def __init__(self, trace: CutTrace, last_use: Mapping[int, int], moves: Sequence[Move]) -> None:
        self.names: dict[str, Any] = {}
        self.positions: list[int | None] = [None]
        self._lines: list[str] = []
        self._constants: dict[int, str] = {}  # by identity, which `names` keeps
        self._geometries, self._last_use = trace.geometries, last_use
        self._line("def run(values, scalars, move):")
        self._line("pass")
        behind: dict[int, list[int]] = {}
        for position, output in moves:
            behind.setdefault(position, []).append(output)
        self._moved(behind.get(-1, ()))
        needed = needed_entries(trace)
        for position, entry in enumerate(trace.entries):
            if position in needed:
                self._call(position, entry)
                self._moved(behind.get(position, ()))
                gone = {found.number for found in operands(entry) if last_use[found.number] == position}
                if gone:
                    self._line("".join(f"values[{number}] = " for number in sorted(gone)) + "None")

    def source(self) -> str:
        return "\n ".join(self._lines) + "\n"

    def _line(self, text: str, position: int | None = None) -> None:
        self._lines.append(text)
        self.positions.append(position)

    def _moved(self, outputs: Sequence[int]) -> None:
        for output in outputs:
            self._line(f"move({output})")

    def _call(self, position: int, entry: Entry) -> None:
        args = [self._argument(argument) for argument in entry.args]
        lays_out = LAYS_OUT.get(entry.op)
        if lays_out is not None:
            args[0] = f"{self._name(lays_out)}({args[0]}, {self._name(self._geometries[entry.args[0].number])})"
        args += [f"{name}={self._argument(value)}" for name, value in entry.kwargs]
        called = f"{self._name(CALLED_AS.get(entry.op) or getattr(entry.op, '_op', entry.op))}({', '.join(args)})"
        if type(entry.outputs) is Slot:
            self._line(f"values[{entry.outputs.number}] = {called}", position)
            return
        stores = self._stores(entry.outputs, "made")
        self._line("; ".join([f"made = {called}", *stores, "made = None"]), position)

    def _stores(self, outputs: Any, source: str) -> list[str]:
        if type(outputs) is Slot:
            return [f"values[{outputs.number}] = {source}"] if outputs.number in self._last_use else []
        if type(outputs) is not tuple:
            return []
        return [text for at, item in enumerate(outputs) for text in self._stores(item, f"{source}[{at}]")]

    def _argument(self, value: Any) -> str:
        kind = type(value)
        if kind is Slot:
            return f"values[{value.number}]"
        if kind is ScalarSlot:
            return f"scalars[{value.number}]"
        if kind is tuple:
            return f"[{', '.join(map(self._argument, value))}]"
        return repr(value) if kind in (int, bool, type(None)) else self._name(value_of(value, (), ()))

    def _name(self, value: Any) -> str:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"c{len(self._constants)}"
            self.names[name] = value
        return name


__all__ = ["ByOperators"]
