"""`torchlazy.compile(model, quantize="int8-dynamic")`: what the formula gives, for weights as they are at each call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.ops.int8_linear import weight_limit

WIDTH = 768
pytestmark = pytest.mark.usefixtures("operator_by_operator")


class Conv1D(nn.Module):
    """As transformers has it: its weight is (in_features, out_features)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer) * 0.05), nn.Parameter(torch.randn(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3)
    return nn.Sequential(*layers).to(dtype).eval()


def _compiled(model: Any, **settings: Any) -> Any:
    return torchlazy.compile(model, quantize="int8-dynamic", **settings)


def _by_formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    scale, scales = x.abs().max() / 127, weight.abs().amax(1) / weight_limit()
    rounded, rows = (x / scale).round().double(), (weight / scales[:, None]).round().double()
    found = rounded @ rows.t() * scale * scales
    return (found if bias is None else found + bias).float()


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (5, WIDTH), (2, 3, WIDTH)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_is_the_formula(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
    compiled = _compiled(nn.Sequential(layer))
    for _ in range(9):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), _by_formula(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)
    assert compiled.report().replays >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_stays_close_and_its_own_is_not_changed(dtype: torch.dtype) -> None:
    model = _model(dtype)
    compiled = _compiled(model)
    for rows in (1, 7, 7, 7, 1, 1):
        x = torch.randn(rows, WIDTH, dtype=dtype)
        have, want = compiled(x), model(x)
        assert have.dtype == dtype
        assert (have - want).float().norm() < 0.05 * want.float().norm()
        assert not torch.equal(have, want)
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear, nn.Linear]
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert any("2 linear layers in int8, 1 as they are" in reason for reason in compiled.report().reasons)


@torch.no_grad()
def test_weights_are_quantized_again_where_they_changed() -> None:
    model, other = _model(), _model()
    compiled = _compiled(model, audit=False)
    x = torch.randn(4, WIDTH)

    def is_close() -> bool:
        return bool((compiled(x) - model(x)).norm() < 0.05 * model(x).norm())

    assert all(is_close() for _ in range(4))
    model[0].weight.mul_(-3)
    assert all(is_close() for _ in range(2))
    other[2].weight.copy_(torch.randn(WIDTH, 2 * WIDTH))
    model.load_state_dict(other.state_dict())
    assert is_close()
    model[2].weight.data = torch.randn(WIDTH, 2 * WIDTH)
    assert is_close()
    model[0].weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
    assert is_close()
    model[3].bias.add_(100)
    assert is_close()
    model[0].register_forward_hook(lambda layer, given, result: result * 2)
    assert is_close()


@torch.no_grad()
def test_layers_of_transformers_shared_layers_and_copies() -> None:
    torch.manual_seed(0)
    layer = Conv1D(WIDTH, WIDTH)
    model = nn.Sequential(layer, nn.Sequential(layer, nn.Tanh()), nn.Linear(WIDTH, WIDTH))
    compiled = _compiled(model)
    x = torch.randn(3, WIDTH)
    want = model(x)
    assert (compiled(x) - want).norm() < 0.05 * want.norm()
    again = copy.deepcopy(compiled)
    assert torch.equal(again(x), compiled(x))
    again[2].weight.zero_()
    assert again(x).abs().max() <= model[2].bias.abs().max()
    assert (compiled(x) - want).norm() < 0.05 * want.norm()


@torch.no_grad()
def test_autocast_zeros_and_what_is_no_number() -> None:
    model = _model()
    compiled = _compiled(model)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(torch.randn(3, WIDTH)).dtype == torch.bfloat16
    torch.testing.assert_close(compiled(torch.zeros(3, WIDTH)), model(torch.zeros(3, WIDTH)), rtol=0.05, atol=0.05)
    assert compiled(torch.full((3, WIDTH), float("nan"))).isnan().all()
    assert compiled(torch.randn(0, WIDTH)).shape == (0, 3)


def test_what_is_refused() -> None:
    compiled = _compiled(_model())
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        compiled(torch.randn(3, WIDTH, requires_grad=True))
    with pytest.raises(TypeError, match="compile the module"):
        _compiled(lambda x: x)
    with pytest.raises(ValueError, match="leave quantize out"):
        _compiled(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="int8-dynamic"):
        torchlazy.compile(_model(), quantize="int4")
    with pytest.raises(ValueError, match=r"\.cpu\(\)"):
        _compiled(_model().to("lazy"))


def test_products_of_the_largest_values_are_exact() -> None:
    """What this CPU cannot add up in int8 is not asked of it."""
    signs = torch.where(torch.arange(256) % 3 == 0, -1, 1)
    rows = (signs * 127).to(torch.int8).expand(8, 256).contiguous()
    weight = (signs * weight_limit()).to(torch.int8).expand(64, 256).contiguous()
    for x in (rows, -rows, rows.abs()):
        found = torch.ops.torchlazy.int8_linear(x, torch.ones(()), weight, torch.ones(64), None, torch.float32)
        torch.testing.assert_close(found, x.float() @ weight.float().t(), rtol=0, atol=0)
