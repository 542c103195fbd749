"""Bad graphs are told apart from good ones, by what, where and remedy."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.decompose import decompose
from torchlazy.prims.errors import GraphError
from torchlazy.prims.meta import ScalarMeta, TensorMeta, contiguous_strides
from torchlazy.prims.verify import ATEN, PRIMS, verify
from torchlazy.tests.prims.graphs import aten_graph

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, dtype, contiguous_strides(shape))


def one_call(target: Any, metas: list[Any], result: Any, **attrs: Any) -> fx.Graph:
    """A graph of one call on placeholders, with whatever metadata the test claims."""
    graph = fx.Graph()
    operands = []
    for i, value in enumerate(metas):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = value
        operands.append(node)
    node = graph.call_function(target, tuple(operands), attrs)
    node.meta.update(val=result, frame="model.py:41")
    graph.output((node,))
    return graph


GOOD = [
    one_call(ops.add, [meta(2, 3), meta(2, 3)], meta(2, 3)),
    one_call(ops.sum, [meta(2, 3)], meta(2), axes=(1,)),
    one_call(ops.extern(aten.mm.default), [meta(2, 3), meta(3, 2)], meta(2, 2)),
]
BAD = [
    ("shapes", one_call(ops.add, [meta(2, 3), meta(3)], meta(2, 3))),
    ("dtypes", one_call(ops.add, [meta(2), meta(2, dtype=torch.int64)], meta(2))),
    ("operands must be floating", one_call(ops.exp, [meta(2, dtype=torch.int64)], meta(2))),
    ("condition must be bool", one_call(ops.where, [meta(2), meta(2), meta(2)], meta(2))),
    ("metadata says float32", one_call(ops.exp, [meta(2)], meta(3))),
    ("metadata says float64", one_call(ops.exp, [meta(2)], meta(2, dtype=torch.float64))),
    ("attributes are", one_call(ops.sum, [meta(2, 3)], meta(2), dims=(1,))),
    ("is not a", one_call(ops.sum, [meta(2, 3)], meta(2), axes=1)),
    ("distinct axes", one_call(ops.sum, [meta(2, 3)], meta(2), axes=(2,))),
    ("number of elements", one_call(ops.reshape, [meta(2, 3)], meta(5), shape=(5,))),
    ("only 1 can", one_call(ops.expand, [meta(2, 3)], meta(4, 3), shape=(4, 3))),
    ("within size", one_call(ops.slice, [meta(4)], meta(3), starts=(2,), stops=(5,), steps=(1,))),
    ("negative padding", one_call(ops.pad, [meta(4)], meta(3), low=(-1,), high=(0,), value=0)),
    ("adjacent", one_call(ops.index, [meta(2, 3, 4), *[meta(5, dtype=torch.int64)] * 2], meta(5, 3), dims=(0, 2))),
    ("takes 2 operands, not 1", one_call(ops.add, [meta(2)], meta(2))),
    ("does not take 2 operands", one_call(ops.sum, [meta(2), meta(2)], meta(2), axes=())),
    ("not a primitive", one_call(aten.add.Tensor, [meta(2), meta(2)], meta(2))),
    ("no metadata", one_call(ops.exp, [meta(2)], None)),
    ("not a tensor node", one_call(ops.add, [meta(2), ScalarMeta(float)], meta(2))),
    ("writes into an operand", one_call(ops.extern(aten.add_.Tensor), [meta(2), meta(2)], meta(2))),
]


@pytest.mark.parametrize("graph", GOOD)
def test_good_prims_graphs(graph: fx.Graph) -> None:
    verify(graph, PRIMS)


@pytest.mark.parametrize("message, graph", BAD, ids=[message for message, _ in BAD])
def test_bad_prims_graphs(message: str, graph: fx.Graph) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        verify(graph, PRIMS)
    assert "model.py:41" in str(caught.value)


def test_message_shows_operation_operands_line_and_remedy() -> None:
    with pytest.raises(GraphError) as caught:
        verify(BAD[0][1], PRIMS)
    text = str(caught.value)
    for part in ("add", "float32[2, 3]", "float32[3]", "model.py:41", "broadcast the operands first"):
        assert part in text


def test_aten_graphs() -> None:
    graph, _, _ = aten_graph(aten.add.Tensor, torch.ones(2), 1)
    verify(graph, ATEN)
    with pytest.raises(GraphError, match="not an ATen overload"):
        verify(decompose(graph), ATEN)
    with pytest.raises(GraphError, match="writes into an operand"):
        verify(one_call(aten.add_.Tensor, [meta(2), meta(2)], meta(2)), ATEN)


def test_structure() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(GraphError, match="no metadata"):
        verify(graph, ATEN)
    x.meta["val"] = meta(2)
    with pytest.raises(GraphError, match="0 output nodes"):
        verify(graph, ATEN)
    graph.output(x)
    with pytest.raises(GraphError, match="not a tuple"):
        verify(graph, ATEN)
    graph = one_call(operator.getitem, [(meta(2), None)], meta(2))
    with pytest.raises(GraphError, match="no metadata"):
        verify(graph, PRIMS)
    graph, _, _ = aten_graph(aten.var_mean.correction, torch.ones(3, 4), [1])
    verify(graph, ATEN)
    verify(decompose(graph), PRIMS)
    graph.get_attr("weight")
    with pytest.raises(GraphError):
        verify(graph, ATEN)
