"""Convolutions on a GPU: the bias and its gradient leave the library call, eager's numbers stay."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import eager, ops
from torchlazy.prims.decompose import decompose
from torchlazy.prims.meta import meta_of
from torchlazy.prims.verify import PRIMS, verify

aten = torch.ops.aten
GEOMETRY = ([2], [1], [1], False, [0], 1)
TRANSPOSED = ([2, 2], [1, 0], [1, 1], True, [1, 0], 2)


def _on(device: str, tensor: torch.Tensor) -> Any:
    return replace(meta_of(tensor), device=device)


def _prims(device: str, op: torch._ops.OpOverload, tensors: list[torch.Tensor], *rest: Any) -> fx.Graph:
    """The call as primitives for `device`; the machine needs to have none."""
    wanted = op(*tensors, *rest)
    graph = fx.Graph()
    nodes = []
    for i, tensor in enumerate(tensors):
        nodes.append(graph.placeholder(f"x{i}"))
        nodes[-1].meta["val"] = _on(device, tensor)
    call = graph.call_function(op, (*nodes, *rest))
    if isinstance(wanted, torch.Tensor):
        call.meta["val"] = _on(device, wanted)
        graph.output((call,))
    else:
        call.meta["val"] = tuple(None if part is None else _on(device, part) for part in wanted)
        parts = []
        for i, part in enumerate(call.meta["val"]):
            if part is not None:
                parts.append(graph.call_function(operator.getitem, (call, i)))
                parts[-1].meta["val"] = part
        graph.output(tuple(parts))
    made = decompose(graph)
    verify(made, PRIMS)
    return made


def _calls(graph: fx.Graph, prim: ops.Prim) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is prim]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", [GEOMETRY, TRANSPOSED])
def test_forward(dtype: torch.dtype, geometry: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    spatial = (7, 6)[: len(geometry[0])]
    *_, transposed, _, groups = geometry
    x, w = torch.randn(2, 4, *spatial), torch.randn(4, 4 // groups, *(3,) * len(spatial))
    bias = torch.randn(w.shape[1] * groups if transposed else w.shape[0])
    tensors = [t.to(dtype) for t in (x, w, bias)]
    graph = _prims("cuda:0", aten.convolution.default, tensors, *geometry)
    (call,) = _calls(graph, ops.convolution)
    assert len(call.args) == 2, "no bias"
    (found,) = eager.run(graph, tensors)
    product = aten.convolution(*tensors[:2], None, *geometry)
    assert torch.equal(found, product + tensors[2].reshape(1, -1, *(1,) * len(spatial)))
    (call,) = _calls(_prims("cpu", aten.convolution.default, tensors, *geometry), ops.convolution)
    assert len(call.args) == 3


def test_results_lie_as_they_were_recorded() -> None:
    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    w = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    wanted = aten.convolution(x, w, torch.randn(8), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert wanted.is_contiguous(memory_format=torch.channels_last)
    graph = _prims("cuda:0", aten.convolution.default, [x, w, torch.randn(8)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    (call,) = _calls(graph, ops.convolution)
    assert call.meta["val"].strides == wanted.stride()


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (False, False, True), (True, True, False)])
def test_backward(mask: tuple[bool, bool, bool]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 3)
    grad = torch.randn_like(aten.convolution(x, w, None, *GEOMETRY))
    rest = ([6], *GEOMETRY, list(mask))
    graph = _prims("cuda:0", aten.convolution_backward.default, [grad, x, w], *rest)
    calls = _calls(graph, ops.convolution_backward)
    assert [call.kwargs["output_mask"] for call in calls] == ([(*mask[:2], False)] if any(mask[:2]) else [])
    wanted = [part for part in aten.convolution_backward(grad, x, w, *rest) if part is not None]
    for found, part in zip(eager.run(graph, [grad, x, w]), wanted, strict=True):
        torch.testing.assert_close(found, part)
