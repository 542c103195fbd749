"""Lists of tensors: each value against ATen eager, and hyperparameters that are inputs of the program."""

from __future__ import annotations

import pytest
import torch
from torchlazy.prims.decomps.foreach import UNARY

from tests.prims.graphs import Runtime, aten_graph, check, run_decomposed

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(shape, generator=generator) * 0.8 + 0.1).to(dtype) for shape in ((3, 4), (), (0, 2), (5,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in UNARY if hasattr(aten, f"_foreach_{name}")])
def test_unary(name: str, dtype: torch.dtype) -> None:
    lists = tensors(dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    check(getattr(aten, f"_foreach_{name}").default, lists[:2] if name == "max" else lists, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max"])
def test_binary(name: str, dtype: torch.dtype) -> None:
    packet = getattr(aten, f"_foreach_{name}")
    x, y = tensors(dtype), tensors(dtype, seed=1)
    check(packet.List, x, y)
    check(packet.Scalar, x, 0.5)
    check(packet.ScalarList, x, [0.25, 0.5, 2.0, 3.0])
    if name in ("add", "sub"):
        check(packet.List, x, y, alpha=0.5)
    if name in ("add", "mul", "div"):
        check(packet.Tensor, x, torch.tensor(0.75, dtype=dtype))


def test_integers_promote_as_single_operators_do() -> None:
    x = [torch.tensor([1, 2, 3]), torch.tensor([4], dtype=torch.int32)]
    check(aten._foreach_add.Scalar, x, 1)
    check(aten._foreach_mul.Scalar, x, 1.5)
    check(aten._foreach_div.Scalar, x, 2)
    check(aten._foreach_sqrt.default, x)


def test_scalars_may_be_inputs_of_the_program() -> None:
    x, y, z = tensors(), tensors(seed=1), tensors(seed=2)
    calls = [
        (aten._foreach_mul.Scalar, (x, Runtime(0.9))),
        (aten._foreach_add.List, (x, y), {"alpha": Runtime(-0.1)}),
        (aten._foreach_addcdiv.ScalarList, (x, y, z, [Runtime(-0.1), Runtime(0.2), 0.3, Runtime(4.0)])),
        (aten._foreach_addcmul.Scalar, (x, y, z, Runtime(0.25))),
        (aten._foreach_lerp.Scalar, (x, y, Runtime(0.1))),
        (aten._foreach_div.ScalarList, (x, [Runtime(3.0), 2.0, 1.0, Runtime(0.5)])),
    ]
    for overload, args, *kwargs in calls:
        graph, inputs, expected = aten_graph(overload, *args, **(kwargs[0] if kwargs else {}))
        actual = run_decomposed(graph, inputs)
        torch.testing.assert_close(list(actual), list(expected), msg=str(overload))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ternary(dtype: torch.dtype) -> None:
    x, y, z = (tensors(dtype, seed=seed) for seed in (0, 1, 2))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    for name in ("addcmul", "addcdiv"):
        packet = getattr(aten, f"_foreach_{name}")
        check(packet.Scalar, x, y, z, 0.5, **tolerance)
        check(packet.ScalarList, x, y, z, [0.5, 1.0, 2.0, -1.0], **tolerance)
        check(packet.Tensor, x, y, z, torch.tensor([0.5, 1.0, 2.0, -1.0], dtype=dtype), **tolerance)
    check(aten._foreach_lerp.List, x, y, z, **tolerance)
    check(aten._foreach_lerp.Scalar, x, y, 0.3, **tolerance)
    check(aten._foreach_lerp.Scalar, x, y, 0.7, **tolerance)
    check(aten._foreach_pow.ScalarAndTensor, 2.5, x, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x = tensors(dtype)
    for order in (1, 2, float("inf")):
        lists = x[:2] if order == float("inf") else x
        check(aten._foreach_norm.Scalar, lists, order)
    check(aten._foreach_norm.Scalar, x, 2, torch.float64)
    if hasattr(aten, "_foreach_powsum"):
        for order in (0, 1, 2, 3):
            check(aten._foreach_powsum.Scalar, x, order)


def test_zero_copy_and_products() -> None:
    x = tensors()
    check(aten._foreach_zero.default, x)
    check(aten._foreach_copy.default, x, [tensor.double() for tensor in tensors(seed=1)])
    if hasattr(aten, "_foreach_mm"):
        check(aten._foreach_mm.default, [torch.ones(2, 3)], [torch.ones(3, 4)], allow_extern=True)
