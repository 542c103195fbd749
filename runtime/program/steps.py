"""What the steps of a program read and make, and the ATen operators that they name.

Invariant: `names_read` and `names_made` cover every name in a step; a launch counts its buffers as read, also those
that it writes, because all of them must exist before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_int import integer_of, surely_equal
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)
from typing_extensions import assert_never


def names_made(step: Step) -> tuple[str, ...]:
    """The names that a step gives a value."""
    if isinstance(step, Allocate | Reinterpret):
        return (step.name,)
    if isinstance(step, ExternCall):
        return tuple(name for name in step.outputs if name)
    return ()


def names_read(step: Step) -> tuple[str, ...]:
    """The tensor values that a step needs, each once."""
    if isinstance(step, Allocate):
        names = [step.reuse] if step.reuse else []
    elif isinstance(step, Reinterpret):
        names = [step.source]
    elif isinstance(step, Launch):
        names = list(step.buffers)
    elif isinstance(step, ForeachLaunch):
        names = [name for buffers, _, _ in step.rows for name in buffers]
    elif isinstance(step, ExternCall):
        names = refs_in((step.args, tuple(value for _, value in step.kwargs)))
    elif isinstance(step, Free):
        names = []
    else:
        assert_never(step)
    return tuple(dict.fromkeys(names))


def refs_in(value: Any) -> list[str]:
    """Names of the tensor values in extern arguments, however nested."""
    if isinstance(value, ValueRef):
        return [] if value.scalar else [value.name]
    if isinstance(value, list | tuple):
        return [name for item in value for name in refs_in(item)]
    return []


def span_bytes(meta: TensorMeta) -> int:
    """Bytes from the start of the first element to the end of the last."""
    if 0 in meta.shape:
        return 0
    last = sum((integer_of(n) - 1) * integer_of(s) for n, s in zip(meta.shape, meta.strides, strict=True))
    return (last + 1) * meta.dtype.itemsize


def bytes_by_name(program: Program) -> dict[str, int]:
    """Bytes behind each name, from element 0 of its window."""
    found = {name: span_bytes(meta) for name, meta in program.inputs}
    for step in program.steps:
        if isinstance(step, (Allocate, Reinterpret)):
            found[step.name] = span_bytes(step.meta)
        elif isinstance(step, ExternCall):
            pairs = zip(step.outputs, step.metas, strict=True)
            found |= {name: span_bytes(meta) for name, meta in pairs if name is not None and meta is not None}
    return found


def is_dense(meta: TensorMeta) -> bool:
    """Whether the span holds each element once and nothing else."""
    return surely_equal(span_bytes(meta), integer_of(meta.numel) * meta.dtype.itemsize)


@functools.cache
def resolve_overload(name: str) -> torch._ops.OpOverload:
    """The operator that "namespace.name.overload" names."""
    try:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise ProgramError(
            f"extern call: no operator {name!r} in this torch ({torch.__version__}); compile the program anew"
        ) from error


# Operators for which torch has a binding of its own that is the same operator: it takes its arguments apart in a third
# of the time that the call of any overload by its schema needs (torch.mm 0.9, aten.mm.default 2.7 microseconds). Not of
# those that return numbers beside tensors: a binding makes tensors of these.
_BOUND = ("mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_efficient_attention")


RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
RNN_LAYER_TRAIN = 15  # the position of the argument that says whether gradients are on, in what is recorded


def _rnn_layer(*args: Any) -> Any:
    """oneDNN's layer with gradients on or off as its `train` says: its kernel asks the grad mode of the thread, and
    gives the workspace that a backward reads only where it is on. A program runs in any mode."""
    with torch.set_grad_enabled(args[RNN_LAYER_TRAIN]):
        return RNN_LAYER(*args)


CALLED_AS: dict[torch._ops.OpOverload, Callable[..., Any]] = {RNN_LAYER: _rnn_layer}
"""For operators whose kernels depend on more than their arguments: what calls them as they were recorded. The native
recorder knows them (`place_of_gradients`)."""


@functools.cache
def quickest_call(name: str) -> Callable[..., Any]:
    """What calls this operator, with arguments as its schema has them, at the least cost."""
    overload = resolve_overload(name)
    if overload in CALLED_AS:
        return CALLED_AS[overload]
    namespace, packet, kind = name.split(".")
    if namespace == "aten" and kind == "default" and packet in _BOUND:
        return getattr(torch, packet, overload)  # type: ignore[no-any-return]
    # What the overload's own `__call__` calls.
    return getattr(overload, "_op", overload) if type(overload) is torch._ops.OpOverload else overload  # type: ignore[no-any-return]


def without_defaults(overload: torch._ops.OpOverload, kwargs: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The keyword arguments that are not what the schema has anyway."""
    defaults = {a.name: a.default_value for a in overload._schema.arguments if a.has_default_value()}

    def is_default(name: str, value: Any) -> bool:
        if name not in defaults or not (value is None or isinstance(value, bool | int | float)):
            return False
        return repr(value) == repr(defaults[name])

    return tuple((name, value) for name, value in kwargs if not is_default(name, value))


def returns_many(overload: torch._ops.OpOverload) -> bool:
    """Whether a call answers with a tuple or list rather than with one tensor."""
    returns = overload._schema.returns
    return len(returns) != 1 or str(returns[0].type).startswith("List")


@functools.cache
def may_alias(name: str) -> bool:
    """Whether results of the operator may be windows on its arguments, or use their memory after the call.

    The schema says so for views and in-place operators; composite ones (dropout out of training, contiguous) may hand
    an argument through without saying it, and collectives read their argument until they are waited for. Operators
    of unknown libraries are taken for the worst.
    """
    overload = resolve_overload(name)
    if name.split(".")[0] not in ("aten", "torchlazy"):
        return True
    if any(result.alias_info is not None for result in overload._schema.returns):
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
