"""Hot sizes: a program of its own for the size that takes most runs of a template, made in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torchlazy.lazy.api import driver
from torchlazy.lazy.config import Config
from torchlazy.lazy.run import hot_sizes
from torchlazy.lazy.run.dynamic_program import BoundRun
from torchlazy.lazy.run.workers import CompilePool

pytestmark = pytest.mark.usefixtures("device_in_python")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes are hot after ten runs, whatever these took."""
    monkeypatch.setattr(hot_sizes, "RUNS", 10)
    monkeypatch.setattr(hot_sizes, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(hot_sizes, "TIMES_COMPILING", 0.0)
    kept = {name: getattr(torchlazy.config, name) for name in ("dynamic", "tiers", "hot_sizes")}
    torchlazy.config.dynamic, torchlazy.config.tiers, torchlazy.config.hot_sizes = "on", "on", "on"
    torchlazy.wait_for_compile()
    driver.forget()
    torchlazy.reset_metrics()
    yield
    torchlazy.wait_for_compile()
    driver.forget()
    for name, value in kept.items():
        setattr(torchlazy.config, name, value)


def one(size: int) -> Tensor:
    """A size-dependent program with a reduction and a product."""
    x = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / 7
    y = x.to("lazy")
    return ((y @ y.T).softmax(-1) * size + y.sum()).cpu()


def expected(size: int) -> Tensor:
    x = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / 7
    return (x @ x.T).softmax(-1) * size + x.sum()


def with_a_template(run: Callable[[int], Any] = one) -> None:
    """Sizes 5 and 7 give a program for all sizes."""
    for size in (5, 5, 7, 7):
        run(size)
        torchlazy.wait_for_compile()
    run(9)
    assert torchlazy.metrics()["templates"] == 1


def is_own() -> bool:
    """Whether the last run was by a program of its own."""
    assert driver.last_compiled is not None
    run: Any = driver.last_compiled.run
    assert isinstance(run, BoundRun)
    return run.count is not None and run.program is run.count.own.program if run.count and run.count.own else False


def test_a_hot_size_gets_a_program_of_its_own_and_others_keep_the_template() -> None:
    with_a_template()
    for _ in range(25):
        torch.testing.assert_close(one(11), expected(11))
    torchlazy.wait_for_compile()
    compiles = torchlazy.metrics()["compiles"]
    torch.testing.assert_close(one(11), expected(11))
    assert is_own()
    assert not driver.last_compiled.run.program.symbols  # type: ignore[union-attr]
    for size in (9, 12, 13):
        torch.testing.assert_close(one(size), expected(size))
        assert not is_own()
    torch.testing.assert_close(one(11), expected(11))
    assert is_own()
    counts = torchlazy.metrics()
    assert (counts["hot_sizes"], counts["compiles"]) == (1, compiles)
    assert counts["hot_seconds"] > 0
    assert "hot sizes: 1 made" in str(torchlazy.report())


def test_steps_train_on_when_the_program_changes() -> None:
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = losses[device] = []

        def step(size: int) -> None:
            x = (torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / size).to(device)  # noqa: B023
            loss = (model(x) - 1).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            found.append(loss.item())  # noqa: B023

        for size in (5, 5, 7, 7, 9, *[12] * 24, 8, 12, 12):
            step(size)
            if device == "lazy":
                torchlazy.wait_for_compile()
    assert torchlazy.metrics()["hot_sizes"] >= 1
    torch.testing.assert_close(losses["lazy"], losses["cpu"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("tiers", "foreground"), ("hot_sizes", "off")])
def test_none_is_made_where_it_is_off(name: str, value: str) -> None:
    with_a_template()
    setattr(torchlazy.config, name, value)
    for _ in range(35):
        one(11)
    torchlazy.wait_for_compile()
    one(11)
    assert not is_own() and torchlazy.metrics()["hot_sizes"] == 0


def test_without_tiers_nothing_depends_on_time() -> None:
    torchlazy.config.tiers = "off"
    for size in (5, 7, *[11] * 40):
        one(size)
    assert torchlazy.metrics()["templates"] == 1 and torchlazy.metrics()["hot_sizes"] == 0


def test_a_size_among_many_is_not_hot() -> None:
    with_a_template()
    for turn in range(60):
        one(10 + turn % 3)
    torchlazy.wait_for_compile()
    assert torchlazy.metrics()["hot_sizes"] == 0


def test_it_must_have_been_in_use_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_sizes, "LEAST_SECONDS", 3600.0)
    with_a_template()
    for _ in range(40):
        one(11)
    torchlazy.wait_for_compile()
    assert torchlazy.metrics()["hot_sizes"] == 0


def test_one_more_takes_the_place_of_the_least_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_sizes, "MOST", 1)
    with_a_template()
    for size in (11, 12):
        for _ in range(25):
            one(size)
            torchlazy.wait_for_compile()
        one(size)
        assert is_own()
    torch.testing.assert_close(one(11), expected(11))
    assert not is_own()
    counts = torchlazy.metrics()
    assert (counts["hot_sizes"], counts["hot_sizes_dropped"]) == (2, 1)


def test_what_does_not_compile_stays_with_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    with_a_template()

    def broken(*_: Any) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr(driver.tiers.hot_sizes, "_make", broken)
    for _ in range(35):
        torch.testing.assert_close(one(11), expected(11))
    torchlazy.wait_for_compile()
    assert not is_own()
    reasons = [reason for reason in torchlazy.metrics()["fallbacks"] if "hot size" in reason]
    assert len(reasons) == 1 and "a mistake" in reasons[0]
    assert torchlazy.metrics()["fallbacks"][reasons[0]] == 1


def test_replays_take_it_too() -> None:
    weight = torch.arange(36, dtype=torch.float32).reshape(6, 6) / 36

    @torchlazy.compile
    def call(x: Tensor) -> Tensor:
        return (x @ weight).softmax(-1) * x.shape[0]

    def run(size: int) -> None:
        x = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / 7
        torch.testing.assert_close(call(x), (x @ weight).softmax(-1) * size)

    for size in (5, 5, 5, 7, 7, 7, 9, 9):
        run(size)
        torchlazy.wait_for_compile()
    for _ in range(40):
        run(11)
    torchlazy.wait_for_compile()
    for size in (11, 9, 11, 13):
        run(size)
    assert torchlazy.metrics()["hot_sizes"] == 1


def test_what_is_not_urgent_comes_last() -> None:
    pool = CompilePool(1)
    order: list[str] = []
    answers = pool._finish

    def watched(job: Any, answer: Any) -> None:
        order.extend(name for name, one in jobs.items() if one is job)
        answers(job, answer)

    pool._finish = watched  # type: ignore[method-assign]
    with pool._changed:  # no job is taken before all are there
        first = pool.submit({"nothing": 0})
        jobs = {"later": pool.submit({"nothing": 1}, is_urgent=False), "now": pool.submit({"nothing": 2})}
    assert pool.wait_for(first).kind != "compiled"
    pool.wait()
    pool.close()
    assert order == ["now", "later"]


@pytest.mark.parametrize(("text", "wanted"), [(None, "on"), ("0", "off"), ("off", "off"), ("1", "on")])
def test_the_environment_switches_it(monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: str) -> None:
    monkeypatch.delenv("TORCHLAZY_HOT_SIZES", raising=False)
    if text is not None:
        monkeypatch.setenv("TORCHLAZY_HOT_SIZES", text)
    assert Config().hot_sizes == wanted
