"""`torchlazy.shadow()`: every cut runs both operator by operator and compiled, and the two are compared.

Invariant: the program continues with the values of tier 0, so a wrong program is found and does no harm. A program is
compared on copies of the inputs that it overwrites; random bits are equal by construction, and a device's own generator
is restored between the two runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.device.mode import recorded_in_python
from torchlazy.lazy.inspect.bisect import Culprit, Cut, copies, locate
from torchlazy.lazy.inspect.compare import Mismatch, compare_all, defined_outputs
from torchlazy.lazy.inspect.dump import checked_folder
from torchlazy.lazy.inspect.repro import write_script
from torchlazy.lazy.plan.loaded import Compiled
from torchlazy.lazy.record.recorder import current
from torchlazy.lazy.run.driver import run_compiled
from torchlazy.lazy.run.interpreter import into_donated, run_entries
from torchlazy.lazy.trace.op_schema import draws_at_run_time
from torchlazy.lazy.trace.trace import CutTrace, format_trace


class ShadowWarning(RuntimeWarning):
    """A compiled program computes something else than its operators do one by one."""


@dataclass(frozen=True)
class ShadowDifference:
    """One cut whose program is wrong.

    `stage` says which part of the compiler: "code generation", "decomposition", "lowering", "graph passes", "memory"
    (plan or donation), "another program" (the one found in the cache is not the one that is compiled now). `kernel` is
    its number in the schedule, or None. `operator` and `frame` are the ATen operator and the user's line; `frames` all
    lines of that kernel. `script` runs by itself and shows the difference.
    """

    cause: str
    cut_frame: str
    stage: str
    kernel: int | None
    operator: str
    frame: str
    frames: tuple[str, ...]
    what: str
    script: Path

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "script": str(self.script)}

    def __str__(self) -> str:
        kernel = "no single kernel" if self.kernel is None else f"kernel {self.kernel}"
        lines = self.frame or ", ".join(self.frames) or "an unknown line"
        operator = f"{self.operator} " if self.operator else ""
        return (
            f"the program of the cut {self.cause!r} at {self.cut_frame or '?'} is wrong in {self.stage}: {kernel}, "
            f"{operator}at {lines}: {self.what}; run {self.script}"
        )


class shadow:
    """Inside the block each cut runs operator by operator and compiled, and the results are compared.

    A value differs where |compiled - expected| > absolute + relative * |expected|, with `torch.testing`'s tolerances:
    1.3e-6 and 1e-5 for float32, 1.6e-2 and 1e-5 for bfloat16, 1e-3 and 1e-5 for float16, 1e-7 and 1e-7 for float64;
    other dtypes must be equal. Then the cut is bisected: a kernel is wrong if it differs by that from the reference
    interpreter on its own inputs, and is more than ten times as far from the values that float64 gives. A difference
    that no step shows by itself is rounding that adds up, counted in `rounded`. A wrong program gives a
    `ShadowWarning`, kept in `differences`, and written to `folder` as a script that runs by itself.

    The program continues with the values of the operator-by-operator run. Everything is compiled in the foreground, and
    each cut needs memory for both runs. Numbers drawn inside kernels are the same in both; memory never written to
    (`torch.empty`) is not compared. Callables of `torchlazy.compile` run their Python inside, so that their cuts are
    compared too. Not re-entrant.
    """

    def __init__(self, folder: str | Path = "torchlazy_shadow") -> None:
        self.folder = checked_folder("shadow", folder)
        self.differences: list[ShadowDifference] = []
        self.cuts = 0  # compared
        self.rounded = 0  # differed by rounding alone
        self._judged: dict[Any, str] = {}

    def __enter__(self) -> shadow:
        recorder = current()
        driver: Any = recorder.driver
        recorder.cut("shadow window opens")
        if driver.shadow is not None:
            raise RuntimeError("torchlazy.shadow() is open already")
        self._kept = recorder.keep_frames, config.tiers, recorder.gate
        recorder.keep_frames, config.tiers = True, "off"
        recorder.gate = recorder.gate or _watch  # callables of torchlazy.compile then run their Python
        driver.real().shadow = self._run
        self._block = recorded_in_python()
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = current()
        driver: Any = recorder.driver
        if driver.shadow != self._run:
            raise RuntimeError("shadow: this block is not open; write `with torchlazy.shadow(folder):`")
        try:
            self._block.__exit__(kind, error, trace)
            recorder.cut("shadow window closes")
        finally:
            driver.real().shadow = None
            recorder.keep_frames, config.tiers, recorder.gate = self._kept

    def _run(
        self,
        compiled: Compiled,
        trace: CutTrace,
        memory: list[torch.Tensor],
        scalars: list[Any],
        cause: str,
        frame: str,
    ) -> list[torch.Tensor | BaseException]:
        """The driver's run of a cut that has a program."""
        self.cuts += 1
        generators = _generator_states(trace)
        actual = run_compiled(compiled, trace, copies(trace, memory), list(scalars))
        _put_back(generators)
        expected = run_entries(replace(trace, donations=()), list(memory), scalars)
        mismatches = compare_all(actual, expected, defined_outputs(trace))
        del actual
        if mismatches:
            self._judge(compiled, trace, memory, scalars, cause, frame, expected, mismatches)
        donated = {output: memory[given] for output, given in trace.donations}
        return into_donated(expected, donated)

    def _judge(
        self,
        compiled: Compiled,
        trace: CutTrace,
        memory: Sequence[torch.Tensor],
        scalars: Sequence[Any],
        cause: str,
        frame: str,
        expected: Sequence[Any],
        mismatches: dict[int, Mismatch],
    ) -> None:
        signature = trace.signature()
        verdict = self._judged.get(signature)
        if verdict is None:
            worst = max(mismatches.values(), key=lambda found: found.distance)
            cut = Cut(trace, tuple(memory), tuple(scalars), tuple(expected), compiled.options, current().driver.cache)  # type: ignore[attr-defined]
            culprit = locate(cut, worst)
            verdict = self._judged[signature] = "rounding" if culprit is None else "wrong"
            if culprit is not None:
                self._report_difference(culprit, cut, cause, frame, worst)
        if verdict == "rounding":
            self.rounded += 1

    def _report_difference(self, culprit: Culprit, cut: Cut, cause: str, frame: str, worst: Mismatch) -> None:
        path = self.folder.resolve() / f"difference_{len(self.differences) + 1:03d}.py"
        found = ShadowDifference(
            cause,
            frame,
            culprit.stage,
            culprit.kernel,
            culprit.operator,
            culprit.frame,
            culprit.frames,
            str(culprit.mismatch),
            path,
        )
        about = "\n".join(
            [
                "Written by torchlazy.shadow(): the same operators, eagerly and compiled, on the inputs beside it.",
                "",
                f"{culprit}",
                f"In the whole cut ({cause} at {frame or '?'}): {worst}",
                "",
                "The operators:",
                format_trace(culprit.part),
                "",
            ]
        )
        if culprit.source:
            about += f"\nThe generated kernel:\n{culprit.source}\n"
        write_script(path, about, culprit.part, culprit.values, cut.scalars, cut.options)
        self.differences.append(found)
        warnings.warn(f"torchlazy: {found}", ShadowWarning, stacklevel=2)


def _generator_states(trace: CutTrace) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The generators that the trace's operators may draw from while they run, and where they stand."""
    if not draws_at_run_time(trace):
        return []
    generators = [torch.default_generator]
    if torch.cuda.is_available():
        generators += list(torch.cuda.default_generators)
    return [(generator, generator.get_state()) for generator in generators]


def _put_back(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _watch(cause: str) -> bool:
    """A gate that lets every cut pass."""
    return False
