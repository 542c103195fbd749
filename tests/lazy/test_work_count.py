"""`flops`: formulas equal torch's own counter, hold at other sizes, and counting leaves no trace."""

from __future__ import annotations

import copy

import pytest
import sympy
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torchlazy.lazy.inspect.flops.sizes import NoFormula, SizeFormulas
from torchlazy.lazy.inspect.flops.trace import CannotCount


def counted_by_torch(fn: object, *args: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops()


class ConvNet(nn.Module):
    """Strides, pooling, a transposed convolution and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.point = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(images))), 3, 2, 1)
        x = x + self.point(self.middle(x))
        return self.head(self.up(x).mean((2, 3)))


class Attention(nn.Module):
    """One transformer layer over (batch, length, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 3, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def training(model: nn.Module):
    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 3))


MODELS = {
    "perceptron": (perceptron, (5, 7), {"x_0": 11}, (11, 7)),
    "three dimensions": (perceptron, (4, 6, 7), {"x_0": 3, "x_1": 9}, (3, 9, 7)),
    "convolutions": (ConvNet, (4, 3, 20, 26), {"x_0": 3, "x_2": 33, "x_3": 21}, (3, 3, 33, 21)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_products_equal_torchs_count_at_any_size(name, train):
    make, shape, sizes, other = MODELS[name]
    model = make()
    step = training(model) if train else (lambda x: model(x))
    found = torchlazy.flops(step, torch.randn(shape))
    assert found.at().products == counted_by_torch(step, torch.randn(shape))
    assert found.at(**sizes).products == counted_by_torch(step, torch.randn(other))
    there = torchlazy.flops(step, torch.randn(other))
    assert found.at(**sizes) == there.at()  # what is not a product, and bytes


@pytest.mark.parametrize("train", [False, True])
def test_attention_is_two_products_forward_and_five_backward(train):
    model = Attention()
    step = training(model) if train else model.forward
    x = torch.randn(4, 10, 12)
    found = torchlazy.flops(step, x)
    q = (4, 3, 10, 4)
    attention = sdpa_flop_count(q, q, q) + (sdpa_backward_flop_count(q, q, q, q) if train else 0)
    assert found.at().products == counted_by_torch(step, x) + attention
    batch, length = map(_symbol, ("x_0", "x_1"))
    rest = found.at(x_0=7, x_1=33)
    assert sympy.Poly(found.products, batch, length).degree(length) == 2
    assert rest == torchlazy.flops(step, torch.randn(7, 33, 12)).at()


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def test_formulas_of_a_product():
    found = torchlazy.flops(lambda x, w: (x @ w).relu(), torch.randn(6, 8), torch.randn(8, 5))
    m, k, n = map(_symbol, ("x_0", "x_1", "w_1"))
    assert found.products == 2 * m * k * n
    assert sympy.expand(found.flops - 2 * m * k * n - m * n) == 0
    assert sympy.expand(found.bytes - 4 * (m * k + k * n + m * n) - 4 * 2 * m * n) == 0
    assert found.symbols == {"x_0": 6, "x_1": 8, "w_1": 5}
    assert [(row.op, row.kind, row.calls) for row in found.by_op] == [
        ("aten.mm.default", "product", 1),
        ("aten.relu.default", "pointwise", 1),
    ]
    assert "aten.mm.default" in str(found)


def test_grouped_convolutions_multiply_within_a_group():
    """By hand: torch's counter leaves the groups out of the kernel's gradient."""
    model = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
    x = torch.randn(2, 8, 5, 7, requires_grad=True)
    once = 2 * (2 * 8 * 5 * 7) * (8 // 4) * 9
    assert torchlazy.flops(model, x).at().products == once
    assert torchlazy.flops(lambda x: model(x).sum().backward(), x).at().products == 3 * once
    assert x.grad is None and model.weight.grad is None


def test_inner_sizes_must_be_equal_and_the_line_says_where():
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    found = torchlazy.flops(run, torch.randn(6, 8), torch.randn(8, 5))
    (constraint,) = found.constraints
    assert constraint.condition == sympy.Eq(_symbol("w_0"), _symbol("x_1"))
    assert "test_work_count.py:" in constraint.why
    assert found.at(x_1=16, w_0=16).products == 2 * 6 * 16 * 5
    assert found.at(x_1=16).products == 2 * 6 * 16 * 5  # w_0 follows
    with pytest.raises(ValueError, match="w_0 must be x_1, which is 16, not 9"):
        found.at(x_1=16, w_0=9)
    with pytest.raises(ValueError, match="x_7"):
        found.at(x_7=1)


def test_divisibility_of_a_view_is_found():
    found = torchlazy.flops(lambda x: x.view(x.shape[0], 4, -1).exp().sum(1), torch.randn(5, 24))
    (constraint,) = found.constraints
    assert constraint.condition.subs({_symbol("x_1"): 36}) == sympy.true
    assert constraint.condition.subs({_symbol("x_1"): 30}) == sympy.false
    assert found.at(x_1=40).flops == 5 * 40 + 5 * 40
    with pytest.raises(ValueError, match="break"):
        found.at(x_1=30)
    assert "invalid for input of size" in found.raises_for(x_1=30)
    assert found.raises_for(x_1=40) is None


def test_sizes_that_weights_fix_are_constants():
    model = perceptron()
    found = torchlazy.flops(model, torch.randn(5, 7))
    assert found.symbols == {"input_0": 5}
    (constraint,) = found.constraints
    assert constraint.condition == sympy.Eq(_symbol("input_1"), 7)
    assert "RuntimeError" in found.raises_for(input_1=8)


def test_a_size_in_proportion_to_others():
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets)

    found = torchlazy.flops(loss, torch.randn(3, 5, 11), torch.randint(11, (15,)))
    assert set(found.symbols) == {"logits_0", "logits_1", "logits_2"}
    wanted = sympy.Eq(_symbol("targets_0"), _symbol("logits_0") * _symbol("logits_1"))
    assert wanted in [constraint.condition for constraint in found.constraints]
    assert found.at(logits_0=4, logits_1=6).flops > found.at().flops


def test_broadcasting_sizes_of_one_stay():
    found = torchlazy.flops(lambda x, y: x * y, torch.randn(6, 4), torch.randn(6, 1))
    assert found.at().flops == 24
    assert found.at(x_0=9, y_0=9).flops == 36
    assert "y_1" not in found.symbols or found.raises_for(y_1=3)


def test_joined_sizes_are_sums():
    found = torchlazy.flops(lambda x, y: torch.cat([x, y]).exp(), torch.randn(6, 4), torch.randn(9, 4))
    x, y, width = map(_symbol, ("x_0", "y_0", "x_1"))
    assert sympy.expand(found.flops - (x + y) * width) == 0


def test_counting_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step(torch.randn(5, 6))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients]
    random = torch.get_rng_state()
    torchlazy.reset_metrics()
    found = torchlazy.flops(step, torch.randn(5, 6, generator=torch.Generator().manual_seed(1)))
    assert found.at().flops > 0
    assert any("addcdiv" in row.op for row in found.by_op)
    assert torchlazy.metrics()["cuts"] == {}
    assert torch.equal(torch.get_rng_state(), random)
    for p, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, value)
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, state, rtol=0, atol=0)
    step(torch.randn(5, 6))  # and all of it still works


