"""Private torch API that the recorder cannot do without, each with its reason. Works on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
