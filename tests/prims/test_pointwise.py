"""Elementwise rules against ATen on CPU: values, dtypes, shapes and strides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torchlazy.tests.prims.graphs import Runtime, check

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
ALL = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
ODD = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, 3.0, -3.0, 6.0, 25.0)


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random values with the odd numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
        flat = x.view(-1)
        for i in range(min(len(ODD), flat.numel())):
            flat[(i * 3 + seed) % flat.numel()] = ODD[i]
        return x.to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, generator=generator).to(dtype)


UNARY = [
    "sqrt",
    "rsqrt",
    "reciprocal",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erfinv",
    "lgamma",
    "ceil",
    "floor",
    "trunc",
    "round",
    "neg",
    "abs",
    "sign",
    "sgn",
    "isnan",
    "isinf",
    "signbit",
    "isposinf",
    "isneginf",
    "logical_not",
    "sigmoid",
    "relu",
    "frac",
    "deg2rad",
    "rad2deg",
    "angle",
    "sinc",
    "nan_to_num",
    "square",
    "positive",
    "clone",
    "special_entr",
    "isfinite",
    "logit",
    "zero",
    "detach",
    "alias",
]


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    overload = getattr(aten, name).default
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        if (name, dtype) in ((("neg", torch.bool)), ("positive", torch.bool)):
            continue
        for shape in ((7, 9), (), (0, 3)):
            x = sample(shape, dtype)
            try:
                overload(x)
            except RuntimeError:
                continue  # ATen does not define it there
            check(overload, x)


FLOAT_ONLY = [
    "gelu",
    "silu",
    "mish",
    "hardswish",
    "hardsigmoid",
    "elu",
    "celu",
    "selu",
    "leaky_relu",
    "softplus",
    "hardtanh",
    "relu6",
    "hardshrink",
    "softshrink",
    "log_sigmoid_forward",
    "log_sigmoid",
]


@pytest.mark.parametrize("name", FLOAT_ONLY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_activation(name: str, dtype: torch.dtype) -> None:
    overload = getattr(aten, name).default
    for shape in ((7, 9), (), (0, 3)):
        x = sample(shape, dtype)
        check(overload, x.clamp(-50, 50) if name == "gelu" else x)  # ATen's CPU gelu(inf) is NaN in some builds


ACTIVATION_ARGUMENTS: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (aten.gelu.default, (), {"approximate": "tanh"}),
    (aten.elu.default, (1.5, 0.7, 0.3), {}),
    (aten.celu.default, (0.5,), {}),
    (aten.leaky_relu.default, (0.2,), {}),
    (aten.softplus.default, (2.0, 3.0), {}),
    (aten.hardtanh.default, (-0.5, 2.5), {}),
    (aten.threshold.default, (0.5, -3.0), {}),
    (aten.hardshrink.default, (0.3,), {}),
    (aten.softshrink.default, (0.3,), {}),
    (aten.logit.default, (0.1,), {}),
    (aten.nan_to_num.default, (1.0, 2.0, 3.0), {}),
)


@pytest.mark.parametrize("overload, args, kwargs", ACTIVATION_ARGUMENTS, ids=lambda v: str(v)[:30])
def test_activation_arguments(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for dtype in FLOATS:
        check(overload, sample((7, 9), dtype), *args, **kwargs)


BACKWARD: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.threshold_backward.default, (0,)),
    (aten.threshold_backward.default, (0.5,)),
    (aten.leaky_relu_backward.default, (0.1, False)),
    (aten.hardtanh_backward.default, (-1.0, 2.5)),
    (aten.softplus_backward.default, (1.0, 20.0)),
    (aten.softplus_backward.default, (2.0, 3.0)),
    (aten.sigmoid_backward.default, ()),
    (aten.tanh_backward.default, ()),
    (aten.silu_backward.default, ()),
    (aten.mish_backward.default, ()),
    (aten.hardsigmoid_backward.default, ()),
    (aten.hardswish_backward.default, ()),
    (aten.gelu_backward.default, ()),
    (aten.hardshrink_backward.default, (0.5,)),
    (aten.softshrink_backward.default, (0.5,)),
    (aten.logit_backward.default, ()),
    (aten.logit_backward.default, (0.1,)),
)


@pytest.mark.parametrize("overload, args", BACKWARD, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("dtype", FLOATS)
def test_activation_backward(overload: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad = torch.randn(7, 9).to(dtype)
    # ATen's half kernels round here and there on the way
    tolerance = {"rtol": 4e-3, "atol": 1e-4} if dtype == torch.float16 else {}
    check(overload, grad, without_nan(sample((7, 9), dtype)), *args, **tolerance)
    check(overload, grad[0, 0], torch.tensor(0.7, dtype=dtype), *args)


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """NaN and -0.0 replaced: ATen's vector and scalar loops of one kernel treat them differently."""
    return torch.where(x.isnan() | (x == 0), 0.25, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_activation_backward_with_other_forms(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad, x = torch.randn(7, 9).to(dtype), without_nan(sample((7, 9), dtype))
    check(aten.gelu_backward.default, grad, x, approximate="tanh")
    for is_result in (False, True):
        check(aten.elu_backward.default, grad, 1.5, 0.7, 0.3, is_result, x)
    buffer = aten.log_sigmoid_forward.default(x)[1]
    check(aten.log_sigmoid_backward.default, grad, x, buffer)


SHAPES = (((3, 4), (3, 4)), ((3, 1), (4,)), ((), (2, 3)), ((2, 0), (1, 1)), ((), ()))
BINARY = [
    "add.Tensor",
    "sub.Tensor",
    "rsub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "floor_divide.default",
    "remainder.Tensor",
    "fmod.Tensor",
    "pow.Tensor_Tensor",
    "atan2.default",
    "maximum.default",
    "minimum.default",
    "fmax.default",
    "fmin.default",
    "eq.Tensor",
    "ne.Tensor",
    "lt.Tensor",
    "le.Tensor",
    "gt.Tensor",
    "ge.Tensor",
    "logical_and.default",
    "logical_or.default",
    "logical_xor.default",
    "bitwise_and.Tensor",
    "bitwise_or.Tensor",
    "bitwise_xor.Tensor",
    "copysign.Tensor",
    "hypot.default",
    "xlogy.Tensor",
    "logaddexp.default",
    "logaddexp2.default",
    "heaviside.default",
    "float_power.Tensor_Tensor",
    "special_xlog1py.default",
    "bitwise_left_shift.Tensor",
    "bitwise_right_shift.Tensor",
    "ldexp.Tensor",
]


def overload_of(text: str) -> Any:
    name, overload = text.split(".")
    return getattr(getattr(aten, name), overload)


@pytest.mark.parametrize("text", BINARY)
def test_binary(text: str) -> None:
    overload = overload_of(text)
    checked = 0
    for left, right in itertools.product(ALL, ALL):
        for i, (a, b) in enumerate(SHAPES):
            if i > 2 and left != right:
                continue
            x, y = sample(a, left), sample(b, right, 1)
            if ("div" in text or "mod" in text or "remainder" in text) and not right.is_floating_point:
                y = y | 1  # no integer division by zero
            if "shift" in text:
                y = y % 8
            if "pow" in text and not (left.is_floating_point or right.is_floating_point):
                y = y % 3
            try:
                overload(x, y)
            except (RuntimeError, ZeroDivisionError):
                continue
            undefined = "fmod" in text or "remainder" in text or "shift" in text or "pow" in text or "divide" in text
            check(overload, x, y, allow_extern=undefined and torch.bool in (left, right))
            checked += 1
    assert checked > 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_nextafter_is_left_to_aten_for_halves(dtype: torch.dtype) -> None:
    check(aten.nextafter.default, sample((5,), dtype), sample((5,), dtype, 2), allow_extern=dtype.itemsize < 4)


NUMBERS = (2, -3, 0.5, 0.1, True, 1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "add.Tensor",
        "add.Scalar",
        "sub.Tensor",
        "sub.Scalar",
        "rsub.Scalar",
        "mul.Tensor",
        "mul.Scalar",
        "div.Tensor",
        "div.Scalar",
        "remainder.Scalar",
        "fmod.Scalar",
        "eq.Scalar",
        "ne.Scalar",
        "lt.Scalar",
        "le.Scalar",
        "gt.Scalar",
        "ge.Scalar",
        "copysign.Scalar",
        "xlogy.Scalar_Other",
        "floor_divide.Scalar",
        "clamp_min.default",
        "clamp_max.default",
    ],
)
def test_binary_with_number(text: str) -> None:
    overload = overload_of(text)
    for dtype, number, runtime in itertools.product(ALL, NUMBERS, (False, True)):
        x = sample((3, 4), dtype)
        if dtype == torch.uint8 and number == -3:
            continue  # ATen refuses to wrap it
        try:
            overload(x, number)
        except (RuntimeError, ZeroDivisionError):
            continue
        undefined = torch.bool in (dtype,) and isinstance(number, bool)
        check(overload, x, Runtime(number) if runtime else number, allow_extern=undefined)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_numbers_beside_halves_are_as_precise_as_in_aten(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000).to(dtype)
    for overload in (
        aten.mul.Tensor,
        aten.add.Tensor,
        aten.div.Tensor,
        aten.sub.Tensor,
        aten.eq.Scalar,
        aten.lt.Scalar,
    ):
        for number in (0.1, 1.7, 3.3e-3):
            check(overload, x, number, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("exponent", (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 1.5, -3, 2.0, True))
def test_pow_with_number(dtype: torch.dtype, exponent: float) -> None:
    x = sample((5, 5), dtype)
    for overload, args in ((aten.pow.Tensor_Scalar, (x, exponent)), (aten.pow.Scalar, (exponent, x))):
        try:
            overload(*args)
        except RuntimeError:
            continue
        if abs(exponent) == 0.5 and dtype.is_floating_point:
            args = tuple(a.abs() if isinstance(a, torch.Tensor) else a for a in args)  # paths differ at -0.0 and -inf
        check(overload, *args, allow_extern=dtype == torch.bool)
    check(aten.float_power.Tensor_Scalar, x, exponent)


def test_alpha_and_rounding_modes() -> None:
    for dtype in (*FLOATS, torch.int64, torch.uint8):
        x, y = sample((3, 4), dtype), sample((4,), dtype, 1)
        alpha: Any = 0.3 if dtype.is_floating_point else 3
        for overload in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor):
            check(overload, x, y, alpha=alpha)
            check(overload, x, y, alpha=Runtime(alpha))
        y = y if dtype.is_floating_point else y | 1
        for mode in (None, "trunc", "floor"):
            check(aten.div.Tensor_mode, x, y, rounding_mode=mode)
            check(aten.div.Scalar_mode, x, 3, rounding_mode=mode)
    check(aten.add.Tensor, sample((5,), torch.bool), sample((5,), torch.bool, 1), alpha=True)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_truncated_quotients_of_halves(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2000).mul(9).to(dtype), torch.randn(2000).to(dtype)
    check(aten.div.Tensor_mode, x, y, rounding_mode="trunc", rtol=0, atol=0)
    check(aten.div.Tensor_mode, x, torch.tensor(0.3), rounding_mode="trunc", rtol=0, atol=0)


def test_three_operands() -> None:
    for dtype in FLOATS:
        x, y, z = (sample((3, 4), dtype, seed) for seed in (0, 1, 2))
        row = sample((4,), dtype, 3)
        for overload in (aten.addcmul.default, aten.addcdiv.default):
            check(overload, x, y, row)
            check(overload, row, y, z, value=-0.3)
            check(overload, x, y, z, value=Runtime(0.7))
        for weight in (0.1, 0.9, 0.0, 1.0, -0.7):
            check(aten.lerp.Scalar, x, row, weight)
            check(aten.lerp.Scalar, x, y, Runtime(weight))
        check(aten.lerp.Tensor, x, y, row)
    check(aten.addcmul.default, *(sample((3,), torch.int64, seed) for seed in (0, 1, 2)), value=3)
    check(aten.addcmul.default, sample((3,), torch.float32), sample((3,), torch.int64), sample((3,), torch.float16))


def test_choices() -> None:
    condition = sample((3, 1), torch.bool)
    for left, right in itertools.product(ALL, ALL):
        check(aten.where.self, condition, sample((3, 4), left), sample((4,), right, 1))
        check(aten.where.self, condition, sample((), left), sample((3, 4), right, 1))
    check(aten.where.ScalarOther, condition, sample((3, 4), torch.float16), 1.5)
    check(aten.where.ScalarSelf, condition, Runtime(1.5), sample((3, 4), torch.int64))
    check(aten.where.Scalar, condition, 1.5, 2)
    for dtype in ALL:
        x = sample((3, 4), dtype)
        value = bool(1) if dtype == torch.bool else 2
        check(aten.masked_fill.Scalar, x, condition, value)
        check(aten.masked_fill.Tensor, x, condition, torch.tensor(value))
        check(aten.masked_fill.Scalar, x[:, :1], sample((3, 4), torch.bool), value)
    check(aten.masked_fill.Scalar, sample((3, 4), torch.float16), condition, -float("inf"))


def test_clamp() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        x = sample((5, 6), dtype)
        for low, high in ((1, 3), (None, 2), (1, None), (4, 2), (0.5, 2.5), (0.1, None)):
            check(aten.clamp.default, x, low, high)
        check(aten.clamp.Tensor, x, sample((6,), dtype, 1), sample((5, 1), dtype, 2))
        check(aten.clamp.Tensor, x, None, sample((), dtype, 2))
        check(aten.clamp_min.Tensor, x, sample((6,), dtype, 1))
        check(aten.clamp_max.Tensor, x, sample((6,), dtype, 1))
    check(aten.clamp.default, sample((5, 6), torch.float32), float("nan"), 2.0)
    check(aten.clamp.default, sample((5, 6), torch.int64), Runtime(1.5), Runtime(3))


def test_copies() -> None:
    everything = (*FLOATS, *INTEGERS, torch.bool, torch.int8)
    x = torch.tensor([[1.5, -2.7, 0.0], [3.2, -0.4, 100.0]])
    for source, target in itertools.product(everything, everything):
        positive = source.is_floating_point and target == torch.uint8
        check(aten._to_copy.default, (x.abs() if positive else x).to(source), dtype=target)
        check(aten.copy.default, torch.zeros(3, 2, 3, dtype=target), (x.abs() if positive else x).to(source))
    image = torch.randn(2, 3, 4, 5)
    check(aten.clone.default, image, memory_format=torch.channels_last)
    check(aten.clone.default, image.transpose(1, 2))
    check(aten.clone.default, image.transpose(1, 2), memory_format=torch.contiguous_format)
    check(aten._to_copy.default, image, dtype=torch.float16, memory_format=torch.channels_last)
    check(aten.fill.Scalar, image.to(memory_format=torch.channels_last), 3)
    check(aten.fill.Tensor, image, torch.tensor(3))
    check(aten.add.Tensor, image.to(memory_format=torch.channels_last), 1)


def test_rounding_to_decimals() -> None:
    x = sample((5, 6), torch.float32)
    for decimals in (0, 2, -1):
        check(aten.round.decimals, x * 10, decimals=decimals)


def test_complex_numbers_stay_with_aten() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    for overload, args in ((aten.add.Tensor, (x, 1)), (aten.exp.default, (x,)), (aten.mul.Tensor, (x.real, 2j))):
        check(overload, *args, allow_extern=True)


def test_sums_of_lgamma_and_rectified_sums() -> None:
    x = torch.rand(3, 4) * 5 + 3
    for p in (1, 2, 5):
        check(aten.mvlgamma.default, x, p, rtol=1e-5, atol=1e-5)
    check(aten._add_relu.Tensor, x - 5, x - 4, alpha=2)
    noise = torch.rand(3, 4)
    backward = aten.rrelu_with_noise_backward.default
    check(backward, x, x - 5, noise, 0.1, 0.3, True, False)
    check(backward, x, x - 5, noise, 0.1, 0.3, False, False)