def test_models_on_the_lazy_device_are_counted_and_left_alone():
    model = perceptron().to("lazy")
    pending = model[0].weight * 2
    found = torchlazy.flops(training(model), torch.randn(5, 7).to("lazy"))
    there = torchlazy.flops(training(perceptron()), torch.randn(5, 7))
    assert found.at().products == there.at().products
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(pending.cpu(), model[0].weight.detach().cpu() * 2)
    training(model)(torch.randn(5, 7).to("lazy"))
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_what_needs_a_value_cannot_be_counted():
    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(CannotCount, match=r"test_work_count\.py:\d+ needs a value \(item\)"):
        torchlazy.flops(run, torch.ones(3))
    with pytest.raises(CannotCount, match="nonzero"):
        torchlazy.flops(torch.nonzero, torch.ones(3))
    assert torchlazy.metrics()["cuts"].get("item", 0) == 0
    assert (torch.ones(3).to("lazy") + 1).tolist() == [2, 2, 2]


def test_an_error_of_the_function_comes_through():
    def run(x: torch.Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torchlazy.flops(run, torch.ones(3))


def test_the_fused_program_moves_fewer_bytes():
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.relu(x * 2 + 1)
        return x

    found = torchlazy.flops(chain, torch.randn(32, 32))
    assert found.at().bytes == 30 * 2 * 4 * 1024
    assert found.fused() == (1, 0, 2 * 4 * 1024)
    assert found.fused(x_0=64) == (1, 0, 2 * 4 * 2048)


def test_size_formulas():
    a, b = _symbol("a"), _symbol("b")
    formulas = SizeFormulas({a: (8, 9, 10, 12, 31), b: (5, 5, 7, 11, 6)})
    rows = list(zip((8, 9, 10, 12, 31), (5, 5, 7, 11, 6), strict=True))
    for wanted in (a * b, 3 * a, a + b, a - 1, 2 * a + 4, sympy.floor((a - 1) / 2) + 1, a * b + a, sympy.Integer(4)):
        vector = tuple(int(wanted.subs({a: x, b: y})) for x, y in rows)
        found = formulas.expression(vector)
        assert all(found.subs({a: x, b: y}) == v for (x, y), v in zip(rows, vector, strict=True))
        assert found.subs({a: 50, b: 13}) == wanted.subs({a: 50, b: 13})
    with pytest.raises(NoFormula):
        formulas.expression((1, 17, 3, 90, 4))


@pytest.mark.parametrize("train", [False, True])
def test_recurrent_layers_are_their_products(train):
    """oneDNN's operator for a layer, whose workspace is of no formula, counts as the cell's products do."""
    layer = nn.LSTM(5, 7, num_layers=2, batch_first=True)
    step = (lambda x: layer(x)[0].square().mean().backward()) if train else (lambda x: layer(x)[0])
    found = torchlazy.flops(step, torch.randn(3, 11, 5))
    products = 2 * 4 * 7 * (5 + 7 + 7 + 7)  # a position: four gates of inputs and states, in two layers
    assert found.at(x_0=6, x_1=9).products == 6 * 9 * products * (3 if train else 1)


def test_bounds_of_sizes_are_constraints():
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 2, 5))
    positions = torch.randn(64, 3)
    found = torchlazy.flops(layer, torch.randn(2, 3, 20, 21))
    least = [c for c in found.constraints if isinstance(c.condition, sympy.Ge)]
    assert [str(c.condition) for c in least] == ["input_2 >= 11", "input_3 >= 11"]
    assert "Kernel size can't be greater than actual input size" in least[0].why
    for height in range(7, 15):
        raises = found.raises_for(input_2=height) is not None
        assert raises == (height < 11)
        if raises:
            with pytest.raises(ValueError, match="these sizes break input_2 >= 11"):
                found.at(input_2=height)
    found = torchlazy.flops(lambda x: x + positions[: len(x)] + x[3], torch.randn(10, 3))
    assert {"x_0 >= 4", "x_0 <= 64"} <= {str(c.condition) for c in found.constraints}


