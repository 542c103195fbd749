"""Random numbers from an explicit `generator=`: that generator's own, as eager draws them, in every door."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torchlazy

Draw = Callable[[torch.Generator, str], torch.Tensor]

DRAWS: dict[str, Draw] = {
    "randn": lambda g, d: torch.randn(3, 5, generator=g, device=d),
    "rand": lambda g, d: torch.rand(7, generator=g, device=d, dtype=torch.float64),
    "randint": lambda g, d: torch.randint(2, 90, (6,), generator=g, device=d),
    "randint to": lambda g, d: torch.randint(90, (6,), generator=g, device=d),
    "randperm": lambda g, d: torch.randperm(11, generator=g, device=d),
    "normal": lambda g, d: torch.normal(1.0, 2.0, (5,), generator=g, device=d),
    "normal of tensors": lambda g, d: torch.normal(torch.ones(5, device=d), torch.ones(5, device=d) * 3, generator=g),
    "normal_": lambda g, d: torch.empty(4, 4, device=d).normal_(1, 3, generator=g) * 2,
    "uniform_": lambda g, d: torch.empty(4, 4, device=d).uniform_(-1, 3, generator=g),
    "uniform_ of a view": lambda g, d: torch.zeros(4, 4, device=d).index_fill_(
        0, torch.tensor([1], device=d), 2.0
    )[:, 1].uniform_(-1, 3, generator=g),
    "exponential_": lambda g, d: torch.empty(4, device=d).exponential_(2, generator=g),
    "random_": lambda g, d: torch.empty(4, dtype=torch.int64, device=d).random_(0, 50, generator=g),
    "bernoulli": lambda g, d: torch.bernoulli(torch.full((20,), 0.4, device=d), generator=g),
    "bernoulli_": lambda g, d: torch.empty(20, device=d).bernoulli_(0.3, generator=g),
    "bernoulli_ of tensors": lambda g, d: torch.empty(20, device=d).bernoulli_(
        torch.full((20,), 0.4, device=d), generator=g
    ),
    "multinomial": lambda g, d: torch.multinomial(torch.ones(9, device=d), 4, generator=g),
    "poisson": lambda g, d: torch.poisson(torch.full((9,), 3.0, device=d), generator=g),
    "complex": lambda g, d: torch.randn(3, generator=g, device=d, dtype=torch.complex64),
    "init": lambda g, d: torch.nn.init.xavier_normal_(torch.empty(3, 4, device=d), generator=g),
    "several": lambda g, d: torch.randn(3, generator=g, device=d) + torch.rand(3, generator=g, device=d) * 2,
}  # fmt: skip


@pytest.mark.parametrize("door", ["mode", "device", "compiled", "compiled on the device"])
@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_and_the_state_are_eagers(name: str, door: str) -> None:
    device = "lazy" if "device" in door else "cpu"
    draw = torchlazy.compile(DRAWS[name]) if "compiled" in door else DRAWS[name]
    mine, eagers = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for turn in range(6):
        with torchlazy.lazy_mode() if door == "mode" else contextlib.nullcontext():
            found = draw(mine, device).clone().cpu()
        torch.testing.assert_close(found, DRAWS[name](eagers, "cpu"), rtol=1e-6, atol=1e-6)
        assert torch.equal(mine.get_state(), eagers.get_state())
        if turn == 3:
            torchlazy.wait_for_compile()
            mine.manual_seed(8)
            eagers.manual_seed(8)


def test_a_generator_among_other_draws() -> None:
    """Of one block: numbers of torch's own seed before, between and after do not move the named generator."""
    mine, eagers = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(4):
        with torchlazy.lazy_mode():
            x = torch.rand(3) + torch.randn(3, generator=mine)
            y = torch.randn(4, generator=mine) * 2 + torch.rand(4) * 0
        assert x.shape == (3,)
        torch.randn(3, generator=eagers)
        torch.testing.assert_close(y.clone(), torch.randn(4, generator=eagers) * 2)


def test_without_a_generator_the_seed_still_decides() -> None:
    def draw() -> list[float]:
        torch.manual_seed(4)
        with torchlazy.lazy_mode():
            return torch.rand(4).tolist()  # type: ignore[no-any-return]

    assert draw() == draw()
