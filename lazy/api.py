"""The public functions."""

from __future__ import annotations

import os

import torch

from torchlazy.lazy import attention, device, handlers, optimizers, random
from torchlazy.lazy.recorder import Recorder, register_fork
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.tier0 import run_entries
from torchlazy.lazy.torch_private import below_autograd


def _driver(trace, inputs, scalars, cause, frame):
    with below_autograd():
        return run_entries(trace, inputs, scalars)


recorder = Recorder(_driver)
LazyTensor.recorder = recorder
handlers.install(recorder)
random.install(recorder)
attention.install(recorder)
optimizers.install(recorder)
device.register(recorder)
register_fork(recorder)


def set_target(t): recorder.cut("set_target"); recorder.target=t
def sync(): recorder.cut("sync")
def flush(): recorder.cut("flush")
def is_lazy(t): return isinstance(t, LazyTensor)
