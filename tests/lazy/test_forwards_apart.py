"""Several forwards, each with a read, before one backward: each is planned together with its part of the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.compiled.replay import split
from torchlazy.runtime.cuda import graphed_pair

from tests.lazy.cpu_graphs import cpu_graphs
from tests.lazy.test_rounds_apart import Accumulation, _net, ran

__all__ = ["ran"]  # the fixture


class Reinforce(Accumulation):
    """Actions are looked at after each forward."""

    autocasts = False

    def __init__(self, norm: bool) -> None:
        self.model = _net(6, 16, 3, norm=norm).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)

    def loss_of(self, part: torch.Tensor) -> tuple[torch.Tensor, float]:
        with torch.autocast("lazy", dtype=torch.bfloat16, enabled=self.autocasts):
            chances = F.log_softmax(self.model(part).float(), -1)
        best = chances.detach().amax().item()
        return -chances[:, 0].mean(), best

    def __call__(self, x: torch.Tensor) -> Any:
        total, seen = torch.zeros((), device=x.device), []
        for part in x.chunk(self.rounds):
            loss, best = self.loss_of(part)
            total = total + loss
            seen.append(best)
        total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen, total.detach()


class InHalves(Reinforce):
    autocasts = True


class Stacked(Reinforce):
    """Losses are put together at the end, in another order, one of them twice; one forward is told as well."""

    def __call__(self, x: torch.Tensor) -> Any:
        losses, seen = [], []
        for part in x.chunk(self.rounds):
            loss, best = self.loss_of(part)
            losses.append(loss)
            seen.append(best)
        torch.stack([losses[2], losses[0], losses[1], losses[0]]).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen, losses[1].detach()


class WritesBetween(InHalves):
    """A weight changes between two forwards: what was made of it before is no longer what it would be."""

    def __init__(self, norm: bool) -> None:
        super().__init__(norm)
        self.scale = torch.ones(6, device="lazy")
        self.model.register_forward_pre_hook(lambda module, args: (args[0] * self.scale,))

    def __call__(self, x: torch.Tensor) -> Any:
        losses, seen = [], []
        for number, part in enumerate(x.chunk(self.rounds)):
            loss, best = self.loss_of(part)
            losses.append(loss)
            seen.append(best)
            if number == 1:
                with torch.no_grad():
                    self.scale.mul_(0.5)
        sum(losses).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen


def _trained(kind: Any, norm: bool, mode: str | None) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    step = kind(norm)
    run = step.__call__ if mode is None else torchlazy.compile(step.__call__, mode=mode, audit=False)
    torch.manual_seed(1)
    found = torch.utils._pytree.tree_leaves([run(x.to("lazy")) for x in torch.randn(6, 12, 6)])
    results = [value.cpu() if isinstance(value, torch.Tensor) else value for value in found]
    return results, {name: value.cpu() for name, value in step.model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "norm", "mode", "pairs"),
    [
        (Reinforce, True, "default", 3),
        (InHalves, False, "default", 3),
        (Stacked, False, "default", 3),
        (WritesBetween, False, "default", 1),
        (InHalves, False, "reduce-overhead", None),
    ],
)
def test_values_are_those_of_the_step_itself(
    kind: Any, norm: bool, mode: str, pairs: int | None, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "reduce-overhead":
        cpu_graphs(monkeypatch)
    wanted = _trained(kind, norm, None)
    torchlazy.reset_metrics()
    found = _trained(kind, norm, mode)
    loose = {"rtol": 0.02, "atol": 0.02} if kind.autocasts else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(found, wanted, **loose)
    those = {id(pair): pair for pair in ran}
    if pairs is not None:
        assert len(those) >= pairs
        assert sum(pair.is_whole for pair in those.values()) == 1
    assert not torchlazy.metrics()["fallbacks"]


def test_copies_of_weights_are_kept_once(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = split._taking

    def noted(segment: Any, slots: Any, renamed: Any) -> Any:
        taken.append(len(slots))
        return take(segment, slots, renamed)

    monkeypatch.setattr(split, "_taking", noted)
    _trained(InHalves, False, "default")
    assert taken == [1, 1], taken  # the second and the third forward: the last layer's, which backward reads


@pytest.mark.parametrize(("kind", "norm"), [(Reinforce, True), (InHalves, False), (Stacked, False)])
def test_pairs_within_pairs_are_graphs(kind: Any, norm: bool, ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward's graph holds for its backward's lies where the graphs that run between the two do not work."""
    device = cpu_graphs(monkeypatch)
    wanted = _trained(kind, norm, None)
    torchlazy.reset_metrics()
    found = _trained(kind, norm, "reduce-overhead")
    loose = {"rtol": 0.02, "atol": 0.02} if kind.autocasts else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(found, wanted, **loose)
    nested = [pool for pool in device.others if pool.replays]
    assert len(nested) >= 2
    assert all(pool.replays % 2 == 0 for pool in nested)
    assert not torchlazy.metrics()["fallbacks"]


def test_graphs_in_one_memory_cannot_be_nested(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = cpu_graphs(monkeypatch)
    monkeypatch.setattr(graphed_pair, "memory_of_its_own", lambda _: device)
    with pytest.raises(RuntimeError, match="another CUDA graph ran between the halves"):
        _trained(Reinforce, False, "reduce-overhead")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", [Reinforce, InHalves, Stacked])
def test_pairs_within_pairs_are_graphs_on_a_gpu(kind: Any, ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nested: list[Any] = []
    own = graphed_pair.memory_of_its_own
    monkeypatch.setattr(graphed_pair, "memory_of_its_own", lambda device: nested.append(own(device)) or nested[-1])
    monkeypatch.setattr(kind, "autocasts", False)
    torchlazy.set_target("cuda")
    wanted = _trained(kind, False, None)
    torchlazy.reset_metrics()
    found = _trained(kind, False, "reduce-overhead")
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert sum(pool.replays > 0 for pool in nested) >= 2
    assert not torchlazy.metrics()["fallbacks"]
