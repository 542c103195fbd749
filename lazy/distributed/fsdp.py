"""Modules under `fully_shard`: parameters gathered and gradients scattered by recorded operators and collectives.

Torch frees a module's parameters between their uses, and gathers them into memory that it reuses by address: what is
recorded would read it later. So most modules are gathered here, in `lazy_mode` and, as steps of a replay, in compiled
calls. Before a module's forward pass one all-gather makes its parameters whole, and the module gets them as results of
an autograd function; after it, it gets its shards back. What autograd saves of whole parameters is not kept where torch
frees them: the first reader in the backward gathers them again. When a backward has all gradients of a group of
parameters, one reduce-scatter sums them, in torch's order and dtypes, and autograd adds the shards to the parameters'.

Where a module asks for more than that, our modes end where the outermost such module's forward pass begins, and nothing
more is recorded until their block is left: the backward, and the optimizer's step on shards, run eagerly. Inputs that
were recorded are handed in as ordinary tensors.

Invariant: groups of parameters are gathered here in every call of a compiled callable whose Python runs, or in none:
processes agree on their collectives although one captures, one audits and one replays. Modules that ask for more are
left to torch, and calls with them run their Python. No operator is pending, and no mode of ours is open, while torch
gathers parameters or frees them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchlazy.lazy.compiled.guards.tensors import memory_of
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.device.block_hooks import HOOKS, BlockHooks
from torchlazy.lazy.record.compiled_scope import at_end_of_calls, runs_compiled
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import flatten_tree, without_our_modes
from torchlazy.lazy.torch_private.distributed import (
    hook_on_sums,
    hooks_on_saved,
    in_backward,
    make_sharded,
    part_of,
    show_on_modules,
    summed_in,
    sums_unused,
    unsupported_sharding,
    watch_sharded,
    whole_of,
    whole_size,
)
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.trace.op_schema import OpPlan

_CHANGED = (  # torch's text
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
    "shape {} is at version {}; expected version {} instead"
)
# The newer names where torch has them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SCATTER = torch.ops.c10d._reduce_scatter_base_.default


class _OpenRuns(threading.local):
    def __init__(self) -> None:
        self.open: list[Gathered] = []  # modules whose forward pass is running, the innermost last


_OPEN = _OpenRuns()


class Gathered:
    """The whole parameters of one group for one forward pass, and the backward behind it."""

    def __init__(self, recorder: Recorder, group: Any, kept: weakref.WeakKeyDictionary[Any, torch.Tensor]) -> None:
        """`kept`: gradients of whole parameters that have not been reduced yet."""
        self._recorder, self.group, self._kept = recorder, group, kept
        self._parameters = group.fsdp_params
        self._wholes: list[torch.Tensor] | None = None
        self._numbers: dict[int, int] = {}  # of parameters, by the memory of what autograd may keep of them
        self._hooks: Any = None
        self.is_reduced = False  # whether the backward had gradients

    def _trained(self) -> list[Any]:
        return [p for p in self._parameters if p.sharded_param.requires_grad]

    # ---------------------------------------------------------------- forward

    def begin(self) -> None:
        """Give the module its whole parameters, for its forward pass."""
        trained = self._trained()
        wholes = self._gather()
        frees = self.group.post_forward_mesh_info is not None
        if trained and torch.is_grad_enabled() and not frees:
            self._wholes = [whole.detach() for whole in wholes]
        if trained and torch.is_grad_enabled():
            at = [i for i, p in enumerate(self._parameters) if p.sharded_param.requires_grad]
            given = _Whole.apply(self, [wholes[i] for i in at], *(p.sharded_param for p in trained))
            for i, whole in zip(at, given, strict=True):
                wholes[i] = whole
        if frees and torch.is_grad_enabled() and not hooks_on_saved():
            self._numbers = {memory_of(whole): i for i, whole in enumerate(wholes)}
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        self._show(wholes)
        _OPEN.open.append(self)

    def end(self) -> None:
        """The forward pass is over, or was left by an error."""
        _OPEN.open.remove(self)
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        self.show_shards()

    def _show(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            show_on_modules(parameter, tensor)

    def show_shards(self) -> None:
        """Give the modules the parameters that the optimizer has."""
        self._show([parameter.sharded_param for parameter in self._parameters])

    # ---------------------------------------------------------------- what autograd keeps

    def _pack(self, tensor: torch.Tensor) -> Any:
        number = self._numbers.get(memory_of(tensor))
        if number is None:
            return tensor.detach(), None if tensor.is_inference() else tensor._version
        return number, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if len(packed) == 2:
            tensor, version = packed
            if version is not None and tensor._version != version:
                raise RuntimeError(_CHANGED.format(tuple(tensor.shape), tensor._version, version))
            return tensor  # type: ignore[no-any-return]
        number, shape, strides, offset = packed
        return _window(self.again()[number], shape, strides, offset)

    def again(self) -> list[torch.Tensor]:
        """The whole parameters, gathered again for the backward."""
        if self._wholes is None:
            with torch.no_grad():
                self._wholes = self._gather()
        return self._wholes

    def show_again(self) -> None:
        """A region of the forward pass is computed once more, in the backward."""
        self._show([whole.detach().requires_grad_(whole.is_floating_point()) for whole in self.again()])

    def let_go(self) -> None:
        """No backward reads whole parameters any more."""
        self._wholes = None
        self.show_shards()

    # ---------------------------------------------------------------- communication

    @torch.no_grad()
    def _gather(self) -> list[torch.Tensor]:
        group = self.group.mesh_info.shard_process_group
        count = group.size()
        rows, sizes = [], []
        for parameter in self._parameters:
            row = part_of(parameter.sharded_param).reshape(-1)
            lacking = parameter.padded_sharded_param_size.numel() - row.numel()
            row = torch.nn.functional.pad(row, (0, lacking)) if lacking else row
            rows.append(row if parameter.param_dtype is None else row.to(parameter.param_dtype))
            sizes.append(row.numel())
        flat = torch.cat(rows)
        given = flat.new_empty(count * flat.numel())
        _ALL_GATHER(given, flat, group=group)
        columns = given.view(count, -1).split(sizes, dim=1)
        return [_joined(p, column, count) for p, column in zip(self._parameters, columns, strict=True)]

    def scatter(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """For each gradient that exists the shard of its average, as a distributed tensor like its parameter."""
        self._recorder.on_host_write(_SCATTER)  # while a backward is only being recorded, no collective may run
        trained = self._trained()
        if sums_unused(self.group):
            gradients = [
                part_of(p.sharded_param).new_zeros(whole_size(p)) if g is None else g
                for p, g in zip(trained, gradients, strict=True)
            ]
        gradients = [self._with_kept(p, g) for p, g in zip(trained, gradients, strict=True)]
        if not self.group.reduce_grads:
            dtype = summed_in(self.group)
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    self._kept[parameter] = gradient if dtype is None else gradient.to(dtype)
            return [None] * len(trained)
        there = [(p, g) for p, g in zip(trained, gradients, strict=True) if g is not None]
        found: dict[int, torch.Tensor] = {}
        if there:
            group = self.group.mesh_info.shard_process_group
            count = group.size()
            dtype = summed_in(self.group) or there[0][1].dtype
            rows = [_in_rows(p, g, count).to(dtype) for p, g in there]
            flat = torch.cat(rows, dim=1)
            before, behind, op = self._division(dtype, count)
            flat = (flat if before is None else flat * (1 / before)).reshape(-1)
            shard = flat.new_empty(flat.numel() // count)
            _REDUCE_SCATTER(shard, flat, op=op, group=group)
            if (hook := hook_on_sums(self.group)) is not None:
                hook(shard)
            shard = (shard if behind is None else shard / behind).to(there[0][0].orig_dtype)
            parts = shard.split([row.shape[1] for row in rows])
            for (parameter, _), part in zip(there, parts, strict=True):
                size = parameter.sharded_size
                found[id(parameter)] = whole_of(parameter.sharded_param)(part[: size.numel()].view(size))
        return [found.get(id(parameter)) for parameter in trained]

    @torch.no_grad()
    def scatter_without_gradients(self) -> None:
        """Reduce after a backward without a gradient of the group: other processes may have one, or one was kept."""
        trained = [p.sharded_param for p in self._trained()]
        for parameter, shard in zip(trained, self.scatter([None] * len(trained)), strict=True):
            if shard is not None:
                parameter.grad = shard if parameter.grad is None else parameter.grad + shard

    def _with_kept(self, parameter: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient plus those of earlier backwards that were not to be reduced."""
        kept = self._kept.pop(parameter, None)
        if kept is None or gradient is None:
            return kept if gradient is None else gradient
        return kept + gradient

    def _division(self, dtype: torch.dtype, count: int) -> tuple[float | None, float | None, Any]:
        """Divisors before and after the collective, and its reduction. Sums in float16 overflow."""
        factor = self.group.gradient_divide_factor
        overflows = dtype not in (torch.float32, torch.bfloat16)
        if not overflows and not self.group.force_sum_reduction_for_comms:
            if factor in (None, count):
                return None, None, dist.ReduceOp.AVG if count > 1 else dist.ReduceOp.SUM
            return factor, None, dist.ReduceOp.SUM
        factor = float(count) if factor is None else factor
        if not overflows:
            return None, factor, dist.ReduceOp.SUM
        before = 1
        while factor % before == 0 and factor / before > before:
            before *= 2
        return before, factor / before, dist.ReduceOp.SUM


