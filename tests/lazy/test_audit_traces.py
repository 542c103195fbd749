"""What an audit takes for the same trace: the form of memory that is only looked at through windows does not count."""

from __future__ import annotations

from dataclasses import replace

import torch
from torchlazy.lazy.compiled.template.difference import _traces
from torchlazy.lazy.trace.geometry import flat, geometry
from torchlazy.lazy.trace.trace import CutTrace, Entry, slot

CPU, F32 = torch.device("cpu"), torch.float32
ROW = flat(144, F32, CPU, "cpu")
TABLE = geometry((6, 24), (24, 1), 0, F32, CPU, "cpu")
WINDOW = geometry((2, 3), (72, 24), 8, F32, CPU, "cpu")


def trace(memory, *more: Entry, donated: bool = False) -> CutTrace:
    first, window, result = slot(0), slot(1), slot(2)
    made = geometry((2, 3), (3, 1), 0, F32, CPU, "cpu")
    entries = (
        Entry(torch.ops.aten.as_strided.default, (first, (2, 3), (72, 24), 8), (), window),
        Entry(torch.ops.aten.exp.default, (window,), (), result),
        *more,
    )
    geometries = (memory, WINDOW, made, *(made for _ in more))
    return CutTrace(entries, geometries, ((first, memory),), (), ((result, made),), ((0, 0),) if donated else ())


def test_memory_seen_through_windows_has_no_form():
    assert _traces(trace(ROW), trace(TABLE)) == _traces(trace(TABLE), trace(ROW)) == ""


def test_memory_that_an_operator_reads_as_it_is_has_one():
    reads = Entry(torch.ops.aten.sum.default, (slot(0),), (), slot(3))
    assert "value 0 was" in _traces(trace(ROW, reads), trace(TABLE, reads))
    assert "value 0 was" in _traces(trace(ROW, donated=True), trace(TABLE, donated=True))


def test_other_memory_is_other_memory():
    for other in (flat(145, F32, CPU, "cpu"), flat(144, torch.int32, CPU, "cpu"), flat(144, F32, CPU, "cuda:0")):
        assert "value 0 was" in _traces(trace(ROW), trace(other))
    old = trace(ROW)
    moved = Entry(old.entries[0].op, (slot(0), (2, 3), (72, 24), 9), (), slot(1))
    assert "operator 0 was" in _traces(old, replace(trace(TABLE), entries=(moved, *old.entries[1:])))
