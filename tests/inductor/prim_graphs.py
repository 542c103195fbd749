"""Graphs of primitives written by hand, and the check that their lowering computes the same."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx
from torchlazy.inductor import interpret
from torchlazy.inductor.ir import ExternNode, LoopGraph, LoopNode, ViewNode
from torchlazy.inductor.lowering import lower
from torchlazy.prims import eager
from torchlazy.prims.meta import ScalarMeta, TensorMeta, contiguous_strides, meta_of
from torchlazy.prims.ops import PRIMS, extern


class GraphMaker:
    """Nodes by method call: `g.add(x, y)`, `g.sum(x, axes=(1,))`, `g.extern(torch.ops.aten.mm.default, x, y)`."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, *shape: int, dtype=torch.float32, strides=None, device="cpu") -> fx.Node:
        """A tensor input."""
        return self._placed(self.graph.placeholder(name), TensorMeta(
            shape, dtype, contiguous_strides(shape) if strides is None else strides, device))  # fmt: skip

    def scalar(self, name: str, kind: type) -> fx.Node:
        """A runtime scalar."""
        return self._placed(self.graph.placeholder(name), ScalarMeta(kind))

    def __getattr__(self, name: str):
        prim = PRIMS[name]

        def call(*args, layout=None, **attrs):
            node = self.graph.call_function(prim, args, attrs)
            meta = prim.meta(*(arg.meta["val"] for arg in args), **attrs)
            if layout is not None:
                meta = replace(meta, strides=layout)
            self._placed(node, meta)
            if not isinstance(meta, tuple):
                return node
            return tuple(self.getitem(node, k) for k in range(len(meta)))

        return call

    def getitem(self, node: fx.Node, position: int) -> fx.Node:
        """One of several results."""
        item = self.graph.call_function(operator.getitem, (node, position))
        return self._placed(item, node.meta["val"][position])

    def extern(self, overload, *args, **kwargs):
        """An ATen call; metadata from running it on zeros."""

        def example(value):
            if isinstance(value, fx.Node):
                meta = value.meta["val"]
                if isinstance(meta, ScalarMeta):
                    return meta.kind(1)
                return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype).zero_()
            return [example(v) for v in value] if isinstance(value, (list, tuple)) else value

        result = overload(*map(example, args), **{k: example(v) for k, v in kwargs.items()})
        node = self.graph.call_function(extern(overload), args, kwargs)
        if isinstance(result, torch.Tensor):
            return self._placed(node, meta_of(result))
        self._placed(node, tuple(None if r is None else meta_of(r) for r in result))
        return tuple(self.getitem(node, k) for k in range(len(result)))

    def broadcast(self, x: fx.Node, shape: tuple[int, ...], axis: int) -> fx.Node:
        """x with a new axis, repeated to `shape`."""
        kept = list(x.meta["val"].shape)
        return self.expand(self.reshape(x, shape=(*kept[:axis], 1, *kept[axis:])), shape=shape)

    @staticmethod
    def _placed(node: fx.Node, meta) -> fx.Node:
        node.meta["val"] = meta
        return node


def counts(loop_graph: LoopGraph) -> tuple[int, int, int]:
    """(loop nodes, extern calls, views)."""
    return tuple(sum(isinstance(n, kind) for n in loop_graph.nodes) for kind in (LoopNode, ExternNode, ViewNode))


def check(g: GraphMaker, outputs, inputs, scalars=(), *, donations=None, exact=False, atol=1e-5) -> LoopGraph:
    """Lower, interpret, compare values and strides with the eager references of the primitives."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    g.graph.output(outputs)
    loop_graph = lower(g.graph, donations=donations or {})
    names = [n.name for n in g.graph.nodes if n.op == "placeholder"]
    by_name = dict(zip([b.name for b in loop_graph.inputs], inputs, strict=True))
    by_name |= dict(zip([name for name, _ in loop_graph.scalars], scalars, strict=True))
    expected = eager.run(g.graph, [by_name[name] for name in names])
    actual = interpret.run(loop_graph, inputs, scalars)
    for node, ours, theirs in zip(outputs, actual, expected, strict=True):
        meta = node.meta["val"]
        assert ours.dtype == meta.dtype and tuple(ours.shape) == meta.shape
        if exact:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=atol)
        assert ours.stride() == meta.strides or 0 in meta.shape or 1 in meta.shape, (ours.stride(), meta.strides)
    return loop_graph
