"""Gradients with `create_graph=True` of a replayed call that was captured without: the call's function runs once more.

Invariant: only what certainly gives the same runs again: a call that did nothing but compute results, of arguments and
parameters that have not been written to since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.arguments import Structure, rebuild
from torchlazy.lazy.compiled.template.custom_ops import changes_state
from torchlazy.lazy.compiled.template.objects import flatten_open
from torchlazy.lazy.trace.op_schema import is_random

Maybe = torch.Tensor | None
_PLAIN = (torch.Tensor, int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_version = attrgetter("_version")


@dataclass(frozen=True, eq=False)
class CalledAgain:
    """One replayed call, to be run once more. It holds the arguments as long as the results' graph lives."""

    function: Callable[..., Any]
    template: t.CallTemplate
    structure: Structure
    leaves: tuple[Any, ...]
    wanted: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    def gradients(self, tangents: Sequence[Maybe]) -> list[Maybe] | None:
        """The gradients, differentiable, as the joint counts them; None where something was written to since."""
        if _versions(self.wanted, self.leaves) != self.versions:
            return None
        args, kwargs = rebuild(self.structure, self.leaves)
        with torch.enable_grad():
            flat, _ = flatten_open(self.function(*args, **kwargs))
        joint = _joint_of(self.template).joint
        places = {r.index: at for at, r in enumerate(self.template.results) if type(r) is t.JointResult}
        results = [flat[places[i]] for i, r in enumerate(joint.results) if r.tangent is not None and i in places]
        if len(results) != len(tangents):
            return None
        pairs = [(r, g) for r, g in zip(results, tangents, strict=True) if g is not None and r.requires_grad]
        targets = [(w, at) for w, at in zip(self.wanted, joint.gradients, strict=True) if at is not None]
        found = torch.autograd.grad(
            [r for r, _ in pairs], [w for w, _ in targets], [g for _, g in pairs], create_graph=True, allow_unused=True
        )
        gradients: list[Maybe] = [None] * (1 + max((at for _, at in targets), default=-1))
        for (_, at), gradient in zip(targets, found, strict=True):
            gradients[at] = gradient
        return gradients


def called_again(
    function: Callable[..., Any],
    template: t.CallTemplate,
    structure: Structure,
    leaves: Sequence[Any],
    wanted: Sequence[torch.Tensor],
    versions: tuple[int, ...] | None = None,
) -> CalledAgain:
    """The call that is being replayed, with these arguments and inputs of its joint; `versions`: those that the inputs
    and the tensors among the arguments had, where it was replayed before."""
    then = _versions(wanted, leaves) if versions is None else versions
    return CalledAgain(function, template, structure, tuple(leaves), tuple(wanted), then)


def can_be_called_again(template: t.CallTemplate) -> bool:
    """Whether the call did nothing but compute results: it wrote nothing, drew no numbers and left no state."""
    if template.effects or template.versions or template.free or not template.steps:
        return False
    if not isinstance(template.steps[-1], t.JointRun) or template.steps[-1].joint.double is not None:
        return False
    for step in template.steps:
        if isinstance(step, t.HostCall) and (step.written or is_random(step.op)):
            return False
        if isinstance(step, t.Segment) and not all(isinstance(target, t.FromStep) for target in step.targets):
            return False
        if isinstance(step, t.LazyCall) and (changes_state(step) or step.drawn_from):
            return False
        if isinstance(step, (t.Seed, t.KeepState, t.Rewind, t.Collective)):
            return False
    joint = _joint_of(template).joint
    return not joint.writes and not joint.backward_writes


def has_only_plain_leaves(leaves: Sequence[Any]) -> bool:
    """Whether the arguments are tensors and plain values: nothing among them comes to hold the results."""
    return all(isinstance(leaf, _PLAIN) for leaf in leaves)


def _joint_of(template: t.CallTemplate) -> t.JointRun:
    step = template.steps[-1]
    assert isinstance(step, t.JointRun)
    return step


def _versions(wanted: Sequence[torch.Tensor], leaves: Sequence[Any]) -> tuple[int, ...]:
    found = [*map(_version, wanted)]
    return tuple(found + [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)])
