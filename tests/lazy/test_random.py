"""Random numbers: ruled by torch's CPU generator, the same in every tier, and eager's own bits on request."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchlazy
from torchlazy.lazy.api import driver

from tests.lazy.compare import check, data

DRAWS = {
    "rand": lambda d: torch.rand(50, device=d),
    "randn": lambda d: torch.randn(5, 10, device=d),
    "randn double": lambda d: torch.randn(50, dtype=torch.float64, device=d),
    "randint": lambda d: torch.randint(0, 100, (50,), device=d),
    "uniform_": lambda d: torch.empty(50, device=d).uniform_(-1, 1),
    "normal_": lambda d: torch.empty(50, device=d).normal_(3, 2),
    "bernoulli_": lambda d: torch.empty(50, device=d).bernoulli_(0.3),
    "exponential_": lambda d: torch.empty(50, device=d).exponential_(2),
    "random_": lambda d: torch.empty(50, dtype=torch.int64, device=d).random_(0, 7),
    "rand half": lambda d: torch.rand(50, dtype=torch.bfloat16, device=d),
    "dropout": lambda d: F.dropout(torch.ones(50, device=d), 0.5),
    "rand_like": lambda d: torch.rand_like(torch.ones(5, 10, device=d).t()),
    "view of a draw": lambda d: torch.rand(5, 10, device=d).t()[::2],
    "randint_like": lambda d: torch.randint_like(torch.ones(50, device=d), 100),
    "log_normal_": lambda d: torch.empty(50, device=d).log_normal_(),
    "cauchy_": lambda d: torch.empty(50, device=d).cauchy_(),
    "geometric_": lambda d: torch.empty(50, device=d).geometric_(0.1),
    "bernoulli": lambda d: torch.bernoulli(torch.full((50,), 0.5, device=d)),
    "normal of tensors": lambda d: torch.normal(torch.zeros(50, device=d), torch.ones(50, device=d)),
    "randperm": lambda d: torch.randperm(50, device=d),
    "multinomial": lambda d: torch.multinomial(torch.ones(99, device=d), 50),
    "poisson": lambda d: torch.poisson(torch.full((50,), 30.0, device=d)),
    "binomial": lambda d: torch.binomial(torch.full((50,), 90.0, device=d), torch.full((50,), 0.5, device=d)),
    "gamma": lambda d: torch._standard_gamma(torch.full((50,), 2.0, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(50, device=d), training=True),
    "alpha dropout": lambda d: F.alpha_dropout(torch.ones(50, device=d), 0.5, training=True),
    "feature dropout": lambda d: F.dropout2d(torch.ones(1, 50, 1, 1, device=d), 0.5),
    "gumbel softmax": lambda d: F.gumbel_softmax(torch.ones(50, device=d)),
    "distributions": lambda d: torch.distributions.Normal(torch.zeros(50, device=d), 1.0).sample(),
}


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("name", DRAWS)
def test_seeds_and_tiers(name):
    """Equal after equal seeds, in both tiers; other numbers after them."""

    def draw():
        torch.manual_seed(7)
        first = DRAWS[name]("lazy").tolist()
        driver.forget()  # the second draw has the same trace, and shall not be compiled in the background
        return first, DRAWS[name]("lazy").tolist()

    first, second = draw()
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    again, more = draw()
    assert first != second
    torch.testing.assert_close(torch.tensor(again), torch.tensor(first), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.tensor(more), torch.tensor(second), rtol=1e-6, atol=1e-6)


EAGER_DRAWS = {
    **{name: draw for name, draw in DRAWS.items() if name != "view of a draw"},
    "randperm": lambda d: torch.randperm(20, device=d),
    "multinomial": lambda d: torch.multinomial(torch.ones(9, device=d), 4),
    "several": lambda d: [torch.rand(3, device=d), torch.randn(20, device=d), F.dropout(torch.ones(9, device=d))],
    "init": lambda d: list(torch.nn.Linear(3, 4, device=d).parameters()),
    "log_normal_": lambda d: torch.empty(9, device=d).log_normal_(),
    "cauchy_": lambda d: torch.empty(9, device=d).cauchy_(),
    "geometric_": lambda d: torch.empty(9, device=d).geometric_(0.3),
    "bernoulli": lambda d: torch.bernoulli(torch.full((9,), 0.5, device=d)),
    "normal of tensors": lambda d: torch.normal(torch.zeros(9, device=d), torch.ones(9, device=d)),
    "randn half": lambda d: torch.randn(50, dtype=torch.bfloat16, device=d),
    "bernoulli_ of tensors": lambda d: torch.empty(9, device=d).bernoulli_(torch.full((9,), 0.3, device=d)),
    "random_ of bytes": lambda d: torch.empty(9, dtype=torch.uint8, device=d).random_(),
    "random_ of all of int64": lambda d: torch.empty(9, dtype=torch.int64, device=d).random_(),
    "randint of a dtype": lambda d: torch.randint(-5, 5, (9,), dtype=torch.int16, device=d),
    "randint_like": lambda d: torch.randint_like(torch.ones(3, 9, device=d).t(), 100),
    "replacement": lambda d: torch.multinomial(torch.ones(2, 9, device=d), 20, replacement=True),
    "gamma": lambda d: torch._standard_gamma(torch.full((9,), 2.0, device=d)),
    "dirichlet": lambda d: torch._sample_dirichlet(torch.ones(3, 4, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(9, device=d), training=True),
    "dropout in place": lambda d: F.dropout(torch.ones(9, device=d), 0.3, inplace=True),
    "dropout of halves": lambda d: F.dropout(torch.ones(9, dtype=torch.float16, device=d), 0.3),
    "a dropout layer's gradient": lambda d: _gradient(torch.nn.Dropout(0.4), data(d, 5, 6, grad=True)),
    "alpha dropout": lambda d: F.alpha_dropout(torch.ones(9, device=d), 0.5, training=True),
    "feature dropout": lambda d: F.dropout2d(torch.ones(2, 9, 2, 2, device=d), 0.5),
    "feature alpha dropout": lambda d: F.feature_alpha_dropout(torch.ones(2, 9, 2, 2, device=d), 0.5, training=True),
    "attention's dropout": lambda d: F.scaled_dot_product_attention(*[data(d, 2, 3, 4) for _ in "qkv"], dropout_p=0.5),
    "gumbel softmax": lambda d: F.gumbel_softmax(torch.ones(3, 4, device=d)),
    "orthogonal init": lambda d: torch.nn.init.orthogonal_(torch.empty(4, 3, device=d)),
    "truncated normal": lambda d: torch.nn.init.trunc_normal_(torch.empty(9, device=d)),
    "generator": lambda d: torch.rand(9, generator=torch.Generator().manual_seed(5), device=d),
    "strided uniform_": lambda d: torch.zeros(6, 4, device=d)[:, ::2].uniform_(),
    "complex": lambda d: torch.randn(9, dtype=torch.complex64, device=d),
}


def _gradient(layer, x):
    layer(x).sum().backward()
    return x.grad


# Class, its parameters, and what is drawn of it.
DISTRIBUTIONS = {
    "Normal": ((0.5, 2.0), "rsample"),
    "LogNormal": ((0.5, 0.2), "rsample"),
    "Uniform": ((-1.0, 2.0), "rsample"),
    "Exponential": ((0.7,), "rsample"),
    "Laplace": ((0.0, 2.0), "rsample"),
    "Cauchy": ((0.0, 1.0), "rsample"),
    "Gumbel": ((0.0, 1.0), "rsample"),
    "Gamma": ((2.0, 3.0), "rsample"),
    "Beta": ((2.0, 3.0), "rsample"),
    "Chi2": ((3.0,), "rsample"),
    "StudentT": ((5.0,), "rsample"),
    "Pareto": ((1.0, 3.0), "rsample"),
    "Weibull": ((1.0, 2.0), "rsample"),
    "HalfNormal": ((1.0,), "rsample"),
    "Kumaraswamy": ((2.0, 3.0), "rsample"),
    "VonMises": ((0.0, 2.0), "sample"),
    "Bernoulli": ((0.3,), "sample"),
    "Geometric": ((0.3,), "sample"),
    "Poisson": ((4.0,), "sample"),
    "Binomial": ((9.0, 0.4), "sample"),
    "NegativeBinomial": ((4.0, 0.4), "sample"),
    "Dirichlet": (([2.0, 1.0, 3.0],), "rsample"),
    "Categorical": (([0.2, 0.3, 0.5],), "sample"),
    "OneHotCategorical": (([0.2, 0.3, 0.5],), "sample"),
    "MultivariateNormal": (([0.0, 1.0], [[2.0, 0.5], [0.5, 1.0]]), "rsample"),
}


def _distribution(name, device):
    parameters, how = DISTRIBUTIONS[name]
    made = getattr(torch.distributions, name)(*[torch.tensor(p, device=device) for p in parameters])
    value = getattr(made, how)((6,))
    return value, made.log_prob(value)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_eagers_own_distributions(name):
    """The very bits of what is drawn; densities of it to within rounding."""
    torchlazy.config.rng = "eager"
    torch.manual_seed(3)
    want, density = _distribution(name, "cpu")
    torch.manual_seed(3)
    have, lazy_density = _distribution(name, "lazy")
    assert have.dtype == want.dtype
    if name in (
        "Bernoulli",
        "Geometric",
        "Poisson",
        "Binomial",
        "Categorical",
        "OneHotCategorical",
        "Normal",
        "Uniform",
    ):
        assert torch.equal(have.cpu(), want)
    torch.testing.assert_close(have.cpu(), want)
    torch.testing.assert_close(lazy_density.cpu(), density)


def test_eagers_own_mask_between_recurrent_layers():
    torchlazy.config.rng = "eager"

    def run(device):
        torch.manual_seed(3)
        return torch.nn.GRU(3, 4, 2, dropout=0.5, device=device)(data(device, 5, 2, 3))[0]

    torch.testing.assert_close(run("lazy").cpu(), run("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", EAGER_DRAWS)
def test_eagers_own_bits_on_a_gpu(name):
    """The lazy device computes on the GPU, seeded as the GPU's own generator is."""
    if name == "generator":
        pytest.skip("a CPU generator is no generator of the GPU")
    torchlazy.config.rng = "eager"
    torchlazy.set_target("cuda")
    torch.manual_seed(3)
    want = EAGER_DRAWS[name]("cuda")
    torch.manual_seed(3)
    have = EAGER_DRAWS[name]("lazy")
    for mine, theirs in zip(have, want, strict=True) if isinstance(want, (list, tuple)) else [(have, want)]:
        assert torch.equal(mine.detach().cpu(), theirs.detach().cpu())


