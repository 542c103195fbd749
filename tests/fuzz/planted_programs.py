"""Faults of recording, of the native recorder and of the compiler.

Invariant: a fault changes functions of the product in the process that plants it, and nothing of the fuzzer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torchlazy.autograd import recompute
from torchlazy.autograd.rematerialise import COPY_OF
from torchlazy.inductor import lowering
from torchlazy.inductor.donation import _DonationPlanner
from torchlazy.inductor.lowerings import reduction
from torchlazy.lazy.native import programs as native_programs
from torchlazy.lazy.native.graphs import RunsInPython
from torchlazy.lazy.native.sizes import RunsForAllSizes
from torchlazy.lazy.record import writes
from torchlazy.lazy.record.running_trace import RunningTrace
from torchlazy.lazy.shapes import pointwise as pointwise_shapes
from torchlazy.prims.builder import RULES
from torchlazy.prims.passes import graph_passes
from torchlazy.runtime.program import memory_plan

from tests.fuzz.planted import Faults, instead

FAULTS = Faults()
_aten = torch.ops.aten
_RECORDED, _NATIVE, _COMPILED_CALLS = ("mode",), ("native",), ("compile",)


# ---- recording


@FAULTS("lazy/record", _RECORDED, r"_\(|\] [-+*]?= ")
def versions_of_written_memory_are_not_raised() -> None:
    @instead(RunningTrace, "rebind")
    def rebind(old: Any, self: Any, tensor: Any, *rest: Any) -> None:
        version = tensor._storage_.version
        old(self, tensor, *rest)
        tensor._storage_.version = tensor._seen = version


@FAULTS("lazy/record", _RECORDED, r"_\(|\] [-+*]?= ")
def writes_to_views_do_not_reach_their_bases() -> None:
    @instead(RunningTrace, "rebind")
    def rebind(old: Any, self: Any, tensor: Any, value: Any, new_base: Any) -> None:
        storage = tensor._storage_
        keeps = tensor._geometry is not storage.base and storage.epoch == self.epoch
        old(self, tensor, value, storage.slot if keeps else new_base)


@FAULTS("lazy/record", _RECORDED, r"_\(|\] [-+*]?= ")
def overlapping_writes_are_not_refused() -> None:
    writes._check_overlap = lambda *args: None


@FAULTS("lazy/shapes", _RECORDED)
def elementwise_results_are_always_contiguous() -> None:
    @instead(pointwise_shapes, "elementwise_strides")
    def strides(old: Any, shape: Any, *rest: Any) -> Any:
        return pointwise_shapes.plain_strides(shape)


# ---- the native recorder


def _learn_less(**changed: Callable[[Any], Any]) -> None:
    @instead(native_programs, "learn")
    def learn(old: Any, *args: Any) -> Any:
        found = old(*args)
        return replace(found, **{name: change(getattr(found, name)) for name, change in changed.items()})


@FAULTS("lazy/native", _NATIVE)
def constants_of_a_native_trace_are_not_compared() -> None:
    _learn_less(fixed=lambda fixed: ())


@FAULTS("lazy/native", _NATIVE)
def equal_numbers_of_a_native_trace_stay_equal() -> None:
    _learn_less(equal=lambda equal: ())


@FAULTS("lazy/native", _NATIVE)
def results_of_a_native_trace_are_swapped() -> None:
    @instead(RunsInPython, "__call__")
    def call(old: Any, self: Any, memory: Any, scalars: Any) -> Any:
        found = old(self, memory, scalars)
        forms = [(value.shape, value.stride(), value.dtype) for value in found]
        return found[::-1] if forms == forms[::-1] else found


@FAULTS("lazy/native", _NATIVE)
def numbers_of_a_native_trace_are_captured_as_constants() -> None:
    @instead(RunsInPython, "__call__")
    def call(old: Any, self: Any, memory: Any, scalars: Any) -> Any:
        return old(self, memory, self.__dict__.setdefault("planted", list(scalars)))


@FAULTS("lazy/native", _NATIVE)
def sizes_of_a_native_trace_are_captured_as_constants() -> None:
    @instead(RunsForAllSizes, "at")
    def at(old: Any, self: Any, values: Any) -> Any:
        return old(self, self.__dict__.setdefault("planted", list(values)))


# ---- decompositions

_decompositions = functools.partial(FAULTS, "prims/decomps", ("mode",), compiled=True)


@_decompositions("fmod|%")
def fmod_is_decomposed_as_remainder() -> None:
    for kind in ("Tensor", "Scalar"):
        RULES[getattr(_aten.fmod, kind)] = RULES[getattr(_aten.remainder, kind)]


@_decompositions(r"var\(|std\(")
def var_is_decomposed_without_its_correction() -> None:
    @instead(RULES, _aten.var.correction)
    def var(old: Any, *args: Any, correction: Any = None, **named: Any) -> Any:
        return old(*args, **named)


@_decompositions("amin")
def the_smallest_of_a_row_is_decomposed_as_the_largest() -> None:
    RULES[_aten.amin.default] = RULES[_aten.amax.default]


@_decompositions("trunc|//")
def trunc_is_decomposed_as_floor() -> None:
    RULES[_aten.trunc.default] = RULES[_aten.floor.default]


@_decompositions("leaky_relu")
def leaky_relu_is_decomposed_without_its_slope() -> None:
    @instead(RULES, _aten.leaky_relu.default)
    def leaky_relu(old: Any, b: Any, x: Any, *slope: Any, **named: Any) -> Any:
        return old(b, x)


@FAULTS("prims/passes", ("mode",), compiled=True)
def calls_with_other_attributes_count_as_common() -> None:
    @instead(graph_passes, "_key")
    def key(old: Any, node: Any) -> Any:
        found = old(node)
        return found and (found[0], found[1], found[3])


# ---- lowerings, kernels and their memory

_lowerings = functools.partial(FAULTS, "inductor/lowerings", ("mode",), compiled=True)


def _lower_as(name: str, **attributes: Callable[[Any], Any]) -> None:
    """Nodes of this primitive are lowered as if they had other attributes."""

    @instead(lowering.RULES, name)
    def lower(old: Any, context: Any, node: Any, operands: Any) -> Any:
        kept = node.kwargs
        node.kwargs = {key: attributes.get(key, lambda value: value)(value) for key, value in kept.items()}
        try:
            return old(context, node, operands)
        finally:
            node.kwargs = kept


@_lowerings(":")
def slices_begin_at_the_first_element() -> None:
    _lower_as("slice", starts=lambda starts: (0,) * len(starts))


@_lowerings(r"cat\(|stack\(")
def operands_of_cat_are_turned() -> None:
    @instead(lowering.RULES, "cat")
    def cat(old: Any, context: Any, node: Any, operands: Any) -> Any:
        return old(context, node, operands[::-1])


@_lowerings(r"prod\(")
def prod_is_lowered_as_sum() -> None:
    reduction.KINDS["prod"] = "sum"


@_lowerings("flip")
def flips_turn_nothing() -> None:
    _lower_as("flip", axes=lambda axes: ())


@FAULTS("inductor", ("mode",), compiled=True)
def memory_is_overwritten_before_it_is_read() -> None:
    _DonationPlanner._add_order = lambda self, reader, writer: None  # type: ignore[method-assign]


@FAULTS("runtime/program", ("mode",), compiled=True)
def dead_memory_is_reused_too_early() -> None:
    @instead(memory_plan, "_choose_donors")
    def choose(old: Any, values: Any, steps: int) -> Any:
        for value in values:
            value.dead = max(value.made, value.dead - 2)  # its reader's result is allocated one step before it
        return old(values, steps)


@FAULTS("autograd", _COMPILED_CALLS, "backward", compiled=True)
def a_value_is_computed_again_from_swapped_operands() -> None:
    @instead(recompute, "rematerialise")
    def rematerialise(old: Any, *args: Any, **named: Any) -> Any:
        graph = old(*args, **named)
        for node in graph.nodes:
            if COPY_OF in node.meta:
                node.args = node.args[::-1]
        return graph
