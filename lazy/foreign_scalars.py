"""Numbers that change from run to run, for back ends that would bake a number in: as 0-dim tensors, or as constants.

Invariant: `scalars_as_tensors` rewrites a graph so that each scalar it names is a placeholder of a 0-dim CPU tensor
(float64 or int64), with the values that the numbers gave, and in the dtypes; scalars with another use stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torchlazy.prims.meta import ScalarMeta, TensorMeta
from torchlazy.prims.random_bits import random_bits

aten = torch.ops.aten
_library = torch.library.Library("torchlazy", "FRAGMENT")
_library.define("random_bits_of(SymInt[] size, Tensor seed, int stream, *, Device device) -> Tensor")


def _random_bits_of(size: Sequence[int], seed: torch.Tensor, stream: int, *, device: torch.device) -> torch.Tensor:
    return random_bits(size, int(seed.item()), stream, device=device)


def _random_bits_meta(size: Sequence[int], seed: torch.Tensor, stream: int, *, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


# The seed is on the CPU on every device.
_library.impl("random_bits_of", _random_bits_of, "CompositeExplicitAutograd")
torch.library.register_fake("torchlazy::random_bits_of", _random_bits_meta, lib=_library)

# Overloads that take the number as a tensor, by those that take it as a number. Both round it to the same type.
_TENSOR_FORM: dict[Any, Any] = {
    getattr(packet, "Scalar"): packet.Tensor  # noqa: B009  (`packet.Scalar` is an overload of many packets)
    for packet in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub)
}
_ARITHMETIC = frozenset({*_TENSOR_FORM.values()})
_WIDE = (torch.float32, torch.float64)


def scalars_as_tensors(graph: fx.Graph) -> list[int]:
    """Turn the scalars that can be 0-dim tensors into such, in place; returns the numbers of those scalars, in order.

    The graph is the caller's own, as `trace_to_graph` made it.
    """
    scalars = [n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], ScalarMeta)]
    turned = []
    for number, scalar in enumerate(scalars):
        if not all(_takes_tensor(user, scalar) for user in scalar.users):
            continue
        kind = scalar.meta["val"].kind
        for user in list(scalar.users):
            _rewrite(graph, user, scalar)
        scalar.meta["val"] = TensorMeta((), torch.int64 if kind is int else torch.float64, (), "cpu")
        turned.append(number)
    return turned


def bake_scalars(graph: fx.Graph, values: Mapping[int, Any]) -> fx.Graph:
    """A copy of `graph` where the scalars numbered in `values` are constants; the other placeholders stay."""
    copied = fx.Graph()
    val_map: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(graph, val_map)
    copied.output(output)
    for node, new in val_map.items():
        new.meta = dict(node.meta)
    for node in list(copied.nodes):
        if node.op != "placeholder" or not node.target.startswith("scalar"):
            continue
        number = int(node.target.removeprefix("scalar"))
        if number not in values:
            continue
        for user in list(node.users):
            user.args = _replaced(user.args, node, values[number])
            user.kwargs = _replaced(user.kwargs, node, values[number])
        copied.erase_node(node)
    return copied


def _replaced(arguments: Any, node: fx.Node, value: Any) -> Any:
    return fx.map_arg(arguments, lambda argument: value if argument is node else argument)


def _takes_tensor(user: fx.Node, scalar: fx.Node) -> bool:
    if user.target is torch.ops.torchlazy.random_bits.default:
        return True
    if user.op != "call_function" or scalar.meta["val"].kind is not float:
        return False
    meta = user.meta.get("val")
    if not isinstance(meta, TensorMeta) or not meta.dtype.is_floating_point or not meta.shape:
        return False  # among 0-dim operands a tensor would take part in the choice of the result's dtype
    if user.target not in _TENSOR_FORM and user.target not in _ARITHMETIC:
        return False
    if len(user.args) < 2 or not _is_like(user.args[0], meta):
        return False
    if user.args[1] is scalar:
        return not any(a is scalar for a in (*user.args[2:], *user.kwargs.values()))
    # The product of y with alpha becomes a value of its own: only where it is rounded as the sum is.
    return user.target in (aten.add.Tensor, aten.sub.Tensor) and meta.dtype in _WIDE and _is_like(user.args[1], meta)


def _is_like(operand: Any, meta: TensorMeta) -> bool:
    """A tensor with dimensions and the result's dtype: a 0-dim tensor beside it has no say in promotion."""
    have = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    return isinstance(have, TensorMeta) and bool(have.shape) and have.dtype == meta.dtype


def _rewrite(graph: fx.Graph, user: fx.Node, scalar: fx.Node) -> None:
    if user.target is torch.ops.torchlazy.random_bits.default:
        user.target = torch.ops.torchlazy.random_bits_of.default
        return
    meta: TensorMeta = user.meta["val"]
    source, other = user.args[0], user.args[1]
    alpha = user.args[2] if len(user.args) > 2 else user.kwargs.get("alpha")
    narrow = meta.dtype if meta.dtype == torch.float64 else torch.float32

    def call(overload: Any, *args: Any, val: TensorMeta, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(user):
            made = graph.call_function(overload, args, kwargs)
        made.meta["val"] = val
        made.meta["frame"] = user.meta.get("frame", "")
        return made

    number = scalar
    if narrow != torch.float64:
        number = call(aten._to_copy.default, scalar, dtype=narrow, val=TensorMeta((), narrow, (), "cpu"))
    if alpha is scalar:  # x + alpha * y
        assert isinstance(other, fx.Node)
        other = call(aten.mul.Tensor, other, number, val=other.meta["val"])
        user.args, user.kwargs = (source, other), {}
        return
    user.target = _TENSOR_FORM.get(user.target, user.target)
    rest: dict[str, Any] = {} if alpha is None or alpha == 1 else {"alpha": alpha}
    user.args, user.kwargs = (source, number), rest
