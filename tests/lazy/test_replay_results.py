"""New tensors that a replay gives: their memory lies as a cut would have left it, shared by those that share it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F


def test_gradients_over_memory_of_another_shape_are_as_eager_s_call_after_call() -> None:
    """A bias' gradient is the sum over a row that keeps its dimension: the memory is that of (1, n)."""

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).to(device)
        x = torch.randn(5, 4).to(device)

        def step() -> torch.Tensor:
            model.zero_grad()
            loss = F.mse_loss(model(x), torch.zeros_like(x[:, :3]))
            loss.backward()
            return loss

        run = torchlazy.compile(step) if device == "lazy" else step
        found = []
        for _ in range(6):
            found.append(run().detach())
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)  # the gradient is memory of its own
                found.append(parameter.grad)
                with torch.no_grad():
                    parameter.sub_(parameter.grad)
        return [tensor.cpu() for tensor in found]

    for mine, theirs in zip(trained("lazy"), trained("cpu"), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)


def test_results_share_memory_where_the_call_s_own_do() -> None:
    @torchlazy.compile
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = x * 2, x + 1
        return y, y.t(), y[0], z, z[1:].t()

    x = torch.arange(6.0).reshape(2, 3)
    lazy = x.to("lazy")
    for _ in range(5):
        y, turned, row, z, part = run(lazy)
        assert all(torchlazy.is_lazy(one) for one in (y, turned, row, z, part))
        row.fill_(7.0)
        part.zero_()
        torch.testing.assert_close(y.cpu(), torch.stack([torch.full((3,), 7.0), x[1] * 2]))
        torch.testing.assert_close(turned.cpu(), y.cpu().t())
        torch.testing.assert_close(z.cpu(), torch.stack([x[0] + 1, torch.zeros(3)]))
    assert run.report().replays  # type: ignore[attr-defined]


def test_a_part_of_larger_memory_keeps_to_its_part() -> None:
    @torchlazy.compile
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.exp()[1:3, ::2]

    x = torch.arange(20.0).reshape(4, 5) / 10
    lazy = x.to("lazy")
    for _ in range(5):
        part = run(lazy)
        assert part.stride() == (5, 2)
        part.add_(1)
        torch.testing.assert_close(part.cpu(), x.exp()[1:3, ::2] + 1)


def test_the_loss_of_a_call_that_ran_its_backward_records_nothing() -> None:
    """Its graph is used up: a second backward is eager's error. Values and versions are as ever."""
    from torchlazy.lazy.api import recorder

    weight = torch.nn.Parameter(torch.ones(3, device="lazy"))

    @torchlazy.compile
    def run() -> torch.Tensor:
        weight.grad = None
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    for _ in range(5):
        loss = run()
    assert run.report().replays and not recorder.entries  # type: ignore[attr-defined]
    assert loss.requires_grad and not loss._is_view() and loss.item() == 3.0
    try:
        loss.backward()
    except RuntimeError as error:
        assert "second time" in str(error)
    else:
        raise AssertionError("the graph was there once more")


def _with_leaf(x: torch.Tensor) -> Any:
    scale = (x + 0.5).requires_grad_()
    made = x.sin().requires_grad_()
    return made, scale * 2, made.detach()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_leaf_that_the_call_made_is_one_beside_results_with_a_graph(device: str) -> None:
    call = torchlazy.compile(_with_leaf, audit=False)
    for turn in range(6):
        x = torch.full((3,), float(turn)).to(device)
        made, scaled, detached = call(x)
        assert made.is_leaf and made.requires_grad and made.grad_fn is None
        assert scaled.grad_fn is not None and not detached.requires_grad
        (made * scaled).sum().backward()
        torch.testing.assert_close(made.grad.cpu(), 2 * (x.cpu() + 0.5))
        with torch.no_grad():
            made.zero_()
        assert not detached.any()  # one memory
    report = call.report()
    assert not report.alarm and report.replays >= 3, report


class _State:
    first: Any = None
    second: Any = None


def _detached_twice(x: torch.Tensor, w: torch.Tensor, state: _State) -> Any:
    v = x * w
    state.first, state.second = v.detach(), v.detach()
    return v.sum(), [state.first, state.second]


def _returned_twice(x: torch.Tensor, w: torch.Tensor, state: _State) -> Any:
    v = x * w
    return v.sum(), [v.detach(), v.detach(), v, v.view_as(v)]


def _one_object(x: torch.Tensor, w: torch.Tensor, state: _State) -> Any:
    d = (x * w).detach()
    state.first = state.second = d
    return w.sum(), [d, state.first, state.second]


@pytest.mark.parametrize("step", [_detached_twice, _returned_twice, _one_object])
def test_each_result_is_an_object_of_its_own(step: Any) -> None:
    seen = []
    for called in (step, torchlazy.compile(step, audit=False)):
        torch.manual_seed(0)
        w, state = torch.randn(3, requires_grad=True), _State()
        for _ in range(9):
            loss, parts = called(torch.randn(3), w, state)
            loss.backward()
            torchlazy.wait_for_compile()
        tensors = [*parts, state.first, state.second]
        seen.append([[a is b for b in tensors] for a in tensors])
        seen[-1] += [[a.data_ptr() == parts[0].data_ptr(), a.requires_grad] for a in parts]
        seen[-1].append([w.grad.tolist()])
    assert seen[0] == seen[1]
    assert called.report().replays >= 3


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("index", [..., 0, slice(None)], ids=str)
def test_results_written_through_views_may_be_written_again(index: Any, device: str) -> None:
    head = torch.nn.Linear(3, 3).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = head(x)
        y[index] += 1
        return y

    run = torchlazy.compile(step)
    for _ in range(6):
        found = run(torch.ones(2, 3).to(device))
        assert not found._is_view()
        found.mul_(2).sum().backward()
    assert head.bias.grad is not None and head.bias.grad.tolist() == [24.0] * 3


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_view_of_a_leaf_that_the_call_makes(device: str) -> None:
    run = torchlazy.compile(lambda x: (x * 1).requires_grad_()[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it is refused
        found = [run(torch.ones(3).to(device)) for _ in range(6)]
    assert all(one.requires_grad and not one.is_leaf for one in found)
