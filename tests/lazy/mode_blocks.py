"""What the tests of `lazy_mode()` share: cases are functions of a block's factory, played with it and without."""

from __future__ import annotations

import contextlib
import ctypes
import io

import torch
import torchlazy
from torch import nn

from tests.lazy.compare import data
from tests.lazy.models import built, same


def check_as_in_eager(f, tiers):
    """A function of a block's factory gives with `lazy_mode` what a block that does nothing gives, or raises."""
    torchlazy.config.tiers = tiers
    torchlazy.config.strict = True
    torchlazy.config.rng = "eager"  # the cases draw their data inside the block too
    want_error = have_error = want = have = None
    try:
        want = f(contextlib.nullcontext)
    except Exception as error:
        want_error = error
    try:
        have = f(torchlazy.lazy_mode)
    except Exception as error:
        if want_error is None:
            raise
        have_error = error
    assert type(have_error) is type(want_error)
    if want_error is None:
        same(have, want, rtol=1e-4, atol=1e-5)


def address_read(tensor: torch.Tensor) -> list[float]:
    """The floats at the tensor's address, read without torch."""
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return [pointer[i] for i in range(tensor.numel())]


def two_layers() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "cpu")


def train(block, model, make_optimizer, steps=4, around="step", x_shape=(6, 4)):
    optimizer = make_optimizer(model.parameters())
    losses = []
    outer = block() if around == "all" else contextlib.nullcontext()
    with outer:
        for step in range(steps):
            with block() if around == "step" else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = model(data("cpu", *x_shape, seed=step)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    return losses, model.state_dict(), optimizer.state_dict()["state"]


def write_and_read(tensor):
    file = io.BytesIO()
    torch.save({"t": tensor}, file)
    file.seek(0)
    return torch.load(file)["t"]