@pytest.mark.parametrize("name", EAGER_DRAWS)
def test_eagers_own_bits(name):
    torchlazy.config.rng = "eager"

    def draw(device):
        torch.manual_seed(3)
        return EAGER_DRAWS[name](device)

    check(draw, rtol=0, atol=0, ignore=("version",))


def test_generator_argument(tier):
    def draw(seed):
        g = torch.Generator().manual_seed(seed)
        return torch.rand(9, generator=g, device="lazy").tolist(), torch.randn(9, generator=g, device="lazy").tolist()

    before = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), before)
    g = torch.Generator().manual_seed(5)
    x = torch.empty(9, device="lazy")
    first = x.normal_(generator=g).tolist()
    assert x.normal_(generator=g).tolist() != first
    assert x.normal_(generator=g.manual_seed(5)).tolist() == first


def test_generator_states():
    state = torch.get_rng_state()
    first = torch.rand(5, device="lazy").tolist()
    torch.set_rng_state(state)
    assert torch.rand(5, device="lazy").tolist() == first
    with torch.random.fork_rng():
        torch.manual_seed(99)
        torch.rand(5, device="lazy")
    with torch.random.fork_rng(devices=[0], device_type="lazy"):
        torch.manual_seed(98)
        torch.rand(5, device="lazy")
    after = torch.rand(5, device="lazy").tolist()
    torch.set_rng_state(state)
    torch.rand(5, device="lazy")
    assert torch.rand(5, device="lazy").tolist() == after
    torch.lazy.set_rng_state(state)
    assert torch.rand(5, device="lazy").tolist() == first
    assert torch.equal(torch.lazy.get_rng_state(), torch.get_rng_state())


