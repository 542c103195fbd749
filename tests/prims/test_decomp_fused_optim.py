"""Fused optimizers: every list that the functional operators return, against the fused CPU kernels."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torchlazy.prims import eager
from torchlazy.prims.decompose import Fallback, decompose
from torchlazy.prims.meta import ScalarMeta, meta_of

aten = torch.ops.aten
SHAPES = ((3, 4), (7,), ())


def tensors(seed: int, dtype: torch.dtype = torch.float32, *, positive: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [(x.abs() if positive else x).to(dtype) for x in made]


def _frozen(part: Any) -> Any:
    return part if isinstance(part, torch.Tensor) else tuple(part)


def compare(overload: Any, *args: Any, runtime: dict[str, float] | None = None, **kwargs: Any) -> None:
    """The decomposition of one call against ATen, list by list; `runtime` keywords are inputs of the program."""
    runtime = runtime or {}
    expected = overload(*pytree.tree_map(lambda x: x, args), **kwargs, **runtime)
    graph = fx.Graph()
    inputs: list[Any] = []

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = meta_of(leaf)
        inputs.append(leaf)
        return node

    lifted_args, lifted_kwargs = pytree.tree_map(lift, (list(args), kwargs))
    for name, number in runtime.items():
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = ScalarMeta(type(number))
        inputs.append(number)
        lifted_kwargs[name] = node
    call = graph.call_function(overload, tuple(lifted_args), lifted_kwargs)
    call.meta.update(val=pytree.tree_map(meta_of, tuple(map(_frozen, expected))), frame="")
    flat = []
    for i, part in enumerate(expected):
        outer = graph.call_function(operator.getitem, (call, i))
        if isinstance(part, torch.Tensor):
            flat.append(outer)
            continue
        flat += [graph.call_function(operator.getitem, (outer, j)) for j in range(len(part))]
    graph.output(tuple(flat))
    report: list[Fallback] = []
    prims = decompose(graph, strict=True, report=report)
    assert not report
    wanted = pytree.tree_leaves(expected)
    tolerance = {"rtol": 1.6e-2, "atol": 1e-3} if wanted[0].dtype.itemsize == 2 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(list(eager.run(prims, inputs)), wanted, equal_nan=True, **tolerance)


DEFAULTS = {"weight_decay": 0.0, "maximize": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True, "weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.1},
        {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)},
        {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(1.0), "amsgrad": True},
        {"beta1": 0.3},
    ],
)
def test_adam(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    values = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, **DEFAULTS, **options}
    lists = [tensors(seed, dtype, positive=seed >= 2) for seed in range(5)]
    if not values["amsgrad"]:
        lists[4] = []
    for count in (1.0, 10.0):
        steps = [torch.tensor(count) for _ in SHAPES]
        compare(getattr(aten, name).default, *lists, steps, lr=0.01, **values)
    compare(getattr(aten, name).tensor_lr, *lists, steps, lr=torch.tensor(0.01), **values)


@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
def test_adam_with_hyperparameters_as_inputs(name: str) -> None:
    lists = [tensors(seed, positive=seed >= 2) for seed in range(4)]
    steps = [torch.tensor(3.0) for _ in SHAPES]
    runtime = {"lr": 0.02, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-7}
    compare(getattr(aten, name).default, *lists, [], steps, amsgrad=False, maximize=False, runtime=runtime)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"is_first_step": True},
        {},
        {"nesterov": True, "dampening": 0.0},
        {"maximize": True},
        {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)},
        {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(1.0)},
    ],
)
def test_sgd(options: dict[str, Any], dtype: torch.dtype) -> None:
    values = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.2, "nesterov": False, "maximize": False,
              "is_first_step": False, **options}  # fmt: skip
    lists = [tensors(seed, dtype) for seed in range(3)]
    if values["momentum"] == 0:
        lists[2] = []
    compare(aten._fused_sgd.default, *lists, lr=0.05, **values)
    compare(aten._fused_sgd.tensor_lr, *lists, lr=torch.tensor(0.05), **values)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "lr_decay": 0.1}, {"maximize": True, "grad_scale": torch.tensor(4.0)}]
)
def test_adagrad(options: dict[str, Any]) -> None:
    values = {"lr_decay": 0.0, "eps": 1e-10, **DEFAULTS, **options}
    if "grad_scale" in options:
        values["found_inf"] = torch.tensor(0.0)
    steps = [torch.tensor(5.0) for _ in SHAPES]
    compare(aten._fused_adagrad.default, tensors(0), tensors(1), tensors(2, positive=True), steps, lr=0.05, **values)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscaling_finds_what_is_not_finite(bad: float | None) -> None:
    grads = tensors(0)
    if bad is not None:
        grads[1][3] = bad
    for found in (0.0, 1.0):
        arguments = (grads, torch.tensor(found), torch.tensor(0.25))
        compare(aten._amp_foreach_non_finite_check_and_unscale.default, *arguments)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("tracker", [0, 2])
@pytest.mark.parametrize("scale", [4.0, 3e38])
def test_next_scale(scale: float, tracker: int, found: float) -> None:
    state = (torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found))
    compare(aten._amp_update_scale.default, *state, 2.0, 0.5, 3)
