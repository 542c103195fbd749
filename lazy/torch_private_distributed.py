"""Private names of `torch.distributed`, each with its reason."""

from __future__ import annotations

from typing import Any

import torch.distributed


def finished_work() -> Any:
    """The handle of a collective that is over, as the operators of `c10d` give it.

    Why private: a collective whose results are at hand runs no second time, but who called it waits for something; of
    torch's handles only this one is there without a collective.
    """
    return torch._C._distributed_c10d.FakeWork().boxed()


def in_backward() -> bool:
    """Whether torch's engine runs a backward, or what waits for its end, in this thread.

    Why private: for GPUs it runs them in threads of its own, and says nowhere else that it does.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def remove_reducer_hooks(module: Any) -> None:
    """Take the hooks of a `DistributedDataParallel`'s reducer off its parameters.

    Why private: with unused parameters or a static graph they write to memory of the reducer's own in each backward, by
    operators, and count backwards that the reducer has no part in.
    """
    module._remove_autograd_hooks()


def renew_reducer(module: Any) -> None:
    """A new reducer, as the module gets one when it is unpickled.

    Why private: hooks that were taken off are put on by its constructor alone.
    """
    parameters, expects_sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, expects_sparse, names, module.static_graph)
    if module.static_graph:
        module._static_graph_delay_allreduce_enqueued = False
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
    for hook, state in module._comm_hooks:
        torch.distributed._register_comm_hook(module.reducer, state, hook)  # type: ignore[attr-defined]


__all__ = ["finished_work", "in_backward", "remove_reducer_hooks", "renew_reducer"]
