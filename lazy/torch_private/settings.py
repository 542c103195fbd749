"""Reads of torch's settings through its C++ API, and seeds drawn from torch's generators. Works on torch 2.11 to 2.13.

Why private: the getters in C of `torch_private.questions_of_settings` spend most of their hundred nanoseconds, and many
cache lines, on Python objects, and are called before each replay, when the caches are cold. The symbols are those of
torch's own C++ API; what has another name or form in some release is read by the getter as usual.

Invariant: a plain question is given only where its answer is the getter's now, and where it was tried as far as trying
changes nothing but this thread's own settings, for a moment. One seed consumes what one `random_` of an integer
consumes from the generator.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.runtime.native.identity_check import IdentityCheck
from torchlazy.runtime.plain_answers import BYTE, BYTE_OF, VALUE, WORDS_ALIKE, PlainQuestion

_BYTE, _INT, _WORD = 0xFF, 0xFFFFFFFF, -1
_STATE_BYTES = 32  # of autograd's thread-local state
_POINTER = 8


def enter_question(check: IdentityCheck, function: Callable[..., Any], *argument: Any) -> bool:
    """Add the check that the getter in C gives what it gives now, as a plain question where there is one. False, and
    nothing is added, where its answer is no plain value."""
    question = plain_question(function, *argument)
    if question is None:
        return check.answer(function, *argument)
    check.plain(question)
    return True


@functools.cache
def plain_question(function: Callable[..., Any], *argument: Any) -> PlainQuestion | None:
    """The plain question for the getter in C; None where there is none."""
    question = _questions().get((function, *argument))
    return question if question is not None and _agree(question.now(), function(*argument)) else None


def _agree(number: int, told: Any) -> bool:
    if told is None:  # an empty list: its two ends are equal
        return number == 1
    if isinstance(told, bool):
        return bool(number) == told
    return number == told if isinstance(told, int) else type(told) is torch.dtype


@functools.cache
def _questions() -> dict[tuple[Any, ...], PlainQuestion]:
    """Plain questions by the getters in C and their arguments."""
    c: Any = torch._C
    found: dict[tuple[Any, ...], PlainQuestion | None] = {
        (torch.is_grad_enabled,): _value("_ZN3c108GradMode10is_enabledEv", _BYTE),
        (torch.is_inference_mode_enabled,): _inference_mode(),
        (torch.is_anomaly_enabled,): _byte("_ZN5torch8autograd11AnomalyMode8_enabledE"),
        (torch.get_default_dtype,): _value("_ZN3c1031get_default_dtype_as_scalartypeEv", _BYTE),
        (torch.get_num_threads,): _value("_ZN2at15get_num_threadsEv", _INT),
        (c._len_torch_function_stack,): _value("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", _WORD),
        (c._len_torch_dispatch_stack,): _value("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", _WORD),
        (c._functorch.peek_interpreter_stack,): _no_transforms(),
        (c._autograd._top_saved_tensors_default_hooks, True): _no_saved_tensor_hooks(),
        (c._autograd._saved_tensors_hooks_is_enabled,): _value("_ZN2at23SavedTensorDefaultHooks10is_enabledEv", _BYTE),
        (c.is_autocast_cache_enabled,): _value("_ZN2at8autocast25is_autocast_cache_enabledEv", _BYTE),
    }
    context = _address("_ZN2at13globalContextEv")
    own = _function(context)() if context else 0
    for name, ask in _OF_CONTEXT.items():
        found[(getattr(c, ask),)] = _value(f"_ZNK2at7Context{len(name)}{name}Ev", _BYTE, own) if own else None
    kinds = c._autograd.DeviceType
    for device, kind in (("cpu", kinds.CPU), ("cuda", kinds.CUDA), (_privateuse1(), kinds.PrivateUse1)):
        asked = _value("_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE", _BYTE, int(kind))
        found[c.get_autocast_dtype, device] = asked
    return {key: question for key, question in found.items() if question is not None}


_OF_CONTEXT = {
    "deterministicAlgorithms": "_get_deterministic_algorithms",
    "deterministicAlgorithmsWarnOnly": "_get_deterministic_algorithms_warn_only",
    "userEnabledFlashSDP": "_get_flash_sdp_enabled",
    "userEnabledMemEfficientSDP": "_get_mem_efficient_sdp_enabled",
    "userEnabledMathSDP": "_get_math_sdp_enabled",
    "userEnabledCuDNNSDP": "_get_cudnn_sdp_enabled",
    "userEnabledCuDNN": "_get_cudnn_enabled",
    "benchmarkCuDNN": "_get_cudnn_benchmark",
    "deterministicCuDNN": "_get_cudnn_deterministic",
    "userEnabledMkldnn": "_get_mkldnn_enabled",
}


def _privateuse1() -> str:
    return str(torch._C._get_privateuse1_backend_name())


def _address(name: str) -> int:
    """The address of a symbol of torch's libraries; 0 where there is none."""
    library = ctypes.CDLL(torch._C.__file__)
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, name))
    except ValueError:
        return 0


