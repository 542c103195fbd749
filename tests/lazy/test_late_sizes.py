"""Compiled calls whose data decides of sizes: one replay serves them all, and binds its steps when the sizes are known.

Invariant: values and state are eager's, at sizes that were seen and at others; nothing is made anew for sizes seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.replay.unbacked import UnbackedReplay
from torchlazy.lazy.compiled.replay.unbacked_steps import UnbackedPart
from torchlazy.lazy.compiled.sizes.dynamic_template import SizedCall

from tests.lazy.compare import data
from tests.lazy.test_data_sizes import experts

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def _experts(device: str) -> Callable[[Tensor], Tensor]:
    return experts(device)[0]


def _picked(device: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The results' sizes are the data's, too; the state is written before and after it decides."""
    seen = torch.zeros(4).to(device)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        seen.add_(x.sum(0))
        picked = x[x[:, 0] > 0]
        seen.add_(picked.mean(0) / picked.shape[0])
        return picked * 2, seen + x[: int((x[:, 1] > 0).sum())].sum(0)

    return call


def _trained(device: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        rows = torch.where(x[:, 0] > 0)[0]
        loss = (layer(x[rows]) - x[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return (loss.detach(), *[parameter.detach().clone() for parameter in layer.parameters()])

    return call


def _chained(device: str) -> Callable[[Tensor], Tensor]:
    """A size that is decided among what another one left."""

    def call(x: Tensor) -> Tensor:
        first = x[x > 0]
        second = first[first > 0.5]
        return torch.cat([first[: second.shape[0]] * second, second / first.shape[0]])

    return call


MAKERS = {"experts": _experts, "picked": _picked, "trained": _trained, "chained": _chained}


def _rows(device: str, i: int) -> Tensor:
    return data(device, 40, 4, seed=i)


def _plain(value: Any) -> Any:
    return [item.cpu() for item in value] if isinstance(value, tuple) else value.cpu()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("name", MAKERS)
def test_one_replay_serves_all_sizes(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls 30 to 60 have sizes that were seen and sizes that were not: no template is made for them."""
    plain, run = MAKERS[name]("cpu"), torchlazy.compile(MAKERS[name](device), audit=False)
    made: list[str] = []

    def counted(owner: Any, attribute: str) -> None:
        real = getattr(owner, attribute)

        def count(*args: Any, **kwargs: Any) -> Any:
            made.append(f"{owner.__name__}.{attribute}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, count)

    for i in range(60):
        if i == 30:
            counted(Replay, "__init__")
            counted(SizedCall, "template_for")
            counted(SizedCall, "__init__")
        torch.testing.assert_close(_plain(run(_rows(device, i))), _plain(plain(_rows("cpu", i))), rtol=1e-4, atol=1e-5)
    report = run.report()
    assert not report.alarm and report.captures + report.verified <= 10, str(report)
    assert len(made) <= 4, made  # a size of 0 or 1 is another program


def test_steps_at_sizes_seen_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torchlazy.compile(_experts("cpu"), audit=False)
    for _ in range(3):
        for i in range(12):
            run(_rows("cpu", i))
    bound: list[UnbackedPart] = []
    at = UnbackedPart.at

    def bind(self: UnbackedPart, symbols: Any, makes: bool) -> Any:
        bound.extend([self] if makes else [])
        return at(self, symbols, makes)

    monkeypatch.setattr(UnbackedPart, "at", bind)
    ran: list[UnbackedReplay] = []
    finish = UnbackedReplay._finish
    monkeypatch.setattr(UnbackedReplay, "_finish", lambda self, state: (ran.append(self), finish(self, state))[1])
    plain = _experts("cpu")
    for i in range(12):
        torch.testing.assert_close(run(_rows("cpu", i)), plain(_rows("cpu", i)))
    assert len(ran) == 12 and not bound


def test_sizes_of_zero_and_one_go_another_way() -> None:
    def call(x: Tensor) -> Tensor:
        picked = x[x > 0]
        return picked.sum() * 2 if picked.numel() > 1 else picked.sum() - picked.numel()

    run = torchlazy.compile(call, audit=False)
    for i in range(40):
        x = data("cpu", 8, seed=i)
        x = -x.abs() if i % 7 == 6 else torch.where(torch.arange(8) == 2, 1.0, -1.0) if i % 7 == 5 else x
        torch.testing.assert_close(run(x), call(x), msg=lambda text, n=i: f"call {n}: {text}")
    assert run.report().replays >= 25, run.report()


def test_a_branch_on_a_size_is_asked_at_each_size() -> None:
    def call(x: Tensor) -> Tensor:
        picked = x[x > 0]
        return picked.cumsum(0) if picked.shape[0] > 20 else picked.flip(0) * picked.shape[0]

    run = torchlazy.compile(call, audit=False)
    for i in range(40):
        x = data("cpu", 40, seed=i)
        torch.testing.assert_close(run(x), call(x), msg=lambda text, n=i: f"call {n}: {text}")
    assert run.report().replays >= 20, run.report()


def test_sizes_of_arguments_may_vary_beside_those_of_the_data() -> None:
    plain, run = _experts("cpu"), torchlazy.compile(_experts("cpu"), audit=False)
    for i in range(50):
        x = data("cpu", 30 + 5 * (3 * i % 4), 4, seed=i)
        torch.testing.assert_close(run(x), plain(x), rtol=1e-4, atol=1e-5)
    assert run.report().captures <= 10 and not run.report().verified, run.report()


def test_what_fails_behind_the_sizes_is_eagers_error_and_state() -> None:
    seen = torch.zeros(3)

    def call(x: Tensor, table: Tensor) -> Tensor:
        rows = torch.where(x > 0)[0]
        seen.add_(rows.sum())
        return table[rows * 2]

    run = torchlazy.compile(call, audit=False)
    for i in range(16):
        run(data("cpu", 12, seed=i), torch.zeros(24, 2))
    before = seen.clone()
    with pytest.raises(IndexError):
        run(torch.ones(12), torch.zeros(12, 2)).sum().item()
    torch.testing.assert_close(seen, before + 66)
