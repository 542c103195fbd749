"""Whether a graph is legal in the dialect that it claims: `verify(graph, ATEN)` or `verify(graph, PRIMS)`.

Invariant: verifying changes nothing; an illegal graph raises one GraphError that shows the first bad node, its
operands' metadata, the user's line and what to do.
"""

from __future__ import annotations

import operator
from enum import Enum, auto
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.attrs import is_runtime_scalar
from torchlazy.prims.errors import GraphError, MetaError, place_of
from torchlazy.prims.meta import ScalarMeta, TensorMeta


class Dialect(Enum):
    """The two languages of graphs."""

    ATEN = auto()
    PRIMS = auto()


ATEN = Dialect.ATEN
PRIMS = Dialect.PRIMS


def verify(graph: fx.Graph, dialect: Dialect) -> None:
    """Raise GraphError unless every node of `graph` is legal in `dialect`."""
    check_call = _verify_aten if dialect is Dialect.ATEN else _verify_prim
    seen: dict[fx.Node, None] = {}
    outputs = 0
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise _error(f"operand %{operand.name} is not defined before it is read", node, "sort the graph")
        if node.op == "call_function":
            _verify_value(node)
            if node.target is operator.getitem:
                _verify_getitem(node)
            else:
                check_call(node)
        elif node.op == "placeholder":
            if not isinstance(node.meta.get("val"), (TensorMeta, ScalarMeta)):
                raise _error("the placeholder has no metadata", node, "set meta['val'] to a TensorMeta or ScalarMeta")
        elif node.op == "output":
            outputs += 1
            _verify_output(node)
        else:
            raise _error(f"{node.op} nodes are in neither dialect", node, "pass the value as an input")
        seen[node] = None
    if outputs != 1:
        raise GraphError(f"the graph has {outputs} output nodes / end it with graph.output((...))")


def _error(what: str, node: fx.Node, remedy: str) -> GraphError:
    return GraphError(f"{what}\n  {place_of(node)}\n  {remedy}")


def _parts(value: Any) -> list[Any]:
    return [part for item in value for part in _parts(item)] if isinstance(value, tuple) else [value]


def _verify_value(node: fx.Node) -> None:
    value = node.meta.get("val")
    if not all(part is None or isinstance(part, TensorMeta) for part in _parts(value)) or value is None:
        raise _error("the node has no metadata", node, "set meta['val'] to a TensorMeta, or a tuple of them")
    for part in _parts(value):
        if part is not None and len(part.shape) != len(part.strides):
            raise _error(f"shape {part.shape} and strides {part.strides} differ in rank", node, "stamp eager's strides")


def _verify_output(node: fx.Node) -> None:
    values = node.args[0]
    if not isinstance(values, (tuple, list)):
        raise _error("the output is not a tuple", node, "return a tuple of nodes")
    for value in values:
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), TensorMeta):
            raise _error(f"output {value} is not a tensor", node, "outputs are tensor nodes only")


def _verify_getitem(node: fx.Node) -> None:
    source, position = node.args
    parts = source.meta["val"] if isinstance(source, fx.Node) else None
    if not isinstance(parts, tuple) or not isinstance(position, int) or not 0 <= position < len(parts):
        raise _error("getitem of no such result", node, "index a node with several results")
    if parts[position] is None:
        raise _error(f"result {position} is None, ATen does not compute it", node, "do not read it")
    stored, part = node.meta["val"], parts[position]
    if isinstance(part, TensorMeta) and (stored.shape, stored.dtype) != (part.shape, part.dtype):
        raise _error(f"metadata says {stored}, the source {part}", node, "copy the source's metadata")


def _verify_aten(node: fx.Node) -> None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise _error(f"{target} is not an ATen overload", node, "record the overload that the call dispatches to")
    if target._schema.is_mutable:
        raise _error(f"{target} writes into an operand", node, "record its functional form and rebind the storage")


def _verify_prim(node: fx.Node) -> None:
    prim = node.target
    if not isinstance(prim, ops.Prim):
        raise _error(f"{prim} is not a primitive", node, "decompose it, or wrap it: ops.extern(overload)")
    if prim.overload is not None and prim.overload._schema.is_mutable:
        raise _error(f"{prim.overload} writes into an operand", node, "call its functional form")
    if prim.is_anonymous:
        return
    for operand in node.args:
        if not isinstance(operand, fx.Node) or not isinstance(operand.meta.get("val"), TensorMeta):
            raise _error(
                f"operand {operand!r} is not a tensor node", node, "make numbers with `full`, pass attributes by name"
            )
    for key, value in node.kwargs.items():
        if isinstance(value, fx.Node) and not is_runtime_scalar(value):
            raise _error(f"attribute {key} is a tensor node", node, "pass tensors as operands")
    try:
        inferred = prim.meta(*(operand.meta["val"] for operand in node.args), **node.kwargs)  # type: ignore[union-attr]
    except MetaError as error:
        raise _error(str(error), node, "insert convert, reshape or expand before it") from None
    _verify_same(node, inferred)


def _verify_same(node: fx.Node, inferred: Any) -> None:
    stored = node.meta["val"]
    pairs = list(zip(_parts(stored), _parts(inferred), strict=False))
    if len(_parts(stored)) != len(_parts(inferred)):
        raise _error(
            f"{len(_parts(stored))} results are stored, the rule gives {len(_parts(inferred))}", node, "infer anew"
        )
    for have, want in pairs:
        if have is None or want is None:
            if have is not want:
                raise _error(f"{have} is stored as a result, the rule gives {want}", node, "infer anew")
        elif (have.shape, have.dtype, have.device) != (want.shape, want.dtype, want.device):
            place = f"{have} on {have.device}, the rule gives {want} on {want.device}"
            raise _error(f"metadata says {place}", node, "set meta['val'] from prim.meta(...)")
