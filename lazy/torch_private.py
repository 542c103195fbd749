"""Private torch API that the recorder cannot do without, each with its reason. Works on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run real operators with no autograd, autocast, inference flag or Python dispatch around them.

    Why private: a cut may happen anywhere (a hook, a `print`, under autocast or inference_mode); there is no public way to
    say "just run the kernels", and tensors made under inference_mode could never be written again.
    """
    with (
        torch.inference_mode(False),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        yield


def allow_foreach(tensor_type: type, device_type: str) -> None:
    """Let optimizers and gradient clipping take their foreach path for this tensor type on this device type.

    Why private: torch decides by lists of types and devices in two modules and offers no registration.
    """
    for module in (optimizer, _foreach_utils):
        if tensor_type not in module._foreach_supported_types:
            module._foreach_supported_types.append(tensor_type)
        original = module._get_foreach_kernels_supported_devices
        if device_type not in original():
            module._get_foreach_kernels_supported_devices = _extended(original, device_type)


def _extended(original: Callable[[], list[str]], device_type: str) -> Callable[[], list[str]]:
    return lambda: [*original(), device_type]
