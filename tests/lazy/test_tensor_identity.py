"""Programs about which tensor is which: weak keys, `.data`, `set_`, swaps, parametrisations, pruning, averages."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from tests.lazy.models import mean_square_step

pytestmark = pytest.mark.usefixtures("compiled")
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _net(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def _batch(number: int, device: str) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number)).to(device)


def weak_keys(device: str, wrap: Wrap) -> list[Any]:
    model = _net(device)
    momenta = WeakTensorKeyDictionary({p: torch.zeros_like(p) for p in model.parameters()})

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                momenta[p].mul_(0.9).add_(p.grad)
                p.sub_(0.1 * momenta[p])
                p.grad = None
        return loss.detach()

    run = wrap(step)
    return [*(run(_batch(i, device)) for i in range(4)), *model.parameters()]


def copies(device: str, wrap: Wrap) -> list[Any]:
    model = _net(device)
    run = wrap(lambda x: copy.deepcopy(model[0])(copy.copy(x) + copy.copy(model[0].weight).sum()) + model[0](x))
    found = []
    for i in range(4):
        found.append(run(_batch(i, device)))
        with torch.no_grad():
            model[0].weight.mul_(0.9)
    return found


def data_assigned(device: str, wrap: Wrap) -> list[Any]:
    model = _net(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        before = model(x).sum()
        model[0].weight.data = model[0].weight.data * 0.5
        model[3].bias.data.add_(1)
        return before + model(x).sum()

    run = wrap(call)
    found = []
    for i in range(4):
        found.append(run(_batch(i, device)))
        model[3].weight.data = model[3].weight.data * 0.5 + i
    return [*found, *model.parameters()]


def memory_set(device: str, wrap: Wrap) -> list[Any]:
    a = torch.zeros(3, 4).to(device)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b = x[:3] * 2
        a.set_(b)
        a.add_(1)
        return a * 3, b

    run = wrap(call)
    return [value for i in range(4) for value in run(_batch(i, device))] + [a]


def swapped(device: str, wrap: Wrap) -> list[Any]:
    model, other = _net(device), nn.Parameter(torch.ones(8, 4).to(device))
    run = wrap(lambda x: model(x).sum())
    found = [run(_batch(i, device)).detach() for i in range(3)]
    torch.utils.swap_tensors(model[0].weight, other)
    return [*found, *(run(_batch(i, device)).detach() for i in range(3)), model[0].weight, other]


def swapped_when_loaded(device: str, wrap: Wrap) -> list[Any]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = _net(device)
        run = wrap(mean_square_step(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)))
        found = [run(_batch(i, device)) for i in range(3)]
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        return [*found, *(run(_batch(i, device)) for i in range(3)), *model.parameters()]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def emptied(device: str, wrap: Wrap) -> list[Any]:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    run = wrap(lambda x: model(x).detach())
    found = []
    for value in (0.5, 0.25):
        model.to_empty(device=device)
        with torch.no_grad():
            model.weight.fill_(value)
            model.bias.zero_()
        found += [run(_batch(i, device)) for i in range(3)]
    return found


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def parametrized(device: str, wrap: Wrap) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    found = []
    for layer in model:
        parametrize.register_parametrization(layer, "weight", _Symmetric())
        run = wrap(mean_square_step(model, torch.optim.SGD(model.parameters(), 0.1)))
        found += [run(_batch(i, device)) for i in range(3)]
    parametrize.remove_parametrizations(model[0], "weight")
    return [*found, *(run(_batch(i, device)) for i in range(3)), *model.parameters()]


def pruned(device: str, wrap: Wrap) -> list[Any]:
    model = _net(device)
    run = wrap(mean_square_step(model, torch.optim.SGD(model.parameters(), 0.1)))
    found = [run(_batch(i, device)) for i in range(3)]
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    found += [run(_batch(i, device)) for i in range(3)]
    prune.remove(model[0], "weight")
    return [*found, *(run(_batch(i, device)) for i in range(3)), *model.parameters()]


def averaged(device: str, wrap: Wrap) -> list[Any]:
    model = _net(device)
    average = AveragedModel(model, use_buffers=True)
    step = mean_square_step(model, torch.optim.SGD(model.parameters(), 0.1))

    def both(x: torch.Tensor) -> torch.Tensor:
        loss = step(x)
        average.update_parameters(model)
        return loss

    run = wrap(both)
    found = [run(_batch(i, device)) for i in range(4)]
    torch.optim.swa_utils.update_bn([_batch(i, device) for i in range(2)], average)
    return [*found, *average.parameters(), *average.buffers()]


def cycles(device: str, wrap: Wrap) -> list[Any]:
    class Node:
        pass

    model = _net(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        a, b = Node(), Node()
        a.value, a.other, b.other = x * 2, b, a
        b.value = a.value + 1
        return model(b.value).detach()

    run = wrap(call)
    found = []
    for i in range(4):
        found.append(run(_batch(i, device)))
        gc.collect()
    return found


PROGRAMS = (
    weak_keys, copies, data_assigned, memory_set, swapped, swapped_when_loaded, emptied, parametrized, pruned, averaged,
    cycles,
)  # fmt: skip


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    return torchlazy.lazy_mode()(function)


FORMS: dict[str, tuple[str, Wrap]] = {
    "device": ("lazy", lambda function: function),
    "mode": ("cpu", _in_mode),
    "compiled": ("cpu", torchlazy.compile),
    "compiled on the device": ("lazy", torchlazy.compile),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program: Callable[[str, Wrap], list[Any]], form: str) -> None:
    found, wanted = ([value.detach().cpu() for value in program(*how)] for how in (FORMS[form], ("cpu", lambda f: f)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torchlazy.compile:RuntimeWarning")
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_result_that_state_holds_is_one_object_where_python_runs(device):
    kept: dict[str, torch.Tensor] = {}

    def step(x):
        random.random()  # it is never replayed
        kept["last"] = x * 2
        return kept["last"]

    run = torchlazy.compile(step)
    for number in range(6):
        made = run(torch.full((3,), float(number), device=device))
        assert made is kept["last"]
        assert made.tolist() == [2.0 * number] * 3
        assert device == "lazy" or type(made) is torch.Tensor
    assert run.report().verified > 0