class _Whole(torch.autograd.Function):
    """Forward: whole parameters from shards. Backward: gradients of the shards from those of whole parameters."""

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, wholes: list[torch.Tensor], *shards: torch.Tensor) -> Any:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        ctx.gathered.let_go()
        ctx.gathered.is_reduced = True
        return None, None, *ctx.gathered.scatter(gradients)


def _joined(parameter: Any, column: torch.Tensor, count: int) -> torch.Tensor:
    """The whole parameter from the shards of all processes, one a row."""
    size, dim = whole_size(parameter), parameter.fsdp_placement.dim
    if dim == 0:
        whole = column.reshape(-1)[: size.numel()].view(size)
        return whole.clone() if count == 1 else whole  # of one process: all are views of what was gathered
    shards = column.reshape(count, *parameter.padded_sharded_param_size)
    return torch.cat(list(shards.unbind(0)), dim=dim)


def _in_rows(parameter: Any, gradient: torch.Tensor, count: int) -> torch.Tensor:
    """The gradient with the part of each process as a row, padded to equal lengths."""
    dim = parameter.fsdp_placement.dim
    if dim:
        gradient = torch.cat(gradient.chunk(count, dim=dim), dim=0)
    length = -(-gradient.shape[0] // count) * count
    lacking = (length - gradient.shape[0]) * (gradient.numel() // max(gradient.shape[0], 1))
    flat = gradient.reshape(-1)
    return (torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat).view(count, -1)


def _window(whole: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """The view of the whole parameter with this geometry; as a permutation of its dimensions where it is one."""
    if not offset and len(shape) == whole.dim():
        order = sorted(range(len(strides)), key=lambda i: (-strides[i], -shape[i]))
        back = sorted(range(len(order)), key=order.__getitem__)
        turned = whole.permute(back)
        if turned.shape == shape and turned.stride() == strides:
            return turned
    return whole.as_strided(shape, strides, offset)


_GATHERED: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that were gathered here in their last forward pass
_KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that ever were


def reshard_all() -> bool:
    """Give modules that are gathered here their shards back, and return whether some were whole: a forward pass of
    torch's own, without a backward, leaves outermost ones so."""
    return any([make_sharded(group) for group in list(_KNOWN)])


class ShardedRuns:
    """Groups of parameters that are gathered here, each with its running `Gathered`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._kept: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()  # by the parameter
        self._latest: weakref.WeakKeyDictionary[Any, Gathered] = weakref.WeakKeyDictionary()  # of each forward pass

    def take(self, groups: Sequence[Any], *, are_ours: bool) -> None:
        for group in groups:
            (_GATHERED.add if are_ours else _GATHERED.discard)(group)
            if are_ours:
                _KNOWN.add(group)
            for parameter in () if are_ours else group.fsdp_params:
                if (kept := self._kept.pop(parameter, None)) is not None:
                    if isinstance(kept, LazyTensor):
                        kept = self.recorder.hand_out(kept, "fully_shard")
                    parameter.unsharded_accumulated_grad = kept

    def gathers(self, group: Any) -> bool:
        return group in _GATHERED

    def enter_forward(self, group: Any) -> None:
        if not any(one.group is group for one in _OPEN.open):  # several modules may be one group
            self._latest[group] = found = Gathered(self.recorder, group, self._kept)
            found.begin()

    def leave_forward(self, group: Any) -> None:
        for one in [one for one in _OPEN.open if one.group is group]:
            one.end()

    def enter_backward(self, group: Any) -> None:
        if (found := self._latest.get(group)) is not None:
            found.show_again()

    def leave_backward(self, groups: list[Any]) -> None:
        for group in groups:
            found = self._latest.pop(group, None)
            if found is not None:
                found.let_go()
            waits = sums_unused(group) or any(p in self._kept for p in group.fsdp_params)
            if waits and group.reduce_grads and not (found is not None and found.is_reduced):
                Gathered(self.recorder, group, self._kept).scatter_without_gradients()

    def skips_prefetch(self, group: Any) -> bool:
        """Whether to skip torch's prefetch of this group: it would overlap with a pass that runs here."""
        return group in _GATHERED and (bool(_OPEN.open) or in_backward())

    def end_of_call(self) -> None:
        """Close forward passes that an error left open."""
        for one in reversed(list(_OPEN.open)):
            one.end()


_CALLS: Any = DeferredModule("torchlazy.lazy.compiled.ordinary")  # imported when needed: its guards need much of torch
# The operators with which `fully_shard` gathers parameters and scatters gradients.
_OPERATORS = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "copy_")


@dataclass(frozen=True, eq=False)
class _Ended:
    """Modes that ended before their block: the depth they had, and how they begin again."""

    depth: int
    modes: AbstractContextManager[None]


class _EndedModes(threading.local):
    def __init__(self) -> None:
        self.ended: list[_Ended] = []  # the innermost last


_ENDED_MODES = _EndedModes()


def install(recorder: Recorder) -> None:
    """Operators of `fully_shard` cannot be recorded: one that gets lazy tensors raises an error."""
    for name in _OPERATORS:
        recorder.handlers_by_name[f"fsdp::{name}"] = _refuse
    HOOKS.append(BlockHooks(watch_sharding, begin_modes_again, reshard_all))


def _refuse(recorder: Recorder, plan: OpPlan, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"{plan.op.name()}: a module under fully_shard gathers or frees parameters here, which recorded operators may "
        "read later. Run its forward pass in the same lazy_mode() block or compiled call as its backward, and keep its "
        "parameters on cpu or cuda, not on the lazy device"
    )


class _Sharded(ShardedRuns):
    """Gathers in torch's place inside our blocks, where it can; else our modes end."""

    def begin(self, groups: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        are_ours = bool(runs_compiled() or self.recorder.mode_depth) and not any(map(unsupported_sharding, groups))
        self.take(groups, are_ours=are_ours)
        return (args, kwargs) if are_ours else _leave_modes(self.recorder, args, kwargs)


def watch_sharding(recorder: Recorder) -> None:
    """One of our blocks begins: watch modules under `fully_shard`, if there can be any."""
    watch_sharded(recorder, _make)


def _make(recorder: Recorder) -> _Sharded:
    runs = _Sharded(recorder)
    at_end_of_calls(runs.end_of_call)
    return runs


def _leave_modes(recorder: Recorder, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not recorder.mode_depth:
        return args, kwargs
    if recorder.capture is not None:
        raise RuntimeError(
            "torchlazy.compile: the call runs a module under fully_shard to which neither its arguments nor the names "
            "in its code lead; name the module in the function, or do not compile it"
        )
    with recorder.lock:
        recorder.cut("fully_shard")
        recorder.rematerialize_pending()
        recorder.on_eager(torch.ops.fsdp.all_gather_copy_in.default, "a module under fully_shard")
        given = _CALLS.in_ordinary_tensors(recorder, (args, kwargs))
    if any(isinstance(leaf, LazyTensor) for leaf in flatten_tree(given)[0]):
        raise RuntimeError(
            "fully_shard: an input of the module was computed in lazy_mode() from what needs a gradient; apply "
            "fully_shard to the module that computes it, too, or run both outside of lazy_mode()"
        )
    ended = _Ended(recorder.mode_depth, without_our_modes())
    recorder.mode_depth = 0
    ended.modes.__enter__()
    _ENDED_MODES.ended.append(ended)
    return given  # type: ignore[no-any-return]


def begin_modes_again(recorder: Recorder) -> None:
    """A block is left: begin the modes that ended inside again, so that it can leave them."""
    if not _ENDED_MODES.ended or recorder.mode_depth:
        return
    ended = _ENDED_MODES.ended.pop()
    ended.modes.__exit__(None, None, None)
    recorder.mode_depth = ended.depth


exclude_from_dynamo(_Whole.forward, _Whole.backward)

__all__ = ["ShardedRuns", "begin_modes_again", "install", "reshard_all", "watch_sharding"]
