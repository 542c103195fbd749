"""Random chains of equal layers: the loops that are linked by layers compute what those of the whole trace do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchlazy.inductor import interpret
from torchlazy.inductor.ir import LoopGraph
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.join_traces import SCALAR
from torchlazy.lazy.plan.layers.units import Split, split
from torchlazy.lazy.trace.trace import CutTrace, slots_in

from tests.lazy.joined_traces import joined_step
from tests.lazy.recorded_traces import OPTIONS
from tests.lazy.test_layers_by_units import Block, adamw, sgd, trace_of

pytestmark = pytest.mark.usefixtures("device_in_python")

WIDTH = 8

PIECES: tuple[Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda p, x, first: p.linear(x),
    lambda p, x, first: x + p.linear(p.norm(x)),
    lambda p, x, first: x + torch.sub(*p.wide(x).split(WIDTH, -1)),
    lambda p, x, first: F.dropout(x * p.scale, 0.3),
    lambda p, x, first: x.transpose(0, 1).contiguous().transpose(0, 1) + p.scale,
    lambda p, x, first: x.flatten(0, 1).sin().view(x.shape) * p.scale,
    lambda p, x, first: p.linear(x.bfloat16().float()),
    lambda p, x, first: torch.cat([x[..., :4], x[..., 4:] * 2], -1),
    lambda p, x, first: first + p.norm(x),
    lambda p, x, first: x.cumsum(-1) * p.scale,
    lambda p, x, first: x.expand(2, *x.shape).mean(0) * p.scale,
    lambda p, x, first: F.scaled_dot_product_attention(x[None], p.linear(x)[None], x[None])[0],
)


class Piece(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.wide, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.number = number

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return PIECES[self.number](self, x, first)


class RandomChain(nn.Module):
    """Equal layers of one to four pieces; one may differ, all may be summed, one piece may be shared."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        kinds = [chance.randrange(7), *(chance.randrange(len(PIECES)) for _ in range(chance.randint(0, 3)))]
        self.layers = nn.ModuleList(nn.ModuleList([Piece(kind) for kind in kinds]) for _ in range(chance.randint(4, 7)))
        self.shared = Piece(kinds[0]) if chance.random() < 0.2 else None
        self.mode, self.odd = chance.randrange(4), chance.randrange(len(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, results = x, []
        for number, layer in enumerate(self.layers):
            for piece in layer:  # type: ignore[attr-defined]
                x = piece(x, first)
            x = x if self.shared is None else self.shared(x, first)
            x = x * 2 if self.mode == 2 and number == self.odd else x
            first = x if self.mode == 3 else first
            results.append(x)
        return torch.stack(results).sum(0) if self.mode == 1 else x


def computed(trace: CutTrace, loops: Sequence[LoopGraph], given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the trace, by its loops or those of its two halves."""
    numbers = {f"{SCALAR}{n}": kind(0.5) if kind is float else 12345 + n for n, kind in enumerate(trace.scalar_kinds)}
    known = dict(given)
    found: list[torch.Tensor] = []
    for number, graph in enumerate(loops):
        inputs = [known[buffer.name] for buffer in graph.inputs]
        made = interpret.run(graph, inputs, [numbers[name] for name, _ in graph.scalars])
        results = len(made) if number or trace.half is None else trace.half.outputs
        known |= dict(zip(graph.outputs, made, strict=True))
        known |= {f"result{n}": value for n, value in enumerate(made[:results])}
        known |= {f"held{n}": value for n, value in enumerate(made[results:])}
        found += made[:results]
    return found


def assert_equal(trace: CutTrace, tolerance: float = 1e-4) -> None:
    lowered = pipeline._lower_by_layers(trace, OPTIONS["cpp"], {})
    if lowered is None:
        pytest.skip("nothing repeats")
    metas = [geometry.meta for _, geometry in trace.inputs]
    data = [torch.rand(m.shape) if m.dtype.is_floating_point else torch.zeros(m.shape) for m in metas]
    empty = [torch.empty_strided(m.shape, m.strides, dtype=m.dtype) for m in metas]
    given = {f"in{n}": laid.copy_(values) for n, (laid, values) in enumerate(zip(empty, data, strict=True))}
    ours, whole = (computed(trace, x, given) for x in (lowered[0], pipeline._lower(trace, OPTIONS["cpp"], {}).loops))
    assert len(ours) == len(whole) == len(trace.outputs)
    for one, other in zip(ours, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("seed", range(16))
def test_linked_loops_compute_the_whole(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    optimize = chance.choice(
        [adamw, sgd, lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.SGD(p, lr=0.1)]
    )
    clips, amp = chance.random() < 0.3, chance.random() < 0.2
    if chance.random() < 0.4:
        trace = joined_step(lambda: RandomChain(chance), (3, 4, WIDTH), "cpu", optimize).first
    else:
        trace = trace_of(RandomChain(chance), optimize, 3, amp, clips)
    if trace.device != "cpu":
        pytest.skip("recorded for a GPU, whose library calls the interpreter cannot make on the CPU")
    assert_equal(trace, 2e-2 if amp else 1e-4)


class WithDeadOperators(nn.Module):
    """Layers that compute what nothing reads, after an operator over a list of all their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks: list[Any] = list(self.layers)
        weights = [layer.up.weight for layer in blocks]
        for _ in range(4):
            weights = list(torch._foreach_mul(weights, 0.9))
        for layer, weight in zip(blocks, weights, strict=True):
            x.sin().cos()
            x = layer(x) * weight.mean()
        return x


def test_the_cut_stays_where_it_is() -> None:
    joined = joined_step(WithDeadOperators, (3, 4, WIDTH), "cpu", adamw)
    trace = joined.first
    assert trace.half is not None
    found = split(trace)
    assert isinstance(found, Split)
    late = {number.number for entry in trace.entries[trace.half.entries :] for number in slots_in(entry.outputs)}
    given = {number.number for number, _ in trace.inputs[trace.half.inputs :]}
    for unit in found.units:
        slots = [source for kind, source in unit.sources if kind == "slot"]
        sides = [at < (found.cut or 0) for at in unit.at]
        if sides == [True]:  # a unit of the first half alone reads nothing of the second
            assert late.isdisjoint(slots) and given.isdisjoint(slots)
        assert sides in ([True], [False], [True, False])
    assert_equal(trace)
