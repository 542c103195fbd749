"""Operators that the program defines (`torch.library`, C++ extensions): what a captured call may write down of them.

Torch knows no functional form of those that write, and some have no kernel that tells the shape of what they give. A
call runs them at once, on memory; so does each replay, in the order of the call, whether or not anybody looks at what
they give.

Invariant: an operator that gives an argument back gives the caller's own tensor; only new results are a step's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.template.template import FromStep, LazyCall, Memory, Window

# Of torch itself. What is not here came from the program, or from a library that it uses.
_TORCHS = frozenset(
    {
        "aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp",
        "symm_mem", "quantized", "quantized_decomposed", "_quantized", "sparse", "mkldnn", "mkldnn_prepacked", "mkl",
        "onednn", "prepacked", "profiler", "inductor", "higher_order", "static_runtime", "debugprims", "rngprims",
        "cuda", "torchlazy", "_test", "export", "onnx", "xnnpack", "vulkan", "metal", "_caffe2", "streams",
    }
)  # fmt: skip
_WRITABLE = ("Tensor", "List[Tensor]")


@functools.cache
def is_own(op: torch._ops.OpOverload) -> bool:
    """Whether the operator is the program's, and all that it does to tensors is in its schema in a form known here."""
    return op.namespace not in _TORCHS and tells_what_it_does(op)


def tells_what_it_does(op: torch._ops.OpOverload) -> bool:
    """Whether all writes are to tensors and lists of them, and no result is a view that is only read."""
    schema = op._schema
    for argument in schema.arguments:
        if argument.alias_info is not None and not (argument.alias_info.is_write and str(argument.type) in _WRITABLE):
            return False
    return all(r.alias_info is None or r.alias_info.is_write for r in schema.returns)


def new_results(op: torch._ops.OpOverload, result: Any) -> list[Any]:
    """What the operator gave, in flat order, but for arguments that it gave back."""
    returns = op._schema.returns
    if not returns:
        return []
    if len(returns) == 1:
        result = (result,)
    flat: list[Any] = []
    for value, told in zip(result, returns, strict=True):
        if told.alias_info is None:
            flat += value if isinstance(value, (list, tuple)) else (value,)
    return flat


def written_by(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operator writes to, lists of them flat."""
    found: list[Any] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += value if isinstance(value, (list, tuple)) else (value,)
    return found


def memory_written(step: LazyCall) -> list[Memory]:
    """The memory that was there before the step, and that the step writes to."""
    if not step.op._schema.is_mutable:
        return []
    windows = written_by(step.op, step.args, dict(step.kwargs))
    return [window.memory for window in windows if isinstance(window, Window)]


class Draws:
    """What is known of operators that the program defines, with a kernel that tells the shape: which draw random
    numbers. Nothing tells so before one has run; those that draw run at once in captured calls, in eager's order."""

    def __init__(self) -> None:
        self._draw: dict[torch._ops.OpOverload, bool | None] = {}  # None: it ran where somebody drew

    def suspect(self, ops: Iterable[torch._ops.OpOverload]) -> bool:
        """A generator moved where these ran, and nobody known drew; whether one of them may have."""
        unknown = [op for op in ops if self._draw.setdefault(op, None) is None]
        return bool(unknown)

    def saw(self, op: torch._ops.OpOverload, draws: bool) -> bool:
        """The operator ran alone; whether it turned out to draw nothing, and is to run in programs again."""
        was = self._draw.get(op, False)
        if op in self._draw:
            self._draw[op] = bool(was or draws)
        return was is None and not draws

    def run_at_once(self, op: torch._ops.OpOverload) -> bool:
        """Whether a captured call is to run it by itself."""
        return self._draw.get(op, torch.Tag.nondeterministic_seeded in op.tags and is_own(op)) is not False


DRAWS = Draws()


def changes_state(step: LazyCall) -> bool:
    """Whether more than memory that earlier steps made is changed, as far as the schema tells."""
    return any(type(memory) is not FromStep for memory in memory_written(step)) or not step.op._schema.returns


__all__ = ["DRAWS", "changes_state", "is_own", "memory_written", "new_results", "tells_what_it_does", "written_by"]
