"""Settings of torch as plain questions: each gives what the function in C says, also inside what changes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torchlazy.lazy.torch_private.dispatch import (
    questions_of_autocast,
    questions_of_saved_tensor_hooks,
    questions_of_settings,
)
from torchlazy.lazy.torch_private.settings import plain_question

_BY_CONTENT = {"_get_float32_matmul_precision", "_is_any_autocast_enabled"}  # no plain word tells them

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the libraries' names are other ones")


def of(function: Callable[..., Any], *argument: Any) -> int:
    question = plain_question(function, *argument)
    assert question is not None
    return question.now()


@on_linux
def test_nearly_all_settings_are_plain_questions() -> None:
    asked = (*questions_of_settings(), *questions_of_autocast(), *questions_of_saved_tensor_hooks())
    left = {function.__name__ for function, *argument in asked if plain_question(function, *argument) is None}
    assert left == _BY_CONTENT


@on_linux
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_gradients(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    for function in (torch.is_grad_enabled, torch.is_inference_mode_enabled):
        before = of(function)
        with mode():
            assert bool(of(function)) is function()
        assert of(function) == before


@on_linux
def test_hooks_and_transforms_are_seen_while_they_are_there() -> None:
    hooks = (torch._C._autograd._top_saved_tensors_default_hooks, True)
    transforms = (torch._C._functorch.peek_interpreter_stack,)
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled
    seen = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        seen.append(of(*transforms))
        return x

    torch.func.vmap(inside)(torch.ones(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        seen.append(of(*hooks))
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        seen.append(of(allowed))
    assert seen == [0, 0, 0]
    assert (of(*transforms), of(*hooks), of(allowed)) == (1, 1, 1)


@on_linux
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dtypes_of_autocast(device: str) -> None:
    numbers = []
    before = torch.get_autocast_dtype(device)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        torch.set_autocast_dtype(device, dtype)
        numbers.append(of(torch._C.get_autocast_dtype, device))
    torch.set_autocast_dtype(device, before)
    assert numbers[0] == numbers[2] != numbers[1]
