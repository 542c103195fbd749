"""Random numbers of the lazy device have the distributions that they are named after, on every way that draws them.

Continuous ones are tested by Kolmogorov and Smirnov's distance to the distribution function, discrete ones by the same
distance at their points (where it is conservative) or by the counts of outcomes. Seeds are fixed, so that a test that
passes always does; the level of 1e-4 keeps other seeds from failing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

COUNT = 20_000
CRITICAL = math.sqrt(-0.5 * math.log(1e-4 / 2))  # Kolmogorov's distance times the root of the count, at level 1e-4


def distance(sample: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], atoms: bool = False) -> float:
    """The largest distance between the sample's distribution function and the given one, times sqrt(count)."""
    x = sample.detach().cpu().double().reshape(-1).sort().values
    assert torch.isfinite(x).all() or not atoms
    if atoms:
        points, counts = x.unique(return_counts=True)
        upto = counts.cumsum(0)
        before = (upto - counts) / len(x) - function(points - 1)  # nothing stands between two integers
        gap = torch.maximum((upto / len(x) - function(points)).abs(), before.abs()).max()
    else:
        above = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
        at = function(x)
        gap = torch.maximum((above - at).abs(), (at - above + 1 / len(x)).abs()).max()
    return float(gap) * math.sqrt(len(x))


