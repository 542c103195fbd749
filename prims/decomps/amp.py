"""The two operators of a gradient scaler, as values: unscaling with a check, and the next scale.

Invariant: `found_inf` and the growth tracker stay tensors, so that a step with a scaler needs no value on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import Number, compute, value


@rule("_amp_foreach_non_finite_check_and_unscale.default")
def unscale(b: Builder, grads: Sequence[Node], found_inf: Node, inv_scale: Node) -> tuple[tuple[Node, ...], Node]:
    """(grad * inv_scale for each, 1 where any element of any is infinite or NaN, else found_inf as it was)"""
    found = value(b, found_inf)
    scaled = []
    for grad in grads:
        g = compute(b, grad)
        device = g.meta.device
        infinite = (abs(g).lt(math.inf)).eq(False).any(range(g.rank))  # a NaN is not less than anything
        flag = value(b, b.to_device(infinite.node, found.meta.device))
        found = flag.where(1.0, found)
        factor = value(b, b.to_device(inv_scale, device)).reshape(()).to(g.dtype)
        scaled.append((g * factor).to(b.dtype(grad)).node)
    return tuple(scaled), found.node


@rule("_amp_update_scale.default")
def update_scale(
    b: Builder,
    scale: Node,
    growth_tracker: Node,
    found_inf: Node,
    scale_growth_factor: Number,
    scale_backoff_factor: Number,
    growth_interval: Number,
) -> tuple[Node, Node]:
    """Backed off after an infinity; grown (unless that overflows) after `growth_interval` steps without one."""
    old, tracker, found = value(b, scale), value(b, growth_tracker), value(b, found_inf)
    infinite = found.ne(0.0).reshape(old.shape)
    steps = tracker + 1
    due = steps.eq(growth_interval)
    grown = old * scale_growth_factor
    kept = due.reshape(old.shape).both(abs(grown).lt(math.inf)).where(grown, old)
    new_scale = infinite.where(old * scale_backoff_factor, kept)
    restarts = due.either(infinite.reshape(steps.shape))
    return new_scale.node, restarts.where(0, steps).node
