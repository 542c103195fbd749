"""At most two programs for each structure, in programs as people write them, whose sizes and numbers vary.

Invariant: each program gives what it gives eagerly on the CPU, on the lazy device and compiled, at every call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.prims.decomps import cpu_kernels

from tests.lazy.varying_models import AUDIO, Audio, Make, drawn, trained
from tests.lazy.varying_programs import ONLY_COMPILED, TABLE

CALLS = 6
pytestmark = pytest.mark.usefixtures("sizes_vary")


def tensors(result: Any) -> list[Tensor]:
    listed = result if isinstance(result, (tuple, list)) else (result,)
    return [tensor.detach().cpu().clone() for tensor in listed]


def played(make: Make, device: str, dynamic: Any = "plain") -> tuple[list[list[Tensor]], int, Any]:
    """The values, how many programs were compiled, and the compiled callable, if it is to be one."""
    torch.manual_seed(1)
    call, arguments = make(device)
    run = call if dynamic == "plain" else torchlazy.compile(call, audit=False, dynamic=dynamic)
    before = torchlazy.metrics()["compiles"]
    found = [tensors(run(*arguments(i))) for i in range(CALLS)]
    torchlazy.flush()
    return found, torchlazy.metrics()["compiles"] - before, run


@pytest.mark.parametrize("name", TABLE)
def test_on_the_lazy_device(name: str) -> None:
    make, most, _ = TABLE[name]
    wanted, _, _ = played(make, "cpu")
    found, compiles, _ = played(make, "lazy")
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert 0 < compiles <= most


@pytest.mark.parametrize("name", [*TABLE, *ONLY_COMPILED])
def test_compiled_calls(name: str) -> None:
    make, most = TABLE[name][::2] if name in TABLE else ONLY_COMPILED[name]
    wanted, _, _ = played(make, "cpu")
    found, compiles, _ = played(make, "cpu", None)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert 0 < compiles <= most


@pytest.mark.parametrize("name", ["graphs, trained", "contrastive, trained", "neighbours", "dropout"])
def test_compiled_calls_that_are_told_of_sizes(name: str) -> None:
    make, most, _ = TABLE[name]
    found, compiles, _ = played(make, "cpu", True)
    torch.testing.assert_close(found, played(make, "cpu")[0], rtol=1e-3, atol=1e-4)
    assert 0 < compiles <= most


def sounds(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, 2, AUDIO(i)),)


def test_windows_of_a_stride_are_told_by_a_template() -> None:
    """A stride of five, then one of two: the fifth size is replayed."""
    _, _, run = played(trained(Audio, sounds), "cpu", None)
    assert run.report().captures <= 4 and run.report().replays >= 2, run.report()


@pytest.mark.parametrize("whole", [True, False], ids=["step", "module"])
def test_workspaces_of_a_library_are_told_at_each_size(whole: bool) -> None:
    """oneDNN's recurrent layers keep for the backward what no expression tells: as large as they make it."""

    def play(compiled: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        module = nn.LSTM(6, 8, num_layers=2)
        run = torchlazy.compile(module) if compiled and not whole else module

        def step(x: Tensor) -> Tensor:
            module.zero_grad()
            run(x)[0].square().sum().backward()
            assert module.weight_hh_l0.grad is not None
            return module.weight_hh_l0.grad.clone()

        call = torchlazy.compile(step) if compiled and whole else step
        found = [call(drawn("cpu", i, time, 3, 6)) for i, time in enumerate((9, 12, 5, 17, 8, 30, 23))]
        return found, call if whole else run

    compiles = torchlazy.metrics()["compiles"]
    found, run = play(True)
    torch.testing.assert_close(found, play(False)[0], rtol=1e-3, atol=1e-4)
    assert run.report().captures <= 4 and torchlazy.metrics()["compiles"] - compiles <= (2 if whole else 4), (
        run.report(),
        torchlazy.metrics()["not_generalised"],
    )


SHAPES = [(16, 24, 5, 9), (24, 20, 31, 7), (32, 28, 33, 29), (20, 40, 70, 2), (28, 12, 3, 5), (12, 16, 24, 32)]


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resampling_to_any_size(mode: str, align_corners: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules that GPUs use, forward and backward."""
    monkeypatch.setattr(cpu_kernels, "ENABLED", False)
    torchlazy.reset_metrics()
    for tall, wide, *size in SHAPES:
        wanted = torch.randn(2, 2, tall, wide, requires_grad=True)
        given = wanted.detach().to("lazy").requires_grad_()
        made = [F.interpolate(x, size=size, mode=mode, align_corners=align_corners) for x in (wanted, given)]
        for y in made:
            y.sin().sum().backward()
        assert wanted.grad is not None and given.grad is not None
        torch.testing.assert_close(made[1].detach().cpu(), made[0].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(given.grad.cpu(), wanted.grad, rtol=1e-5, atol=1e-5)
    assert torchlazy.metrics()["compiles"] <= 3 and torchlazy.metrics()["not_generalised"] == {}
