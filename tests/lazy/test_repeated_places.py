"""Where repeated layers are put in, and which calls count each: checkpointed layers, schedules that end otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchlazy.inductor.scheduler import Schedule
from torchlazy.lazy.plan.layers import program
from torchlazy.lazy.plan.layers.check import has_effect
from torchlazy.lazy.plan.layers.names import NotPeriodic
from torchlazy.lazy.plan.layers.shorten import ShortTrace
from torchlazy.lazy.trace.trace import Float, scalar_slot

from tests.lazy.recorded_traces import assert_same
from tests.lazy.test_repeated_layers import Block, Chain, sgd, trace_of, transformer

pytestmark = pytest.mark.usefixtures("device_in_python")


def checkpointed(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_checkpointed_layers_have_the_same_program(language: str) -> None:
    """Attention without dropout may be called again or not, although torch tags it as one that draws."""
    assert_same(trace_of(Chain(checkpointed, Block), sgd), language)


def test_attention_with_dropout_draws() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not any(has_effect(op, (1, 2, 3, zero), ()) for zero in (0.0, Float(0.0), 0))
    assert not has_effect(op, (1, 2, 3), ())
    assert all(has_effect(op, (1, 2, 3, share), ()) for share in (0.5, Float(0.5), scalar_slot(0, float)))
    assert has_effect(op, (1, 2, 3), (("dropout_p", 0.1),))
    assert has_effect(torch.ops.aten.bernoulli.default, (1, 0.0), ())


@pytest.mark.parametrize("refused", [1, 2])
def test_layers_may_be_put_in_elsewhere(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Where a schedule does not repeat between the layers thought of, but does a layer later, or earlier."""
    places: list[int] = []
    plan = program.repeated_schedule

    def refuse_first(traces: ShortTrace, *told: Any) -> Schedule:
        places.append(traces.first)
        if len(places) <= refused:
            raise NotPeriodic("not here")
        return plan(traces, *told)

    monkeypatch.setattr(program, "repeated_schedule", refuse_first)
    assert_same(trace_of(transformer(), sgd), "cpp")
    first = places[0]
    assert places == [first, first + 1, first - 1][: refused + 1]
