"""Prims graphs written by hand in tests: `g = Maker(); x = g.input(4, 4); y = g(ops.exp, x)`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torchlazy.autograd.step import BACKWARD, FORWARD, STAGE
from torchlazy.prims import meta_infer, ops
from torchlazy.prims.meta import Dim, ScalarMeta, TensorMeta, contiguous_strides

aten = torch.ops.aten


class Maker:
    """Appends to a graph; `backward()` says that what follows is recorded on the other side."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.graph = fx.Graph()
        self.device = device
        self.stage = FORWARD
        self._inputs = 0

    def input(self, *shape: Dim, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"in{self._inputs}")
        self._inputs += 1
        node.meta["val"] = TensorMeta(shape, dtype, contiguous_strides(shape), self.device)
        return node

    def scalar(self) -> fx.Node:
        node = self.graph.placeholder(f"in{self._inputs}")
        self._inputs += 1
        node.meta["val"] = ScalarMeta(int)
        return node

    def __call__(self, prim: ops.Prim, *operands: fx.Node, **attrs: Any) -> fx.Node:
        return self._node(prim, operands, attrs, prim.meta(*(x.meta["val"] for x in operands), **attrs))

    def extern(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        metas, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        return self._node(ops.extern(overload), args, kwargs, meta_infer.infer(overload, metas, named))

    def mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        (rows, _), (_, columns) = a.meta["val"].shape, b.meta["val"].shape
        meta = TensorMeta((rows, columns), a.meta["val"].dtype, (columns, 1), self.device)
        return self._node(ops.extern(aten.mm.default), (a, b), {}, meta)

    def part(self, whole: fx.Node, position: int) -> fx.Node:
        return self._node(operator.getitem, (whole, position), {}, whole.meta["val"][position])

    def backward(self) -> None:
        self.stage = BACKWARD

    def output(self, *results: fx.Node) -> fx.Graph:
        self.graph.output(results)
        return self.graph

    def _node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({"val": value, STAGE: self.stage})
        return node
