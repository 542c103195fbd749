"""Our own shape rules: whatever they answer is what the real operator returns; where eager raises they are silent."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torchlazy.lazy.shapes import infer as inference
from torchlazy.lazy.shapes.registry import has_rule, infer_by_rule
from torchlazy.lazy.trace.geometry import Geometry, geometry_like

from tests.opinfo import samples

CPU = torch.device("cpu")
ATEN = torch.ops.aten
LAYOUTS = ("plain", "permuted", "expanded", "sliced", "channels last", "odd strides")
# Entries whose operators, forward and backward, have rules.
DATABASE = (
    "add", "sub", "rsub", "mul", "div.no_rounding_mode", "maximum", "minimum", "eq", "lt", "ge", "where", "addcmul",
    "addcdiv", "lerp", "clamp", "clamp_min", "pow", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "neg", "abs",
    "logical_and", "logical_not", "bitwise_and", "bitwise_not", "masked_fill", "nn.functional.relu",
    "nn.functional.gelu", "nn.functional.silu", "nn.functional.leaky_relu", "nn.functional.hardtanh", "mm", "addmm",
    "bmm", "baddbmm", "matmul", "nn.functional.linear", "sum", "mean", "amax", "amin", "any", "all", "argmax",
    "linalg.vector_norm",
    "softmax", "log_softmax", "nn.functional.layer_norm", "nn.functional.embedding", "nn.functional.nll_loss",
    "nn.functional.cross_entropy", "nn.functional.mse_loss", "cat", "index_select", "zeros_like", "ones_like",
    "full_like", "empty_like", "clone", "to", "fill", "zero_", "new_zeros", "new_ones", "zeros", "ones", "full",
    "arange", "nn.functional.scaled_dot_product_attention", "nn.functional.conv2d",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)


def laid_out(x: Any, layout: str) -> Any:
    """The same values in other memory."""
    if not isinstance(x, torch.Tensor) or not x.dim() or x.layout is not torch.strided:
        return x
    if layout == "permuted":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return x.select(0, 0).expand_as(x) if x.shape[0] else x
    if layout == "sliced":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.clone()
    if layout == "odd strides":  # those of sizes of 1 say nothing
        strides = [
            s if n != 1 else 7 + d for d, (n, s) in enumerate(zip(x.shape, x.contiguous().stride(), strict=True))
        ]
        return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
    return x


def geoms(value: Any) -> Any:
    """Geometry in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return geometry_like(value, CPU, "cpu")
    if isinstance(value, (list, tuple)):
        return [geoms(item) for item in value]
    return value


def made(value: Any) -> Any:
    """The geometry of real results, as rules tell it."""
    if isinstance(value, torch.Tensor):
        return geometry_like(value, CPU, "cpu")
    if isinstance(value, (list, tuple)):
        return tuple(made(item) for item in value)
    return value


