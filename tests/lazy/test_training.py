"""Training on the lazy device: parameters and losses as on the CPU, one cut and one known program a step."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

from tests.lazy.compare import data, ints
from tests.lazy.models import built, convnet, mlp, same

STEPS = 5
Loss = Callable[[nn.Module, int], torch.Tensor]
Step = Callable[[int], torch.Tensor]


def _example(name: str) -> Any:
    """A module of the examples folder, which is no package."""
    found = sys.modules.get(f"examples_{name}")
    if found is None:
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
        found = sys.modules[f"examples_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


tiny_gpt = _example("tiny_gpt")


def small_gpt(device: str) -> nn.Module:
    """One block of the example's model, without dropout."""
    config = tiny_gpt.GPTConfig(layers=1, heads=2, width=16, block=8, dropout=0.0, vocabulary=24)
    return built(lambda: tiny_gpt.GPT(config), device)


def value_loss(model: nn.Module, step: int) -> torch.Tensor:
    device = next(model.parameters()).device.type
    return F.mse_loss(model(data(device, 6, 4, seed=step)), data(device, 6, 2, seed=100 + step))


def class_loss(model: nn.Module, step: int) -> torch.Tensor:
    device = next(model.parameters()).device.type
    return F.cross_entropy(model(data(device, 6, 1, 8, 8, seed=step)), ints(device, 6, high=3, seed=step))


def text_loss(model: nn.Module, step: int) -> torch.Tensor:
    device = next(model.parameters()).device.type
    codes = ints(device, 2, 9, high=24, seed=step)
    return model(codes[:, :-1], codes[:, 1:])[1]


def train(
    make_model: Callable[[str], nn.Module], loss_of: Loss, make_optimizer: Any, device: str, steps: int = STEPS
) -> Any:
    """Losses, the model's state and the optimizer's after some steps; on the lazy device, counts are checked."""
    model = make_model(device)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(steps):
        if step == 2:
            torchlazy.reset_metrics()
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if device == "lazy":
        assert_one_program_a_step(steps - 2)
    return losses, model.state_dict(), optimizer.state_dict()["state"]


def assert_one_program_a_step(steps: int) -> None:
    """Since the counts were reset, each step was one flush, which ran one program that was known."""
    counts = torchlazy.metrics()
    assert counts["cuts"] == {"optimizer step": steps}, counts["cuts"]
    assert (counts["hits"], counts["misses"], counts["compiles"]) == (steps, 0, 0)


def check_training(
    make_model: Any, loss_of: Loss, make_optimizer: Any, steps: int = STEPS, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    have = train(make_model, loss_of, make_optimizer, "lazy", steps)
    want = train(make_model, loss_of, make_optimizer, "cpu", steps)
    same(have, want, rtol=rtol, atol=atol)


# ---------------------------------------------------------------- models


def test_mlp(compiled):
    check_training(mlp, value_loss, lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9))


def test_convnet(compiled):
    check_training(convnet, class_loss, lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), rtol=1e-3)


def test_gpt(compiled):
    check_training(
        small_gpt,
        text_loss,
        lambda m: torch.optim.AdamW(tiny_gpt.parameter_groups(m, 0.1), 1e-3),
        steps=8,
        rtol=1e-3,
        atol=1e-4,
    )


def test_tiers_on_compiles_what_is_seen_twice():
    torchlazy.config.strict = True
    make = lambda m: torch.optim.AdamW(m.parameters(), 0.01)  # noqa: E731
    have = train_counting(mlp, value_loss, make, 5)
    want = train(mlp, value_loss, make, "cpu", 5)
    same(have, want[:2], rtol=1e-4, atol=1e-5)


def train_counting(make_model, loss_of, make_optimizer, steps):
    model = make_model("lazy")
    optimizer = make_optimizer(model)
    losses, compiles = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        torchlazy.wait_for_compile()
        compiles.append(torchlazy.metrics()["compiles"])
    assert compiles[0] == 0 and compiles[-1] == compiles[-2] >= 1, compiles
    return losses, model.state_dict()


# ---------------------------------------------------------------- optimizers


