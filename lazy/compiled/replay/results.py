"""What a replay gives and leaves behind. What all runs have in common is worked out beforehand.

Invariant: a new lazy tensor and its storage, most of them gradients, are those that a cut would have made over the
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.autograd_facts import with_freed_graph
from torchlazy.lazy.compiled.capture.results import as_inference, seen_in
from torchlazy.lazy.compiled.replay.state import ReplayState, view_over
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.arguments import refill
from torchlazy.lazy.compiled.template.objects import unflatten_open
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.numbers.expr import evaluator
from torchlazy.lazy.record.running_trace import storage_over
from torchlazy.lazy.record.tensor import LazyTensor, wrap
from torchlazy.lazy.torch_private.dispatch import flatten_tree
from torchlazy.lazy.trace.geometry import Geometry, with_bits
from torchlazy.lazy.trace.storage import storage_of

_LEAF = flatten_tree(0)[1]


class Ending:
    """The results and effects of a template, from the values of a run whose steps are done."""

    def __init__(self, template: t.CallTemplate) -> None:
        self._effects = template.effects
        everything = [*template.results, *(result for effect in template.effects for result in effect.results)]
        numbers = [r.expression for r in everything if isinstance(r, t.NumberResult)]
        self._effect_is_leaf = [effect.spec == _LEAF for effect in template.effects]
        self._fresh = fresh_tensors(everything)
        self._values_of_results = list(map(self._value_of, template.results))
        self._values_of_effects = [list(map(self._value_of, effect.results)) for effect in template.effects]
        self._numbers_of_result = evaluator(numbers)

    def give(self, state: ReplayState) -> list[Any]:
        """Store the effects; the results in flat order."""
        state.numbers = iter(self._numbers_of_result(state.sources))
        results = [value_of(state) for value_of in self._values_of_results]
        stored = [[value_of(state) for value_of in values] for values in self._values_of_effects]
        for effect, leaves_of, is_leaf in zip(self._effects, stored, self._effect_is_leaf, strict=True):
            value = leaves_of[0] if is_leaf else unflatten_open(leaves_of, effect.spec)
            if type(effect.store) is t.ArgumentContents:
                refill(state.containers[effect.store.number], value)
            elif type(effect.store) is t.ArgumentGradient:
                state.given[effect.store.leaf].grad = value
            else:
                effect.store(value)
        return results

    def _value_of(self, result: t.Result) -> Callable[[ReplayState], Any]:
        """What gives the result's value after a run; asked in order."""
        if type(result) is t.NumberResult:
            return lambda state: next(state.numbers)
        if type(result) is t.TensorResult and result.number in self._fresh:
            return self._fresh[result.number]
        return lambda state: _result(result, state)


def _result(result: t.Result, state: ReplayState) -> Any:
    if isinstance(result, t.TensorResult):
        return _tensor(result, state)
    if isinstance(result, t.JointResult):
        output = state.outputs[result.index]
        if result.is_marked:
            DEVICE.mark(output)
        if not result.is_leaf or (output.is_leaf and output.requires_grad == result.requires_grad):
            return output
        alone = state.made.setdefault(-1 - result.index, output.detach())
        return alone.requires_grad_(result.requires_grad)
    if isinstance(result, t.SameArgument):
        return state.given[result.leaf]
    if isinstance(result, t.SameContainer):
        return state.containers[result.number]
    if isinstance(result, t.HostResult):
        return state.host(result.source)
    if isinstance(result, t.SameGradient):
        return result.owner.grad  # effects are stored after this
    assert isinstance(result, t.SameObject)
    return result.value


def _tensor(result: t.TensorResult, state: ReplayState) -> torch.Tensor:
    found = state.made.get(result.number)
    if found is None:
        found = state.made[result.number] = _new_tensor(result, state)
        if result.is_marked:
            DEVICE.mark(found)
    return found


def _new_tensor(result: t.TensorResult, state: ReplayState) -> torch.Tensor:
    geom = result.geometry
    if result.base is not None:
        base = _result(result.base, state)
        found = seen_in(base, geom, geom.offset)
        found = found.detach() if result.is_detached else found
        return found.requires_grad_() if result.requires_grad else found
    if geom.device.type != "lazy":
        tensor = view_over(state.memory(result.memory), geom)
        if result.is_inference:
            return as_inference(tensor)
    elif result.is_inference:
        with torch.inference_mode():
            return wrap(state.storage_for(result.memory, geom), geom, None, -1)
    else:
        tensor = wrap(state.storage_for(result.memory, geom), geom, None, -1)
    if result.freed:
        return with_freed_graph(tensor)
    return tensor.requires_grad_() if result.requires_grad else tensor


def fresh_tensors(results: Iterable[t.Result]) -> dict[int, Callable[[Any], torch.Tensor]]:
    """By the number of each result that is a new lazy tensor over memory of its own: what makes it.

    It is called with what has the values of the run's `places`. Results that share a place or a number are left out.
    """
    tensors = [result for result in results if type(result) is t.TensorResult]
    numbers = Counter(result.number for result in tensors)
    places = Counter(result.memory.place for result in tensors if type(result.memory) is t.FromStep)
    return {
        result.number: _Fresh(result.memory.place, result.geometry, result.requires_grad).make
        for result in tensors
        if type(result.memory) is t.FromStep
        and result.geometry.device.type == "lazy"
        and not result.freed
        and not result.is_inference
        and result.base is None
        and numbers[result.number] == places[result.memory.place] == 1
    }


class _Fresh:
    """Makes one tensor a run, of this geometry over the memory at a place. The memory mostly lies as it did before."""

    __slots__ = ("_base", "_geometry", "_nbytes", "_place", "_requires_grad")

    def __init__(self, place: int, geometry: Geometry, requires_grad: bool) -> None:
        self._place, self._geometry, self._requires_grad = place, geometry, requires_grad
        self._base, self._nbytes = with_bits(geometry, 0), geometry.nbytes

    def make(self, state: Any) -> LazyTensor:
        real, base, geometry = state.places[self._place], self._base, self._geometry
        if (
            real.shape == base.shape
            and real.stride() == base.strides
            and real.dtype is base.dtype
            and not base.offset
            and not real.storage_offset()
            and real.untyped_storage().nbytes() == self._nbytes
        ):
            storage = storage_of(base, real)
        else:
            storage = storage_over(real, geometry.device)
            if storage.real is real:
                self._base, self._nbytes = storage.base, storage.base.nbytes
        tensor = wrap(storage, geometry, None, -1)
        return tensor.requires_grad_() if self._requires_grad else tensor  # type: ignore[no-any-return]
