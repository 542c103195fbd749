"""Every optimizer of torch in a compiled whole step.

Invariant: ten compiled steps give the losses and parameters of plain ones, and from some call on they are replayed;
what is not replayed is named here, and in the README.
"""

from __future__ import annotations

import inspect
import io
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torch.optim import swa_utils

pytestmark = [
    pytest.mark.usefixtures("operator_by_operator"),
    pytest.mark.filterwarnings("ignore:torchlazy.compile:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
STEPS = 10
NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
# Adafactor takes the larger of a number and a norm for each parameter: a template for each outcome of all of these.
LEAST = {"Adafactor": 0}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True}), ("Adam", {"amsgrad": True}), ("Adagrad", {"lr_decay": 0.01}),
    ("RMSprop", {"momentum": 0.9, "centered": True}), ("AdamW", {"maximize": True}), ("SGD", {"weight_decay": 0.1}),
]  # fmt: skip


def takes(name: str, option: str) -> bool:
    return hasattr(torch.optim, name) and option in inspect.signature(getattr(torch.optim, name)).parameters


CASES = [(name, {}) for name in NAMES if hasattr(torch.optim, name)]
CASES += [(name, {option: value}) for name in NAMES for option, value in (("foreach", False), ("fused", True))
          if takes(name, option)]  # fmt: skip
CASES += MORE


def play(device: str, make: Callable[[torch.nn.Module], Any], compiled: bool) -> tuple[list[float], Any]:
    """`make` gives a step of a batch, and what else is to be compared after each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False)
    ).to(device)
    step, more = make(model)
    run = torchlazy.compile(step, audit=False) if compiled else step
    generator = torch.Generator().manual_seed(1)
    found: list[float] = []
    for _ in range(STEPS):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        found.append(run(x.to(device), y.to(device)).item())
        found += [float(value) for value in more()]
    return [*found, *(p.detach().double().sum().item() for p in model.parameters())], run


def check(device: str, make: Callable[[torch.nn.Module], Any], least: int) -> None:
    wanted, _ = play(device, make, False)
    found, run = play(device, make, True)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    report = run.report()
    assert report.replays >= least, report
    assert report.captures <= 6 or not least, report


def learn(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_of(name: str, options: dict[str, Any]) -> Callable[[torch.nn.Module], Any]:
    def make(model: torch.nn.Module) -> Any:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        return lambda x, y: learn(model, optimizer, x, y), list

    return make


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: value if isinstance(value, str) else str(value))
def test_optimizer(name, options):
    check("lazy", step_of(name, options), LEAST.get(name, 6))


@pytest.mark.parametrize("name", [name for name, options in CASES if not options])
def test_optimizer_on_ordinary_tensors(name):
    check("cpu", step_of(name, {}), LEAST.get(name, 6))


@pytest.mark.parametrize(
    "name", [name for name, options in CASES if not options and name not in ("Adafactor", "RAdam")]
)
def test_versions_of_parameters_and_state_move_as_they_do_in_eager(name):
    """RAdam's first replay goes another way than its template, and is taken back by writing."""

    def versions(compiled: bool) -> list[list[int]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2, bias=False)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        step = lambda x: learn(model, optimizer, x, torch.tensor([0, 1]))  # noqa: E731
        run = torchlazy.compile(step, audit=False) if compiled else step
        found = []
        for _ in range(6):
            run(torch.ones(2, 3))
            (state,) = optimizer.state.values() or [{}]
            tensors = [model.weight, *(x for x in state.values() if isinstance(x, torch.Tensor))]
            found.append([x._version for x in tensors])
            assert all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors), (
                "state is of the ordinary classes"
            )
        return found

    assert versions(True) == versions(False)