def tensor_lr(make, **options):
    return lambda p: make(p, lr=torch.tensor(0.01), **options)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd single maximize": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, foreach=False, maximize=True),
    "sgd dampening": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.1),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adam single": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "adam maximize": lambda p: torch.optim.Adam(p, 0.01, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.95), eps=1e-6),
    "adamw single": lambda p: torch.optim.AdamW(p, 0.01, foreach=False, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "rmsprop single": lambda p: torch.optim.RMSprop(p, 0.01, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
}
# Their step counts are constants of the operators (a branch, or a number that no operator takes as an input).
CONSTANTS_CHANGE = {"nadam", "radam", "asgd"}


def two_layers(device: str) -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), device)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, compiled):
    make = OPTIMIZERS[name]
    if name in CONSTANTS_CHANGE:
        torchlazy.config.tiers = "on"
        torchlazy.config.strict = False

        def run(device):
            model = two_layers(device)
            optimizer = make(model.parameters())
            for step in range(7):
                optimizer.zero_grad()
                value_loss(model, step).backward()
                optimizer.step()
            return model.state_dict(), optimizer.state_dict()["state"]

        same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)
        return
    check_training(two_layers, value_loss, lambda m: make(m.parameters()), steps=4)


@pytest.mark.parametrize("name", ["sgd nesterov", "sgd nesterov plain", "adam amsgrad"])
def test_gradients_are_left_as_they_are(name, compiled):
    """Gradients that nobody zeroes add up, and a step does not change them."""
    plain = lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True)  # noqa: E731
    make = OPTIMIZERS.get(name, plain)

    def run(device):
        model = two_layers(device)
        optimizer = make(model.parameters())
        seen = []
        for step in range(4):
            value_loss(model, step).backward()
            optimizer.step()
            seen += [parameter.grad.clone() for parameter in model.parameters()]
        return seen, model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_capturable_and_tensor_learning_rate(compiled):
    """Eager refuses capturable on the CPU: compared with the plain optimizer, whose numbers are the same."""
    model = two_layers("lazy")
    try:
        optimizer = torch.optim.Adam(model.parameters(), 0.01, capturable=True)
        for step in range(4):
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
    except (AssertionError, RuntimeError) as refused:
        assert "capturable" in str(refused)  # as on the CPU
    else:
        want = train(two_layers, value_loss, lambda m: torch.optim.Adam(m.parameters(), 0.01), "cpu", 4)
        same(model.state_dict(), want[1], rtol=1e-4, atol=1e-5)


def test_learning_rate_as_a_tensor(compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        for step in range(4):
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.5)
        return model.state_dict(), optimizer.param_groups[0]["lr"]

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_lbfgs(compiled):
    torchlazy.config.tiers = "on"  # its line of past steps grows: each step is another program

    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = value_loss(model, 0)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        return losses, model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-3, atol=1e-4)


def test_closure(compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def closure():
            optimizer.zero_grad()
            loss = value_loss(model, 0)
            loss.backward()
            return loss

        return [optimizer.step(closure).detach() for _ in range(3)], model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- schedules, groups, accumulation

SCHEDULES: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.08, total_steps=10),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_new_learning_rate_compiles_nothing(name, make, compiled):
    def run(device):
        model = two_layers(device)
        optimizer = make(model.parameters())
        schedule = SCHEDULES[name](optimizer)
        for step in range(6):
            if step == 2:
                torchlazy.reset_metrics()
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
            schedule.step()
        if device == "lazy":
            assert_one_program_a_step(4)
        return model.state_dict(), schedule.get_last_lr()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_plateau_schedule_and_group_options(compiled):
    def run(device):
        model = two_layers(device)
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters(), "momentum": 0.5}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(4):
            optimizer.zero_grad()
            loss = value_loss(model, step)
            loss.backward()
            optimizer.step()
            schedule.step(loss.detach())  # reads the value
        return model.state_dict(), [g["lr"] for g in optimizer.param_groups]

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_parameter_group_added_later(compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.Adam(model[2].parameters(), 0.01)
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
        return model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation_and_zero_grad(set_to_none, compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            if step == 2:
                torchlazy.reset_metrics()
            for part in range(2):
                (value_loss(model, 2 * step + part) / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == set_to_none for p in model.parameters())
        if device == "lazy":
            counts = torchlazy.metrics()
            assert counts["cuts"] == {"optimizer step": 2} and counts["compiles"] == 0
        return model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_zeroed_gradients_keep_their_objects():
    model = two_layers("lazy")
    value_loss(model, 0).backward()
    before = [p.grad for p in model.parameters()]
    torch.optim.SGD(model.parameters(), 0.1).zero_grad(set_to_none=False)
    value_loss(model, 1).backward()
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    other = two_layers("cpu")
    value_loss(other, 1).backward()
    same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()], rtol=1e-4, atol=1e-6)


def test_frozen_layer(compiled):
    def run(device):
        model = two_layers(device)
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
        for step in range(3):
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
        return model.state_dict(), [p.grad is None for p in model.parameters()]

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- clipping, scaling, averaging


