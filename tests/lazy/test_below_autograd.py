"""The block in which real operators run: the same keys and flags at each entry, whatever is around it, and none of it
left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torchlazy.lazy import torch_private
from torchlazy.lazy.torch_private import below_autograd


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "a mode": Passing,
    "forward gradients": forward_ad.dual_level,
    "the block itself": below_autograd,
}


def _state() -> tuple[Any, ...]:
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_torch_function_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_each_entry_is_like_the_first(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_keys_below_autograd", {})
    tensor = torch.ones(2, requires_grad=True)
    inside = []
    with AROUND[around]():
        outside = _state()
        for _ in range(3):
            with below_autograd():
                inside.append(_state())
                made = tensor * 2
                assert not made.requires_grad and not made.is_inference()
                assert not torch.is_autocast_enabled("cpu") or (made @ made).dtype == torch.float32
            assert _state() == outside
        with contextlib.suppress(KeyError), below_autograd():
            raise KeyError
        assert _state() == outside
    assert len(set(inside)) == 1 and not inside[0][3] and not inside[0][4]


def test_lazy_conjugation_is_resolved() -> None:
    value = torch.tensor([1 + 2j])
    for _ in range(2):
        with below_autograd():
            assert value.conj().resolve_conj().imag.item() == -2
