"""Runtime scalars as 0-dim tensors: for programs that a CUDA graph replays, whose arguments are frozen.

Invariant: the same values as with scalars for arguments. Inputs keep their order: what was scalar number i is a float64
or int64 tensor of one element on the compute device, after all tensors.
"""

from __future__ import annotations

import torch
from torch import fx
from torchlazy.prims.attrs import is_runtime_scalar
from torchlazy.prims.errors import PrimsError
from torchlazy.prims.meta import ScalarMeta, TensorMeta
from torchlazy.prims.ops import Prim

MARK = "scalar_in_memory"  # on the placeholder's meta


class ScalarStaysArgument(PrimsError):
    """An operator that takes a runtime scalar is called as it is, with a number from the host."""


def scalars_in_memory(graph: fx.Graph, device: str) -> fx.Graph:
    """The graph of primitives with its scalar placeholders as 0-dim tensors on `device`.

    Raises ScalarStaysArgument where one goes into a library call, as complex ones do.
    """
    for node in graph.nodes:
        if isinstance(node.target, Prim) and node.target.overload is not None:
            for used in node.all_input_nodes:
                if is_runtime_scalar(used):
                    frame = node.meta.get("frame") or "an unknown line"
                    raise ScalarStaysArgument(f"{node.target} at {frame} takes a number that changes from run to run")
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], env.__getitem__))
            continue
        copied = env[node] = made.node_copy(node, env.__getitem__)
        meta = node.meta.get("val")
        if isinstance(meta, ScalarMeta):
            if meta.kind is complex:
                raise ScalarStaysArgument("a complex number changes from run to run")
            dtype = torch.float64 if meta.kind is float else torch.int64
            copied.meta = {**node.meta, "val": TensorMeta((), dtype, (), device), MARK: True}
    return made