class Check(TorchDispatchMode):
    """Asks the rules about every operator that runs, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        is_ours = all(x.layout is torch.strided and not x.is_conj() for x in leaves if isinstance(x, torch.Tensor))
        given, named = geoms(list(args)), {name: geoms(value) for name, value in kwargs.items()}
        answer = infer_by_rule(op, given, named, CPU, "cpu") if is_ours else None
        self.asked[str(op)] += has_rule(op)
        try:
            result = op(*args, **kwargs)
        except Exception as error:
            assert answer is None, f"{op}{given}{named} raises {error}, the rule says {answer}"
            raise
        if answer is None:
            return result
        self.answered[str(op)] += 1
        found = made(result)
        is_write = op._schema.is_mutable
        if is_write and op._schema.returns == []:
            found = tuple(made(args[0]))
        if is_write:  # the rule tells the values to write; the target's own strides stay
            assert facts(answer[0]) == facts(found), f"{op}{given}{named}"
        else:
            assert answer[0] == found, f"{op}{given}{named}\nrule {answer[0]}\nreal {found}"
        assert answer[1] == (given, named)
        return result


def facts(value: Any) -> Any:
    if isinstance(value, Geometry):
        return value.shape, value.dtype
    return tuple(map(facts, value))


def leaf(x: Any) -> Any:
    """Floating tensors want a gradient."""
    return x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def run_entry(check: Check, name: str, dtype: torch.dtype, layout: str, limit: int) -> None:
    """Some samples of an operator, with its gradient where it has one."""
    op = samples.database()[name]
    if not samples.supports(op, dtype, gradient=False):
        return
    gradient = samples.supports(op, dtype, gradient=True)
    for sample in samples.samples_of(op, dtype, gradient=False, limit=limit):
        flat, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        flat = [laid_out(x, layout) for x in flat]
        if gradient:
            flat = [
                x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in flat
            ]
        first, args, kwargs = pytree.tree_unflatten(flat, spec)
        try:
            with check:
                result = op(first, *args, **kwargs)
                outs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
                if outs:
                    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
        except AssertionError:
            raise
        except Exception:  # a layout, or a gradient, may be more than the operator takes
            continue


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_tell_what_eager_does(layout: str) -> None:
    check = Check()
    for name in DATABASE:
        for dtype in DTYPES if layout == "plain" else (torch.float32, torch.int64):
            run_entry(check, name, dtype, layout, 1 if dtype in (torch.float64, torch.int32) else 2)
    assert sum(check.answered.values()) > 0.3 * sum(check.asked.values())


def random_operand(choose: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that broadcasts to `shape`, in memory of some order, with gaps, expanded or plain."""
    own = tuple(1 if choose.random() < 0.25 else n for n in shape)
    own = own[choose.randrange(len(own) + 1) if choose.random() < 0.2 else 0 :]
    order = list(range(len(own)))
    if choose.random() < 0.7:
        choose.shuffle(order)
    strides, step = [0] * len(own), choose.choice((1, 1, 1, 2))
    for dim in order:
        strides[dim] = 0 if choose.random() < 0.1 else step
        step *= max(own[dim], 1) + (choose.random() < 0.1)
    if choose.random() < 0.3:
        return torch.ones(own, dtype=dtype)
    span = 1 + sum(max(n - 1, 0) * s for n, s in zip(own, strides, strict=True))
    return torch.ones(span, dtype=dtype).as_strided(own, strides)


