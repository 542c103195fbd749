"""Compiled calls whose results need gradients, replayed in C++: forward, graph and backward are as eager's.

Invariant: each program runs eagerly and compiled, on the CPU and on the lazy device, and everything that it tells is
equal; the last compiled calls were replayed without Python.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.compiled.inline_cache import InlineCache
from torchlazy.runtime.native.recorder_library import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY.wait() is None, reason="needs the native library")

TURNS = 32  # programs are there after the eleventh
Compile = Callable[[Any], Any]
Program = Callable[[Compile, str], list[Any]]


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each compiled call was replayed in C++."""
    found: list[bool] = []
    original = InlineCache.replayed

    def noted(self: InlineCache, *call: Any) -> Any:
        value = original(self, *call)
        found.append(value is not None)
        return value

    monkeypatch.setattr(InlineCache, "replayed", noted)
    return found


def compiled(function: Any) -> Any:
    return torchlazy.compile(function)


def eager(function: Any) -> Any:
    return function


def turns() -> Any:
    for turn in range(TURNS):
        if turn in (5, 8, 11):
            torchlazy.wait_for_compile()
        torch.manual_seed(turn)
        yield turn


def net(device: str, *more: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *more, nn.Linear(8, 3)).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]


def trained(compile: Compile, device: str) -> list[Any]:
    model = net(device)
    call, told = compile(model), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in turns():
        optimizer.zero_grad()
        loss = call(torch.randn(5, 4).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        told.append(loss.detach().cpu())
    return [*told, *(p.detach().cpu() for p in model.parameters())]


def accumulated(compile: Compile, device: str) -> list[Any]:
    model = net(device)
    call = compile(model)
    for _ in turns():
        call(torch.randn(5, 4).to(device)).sum().backward()  # the gradient is one number, expanded
    return gradients(model)


def normalised(compile: Compile, device: str) -> list[Any]:
    """Running statistics are written in place, without a version."""
    model = net(device, nn.BatchNorm1d(8))
    call, told = compile(model), []
    for _ in turns():
        call(torch.randn(5, 4).to(device)).square().mean().backward()
        told.append(model[2].running_mean.detach().cpu().clone())
    return [*told, model[2].num_batches_tracked.cpu(), *gradients(model)]


def evaluated_between(compile: Compile, device: str) -> list[Any]:
    model = net(device)
    call, told = compile(model), []
    for turn in turns():
        x = torch.randn(5, 4).to(device)
        with torch.no_grad() if turn % 3 == 2 else contextlib.nullcontext():
            found = call(x)
        told += [found.requires_grad, found.is_leaf, found.detach().cpu()]
        if found.requires_grad:
            found.square().sum().backward()
    return [*told, *gradients(model)]


def two_results(compile: Compile, device: str) -> list[Any]:
    """Each alone, both, in two backwards; one of them, computed of nothing that needs a gradient, has none."""
    weight = nn.Parameter(torch.full((3,), 0.5, device=device))
    call = compile(lambda x: (x * weight, (x + weight).exp(), x.sin()))
    told: list[Any] = []
    for turn in turns():
        first, second, plain = call(torch.randn(2, 3).to(device))
        told += [plain.requires_grad, plain.is_leaf, plain.cpu()]
        if turn % 4 == 0:
            first.sum().backward()
        elif turn % 4 == 1:
            second.sum().backward()
        elif turn % 4 == 2:
            (first.sum() + second.square().sum()).backward()
        else:
            first.sum().backward(retain_graph=True)
            second.t().square().sum().backward()
        told.append(weight.grad.detach().cpu().clone())
    return told


def hooks_on_results(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(model)
    for _ in turns():
        found = call(torch.randn(5, 4).to(device))
        found.retain_grad()
        found.register_hook(lambda g: (told.append(g.detach().cpu().clone()), g * 2)[1])
        found.sin().sum().backward()
        told.append(found.grad.cpu())
    return [*told, *gradients(model)]


def twice(compile: Compile, device: str) -> list[Any]:
    """A graph is used up by its backward, and not with `retain_graph`."""
    model, told = net(device), []
    call = compile(model)
    for _ in turns():
        loss = call(torch.randn(5, 4).to(device)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            told.append("second time" in str(error))
    return [*told, *gradients(model)]


def written_between(compile: Compile, device: str) -> list[Any]:
    """What the backward reads was written to in place."""
    weight, told = nn.Parameter(torch.ones(3, device=device)), []
    call = compile(lambda x: (x * weight).exp())
    for turn in turns():
        found = call(torch.randn(2, 3).to(device))
        if turn % 2:
            with torch.no_grad():
                weight.add_(0.125)
        try:
            found.sum().backward()
            told.append(weight.grad.detach().cpu().clone())
        except RuntimeError as error:
            told.append("inplace" in str(error))
    return told


def of_second_order(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(model)
    for turn in turns():
        loss = call(torch.randn(5, 4).to(device)).square().sum()
        if turn % 3 == 2:
            found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = sum(g.square().sum() for g in found)
        loss.backward()
        told.append(loss.detach().cpu())
    return [*told, *gradients(model)]


def of_second_order_after_a_write(compile: Compile, device: str) -> list[Any]:
    """Never the gradients of the value that was written since."""
    weight, told = nn.Parameter(torch.ones(3, device=device)), []
    call = compile(lambda x: (x * weight).sin())
    for turn in turns():
        loss = call(torch.randn(2, 3).to(device)).square().sum()
        if turn == TURNS - 1:
            with torch.no_grad():
                weight.mul_(2)
            try:
                told.append(torch.autograd.grad(loss, weight, create_graph=True))
            except RuntimeError:
                told.append("refused")
        else:
            loss.backward()
    return told


def batched(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(model)
    for _ in turns():
        found = call(torch.randn(2, 4).to(device))
        rows = torch.eye(6).view(6, 2, 3).to(device)
        jacobian = torch.autograd.grad(found, list(model.parameters()), rows, is_grads_batched=True)
        told += [g.cpu() for g in jacobian]
    return told


def with_saved_hooks(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(model)
    for _ in turns():
        with torch.autograd.graph.save_on_cpu():
            loss = call(torch.randn(5, 4).to(device)).square().sum()
        loss.backward()
        told.append(loss.detach().cpu())
    return [*told, *gradients(model)]


def of_leaves(compile: Compile, device: str) -> list[Any]:
    """Gradients flow to leaves among the arguments."""
    model, told = net(device), []
    call = compile(model)
    for _ in turns():
        x = torch.randn(5, 4).to(device).requires_grad_()
        call(x).sin().sum().backward()
        told.append(x.grad.cpu())
    return [*told, *gradients(model)]


def of_results(compile: Compile, device: str) -> list[Any]:
    """Gradients flow through the call into what came before it; at last that has a hook, and keeps its own."""
    model, first, told = net(device), nn.Parameter(torch.eye(4, device=device)), []
    call = compile(model)
    for turn in turns():
        x = torch.randn(5, 4).to(device) @ first
        if turn >= TURNS - 4:
            x.register_hook(lambda g: g * 2) if turn % 2 else x.retain_grad()
        call(x).sin().sum().backward()
        told += [first.grad.detach().cpu().clone(), x.grad.cpu() if x.retains_grad else 0]
    return [*told, *gradients(model)]


def frozen_and_thawed(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(model)
    for turn in turns():
        if turn in (12, 18):
            model[0].weight.requires_grad_(turn == 18)
            model[0].weight.grad = None
        call(torch.randn(5, 4).to(device)).square().sum().backward()
        told.append(model[0].weight.grad is None)
    return [*told, *gradients(model)]


def under_autocast(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(model)
    for _ in turns():
        with torch.autocast("cpu", torch.bfloat16):
            found = call(torch.randn(5, 4).to(device))
        found.float().square().sum().backward()
        told += [found.dtype, found.detach().float().cpu()]
    return [*told, *gradients(model)]


def evaluated_under_autocast(compile: Compile, device: str) -> list[Any]:
    """The block outside keeps halves of the weights that the call makes; who reads them there goes on with eager's."""
    model, told = net(device), []
    call = compile(model)
    for turn in turns():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(5, 4).to(device)
            found = call(x)
            told += [found.dtype, found.float().cpu(), F.linear(x, model[0].weight).float().cpu()]
        if turn % 3 == 2:
            with torch.no_grad():
                model[0].weight.add_(0.5)
    return told


def by_name(compile: Compile, device: str) -> list[Any]:
    """As many arguments, in other places or of other names, are other calls."""
    model, told = net(device), []

    def scaled(x: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return model(x) * scale + shift

    call = compile(scaled)
    for turn in turns():
        x = torch.randn(5, 4).to(device)
        found = call(x=x, scale=2.0)
        if turn in (15, 19):
            told += [y.detach().cpu() for y in (call(x, 2.0), call(x, shift=2.0), call(scale=2.0, x=x), call(x))]
        found.square().sum().backward()
        told.append(found.detach().cpu())
    return [*told, *gradients(model)]


def with_a_number(compile: Compile, device: str) -> list[Any]:
    model, told = net(device), []
    call = compile(lambda x, scale: model(x) * scale)
    for turn in turns():
        found = call(torch.randn(5, 4).to(device), 0.25 + turn)
        found.square().sum().backward()
        told.append(found.detach().cpu())
    return [*told, *gradients(model)]


def in_a_block(compile: Compile, device: str) -> list[Any]:
    """Where the block defers what comes before and after it."""
    model, told = net(device), []
    call = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in turns():
        with torchlazy.lazy_mode() if compile is compiled else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = call(torch.randn(5, 4).to(device) * 2 + 1).square().mean()
            loss.backward()
            optimizer.step()
        told.append(loss.detach().cpu())
    return [*told, *(p.detach().cpu() for p in model.parameters())]


def statistics_twice(compile: Compile, device: str) -> list[Any]:
    """Counts of batches that are equal are one number; then one of them is another."""
    model = net(device, nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    call, told = compile(model), []
    for turn in turns():
        if turn == TURNS - 4:
            model[2].num_batches_tracked += 3
        call(torch.randn(5, 4).to(device)).square().mean().backward()
        told += [model[2].num_batches_tracked.item(), model[3].num_batches_tracked.item()]
    return [*told, *gradients(model)]


def loss_and_logits(compile: Compile, device: str) -> list[Any]:
    """One result is computed from another."""
    model, told = net(device), []

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return logits.square().mean(), logits

    call = compile(both)
    for turn in turns():
        loss, logits = call(torch.randn(5, 4).to(device))
        (loss if turn % 2 else loss + logits.sin().sum()).backward()
        told += [loss.detach().cpu(), logits.detach().cpu()]
    return [*told, *gradients(model)]


# Replayed in Python: results that free parts of the graph each alone, hooks on what is saved.
UNDER_AUTOCAST = (under_autocast, evaluated_under_autocast)
IN_PYTHON = (two_results, with_saved_hooks)
PROGRAMS: tuple[Program, ...] = (
    trained, accumulated, normalised, evaluated_between, two_results, hooks_on_results, twice, written_between,
    of_second_order, of_second_order_after_a_write, batched, with_saved_hooks, of_leaves, of_results, frozen_and_thawed,
    under_autocast, evaluated_under_autocast, by_name, with_a_number, in_a_block, statistics_twice, loss_and_logits,
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_eager(program: Program, device: str, replayed: list[bool]) -> None:
    want, got = program(eager, "cpu"), program(compiled, device)
    assert len(got) == len(want)
    loose = {"rtol": 0.02, "atol": 0.02} if program in UNDER_AUTOCAST else {"rtol": 1e-4, "atol": 1e-5}
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, **loose, msg=lambda text, at=number: f"{at}: {text}")
        elif program is not of_second_order_after_a_write:
            assert ours == theirs, number
    assert any(replayed[-9:]) == (program not in IN_PYTHON), replayed


def test_a_graph_that_is_dropped_holds_nothing() -> None:
    model = net("cpu")
    call = compiled(model)
    for _ in turns():
        x = torch.randn(5, 4)
        alive, found = weakref.ref(x), call(x)
        del x
    assert found.grad_fn is not None
    del found
    gc.collect()
    assert alive() is None


def test_dropout_draws_what_a_replay_in_python_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[torch.Tensor]:
        model = net("cpu", nn.Dropout(0.5))
        call, told = torchlazy.compile(model, audit=False), []
        for _ in turns():
            found = call(torch.ones(5, 4))
            found.sum().backward()
            told.append(found.detach())
        return [*told, *gradients(model), torch.get_rng_state()]

    native = drawn()
    monkeypatch.setattr(InlineCache, "replayed", lambda *call: None)
    for ours, theirs in zip(native, drawn(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_error_is_eager_s_and_the_next_call_goes_on() -> None:
    table = nn.Embedding(5, 2)
    call = compiled(lambda at: table(at).sin())
    for _ in turns():
        call(torch.tensor([0, 4])).sum().backward()
    with pytest.raises(IndexError):
        call(torch.tensor([0, 9]))
    table.weight.grad = None
    call(torch.tensor([1, 1])).sum().backward()
    torch.testing.assert_close(table.weight.grad[1], 2 * table.weight.detach()[1].cos())


def test_a_leaf_beside_results_with_a_graph() -> None:
    weight = nn.Parameter(torch.ones(3))
    call = compiled(lambda x: (x.sin().requires_grad_(), x * weight))
    for _ in turns():
        leaf, found = call(torch.randn(3))
        assert leaf.is_leaf and leaf.requires_grad
        (leaf * found).sum().backward()
        assert leaf.grad is not None and F.mse_loss(leaf.grad, found.detach()) == 0
