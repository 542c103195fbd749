"""After a compiled program raised: eager's own error, and the value of everything that can still be computed.

Invariant: memory that the program may already have overwritten is never read as if it held its old value.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torchlazy.lazy.tier0 import Value, run_entries
from torchlazy.lazy.trace import CutTrace
from torchlazy.runtime.program import Allocate, Program, Reinterpret


def values_after_failure(
    program: Program,
    trace: CutTrace,
    error: Exception,
    inputs: Sequence[weakref.ref[torch.Tensor]],
    scalars: Sequence[Any],
) -> list[Value]:
    """The outputs of `trace`, of which `program` is the compiled form, run again operator by operator.

    The program's error stands for what depends on an input that is freed or may be overwritten; an output donated to such
    memory is the error too, and the memory stays as the program left it.
    """
    frame = _frame_of_run(error)
    local = frame.f_locals if frame is not None else {}
    overwritten = _taken_over(program, local) if frame is not None else set(range(len(inputs)))
    values: list[Value] = []
    for position, ((name, _), ref) in enumerate(zip(program.inputs, inputs, strict=True)):
        found = ref()
        value = found if found is not None else local.get(name)
        values.append(error if position in overwritten or not isinstance(value, torch.Tensor) else value)
    results = run_entries(trace, values, scalars)
    error.__traceback__ = None  # its frames would keep the program's values alive
    lost = {output for output, given in trace.donations if given in overwritten}
    return [error if position in lost else value for position, value in enumerate(results)]


def _frame_of_run(error: Exception) -> FrameType | None:
    """The frame of the generated function, from the traceback."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.startswith("<torchlazy program"):
            return step.tb_frame
        step = step.tb_next
    return None


def _taken_over(program: Program, local: dict[str, Any]) -> set[int]:
    """Positions of the inputs whose memory a value that exists already was given."""
    root_of = {program.inputs[position][0]: position for _, position in program.donations}
    taken: set[int] = set()
    for step in program.steps:
        source = step.reuse if isinstance(step, Allocate) else step.source if isinstance(step, Reinterpret) else None
        if source not in root_of:
            continue
        root_of[step.name] = root_of[source]
        if isinstance(step, Allocate) and (step.name in local or f"{step.name}_p" in local):
            taken.add(root_of[source])
    return taken
