"""Private names of `torch.distributed`, each with its reason: DDP's reducer, `DTensor` and `fully_shard`.

Distributed tensors (`DTensor`) hold no memory, but a local tensor and a description of how it is a part of a whole.
torch turns an operator on one into operators on its part, and those are what is recorded.

Invariant: nothing of `torch.distributed.tensor` or of `fully_shard` is imported here; a process that did not import
them has no such tensor and no such module.
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

    Why private: a collective whose results are known does not run again, but its caller needs a handle to wait for; of
    torch's handles only this one can be made without a collective.
    """
    return torch._C._distributed_c10d.FakeWork().boxed()


def in_backward() -> bool:
    """Whether torch's engine runs a backward, or its final callbacks, in this thread.

    Why private: for GPUs it runs them in threads of its own, and shows it nowhere else.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def remove_reducer_hooks(module: Any) -> None:
    """Remove the hooks of a `DistributedDataParallel`'s reducer from its parameters.

    Why private: with unused parameters or a static graph they write to the reducer's own memory in each backward, by
    operators, and count backwards that the reducer takes no part in.
    """
    module._remove_autograd_hooks()


def renew_reducer(module: Any) -> None:
    """A new reducer, as the module gets one when it is unpickled.

    Why private: removed hooks are registered again by its constructor alone.
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
    """Whether the tensor is a DTensor, whose parts several processes hold."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def any_distributed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors is a DTensor."""
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def part_of(tensor: Any) -> Any:
    """The local tensor of a DTensor; any other as it is."""
    return getattr(tensor, PART) if is_distributed(tensor) else tensor


def how_distributed(tensor: Any) -> tuple[Any, ...]:
    """The mesh of processes, and the placements on it."""
    return tensor.device_mesh, tensor.placements


def whole_of(like: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes DTensors that are distributed like this one, from local tensors."""
    return functools.partial(sys.modules[_MODULE].DTensor, spec=like._spec, requires_grad=False)


_PACKAGE = "torch.distributed.fsdp._fully_shard."
# Attributes of a parameter group that decide how it is gathered and its gradients are scattered.
FACTS = (
    "fsdp_params", "mesh_info", "post_forward_mesh_info", "mp_policy", "reduce_grads", "all_reduce_grads",
    "reshard_after_backward", "gradient_divide_factor", "reduce_scatter_unused_params", "force_sum_reduction_for_comms",
    "_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm", "_sharded_state",
)  # fmt: skip


class Sharding(Protocol):
    """Replaces torch's gathering and scattering."""

    def begin(self, groups: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An outermost forward pass begins, with these arguments; decides whether torch or we gather its groups."""

    def gathers(self, group: Any) -> bool:
        """Whether we gather this group in the current forward pass."""

    def enter_forward(self, group: Any) -> None: ...

    def leave_forward(self, group: Any) -> None: ...

    def enter_backward(self, group: Any) -> None: ...

    def leave_backward(self, groups: list[Any]) -> None: ...

    def skips_prefetch(self, group: Any) -> bool:
        """A caller wants the group to be unsharded; whether nothing is left to do for torch."""


def is_sharded(value: Any) -> bool:
    """Whether it is a module under `fully_shard`.

    Why private: the public name of the class would import all of FSDP, also where it is not used.
    """
    found = sys.modules.get(_PACKAGE + "_fully_shard")
    return found is not None and isinstance(value, found.FSDPModule)


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters that a module under `fully_shard` gathers together.

    Why private: nothing public says what is communicated together, and how.
    """
    return _groups(module._get_fsdp_state())


def is_begun(module: Any) -> bool:
    """Whether the module had a forward pass already, in which torch makes the rest of its state.

    Why private: there is no public getter.
    """
    return module._get_fsdp_state()._is_root is not None


def make_sharded(group: Any) -> bool:
    """Give the modules of a group their shards again, which some forward passes without a backward leave unsharded;
    whether they were unsharded.

    Why private: `reshard()` does so for a module, not for a group.
    """
    if group.is_sharded:
        return False
    group._to_sharded()
    return True


def whole_size(parameter: Any) -> torch.Size:
    """The unsharded size of a group's parameter.

    Why private: the public parameter of the module may be sharded or not.
    """
    return parameter._orig_size


def summed_in(group: Any) -> torch.dtype | None:
    """The dtype in which a group's gradients are reduced; None for their own.

    Why private: torch computes it from the policy and the parameters' dtypes.
    """
    return group._reduce_dtype


def sums_unused(group: Any) -> bool:
    """Whether parameters without a gradient take part in a group's reductions, as zeros.

    Why private: there is no public getter; torch 2.12 and older have no such setting.
    """
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def hook_on_sums(group: Any) -> Callable[[torch.Tensor], None] | None:
    """The hook that is called with a group's reduced gradients.

    Why private: `set_all_reduce_hook` sets it, and there is no public getter.
    """
    return group._all_reduce_hook


def show_on_modules(parameter: Any, tensor: torch.Tensor) -> None:
    """Set this tensor as the parameter in all modules that have it.

    Why private: modules refuse what is no `Parameter`, and several may share one.
    """
    parameter._setattr_on_modules(tensor)


def hooks_on_saved() -> bool:
    """Whether saved-tensor hooks are active: of a checkpoint, or those that keep saved tensors on the host.

    Why private: torch has public functions to set them, and none to read them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


_COMMS = (("_all_gather_comm", "DefaultAllGather"), ("_reduce_scatter_comm", "DefaultReduceScatter"))


def unsupported_sharding(group: Any) -> str:
    """What the group of parameters needs from torch that we do not support; "" where there is nothing.

    Why private: there are no public getters.
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
    """Let the object that `make` returns see the forward passes of modules under `fully_shard`, and gather in torch's
    place.

    Why private: `fully_shard` registers its hooks without notice, and offers none to others.
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
        if not _groups(self) or not all(map(ours.gathers, _groups(self))):
            return register(self, output)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(begun, self))
        return output

    def begun(self: Any, gradient: Any) -> None:
        """The backward has reached a result of the module."""
        if self._training_state is in_backward:
            return
        self._training_state = in_backward  # a recomputed region is no forward pass
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
        if not ours.gathers(self):
            return own(self, module, args, kwargs)
        ours.enter_forward(self)
        return args, kwargs

    def post_forward(own: Any, self: Any, module: Any, given: Any, output: Any) -> Any:
        if not ours.gathers(self):
            return own(self, module, given, output)
        ours.leave_forward(self)
        return output

    def unshard(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if ours.skips_prefetch(self) else own(self, *args, **kwargs)

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
    "make_sharded",
    "part_of",
    "remove_reducer_hooks",
    "renew_reducer",
    "show_on_modules",
    "summed_in",
    "sums_unused",
    "unsupported_sharding",
    "watch_sharded",
    "whole_of",
    "whole_size",
]
