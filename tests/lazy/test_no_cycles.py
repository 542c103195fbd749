"""Nothing that holds a tensor is left in a reference cycle: memory of a step is free when the step is done with it, not
when Python's collector happens to run."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.run import interpreter
from torchlazy.lazy.trace.geometry import geometry_like
from torchlazy.lazy.trace.trace import CutTrace, slot

DOORS = ["mode", "python_mode", "device", "python_device", "compiled_step", "compiled_module", "compiled_in_mode"]


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


@pytest.fixture
def kept():
    """What the collector finds from here on, kept instead of freed."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    before = len(gc.garbage)

    def tensors():
        gc.collect()
        return [tuple(one.shape) for one in gc.garbage[before:] if isinstance(one, torch.Tensor)]

    yield tensors
    gc.set_debug(0)
    del gc.garbage[before:]
    gc.enable()


@pytest.mark.parametrize("door", DOORS)
def test_steps(door, kept, monkeypatch):
    if door.startswith("python_"):
        monkeypatch.setattr(torchlazy.config, "native", "off")
        monkeypatch.setattr(torchlazy.config, "native_device", "off")
    device = "lazy" if door.endswith("device") else "cpu"
    model = _model().to(device)
    forward = torchlazy.compile(model) if door == "compiled_module" else model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x, y = torch.randn(4, 3, 12, 12).to(device), torch.randint(4, (4,)).to(device)

    def step(lengths: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(forward(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Operators that are never recorded run at once, on what others gave.
        return loss.detach() + torch.bincount(lengths).sum() + torch.unique(y).numel()

    run = torchlazy.compile(step) if door in ("compiled_step", "compiled_in_mode") else step
    lengths = torch.tensor([1, 2, 2]).to(device)
    for _ in range(14):  # of compiled calls some are captured, and some audited
        with torchlazy.lazy_mode() if door.endswith("mode") else contextlib.nullcontext():
            value = run(lengths)
        float(value)
    assert not kept()


def test_a_value_goes_as_its_copy_is_made():
    """Run one by one, outputs that get memory of their own are not all there twice."""
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    shape = geometry_like(torch.empty(5, 4), torch.device("cpu"), "cpu")
    slots = [slot(0), slot(1), slot(0)]
    trace = CutTrace((), (), (), (), tuple((number, shape) for number in slots), (), ())
    values = [a.t()[1:], b.t()[1:]]
    results = interpreter._own_memory(trace, values, set(), {})
    for result, value in zip(results, [a, b, a], strict=True):
        assert torch.equal(result, value.t()[1:]) and result.is_contiguous()
    assert len({result.data_ptr() for result in results}) == 3
    assert values == [None, None]
