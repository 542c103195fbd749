"""Forward and backward of steps that read their loss, joined as the lazy device joins them; nothing is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.api import recorder
from torchlazy.lazy.plan.join_traces import Joined
from torchlazy.lazy.run.segments import watch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import planned_peak


def joined_step(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    target: str,
    optimize: Callable[..., torch.optim.Optimizer],
    *,
    amp: bool = False,
) -> Joined:
    """Of a step of the model on an input of this shape."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "LEAST_BYTES", 0)
        patch.setattr(planned_peak, "TARGET", target)
        with planned_peak.recorded_for_a_gpu():
            with torch.device("meta"):
                model = make()
            model.to_empty(device="lazy")
            x = torch.zeros(shape, device="lazy")
            optimizer = optimize(model.parameters())
            for _ in range(3):
                torchlazy.flush()
                with torch.autocast("lazy", torch.bfloat16, enabled=amp):
                    loss = model(x).float().square().mean()
                loss.item()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                torchlazy.flush()
            (pair,) = recorder.driver.halves.found  # type: ignore[attr-defined]
    found: Joined = pair.joined
    return found
