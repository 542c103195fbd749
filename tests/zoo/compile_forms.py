"""The forms in which a case of the zoo runs: as it is, its whole training step compiled, or its model compiled.

Invariant: a form gives the same numbers with `compiled` and without, and says what became of its compiled calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torchlazy
from torch import nn

from tests.zoo.case import Batch, Case, Optimizers

# The first call makes the optimizer's state, the second is captured; the first, second and fourth replay are audited.
STEPS = {"plain": 3, "step": 8, "module": 6, "graphs": 8}


@dataclass
class Form:
    """One training of a case: `step(batch)` gives the loss of a training step, `outside(batches)` losses of inference.

    `callables` are the compiled callables by name, whose reports say how often they were replayed.
    """

    step: Callable[[Batch], torch.Tensor]
    outside: Callable[[list[Batch]], list[torch.Tensor]]
    callables: dict[str, Any] = field(default_factory=dict)

    def reports(self) -> dict[str, dict[str, Any]]:
        """What became of the calls of each compiled callable, as plain data."""
        found = {name: made.report() for name, made in self.callables.items()}
        return {
            name: {
                "captures": report.captures, "replays": report.replays, "verified": report.verified,
                "audits": report.audits, "reasons": list(report.reasons), "alarm": report.alarm,
            }
            for name, report in found.items()
        }  # fmt: skip


def prepare(name: str, case: Case, model: nn.Module, optimizers: Optimizers, compiled: bool) -> Form:
    """The form called `name` of a case: "plain", "step", "module", or "graphs", a step with mode="reduce-overhead"."""
    if name == "module":
        return _module(case, model, optimizers, compiled)
    step = lambda batch: case.train_step(model, batch, optimizers)  # noqa: E731
    if name == "plain" or not compiled:
        return Form(step, lambda batches: [])
    made = torchlazy.compile(step, mode="reduce-overhead" if name == "graphs" else "default")
    return Form(made, lambda batches: [], {"step": made})


def _module(case: Case, model: nn.Module, optimizers: Optimizers, compiled: bool) -> Form:
    callables: dict[str, Any] = {}
    if compiled and type(model).forward is not nn.Module.forward:
        model = callables["model"] = torchlazy.compile(model)
    elif compiled:  # a holder of models, each called by itself
        for name, child in list(model.named_children()):
            callables[name] = torchlazy.compile(child)
            setattr(model, name, callables[name])

    def outside(batches: list[Batch]) -> list[torch.Tensor]:
        model.eval()
        with torch.set_grad_enabled(case.loss_needs_grad):
            return [case.loss(model, batch).detach() for batch in batches]

    return Form(lambda batch: case.train_step(model, batch, optimizers), outside, callables)