@pytest.mark.parametrize("norm", [0.1, float("inf"), "value"])
def test_gradient_clipping_makes_no_cut(norm, compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        norms = []
        for step in range(4):
            if step == 2:
                torchlazy.reset_metrics()
            optimizer.zero_grad()
            value_loss(model, step).backward()
            if norm == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            else:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), norm))
            optimizer.step()
        if device == "lazy":
            assert_one_program_a_step(2)
        return model.state_dict(), norms

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("break_step", [None, 2])
def test_grad_scaler(break_step, compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            loss = value_loss(model, step)
            if step == break_step:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return model.state_dict(), scales, scaler.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["average", "ema", "foreach ema", "by hand"])
def test_averaged_models(kind, compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if kind == "by hand":
            averaged = copy.deepcopy(model).requires_grad_(False)
        else:
            options = {
                "average": {},
                "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
                "foreach ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
            }[kind]
            averaged = swa_utils.AveragedModel(model, **options)
        for step in range(4):
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
            if kind == "by hand":
                with torch.no_grad():
                    for mean, p in zip(averaged.parameters(), model.parameters(), strict=True):
                        mean.mul_(0.9).add_(p, alpha=0.1)
            else:
                averaged.update_parameters(model)
        return model.state_dict(), averaged.state_dict(), averaged(data(device, 2, 4))

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_update_batch_norm_statistics(compiled):
    def run(device):
        model = mlp(device)
        swa_utils.update_bn([data(device, 6, 4, seed=s) for s in range(3)], model)
        return model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- loops as people write them


def test_loss_read_every_step(compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for step in range(4):
            if step == 2:
                torchlazy.reset_metrics()
            loss = value_loss(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # the step has been sent off: reading makes no cut
        if device == "lazy":
            assert_one_program_a_step(2)
        return losses, model.state_dict()

    have, want = run("lazy"), run("cpu")
    assert have[0] == pytest.approx(want[0], rel=1e-4)
    same(have[1], want[1], rtol=1e-4, atol=1e-5)


def test_loss_read_before_backward(compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            if step == 2:
                torchlazy.reset_metrics()
            loss = value_loss(model, step)
            if loss.item() > 0:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if device == "lazy":
            counts = torchlazy.metrics()
            assert counts["cuts"] == {"item": 2, "optimizer step": 2} and counts["compiles"] == 0
        return model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_two_models_trained_in_turn(compiled):
    """Generator and discriminator: each optimizer's step is a cut of its own, and both become known."""

    def run(device):
        maker = built(lambda: nn.Linear(3, 4), device)
        judge = built(lambda: nn.Linear(4, 1), device)
        make_step = torch.optim.Adam(maker.parameters(), 0.01)
        judge_step = torch.optim.Adam(judge.parameters(), 0.01)
        ones = torch.ones(5, 1, device=device)
        for step in range(4):
            if step == 2:
                torchlazy.reset_metrics()
            fake = maker(data(device, 5, 3, seed=step))
            judge_step.zero_grad()
            real = judge(data(device, 5, 4, seed=50 + step))
            loss = F.binary_cross_entropy_with_logits(real, ones)
            loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), ones * 0)
            loss.backward()
            judge_step.step()
            make_step.zero_grad()
            F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
            make_step.step()
        if device == "lazy":
            assert torchlazy.metrics()["compiles"] == 0
        return maker.state_dict(), judge.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_last_batch_is_smaller(compiled):
    def run(device):
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step, size in enumerate((4, 4, 2, 4, 4, 2)):
            x = data(device, size, 4, seed=step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_same_seed_same_run_with_dropout(compiled):
    def run():
        model = built(lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2)), "lazy")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(7)
        for step in range(4):
            if step == 2:
                torchlazy.reset_metrics()
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()
        assert_one_program_a_step(2)
        return model.state_dict()

    same(run(), run(), rtol=0, atol=0)


def test_training_is_resumed_from_a_checkpoint(tmp_path, compiled):
    def part(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            value_loss(model, step).backward()
            optimizer.step()

    model = two_layers("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    part(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    part(model, optimizer, range(3, 6))
    other = two_layers("lazy")
    resumed = torch.optim.AdamW(other.parameters(), 0.5)
    saved = torch.load(tmp_path / "checkpoint.pt", map_location="lazy", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    part(other, resumed, range(3, 6))
    same(other.state_dict(), model.state_dict(), rtol=0, atol=0)
