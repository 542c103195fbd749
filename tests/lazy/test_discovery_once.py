"""Discovery runs again only where something that it found is another object: in an audit, and once a call has run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.compiled.capture import call as capture

pytestmark = pytest.mark.usefixtures("operator_by_operator")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each discovery."""
    times: list[int] = []
    real = capture.discover

    def discover(*args: Any) -> Any:
        times.append(1)
        return real(*args)

    monkeypatch.setattr(capture, "discover", discover)
    monkeypatch.setattr(torchlazy.config, "audit", "all")
    return times


def _count(run: Callable[..., Any], found: list[int], *args: Any, calls: int = 4) -> list[int]:
    """How often each of some calls discovers."""
    counts = []
    for _ in range(calls):
        found.clear()
        run(*args)
        counts.append(len(found))
    return counts


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_training_step_is_discovered_once(found: list[int], device: str) -> None:
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 4).to(device)

    def step(scale: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * math.sqrt(scale)  # Python's functions of numbers are others while it runs
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torchlazy.compile(step)
    run(2.0), run(2.0), run(2.0)  # the optimizer's first step, the capture, gradients from now on
    assert _count(run, found, 2.0) == [0, 0, 0, 0]
    assert run.report().audits >= 4
    assert not run.report().alarm


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_what_a_call_replaces_is_discovered(found: list[int], device: str) -> None:
    state = SimpleNamespace(scale=torch.ones(3).to(device), log=[])
    x = torch.full((3,), 2.0).to(device)

    def replaces(x: torch.Tensor) -> torch.Tensor:
        state.scale = state.scale * 2
        return x + state.scale

    run = torchlazy.compile(replaces)
    expected = 1.0
    for _ in range(6):
        found.clear()
        expected *= 2
        assert torch.equal(run(x).cpu(), torch.full((3,), 2 + expected))
        assert torch.equal(state.scale.cpu(), torch.full((3,), expected))
        assert found


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("kind", ["attribute", "list", "hook"])
def test_new_state_is_discovered_after_the_call(found: list[int], device: str, kind: str) -> None:
    state = SimpleNamespace(log=[])
    weight = torch.nn.Parameter(torch.ones(3).to(device))

    def adds(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        if kind == "attribute":
            setattr(state, "last", y.detach())  # noqa: B010
        elif kind == "list":
            state.log.append(y.detach())
        else:
            weight.register_hook(lambda grad: grad * 2)
        return y

    def begin() -> None:
        state.__dict__.clear()
        state.log = []

    run = torchlazy.compile(adds)
    for number in range(1, 5):
        begin()
        x = torch.full((3,), float(number)).to(device)
        y = run(x)
        assert torch.equal(y.detach().cpu(), torch.full((3,), float(number)))
        if kind == "attribute":
            assert torch.equal(state.last.cpu(), y.detach().cpu())
        elif kind == "list":
            assert [one.cpu().tolist() for one in state.log] == [y.detach().cpu().tolist()]
        else:
            weight.grad = None
            y.sum().backward()
            assert weight.grad is not None
            assert torch.equal(weight.grad.cpu(), torch.full((3,), float(number) * 2**number))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("kind", ["removed", "another kind"])
def test_a_number_that_varies_goes(found: list[int], device: str, kind: str) -> None:
    state = SimpleNamespace(scale=1.0)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * state.scale
        if kind == "removed":
            del state.scale
        else:
            state.scale = torch.ones(3, device=x.device)  # type: ignore[assignment]
        return y

    compiled = torchlazy.compile(run)
    for number in range(1, 7):
        state.scale = number / 2
        x = torch.ones(3).to(device)
        assert torch.equal(compiled(x).cpu(), torch.full((3,), number / 2))
        assert hasattr(state, "scale") == (kind != "removed")


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_cache_that_is_filled(found: list[int], device: str) -> None:
    @functools.lru_cache(maxsize=4)
    def table(length: int) -> torch.Tensor:
        return torch.arange(float(length), device=device)

    run = torchlazy.compile(lambda x: x + table(3))
    x = torch.ones(3).to(device)
    for number in range(8):
        if number == 4:
            table.cache_clear()
        found.clear()
        assert torch.equal(run(x).cpu(), torch.tensor([1.0, 2.0, 3.0]))
        assert found or number not in (0, 4)
    assert run.report().audits


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_other_objects_among_the_arguments(found: list[int], device: str) -> None:
    run = torchlazy.compile(lambda x, settings: x * settings.scale)
    for number in range(1, 6):
        x = torch.ones(3).to(device)
        settings = SimpleNamespace(scale=float(number % 2 + 1))
        assert torch.equal(run(x, settings).cpu(), torch.full((3,), settings.scale))
