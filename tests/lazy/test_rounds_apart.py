"""Calls of several rounds, each of which reads its loss: every forward is planned together with its own backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.compiled.replay import pairs as replay_pairs
from torchlazy.lazy.run.segments import watch

from tests.lazy.cpu_graphs import cpu_graphs


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[replay_pairs.CutPair]:
    """Programs at first sight, pairs whatever they hold; lists the pairs of each second half that ran."""
    monkeypatch.setattr(torchlazy.config, "tiers", "off")
    monkeypatch.setattr(torchlazy.config, "strict", True)
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    monkeypatch.setattr(replay_pairs, "HOT", 2)  # the rounds are slices of one tensor: of one program for all offsets
    found: list[replay_pairs.CutPair] = []
    second = replay_pairs.PairRun.run_second

    def run_second(self: replay_pairs.PairRun, *args: Any) -> list[Any]:
        found.append(self.pair)
        return second(self, *args)

    monkeypatch.setattr(replay_pairs.PairRun, "run_second", run_second)
    return found


def _net(*sizes: int, norm: bool) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), *([torch.nn.BatchNorm1d(b)] if norm else []), torch.nn.GELU()]
    return torch.nn.Sequential(*layers[:-1])


class Accumulation:
    """Three rounds, the last one with the optimizer's step."""

    rounds = 3

    def __init__(self, norm: bool) -> None:
        self.model = _net(6, 16, 16, 3, norm=norm).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)

    def __call__(self, x: torch.Tensor) -> list[float]:
        losses = []
        for part in x.chunk(self.rounds):
            loss = self.model(part).square().mean() / self.rounds
            losses.append(loss.item())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


class Adversaries:
    """A GAN's two losses, both read, each with a step of its own optimizer."""

    rounds = 2

    def __init__(self, norm: bool) -> None:
        self.maker, self.judge = _net(6, 16, 6, norm=norm).to("lazy"), _net(6, 16, 1, norm=norm).to("lazy")
        self.of_maker = torch.optim.AdamW(self.maker.parameters(), lr=0.01, foreach=True)
        self.of_judge = torch.optim.AdamW(self.judge.parameters(), lr=0.01, foreach=True)
        self.model = torch.nn.ModuleList([self.maker, self.judge])

    def __call__(self, x: torch.Tensor) -> list[float]:
        noise = torch.sin(x * 3)
        real, made = self.judge(x), self.judge(self.maker(noise).detach())
        loss = F.softplus(-real).mean() + F.softplus(made).mean()
        losses = [loss.item()]
        loss.backward()
        self.of_judge.step()
        self.of_judge.zero_grad()
        loss = F.softplus(-self.judge(self.maker(noise))).mean()
        losses.append(loss.item())
        loss.backward()
        self.of_maker.step()
        self.model.zero_grad()
        return losses


class Prints(Accumulation):
    """What a round computes is used in later ones, and told at the end."""

    def __call__(self, x: torch.Tensor) -> Any:
        kept, losses = 0.0, []
        for part in x.chunk(self.rounds):
            hidden = self.model[0](part)
            loss = (self.model[1:](hidden).square().mean() + 0.1 * kept) / self.rounds
            kept = hidden.detach().abs().mean()
            losses.append(loss.item())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return losses, kept


def _train(kind: Any, norm: bool, mode: str | None) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    step = kind(norm)
    run = step.__call__ if mode is None else torchlazy.compile(step.__call__, mode=mode)
    torch.manual_seed(1)
    found = [run(x.to("lazy")) for x in torch.randn(9, 12, 6)]
    results = [
        [v.cpu() if isinstance(v, torch.Tensor) else v for v in torch.utils._pytree.tree_leaves(r)] for r in found
    ]
    return results, {name: value.cpu() for name, value in step.model.state_dict().items()}


@pytest.mark.parametrize(("mode", "norm"), [("default", False), ("default", True), ("reduce-overhead", False)])
@pytest.mark.parametrize("kind", [Accumulation, Adversaries, Prints])
def test_each_round_is_planned_as_one(
    kind: Any, norm: bool, mode: str, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "reduce-overhead":
        cpu_graphs(monkeypatch)
    wanted = _train(kind, norm, None)
    torchlazy.reset_metrics()
    found = _train(kind, norm, mode)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    pairs = len({id(pair) for pair in ran})
    if kind is Prints:  # gradients stay from call to call, and what is told at the end crosses as well
        assert pairs >= 2
        return
    assert pairs == kind.rounds
    if mode == "reduce-overhead":
        assert torchlazy.metrics()["graph_replays"] >= 2 * kind.rounds, torchlazy.metrics()["fallbacks"]
