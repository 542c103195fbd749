"""Gradients of an order that was not recorded: the function runs once more, under autograd.

A joint knows the gradients of as many orders as it was recorded with. The first time that a higher order is requested,
torch's own engine computes it here over the function itself; the owner of the joint then records one order more.

Invariant: the function's inputs, and the tangents of each order, are variables of their own: inside, no gradient flows
from one of them into what it was computed from. Each result is differentiable in turn, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.plan.joint import Joint
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo

Maybe = torch.Tensor | None
Function = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From stand-ins of the wanted inputs to the results that have a tangent, in the joint's order."""


def derived_again(
    function: Function, joint: Joint, wanted: Sequence[torch.Tensor], levels: Sequence[Sequence[Maybe]]
) -> list[Maybe]:
    """The gradients of order `len(levels)`, differentiable, as the joint of that order counts them.

    `wanted`: the real inputs, in the joint's order. `levels`: the tangents of each order, the first ones those of the
    function's results, the next those of the first gradients, as the joints count them. The joints of all these orders
    but the deeper ones are recorded.
    """
    place = list(range(len(wanted)))  # of each wanted input of the joint among the variables here
    variables: list[Maybe] = list(wanted)
    tangents: list[list[Maybe]] = []
    width = 0  # how many gradients the last order has here
    for order, level in enumerate(levels):
        start = len(variables)
        if order == 0:
            tangents.append(list(level))
            place += range(start, start + len(level))
        else:
            outer, double = joint, joint.double
            assert double is not None
            joint = double.joint
            aligned: list[Maybe] = [None] * width
            for result in joint.results:
                if result.tangent is not None:
                    at = place[outer.gradients.index(result.position)]
                    aligned[at] = level[result.tangent]
                    place.append(start + at)
            tangents.append(aligned)
        width = start
        variables += tangents[-1]
    found = _derive(function, [len(wanted), *map(len, tangents)], variables)
    count = 1 + max((at for at in joint.gradients if at is not None), default=-1)
    gradients: list[Maybe] = [None] * count
    for target, number in enumerate(joint.gradients):
        if number is not None:
            gradients[number] = found[place[target]]
    return gradients


def _derive(function: Function, counts: Sequence[int], variables: Sequence[Maybe]) -> list[Maybe]:
    """The gradients by all variables but the last order's tangents: `counts` says how many are the inputs, and how many
    each order's tangents."""
    return list(_Derived.apply(function, tuple(counts), *variables))


class _Derived(torch.autograd.Function):
    """Gradients of one order as a function of the inputs and of all tangents up to it."""

    @staticmethod
    def forward(ctx: Any, function: Function, counts: tuple[int, ...], *variables: Maybe) -> tuple[Maybe, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*variables)
        ctx.function, ctx.counts = function, counts
        own = [None if v is None else v.detach().requires_grad_(v.requires_grad) for v in variables]
        with torch.enable_grad():
            targets: list[Maybe] = own[: counts[0]]
            sources: Sequence[Maybe] = function([t for t in targets if t is not None])
            for count in counts[1:]:
                tangents = own[len(targets) : len(targets) + count]
                sources = _gradients(sources, tangents, targets)
                targets = [*targets, *tangents]
        found = tuple(None if s is None else s.detach() for s in sources)
        ctx.mark_non_differentiable(
            *(f for f, s in zip(found, sources, strict=True) if f is not None and s is not None and not s.requires_grad)
        )
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Maybe) -> tuple[Maybe, ...]:
        counts = (*ctx.counts, len(gradients))
        return (None, None, *_derive(ctx.function, counts, (*ctx.saved_tensors, *gradients)))


def _gradients(sources: Sequence[Maybe], tangents: Sequence[Maybe], targets: Sequence[Maybe]) -> list[Maybe]:
    """By each of `targets`; None where no gradient flows."""
    pairs = [(s, g) for s, g in zip(sources, tangents, strict=True) if s is not None and g is not None]
    pairs = [(s, g) for s, g in pairs if s.requires_grad]
    by = [n for n, t in enumerate(targets) if t is not None and t.requires_grad]
    gradients: list[Maybe] = [None] * len(targets)
    if pairs and by:
        inputs: Any = [targets[n] for n in by]
        found = torch.autograd.grad(
            [s for s, _ in pairs], inputs, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
        for n, gradient in zip(by, found, strict=True):
            gradients[n] = gradient
    return gradients


exclude_from_dynamo(_Derived.forward, _Derived.backward)
