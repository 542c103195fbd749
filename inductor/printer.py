"""Loop graphs as text, for dumps and golden files.

Invariant: the text is deterministic and shows all that code generation reads: buffers with layouts, loops, bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torchlazy.inductor.analyses import UniformHandler, node_index
from torchlazy.inductor.codegen.expr import PYTHON, print_expr
from torchlazy.inductor.index import axis
from torchlazy.inductor.ir import Buffer, BufferRef, LoopGraph, LoopNode, Node, ViewNode
from torchlazy.prims.meta import contiguous_strides

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
          "ge": ">=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}  # fmt: skip


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class PrintHandler(UniformHandler[str]):
    """Turns a body into one line of text."""

    def __init__(self) -> None:
        self._indirect = 0

    def pointwise(self, op: str, operands: tuple[str, ...]) -> str:
        if op in _INFIX:
            return f"({operands[0]} {_INFIX[op]} {operands[1]})"
        return f"{op}({', '.join(operands)})"

    def load(self, name: str, index: sympy.Expr) -> str:
        return f"{name}[{print_expr(index, PYTHON)}]"

    def store(self, name: str, index: sympy.Expr, value: str) -> None:
        raise AssertionError("bodies return their value; who runs them stores it")

    def scalar(self, name: str, dtype: torch.dtype) -> str:
        return f"{_dtype(dtype)}({name})"

    def constant(self, value: float, dtype: torch.dtype) -> str:
        return f"{value!r}" if dtype in (torch.float32, torch.bool) else f"{_dtype(dtype)}({value!r})"

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> str:
        return f"{_dtype(dtype)}({print_expr(expr, PYTHON)})"

    def indirect(self, value: str, size: sympy.Expr, what: str) -> sympy.Expr:
        self._indirect += 1
        return axis(f"{{{value}}}", size)

    def masked(self, condition: str, body: Callable[[], str], other: float) -> str:
        return f"masked({condition}, {body()}, {other!r})"

    def to_dtype(self, value: str, dtype: torch.dtype) -> str:
        return f"to_{_dtype(dtype)}({value})"

    def bitcast(self, value: str, dtype: torch.dtype) -> str:
        return f"bitcast_{_dtype(dtype)}({value})"

    def random_bits(self, seed: str, stream: str, counter: str) -> str:
        return f"random_bits({seed}, {stream}, {counter})"


def print_buffer(buffer: Buffer) -> str:
    """`buf3: float32[8, 16] strides (1, 8) on cpu`; row-major strides and offset 0 are left out."""
    text = f"{buffer.name}: {buffer.meta}"
    if buffer.strides != contiguous_strides(buffer.shape):
        text += f" strides {buffer.strides}"
    if buffer.offset != 0:
        text += f" offset {buffer.offset}"
    return f"{text} on {buffer.device}"


def print_node(node: Node) -> str:
    """One node as a few lines of text."""
    if isinstance(node, LoopNode):
        return _print_loop(node)
    if isinstance(node, ViewNode):
        return f"{print_buffer(node.output)} = view of {node.source}"
    outputs = ", ".join("None" if output is None else print_buffer(output) for output in node.outputs)
    arguments = [_argument(arg) for arg in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{outputs} = {node.op}({', '.join(arguments)})"


def _print_loop(node: LoopNode) -> str:
    index, reduce_index = node_index(node)
    loops = ", ".join(f"i{d}<{size}" for d, size in enumerate(node.ranges))
    reduce_loops = ", ".join(f"r{d}<{size}" for d, size in enumerate(node.reduce_ranges))
    header = f"for {loops or 'one point'}" + (f" reduce {reduce_loops}" if node.reduction else "")
    value = str(node.body(PrintHandler(), index, reduce_index))
    if node.reduction:
        value = f"{node.reduction}<{_dtype(node.accumulate_dtype or torch.float32)}>({value})"
    stores = ", ".join(f"{out.name}[{print_expr(out.element(index), PYTHON)}]" for out in node.outputs)
    return "\n".join([*map(print_buffer, node.outputs), f"  {header}:", f"    {stores} = {value}"])


def _argument(value: Any) -> str:
    if isinstance(value, BufferRef):
        return f"${value.name}" if value.scalar else value.name
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_argument, value))}]"
    return repr(value)


def print_loop_graph(graph: LoopGraph) -> str:
    """The whole program before fusion."""
    lines = ["inputs:", *(f"  {print_buffer(buffer)}" for buffer in graph.inputs)]
    lines += [f"  {name}: {kind.__name__}" for name, kind in graph.scalars]
    for node in graph.nodes:
        origins = f"  # {'; '.join(node.origins)}" if node.origins else ""
        first, *rest = print_node(node).split("\n")
        lines += [first + origins, *rest]
    lines.append(f"outputs: {', '.join(graph.outputs)}")
    lines += [f"donated: {output} into {source}" for output, source in graph.donations.items()]
    return "\n".join(lines) + "\n"
