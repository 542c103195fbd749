"""Verified replay: the recorder follows a known trace while the program repeats itself, and leaves it otherwise."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver, recorder

pytestmark = pytest.mark.usefixtures("device_in_python")


def chain(x: torch.Tensor, steps: int, factor: float = 2.0) -> torch.Tensor:
    for _ in range(steps):
        x = torch.relu(x.t() + x) * factor
    return x


def record(function: object, *args: object) -> tuple[bool, list[object]]:
    """Whether the whole trace was followed, and its entries, cut by the read at the end."""
    value = function(*args)  # type: ignore[operator]
    followed = recorder.path is not None and len(recorder.path.entries) >= len(recorder.entries) > 0
    entries = list(recorder.entries)
    value.tolist()
    return followed, entries


def test_the_same_program_is_followed_object_by_object() -> None:
    x = torch.rand(3, 3).to("lazy")
    record(chain, x, 5)
    record(chain, x, 5)
    followed, entries = record(chain, x, 5)
    assert followed
    again, same = record(chain, x, 5)
    assert again and all(a is b for a, b in zip(entries, same, strict=True))


def test_values_are_right_when_the_program_turns_off_the_path() -> None:
    x = torch.rand(4, 4)
    lazy = x.to("lazy")
    for steps in (3, 3, 3, 4, 2, 3, 4, 4):
        torch.testing.assert_close(chain(lazy, steps).cpu(), chain(x, steps))


def test_a_constant_that_changes_is_noticed() -> None:
    x = torch.rand(4, 6)
    lazy = x.to("lazy")
    for dim in (0, 0, 0, 1, 0, 1, 1):
        torch.testing.assert_close((lazy + 1).sum(dim).cpu(), (x + 1).sum(dim))
    for power in (2, 2, 2, 3, 2.0, True):
        torch.testing.assert_close(torch.pow(lazy + 1, power).cpu(), torch.pow(x + 1, power))


def test_another_shape_or_dtype_leaves_the_path() -> None:
    for shape, dtype in (((3, 3), torch.float32),) * 3 + (((5, 5), torch.float32), ((3, 3), torch.float64)):
        x = torch.rand(shape, dtype=dtype)
        torch.testing.assert_close(chain(x.to("lazy"), 3).cpu(), chain(x, 3))


def test_operands_that_swap_are_noticed() -> None:
    a, b = torch.rand(3), torch.rand(3)
    la, lb = a.to("lazy"), b.to("lazy")
    for first in (True, True, True, False, True):
        x, y = (a, b) if first else (b, a)
        lx, ly = (la, lb) if first else (lb, la)
        torch.testing.assert_close(((lx + 1) - (ly * 2)).cpu(), (x + 1) - (y * 2))
        torch.testing.assert_close((la + 1 - (lx * 2)).cpu(), a + 1 - (x * 2))


def test_programs_that_take_turns_are_both_followed() -> None:
    x = torch.rand(3, 3).to("lazy")
    train, evaluate = (lambda: chain(x, 4)), (lambda: chain(x, 4).sum())
    for _ in range(3):
        record(train)
        record(train)
        record(evaluate)
    assert record(train)[0]
    assert record(train)[0]
    assert record(evaluate)[0]


@pytest.mark.parametrize("written", [False, True])
def test_a_write_between_is_seen_by_followers(written: bool) -> None:
    x = torch.rand(3)
    lazy = x.clone().to("lazy")
    for step in range(5):
        if written and step == 3:
            lazy.add_(1)
            x = x + 1
        torch.testing.assert_close(((lazy + 1) * 2).cpu(), (x + 1) * 2)


def test_metrics_count_followed_operators() -> None:
    x = torch.rand(3, 3).to("lazy")
    for _ in range(2):
        chain(x, 3).tolist()
    torchlazy.reset_metrics()
    chain(x, 3).tolist()
    followed = torchlazy.metrics()["ops"]
    torchlazy.reset_metrics()
    (chain(x, 3)).tolist()
    assert torchlazy.metrics()["ops"] == followed > 0


def test_three_kinds_of_steps_in_turn_are_followed_and_share_their_beginnings() -> None:
    """Train, evaluate every third step, a longer report every tenth: after one round nothing leaves what is known."""
    x = torch.rand(3, 3).to("lazy")
    kinds = {"train": lambda: chain(x, 4), "evaluate": lambda: chain(x, 4).sum(), "report": lambda: chain(x, 6)}

    def kind_of(step: int) -> str:
        return "report" if step % 10 == 9 else "evaluate" if step % 3 == 2 else "train"

    for step in range(20):
        record(kinds[kind_of(step)])
    torchlazy.wait_for_compile()
    for step in range(20, 30):  # programs compiled by now are swapped in
        record(kinds[kind_of(step)])
    torchlazy.reset_metrics()
    entries = {}
    for step in range(30, 60):
        followed, entries[kind_of(step)] = record(kinds[kind_of(step)])
        assert followed, f"step {step}, {kind_of(step)}"
    assert torchlazy.metrics()["misses"] == 0
    common = len(entries["train"])
    for kind in ("evaluate", "report"):
        assert all(a is b for a, b in zip(entries["train"], entries[kind][:common], strict=True)), kind


def test_equal_layers_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "tiers", "off")

    def kernels(layers: int) -> int:
        torch.manual_seed(0)
        layer = lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))  # noqa: E731
        model = torch.nn.Sequential(*(layer() for _ in range(layers))).to("lazy")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        for _ in range(2):
            model(torch.rand(4, 16).to("lazy")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert driver.last_compiled is not None
        return len({kernel.key for kernel in driver.last_compiled.program.kernels})

    assert kernels(4) == kernels(8)