def test_strides_wider_than_the_smallest_steps():
    """The positions of a patch embedding, and an unpooling of what was pooled."""
    patches = nn.Conv2d(3, 4, 14, stride=14)
    found = torchlazy.flops(patches, torch.randn(2, 3, 42, 56))
    for height, width in ((42, 56), (84, 70), (97, 200)):
        sizes = {"input_2": height, "input_3": width}
        assert found.at(**sizes).products == counted_by_torch(patches, torch.randn(2, 3, height, width))
    found = torchlazy.flops(
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), torch.randn(2, 8, 12)
    )
    assert found.at(x_1=16).flops == 2 * found.at().flops


def test_sizes_of_zero():
    found = torchlazy.flops(lambda x, y: x @ y, torch.randn(3, 4), torch.randn(4, 5))
    assert found.at(x_1=0) == found.at(x_1=0, y_0=0) == (0, 0, 4 * 3 * 5)


def test_masks_that_libraries_look_at_are_not_looked_at():
    """transformers asks whether a mask is all ones, but not of a program that is exported."""

    def masked(x, mask):
        if not torch.compiler.is_exporting() and mask.all():
            return x @ x.t()
        return (x @ x.t()) * mask

    found = torchlazy.flops(masked, torch.randn(6, 5), torch.ones(6, 6, dtype=torch.bool))
    assert found.at(x_0=8).products == 2 * 8 * 8 * 5
    assert not torch.compiler.is_exporting()