def test_an_option_that_eager_refuses_here():
    for name in NAMES:
        if takes(name, "differentiable"):
            with pytest.raises((AssertionError, RuntimeError)) as plain:
                play("lazy", step_of(name, {"differentiable": True}), False)
            with pytest.raises(type(plain.value)):
                play("lazy", step_of(name, {"differentiable": True}), True)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("Adam", {}), ("RMSprop", {})],
    ids=str,
)
def test_gradients_of_differentiable_steps(name: str, options: dict[str, Any], device: str) -> None:
    """SGD chooses its path without a look at `differentiable`: on the CPU it is the one that saves no parameter."""

    def learned(start: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        parameter = start.clone()
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, differentiable=True, **options)
        for scale in (1, 2):
            parameter.grad = gradient * scale
            optimizer.step()
        return [parameter.detach(), *torch.autograd.grad(parameter.square().sum(), [start, gradient])]

    def runs(device: str, call: Callable[..., Any]) -> list[Any]:
        starts = [(torch.arange(1.0, 7.0) + i).sin().to(device).requires_grad_() for i in range(4)]
        return [[x.cpu() for x in call(start, (start * 0.5).detach().requires_grad_())] for start in starts]

    run = torchlazy.compile(learned, audit=False)
    for have, want in zip(runs(device, run), runs("cpu", learned), strict=True):
        torch.testing.assert_close(have, want)
    assert run.report().replays, run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_scaler_with_autocast_and_clipping(device):
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=4)

        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step, lambda: [scaler.get_scale()]

    check(device, make, 6)


@pytest.mark.parametrize("how", ["mean", "exponential"])
def test_averaged_model(how):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ema = swa_utils.get_ema_multi_avg_fn(0.9) if how == "exponential" else None
        average = swa_utils.AveragedModel(model, multi_avg_fn=ema)

        def step(x, y):
            loss = learn(model, optimizer, x, y)
            average.update_parameters(model)
            return loss

        return step, lambda: [p.detach().sum().item() for p in average.parameters()]

    check("lazy", make, 6)


@pytest.mark.parametrize(("search", "least"), [(None, 8), ("strong_wolfe", 1)])
def test_lbfgs_is_replayed_once_its_history_is_full(search: str | None, least: int) -> None:
    """A template for each way that its search takes. In double precision: the search magnifies what rounding does."""

    def trained(compiled: bool) -> tuple[list[tuple[Any, ...]], Any]:
        torch.manual_seed(0)
        device = "lazy" if compiled else "cpu"
        model = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64).to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=2, history_size=2, line_search_fn=search)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        run = torchlazy.compile(step, audit=False) if compiled else step
        generator = torch.Generator().manual_seed(1)
        found: list[tuple[Any, ...]] = []
        for _ in range(22):
            x, y = torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.arange(8) % 3
            loss = run(x.to(device), y.to(device)).item()
            (state,) = optimizer.state.values()
            counts = state["func_evals"], state["n_iter"], len(state["old_dirs"])
            found.append((*counts, loss, float(state["t"]), float(state["prev_loss"])))
        return found, run

    wanted, _ = trained(False)
    found, run = trained(True)
    for now, then in zip(found, wanted, strict=True):
        assert now == pytest.approx(then, rel=1e-7)
    assert run.report().replays >= least, run.report()


def test_sparse_adam_is_right():
    """Sparse gradients are made at once: its Python runs, recorded."""

    def make(model):
        table = torch.nn.Embedding(10, 6, sparse=True)
        torch.nn.init.constant_(table.weight, 0.1)
        table = table.to(next(model.parameters()).device)
        dense, sparse = (
            torch.optim.SGD(model.parameters(), lr=0.05),
            torch.optim.SparseAdam(table.parameters(), lr=0.05),
        )

        def step(x, y):
            dense.zero_grad()
            sparse.zero_grad()
            loss = F.cross_entropy(model(table(y) + x), y)
            loss.backward()
            dense.step()
            sparse.step()
            return loss.detach()

        return step, lambda: [table.weight.detach().sum().item()]

    check("lazy", make, 0)


