"""One program for all sizes: at most two compiles for each structure, and eager's results at every size.

Each program runs over a sweep. The first trace is compiled by itself, the second gives a template; sizes of 0 and 1,
where broadcasting and emptiness make other programs, come in tests of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("sizes_vary")


def lazy(*values: Any) -> list[Any]:
    return [value.to("lazy") if isinstance(value, Tensor) else value for value in values]


def sweep(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], tolerance: float = 1e-5) -> dict[str, Any]:
    """Run every call on the lazy device and compare with eager; the counts of what was compiled for it."""
    torchlazy.reset_metrics()
    for arguments in calls:
        wanted, got = function(*arguments), function(*lazy(*arguments))
        wanted, got = (value if isinstance(value, tuple) else (value,) for value in (wanted, got))
        for want, have in zip(wanted, got, strict=True):
            have = have.cpu()
            assert have.shape == want.shape and have.stride() == want.stride()
            largest = want.abs().max().item() if want.numel() else 0
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance * max(1, largest))
    return torchlazy.metrics()


def pairs(*sizes: tuple[int, int]) -> list[tuple[Tensor]]:
    return [(torch.randn(size),) for size in sizes]


SIZES = [(4, 7), (8, 9), (3, 12), (5, 5), (16, 31), (2, 64), (64, 3), (33, 257)]

LIN = nn.Linear(8, 8)


def weighted(x: Tensor) -> Tensor:
    return x @ LIN.weight.detach().to(x.device)


def cache_step(q: Tensor, k: Tensor, v: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.cat([k, new], 2), torch.cat([v, new * 2], 2)
    return F.scaled_dot_product_attention(q, k, v), k, v


def experts(x: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, chosen, F.gelu(weighted(x[chosen])))


def pyramid(x: Tensor) -> Tensor:
    down = F.avg_pool2d(F.max_pool2d(x, 2) + 1, 2)
    return F.interpolate(down, scale_factor=2) * 2


def rounded_up(x: Tensor) -> Tensor:
    """Windows that stick out at odd sizes, and at even ones do not."""
    return F.max_pool2d(F.max_pool2d(x, 2, ceil_mode=True) + 1, 2, ceil_mode=True)


def skipped_to(x: Tensor) -> Tensor:
    """The way up of a U-Net: what is one smaller at odd sizes is padded, by nothing at even ones."""
    low = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
    high, wide = x.shape[2] - low.shape[2], x.shape[3] - low.shape[3]
    return torch.cat([x, F.pad(low, [0, wide, 0, high])], 1) * 2


def causal(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[-1], x.shape[-1], device=x.device, dtype=torch.bool).tril()
    return torch.softmax(x.masked_fill(~mask, float("-inf")), -1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


TABLE: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "pointwise": (lambda x: (x * 2 + 1).relu(), pairs(*SIZES)),
    "softmax": (lambda x: torch.softmax(x, -1), pairs(*SIZES)),
    "row sums": (lambda x: x.sum(-1), pairs(*SIZES)),
    "column sums": (lambda x: x.sum(0), pairs(*SIZES)),
    "whole sum": (lambda x: x.abs().sum(), pairs(*SIZES)),  # of one sign: order of summation counts little
    "mean and deviation": (lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), pairs(*SIZES)),
    "layer norm": (lambda x: F.layer_norm(x, (x.shape[-1],)), pairs(*SIZES)),
    "transposed": (lambda x: (x.t() + 1).contiguous(), pairs(*SIZES)),
    "product": (lambda x: torch.relu(x @ x.t()), pairs(*SIZES)),
    "positions": (lambda x: x + torch.arange(x.shape[1], device=x.device)[None] / x.shape[1], pairs(*SIZES)),
    "halves": (lambda x: x[:, : x.shape[1] // 2] * 2, pairs(*[(a, 2 * b) for a, b in SIZES])),
    "every second": (lambda x: x[:, ::2] * 2, pairs(*SIZES)),
    "all but one": (lambda x: x[:, 1:] - x[:, :-1], pairs(*SIZES)),
    "joined": (lambda x: torch.cat([x, x[:, :2] * 2], 1) * 3, pairs(*SIZES[:-2])),
    "stacked": (lambda x: torch.stack([x, x * 2], 1).reshape(x.shape[0], -1) + 1, pairs(*SIZES)),
    "rolled": (lambda x: torch.roll(x, 2, 1) + x.flip(1), pairs(*SIZES)),
    "padded": (lambda x: F.pad(x, (1, 2)) + 1, pairs(*SIZES)),
    "repeated": (lambda x: x.repeat_interleave(2, 1) + x.repeat(1, 2), pairs(*SIZES)),
    "argmax": (lambda x: x.argmax(1) * 2, pairs(*SIZES)),
    "running sums": (lambda x: x.cumsum(1) * 2, pairs(*SIZES)),
    "causal mask": (causal, [(torch.randn(2, n, n),) for n in (4, 5, 6, 9, 30, 100)]),
    "flattened": (
        lambda x: F.gelu(weighted(x.flatten(0, 1))).view(x.shape[0], x.shape[1], 8).mean(1),
        [(torch.randn(b, t, 8),) for b, t in SIZES],
    ),
    "losses": (
        lambda x, y: F.cross_entropy(x, y) + F.mse_loss(x, x * 2) * x.shape[0],
        [(torch.randn(n, 7), torch.randint(0, 7, (n,))) for n in (4, 5, 6, 9, 100)],
    ),
    "group norm": (lambda x: F.group_norm(x, 2), [(torch.randn(b, 4, t),) for b, t in SIZES]),
    "padded batches": (masked_mean, [(torch.randn(b, t, 8), torch.rand(b, t) + 0.1) for b, t in SIZES]),
    "pyramid with odd sizes": (
        pyramid,
        [(torch.randn(1, 3, h, w),) for h, w in ((16, 24), (20, 32), (17, 29), (33, 47), (21, 64), (9, 9), (100, 50))],
    ),
    "pooled, rounded up": (
        rounded_up,
        [(torch.randn(1, 2, h, w),) for h, w in ((16, 24), (20, 33), (17, 29), (33, 46), (21, 64), (9, 9), (30, 51))],
    ),
    "experts' token counts": (
        experts,
        [(torch.randn(16, 8), torch.randperm(16)[:n]) for n in (3, 5, 7, 4, 9, 16, 2, 11)],
    ),
    "cache of 200 steps": (
        cache_step,
        [(torch.randn(1, 2, 1, 8), *(torch.randn(1, 2, n, 8) for _ in range(2)), torch.randn(1, 2, 1, 8))
         for n in range(2, 202)],
    ),
    "convolution": (
        lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3, device=x.device), stride=2, padding=1).relu(),
        [(torch.randn(2, 3, n, n + 3),) for n in (32, 48, 33, 31, 8, 20, 64, 17)],
    ),
    "convolution, equal by rounding": (
        lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3, device=x.device), stride=2, padding=1).relu().mean((2, 3)),
        [(torch.randn(2, 3, n, n + 2),) for n in (32, 31, 33, 8, 20)],
    ),
    "pyramid, equal by rounding": (
        pyramid,
        [(torch.randn(1, 3, h, w),) for h, w in ((20, 28), (21, 29), (16, 24), (33, 47))],
    ),
    "every third, equal by rounding": (lambda x: x[:, ::3] * 2, pairs((4, 8), (4, 9), (4, 64), (4, 31))),
    "reduction in chunks": (lambda x: x.sum(0) + x.mean(), pairs((800, 160), (1200, 200), (640, 1000), (999, 333))),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_two_compiles_for_each_structure(name: str) -> None:
    counts = sweep(*TABLE[name])
    assert counts["not_generalised"] == {}
    assert counts["templates"] == 1
    assert counts["compiles"] == 2
    assert counts["generalised"] == len({tuple(t.shape for t in call) for call in TABLE[name][1]}) - 1


def test_padding_by_nothing_and_by_one_is_one_program() -> None:
    """From few samples the two amounts look as if one followed from the other: it takes some more to tell."""
    sizes = [(h, w) for h in (16, 21, 33) for w in (25, 32, 48, 63)]
    counts = sweep(skipped_to, [(torch.randn(1, 2, h, w),) for h, w in sizes])
    assert counts["compiles"] <= 5 and counts["generalised"] >= 8


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x, n: x[:, :n] * 2, (5, 6, 7, 9, 12, 19, 2)),
        (lambda x, n: x[:, n:] * 2, (5, 6, 7, 9, 12, 3, 18)),
        (lambda x, n: x[n] * 2, (1, 2, 3, 4, 5, 19)),
        (lambda x, n: x * n + n, (2, 3, 4, 5, 100)),
        (lambda x, p: (x.abs() + 1) ** p, (1.5, 2.5, 3.5, 0.75, 2.25)),
        (lambda x, e: F.layer_norm(x, (20,), eps=e), (1e-5, 1e-6, 1e-3, 1e-2)),
        (lambda x, p: F.leaky_relu(x, p), (0.1, 0.2, 0.3, 0.4)),
    ],
    ids=["slice end", "slice start", "item", "step count", "power", "epsilon", "slope"],
)
def test_numbers_of_the_program(function: Callable[..., Any], values: Sequence[float]) -> None:
    counts = sweep(function, [(torch.randn(20, 20), value) for value in values])
    assert counts["compiles"] == 2 and counts["templates"] == 1


def test_ints_of_a_sync_are_sizes() -> None:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        count = int(mask.sum())
        return x[:count] * 2 + count

    calls = [(torch.randn(40), torch.arange(40) < n) for n in (4, 9, 12, 33, 7, 2)]
    counts = sweep(function, calls)
    assert counts["templates"] == 1 and counts["generalised"] >= len(calls) - 1


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x, t: torch.softmax(x / t, -1), (0.7, 0.9, 1.3, 2.0, 0.25)),
        (lambda x, rate: x - rate * x.sin(), (1e-2, 1e-3, 3e-4, 0.5)),
    ],
    ids=["temperature", "learning rate"],
)
def test_factors_are_inputs_from_the_first_value_on(function: Callable[..., Any], values: Sequence[float]) -> None:
    counts = sweep(function, [(torch.randn(20, 20), value) for value in values])
    assert counts["compiles"] == 1 and counts["templates"] == 0


def test_counts_of_nonzero_are_sizes() -> None:
    def function(x: Tensor) -> Tensor:
        found = x.nonzero()[:, 0]
        return x[found] * 2 + found.shape[0]

    calls = [((torch.arange(40) < n).float() * 3,) for n in (4, 9, 12, 33, 7, 2)]
    sweep(function, calls[:2])
    compiled = torchlazy.metrics()["compiles"]
    for (x,) in calls[2:]:
        torch.testing.assert_close(function(x.to("lazy")).cpu(), function(x))
    assert torchlazy.metrics()["compiles"] == compiled


def test_dropout_probabilities_compile_once() -> None:
    """Kept elements are scaled by 1 / (1 - p), and about 1 - p of them are kept."""
    x = torch.ones(100, 100).to("lazy")
    torchlazy.reset_metrics()
    for p in (0.1, 0.25, 0.5, 0.75, 0.3):
        found = F.dropout(x, p).cpu()
        kept = found != 0
        torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / (1 - p)))
        assert abs(kept.float().mean().item() - (1 - p)) < 0.03
    assert torchlazy.metrics()["compiles"] <= 2


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (5, 1), (5, 0), (1, 1), (0, 0)])
def test_sizes_of_zero_and_one(shape: tuple[int, int]) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2 + x.mean(1, keepdim=True)), x.sum(0)

    for order in ((shape, (4, 6), (8, 9), (5, 7)), ((4, 6), (8, 9), shape, (5, 7)), ((4, 6), shape, (8, 9), (5, 7))):
        torchlazy.sync()
        for size in order:
            x = torch.randn(size)
            for want, have in zip(function(x), function(x.to("lazy")), strict=True):
                torch.testing.assert_close(have.cpu(), want, equal_nan=True)


def test_two_sizes_that_agree_twice_and_then_differ() -> None:
    counts = sweep(lambda x: x * x.sum(0), pairs((4, 4), (8, 8), (8, 6), (6, 8), (5, 9), (12, 3)))
    assert counts["templates"] == 2  # one symbol for both, then two


def test_an_expression_that_holds_twice_and_then_does_not() -> None:
    """4 -> 10 and 8 -> 14 look like one size and a constant."""
    calls = [(torch.randn(a), torch.randn(b)) for a, b in ((4, 5), (8, 9), (4, 10), (7, 3), (9, 9))]
    counts = sweep(lambda x, y: (x.sum() * y, y.sum() * x), calls)
    assert counts["templates"] <= 2


def test_a_halving_that_is_exact_twice_and_then_is_not() -> None:
    counts = sweep(
        lambda x: F.conv1d(x[None, None], torch.ones(1, 1, 3, device=x.device), stride=2, padding=1)[0, 0] * 2,
        [(torch.randn(n),) for n in (32, 48, 33, 35, 64, 7)],
    )
    assert counts["compiles"] == 2


def test_a_size_chosen_by_the_program_is_compared() -> None:
    """The length of the positions is the batch by chance in the first two traces."""
    calls = [(torch.randn(n, 6), k) for n, k in ((4, 4), (8, 8), (8, 4), (4, 8), (9, 5))]
    sweep(lambda x, k: x.sum() + torch.arange(k, device=x.device), calls)


def test_index_out_of_range_is_found_at_every_size() -> None:
    def function(table: Tensor, at: Tensor) -> Tensor:
        return F.embedding(at, table) * 2

    sweep(function, [(torch.randn(n, 4), torch.randint(0, n, (5,))) for n in (4, 9, 12)])
    with pytest.raises(IndexError):
        function(torch.randn(7, 4).to("lazy"), torch.tensor([0, 7]).to("lazy")).cpu()


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A stem with pooling, two stages, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.pool(self.stem(x))), 1).flatten(1))


class SmallGPT(nn.Module):
    """Two causal layers over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(256, 32)
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32),
                           nn.Linear(32, 64), nn.Linear(64, 32)))
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50)

    def forward(self, codes: Tensor) -> Tensor:
        batch, length = codes.shape
        x = self.tokens(codes) + self.positions(torch.arange(length, device=codes.device))
        for norm1, qkv, proj, norm2, up, down in self.layers:  # type: ignore[misc]
            q, k, v = (part.view(batch, length, 4, 8).transpose(1, 2) for part in qkv(norm1(x)).split(32, 2))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + proj(attended.transpose(1, 2).reshape(batch, length, 32))
            x = x + down(F.gelu(up(norm2(x))))
        return self.head(self.norm(x))


