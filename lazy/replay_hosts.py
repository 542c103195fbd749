"""Ordinary tensors in a replay: the arguments of operators on them, and their values before, should it fail.

Invariant: what is remembered is what host steps write and what was there before the call; what they make is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy import call_template as t
from torchlazy.lazy.capture_scalars import evaluator
from torchlazy.lazy.op_plan import is_random
from torchlazy.lazy.torch_private import below_autograd

BEGINNING = -1  # the phase before the first program


@dataclass(frozen=True, eq=False)
class Hosts:
    """Host tensors to remember: groups of equal ones that are there, and those that are found at each call."""

    kept: tuple[Sequence[torch.Tensor], ...]
    passed: tuple[t.Host, ...]


def hosts(hosts: Sequence[t.Host], twins: Mapping[int, Sequence[torch.Tensor]]) -> Hosts:
    """The tensors of `hosts`, those together that hold one value: other twins of theirs are not meant."""
    kept = {id(host.tensor): host.tensor for host in hosts if isinstance(host, t.HostKept)}
    groups: list[Sequence[torch.Tensor]] = []
    grouped: set[int] = set()
    for number, tensor in kept.items():
        if number not in grouped:
            group = [twin for twin in twins.get(number, (tensor,)) if id(twin) in kept]
            grouped.update(map(id, group))
            groups.append(group)
    return Hosts(tuple(groups), tuple(host for host in hosts if not isinstance(host, t.HostKept)))


class HostArguments:
    """The arguments of a host call: what is the same at each call is made once."""

    def __init__(self, step: t.HostCall) -> None:
        self._args = [_getter(value) for value in step.args]
        self._kwargs = [(name, _getter(value)) for name, value in step.kwargs]

    def of(self, state: Any) -> tuple[list[Any], dict[str, Any]]:
        return [get(state) for get in self._args], {name: get(state) for name, get in self._kwargs}


def _getter(value: Any) -> Callable[[Any], Any]:
    """How an argument of a host call is found in a run."""
    kind = type(value)
    if kind in (t.HostArgument, t.HostMade):
        return lambda state: state.host(value)
    if kind is t.HostKept:
        return lambda state: value.tensor
    if kind is tuple:
        if all(type(item) is t.HostKept for item in value):
            tensors = [item.tensor for item in value]
            return lambda state: tensors
        parts = [_getter(item) for item in value]
        return lambda state: [part(state) for part in parts]
    if kind is t.HostNumber:
        number = evaluator([value.expression])
        return lambda state: number(state.sources)[0]
    return lambda state: value


def generators_of(step: t.Step) -> tuple[torch.Generator | None, ...]:
    """Those that the step draws from."""
    if isinstance(step, t.LazyCall):
        return step.drawn_from
    if isinstance(step, t.Seed):
        return (step.generator,)
    return (generator_in(step.kwargs),) if isinstance(step, t.HostCall) and is_random(step.op) else ()


def generator_in(kwargs: Sequence[tuple[str, Any]]) -> torch.Generator | None:
    """The generator that an operator on ordinary tensors draws from."""
    found: torch.Generator | None = dict(kwargs).get("generator")
    return found


def written(steps: Sequence[t.Step]) -> list[t.Host]:
    """The host tensors that the steps write and that were there before the call."""
    found: dict[Any, t.Host] = {}
    for step in steps:
        if isinstance(step, t.HostCall):
            for host in step.written:
                if isinstance(host, t.HostKept) and not host.constant:
                    found[id(host.tensor)] = host
                elif isinstance(host, t.HostArgument):
                    found[host] = host
    return list(found.values())


def phases(steps: Sequence[t.Step], but: Collection[int] = ()) -> dict[int, list[t.Host]]:
    """What host steps write until the next program: from the beginning, and after each program, by its number. `but`:
    steps to leave out, by identity."""
    starts = [i for i, step in enumerate(steps) if isinstance(step, t.Segment)]
    ends = [*starts, len(steps)]

    def within(start: int, end: int) -> list[t.Host]:
        return written([step for step in steps[start:end] if id(step) not in but])

    return {BEGINNING: within(0, ends[0])} | {
        start: within(start + 1, end) for start, end in zip(starts, ends[1:], strict=True)
    }


def restore(values: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> None:
    with below_autograd():
        for tensors, value in values:
            for tensor in tensors:
                tensor.copy_(value)
