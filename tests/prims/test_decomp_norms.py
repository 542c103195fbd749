"""Normalisation layers: values, dtypes and shapes of every output against ATen eager."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import eager
from torchlazy.prims.decompose import decompose
from torchlazy.prims.meta import meta_of

from tests.prims.graphs import aten_graph, check, run_decomposed

aten = torch.ops.aten
# (input, parameters): ATen takes half inputs with float32 parameters too.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 3e-2, "atol": 3e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize(("dtype", "parameter_dtype"), DTYPES)
def test_layer_norm(dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    x, grad = sample(3, 4, 5, dtype=dtype), sample(3, 4, 5, dtype=dtype, seed=1)
    for shape in ([5], [4, 5], [3, 4, 5]):
        weight, bias = (sample(*shape, dtype=parameter_dtype, seed=seed) for seed in (2, 3))
        forward = (x, shape, weight, bias, 1e-5)
        check(aten.native_layer_norm.default, *forward, **close(dtype))
        _, mean, rstd = aten.native_layer_norm(*forward)
        backward = aten.native_layer_norm_backward.default
        check(backward, grad, x, shape, mean, rstd, weight, bias, [True, True, True], **close(dtype))
        check(backward, grad, x, shape, mean, rstd, weight, bias, [False, True, False], **close(dtype))
    check(aten.native_layer_norm.default, x, [5], None, None, 1e-5, **close(dtype))
    check(aten.native_layer_norm.default, x[:0], [5], None, None, 1e-5, **close(dtype))
    _, mean, rstd = aten.native_layer_norm(x, [5], None, None, 1e-5)
    mask = [True, False, False]
    check(aten.native_layer_norm_backward.default, grad, x, [5], mean, rstd, None, None, mask, **close(dtype))


@pytest.mark.parametrize(("dtype", "parameter_dtype"), DTYPES)
@pytest.mark.parametrize("group", [1, 2, 6])
def test_group_norm(group: int, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    x, grad = sample(2, 6, 3, 2, dtype=dtype), sample(2, 6, 3, 2, dtype=dtype, seed=1)
    weight, bias = (sample(6, dtype=parameter_dtype, seed=seed) for seed in (2, 3))
    check(aten.native_group_norm.default, x, weight, bias, 2, 6, 6, group, 1e-5, **close(dtype))
    check(aten.native_group_norm.default, x, None, None, 2, 6, 6, group, 1e-5, **close(dtype))
    _, mean, rstd = aten.native_group_norm(x, weight, bias, 2, 6, 6, group, 1e-5)
    backward = aten.native_group_norm_backward.default
    for mask in ([True, True, True], [True, False, False]):
        check(backward, grad, x, mean, rstd, weight, 2, 6, 6, group, mask, **close(dtype))


@pytest.mark.parametrize(("dtype", "parameter_dtype"), DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 3), (4, 3, 5)])
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    x, grad = sample(*shape, dtype=dtype), sample(*shape, dtype=dtype, seed=1)
    weight, bias, running_mean = (sample(3, dtype=parameter_dtype, seed=seed) for seed in (2, 3, 4))
    running_var = running_mean.abs() + 0.5
    affine, running = (weight, bias), (running_mean, running_var)
    for training in (True, False):
        check(
            aten._native_batch_norm_legit_functional.default, x, *affine, *running, training, 0.1, 1e-5, **close(dtype)
        )
    check(aten.native_batch_norm.default, x, *affine, *running, False, 0.1, 1e-5, **close(dtype))
    check(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5, **close(dtype))
    check(aten._native_batch_norm_legit.no_stats, x, *affine, True, 0.1, 1e-5, **close(dtype))
    check(aten._native_batch_norm_legit_no_training.default, x, *affine, *running, 0.1, 1e-5, **close(dtype))
    check(aten._batch_norm_with_update_functional.default, x, *affine, *running, 0.1, 1e-5, **close(dtype))
    check(aten._batch_norm_no_update.default, x, *affine, *running, 0.1, 1e-5, **close(dtype))
    _, mean, rstd = aten.native_batch_norm(x, *affine, running_mean.clone(), running_var.clone(), True, 0.1, 1e-5)
    backward = aten.native_batch_norm_backward.default
    for training in (True, False):
        for mask in ([True, True, True], [True, False, False]):
            check(backward, grad, x, weight, *running, mean, rstd, training, 1e-5, mask, **close(dtype))
    check(backward, grad, x, None, *running, mean, rstd, True, 1e-5, [True, False, False], **close(dtype))


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim: int) -> None:
    v, grad = sample(3, 4, 2), sample(3, 4, 2, seed=1)
    g = sample(*(size if axis == dim else 1 for axis, size in enumerate(v.shape)), seed=2)
    check(aten._weight_norm_interface.default, v, g, dim, **close(v.dtype))
    norms = aten._weight_norm_interface(v, g, dim)[1]
    check(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim, **close(v.dtype))


def test_batch_norm_of_channels_last_keeps_the_layout() -> None:
    x = sample(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5, **close(x.dtype))


def test_batch_norm_that_updates_in_place_stays_extern() -> None:
    arguments = (sample(4, 3), None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    check(aten.native_batch_norm.default, *arguments[:3], None, None, *arguments[5:], rtol=1e-4, atol=1e-5)
    graph, inputs, _ = aten_graph(aten.native_batch_norm.default, *arguments)
    with pytest.raises(AssertionError, match="in place"):
        run_decomposed(graph, inputs)


@pytest.mark.parametrize(("dtype", "parameter_dtype"), DTYPES)
def test_rms_norm(dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    weight = sample(5, dtype=parameter_dtype, seed=2)
    for eps in (1e-5, None):
        check(aten._fused_rms_norm.default, x, [5], weight, eps, **close(dtype))
        check(aten._fused_rms_norm.default, x * 1e-3, [5], weight, eps, **close(dtype))
        check(aten._fused_rms_norm.default, x, [5], None, eps, **close(dtype))
    if dtype == parameter_dtype:
        check(aten.rms_norm.default, x, [5], weight, 1e-6, **close(dtype))


def test_rms_norm_backward_is_the_gradient() -> None:
    x, weight, grad = sample(3, 5).requires_grad_(), sample(5, seed=1).requires_grad_(), sample(3, 5, seed=2)
    rstd = (x * x).mean(-1, keepdim=True).add(1e-5).rsqrt()
    wanted = torch.autograd.grad(x * rstd * weight, (x, weight), grad)
    # ATen has this operator on accelerators only: the graph is made with a stand-in that has its results.
    graph, inputs = fx.Graph(), [grad, x.detach(), rstd.detach(), weight.detach()]
    nodes = [graph.placeholder(f"x{i}") for i in range(4)]
    for node, tensor in zip(nodes, inputs, strict=True):
        node.meta["val"] = meta_of(tensor)
    arguments = (nodes[0], nodes[1], [5], nodes[2], nodes[3], [True, True])
    call = graph.call_function(aten._fused_rms_norm_backward.default, arguments)
    call.meta.update(val=(meta_of(inputs[1]), meta_of(inputs[3])), frame="")
    parts = [graph.call_function(operator.getitem, (call, i)) for i in range(2)]
    graph.output(tuple(parts))
    actual = eager.run(decompose(graph, strict=True), inputs)
    torch.testing.assert_close(actual, tuple(wanted))
