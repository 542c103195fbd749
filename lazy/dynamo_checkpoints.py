"""Checkpoint regions in graphs of torch's capture: the same random numbers when they are computed again.

torch's capture makes one call of a higher-order operator of a region, and leaves it to the back end that dropout draws
the same mask in the forward and in the computation for the backward. Run as it is, that call draws anew.

Invariant: what a region computes again is what it computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

_SETTINGS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def own_checkpoints(module: fx.GraphModule) -> bool:
    """Make the regions of the module's graphs calls of `torch.utils.checkpoint`; whether there are any."""
    region = getattr(torch.ops.higher_order, "tag_activation_checkpoint", None)
    found = False
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        calls = [node for node in part.graph.nodes if node.op == "call_function" and node.target is region]
        for call in calls:
            call.target = _region
        if calls:
            part.recompile()
            found = True
    return found


def _region(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """`body(*args)`, computed again for the backward, under the settings that the program gave its checkpoint."""
    settings = {name: kwargs.pop(name) for name in _SETTINGS if name in kwargs}
    settings["use_reentrant"] = False
    if "_checkpoint_context_fn" in body.meta:  # which operators' results are kept is the program's own choice
        settings["context_fn"] = body.meta["_checkpoint_context_fn"]
    errors: list[Exception] = []
    forward = True

    def run(*given: Any, **named: Any) -> Any:
        """The body. torch 2.11 leaves the region's hooks open where its forward raises, as a recording may that gives
        way to an eager run: the error comes after the region."""
        try:
            return body(*given, **named)
        except Exception as error:
            if not forward:
                raise
            errors.append(error)
            return None

    result = checkpoint(run, *args, **settings, **kwargs)
    forward = False
    if errors:
        raise errors[0]
    return result
