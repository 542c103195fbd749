"""What stands beside the recorder, on a CUDA GPU: work counts, shadow runs, and steps that wait for nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torchlazy.lazy.inspect.shadow import ShadowWarning

from tests.lazy.wrong_exp import GENERATORS, wrong_pointwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _target() -> Iterator[None]:
    torchlazy.set_target("cuda")
    yield
    torchlazy.set_target("cuda")


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8))


def training_step(model: nn.Module, device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("device", ["lazy", "cuda"])
def test_work_is_counted_for_a_gpu(device: str) -> None:
    model = perceptron().to(device).eval()
    x = torch.randn(6, 32, device="cpu").to(device)
    found = torchlazy.flops(model, x)
    with FlopCounterMode(display=False) as counter:
        perceptron().eval()(torch.randn(6, 32))
    assert found.at().products == counter.get_total_flops()
    assert found.at(input_0=60).products == 10 * counter.get_total_flops()
    assert found.at(input_0=60).bytes > found.at().bytes > 4 * 6 * 32


def test_a_training_step_agrees_with_its_operators(tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = training_step(perceptron(), "lazy")
    x, y = torch.randn(16, 32).to("lazy"), torch.randint(8, (16,)).to("lazy")
    with torchlazy.shadow(tmp_path) as window:
        for _ in range(3):
            step(x, y).item()
    assert window.cuts >= 3
    assert window.differences == []


def test_a_wrong_kernel_is_found_and_its_script_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for generator, method in GENERATORS:
        monkeypatch.setattr(generator, method, wrong_pointwise(getattr(generator, method)))
    x, w = torch.rand(6, 8).to("lazy"), torch.rand(8, 5).to("lazy")
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        a = (x @ w).sin() * 2
        line = sys._getframe().f_lineno + 1
        b = torch.exp(a)
        torchlazy.flush()
    (found,) = window.differences
    assert (found.stage, found.operator) == ("code generation", "aten.exp.default")
    assert found.frame.endswith(f"test_services_gpu.py:{line}")
    torch.testing.assert_close(b.cpu(), torch.exp((x.cpu() @ w.cpu()).sin() * 2), atol=1e-3, rtol=1e-3)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)

    shown = run("-m", "tests.lazy.wrong_exp", str(found.script))
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert "of 30 elements differ" in shown.stdout
    fixed = run(str(found.script))
    assert fixed.returncode == 0, fixed.stdout + fixed.stderr


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_reads_no_value_waits_for_nothing(compiled: bool) -> None:
    """The next step is recorded while the last one runs: no call of a step synchronises with the GPU."""
    torchlazy.config.tiers = "off"
    step = training_step(perceptron(), "lazy")
    run = torchlazy.compile(step) if compiled else step
    x, y = torch.randn(16, 32).to("lazy"), torch.randint(8, (16,)).to("lazy")
    for _ in range(8):
        run(x, y)
    torchlazy.sync()
    losses = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            losses.append(run(x, y))
            torchlazy.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(loss).item() for loss in losses)


def test_the_host_is_ahead_of_a_busy_gpu() -> None:
    """Three steps are recorded and sent off while the GPU is still at something else."""
    torchlazy.config.tiers = "off"
    step = training_step(perceptron(), "lazy")
    x, y = torch.randn(16, 32).to("lazy"), torch.randint(8, (16,)).to("lazy")
    for _ in range(8):
        step(x, y)
    torchlazy.sync()
    torch.cuda._sleep(2_000_000_000)  # about a second
    done = torch.cuda.Event()
    done.record()
    for _ in range(3):
        step(x, y)
    torchlazy.flush()
    assert not done.query(), "the host waited for the GPU"
    torchlazy.sync()


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_that_is_asked_to_be_pinned_is_pinned(compiled: bool) -> None:
    """`DistributedDataParallel` checks it, in C++."""
    pinned = torch.arange(4.0).pin_memory()

    def staged(x: torch.Tensor) -> tuple[torch.Tensor, bool, bool]:
        made = torch.empty_like(x + 1, device="cpu", pin_memory=True)
        made.copy_(pinned * 2)
        return x + made.to(x.device, non_blocking=True), made.is_pinned(), pinned.is_pinned()

    run = torchlazy.compile(staged) if compiled else staged
    for _ in range(3):
        x = torch.rand(4, device="cuda")
        with torchlazy.lazy_mode():
            found, made_pinned, given_pinned = run(x)
        assert made_pinned and given_pinned and not x.is_pinned()
        torch.testing.assert_close(found, x + pinned.cuda() * 2)
