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
}


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
    "strided uniform_": lambda d: torch.zeros(6, 4, device=d)[:, ::2].uniform_(),
    "complex": lambda d: torch.randn(9, dtype=torch.complex64, device=d),
}


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
