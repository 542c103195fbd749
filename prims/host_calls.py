"""Operators on the host inside a graph for a GPU (an optimizer's step counters): each is one library call.

Kernels of one program run on one device. Constants stay primitives, for they end up inside of the GPU's kernels; where
such a call reads one, the library makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.meta import TensorMeta, ValueMeta

aten = torch.ops.aten


def accelerator_of(graph: fx.Graph) -> str:
    """The device besides the host that values of the graph are on, as "cuda:0"; "" where there is none."""
    return min({device for node in graph.nodes for device in _devices(node.meta.get("val"))} - {"cpu"}, default="")


def is_host_call(args: Iterable[Any], wanted: ValueMeta | None) -> bool:
    """Whether an ATen call gives values on the host alone, and reads tensors to do so."""
    if wanted is None or set(_devices(wanted)) != {"cpu"}:
        return False
    nodes: list[fx.Node] = []
    fx.map_arg(tuple(args), nodes.append)
    return any(isinstance(node.meta["val"], TensorMeta) for node in nodes)


def with_constants(b: Any, args: Any) -> Any:
    """The arguments of a host call on the builder `b`, constants among them made by the library."""

    def made(node: fx.Node) -> fx.Node:
        if node.target is not ops.full or node.meta["val"].device != "cpu":
            return node
        given: Any = node.kwargs
        host = torch.device("cpu")
        return b.extern(aten.full.default, list(given["shape"]), given["value"], dtype=given["dtype"], device=host)

    return fx.map_arg(args, made)


def _devices(meta: Any) -> list[str]:
    metas = meta if isinstance(meta, tuple) else (meta,)
    return [one.device for one in metas if isinstance(one, TensorMeta)]