def train_over(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], make: Callable[[Any], torch.optim.Optimizer]
) -> dict[str, Any]:
    """Train eagerly and lazily on the same batches; losses must agree at every step."""
    twin = copy.deepcopy(model).to("lazy")
    optimizers = make(model.parameters()), make(twin.parameters())
    torchlazy.reset_metrics()
    for x, y in batches:
        losses = []
        for net, optimizer, device in ((model, optimizers[0], "cpu"), (twin, optimizers[1], "lazy")):
            loss = F.cross_entropy(net(x.to(device)).flatten(0, -2), y.to(device).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=2e-4, abs=1e-5)
    return torchlazy.metrics()


def test_gpt_training_over_lengths() -> None:
    """The first step has optimizer states of its own to make: it is another structure."""
    torch.manual_seed(1)
    lengths = [16, 16, 24, 40, 17, 33, 100, 7, 3, 200, 2, 64, 128, 37]
    batches = [(torch.randint(0, 50, (3, n)), torch.randint(0, 50, (3, n))) for n in lengths]
    counts = train_over(SmallGPT(), batches, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    assert counts["compiles"] == 3 and counts["templates"] == 1 and counts["not_generalised"] == {}


def test_gpt_inference_over_100_lengths_and_batches() -> None:
    torch.manual_seed(1)
    model = SmallGPT().eval()
    twin = copy.deepcopy(model).to("lazy")
    torchlazy.reset_metrics()
    with torch.no_grad():
        for n in range(100):
            codes = torch.randint(0, 50, (2 + n * 7 % 5, 3 + n))
            torch.testing.assert_close(twin(codes.to("lazy")).cpu(), model(codes), rtol=1e-4, atol=1e-5)
    counts = torchlazy.metrics()
    assert counts["compiles"] <= 3 and counts["not_generalised"] == {}


def test_gpt_inference_over_100_lengths() -> None:
    torch.manual_seed(1)
    model = SmallGPT().eval()
    twin = copy.deepcopy(model).to("lazy")
    torchlazy.reset_metrics()
    with torch.no_grad():
        for n in range(2, 102):
            codes = torch.randint(0, 50, (3, n))
            torch.testing.assert_close(twin(codes.to("lazy")).cpu(), model(codes), rtol=1e-4, atol=1e-5)
    counts = torchlazy.metrics()
    assert counts["compiles"] == 2 and counts["templates"] == 1 and counts["not_generalised"] == {}


def test_resnet_training_over_20_image_sizes() -> None:
    torch.manual_seed(2)
    sizes = [32, 32, 48, 40, 33, 64, 47, 65, 31, 17, 36, 52, 24, 28, 39, 41, 56, 60, 44, 35]
    batches = [(torch.randn(4, 3, n, n), torch.randint(0, 10, (4,))) for n in sizes]
    counts = train_over(SmallResNet(), batches, lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))
    assert counts["compiles"] == 3 and counts["templates"] == 1 and counts["not_generalised"] == {}