CALLS: dict[str, Any] = {
    "add": lambda a, b, c: a + b,
    "add number": lambda a, b, c: a + 2,
    "rsub": lambda a, b, c: 1.5 - a,
    "mul": lambda a, b, c: a * b,
    "div": lambda a, b, c: a / b,
    "compare": lambda a, b, c: a < b,
    "exp": lambda a, b, c: a.exp(),
    "where": lambda a, b, c: torch.where(a.bool(), b, c),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.5),
    "lerp": lambda a, b, c: torch.lerp(a, b, 0.5),
    "gelu backward": lambda a, b, c: ATEN.gelu_backward(a, b),
    "in place": lambda a, b, c: a.mul_(b),
    "copy": lambda a, b, c: a.copy_(b),
    "zeros_like": lambda a, b, c: torch.zeros_like(a),
    "cast": lambda a, b, c: a.to(torch.float64),
    "cat": lambda a, b, c: torch.cat([a, b], 0),
    "sum": lambda a, b, c: a.sum(0),
    "softmax": lambda a, b, c: a.softmax(-1),
    "rectified": lambda a, b, c: ATEN._add_relu.Scalar(a, 2, 3),
    "extremes": lambda a, b, c: ATEN._aminmax.default(a),
    "extremes along": lambda a, b, c: (ATEN._aminmax.dim(a, -1, True), ATEN._aminmax.dim(a, 0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_rules_on_random_layouts(name: str) -> None:
    choose = random.Random(name)
    check = Check()
    for _ in range(300):
        rank = choose.choice((1, 2, 3, 4, 4, 5))
        shape = tuple(choose.choice((0, 1, 1, 2, 3, 5)) if choose.random() < 0.9 else 1 for _ in range(rank))
        dtypes = [torch.float32] * 3 if choose.random() < 0.7 else [choose.choice(DTYPES) for _ in range(3)]
        operands = [random_operand(choose, shape, dtype) for dtype in dtypes]
        try:
            with check:
                CALLS[name](*operands)
        except AssertionError:
            raise
        except (RuntimeError, IndexError):
            continue
    assert sum(check.answered.values()) > 20


def foreach_calls() -> Iterator[Any]:
    yield lambda a, b, c: torch._foreach_add_(a, b, alpha=0.5)
    yield lambda a, b, c: torch._foreach_mul_(a, 0.5)
    yield lambda a, b, c: torch._foreach_lerp_(a, b, 0.1)
    yield lambda a, b, c: torch._foreach_addcmul_(a, b, c, 2.0)
    yield lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [0.5] * len(a))
    yield lambda a, b, c: torch._foreach_sqrt(a)
    yield lambda a, b, c: torch._foreach_div_(a, [2.0] * len(a))
    yield lambda a, b, c: torch._foreach_norm(a, 2)
    yield lambda a, b, c: torch._foreach_mul_(a, torch.tensor(0.5))
    yield lambda a, b, c: torch._foreach_zero_(a)
    yield lambda a, b, c: torch._foreach_add(a, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_of_lists(layout: str) -> None:
    check = Check()
    shapes = ((3, 4), (4,), (), (3, 4), (1, 5), (2, 0))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for call in foreach_calls():
            lists = [[laid_out(torch.ones(shape, dtype=dtype), layout) for shape in shapes] for _ in range(3)]
            try:
                with check:
                    call(*lists)
            except (RuntimeError, IndexError):
                continue
    if layout == "plain":
        assert sum(check.answered.values()) >= 20


def test_a_rule_costs_no_fake_tensor() -> None:
    a = geometry_like(torch.ones(3, 4), CPU, "cpu")
    first, _ = inference.infer(ATEN.add.Tensor, (a, a), {}, CPU, "cpu")
    assert first is a


def test_rules_leave_errors_to_eager() -> None:
    a, b = (geometry_like(torch.ones(shape), CPU, "cpu") for shape in ((3, 4), (3, 5)))
    assert infer_by_rule(ATEN.add.Tensor, (a, b), {}, CPU, "cpu") is None
    assert infer_by_rule(ATEN.mm.default, (a, b), {}, CPU, "cpu") is None
    assert infer_by_rule(ATEN._foreach_add.List, ([a], [b]), {}, CPU, "cpu") is None
    assert infer_by_rule(ATEN.add.Tensor, (a, a), {}, torch.device("xpu"), "xpu:0") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("base", [2.5, 2, 1.0, True])
def test_powers_of_a_number_are_contiguous(base, dtype) -> None:
    exponent = (torch.rand(4, 6) + 1).t().to(dtype)
    if dtype is torch.bool and base is True:
        return  # eager has no kernel for it
    for view in (exponent, exponent[::2], exponent[None].expand(2, 6, 4)):
        want = torch.pow(base, view)
        with torchlazy.lazy_mode():
            have = torch.pow(base, view)
        found = torch.pow(base, view.to("lazy"))
        assert (have.stride(), have.dtype) == (found.stride(), found.dtype) == (want.stride(), want.dtype)
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(found.cpu(), want)


@pytest.mark.parametrize("name", ["rectified", "extremes", "extremes along"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_recorded_with_eagers_values(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 4, 24, dtype=dtype).view(4, 6).t()
    torchlazy.reset_metrics()
    found = CALLS[name](x.to("lazy"), None, None)
    assert not torchlazy.metrics()["fallbacks"]
    for mine, eager in zip(pytree.tree_leaves(found), pytree.tree_leaves(CALLS[name](x, None, None)), strict=True):
        assert mine.stride() == eager.stride()
        torch.testing.assert_close(mine.cpu(), eager)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_norms_of_halves_with_parameters_of_any_dtype(half: torch.dtype) -> None:
    check, accepted = Check(), 0
    for weight, bias, x in itertools.product(
        (None, half, torch.float32), (None, half, torch.float32),
        (torch.randn(2, 3, 8), torch.randn(2, 8, 1, 1).permute(0, 2, 3, 1), torch.randn(4, 1, 8).permute(1, 0, 2)),
    ):  # fmt: skip
        given = [x.to(half).requires_grad_()]
        given += [None if dtype is None else torch.randn(8).to(dtype).requires_grad_() for dtype in (weight, bias)]
        try:
            with check:
                y = torch.nn.functional.layer_norm(given[0], [8], *given[1:])
                y.backward(torch.ones_like(y))
        except RuntimeError as error:
            assert "dtype" in str(error) or "scalar type" in str(error)
            continue
        accepted += 1
    assert check.answered["aten.native_layer_norm.default"] == accepted >= 18
    assert check.answered["aten.native_layer_norm_backward.default"] == accepted
