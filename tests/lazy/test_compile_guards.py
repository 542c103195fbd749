"""Guards of compiled calls: each thing that a call depends on is changed, and the compiled call does what the plain one
does. Audits are off, so that nothing but a guard can notice.

Invariant: a case is run twice from the same seeds, once as it is and once compiled, on both kinds of tensors, and
everything that it returns is equal.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.utils._pytree import tree_leaves

Compile = Callable[..., Any]
CASES: list[Callable[[str, Compile], Any]] = []
pytestmark = pytest.mark.usefixtures("operator_by_operator")


def case(function: Callable[[str, Compile], Any]) -> Callable[[str, Compile], Any]:
    CASES.append(function)
    return function


def net(device: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def data(device: str, seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 6), generator=torch.Generator().manual_seed(100 + seed)).to(device)


def outcome(run: Callable[[str, Compile], Any], device: str, compiled: bool) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    made: list[Any] = []

    def compile(function: Any) -> Any:
        if not compiled:
            return function
        made.append(torchlazy.compile(function, audit=False))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        value = run(device, compile)
    torchlazy.sync()
    return [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in tree_leaves(value)], made


@case
def attributes_of_modules(device, compile):
    class Model(nn.Module):
        factor = 2.0

        def __init__(self):
            super().__init__()
            self.inner, self.flag, self.scale = nn.Linear(6, 6), False, 1.0

        def forward(self, x):
            y = self.inner(x) * self.scale * self.factor
            return y + 1 if self.flag else (y * 3 if self.training else y)

    model = Model().to(device)
    run = compile(model)
    x = data(device)
    found = [run(x) for _ in range(3)]

    def now():
        found.append(run(x).detach().clone())

    model.flag = True
    now()
    model.scale = 2.0
    now()
    model.flag = False
    now()
    model.eval()
    now()
    Model.factor = 5.0
    now()
    model.inner.weight.data.zero_()
    now()
    model.inner.weight = nn.Parameter(torch.ones(6, 6, device=device))
    now()
    model.inner.weight.data = torch.full((6, 6), 0.5, device=device)
    now()
    model.inner = nn.Linear(6, 2).to(device)
    now()
    handle = model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    now()
    handle.remove()
    now()
    model.inner.bias = None
    now()
    Model.forward = lambda self, x: x - 7
    now()
    model.forward = lambda x: x * 100
    now()
    return found


@case
def hooks_of_parameters(device, compile):
    model = net(device)
    run, found = compile(model), []

    def go():
        for i in range(3):
            model.zero_grad()
            run(data(device, i)).square().sum().backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    go()
    handle = model[0].weight.register_hook(lambda g: g * 2)
    go()
    handle.remove()
    go()
    model[0].register_full_backward_hook(lambda module, given, out: tuple(g if g is None else g * 3 for g in given))
    go()
    model[2].weight.requires_grad_(False)
    go()
    model[2].weight.requires_grad_(True)
    go()
    return found


@case
def hooks_of_a_step(device, compile):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    factor = [2.0]

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    run, found = compile(step), []

    def go():
        found.extend(run(data(device, i)) for i in range(3))

    go()
    model[0].weight.register_hook(lambda g: g * factor[0])
    go()
    factor[0] = 3.0
    go()
    model[2].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(5), None)[1])
    go()
    optimizer.register_step_post_hook(lambda *_: (model[0].weight.data.mul_(0.9), None)[1])
    go()
    optimizer.param_groups[0]["lr"] = 0.001
    go()
    return found, list(model.parameters())


@case
def names_in_code(device, compile):
    cell, factor, keys, items = [2.0], 3.0, {"a": 1.0}, {1, 2}

    def plain(x, a=1.5, *, b=2):
        return x * a + b * cell[0] + factor + ("a" in keys) + len(items)

    run, x = compile(plain), data(device)
    found = [run(x) for _ in range(3)]
    cell[0] = 5.0
    found.append(run(x))
    factor = 7.0
    found.append(run(x))
    plain.__defaults__ = (9.0,)
    found.append(run(x))
    plain.__kwdefaults__["b"] = 4
    found.append(run(x))
    keys["b"] = keys.pop("a")
    found.append(run(x))
    items.add(3)
    found.append(run(x))
    return found


@case
def slots_partials_and_objects(device, compile):
    class Settings:
        __slots__ = ("factor",)

    class Callable_:
        def __init__(self):
            self.model, self.settings = net(device), Settings()
            self.settings.factor = 1.0

        def __call__(self, x):
            return self.model(x) * self.settings.factor

    held = Callable_()
    run, part = compile(held), compile(functools.partial(lambda held, x: held(x) + 1, held))
    x = data(device)
    found = [f(x) for f in (run, part) for _ in range(3)]
    held.settings.factor = 4.0
    found += [run(x), part(x)]
    held.model = net(device, 3)
    return found, run(x), part(x)


@case
def tied_parameters(device, compile):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return self.b(self.a(x))

    model = Model().to(device)
    run, found = compile(model), []

    def go():
        for i in range(3):
            model.zero_grad()
            loss = run(data(device, i)).sum()
            loss.backward()
            found.append((loss, model.a.weight.grad.clone(), model.b.weight.grad.clone()))

    go()
    model.b.weight = model.a.weight
    go()
    model.b.weight = nn.Parameter(torch.ones(6, 6, device=device))
    go()
    model.b.weight.data = model.a.weight.data
    go()
    model.b.weight.data = model.a.weight.data.t()
    go()
    model.a.weight, model.b.weight = model.b.weight, model.a.weight
    go()
    return found


@case
def state_of_torch(device, compile):
    run, found = compile(lambda x, w: (x @ w, torch.ones(3, device=device) * 1.5)), []

    def go():
        for i in range(2):
            found.append([t.clone() for t in run(data(device, i), data(device, 5, 6, 6))])

    go()
    with torch.no_grad():
        go()
    with torch.inference_mode():
        go()
    with torch.autocast(device, torch.bfloat16):
        go()
    torch.set_default_dtype(torch.float64)
    try:
        go()
    finally:
        torch.set_default_dtype(torch.float32)
    go()
    return found


@case
def arguments(device, compile):
    run, found = compile(lambda x, y: (x.add_(1), x * y)[1]), []
    for i in range(8):
        base = data(device, i, 8, 6)
        x, y = base[:4], (base[:4], base[2:6], base[4:], data(device, i).t().contiguous().t())[i % 4]
        found.append((run(x, y), base))
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        found.append(run(data(device).to(dtype), data(device, 1).to(dtype) * 2))
    return found


@case
def arguments_on_memory_of_the_state(device, compile):
    held = data(device, 0, 8, 6)
    run = compile(lambda x: (held.mul_(2), x + 1)[1])
    found = [run(held[2:5]) for _ in range(3)]
    found += [run(data(device, i, 8, 6)[2:5]) for i in range(3)]
    return found, run(held[1:4]), held


@case
def containers_that_the_call_changes(device, compile):
    queue, log = [1.0, 2.0, 3.0, 4.0, 5.0], []

    def step(x, given):
        given["y"] = x * queue.pop()
        log.append(given["y"].sum())
        return given["y"] + 1

    run, found = compile(step), []
    for i in range(4):
        given = {"x": data(device, i, 8, 6)[1:5]}
        found.append((run(given["x"], given), given))
    return found, queue, log


@case
def nested_compiled_callables(device, compile):
    factor = [2.0]
    inner = compile(lambda x: x * factor[0])
    outer = compile(lambda x: inner(x) + inner(x + 1))
    x = data(device)
    found = [inner(x), outer(x), outer(x), inner(x)]
    factor[0] = 5.0
    return found, outer(x), inner(x), outer(x)


@case
def gradients_that_the_call_looks_at(device, compile):
    model = net(device)

    def norm():
        found = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        return torch.stack(found).sum() if found else torch.zeros((), device=device)

    run = compile(norm)
    found = [run(), run()]
    for i in range(4):
        model(data(device, i)).sum().backward()
        found.append(run())
    model.zero_grad()
    return found, run()


@case
def gradients_on_other_memory(device, compile):
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, found = compile(step), []
    parameters = list(model.parameters())

    def go():
        for i in range(3):
            found.append((run(data(device, i)), [p.grad.clone() for p in parameters]))

    go()
    for p in parameters:  # of the same shapes, made in another way
        p.grad = torch.full_like(p, 0.1)
    go()
    whole = torch.zeros(sum(p.numel() for p in parameters) + 5, device=device)
    for p, part in zip(parameters, whole.split([p.numel() for p in parameters] + [5])[:-1], strict=True):
        p.grad = part.view_as(p)
    go()
    found.append(whole.clone())
    parameters[1].grad = parameters[1].detach().clone()
    go()
    optimizer.zero_grad()
    go()
    return found, whole, parameters


@case
def constants_that_come_to_need_gradients(device, compile):
    held, weight = data(device, 0, 6), data(device, 1, 6).requires_grad_()
    run, found = compile(lambda x: x * held), []

    def go():
        for i in range(3):
            y = run(data(device, i))
            found.append((y, y.requires_grad))

    go()
    held.requires_grad_()
    go()
    held.requires_grad = False
    go()
    with torch.enable_grad():
        held.mul_(weight)
    go()
    found[-1][0].sum().backward()
    return found, weight.grad


@case
def pending_arguments_and_edited_parameters(device, compile):
    model, held = net(device), data(device, 1)
    run, found = compile(model), []
    for i in range(5):
        x = data(device, i) * 2 + 1
        held.add_(x)
        found.append((run(x + held), held.sum()))
        with torch.no_grad():
            model[0].bias.add_(0.1)
            model[2].weight[0] = 0.5
    return found


@case
def gradients_of_gradients(device, compile):
    model = net(device)
    run, found = compile(model), []
    for i in range(5):
        model.zero_grad()
        x = data(device, i).requires_grad_()
        (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        loss = (g.norm(2, 1) - 1).square().mean()
        loss.backward()
        found.append((loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
    return found


@case
def optimizer_states_loaded(device, compile):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        return loss.detach()

    run, found = compile(step), []

    def go():
        for i in range(4):
            found.append((run(data(device, i)), optimizer.param_groups[0]["lr"]))

    go()
    kept = copy.deepcopy(optimizer.state_dict())  # its groups and its state are other objects from here on
    optimizer.load_state_dict(kept)
    go()
    kept["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(kept)
    go()
    optimizer.param_groups[0] = dict(optimizer.param_groups[0], lr=0.01)
    go()
    return found, list(model.parameters())


@case
def gradients_of_frozen_parameters(device, compile):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, found = compile(step), []

    def go():
        found.extend(run(data(device, i)) for i in range(4))

    go()
    model[0].requires_grad_(False)  # it goes on with the gradient that it has
    go()
    model[0].weight.grad = None
    go()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    go()
    optimizer.zero_grad()
    go()
    return found, list(model.parameters())


@case
def hooks_of_parameters_that_no_result_reaches(device, compile):
    model, other, seen = net(device), nn.Linear(6, 3).to(device), []
    other.weight.register_hook(lambda grad: grad * 2)
    model[0].weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))

    def forward(x, both):
        y = model(x)
        unused = other(x)
        return y + unused if both else y

    run, found = compile(forward), []
    for i in range(8):
        model.zero_grad()
        other.zero_grad()
        run(data(device, i), i % 4 > 1).sum().backward()
        found.append((model[0].weight.grad, None if other.weight.grad is None else other.weight.grad.clone()))
    return found, len(seen)


@case
def ints_in_place_of_floats(device, compile):
    scale, counts = [1.5], torch.arange(4).to(device)
    run, found = compile(lambda x: (x * scale[0], counts * scale[0])), []
    for scale[0] in (1.5, 2.5, 3.5, 2, 3, 2.0, 4.5, True, 2):
        found.append(run(data(device)))
    return found, [y.dtype for _, y in found]


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("run", CASES, ids=lambda f: f.__name__)
def test_compiled_is_as_plain_whatever_changes(run, device):
    want, _ = outcome(run, device, compiled=False)
    have, made = outcome(run, device, compiled=True)
    assert made and len(have) == len(want)
    for place, (mine, theirs) in enumerate(zip(have, want, strict=True)):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, at=place: f"{at}: {text}")
        else:
            assert mine == theirs, place


def test_a_draw_that_nothing_reads_advances_the_generator() -> None:
    torchlazy.config.rng = "eager"
    run = torchlazy.compile(lambda x: (nn.functional.dropout(x, 0.5), x + 1)[1], audit=False)
    for call in range(4):
        torch.manual_seed(call)
        x = data("cpu", call)
        assert torch.equal(run(x), x + 1)
        have = torch.rand(3)
        torch.manual_seed(call)
        nn.functional.dropout(x, 0.5)
        assert torch.equal(have, torch.rand(3))


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_guards_of_a_deeper_model_are_more_of_the_same(device: str) -> None:
    """Their number follows the modules and tensors, not the operators: those of a forward called twice are the same."""
    counts = []
    for times in (1, 5):
        model = net(device)

        def forward(x: torch.Tensor, model: nn.Module = model, times: int = times) -> torch.Tensor:
            with torch.no_grad():
                return sum((model(x * i) for i in range(times)), torch.zeros((), device=x.device))

        run = torchlazy.compile(forward, audit=False)
        for _ in range(3):
            run(data(device))
        assert run.report().replays == 2
        (signature,) = run._signatures.values()
        guards = signature.variants[0].guards
        counts.append((len(guards._single), len(guards._live), len(guards._tables)))
    assert counts[0] == counts[1]
