"""Which program serves a trace that the native recorder has learned: what the C++ asks when a known trace comes again.

Invariant: what is asked here never raises into the user's program: a trace that cannot be learned or compiled has a
reason instead of a plan, is counted, and runs operator by operator. It never waits for the recorder's lock, whose
holder may wait for the native recorder's: where another thread has it, the answer is "not yet".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchlazy.lazy.config import config
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.native.graphs import RunsInPython
from torchlazy.lazy.native.learn import LearnedTrace, Unlearnable, learn
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.report import account, metrics
from torchlazy.lazy.run.dynamic_program import native_of
from torchlazy.lazy.torch_private.dispatch import above_dispatch
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.trace import CutTrace, compute_device

if TYPE_CHECKING:
    from torchlazy.lazy.native.sizes import KnownSizes
    from torchlazy.lazy.run.programs import KnownTrace

_sizes = DeferredModule("torchlazy.lazy.native.sizes")


class KnownLog:
    """A log that came twice: the memory that was wanted after it, and the trace for that."""

    def __init__(self, log: dict[str, Any], frame: str) -> None:
        self.log, self.frame = log, frame
        self.wanted: set[int] = set()
        self.learned: LearnedTrace | None = None
        self.has_begun = False
        self.shares_scalars = True  # equal numbers at one argument of one operator are one input of the program

    def want(self, wanted: Sequence[int], are_equal: bool) -> None:
        """See `Programs.want`."""
        self.wanted.update(wanted)
        if not are_equal:
            self.shares_scalars, self.learned = False, None


class Programs:
    """The hooks of the C++: `cut`, `given_up`, `rest`, `learn`, `plan`, `sizes`, `plan_sizes` and `want`."""

    def __init__(self, recorder: Recorder, driver: Any, library: Any) -> None:
        self.recorder, self.driver, self.library = recorder, driver, library

    def cut(self, cause: str, operators: int) -> None:
        """A trace of so many operators ends here; `cause` is "name: reason" where an operator runs at once."""
        counts, place = account.cuts_at, (cause, user_frames.user_place())
        counts[place] = counts.get(place, 0) + 1
        metrics.cuts[cause] += 1
        metrics.traces += 1
        metrics.ops += operators
        name, is_operator, reason = cause.partition(": ")
        if is_operator:
            self.recorder.on_eager(f"aten.{name}", reason)

    def given_up(self, reason: str) -> None:
        """A known trace is not followed any more: its operators run at once."""
        metrics.fallbacks[
            f"native recorder: {reason}: they run at once (in the trace cut at {user_frames.user_frame()})"
        ] += 1

    def rest(self) -> None:
        """Traces hardly ever come again: operators run unrecorded for a while."""
        metrics.fallbacks["native recorder: its traces do not come again: operators run unrecorded for a while"] += 1

    def _asked(self, ask: Callable[..., Any], *args: Any) -> Any:
        """What `ask` answers, or the error as a reason; None where another thread has the recorder."""
        if not self.recorder.lock.acquire(blocking=False):
            return None
        try:
            with above_dispatch():
                return ask(*args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            metrics.fallbacks[f"native recorder: {reason[:200]}"] += 1
            return reason
        finally:
            self.recorder.lock.release()

    def learn(self, log: dict[str, Any], wanted: Sequence[int]) -> KnownLog | str | None:
        """The log of a trace that came again; the reason why not, for one that cannot be learned."""
        known = KnownLog(log, user_frames.user_frame())
        known.wanted.update(wanted)
        return self._asked(lambda: self._learn(known) or known)  # type: ignore[no-any-return]

    def _learn(self, known: KnownLog) -> str:
        try:
            known.learned = learn(self.recorder, known.log, sorted(known.wanted), known.shares_scalars)
            known.has_begun = False
        except Unlearnable as why:
            if why.op is not None:
                self.library.run_at_once(*why.op, str(why)[:200])
            reason = f"{why.op[0] if why.op else 'trace'}: {why}"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            return ""
        known.learned = None
        metrics.fallbacks[f"native recorder: {reason[:200]}"] += 1
        return reason

    def sizes(self, known: KnownSizes | None, sample: Any, wanted: Sequence[int]) -> KnownSizes:
        """What is known of traces that differ in sizes only, with one more of them."""
        known = known or _sizes.KnownSizes()
        known.add(sample, wanted)
        return known

    def plan_sizes(self, known: KnownSizes, wanted: Sequence[int]) -> tuple[Any, ...] | str | None:
        """As `plan`, of a program for all sizes; a piece of the work at each call."""
        if config.dynamic != "on":
            return "config.dynamic is off"
        frame = user_frames.user_frame()

        def look_up(trace: Any) -> Any:
            return self.driver.tiers.look_up(trace, compute_device(trace), frame)[0]

        found = self._asked(known.plan, wanted, partial(learn, self.recorder), self.driver, look_up)
        if isinstance(found, str):
            metrics.not_generalised[f"native recorder: {found[:200]} (in the trace cut at {frame})"] += 1
        return found

    def want(self, known: KnownLog | KnownSizes, wanted: Sequence[int], are_equal: bool) -> None:
        """The program is to give these, too; where numbers that were equal are not, each is an input of its own."""
        known.want(wanted, are_equal)

    def plan(self, known: KnownLog, wanted: Sequence[int]) -> tuple[Any, ...] | str | None:
        """The program with its places in the log, once it is there; None before; a reason where there will be none."""
        return self._asked(self._plan, known, wanted)  # type: ignore[no-any-return]

    def _plan(self, known: KnownLog, wanted: Sequence[int]) -> tuple[Any, ...] | str | None:
        known.wanted.update(wanted)
        learned = known.learned
        if learned is None or not known.wanted.issubset(learned.outputs + learned.unchanged):
            reason = self._learn(known)
            if reason:
                return reason
            learned = known.learned
        assert learned is not None
        trace = learned.trace
        device = compute_device(trace)
        found = self._begun(known, trace, device)
        if device.startswith("cuda") and config.cuda_graphs != "off":  # the form for its graph is made at the same time
            self._begun(known, trace, device, "memory")
        known.has_begun = True
        if found.compiled is None:
            return found.failure or None
        for fallback in found.compiled.fallbacks:
            account.externs[fallback.op, fallback.reason, fallback.frame, fallback.by_choice] += 1
        inputs = [
            (number, geom.dtype, geom.offset, list(geom.shape), list(geom.strides))
            for number, (_, geom) in zip(learned.inputs, trace.inputs, strict=True)
        ]
        return (
            RunsInPython(self.driver, found.compiled, trace, known.frame),
            inputs,
            list(learned.scalars),
            list(learned.equal),
            list(learned.fixed),
            list(learned.outputs),
            list(learned.unchanged),
            None if device != "cpu" else native_of(found.compiled.run),  # on a GPU it becomes a CUDA graph
        )

    def _begun(self, known: KnownLog, trace: CutTrace, device: str, *form: Any) -> KnownTrace:
        """What is known of the trace, whose program is being compiled from here on."""
        found, _ = self.driver.tiers.look_up(trace, device, known.frame, *form)
        if found.compiled is None and not known.has_begun and found.seen == 1:  # the trace came twice already
            found, _ = self.driver.tiers.look_up(trace, device, known.frame, *form)
        return found  # type: ignore[no-any-return]


exclude_from_dynamo(
    Programs.cut,
    Programs.given_up,
    Programs.rest,
    Programs.learn,
    Programs.plan,
    Programs.sizes,
    Programs.plan_sizes,
    Programs.want,
)
