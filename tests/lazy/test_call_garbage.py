"""Calls that leave cycles of objects behind: they replay, and audits find nothing, whenever Python's collector ran."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")
Call = Callable[[torch.Tensor], torch.Tensor]


class Node:
    """An object of a call's own."""

    def __init__(self, value: Any = None, parent: Node | None = None) -> None:
        self.value, self.parent, self.children = value, parent, list[Node]()


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)


def tree(device: str) -> Call:
    """Nodes that know their parents, built and read by functions that know themselves."""
    model = _model(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        def build(depth: int, parent: Node | None) -> Node:
            node = Node(x * depth, parent)
            node.children = [build(depth - 1, node) for _ in range(2 if depth else 0)]
            return node

        def total(node: Node) -> Any:
            return node.value + sum(total(child) for child in node.children)

        return model(total(build(2, None))).detach()

    return call


def read_on_the_host(device: str) -> Call:
    """The cycle is there when a value is read."""
    model = _model(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        first = Node(x * 2)
        first.children.append(Node(first.value + 1, first))
        sign = 1 if first.value.sum().item() > 0 else -1
        return (model(first.children[0].value) * sign).detach()

    return call


def training(device: str) -> Call:
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def call(x: torch.Tensor) -> torch.Tensor:
        first = Node(x * 2)
        first.children.append(Node(model(first.value), first))
        loss = first.children[0].value.square().mean()
        first.parent = Node(loss, first)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return call


def an_error_that_is_caught(device: str) -> Call:
    """Its traceback names the frame that holds it."""
    model = _model(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        scaled = x * 3
        try:
            raise ValueError(scaled + 1)
        except ValueError as error:
            kept = error
        return model(scaled).detach() if kept.args else scaled

    return call


def with_gradients(device: str) -> Call:
    model = _model(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        first = Node(x * 2)
        first.children.append(Node(model(first.value), first))
        found: torch.Tensor = first.children[0].value
        return found

    return call


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("program", [tree, read_on_the_host, training, an_error_that_is_caught, with_gradients])
def test_cycles_of_objects(program: Callable[[str], Call], device: str) -> None:
    """The collector runs after some calls."""
    plain, compiled = program("cpu"), torchlazy.compile(program(device))
    for number in range(6):
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x.to(device)).cpu(), plain(x))
        if number in (1, 4):
            gc.collect()
    report = compiled.report()
    assert not report.alarm and report.verified <= 1, report
    assert report.audits >= 2 and report.captures <= 2, report


def masked(device: str) -> Call:
    """Its size is known when the data is."""
    return lambda x: x[x > 0].sum()


def collected_within(device: str) -> Call:
    """The collector runs in the middle of the call, over the youngest."""
    call = tree(device)

    def collected(x: torch.Tensor) -> torch.Tensor:
        gc.collect(0)
        return call(x)

    return collected


@pytest.mark.parametrize("program", [masked, tree, collected_within])
def test_what_a_capture_left_in_cycles_is_found_among_the_young(
    program: Callable[[str], Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection walks every object of the process: where many libraries are loaded, for half a second."""
    generations: list[int] = []
    collect = gc.collect

    def noted(generation: int = 2) -> int:
        generations.append(generation)
        return collect(generation)

    compiled = torchlazy.compile(program("cpu"))
    monkeypatch.setattr(gc, "collect", noted)
    for seed in range(3):
        compiled(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
    assert compiled.report().captures
    assert 2 not in generations, generations
    assert bool(generations) == (program is not masked), "what this one leaves is in no cycle"
