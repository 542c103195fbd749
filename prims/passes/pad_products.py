"""Pads half-precision matrix products with zeros where their sizes are no multiple of 8.

A GPU's fast kernels for products of halves want rows that begin at multiples of 16 bytes, in operands and result: only
the sizes that rows have in memory matter, the number of rows does not. A vocabulary of 50257 sends
all three products of a language model's head to kernels at a quarter of the speed. A padded operand costs no pass of
its own where it is computed anyway (a cast of the weight, the gradient of the loss): it is written padded.

Invariant: the same values. Zeros are added to sums, or fill rows and columns that are never read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE
from torchlazy.prims.plan_graph import PlanGraph
from torchlazy.prims.promotion import HALVES
from torchlazy.prims.size_int import is_tracked

_MULTIPLE = 8
_LEAST_WORK = 1 << 32  # multiplications below which a product is not worth a padded operand
_PRODUCTS = ("mm", "addmm")


def pad_products(graph: fx.Graph, *, least_work: int = _LEAST_WORK, device: str = "cuda") -> fx.Graph:
    """The graph with large products of halves on `device` padded; itself where there is none."""
    wanted = {node for node in graph.nodes if _is_wanted(node, least_work, device)}
    if not wanted:
        return graph
    made = PlanGraph()
    padder = _Padder(made)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], env.__getitem__))  # in the layout that the caller was promised
        elif node in wanted:
            env[node] = padder.product(node, [env[operand] for operand in node.args])
        else:
            env[node] = made.node_copy(node, lambda operand: padder.window(env[operand]))
    return made


def _is_wanted(node: fx.Node, least_work: int, device: str) -> bool:
    if not isinstance(node.target, ops.Prim) or node.target.name not in _PRODUCTS:
        return False
    a, b = (operand.meta["val"] for operand in node.args[-2:])  # type: ignore[union-attr]
    sizes = (*a.shape, b.shape[1])
    if any(is_tracked(size) for size in sizes) or a.dtype not in HALVES or not a.device.startswith(device):
        return False
    return math.prod(sizes) >= least_work and any(_missing(a, b))


def _missing(a: TensorMeta, b: TensorMeta) -> tuple[int, int, int]:
    """How many rows, inner elements and columns the product lacks: of sizes that are a row's length somewhere."""
    along_rows = a.strides[0] == 1 != a.strides[1]  # a is the transpose of what is in memory
    along_inner = not along_rows or b.strides[0] == 1 != b.strides[1]
    rows, inner, columns = (-size % _MULTIPLE for size in (*a.shape, b.shape[1]))
    return rows if along_rows else 0, inner if along_inner else 0, columns  # the result's rows have `columns` elements


class _Padder:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._padded: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        self._in_memory: dict[fx.Node, fx.Node] = {}  # of computed values: the padded one, which lies in memory
        self._rounded: dict[fx.Node, fx.Node] = {}  # of float32 values that may lie in memory as a half: that half
        self._windows: dict[fx.Node, fx.Node] = {}
        self._seen_through: dict[fx.Node, fx.Node] = {}  # of such a window: the value

    def product(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """The product of padded operands, and the part of it that was asked for."""
        *bias, a, b = operands
        rows, inner, columns = _missing(a.meta["val"], b.meta["val"])
        padded = [self.pad(a, (rows, inner)), self.pad(b, (inner, columns))]
        if bias:
            shape = _shape(bias[0])
            high = tuple(
                0 if size == 1 else more for size, more in zip(shape, (rows, columns)[-len(shape) :], strict=True)
            )
            padded.insert(0, self.pad(bias[0], high))
        product = self._call(node.target, padded, dict(node.kwargs), node.meta)
        meta = node.meta["val"]
        if _shape(product) == meta.shape:
            return product
        window = {"starts": (0, 0), "stops": meta.shape, "steps": (1, 1)}
        return self._call(ops.slice, [product], window, node.meta, meta)

    def pad(self, x: fx.Node, high: tuple[int, ...]) -> fx.Node:
        """`x` with zeros behind each dimension; below a permutation, so that both ways of reading share them."""
        if not any(high):
            return x
        x = self._seen_through.get(x, x)
        if isinstance(x.target, ops.Prim) and x.target.name == "permute":
            dims = x.kwargs["dims"]
            (source,) = x.args
            below = [0] * len(high)
            for position, dim in enumerate(dims):  # type: ignore[arg-type]
                below[dim] = high[position]
            return self._permuted(self.pad(source, tuple(below)), dims, x.meta)  # type: ignore[arg-type]
        key = (x, high)
        if key not in self._padded:
            zero = {"low": (0,) * len(high), "high": high, "value": 0.0}
            self._padded[key] = self._call(ops.pad, [x], zero, x.meta)
            self._remember(x, self._padded[key])
        return self._padded[key]

    def _remember(self, x: fx.Node, padded: fx.Node) -> None:
        if not isinstance(x.target, ops.Prim) or x.target.is_kind(ops.Kind.EXTERN):
            return  # lies in memory by itself
        self._in_memory[x] = padded
        if x.target is ops.convert:
            (source,) = x.args
            if source.meta.get(MEMORY_DTYPE) == x.meta["val"].dtype:  # type: ignore[union-attr]
                self._rounded[source] = x  # type: ignore[index]

    def window(self, x: fx.Node) -> fx.Node:
        """`x` for a later reader: where it was written padded, the part of that memory, and not its work once more."""
        half = self._rounded.get(x)
        if x not in self._in_memory and half is None:
            return x
        if x not in self._windows:
            meta = x.meta["val"]
            if half is not None:
                self._windows[x] = self._call(ops.convert, [self.window(half)], {"dtype": meta.dtype}, x.meta, meta)
            else:
                cut = {"starts": (0,) * meta.rank, "stops": meta.shape, "steps": (1,) * meta.rank}
                self._windows[x] = self._call(ops.slice, [self._in_memory[x]], cut, x.meta, meta)
                self._seen_through[self._windows[x]] = x
        return self._windows[x]

    def _permuted(self, x: fx.Node, dims: tuple[int, ...], like: dict[str, Any]) -> fx.Node:
        """A window on the memory of `x`: with row-major strides the operand would be copied to have them."""
        node = self._call(ops.permute, [x], {"dims": dims}, like)
        strides = tuple(x.meta["val"].strides[dim] for dim in dims)
        node.meta["val"] = replace(node.meta["val"], strides=strides)
        return node

    def _call(
        self, prim: Any, operands: list[fx.Node], kwargs: dict[str, Any], like: dict[str, Any], meta: Any = None
    ) -> fx.Node:
        node = self.graph.call_function(prim, tuple(operands), kwargs)
        node.meta = {key: like[key] for key in ("frame", "stage", "copy_of") if key in like}
        node.meta["val"] = prim.meta(*(operand.meta["val"] for operand in operands), **kwargs) if meta is None else meta
        return node


def _shape(node: fx.Node) -> tuple[int, ...]:
    meta: TensorMeta = node.meta["val"]
    return meta.shape