def test_new_seeds_compile_nothing(compiled):
    for _ in range(3):
        x = torch.rand(7, device="lazy") + 1
        torchlazy.sync()
    assert x.shape == (7,)
    assert torchlazy.metrics()["compiles"] == 1


def test_distributions(tier):
    torch.manual_seed(0)
    n = 20000
    u, z = torch.rand(n, device="lazy"), torch.randn(n, device="lazy")
    e = torch.empty(n, device="lazy").exponential_(2)
    k = torch.randint(0, 4, (n,), device="lazy")
    b = torch.empty(n, device="lazy").bernoulli_(0.3)
    u, z, e, k, b = (t.cpu().double() for t in (u, z, e, k, b))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert abs(z.mean()) < 0.03 and abs(z.var() - 1) < 0.05 and abs((z**3).mean()) < 0.15
    assert abs(e.mean() - 0.5) < 0.02 and e.min() >= 0
    assert all(abs((k == i).double().mean() - 0.25) < 0.015 for i in range(4))
    assert abs(b.mean() - 0.3) < 0.02
    assert abs((u[1:] * u[:-1]).mean() - 0.25) < 0.01


def test_dropout(tier):
    torch.manual_seed(0)
    x = torch.ones(20000, device="lazy", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    kept = y.detach().cpu()
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((kept == 0).double().mean() - 0.25) < 0.015
    torch.testing.assert_close(x.grad.cpu(), kept)
    assert torch.equal(F.dropout(x, 0.0).cpu(), x.detach().cpu())
    assert F.dropout(x, 1.0).cpu().abs().sum() == 0
    assert torch.equal(F.dropout(x, 0.5, training=False).cpu(), x.detach().cpu())
    z = torch.ones(100, device="lazy")
    F.dropout(z, 0.5, inplace=True)
    assert 0 < (z == 0).sum().item() < 100


def test_checkpoint_replays_dropout(tier):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to("lazy")
    x = data("lazy", 4, 8, grad=True)
    state = torch.get_rng_state()
    layer(x).sum().backward()
    plain, x.grad = x.grad.tolist(), None
    torch.set_rng_state(state)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == plain


def test_draws_do_not_depend_on_cuts():
    def draw(cut):
        torch.manual_seed(11)
        x = torch.rand(5, device="lazy")
        if cut:
            torchlazy.sync()
        return (x + torch.rand(5, device="lazy")).tolist()

    assert draw(False) == draw(True)
