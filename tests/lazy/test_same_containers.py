"""Containers of the state that a compiled call fills stay the objects that they were, whoever else holds them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torchlazy


def _new_key(held, x):
    held["n"] += 1
    held["t"] = held["t"] + x
    held["made"] = held["t"] * 2


def _new_name(held, x):
    held["t"] = held["t"] + x
    held["name"] = "sum"


def _new_item(held, x):
    held[0] = held[0] + x
    held[1] = held[1] * 2
    if len(held) < 3:
        held.append(held[0] * 3)
    else:
        held[2] = held[0] * 3


CASES = {
    "new key": (_new_key, lambda device: {"n": 0, "t": torch.zeros(2, device=device)}),
    "new name": (_new_name, lambda device: {"t": torch.zeros(2, device=device)}),
    "new item": (_new_item, lambda device: [torch.zeros(2, device=device), 1.5]),
}


def _plainly(held):
    rows = held.items() if isinstance(held, dict) else enumerate(held)
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in rows}


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("where", ["cell", "attribute"])
@pytest.mark.parametrize("case", CASES)
def test_a_container_that_calls_fill_stays_the_same_object(case, where, device, compiled):
    fill, make = CASES[case]

    def stepping(held):
        state = SimpleNamespace(held=held)

        def through_cell(x):
            fill(held, x)
            return x * 2

        def through_attribute(x):
            fill(state.held, x)
            return x * 2

        return through_cell if where == "cell" else through_attribute

    held, wanted = make(device), make("cpu")
    step, plain = torchlazy.compile(stepping(held), audit=False), stepping(wanted)
    for number in range(8):
        step(torch.full((2,), float(number), device=device))
        plain(torch.full((2,), float(number)))
        assert _plainly(held) == _plainly(wanted)
    assert step.report().replays > 0
