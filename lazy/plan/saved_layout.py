"""Which values that cross from a joint's forward to its backward lie channels-last.

Each half is planned by itself, and what crosses has the layout that both were promised. Convolutions on a GPU want
channels-last operands (prims/passes/conv_layout.py): where what they read and give crosses row-major, both halves would
copy it, or keep to cuDNN's slower kernels. ResNet-50 at batch 64 took 22 ms of kernels a step so, against 9.5 where
forward and backward are planned as one program (H200, bfloat16 autocast).

Invariant: layouts alone; a result of the call lies as eager's does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torchlazy.lazy.trace.geometry import Geometry, geometry
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.passes.conv_layout import channels_last, gains_channels_last

_aten = torch.ops.aten
_WITH_WINDOWS = ("pool", "upsample", "pad", "cat", "slice")  # of the operators that give another shape in its order


def channels_last_values(graph: fx.Graph, *, device: str = "cuda") -> set[fx.Node]:
    """The values of an ATen graph that convolutions on `device` give or take, and what is computed from them in their
    order: those that lie channels-last where the choice is free."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is _aten.convolution.default:
            x, weight = node.args[:2]
            if _gains(x, weight, node, node.args[8], device):
                found.update((x, weight, node))
        elif node.target is _aten.convolution_backward.default:
            grad, x, weight = node.args[:3]
            if _gains(x, weight, grad, node.args[9], device):
                found.update((grad, x, weight, node))
        elif node.target is operator.getitem:
            if node.args[0] in found and _rank(node) == 4:
                found.add(node)
        elif node.op == "call_function" and any(
            _follows(node, given) for given in node.all_input_nodes if given in found
        ):
            found.add(node)
    return found


def as_channels_last(geom: Geometry) -> Geometry:
    """The geometry without gaps, channels-last."""
    return geometry(geom.shape, channels_last(geom.shape), 0, geom.dtype, geom.device, geom.compute)  # type: ignore[arg-type]


def _gains(x: Any, weight: Any, y: Any, groups: int, device: str) -> bool:
    return gains_channels_last(x.meta["val"], weight.meta["val"], y.meta["val"], groups, device=device)


def _rank(node: fx.Node) -> int:
    meta = node.meta.get("val")
    return meta.rank if isinstance(meta, TensorMeta) else 0


def _follows(node: fx.Node, given: fx.Node) -> bool:
    """Whether an operator's result, or its first one, lies as this operand does."""
    made, overload = node.meta.get("val"), node.target
    if isinstance(made, tuple):
        made = made[0]
    if not isinstance(made, TensorMeta) or made.rank != 4 or _rank(given) != 4:
        return False
    if any(result.alias_info is not None for result in overload._schema.returns):  # type: ignore[union-attr]
        return False
    return made.shape == given.meta["val"].shape or any(word in str(overload) for word in _WITH_WINDOWS)
