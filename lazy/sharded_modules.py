"""Modules under `fully_shard` in `lazy_mode` and in compiled calls: whose parameters are gathered here, and what
happens where they are not.

Torch frees a module's parameters between their uses, and gathers them into memory that it takes and gives back by
address: what is recorded would read it later. Most modules are gathered here instead (`lazy/sharded_parameters.py`).
Where one asks for more than that, the modes of ours end where the outermost such module's forward pass begins, and
nothing more is recorded until their block is left: the backward, and the optimizer's step on shards, run at once.
Inputs that were recorded are handed in as ordinary tensors.

Invariant: no operator is pending, and no mode of ours is open, while torch gathers parameters or frees them.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.block_hooks import HOOKS, BlockHooks
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.op_plan import OpPlan
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.running_compiled import at_end_of_calls, runs_compiled
from torchlazy.lazy.sharded_parameters import ShardedRuns, shards_back
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private import flatten_tree, without_our_modes
from torchlazy.lazy.torch_private_sharding import kept_sharding, watch_sharded

_CALLS: Any = DeferredModule("torchlazy.lazy.ordinary_calls")  # whose guards need much of torch
# What `fully_shard` gathers and scatters parameters and gradients with.
_OPERATORS = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "copy_")


@dataclass(frozen=True, eq=False)
class _Ended:
    """Modes that ended before their block: the depth they had, and how they begin again."""

    depth: int
    modes: AbstractContextManager[None]


class _Here(threading.local):
    def __init__(self) -> None:
        self.ended: list[_Ended] = []  # the innermost last


_HERE = _Here()


def install(recorder: Recorder) -> None:
    """Operators of `fully_shard` are no operators to record: who comes to one with tensors of ours is told."""
    for name in _OPERATORS:
        recorder.handlers_by_name[f"fsdp::{name}"] = _refuse
    HOOKS.append(BlockHooks(watch_sharding, begin_modes_again, shards_back))


def _refuse(recorder: Recorder, plan: OpPlan, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"{plan.op.name()}: a module under fully_shard gathers or frees parameters here, which recorded operators may "
        "read later. Run its forward pass in the same lazy_mode() block or compiled call as its backward, and keep its "
        "parameters on cpu or cuda, not on the lazy device"
    )


class _Sharded(ShardedRuns):
    """Gathers in torch's place in blocks of ours, where it can; else our modes end."""

    def begin(self, groups: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        are_ours = bool(runs_compiled() or self.recorder.mode_depth) and not any(map(kept_sharding, groups))
        self.take(groups, are_ours=are_ours)
        return (args, kwargs) if are_ours else _leave_modes(self.recorder, args, kwargs)


def watch_sharding(recorder: Recorder) -> None:
    """A block of ours begins: modules under `fully_shard` are known from now on, if there can be any."""
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
        recorder.keep_promises()
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
    _HERE.ended.append(ended)
    return given  # type: ignore[no-any-return]


def begin_modes_again(recorder: Recorder) -> None:
    """A block is left: modes that ended inside are there again, for it to leave them."""
    if not _HERE.ended or recorder.mode_depth:
        return
    ended = _HERE.ended.pop()
    ended.modes.__exit__(None, None, None)
    recorder.mode_depth = ended.depth


__all__ = ["begin_modes_again", "install", "watch_sharding"]
