"""How many Python functions of ours a steady step and a steady replay call: the numbers may only fall.

Counted by the interpreter's own profile hook around one step of a small network with AdamW, on the CPU, once nothing is
new any more. A number that fell is written down here, so that it stays there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.runtime.native import identity_check
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

STEP = 14  # on the lazy device: the hooks after an optimizer's step, and what counts its cut
# Of `torchlazy.compile(step)`, by where its tensors are. On the lazy device 8 leave the native recorder and come back.
REPLAY = {"cpu": 135, "lazy": 130}
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


def counted() -> dict[str, list[Any]]:
    """What a fresh process counts: earlier programs leave traces and caches that a step walks past."""
    identity_check.CODE.wait()
    found = {}
    for device in REPLAY:  # the CPU first, while there are no lazy tensors
        compiled = torchlazy.compile(training(device), audit=False)
        found[f"replay {device}"] = steady(compiled)
        assert compiled.report().replays > 20
    found["step"] = steady(training("lazy"))
    return {name: [count.total(), count.most_common(30)] for name, count in found.items()}


@pytest.mark.skipif(not has_cpp(), reason="counts are those with a C++ compiler")
def test_steady_calls_stay_within_the_budget() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    budget = {"step": STEP, **{f"replay {device}": most for device, most in REPLAY.items()}}
    assert found.keys() == budget.keys()
    for name, (total, most_common) in found.items():
        assert 0 < total <= budget[name], (name, total, most_common)


if __name__ == "__main__":
    print(json.dumps(counted()))
