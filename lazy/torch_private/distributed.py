"""Private names of `torch.distributed`, each with its reason.

Distributed tensors (`DTensor`): they hold no memory, but a tensor that does, and how it is a part of a whole.

Private names of torch's `fully_shard`, each with its reason. Nothing is imported: without those modules of torch's
there is no module under `fully_shard`.

torch turns an operator on one into operators on its part, and those are what is recorded.

Invariant: nothing of `torch.distributed.tensor` is imported here; where nobody imported it, there is no such tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed
from torchlazy.lazy.torch_private.dispatch import flatten_tree


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


PART = "_local_tensor"
FIELDS = (PART, "_spec")
_MODULE = "torch.distributed.tensor"


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a part of one that several processes hold."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def any_distributed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors is such a part."""
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def part_of(tensor: Any) -> Any:
    """The tensor that holds this process's part of a distributed one; any other as it is."""
    return getattr(tensor, PART) if is_distributed(tensor) else tensor


def how_distributed(tensor: Any) -> tuple[Any, ...]:
    """Over which processes, and how."""
    return tensor.device_mesh, tensor.placements


def whole_of(like: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes, of this process's part, distributed tensors that are so distributed."""
    return functools.partial(sys.modules[_MODULE].DTensor, spec=like._spec, requires_grad=False)


_PACKAGE = "torch.distributed.fsdp._fully_shard."
# What of a group of parameters says how it is gathered and its gradients are scattered.
FACTS = (
    "fsdp_params", "mesh_info", "post_forward_mesh_info", "mp_policy", "reduce_grads", "all_reduce_grads",
    "reshard_after_backward", "gradient_divide_factor", "reduce_scatter_unused_params", "force_sum_reduction_for_comms",
    "_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm", "_sharded_state",
)  # fmt: skip


class Sharding(Protocol):
    """What stands in for torch's gathering and scattering."""

    def begin(self, groups: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An outermost forward pass begins, with these arguments; who gathers its groups is decided here."""

    def takes(self, group: Any) -> bool:
        """Whether this group is gathered by ours in the forward pass that runs."""

    def enter_forward(self, group: Any) -> None: ...

    def leave_forward(self, group: Any) -> None: ...

    def enter_backward(self, group: Any) -> None: ...

    def leave_backward(self, groups: list[Any]) -> None: ...

    def asked(self, group: Any) -> bool:
        """Somebody wants the group to be whole; whether nothing is left to do for torch."""


def is_sharded(value: Any) -> bool:
    """Whether it is a module under `fully_shard`.

    Why private: the public name of the class would be imported with all of FSDP, also where nobody uses it.
    """
    found = sys.modules.get(_PACKAGE + "_fully_shard")
    return found is not None and isinstance(value, found.FSDPModule)


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters that a module under `fully_shard` gathers together.

    Why private: nothing public tells what is communicated together, and how.
    """
    return _groups(module._get_fsdp_state())


def is_begun(module: Any) -> bool:
    """Whether the module had a forward pass already, in which torch makes the rest of its state.

    Why private: nothing public tells.
    """
    return module._get_fsdp_state()._is_root is not None


def make_sharded(group: Any) -> bool:
    """Give the modules of a group the shards, which some forward passes without a backward leave whole; whether they
    were.

    Why private: `reshard()` of a module is that, but for groups of which it is not known.
    """
    if group.is_sharded:
        return False
    group._to_sharded()
    return True


def whole_size(parameter: Any) -> torch.Size:
    """The size of a parameter of a group, which the processes hold shards of.

    Why private: of what is public only the module's parameter tells it, and that is whole or not.
    """
    return parameter._orig_size


def summed_in(group: Any) -> torch.dtype | None:
    """The dtype in which a group's gradients are summed; None for their own.

    Why private: torch makes it of the policy and the parameters' dtypes.
    """
    return group._reduce_dtype


def sums_unused(group: Any) -> bool:
    """Whether parameters without a gradient take part in a group's sums, as zeros.

    Why private: nothing public tells it; torch 2.12 and older have no such setting.
    """
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def hook_on_sums(group: Any) -> Callable[[torch.Tensor], None] | None:
    """What is called with the sums of a group's gradients.

    Why private: `set_all_reduce_hook` sets it, and nothing public tells it.
    """
    return group._all_reduce_hook


def show_on_modules(parameter: Any, tensor: torch.Tensor) -> None:
    """Let the modules of a parameter of a group have this tensor as the parameter.

    Why private: modules refuse what is no `Parameter`, and several may share one.
    """
    parameter._setattr_on_modules(tensor)


def hooks_on_saved() -> bool:
    """Whether what autograd keeps goes through hooks: of a checkpoint, or those that keep it on the host.

    Why private: torch lets the innermost hooks be set, and does not tell of them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


_COMMS = (("_all_gather_comm", "DefaultAllGather"), ("_reduce_scatter_comm", "DefaultReduceScatter"))


def kept_sharding(group: Any) -> str:
    """What the group of parameters asks of torch that is not done by ours; "" where it is.

    Why private: nothing public tells what was asked for.
    """
    parameters = group.fsdp_params
    asks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("over a mesh of several dimensions",
         lambda: group._is_hsdp or not hasattr(group.mesh_info, "shard_process_group")
         or any(getattr(p, "mesh_info", group.mesh_info) is not group.mesh_info for p in parameters)),
        ("of distributed tensors", lambda: any(p.is_dtensor for p in parameters)),
        ("with an offload policy", lambda: any(p.offload_to_cpu for p in parameters)),
        ("that reshards to another mesh after the forward pass", lambda: group._use_post_forward_mesh),
        ("with gradients that torch has not reduced yet", lambda: any(
            p.unsharded_accumulated_grad is not None
            or getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None for p in parameters)),
        ("with communication of its own",
         lambda: any(type(getattr(group, name, None)).__name__ not in ("NoneType", kind) for name, kind in _COMMS)
         or getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None),
        ("with hooks on its gathering", lambda: any(
            hasattr(part_of(p.sharded_param), "fsdp_pre_all_gather") for p in parameters)),
    )  # fmt: skip
    return next((what for what, is_asked in asks if is_asked()), "")


def watch_sharded(recorder: Any, make: Callable[[Any], Sharding]) -> None:
    """Let what `make` makes see the forward passes of modules under `fully_shard`, and gather in torch's place.

    Why private: `fully_shard` puts its hooks on modules before anybody can know of it, and has none of its own for
    others.
    """
    states, groups = sys.modules.get(_PACKAGE + "_fsdp_state"), sys.modules.get(_PACKAGE + "_fsdp_param_group")
    if states is None or groups is None or hasattr(states.FSDPState._root_pre_forward, "is_watched"):
        return
    ours = make(recorder)
    state, group = states.FSDPState, groups.FSDPParamGroup
    idle, in_backward = groups.TrainingState.IDLE, groups.TrainingState.PRE_BACKWARD
    prepare, register = state._root_pre_forward, state._register_pre_backward_hook

    @functools.wraps(prepare)
    def watched(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self._state_ctx.iter_forward_root is None:
            found = [one for m in module.modules() if is_sharded(m) for one in groups_of(m)]
            args, kwargs = ours.begin(found, args, kwargs)
        return prepare(self, module, args, kwargs)

    watched.is_watched = True  # type: ignore[attr-defined]
    state._root_pre_forward = watched

    @functools.wraps(register)
    def registered(self: Any, output: Any) -> Any:
        if not _groups(self) or not all(map(ours.takes, _groups(self))):
            return register(self, output)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(begun, self))
        return output

    def begun(self: Any, gradient: Any) -> None:
        """The backward has come to a result of the module."""
        if self._training_state is in_backward:
            return
        self._training_state = in_backward  # a region that is computed again is no forward pass
        for one in _groups(self):
            ours.enter_backward(one)
        context = self._state_ctx
        if not context.post_backward_final_callback_queued:
            context.post_backward_final_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(ended, context))  # type: ignore[attr-defined]

    def ended(context: Any) -> None:
        context.post_backward_final_callback_queued, context.iter_forward_root = False, None
        for one in context.all_states:
            one._training_state = idle
            ours.leave_backward(_groups(one))

    state._register_pre_backward_hook = registered

    def replaced(name: str, instead: Callable[..., Any]) -> None:
        own = getattr(group, name)

        @functools.wraps(own)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return instead(own, self, *args, **kwargs)

        setattr(group, name, call)

    def pre_forward(own: Any, self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if not ours.takes(self):
            return own(self, module, args, kwargs)
        ours.enter_forward(self)
        return args, kwargs

    def post_forward(own: Any, self: Any, module: Any, given: Any, output: Any) -> Any:
        if not ours.takes(self):
            return own(self, module, given, output)
        ours.leave_forward(self)
        return output

    def unshard(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if ours.asked(self) else own(self, *args, **kwargs)

    replaced("pre_forward", pre_forward)
    replaced("post_forward", post_forward)
    replaced("unshard", unshard)


def _groups(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # torch before 2.12 has one
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in flatten_tree(value)[0] if isinstance(leaf, torch.Tensor))


__all__ = [
    "FACTS",
    "FIELDS",
    "Sharding",
    "any_distributed",
    "finished_work",
    "groups_of",
    "hook_on_sums",
    "hooks_on_saved",
    "how_distributed",
    "in_backward",
    "is_begun",
    "is_distributed",
    "is_sharded",
    "kept_sharding",
    "make_sharded",
    "part_of",
    "remove_reducer_hooks",
    "renew_reducer",
    "show_on_modules",
    "summed_in",
    "sums_unused",
    "watch_sharded",
    "whole_of",
    "whole_size",
]
