"""Human-readable text: graphs as Python source, metadata, durations, and the lines that TORCHLAZY_DEBUG prints.

Invariant: pure functions from data to text. A printed graph is Python that parses, names every value as the graph does,
and shows its metadata and the user's source line behind it.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torchlazy.prims.meta import ScalarMeta, TensorMeta, contiguous_strides
from torchlazy.prims.ops import Prim

INDENT = "    "
COMMENT_COLUMN = 84  # metadata stands behind the code, in one column where the code is not longer


def duration_text(seconds: float) -> str:
    """1.25e-3 -> "1.25 ms": three digits in the unit that suits."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def byte_text(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    size, units = float(count), ("bytes", "KiB", "MiB", "GiB")
    for unit in units[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} {units[-1]}"


def constructed_by(stage: str, seconds: float | None) -> str:
    """The first line of every file that a stage made."""
    took = "" if seconds is None else f" (took {duration_text(seconds)})"
    return f"constructed by {stage}{took}"


def meta_text(meta: Any) -> str:
    """What is known about a value; strides only where not contiguous, the device only where it is not the CPU."""
    if isinstance(meta, TensorMeta):
        notes = []
        if meta.strides != contiguous_strides(meta.shape):
            notes.append(f"strides ({', '.join(map(str, meta.strides))})")
        if meta.device != "cpu":
            notes.append(meta.device)
        return " ".join([str(meta), *notes])
    if isinstance(meta, ScalarMeta):
        return f"{meta} scalar"
    if isinstance(meta, (tuple, list)):
        return f"({', '.join(meta_text(part) for part in meta)})"
    return str(meta)


def literal_text(value: Any) -> str:
    """An argument of a call as Python source: nodes by name, torch's own constants by their public names."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, slice):
        return f"slice({literal_text(value.start)}, {literal_text(value.stop)}, {literal_text(value.step)})"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(literal_text, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal_text(k)}: {literal_text(v)}" for k, v in value.items()) + "}"
    return repr(value)


def target_text(target: Any) -> str:
    """How a node's target is called in printed source."""
    if isinstance(target, Prim):
        if target.is_anonymous:
            return f"prims.extern({target_text(target.overload)})"
        return f"prims.{target.name}"
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, rest = str(target).partition(".")
        return f"{namespace}.{rest}"
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", "")
    name = getattr(target, "__name__", repr(target))
    return f"operator.{name}" if module in ("_operator", "operator") else name


def call_text(node: fx.Node) -> str:
    """The right-hand side of a node's line."""
    if target_text(node.target) == "operator.getitem":
        return f"{literal_text(node.args[0])}[{literal_text(node.args[1])}]"
    arguments = [literal_text(argument) for argument in node.args]
    arguments += [
        f"{name}={literal_text(value)}"
        if name.isidentifier() and not keyword.iskeyword(name)
        else f"**{{{name!r}: ...}}"
        for name, value in node.kwargs.items()
    ]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def graph_text(graph: fx.Graph, stage: str, seconds: float | None = None, name: str = "program") -> str:
    """A graph as the source of one Python function, with each value's metadata and the user's lines as comments."""
    namespaces: dict[str, None] = {}
    parameters: list[str] = []
    body: list[str] = []
    for node in graph.nodes:
        comment = f"{meta_text(node.meta.get('val', '?'))}  {node.meta.get('frame') or ''}".rstrip()
        if node.op == "placeholder":
            parameters.append(_with_comment(f"{INDENT}{node.name},", comment))
        elif node.op == "output":
            body.append(f"{INDENT}return {literal_text(node.args[0])}")
        else:
            target = node.target
            overload = (target.overload if target.is_anonymous else None) if isinstance(target, Prim) else target
            if isinstance(overload, torch._ops.OpOverload):
                namespaces[overload.namespace] = None
            source = node.target if node.op == "get_attr" else call_text(node)
            body.append(_with_comment(f"{INDENT}{node.name} = {source}", comment))
    imports = ["import operator", "", "import torch"]
    if any(isinstance(node.target, Prim) for node in graph.nodes):
        imports.append("from torchlazy.prims import ops as prims")
    spaces = [f"{space} = torch.ops.{space}" for space in namespaces]
    head = [f"# {constructed_by(stage, seconds)}", *imports, "", *spaces, "", "", f"def {name}("]
    return "\n".join([*head, *parameters, "):", *body, ""])


def _with_comment(code: str, comment: str) -> str:
    return f"{code:<{COMMENT_COLUMN}}  # {comment}"


def table_text(rows: Sequence[Sequence[object]], right: Iterable[int] = ()) -> str:
    """Rows in columns as wide as their widest cell; the columns in `right` are aligned to the right."""
    if not rows:
        return ""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    align: list[Callable[[str, int], str]] = [
        str.rjust if column in set(right) else str.ljust for column in range(len(widths))
    ]
    return "\n".join(
        "  ".join(align[column](cell, widths[column]) for column, cell in enumerate(row)).rstrip() for row in cells
    )


def timings_text(timings: Mapping[str, float]) -> str:
    """Stages and durations in the order in which they ran, and their sum."""
    rows = [(stage, duration_text(seconds)) for stage, seconds in timings.items()]
    return table_text([*rows, ("total", duration_text(sum(timings.values())))], right=(1,))


def cut_line(number: int, cause: str, frame: str, *, ops: int, outcome: str, seconds: float | None = None) -> str:
    """TORCHLAZY_DEBUG=1: what was cut, why, where, and the outcome ("hit", "compiled", "eager")."""
    took = "" if seconds is None else f", {duration_text(seconds)}"
    where = f" at {frame}" if frame else ""
    return f"torchlazy: cut {number}: {cause}{where}: {ops} ops, {outcome}{took}"