@pytest.mark.parametrize(
    ("name", "options"), [("Adam", {}), ("NAdam", {"foreach": False}), ("RMSprop", {"momentum": 0.9})], ids=str
)
def test_counts_of_steps_may_stay_on_the_device(name: str, options: dict[str, Any]) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        more = {"capturable": True, "lr": torch.tensor(0.01, device=device)} if device == "lazy" else {"lr": 0.01}
        optimizer = getattr(torch.optim, name)(model.parameters(), **options, **more)
        for i in range(4):
            model(torch.full((2, 4), i + 0.5, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    torch.testing.assert_close(trained("lazy"), trained("cpu"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), [("Adam", {}), ("AdamW", {"foreach": False}), ("RMSprop", {})])
def test_a_state_that_was_loaded_onto_the_device_is_replayed(name: str, options: dict[str, Any]) -> None:
    def training(device: str, compile: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return compile(step), model, optimizer

    run, mine, ours = training("lazy", lambda function: torchlazy.compile(function, audit=False))
    plain, theirs, _ = training("cpu", lambda function: function)
    for i in range(10):
        if i == 3:
            saved = io.BytesIO()
            torch.save(ours.state_dict(), saved)
            saved.seek(0)
            ours.load_state_dict(torch.load(saved, map_location="lazy"))
            assert all(state["step"].device.type == "cpu" for state in ours.state.values())
        x = torch.rand(4, 3, generator=torch.Generator().manual_seed(i))
        run(x.to("lazy"))
        plain(x)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert run.report().replays >= 4, run.report()


def test_counts_of_a_capturable_optimizer_stay_on_the_device() -> None:
    model = torch.nn.Linear(3, 2).to("lazy")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    model(torch.rand(4, 3).to("lazy")).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(state["step"].device.type == "lazy" for state in optimizer.state.values())


class _Wrapped(torch.optim.Optimizer):
    """Hands everything on to another optimizer, as those of accelerate and Lightning do, and has no tables itself."""

    def __init__(self, inner):
        self.inner, self.steps = inner, 0

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step(closure)
        self.steps += 1


def test_an_optimizer_that_wraps_another(compiled):
    def train(through):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = _Wrapped(torch.optim.AdamW(model.parameters(), 0.1))

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = through(step)
        losses = []
        for number in range(8):
            if number == 5:
                optimizer.param_groups[0]["lr"] = 0.01
            losses.append(run(torch.randn(4, 3)))
        return run, optimizer.steps, torch.stack(losses), model.weight.detach()

    run, *made = train(lambda step: torchlazy.compile(step, audit=False))
    _, *wanted = train(lambda step: step)
    torch.testing.assert_close(made, wanted)
    assert run.report().replays > 0


def test_counts_of_an_optimizer_are_one_call() -> None:
    """In a replay; 148 parameters took a millisecond."""
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = torchlazy.compile(lambda x: learn(model, optimizer, x, torch.tensor([0, 1])), audit=False)
    for _ in range(8):
        run(torch.ones(2, 3))
    before = run.report().replays
    with torch.profiler.profile() as found:
        for _ in range(3):
            run(torch.ones(2, 3))
    assert run.report().replays == before + 3
    names = [event.name for event in found.events()]
    assert names.count("aten::_foreach_add_") == 3, "the first count is read in between, and adds by itself"
    assert {float(state["step"]) for state in optimizer.state.values()} == {11.0}


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("named", ["closure", "attribute", "argument"])
def test_a_step_that_makes_its_optimizers_state_is_not_captured(named, device):
    def play(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        trainer = types.SimpleNamespace(optimizer=torch.optim.Adam(model.parameters()), model=model)
        step = _step_of(named, trainer)
        given = (trainer.optimizer,) if named == "argument" else ()
        run = torchlazy.compile(step) if compiled else step
        losses = [run(torch.ones(2, 4, device=device), *given).cpu() for _ in range(5)]
        return losses, run.report() if compiled else None

    losses, report = play(compiled=True)
    torch.testing.assert_close(losses, play(compiled=False)[0])
    assert (report.captures, report.verified) == (1, 1), report
    assert any("no state yet" in reason for reason in report.reasons), report


def _step_of(named, trainer):
    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer = trainer.model, trainer.optimizer
    if named == "closure":
        return lambda x: train(model, optimizer, x)
    if named == "argument":
        return lambda x, given: train(model, given, x)
    return lambda x: train(trainer.model, trainer.optimizer, x)


def test_an_optimizer_that_never_has_state_is_captured_at_once():
    model = torch.nn.Linear(4, 3)
    run = torchlazy.compile(
        _step_of("closure", types.SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    )
    for _ in range(3):
        run(torch.ones(2, 4))
    assert run.report().verified == 0, run.report()
