"""Backwards whose Python may run once, views with gradient rules of their own, many tangents: as eager shows them."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch
import torchlazy

from tests.lazy.joint_corner_programs import PROGRAMS
from tests.lazy.joint_programs import Program, leaf
from tests.lazy.test_joint_programs import assert_seen, compiled, eager

WAYS = {"device": "lazy", "mode": "cpu", "compiled": "lazy", "hosted": "cpu"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_sees_what_eager_shows(program: Program, way: str, operator_by_operator: None) -> None:
    torchlazy.config.rng = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = program(eager, "cpu")
        with torchlazy.lazy_mode() if way == "mode" else contextlib.nullcontext():
            got = program(compiled if way in ("compiled", "hosted") else eager, WAYS[way])
    assert_seen(got, want, loose=False)


def _two(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.exp()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_result_that_others_are_computed_from_does_not_show_half_its_gradient(
    device: str, operator_by_operator: None
) -> None:
    call = torchlazy.compile(_two, audit=False)
    for turn in range(3):
        x = leaf(device, 3, seed=turn)
        first, second = call(x)
        first.retain_grad()
        first.sum().backward(retain_graph=True)  # this way nothing passes by
        torch.testing.assert_close(first.grad.cpu(), torch.ones(3))
        if not turn:  # captured: its own graph shows all
            continue
        with pytest.raises(RuntimeError, match=re.escape("retains its gradient, and other results of the call")):
            second.sum().backward()


@pytest.mark.usefixtures("device_in_python")
def test_checkpointed_statistics_are_replayed_where_all_of_it_is_recorded(operator_by_operator: None) -> None:
    norm = torch.nn.BatchNorm1d(4).to("lazy")
    net = torchlazy.compile(lambda x: torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False), audit=False)
    for turn in range(6):
        net(leaf("lazy", 5, 4, seed=turn)).sum().backward()
    assert net.report().replays >= 4, net.report()
    assert norm.num_batches_tracked.item() == 12


def _on_an_argument(x: torch.Tensor) -> torch.Tensor:
    torch.autograd.graph.get_gradient_edge(x).node.register_prehook(lambda given: (given[0] * 10,))
    return (x * 3).sum()


def _on_a_value(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.autograd.graph.get_gradient_edge(y).node.register_prehook(lambda given: (given[0] * 10,))
    return y.sum()


def _plain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("program", [_on_an_argument, _on_a_value, _plain])
def test_nodes_with_hooks_and_arguments_that_keep_their_gradient(program: Any, is_leaf: bool, device: str) -> None:
    """The node of a leaf, and what hangs on it, lives as long as a graph needs it; `retain_grad` of an argument keeps
    what arrives in the end."""

    def gradients(run: Any, device: str) -> list[Any]:
        found = []
        for number in range(5):
            x = leaf = torch.full((2,), number + 1.0, device=device).requires_grad_()
            if not is_leaf:
                x = leaf * 2
                x.retain_grad()
            run(x).backward()
            found.append((leaf.grad.tolist(), x.grad.tolist()))
        return found

    assert gradients(torchlazy.compile(program), device) == gradients(program, "cpu")
