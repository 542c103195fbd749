"""The programs of a joint's halves, held by the one who runs it: found once, then run without being looked up.

Invariant: results are those of a cut of the same trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.joint_form import Joint, Source
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.trace import CutTrace


class JointHandles:
    """Those of one joint, and of its deeper orders.

    `sizes_vary`: programs for all sizes serve it, as if `config.dynamic` were on. `same_inputs`: whoever runs it has
    checked that inputs and their memory have the geometry that they had at the first run.
    """

    def __init__(self, sizes_vary: bool = False, same_inputs: bool = False) -> None:
        self.same_inputs = same_inputs
        self.is_whole: list[
            bool
        ] = []  # for each of the forward's inputs: it is all of its memory, as the program wants it
        self.forward = _Handle(sizes_vary)
        self.backward = _Handle(sizes_vary)
        self.sizes_vary = sizes_vary
        self._double: JointHandles | None = None
        self._held: tuple[Source, ...] | None = None

    def held(self, joint: Joint) -> tuple[Source, ...]:
        """What is kept between the halves: all that the backward or the double backward reads but the tangents."""
        if self._held is None:
            sources = (*joint.backward_inputs, *(joint.double.inputs if joint.double is not None else ()))
            self._held = tuple(dict.fromkeys(source for source in sources if source.kind != "tangent"))
        return self._held

    @property
    def double(self) -> JointHandles:
        if self._double is None:
            self._double = JointHandles(self.sizes_vary)
        return self._double


class _Handle:
    """The program of one trace. A setting that programs depend on belongs to the key under which a joint is held."""

    def __init__(self, sizes_vary: bool) -> None:
        self._compiled: Any = None
        self._sizes_vary = sizes_vary

    def run(
        self, recorder: Recorder, trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], cause: str
    ) -> list[torch.Tensor]:
        """The trace's outputs for this memory, which is taken; the first error of one that has none is raised."""
        driver: Any = recorder.driver
        was_busy, recorder.busy = recorder.busy, True
        try:
            if self._compiled is not None and not driver.listeners and driver.shadow is None and not config.debug:
                values = driver.run_compiled(self._compiled, trace, memory, scalars)
            else:
                kept, driver.tiers.sizes_vary = driver.tiers.sizes_vary, self._sizes_vary
                try:
                    values = driver(trace, memory, scalars, cause, "")
                finally:
                    driver.tiers.sizes_vary = kept
                self._compiled = driver.last_compiled
        finally:
            recorder.busy = was_busy
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return values  # type: ignore[no-any-return]
