"""Settings that a compiled callable remembers: each change is noticed, by the pass that asks for them alone.

Invariant: what a change did is undone before the next one, and the settings are known again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchlazy.lazy.compiled.key import RememberedContext, dispatch_context
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private import settings
from torchlazy.runtime.native.identity_check import is_available

needs_compiler = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")


def remembered() -> RememberedContext:
    """The settings of now, known."""
    found = RememberedContext(LazyTensor.recorder)
    for _ in range(2):
        found.learn()
    return found


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    assert before != value
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def transformed() -> Iterator[None]:
    found = torch._C._functorch._grad_increment_nesting()
    assert found
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


class Functions(TorchFunctionMode):
    pass


class Dispatches(TorchDispatchMode):
    pass


backends, cuda = torch.backends, torch.backends.cuda
CHANGES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast, lazy": lambda: torch.autocast("lazy"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("cpu"),
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "flash": lambda: setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "efficient": lambda: setting(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    "math": lambda: setting(cuda.math_sdp_enabled, cuda.enable_math_sdp, False),
    "cudnn attention": lambda: setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    "cudnn": lambda: backends.cudnn.flags(enabled=False),
    "benchmark": lambda: backends.cudnn.flags(enabled=True, benchmark=True),
    "deterministic cudnn": lambda: backends.cudnn.flags(enabled=True, deterministic=True),
    "oneDNN": lambda: backends.mkldnn.flags(enabled=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "function mode": Functions,
    "dispatch mode": Dispatches,
    "lazy_mode": torchlazy.lazy_mode,
    "transform": transformed,
    "forward mode": forward_ad.dual_level,
    "rng": lambda: setting(lambda: torchlazy.config.rng, lambda v: setattr(torchlazy.config, "rng", v), "eager"),
    "our precision": lambda: setting(
        lambda: torchlazy.config.precision, lambda v: setattr(torchlazy.config, "precision", v), "eager"
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("recorded_in_python")
def test_each_change_is_noticed(change: str) -> None:
    found = remembered()
    before = dispatch_context(LazyTensor.recorder)
    assert found.known() is before
    with CHANGES[change]():
        assert found.known() is None
    assert found.known() is before is dispatch_context(LazyTensor.recorder)


@needs_compiler
@pytest.mark.parametrize("change", ["no_grad", "inference", "default dtype", "saved tensors", "transform", "cudnn"])
def test_changes_are_noticed_without_questions_to_the_libraries(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that calls them otherwise."""
    monkeypatch.setattr(settings, "plain_question", lambda *_: None)
    test_each_change_is_noticed(change)


@needs_compiler
def test_each_thread_is_asked_for_its_own_settings() -> None:
    with torch.no_grad():
        found = remembered()
        assert found.known() is not None
        elsewhere: list[Any] = []
        thread = threading.Thread(target=lambda: elsewhere.append(found.known()))
        thread.start()
        thread.join()
        assert elsewhere == [None]  # where gradients are recorded


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_another_dtype_of_autocast_is_noticed_inside(device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16):
        found = remembered()
        assert found.known() is not None
        with torch.autocast(device, dtype=torch.float16):
            assert found.known() is None
        with torch.autocast(device, enabled=False):
            assert found.known() is None
        assert found.known() is not None
    assert found.known() is None


@pytest.mark.usefixtures("recorded_in_python")
def test_what_no_function_in_c_tells_is_not_remembered() -> None:
    for change in ("default device", "saved tensors", "lazy_mode", "dispatch mode"):
        with CHANGES[change]():
            found = remembered()
            for _ in range(4):
                assert found.known() is None and found.learn() is dispatch_context(LazyTensor.recorder)


def test_calls_under_other_settings_are_captured_anew() -> None:
    """A call replayed under remembered settings, and under others between: each gives what eager gives."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return y.float() + torch.ones(2, 2, device=x.device) if y.requires_grad else y

    run = torchlazy.compile(twice, audit=False)
    x = torch.ones(2, 2, device="lazy")
    for _ in range(5):
        assert run(x).dtype == torch.float32
    with torch.autocast("lazy"):
        assert [run(x).dtype for _ in range(5)] == [torch.bfloat16] * 5
        with torch.autocast("lazy", dtype=torch.float16):
            assert run(x).dtype == torch.float16
        assert run(x).dtype == torch.bfloat16
    weight = x.clone().requires_grad_()
    for _ in range(4):
        assert run(weight).tolist() == [[3.0, 3.0], [3.0, 3.0]]
        with torch.no_grad():
            assert run(weight).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert run(x).dtype == torch.float32 and run.report().replays >= 10
