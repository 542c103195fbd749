"""Builds one-operator ATen graphs from real arguments, and compares their decomposition with ATen eager."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torchlazy.prims import eager
from torchlazy.prims.decompose import Fallback, decompose
from torchlazy.prims.meta import ScalarMeta, meta_of


class Runtime:
    """Marks a number in the arguments as a runtime scalar: it becomes a placeholder."""

    def __init__(self, value: bool | int | float) -> None:
        self.value = value


def _value(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return meta_of(result)
    return tuple(_value(item) if item is not None else None for item in result)


def aten_graph(overload: Any, *args: Any, **kwargs: Any) -> tuple[fx.Graph, list[Any], Any]:
    """(graph of one call, its inputs, the eager result); `Runtime(number)` arguments become scalar placeholders."""
    graph = fx.Graph()
    inputs: list[Any] = []

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            meta: Any = meta_of(value)
        elif isinstance(value, Runtime):
            value = value.value
            meta = ScalarMeta(type(value))
        else:
            return value
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = meta
        inputs.append(value)
        return node

    lifted_args, lifted_kwargs = pytree.tree_map(lift, (list(args), kwargs))
    plain_args, plain_kwargs = pytree.tree_map(lambda v: v.value if isinstance(v, Runtime) else v, (list(args), kwargs))
    expected = overload(*plain_args, **plain_kwargs)
    node = graph.call_function(overload, tuple(lifted_args), lifted_kwargs)
    node.meta.update(val=_value(expected), frame="test.py:1")
    if isinstance(expected, torch.Tensor):
        graph.output((node,))
    else:
        items = []
        for i, item in enumerate(expected):
            if item is not None:
                get = graph.call_function(operator.getitem, (node, i))
                get.meta.update(val=_value(item), frame="test.py:1")
                items.append(get)
        graph.output(tuple(items))
    return graph, inputs, expected


def externs(graph: fx.Graph) -> list[str]:
    """The names of the ATen calls of a prims graph: primitives that are one, and externs."""
    return [node.target.name for node in graph.nodes if getattr(node.target, "overload", None) is not None]


def run_decomposed(graph: fx.Graph, inputs: Sequence[Any], *, allow_extern: bool = False) -> tuple[torch.Tensor, ...]:
    """Decompose, verify, and run with the eager references."""
    report: list[Fallback] = []
    prims = decompose(graph, report=report, strict=True)
    assert allow_extern or not report, report
    return eager.run(prims, inputs)


def check(
    overload: Any,
    *args: Any,
    allow_extern: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> None:
    """Assert that the decomposition of one call gives ATen's values, dtypes, shapes and strides on these arguments."""
    graph, inputs, expected = aten_graph(overload, *args, **kwargs)
    actual = run_decomposed(graph, inputs, allow_extern=allow_extern)
    wanted = (expected,) if isinstance(expected, torch.Tensor) else tuple(e for e in expected if e is not None)
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(
            a, w, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{overload}{args}{kwargs}\n{m}"
        )
