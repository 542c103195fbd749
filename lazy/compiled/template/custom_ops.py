"""Custom operators (`torch.library`, C++ extensions): what a template may hold of them.

Torch knows no functional form of those that write, and some have no meta kernel. A call runs them at once, on memory;
so does each replay, in the order of the call, whether or not their results are used.

Invariant: an operator that returns an argument returns the caller's own tensor; only new results are made by a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.template.template import FromStep, LazyCall, Memory, TensorOperand

# Namespaces of torch itself. Others are the program's, or those of a library that it uses.
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
    """Whether the operator is a custom one whose schema describes all that it does to tensors in a form known here."""
    return op.namespace not in _TORCHS and has_known_schema(op)


def has_known_schema(op: torch._ops.OpOverload) -> bool:
    """Whether the schema has no writes but to tensors and lists of them, and no result that is a read-only view."""
    schema = op._schema
    for argument in schema.arguments:
        if argument.alias_info is not None and not (argument.alias_info.is_write and str(argument.type) in _WRITABLE):
            return False
    return all(r.alias_info is None or r.alias_info.is_write for r in schema.returns)


def new_results(op: torch._ops.OpOverload, result: Any) -> list[Any]:
    """What the operator returned, in flat order, without arguments that it returned."""
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
    """The existing memory that the step writes to."""
    if not step.op._schema.is_mutable:
        return []
    windows = written_by(step.op, step.args, dict(step.kwargs))
    return [window.memory for window in windows if isinstance(window, TensorOperand)]


class Draws:
    """Which custom operators with a meta kernel draw random numbers. That is not known before one has run; those that
    draw run at once in captured calls, in eager's order."""

    def __init__(self) -> None:
        self._draw: dict[torch._ops.OpOverload, bool | None] = {}  # None: it ran where a generator moved

    def suspect(self, ops: Iterable[torch._ops.OpOverload]) -> bool:
        """A generator moved where these ran, and no known operator drew; whether one of them may have."""
        unknown = [op for op in ops if self._draw.setdefault(op, None) is None]
        return bool(unknown)

    def saw(self, op: torch._ops.OpOverload, draws: bool) -> bool:
        """The operator ran separately; whether it turned out to draw nothing, and may run in programs again."""
        was = self._draw.get(op, False)
        if op in self._draw:
            self._draw[op] = bool(was or draws)
        return was is None and not draws

    def run_at_once(self, op: torch._ops.OpOverload) -> bool:
        """Whether a captured call runs it at once."""
        if op in self._draw:
            return self._draw[op] is not False
        return is_own(op) and torch.Tag.nondeterministic_seeded in op.tags


DRAWS = Draws()


def changes_state(step: LazyCall) -> bool:
    """Whether the step changes more than memory that earlier steps made, as far as the schema says."""
    return any(type(memory) is not FromStep for memory in memory_written(step)) or not step.op._schema.returns


__all__ = ["DRAWS", "changes_state", "has_known_schema", "is_own", "memory_written", "new_results", "written_by"]
