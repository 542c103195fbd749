"""Numbers that a compiled call leaves in its state, where it stores a constant now and then: bounds of a schedule.

Invariant: the state after each call is eager's, also where a captured call stored the very value that was there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor

pytestmark = pytest.mark.usefixtures("operator_by_operator")


class Held:
    def __init__(self) -> None:
        self.value = 2.0


def in_an_attribute(holder: Held, x: Tensor) -> Tensor:
    holder.value = max(0.5, holder.value * 0.95)
    return x * holder.value


def in_a_branch(holder: Held, x: Tensor) -> Tensor:
    if holder.value < 1.0:
        holder.value = 0.5
    else:
        holder.value -= 0.1
    return x * holder.value


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("step", [in_an_attribute, in_a_branch])
def test_a_bound_that_is_stored_again(step: Callable[..., Any], passed: bool) -> None:
    def play(compiled: bool) -> tuple[list[Any], Any]:
        holder = Held()
        call: Any = step if passed else lambda x: step(holder, x)
        run = torchlazy.compile(call, audit=False) if compiled else call
        found = []
        for value in (*[None] * 4, *[0.5] * 4, 0.52, 0.51, 0.8, None, 0.5, 0.52, 1.9, None, 0.5, 0.7):
            holder.value = holder.value if value is None else value
            result = run(holder, torch.ones(2)) if passed else run(torch.ones(2))
            found.append((holder.value, result))
        return found, run

    wanted, _ = play(False)
    found, run = play(True)
    torch.testing.assert_close(found, wanted)
    assert run.report().replays >= 8, run.report()


def test_numbers_in_a_list_and_in_a_dictionary() -> None:
    def play(compiled: bool) -> tuple[list[Any], Any]:
        last, by_name = [2.0, 1.0], {"t": 2.0}

        def step(x: Tensor) -> Tensor:
            last[0] = max(0.5, last[0] * 0.9)
            by_name["t"] = min(3.0, by_name["t"] * 1.1)
            return x * last[0] + by_name["t"]

        run: Any = torchlazy.compile(step, audit=False) if compiled else step
        found = []
        for value in (*[None] * 4, *[0.5] * 4, 0.52, 0.51, 0.8, None, 0.5, 0.52):
            if value is not None:
                last[0], by_name["t"] = value, 3.5 - value
            found.append((run(torch.ones(2)), list(last), dict(by_name)))
        return found, run

    wanted, _ = play(False)
    found, run = play(True)
    torch.testing.assert_close(found, wanted)
    assert run.report().replays >= 4, run.report()


def test_a_schedule_at_its_bound_is_no_alarm() -> None:
    holder = Held()
    run = torchlazy.compile(lambda x: in_an_attribute(holder, x))
    for _ in range(60):
        run(torch.ones(2))
    assert holder.value == 0.5 and not run.report().alarm, run.report()
