"""How many Python functions of ours a steady step and a steady replay call: the numbers may only fall.

Counted by the interpreter's own profile hook around one step of a small network with AdamW, on the CPU, once nothing is
new any more. A number that fell is written down here, so that it stays there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.runtime.native import compiled_step, identity_check

STEP = 112  # on the lazy device: record (followed natively), cut, run
REPLAY = {"lazy": 119, "cpu": 135}  # of `torchlazy.compile(step)`, by where its tensors are
OURS = os.path.dirname(os.path.abspath(torchlazy.__file__)) + os.sep


def calls_of_ours(run: Callable[[], Any]) -> Counter[str]:
    """The functions of this package that `run` calls, with how often."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS + "lazy"):
            found[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "call" and frame.f_code.co_filename.startswith((OURS + "runtime", "<torchlazy")):
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def training(device: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(6, 8).to(device), torch.randn(6, 4).to(device)

    def step() -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def steady(step: Callable[[], Any]) -> Counter[str]:
    for _ in range(12):
        step()
    torchlazy.sync()
    torchlazy.wait_for_compile()
    for _ in range(12):
        step()
    torchlazy.sync()
    counts = [calls_of_ours(step) for _ in range(5)]
    return min(counts, key=Counter.total)


pytestmark = pytest.mark.skipif(
    compiled_step._loaded() is None or not identity_check.CODE.wait(), reason="counts are those with a C++ compiler"
)


def test_a_steady_step_on_the_device() -> None:
    found = steady(training("lazy"))
    assert 0 < found.total() <= STEP, found.most_common(30)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_steady_replay(device: str) -> None:
    compiled = torchlazy.compile(training(device), audit=False)
    found = steady(compiled)
    assert compiled.report().replays > 20
    assert 0 < found.total() <= REPLAY[device], found.most_common(30)