def fill(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(COUNT, dtype=dtype, device="lazy")


def gauss(mean: float = 0.0, std: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.special.ndtr((x - mean) / std)


def uniform(low: float = 0.0, high: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ((x - low) / (high - low)).clamp(0, 1)


def integers(low: int, high: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ((x.floor() - low + 1) / (high - low)).clamp(0, 1)


def gamma(shape: float, rate: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.special.gammainc(torch.full_like(x, shape), x * rate)


CONTINUOUS = {
    "rand": (lambda: torch.rand(COUNT, device="lazy"), uniform()),
    "rand double": (lambda: torch.rand(COUNT, dtype=torch.float64, device="lazy"), uniform()),
    "rand half": (lambda: torch.rand(COUNT, dtype=torch.float16, device="lazy"), uniform()),
    "rand_like": (lambda: torch.rand_like(fill()), uniform()),
    "uniform_": (lambda: fill().uniform_(-1, 3), uniform(-1, 3)),
    "randn": (lambda: torch.randn(COUNT, device="lazy"), gauss()),
    "randn double": (lambda: torch.randn(COUNT, dtype=torch.float64, device="lazy"), gauss()),
    "randn_like": (lambda: torch.randn_like(fill(torch.bfloat16).float()), gauss()),
    "normal_": (lambda: fill().normal_(2, 3), gauss(2, 3)),
    "normal": (lambda: torch.normal(-1.0, 0.5, (COUNT,), device="lazy"), gauss(-1, 0.5)),
    "normal of tensors": (
        lambda: torch.normal(torch.full_like(fill(), 2.0), torch.full_like(fill(), 0.1)),
        gauss(2, 0.1),
    ),
    "exponential_": (lambda: fill().exponential_(2), lambda x: -torch.expm1(-2 * x)),
    "cauchy_": (lambda: fill().cauchy_(1, 2), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
    "log_normal_": (lambda: fill().log_normal_(0.5, 0.7), lambda x: torch.special.ndtr((x.log() - 0.5) / 0.7)),
    "gamma": (lambda: torch._standard_gamma(torch.full_like(fill(), 2.5)), gamma(2.5)),
    "gamma below one": (lambda: torch._standard_gamma(torch.full_like(fill(), 0.3)), gamma(0.3)),
    "dirichlet": (lambda: torch._sample_dirichlet(torch.ones(COUNT, 2, device="lazy"))[:, 0], uniform()),
    "slopes of rrelu": (lambda: -F.rrelu(-torch.ones_like(fill()), 0.1, 0.3, training=True), uniform(0.1, 0.3)),
    "init": (lambda: torch.nn.init.kaiming_uniform_(fill().view(200, 100)), uniform(-(0.06**0.5), 0.06**0.5)),
    "truncated normal": (
        lambda: torch.nn.init.trunc_normal_(fill(), a=-1, b=1),
        lambda x: (torch.special.ndtr(x) - 0.158655254) / 0.682689492,
    ),
    "distributions.Normal": (lambda: torch.distributions.Normal(*ends(1.0, 2.0)).sample((COUNT,)), gauss(1, 2)),
    "distributions.Gamma": (lambda: torch.distributions.Gamma(*ends(3.0, 2.0)).sample((COUNT,)), gamma(3, 2)),
    "distributions.Laplace": (
        lambda: torch.distributions.Laplace(*ends(0.0, 1.0)).rsample((COUNT,)),
        lambda x: 0.5 + 0.5 * x.sign() * -torch.expm1(-x.abs()),
    ),
    "distributions.Gumbel": (
        lambda: torch.distributions.Gumbel(*ends(0.0, 1.0)).sample((COUNT,)),
        lambda x: torch.exp(-torch.exp(-x)),
    ),
    "distributions.Beta": (
        lambda: torch.distributions.Beta(*ends(2.0, 1.0)).sample((COUNT,)),
        lambda x: x.square(),
    ),
}  # fmt: skip


def ends(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor(number, device="lazy") for number in numbers]


def logits() -> torch.Tensor:
    return torch.tensor([0.0, math.log(2), 0.0], device="lazy")


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name, tier):
    torch.manual_seed(1)
    draw, function = CONTINUOUS[name]
    sample = draw()
    assert sample.numel() == COUNT
    assert distance(sample, function) < CRITICAL * (2 if sample.dtype.itemsize == 2 else 1)


def _poisson(rate: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.where(x < 0, 0.0, torch.special.gammaincc(x.clamp(min=0) + 1, torch.full_like(x, rate)))


def masses(*of: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The distribution function of 0, 1, 2, ... with these masses."""
    upto = torch.tensor([0.0, *of], dtype=torch.float64).cumsum(0)
    return lambda x: upto[x.long().clamp(-1, len(of) - 1) + 1]


def _binomial(n: int, p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return masses(*[math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])


DISCRETE = {
    "randint": (lambda: torch.randint(5, 17, (COUNT,), device="lazy"), integers(5, 17)),
    "randint_like": (lambda: torch.randint_like(fill(), 0, 3), integers(0, 3)),
    "random_ within": (lambda: fill(torch.int64).random_(-4, 9), integers(-4, 9)),
    "random_ of bytes": (lambda: fill(torch.uint8).random_(), integers(0, 256)),
    "random_ of floats": (lambda: fill().random_(), integers(0, 1 << 24)),
    "bernoulli_": (lambda: fill().bernoulli_(0.3), masses(0.7, 0.3)),
    "bernoulli": (lambda: torch.bernoulli(torch.full_like(fill(), 0.8)), masses(0.2, 0.8)),
    "bernoulli_ of tensors": (
        lambda: fill().bernoulli_(torch.full_like(fill(), 0.4)),
        masses(0.6, 0.4),
    ),
    "geometric_": (lambda: fill().geometric_(0.3), lambda x: 1 - 0.7 ** x.floor()),
    "poisson": (lambda: torch.poisson(torch.full_like(fill(), 3.5)), _poisson(3.5)),
    "binomial": (lambda: torch.binomial(torch.full_like(fill(), 9.0), torch.full_like(fill(), 0.4)), _binomial(9, 0.4)),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 2.0, 1.0], device="lazy"), COUNT, replacement=True),
        masses(0.25, 0.5, 0.25),
    ),
    "multinomial without replacement": (
        lambda: torch.multinomial(torch.tensor([[1.0, 2.0, 1.0]], device="lazy").expand(COUNT, 3), 2)[:, 0],
        masses(0.25, 0.5, 0.25),
    ),
    "a place in randperm": (lambda: torch.randperm(COUNT, device="lazy"), integers(0, COUNT)),
    "dropout": (lambda: (F.dropout(torch.ones_like(fill()), 0.2) > 0), masses(0.2, 0.8)),
    "alpha dropout": (lambda: F.alpha_dropout(fill().fill_(9), 0.2, training=True) > 0, masses(0.2, 0.8)),
    "feature dropout": (
        lambda: F.dropout2d(torch.ones(COUNT, 1, 2, 2, device="lazy"), 0.6)[:, 0, 0, 0] > 0,
        masses(0.6, 0.4),
    ),
    "gumbel softmax": (
        lambda: F.gumbel_softmax(torch.ones(COUNT, 3, device="lazy") * logits(), hard=True).argmax(-1),
        masses(0.25, 0.5, 0.25),
    ),
    "distributions.Categorical": (
        lambda: torch.distributions.Categorical(probs=torch.tensor([0.1, 0.2, 0.7], device="lazy")).sample((COUNT,)),
        masses(0.1, 0.2, 0.7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name, tier):
    torch.manual_seed(2)
    draw, function = DISCRETE[name]
    assert distance(draw(), function, atoms=True) < CRITICAL


def test_randperm_is_a_permutation_in_any_order(tier):
    torch.manual_seed(3)
    orders = torch.stack([torch.randperm(3, device="lazy") for _ in range(600)]).cpu()
    assert (orders.sort(1).values == torch.arange(3)).all()
    counts = torch.bincount(orders[:, 0] * 3 + orders[:, 1], minlength=9)
    assert counts[[0, 4, 8]].sum() == 0 and (counts[[1, 2, 3, 5, 6, 7]] > 60).all()


def test_streams_are_independent(tier):
    """Neighbours, the two halves of a draw, and draws one after the other do not go together."""
    torch.manual_seed(4)
    a, b = torch.randn(COUNT, device="lazy"), torch.randn(COUNT, device="lazy")
    mask = F.dropout(torch.ones_like(a), 0.5) > 0
    a, b, mask = a.cpu(), b.cpu(), mask.cpu().float() - 0.5
    pairs = {
        "draws": (a, b),
        "neighbours": (a[1:], a[:-1]),
        "halves": (a[: COUNT // 2], a[COUNT // 2 :]),
        "mask": (a, mask),
    }
    for name, (x, y) in pairs.items():
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 4 / math.sqrt(len(x)), name
        assert abs(torch.corrcoef(torch.stack([x.square(), y.square() + y]))[0, 1]) < 4 / math.sqrt(len(x)), name
