"""Optimizers and modules on lazy tensors: foreach by default, a flush after each step, parameters that keep identity.

Invariant: nothing here changes what an optimizer does to tensors of other kinds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import sgd as sgd_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchlazy.lazy import uninitialized
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private_changes import allow_capturable, allow_foreach, keep_parameter_identity


def install(recorder: Recorder) -> None:
    """Flush at the end of every `optimizer.step()` and let optimizers take their foreach path."""
    allow_foreach(LazyTensor, "lazy")
    allow_capturable("lazy")
    keep_parameter_identity(lambda tensor: isinstance(tensor, LazyTensor))
    uninitialized.install()
    _step_as_on_the_cpu(recorder)
    _keep_step_counts_on_the_host()

    def flush(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        recorder.cut("optimizer step")

    register_optimizer_step_post_hook(flush)


def _keep_step_counts_on_the_host() -> None:
    """Step counts of a state that was loaded onto the lazy device come back to where an optimizer itself makes them.

    `torch.load(map_location="lazy")` brings them there, and each step would read each of them.
    """
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        load(self, state_dict)
        for group in self.param_groups:
            if group.get("capturable") or group.get("fused"):
                continue
            for state in [self.state[p] for p in group["params"] if p in self.state]:
                count = state.get("step") if isinstance(state, dict) else None
                if isinstance(count, LazyTensor) and count.dim() == 0 and count.device.type == "lazy":
                    state["step"] = count.cpu()

    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _step_as_on_the_cpu(recorder: Recorder) -> None:
    """On a CPU, `SGD(nesterov=True)` by default leaves gradients as they are, and a differentiable step has gradients.

    Its foreach path adds the momentum into the gradients, and saves parameters that it then writes to; eager takes that
    path by default on a GPU, but not on a CPU.
    """
    plain = sgd_module.sgd

    @functools.wraps(plain)
    def sgd(params: list[torch.Tensor], d_p_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        by_default = kwargs.get("foreach") is None and kwargs.get("fused") is None and not kwargs.get("has_sparse_grad")
        mine = recorder.target == "cpu" and any(isinstance(gradient, LazyTensor) for gradient in d_p_list)
        if by_default and mine and torch.is_grad_enabled():  # the step is differentiable
            kwargs["foreach"] = False
        elif by_default and kwargs.get("nesterov") and mine:
            d_p_list = list(torch._foreach_mul(d_p_list, 1))
        plain(params, d_p_list, *args, **kwargs)

    sgd_module.sgd = sgd
