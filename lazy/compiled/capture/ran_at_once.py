"""Operators of a captured call that ran at once, because the size or the number that they give depends on the data.

Such are `nonzero`, `masked_select`, `unique`, indexing with a mask, `torch.equal`. A replay runs them at once too, on
the memory that programs made; the sizes are number sources, with which the call continues as captured (a check).
Writing as many values as a mask has places is writing at positions, which `nonzero` gives. A random operator draws its
numbers itself, then, from the generator that the call drew from.

`tolist()` gives the numbers of a small tensor, each tracked like that of `item()`; a replay reads each where it lies.
An int whose value the call depends on (a length, a position) is an unbacked size.

Invariant: such an operator gives new memory. One of torch's writes nothing, but for random ones; a custom one writes
only to what its schema names (compiled/template/custom_ops.py). Any other one is refused. The list of `tolist()` is the
plain one but for numbers that behave like theirs; of larger tensors it is plain, and the call runs its Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.compiled.capture.random import WatchedGenerators
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.custom_ops import has_known_schema, is_own
from torchlazy.lazy.numbers.tracked import as_tracked, node_of
from torchlazy.lazy.ops.composites import draws_when_it_runs
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.trace.geometry import geometry, is_dense
from torchlazy.lazy.trace.nested import map_nested
from torchlazy.lazy.trace.op_schema import is_random
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.session import Capture


aten = torch.ops.aten
_NUMBERS = (bool, int, float)


@functools.cache
def can_run_again(op: torch._ops.OpOverload) -> bool:
    """Whether a replay may run the operator by itself, as far as its schema tells."""
    schema = op._schema
    if is_own(op):
        return True
    if is_random(op):
        return has_known_schema(op) and not any(a.is_out for a in schema.arguments)
    tied = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return bool(schema.returns) and not tied


def views_on_memory(
    recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], memory_of: Callable[[LazyStorage], t.Memory]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] | None:
    """The operator's arguments with views on known memory in place of tensors; None where one is not dense."""
    fits = True

    def window(value: Any) -> Any:
        nonlocal fits
        if not isinstance(value, torch.Tensor):
            node = node_of(value)
            return value if node is None else t.HostNumber(node.expression)
        if not isinstance(value, LazyTensor):
            if not recorder.mode_depth or not is_dense(value):
                fits = False
                return value
            value = recorder.view_of_plain(value, recorder.storage_of_plain(value))
        return t.TensorOperand(memory_of(value._storage_), value._geometry)

    given = map_nested(window, tuple(args), tuple)
    named = tuple([(name, map_nested(window, value, tuple)) for name, value in kwargs.items()])
    return (given, named) if fits else None


def _generator_of(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random operator is given, or else that of where it computes; None for the default one."""
    values = [x for v in (*args, *kwargs.values()) for x in (v if isinstance(v, (list, tuple)) else (v,))]
    given = next((value for value in values if isinstance(value, torch.Generator)), None)
    if given is not None:
        return given
    plain = next((x for x in values if isinstance(x, torch.Tensor)), None)
    if plain is None or isinstance(plain, LazyTensor):
        device = torch.device(recorder.claimed(args, kwargs)[1])
    else:
        device = plain.device
    return None if device.type != "cuda" else torch.cuda.default_generators[device.index or 0]


def may_draw_from(
    recorder: Recorder, generators: WatchedGenerators, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Generator | None]:
    """The generators that an operator draws from where it is called, or that a custom one may draw from."""
    if is_random(op):
        return [] if draws_when_it_runs(op) else [_generator_of(recorder, args, kwargs)]
    return generators.watched if is_own(op) else []


def drawn_by(
    recorder: Recorder, generators: WatchedGenerators, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[torch.Generator | None, ...]:
    """The generators that the operator, which just ran at once, drew from."""
    found = may_draw_from(recorder, generators, op, args, kwargs)
    return tuple(found if is_random(op) else filter(generators.has_moved, found))


def are_new(results: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the results are numbers and lazy tensors that share no memory with the arguments, and are all of theirs.

    `linalg.lstsq` gives a part of the memory that it worked on; a replay would have that part only.
    """
    operands = set(storages_of((*args, *kwargs.values())))
    return all(
        type(result) in _NUMBERS
        or (
            isinstance(result, LazyTensor)
            and id(result._storage_) not in operands
            and result._storage_.base.numel <= result._geometry.numel
        )
        for result in results
    )


def storages_of(arguments: Sequence[Any]) -> dict[int, LazyStorage]:
    """The storages of lazy tensors among arguments, by identity."""
    return {
        id(item._storage_): item._storage_
        for value in arguments
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, LazyTensor)
    }


def positions_of_masks(
    nonzero: Callable[[torch.Tensor], list[Any]], written: torch.Tensor, indices: Sequence[Any], values: Any
) -> Any:
    """The indices, with positions in place of masks where there is a value for each place of a mask. `nonzero` gives
    the positions of one."""
    masks = [index for index in indices if index is not None and index.dtype is torch.bool]
    if not masks or not values.dim():
        return indices
    if len(masks) == sum(index is not None for index in indices) == 1:
        behind = written.dim() - masks[0].dim() - next(i for i, index in enumerate(indices) if index is masks[0])
        if values.dim() <= behind or values.shape[-1 - behind] == 1:
            return indices  # one value for all places: no size depends on the mask
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool or not index.dim():
            found.append(index)
            continue
        found += nonzero(index)
    return found


_MOST_FLOATS = 64
_MOST_INTS = 8  # as many sizes as a template lets the data decide


def listed(capture: Capture, tensor: LazyTensor) -> Any:
    """The tensor's numbers in nested lists; NotImplemented where they are too many to be tracked one by one."""
    most = _MOST_FLOATS if tensor.dtype.is_floating_point else 0 if tensor.dtype.is_complex else _MOST_INTS
    if not tensor.dim() or not 0 < tensor.numel() <= most:
        return NotImplemented
    if capture.fullgraph:
        capture.lets_cut("tolist")
    recorder = capture.recorder
    with recorder.lock:
        real = recorder.real(tensor, "tolist")
    with recorder.apart():
        values = real.cpu().tolist()
    return _numbers(capture, tensor, values, 0, tensor._geometry.offset)


def _numbers(capture: Capture, tensor: LazyTensor, values: Any, dim: int, offset: int) -> Any:
    whole = tensor._geometry
    if type(values) is list:
        step = whole.strides[dim]
        return [_numbers(capture, tensor, v, dim + 1, offset + i * step) for i, v in enumerate(values)]
    if type(values) is float:
        capture.of_lists.add(capture.sources)
    one = geometry((), (), offset, whole.dtype, whole.device, whole.compute, whole.bits)
    return as_tracked(capture.item_of(tensor._storage_, one, values))


__all__ = [
    "are_new",
    "can_run_again",
    "drawn_by",
    "listed",
    "may_draw_from",
    "positions_of_masks",
    "storages_of",
    "views_on_memory",
]
