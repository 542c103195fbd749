"""Compiled steps: each records one operator of a known trace by a specialised function, without the lock.

The function from one step of a path to the next is generated from the next step: it has the operator, the constants and
the slots to expect, and the arguments that the result is made with. It only moves the trace's place on the path; the
entries and geometries up to there are those of the path, and are copied from there when the trace is read. Where there
is a C++ compiler, one native function serves all steps, also those that meet new inputs of the trace, by a record of
each (record/follow/native.py). Else each step has a Python function of its own, generated here.

Tensors made by `lazy_mode` are recorded inside of it only, where the mode holds the lock, and so never by compiled
steps. Whether an argument is one is known from its slot: outside of the mode nothing is written to them (or no path is
followed from there on), so that a slot's geometry claims the device that the tensor claims.

Threads: a compiled step makes its objects first. From its first look at a tensor to its last change of the trace it
calls nothing that could run Python, and does not loop, so that CPython switches to no other thread in between (except
for a debugger that traces this very code). Where threads run without a global lock there are no compiled steps.

Invariant: a compiled step records exactly what `Follower.follow` would, or nothing, and then the general way is
taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.record.follow.native import constant_of, kind_of
from torchlazy.lazy.record.follow.path import NEW, VIEW, WRITE, PathStart, PathStep
from torchlazy.lazy.record.tensor import LAZY, is_inference_mode, make_tensor, unknown, writes_with_grad
from torchlazy.lazy.torch_private.patches import exclude_inner_from_dynamo
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import Float, Slot

if TYPE_CHECKING:
    from torchlazy.lazy.record.follow.follower import Follower

StepFunction = Callable[..., Any]  # (cls, op, types, args=(), kwargs=None): called by torch for our operators

_CAN_COMPILE_STEPS = getattr(sys, "_is_gil_enabled", lambda: True)()

# What an argument must be, `{i}` being its position. Constants are checked first: the check of their type is a call.
# Small integers and names are mostly the same objects.
_CONSTANTS = {
    "is": "a{i} is C{i}",
    "number": "(a{i} is C{i} or type(a{i}) is T{i} and a{i} == C{i})",
    "float": "(a{i} is C{i} or type(a{i}) is T{i} and a{i} == C{i})",
    "list": "type(a{i}) is list and a{i} == C{i}",
}
# The slot of a tensor's value: its storage's, where it is a view of all of it, or its own while that is not written.
_TENSOR = (
    "(s{i}.slot is C{i} and s{i}.epoch == epoch and a{i}._geometry is s{i}.base"
    " or a{i}._slot is C{i} and a{i}._epoch == epoch and a{i}._seen == s{i}.version)"
)

# The parts of a compiled step, by what it makes: before it looks at the trace, what must hold, and what changes.
_MAKES = {
    NEW: (
        """storage = LazyStorage()
                storage.base = BASE
                storage.slot = OUTPUTS
                storage.version = 0
                storage.dirty = True
                tensor = make_tensor(*MAKING)
                tensor.__dict__ = unknown()
                tensor._storage_ = storage
                tensor._geometry = BASE""",
        "",
        """storage.epoch = epoch
                    rec.at = STEP
                    rec.made.append(storage)
                    return tensor""",
    ),
    VIEW: (
        """tensor = make_tensor(*MAKING)
                tensor.__dict__ = unknown()
                tensor._geometry = RESULTS
                tensor._slot = OUTPUTS""",
        " and a0._geometry is SOURCE",
        """rec.at = STEP
                    tensor._seen = s0.version
                    tensor._storage_ = s0
                    tensor._epoch = epoch
                    return tensor""",
    ),
    WRITE: (
        "has_grad = is_grad_enabled()",
        " and a0._geometry is SOURCE and s0.base is SOURCE and s0.dirty",
        """rec.at = STEP
                    s0.slot = OUTPUTS
                    s0.version += 1
                    if has_grad:
                        writes_with_grad[0] += 1
                    return a0""",
    ),
}

_TEMPLATE = """
def generate(rec, BEFORE, STEP, OP, GENERAL, {names}, BASE, OUTPUTS, MAKING, RESULTS, SOURCE):
    def walk(cls, op, types, args=(), kwargs=None):
        if op is not OP or kwargs:
            return GENERAL(cls, op, types, args, kwargs)
        try:
            {given}, = args
            if {constants}:
                {prepare}
                epoch = rec.epoch
                {storages}
                if rec.at is BEFORE and {tensors}{also}:
                    {change}
        except (AttributeError, ValueError):
            pass  # other arguments than last time
        return GENERAL(cls, op, types, args, kwargs)
    return walk