def _function(address: int) -> Any:
    return ctypes.PYFUNCTYPE(ctypes.c_int64)(address)


def _value(name: str, mask: int, argument: int = 0) -> PlainQuestion | None:
    address = _address(name)
    return PlainQuestion(VALUE, address, argument, 0, mask) if address else None


def _byte(name: str) -> PlainQuestion | None:
    address = _address(name)
    return PlainQuestion(BYTE, address, mask=_BYTE) if address else None


def _inference_mode() -> PlainQuestion | None:
    """The bit that it sets in autograd's thread-local state."""
    address = _address("_ZN3c1013AutogradState13get_tls_stateEv")
    if not address:
        return None

    def state() -> bytes:
        return ctypes.string_at(_function(address)(), _STATE_BYTES)

    with torch.inference_mode(False):
        before = state()
        with torch.inference_mode():
            inside = state()
        after = state()
    risen = [(place, b & ~a) for place, (a, b) in enumerate(zip(before, inside, strict=True)) if b & ~a]
    if before != after or len(risen) != 1 or risen[0][1].bit_count() != 1:
        return None
    return PlainQuestion(BYTE_OF, address, 0, *risen[0])


def _no_transforms() -> PlainQuestion | None:
    """Whether the stack of `torch.func` transforms is empty."""
    address = _address("_ZN2at9functorch20getDynamicLayerStackEv")
    return PlainQuestion(WORDS_ALIKE, address, 0, 0, other=_POINTER) if address else None


def _no_saved_tensor_hooks() -> PlainQuestion | None:
    """Whether the queue of saved-tensor hooks is empty; found by trying."""
    address = _address("_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv")
    if not address:
        return None
    question = PlainQuestion(WORDS_ALIKE, address, 0, 2 * _POINTER, other=6 * _POINTER)
    alike = [question.now()]
    try:
        with contextlib.ExitStack() as entered:
            for _ in range(_MANY_HOOKS):
                entered.enter_context(torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged))
                alike.append(question.now())
    except RuntimeError:  # they are forbidden
        return None
    alike.append(question.now())
    return question if alike == [1, *[0] * _MANY_HOOKS, 1] else None


_MANY_HOOKS = 40  # more than one block of the queue holds


def _unchanged(value: Any) -> Any:
    return value


def random_number(memory: torch.Tensor, generator: torch.Generator | None) -> int:
    """What `random_` draws into this ordinary tensor of one integer.

    Why private: active modes, the user's among them, must not see it. `below_autograd` would do, at several times the
    cost; a training step has a draw for each dropout.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return int(memory.random_(generator=generator).item())


_spare: list[torch.Tensor] = []  # tensors to draw into; a thread pops one


def draw_seed(generator: torch.Generator | None) -> int:
    """63 bits from the generator (None: the CPU's default one)."""
    if generator is not None and generator.device.type != "cpu":
        with below_autograd():
            drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
            return int(drawn.item())
    try:
        memory = _spare.pop()
    except IndexError:
        with below_autograd():
            memory = torch.empty((), dtype=torch.int64, device="cpu")
    seed = random_number(memory, generator)
    _spare.append(memory)
    return seed
