"""Faults of compiled calls: guards that are not compared, effects that are lost, gradients that are dropped.

Invariant: a fault changes functions of the product in the process that plants it, and nothing of the fuzzer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torchlazy.lazy.compiled import variants
from torchlazy.lazy.compiled.capture import call as capture_call
from torchlazy.lazy.compiled.capture import state as capture_state
from torchlazy.lazy.compiled.capture.results import SetGrad
from torchlazy.lazy.compiled.capture.tensor_effects import Marks, SetFlag
from torchlazy.lazy.compiled.guards.guards import Guards
from torchlazy.lazy.compiled.guards.reached import GuardedPlace, Reached, getter
from torchlazy.lazy.compiled.replay import results as replay_results
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.replay.results import Ending
from torchlazy.lazy.compiled.replay.state import ReplayState
from torchlazy.lazy.compiled.template import argument_facts
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.views import ArgumentView
from torchlazy.lazy.joint import function as joint_function
from torchlazy.runtime.native.identity_check import IdentityCheck

from tests.fuzz.planted import Faults, instead

FAULTS = Faults()
_COMPILED_CALLS = ("compile",)


# ---- guards

_guards = functools.partial(FAULTS, "lazy/compiled/guards", _COMPILED_CALLS)


def _guard_other(change: Callable[[Reached], Reached]) -> None:
    @instead(Guards, "__init__")
    def begin(old: Any, self: Guards, reached: Reached, *rest: Any, **named: Any) -> None:
        old(self, change(reached), *rest, **named)


def _leave_out(is_left_out: Callable[[str, Any], bool]) -> None:
    """Entries of dicts, attributes of objects among them, are not guarded by this name with this value."""

    def without(place: GuardedPlace) -> GuardedPlace | None:
        if not place.keys:
            return place
        rows = zip(place.names, place.keys, place.values(), strict=True)
        kept = [(name, key) for name, key, value in rows if not is_left_out(name, value)]
        keys = [key for _, key in kept]
        names = tuple(name for name, _ in kept)
        return replace(place, names=names, keys=tuple(keys), live=None, read=getter(place.of, keys)) if kept else None

    _guard_other(lambda r: replace(r, places=[kept for place in r.places if (kept := without(place)) is not None]))


@_guards(r"\.(eval|train)\(\)")
def training_flags_are_not_guarded() -> None:
    _leave_out(lambda name, value: name.endswith(".training"))


@_guards(r"S\.(flag|name) = ")
def flags_and_texts_of_objects_are_not_guarded() -> None:
    _leave_out(lambda name, value: type(value) in (bool, str) and not name.endswith(".training"))


@_guards(r"S\.(k|n|extra|block\.factor|box\.k) [+*]?= ")
def numbers_of_objects_are_captured_as_constants() -> None:
    _leave_out(lambda name, value: type(value) in (int, float))


@_guards(r"S\.(a|b|window) = |S\.a, S\.b = ")
def tensors_that_attributes_hold_are_not_guarded() -> None:
    _leave_out(lambda name, value: isinstance(value, torch.Tensor))


@_guards(r"S\.l\b(\[.*\] = |\.append|\.insert|\.reverse| = )")
def what_lists_hold_is_not_guarded() -> None:
    _guard_other(lambda r: replace(r, places=[place for place in r.places if type(place.owner) is not list]))


@_guards(r"\.(weight|bias|inner) = ")
def parameters_and_buffers_are_not_guarded() -> None:
    _guard_other(lambda r: replace(r, views=[]))


@_guards(r"S\.(m|block)\.register")
def new_hooks_are_not_guarded() -> None:
    _guard_other(lambda r: replace(r, empty_hooks=[]))


@_guards(r"\.grad = |zero_grad")
def gradients_of_the_state_are_not_guarded() -> None:
    @instead(Guards, "__init__")
    def begin(old: Any, self: Guards, *rest: Any, **named: Any) -> None:
        old(self, *rest, **named)
        self.ignore_gradients()


# ---- guards in C


@FAULTS("runtime/native", _COMPILED_CALLS, r"\.data = |resize_")
def geometry_of_the_state_is_not_compared_natively() -> None:
    IdentityCheck.geometry = lambda self, tensor: None  # type: ignore[method-assign]


@FAULTS("runtime/native", _COMPILED_CALLS, "requires_grad_")
def requires_grad_of_the_state_is_not_compared_natively() -> None:
    IdentityCheck.gradient = lambda self, tensor, *, present=False: None  # type: ignore[method-assign]


@FAULTS("runtime/native", _COMPILED_CALLS, r"S\.\w+ [+*]?= ")
def entries_of_dicts_are_not_compared_natively() -> None:
    IdentityCheck.entries = lambda self, container, values: None  # type: ignore[method-assign]


# ---- arguments of compiled calls

_arguments = functools.partial(FAULTS, "lazy/compiled/template", _COMPILED_CALLS)
_PLAIN_FACTS = 10  # of an ordinary tensor's facts at least


def _tell_less(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Facts of the arguments are changed before they are compared."""

    @instead(argument_facts, "_facts_of")
    def facts_of(old: Any, leaves: Any, free: Any) -> Any:
        found = old(leaves, free)
        return found if isinstance(found, str) else [change(f) if type(f) is tuple else f for f in found]


@_arguments("at times turned|state")
def strides_of_arguments_are_not_compared() -> None:
    _tell_less(lambda facts: (*facts[:2], (), 0, *facts[4:]) if len(facts) > _PLAIN_FACTS else facts)


@_arguments("at times same")
def which_arguments_share_memory_is_not_compared() -> None:
    _tell_less(lambda facts: (*facts[:7], 0, 0, *facts[9:]) if len(facts) > _PLAIN_FACTS else facts)


