"""Sizes in a trace that no expression tells, as the library's kernel says how large its workspace is.

Invariant: such a size is asked of the operator itself, at the sizes that its operands have; nobody's Python sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.size_fit import Column
from torchlazy.lazy.trace import CutTrace

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_WORKSPACE = 3  # which of the layer's results it is


def shown_results(op: Any, results: Any) -> Any:
    """The results whose sizes Python may come to see; None in place of a workspace."""
    if op is not _LAYER or type(results) is not tuple or len(results) <= _WORKSPACE:
        return results
    return (*results[:_WORKSPACE], None, *results[_WORKSPACE + 1 :])


def takes_workspace(op: Any) -> bool:
    """Whether a workspace is among the operator's operands."""
    return op is _BACKWARD


class Workspaces:
    """Those of several traces of one skeleton: which symbol of the traces is the size of which operator's. A backward
    takes what an operator of its forward left, which is a trace `before` it in the calls."""

    def __init__(self, traces: Sequence[CutTrace], before: Sequence[Workspaces]) -> None:
        self._before = before
        self._sizes: dict[Column, int] = {}  # the operator's position
        self._symbols: list[tuple[int, int]] = []
        self._handed: list[tuple[int, int, int]] = []  # symbols that are sizes of an earlier trace's
        for position, entry in enumerate(traces[-1].entries):
            if entry.op is _LAYER:
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
        """The symbols with the sizes that the operators say, where `made` gives the trace for symbols; None where they
        do not say."""
        found = list(symbols)
        for (symbol, _, _), size in zip(self._handed, handed, strict=True):
            found[symbol] = size
        trace = made(found) if self._symbols else None
        for symbol, position in self._symbols:
            assert trace is not None
            told = results(trace, trace.entries[position])
            if told is None:
                return None
            found[symbol] = told[_WORKSPACE].shape[0]
        return found


__all__ = ["Workspaces", "shown_results", "takes_workspace"]
