"""Halves of a step as two CUDA graphs, without a GPU: the second takes over what the first left in place."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.cuda.graphed_pair import GraphedPair, Wire

from tests.lazy.cpu_graphs import GraphDevice


def _meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32, (1,) * len(shape), "cuda:0")


class _Half:
    device = 0

    def __init__(self, on: GraphDevice, inputs: int, numbers: int, donations: tuple[tuple[int, int], ...]) -> None:
        self.on = on
        metas = [(f"in{i}", _meta(4)) for i in range(inputs)] + [(f"scalar{i}", _meta()) for i in range(numbers)]
        self.program = SimpleNamespace(inputs=tuple(metas), scalars=(), donations=donations, steps=())
        self.runs = 0

    def prepare_capture(self) -> None:
        pass

    def fill_tables(self) -> None:
        pass


class _Forward(_Half):
    """(w, x) -> loss = sum(w * x); held: w * x, and seen: x + 1."""

    held: weakref.ref[torch.Tensor]

    def run(self, inputs: list[torch.Tensor], _: Any) -> list[torch.Tensor]:
        w, x = inputs
        inputs.clear()
        loss, seen, product = torch.full((), torch.nan), torch.full((4,), torch.nan), torch.full((4,), torch.nan)
        self.held = weakref.ref(product)
        where = product.data_ptr()

        def kernel() -> None:
            self.runs += 1
            MEMORY[where] = w * x
            loss.copy_((w * x).sum())
            seen.copy_(x + 1)

        self.on.launch(kernel)
        return [loss, seen, product]


class _Backward(_Half):
    """(held, seen, x, w, m, lr) -> w -= lr * (held + seen + x + m) in place, and held * 2."""

    def run(self, inputs: list[torch.Tensor], _: Any) -> list[torch.Tensor]:
        held, seen, x, w, m, lr = inputs
        inputs.clear()
        where = held.data_ptr()
        del held
        double = torch.full((4,), torch.nan)

        def kernel() -> None:
            self.runs += 1
            w.sub_(lr * (MEMORY[where] + seen + x + m))
            double.copy_(MEMORY[where] * 2)

        self.on.launch(kernel)
        return [w, double]


MEMORY: dict[int, torch.Tensor] = {}  # by address: what the device has there, whoever holds it
WIRES = (
    Wire("held", 2),
    Wire("result", 1),
    Wire("given", 1, 1),
    Wire("given", 0, 0),
    Wire("own", 2, 2),
    Wire("number", 0),
)


class _Pair:
    def __init__(self, refusals: int = 0) -> None:
        self.on = GraphDevice(refusals)
        self.first = _Forward(self.on, 2, 0, ())
        self.second = _Backward(self.on, 5, 1, ((0, 3),))
        self.graphs = GraphedPair(self.first, self.second, WIRES, range(2), self.on)  # type: ignore[arg-type]
        self.w = torch.arange(4.0)

    def capture(self, x: torch.Tensor) -> None:
        self.graphs.capture([self.w, x], [True, False], [], [self.w, None, None])

    def step(self, x: torch.Tensor, m: torch.Tensor, lr: float) -> list[torch.Tensor]:
        first = self.graphs.run_first([self.w, x], [], [self.w, None, None])
        return [*first, *self.graphs.run_second([self.w, x, m], [lr])]


@pytest.mark.parametrize("refusals", [0, 1])
def test_both_halves_give_what_they_give_one_after_the_other(refusals: int) -> None:
    pair = _Pair(refusals)
    want = torch.arange(4.0)
    for number in range(3):
        x, m, lr = torch.full((4,), number + 1.0), torch.arange(4.0) * number, 0.5 / (number + 1)
        if not number:
            pair.capture(x)
            assert torch.equal(pair.w, want)
            assert pair.first.runs == pair.second.runs == bool(refusals)
            assert pair.first.held() is None  # the second program's to use again
        loss, seen, w, double = pair.step(x, m, lr)
        product = want * x
        want = want - lr * (product + x + 1 + x + m)
        assert torch.equal(loss, product.sum()) and torch.equal(seen, x + 1)
        assert w is pair.w and torch.equal(w, want) and torch.equal(double, product * 2)
    assert pair.on.replays == 6
    assert pair.on.rooms[-2:] == [16, 0]  # what crosses, and no piece of its own for the second graph


def test_results_are_memory_of_their_own() -> None:
    pair = _Pair()
    pair.capture(torch.ones(4))
    found = pair.step(torch.ones(4), torch.ones(4), 0.5)
    before = [value.clone() for value in found if value is not pair.w]
    pair.step(torch.full((4,), 3.0), torch.ones(4), 0.5)
    assert all(torch.equal(a, b) for a, b in zip([v for v in found if v is not pair.w], before, strict=True))


def test_what_moves_is_refused_before_anything_runs() -> None:
    pair = _Pair()
    pair.capture(torch.ones(4))
    with pytest.raises(ValueError, match="has moved"):
        pair.graphs.run_first([pair.w, torch.ones(4)], [], [pair.w.clone(), None, None])
    with pytest.raises(ValueError, match="has moved"):
        pair.graphs.run_first([pair.w.clone(), torch.ones(4)], [], [pair.w, None, None])
    assert pair.on.replays == 0


def test_memory_that_moves_and_is_overwritten_is_copied_there_and_back() -> None:
    pair = _Pair()
    x, m = torch.ones(4), torch.full((4,), 2.0)
    for number in range(3):
        w = torch.arange(4.0) + number
        if not number:
            pair.graphs.capture([w, x], [False, False], [], [None, None, None])
        want = w - 0.5 * (w * x + x + 1 + x + m)
        pair.graphs.run_first([w, x], [], [None, None, None])
        found, _ = pair.graphs.run_second([w, x, m], [0.5])
        assert found is w and torch.equal(w, want)


def test_another_graph_between_the_halves_is_an_error() -> None:
    pair = _Pair()
    pair.capture(torch.ones(4))
    pair.graphs.run_first([pair.w, torch.ones(4)], [], [pair.w, None, None])
    pair.on.replay([])
    with pytest.raises(RuntimeError, match="what crosses is lost"):
        pair.graphs.run_second([pair.w, torch.ones(4), torch.ones(4)], [0.5])
    assert torch.equal(pair.w, torch.arange(4.0))


def test_a_refusal_for_good_leaves_the_state() -> None:
    pair = _Pair(refusals=9)
    with pytest.raises(RuntimeError, match="not permitted"):
        pair.capture(torch.ones(4))
    assert torch.equal(pair.w, torch.arange(4.0))
