"""torchlazy can be switched off, and one function exempted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torchlazy


@pytest.fixture
def switched_off() -> Iterator[None]:
    torchlazy.config.enabled = "off"
    yield
    torchlazy.config.enabled = "on"


@pytest.mark.usefixtures("switched_off")
def test_switched_off_nothing_is_recorded() -> None:
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return model(x).square().sum()

    compiled, compiled_model = torchlazy.compile(step), torchlazy.compile(model)
    by_torch = torch.compile(model, backend="torchlazy")
    for _ in range(4):
        assert torch.equal(compiled(x), step(x))
        assert torch.equal(compiled_model(x), model(x))
        assert torch.equal(by_torch(x), model(x))
    assert len(seen) == 8 and not compiled.report().captures
    with torchlazy.lazy_mode():
        assert not torchlazy.is_lazy(x * 2)


def test_the_switch_may_change_at_any_time() -> None:
    compiled = torchlazy.compile(lambda x: (x * 2).sum())
    x = torch.randn(3)
    with torchlazy.lazy_mode():
        torchlazy.config.enabled = "off"
        try:
            with torchlazy.lazy_mode():
                inner = x + 1
            values = [compiled(x) for _ in range(4)]
        finally:
            torchlazy.config.enabled = "on"
    assert torch.equal(inner, x + 1) and all(torch.equal(value, (x * 2).sum()) for value in values)
    assert torch.equal(compiled(x), (x * 2).sum()) and compiled.report().captures == 1


def test_the_variable_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAZY_ENABLED", "0")
    assert type(torchlazy.config)().enabled == "off"


@pytest.mark.filterwarnings("ignore:torchlazy.compile")
def test_a_disabled_function_runs_in_each_call() -> None:
    seen = []

    @torchlazy.disable
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0]))
        return x + 1

    compiled = torchlazy.compile(lambda x, looks: (look(x) if looks else x).sum())
    for n in range(6):
        x = torch.full((3,), float(n))
        assert torch.equal(compiled(x, True), (x + 1).sum())
        with torchlazy.lazy_mode():
            assert compiled(x, True).item() == 3 * n + 3
        compiled(x, False)
    assert seen == [n for n in range(6) for _ in range(2)]
    report = compiled.report()
    assert report.replays and any("torchlazy.disable exempts" in reason for reason in report.reasons)
    assert report.captures + report.replays + report.audits + report.verified == 18


def test_what_cannot_be_called_cannot_be_disabled() -> None:
    with pytest.raises(TypeError, match="disable"):
        torchlazy.disable(3)  # type: ignore[arg-type]
