"""After a compiled program raised: eager's own error, and the value of everything that can still be computed.

Invariant: memory that the program may already have overwritten is never read as if it held its old value.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torchlazy.lazy.tier0 import Value, run_entries
from torchlazy.lazy.trace import CutTrace
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program import Allocate, Reinterpret


def values_after_failure(
    run: Executable,
    trace: CutTrace,
    error: Exception,
    inputs: Sequence[weakref.ref[torch.Tensor]],
    scalars: Sequence[Any],
) -> list[Value]:
    """The outputs of `trace`, of which `run` is the compiled form, computed again operator by operator.

    The program's error stands for what depends on an input that is freed or may be overwritten; an output donated to
    such memory is the error too, and the memory stays as the program left it.
    """
    program = run.program
    place = _place_in_run(error)
    local = place.tb_frame.f_locals if place is not None else {}
    overwritten = _overwritten(run, place.tb_lineno) if place is not None else set(range(len(inputs)))
    values: list[Value] = []
    for position, ((name, _), ref) in enumerate(zip(program.inputs, inputs, strict=True)):
        found = ref()
        value = found if found is not None else local.get(name)
        values.append(error if position in overwritten or not isinstance(value, torch.Tensor) else value)
    error.__traceback__ = None  # its frames would keep the program's values alive
    results = run_entries(trace, values, scalars)
    lost = {output for output, given in trace.donations if given in overwritten}
    return [error if position in lost else value for position, value in enumerate(results)]


def _place_in_run(error: Exception) -> TracebackType | None:
    """Where the generated function stood, from the traceback."""
    place = error.__traceback__
    while place is not None and not place.tb_frame.f_code.co_filename.startswith("<torchlazy program"):
        place = place.tb_next
    return place


def _overwritten(run: Executable, line: int) -> set[int]:
    """Positions of the donated inputs that a kernel up to this line of the generated function may have written.

    A kernel writes a donated input under the name of the output, or of the value that took its memory over.
    """
    launched = {
        name.removesuffix("_p")
        for text in run.source.splitlines()[:line]
        if "kernel" in text
        for name in re.findall(r"\w+", text)
    }
    program = run.program
    root_of = {program.inputs[position][0]: position for _, position in program.donations}
    written = {program.outputs[output] for output, _ in program.donations}
    found: set[int] = set()
    for step in program.steps:
        if not isinstance(step, (Allocate, Reinterpret)):
            continue
        source = step.reuse if isinstance(step, Allocate) else step.source
        if source in root_of:
            root_of[step.name] = root_of[source]
            if step.name in launched and (isinstance(step, Allocate) or step.name in written):
                found.add(root_of[source])
    return found