def test_resnet_training_over_sizes_that_rounding_makes_equal() -> None:
    """64 and 63 pixels leave 8 x 8 at the end; 33 leave 5 x 5."""
    torch.manual_seed(2)
    batches = [(torch.randn(3, 3, n, n), torch.randint(0, 10, (3,))) for n in (64, 64, 63, 33, 40)]
    counts = train_over(SmallResNet(), batches, lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
    assert counts["compiles"] <= 3 and counts["templates"] == 1 and counts["not_generalised"] == {}


def test_decoding_with_a_cache_of_a_model() -> None:
    """Each step's length differs from the last one's; the cache is what the last step returned."""
    torch.manual_seed(3)
    project = nn.Linear(8, 8)
    twin = copy.deepcopy(project).to("lazy")

    def decode(layer: nn.Module, device: str, steps: int) -> Tensor:
        x, keys = torch.ones(1, 2, 1, 8, device=device), torch.ones(1, 2, 3, 8, device=device)
        for _ in range(steps):
            keys = torch.cat([keys, layer(x)], 2)
            x = torch.softmax(x @ keys.transpose(2, 3), -1) @ keys
            torchlazy.flush()
        return x.cpu()

    torchlazy.reset_metrics()
    with torch.no_grad():
        torch.testing.assert_close(decode(twin, "lazy", 200), decode(project, "cpu", 200), rtol=1e-4, atol=1e-5)
    assert torchlazy.metrics()["compiles"] <= 3