@_arguments("at times state")
def which_arguments_are_state_is_not_compared() -> None:
    for user in (variants, capture_call):
        user.aliases_in = lambda given, memories: (None,) * len(given)  # type: ignore[attr-defined]


@_arguments("at times frozen")
def requires_grad_of_arguments_is_not_compared() -> None:
    argument_facts._graph_facts = lambda tensor: (False,)


@_arguments("k[02]")
def float_arguments_are_captured_as_constants() -> None:
    _tell_less(lambda facts: facts[:1] if facts[0] is float else facts)


@_arguments("k2")
def equal_arguments_of_other_types_count_as_the_same() -> None:
    _tell_less(lambda facts: facts[1:] if facts[0] in (int, bool) else facts)


@_arguments("'hooked'")
def hooks_of_arguments_are_missed() -> None:
    argument_facts._has_hooks = lambda tensor: False


# ---- what captured calls do

_effects = functools.partial(FAULTS, "lazy/compiled/replay", _COMPILED_CALLS)


def _lose_effects(is_lost: Callable[[t.Effect], bool]) -> None:
    @instead(Ending, "__init__")
    def begin(old: Any, self: Ending, template: t.CallTemplate) -> None:
        old(self, replace(template, effects=tuple(effect for effect in template.effects if not is_lost(effect))))


@_effects(r"bool\(|item\(|int\(\(|\.max\(\) >")
def branches_on_values_are_not_checked() -> None:
    @instead(Replay, "__init__")
    def begin(old: Any, self: Replay, recorder: Any, template: t.CallTemplate, *rest: Any, **named: Any) -> None:
        old(self, recorder, replace(template, checks=()), *rest, **named)


@_effects(r"backward\(")
def gradients_that_a_call_leaves_are_dropped() -> None:
    _lose_effects(lambda effect: isinstance(effect.store, SetGrad))


@_effects()
def tensors_that_a_call_leaves_in_its_state_are_dropped() -> None:
    _lose_effects(
        lambda effect: not isinstance(effect.store, SetGrad) and any(type(r) is t.TensorResult for r in effect.results)
    )


@_effects(r"S\.\w+ [+*]?= ")
def numbers_that_a_call_counts_are_dropped() -> None:
    _lose_effects(lambda effect: any(type(result) is t.NumberResult for result in effect.results))


@_effects("requires_grad_")
def requires_grad_that_a_call_sets_is_dropped() -> None:
    _lose_effects(lambda effect: isinstance(effect.store, SetFlag))


@_effects()
def versions_of_written_tensors_are_not_raised() -> None:
    Replay._raise_versions = lambda self, state: None  # type: ignore[method-assign]


def _lose_writes(kinds: tuple[type, ...]) -> None:
    @instead(ReplayState, "put")
    def put(old: Any, self: ReplayState, target: Any, *rest: Any) -> None:
        if not isinstance(target, kinds):
            old(self, target, *rest)


@_effects(r"_\(|\] [-+*]?= ")
def writes_to_arguments_are_dropped() -> None:
    _lose_writes((t.FromArgument,))


@_effects(r"_\(|\] [-+*]?= ")
def writes_to_buffers_are_dropped() -> None:
    _lose_writes((t.FromState,))


@_effects("rand|dropout|normal_|uniform_|bernoulli|multinomial|exponential_")
def random_draws_leave_the_generator_where_it_was() -> None:
    @instead(ReplayState, "run_operator")
    def run(old: Any, self: ReplayState, step: t.LazyCall) -> None:
        before = torch.get_rng_state()
        old(self, step)
        torch.set_rng_state(before)


@_effects()
def results_do_not_share_memory() -> None:
    @instead(replay_results, "view_over")
    def view_over(old: Any, *args: Any) -> torch.Tensor:
        view = old(*args)
        return view.new_empty_strided(view.shape, view.stride()).copy_(view)  # type: ignore[no-any-return]


@_effects()
def a_tensor_that_is_returned_twice_becomes_two() -> None:
    @instead(replay_results, "_tensor")
    def tensor(old: Any, result: Any, state: ReplayState) -> torch.Tensor:
        state.made.pop(result.number, None)
        return old(result, state)  # type: ignore[no-any-return]


@FAULTS("lazy/compiled/template", _COMPILED_CALLS, "'(rows|columns|moved|every other|one wide|of the last)'")
def writes_to_windows_on_larger_memory_are_dropped() -> None:
    ArgumentView.take_over_writes = lambda self, windows: False  # type: ignore[method-assign]


@FAULTS("lazy/compiled/capture", _COMPILED_CALLS, "register_hook")
def hooks_that_a_call_puts_on_arguments_are_missed() -> None:
    Marks.refuse_changed = lambda self, refuse: None  # type: ignore[method-assign]


@FAULTS("lazy/compiled/capture", _COMPILED_CALLS, r"rotate|popleft|reverse|pop\(0\)")
def containers_that_a_call_turns_count_as_unchanged() -> None:
    @instead(capture_state.StateBefore, "changes")
    def changes(old: Any, self: Any, after: Any, refuse: Any, *rest: Any) -> Any:
        others = lambda reason: None if ".q" in reason else refuse(reason)  # noqa: E731
        return [change for change in old(self, after, others, *rest) if ".q" not in change.name]


# ---- gradients of compiled calls


@FAULTS("lazy/joint", _COMPILED_CALLS, "backward")
def one_gradient_of_a_compiled_call_is_dropped() -> None:
    @instead(joint_function, "_backward")
    def backward(old: Any, *args: Any) -> Any:
        found = list(old(*args))
        there = [position for position, gradient in enumerate(found) if gradient is not None]
        if len(there) > 1:
            found[there[-1]] = None
        return found
