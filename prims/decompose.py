"""ATen dialect in, prims dialect out: every ATen call by its rule, or one extern call where there is none.

Invariant: the new graph has the same placeholders, the same number of outputs, and for each output a value of
the same shape, dtype and device. Rules are written with `rule` and `Builder` (prims/builder.py) in prims/decomps/.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torchlazy.prims.builder import RULES, Builder, Fallback, rule
from torchlazy.prims.errors import GraphError, MetaError, NotApplicable, RuleError, place_of
from torchlazy.prims.host_calls import accelerator_of
from torchlazy.prims.plan_graph import PlanGraph
from torchlazy.prims.rule_memo import RuleMemo


def decompose(
    graph: fx.Graph,
    *,
    report: list[Fallback] | None = None,
    strict: bool = False,
    values: dict[fx.Node, Any] | None = None,
    memoise: bool = True,
) -> fx.Graph:
    """The graph in primitives. `report` collects the calls that stay extern; `strict` raises where a rule fails.

    `values` is filled with what each node of `graph` became: a node of the new graph, or a tuple of them. Without
    `memoise` each rule runs for each call, which gives the same graph more slowly.
    """
    new = PlanGraph()
    b = Builder(new, strict=strict)
    b.accelerator = accelerator_of(graph)
    if memoise:
        b.remember(RuleMemo(graph))
    env: dict[fx.Node, Any] = {} if values is None else values
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = new.placeholder(node.target)
            env[node].meta.update(node.meta)
        elif node.op == "output":
            new.output(fx.map_arg(node.args[0], env.__getitem__))
        elif node.op == "call_function":
            env[node] = _decompose_call(b, node, env)
        else:
            raise GraphError(
                f"{node.op} nodes are not in the ATen dialect / {place_of(node)} / pass the value as an input"
            )
    if report is not None:
        report.extend(b.fallbacks)
    return new


def _decompose_call(b: Builder, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    if node.target is operator.getitem:
        source, position = node.args
        return env[source][position]  # type: ignore[index]
    if not isinstance(node.target, torch._ops.OpOverload):
        raise GraphError(f"{node.target} is not an ATen overload / {place_of(node)} / record the overload it calls")
    b.frame, b.origin, b.stage = node.meta.get("frame", ""), str(node.target), node.meta.get("stage", "")
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    return b.apply(node.target, tuple(args), dict(kwargs), node.meta["val"])


__all__ = ["RULES", "Builder", "Fallback", "MetaError", "NotApplicable", "RuleError", "decompose", "rule"]

# Last, because the rules' modules import the names above.
import torchlazy.prims.decomps  # noqa: E402, F401
