"""Steps that read their loss before `backward()`, under CUDA graphs: two graphs of one plan, nothing copied between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.run.segments import watch
from torchlazy.runtime.cuda import graphed_pair

from tests.lazy.cpu_graphs import GraphDevice, cpu_graphs


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    monkeypatch.setattr(torchlazy.config, "tiers", "off")
    monkeypatch.setattr(torchlazy.config, "strict", True)
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    return cpu_graphs(monkeypatch)


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "convnet":
        return torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 5),
        )  # fmt: skip
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.LayerNorm(32), torch.nn.Linear(32, 5)
    )


class Training:
    """One model trained by a step; `event(training, number)` happens before each."""

    def __init__(self, kind: str, mode: str | None, reads: str) -> None:
        self.model = _model(kind).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        model, optimizer = self.model, self.optimizer

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            hidden = model[:2](x)
            loss = F.cross_entropy(model[2:](hidden), y)
            number = loss.item()
            if reads == "branch" and not number < 100.0:
                raise RuntimeError("the loss has exploded")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (number, hidden.detach()) if reads == "outputs" else loss.detach()

        self.step = step if mode is None else torchlazy.compile(step, mode=mode, audit=False)

    def run(self, steps: int = 10, event: Any = None) -> tuple[list[Any], dict[str, Any]]:
        torch.manual_seed(1)
        inputs, labels = torch.randn(steps, 16, 6), torch.randint(0, 5, (steps, 16))
        results = []
        for number, (x, y) in enumerate(zip(inputs, labels, strict=True)):
            if event is not None:
                event(self, number)
            found = self.step(x.to("lazy"), y.to("lazy"))
            results.append(
                [v.cpu() if isinstance(v, torch.Tensor) else v for v in torch.utils._pytree.tree_leaves(found)]
            )
        return results, {name: value.cpu() for name, value in self.model.state_dict().items()}


def _check(kind: str, reads: str, event: Any = None) -> dict[str, Any]:
    wanted = Training(kind, None, reads).run(event=event)
    torchlazy.reset_metrics()
    found = Training(kind, "reduce-overhead", reads).run(event=event)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return torchlazy.metrics()


@pytest.mark.parametrize("reads", ["loss", "outputs", "branch"])
@pytest.mark.parametrize("kind", ["mlp", "convnet"])
def test_values_are_those_of_the_step_itself(kind: str, reads: str, device: GraphDevice) -> None:
    metrics = _check(kind, reads)
    if (kind, reads) == ("convnet", "branch"):
        return  # the statistics that the first half writes are held back until the loss is looked at
    assert device.captures == 2, metrics["fallbacks"]
    assert metrics["graph_replays"] == device.replays >= 10
    assert not metrics["fallbacks"]


def test_what_crosses_is_not_copied(device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two results of the second half are new memory at most: the loss; parameters and states are written in place."""
    cloned: list[int] = []
    clone = torch.Tensor.clone  # exchanged before the first call: guards see it
    monkeypatch.setattr(torch.Tensor, "clone", lambda t, **kwargs: cloned.append(t.numel()) or clone(t, **kwargs))
    Training("mlp", "reduce-overhead", "loss").run()
    training = Training("mlp", "reduce-overhead", "loss")
    training.run(steps=6)
    cloned.clear()
    replays = device.replays
    training.run(steps=1)
    assert device.replays == replays + 2
    assert sum(cloned) < 64, cloned  # the loss and step counts; the forward holds 16 x 32 and more


def _replace_weight(training: Training, number: int) -> None:
    if number == 5:
        with torch.no_grad():
            weight = training.model[4].weight
            weight.data = copy.deepcopy(weight.detach() * 0.5)


def test_parameters_that_moved_are_captured_again(device: GraphDevice) -> None:
    metrics = _check("mlp", "loss", _replace_weight)
    assert metrics["graph_replays"] >= 8 and not metrics["fallbacks"]


@pytest.mark.parametrize("refused", ["at first", "for good"])
def test_captures_that_are_refused(refused: str, device: GraphDevice) -> None:
    device.refusals = 1 if refused == "at first" else 1000
    metrics = _check("mlp", "loss")
    if refused == "at first":
        assert metrics["graph_replays"] >= 10 and device.beside == 1
    else:
        assert not metrics["graph_replays"]
        assert any("no CUDA graph" in reason for reason in metrics["fallbacks"])


def test_halves_that_cannot_be_graphs_run_as_programs(device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise graphed_pair.CannotCapture("not today")

    monkeypatch.setattr(graphed_pair.GraphedPair, "capture", refuse)
    metrics = _check("mlp", "loss")
    assert not metrics["graph_replays"] and not device.captures
    assert metrics["fallbacks"] == {"no CUDA graph: CannotCapture: not today": 2}