"""


def compiled_step_to(
    rec: Follower, before: PathStep | PathStart, step: PathStep, geometries: Sequence[Geometry]
) -> StepFunction | None:
    """The function from `before` (a step, or a path's start) to `step`; None where the general way must be taken.

    `geometries` are those of the path's values.
    """
    before.record = None
    if not _CAN_COMPILE_STEPS:
        return None
    if step.flat[0].device != LAZY:  # that of the first argument: a tensor that `lazy_mode` made
        return None
    if step.kind == WRITE and not step.is_whole and (step.results is not step.source or type(step.outputs) is not Slot):
        return None
    native = rec.native_steps.walk
    if native is not None:
        before.record = rec.native_steps.record_of(before, step, geometries)
        return None if before.record is None else native
    if rec.native_steps.is_coming:  # until then Python functions are not worth generating
        return None
    if (
        step.named or step.is_whole or step.kind not in _MAKES or before.end != step.number
    ):  # new inputs, which the general way adds
        return None
    kinds = [kind_of(argument) for argument in step.args]
    if "tensor" not in kinds or "" in kinds or (step.kind != NEW and kinds[0] != "tensor"):
        return None
    if any(type(a) is Float and (not a.value or a.value != a.value) for a in step.args):
        return None  # the sign of a zero would have to be compared, and nan is unequal to itself
    values: list[Any] = []
    for argument, kind in zip(step.args, kinds, strict=True):
        value = constant_of(argument, kind)
        values += (value, type(value))
    generate = _generator(step.kind, tuple(kinds))
    made = (step.base, step.outputs, step.making, step.results, step.source)
    walk: StepFunction = generate(rec, before, step, step.op, rec.general, *values, *made)
    return walk


@cache
def _generator(makes: int, kinds: tuple[str, ...]) -> Callable[..., StepFunction]:
    """The function that makes compiled steps of this form, generated once for each form."""
    tensors = [i for i, kind in enumerate(kinds) if kind == "tensor"]
    constants = [_CONSTANTS[kind].format(i=i) for i, kind in enumerate(kinds) if kind != "tensor"]
    prepare, also, change = _MAKES[makes]
    if makes == VIEW:  # a view is an inference tensor where its source is one
        # Checked before `rec.at` is: from there to the last change nothing may be called, or threads could switch.
        constants += ["not is_inference_mode()", "not a0.is_inference()"]
    if makes == WRITE:  # whether two views of one memory overlap is left to the general way
        also += "".join(f" and s{i} is not s0" for i in tensors[1:])
    text = _TEMPLATE.format(
        names=", ".join(f"C{i}, T{i}" for i in range(len(kinds))),
        given=", ".join(f"a{i}" for i in range(len(kinds))),
        constants=" and ".join(constants) or "True",
        prepare=prepare,
        storages="; ".join(f"s{i} = a{i}._storage_" for i in tensors),
        tensors=" and ".join(_TENSOR.format(i=i) for i in tensors),
        also=also,
        change=change,
    )
    space: dict[str, Any] = {
        "LazyStorage": LazyStorage,
        "make_tensor": make_tensor,
        "is_inference_mode": is_inference_mode,
        "is_grad_enabled": torch.is_grad_enabled,
        "unknown": unknown,
        "writes_with_grad": writes_with_grad,
    }
    exec(compile(text, f"<torchlazy walk {makes} {' '.join(kinds)}>", "exec"), space)
    exclude_inner_from_dynamo(space["generate"])
    generate: Callable[..., StepFunction] = space["generate"]
    return generate
