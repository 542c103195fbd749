"""Families: traces of one skeleton, and the templates that serve them.

The first trace of a skeleton gets a program of its own, as ever. When a second one comes that differs in numbers only,
a template is planned from the two (in a compile worker, or here); whatever it serves afterwards compiles nothing. A
trace that no template serves joins the samples, and the next template is made to serve it too.

Invariant: a trace runs a template only if all of its numbers are what the template says (`lazy/template.py`); where
there is no template, `metrics()["not_generalised"]` says why and traces are compiled one by one as without it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchlazy.inductor.codegen import languages
from torchlazy.lazy import trace_text
from torchlazy.lazy.background import Answer, Job
from torchlazy.lazy.config import config
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.generalise import has_small_size, mixes_small_sizes
from torchlazy.lazy.loaded import Compiled, CompileOptions, stored_form
from torchlazy.lazy.numbers import Parts, take_apart
from torchlazy.lazy.report import metrics
from torchlazy.lazy.template import BoundRun, Template
from torchlazy.lazy.torch_private import below_autograd
from torchlazy.lazy.trace import CutTrace
from torchlazy.lazy.unified import Matcher, Unified
from torchlazy.prims.fallback import Fallback
from torchlazy.runtime import executor, toolchain
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program_store import StoredProgram, from_text, program_key
from torchlazy.runtime.symbolic import guard_function
from torchlazy.runtime.target_facts import package_fingerprint, target_facts, triton_target

if TYPE_CHECKING:
    from torchlazy.lazy.tiers import Known, Tiers

_plan = DeferredModule("torchlazy.lazy.template_plan")

_MOST_FAMILIES = 512
_MOST_SAMPLES = 4
_MOST_ATTEMPTS = 6  # templates tried for one skeleton
NUMBERS = "numbers"  # the note of a stored template that holds its `Unified`


@dataclass(eq=False)
class Family:
    """What is known of one skeleton."""

    samples: list[tuple[CutTrace, Parts]] = field(default_factory=list)
    templates: list[Template] = field(default_factory=list)
    pending: Job | None = None
    pending_key: str = ""
    attempts: int = 0
    unserved: int = 0  # traces since the last attempt that no template served
    failure: str = ""
    was_looked_up: bool = False


class Families:
    """The skeletons known to this process."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._families: dict[tuple[Any, ...], Family] = {}

    def clear(self) -> None:
        """Forget all."""
        self._families.clear()

    def drop_pending(self) -> None:
        """In a forked child: what the parent's workers were asked for is asked for again."""
        for family in self._families.values():
            family.pending = None

    def find(self, known: Known, trace: CutTrace, options: CompileOptions, device: str, frame: str) -> str:
        """Give `known` a template's program where one serves the trace, or work on one. Returns what came of it in
        words; empty where the trace is to be compiled by itself."""
        if known.family is None:
            if len(trace.entries) == 0:
                return ""
            taken = take_apart(trace)
            known.family, known.parts = self._family(taken, options), taken
            is_new = True
        else:
            is_new = False
        family, parts = known.family, known.parts
        assert parts is not None
        if family.pending is not None:
            if config.tiers != "on":
                self._tiers.pool.wait()
            if family.pending.answer is not None:
                self._land(family, options, frame)
        if is_new and not family.was_looked_up:
            family.was_looked_up = True
            self._load_from_store(family, parts, options, device)
        if self._bind(known, trace, options):
            return "generalised"
        if is_new:
            if family.samples and mixes_small_sizes(family.samples[0][0], trace):
                if not family.templates and len(family.samples) == 1 and has_small_size(family.samples[0][0]):
                    family.samples = [(trace, parts)]  # the odd one came first
                return ""
            family.unserved += 1
            family.samples = [*family.samples[-_MOST_SAMPLES + 1 :], (trace, parts)]
        if family.pending is not None:
            return "tier 0: compiling for all sizes in the background"
        if not is_new or not self._is_worth_trying(family):
            return ""
        family.attempts += 1
        family.unserved = 0
        if config.tiers == "off":
            return self._make_here(known, family, trace, options, device, frame)
        return self._submit(family, options, device, frame)

    def _family(self, parts: Parts, options: CompileOptions) -> Family:
        key = (options, parts.skeleton)
        family = self._families.get(key)
        if family is None:
            if len(self._families) >= _MOST_FAMILIES:
                self._families = {k: f for k, f in self._families.items() if f.pending or f.templates}
                while len(self._families) >= _MOST_FAMILIES:
                    self._families.pop(next(iter(self._families)))
            family = self._families[key] = Family()
        return family

    def _is_worth_trying(self, family: Family) -> bool:
        """From the second sample on; after each attempt it takes twice as many traces that nothing serves."""
        if len(family.samples) < 2 or family.attempts >= _MOST_ATTEMPTS:
            return False
        return family.unserved >= (1 if not family.attempts or family.templates else 2**family.attempts)

    def _bind(self, known: Known, trace: CutTrace, options: CompileOptions) -> bool:
        family, parts = known.family, known.parts
        assert family is not None and parts is not None
        for template in reversed(family.templates):
            extra = template.bind(parts)
            if extra is not None:
                run: Any = BoundRun(template.run, extra)
                known.compiled = Compiled(run, template.program, trace, options, template.fallbacks, template.timings)
                metrics.generalised += 1
                return True
        return False

    # ---- making

    def _make_here(
        self, known: Known, family: Family, trace: CutTrace, options: CompileOptions, device: str, frame: str
    ) -> str:
        start = time.perf_counter()
        try:
            with below_autograd():
                planned, unified = _plan.plan_some(family.samples, options)
                template = self._load(planned.program, unified, options, planned.fallbacks, planned.timings)
        except Exception as error:
            self._refuse(family, f"{type(error).__name__}: {error}" if not _is_refusal(error) else str(error), frame)
            return ""
        family.templates.append(template)
        family.samples = family.samples[-_MOST_SAMPLES:]
        metrics.compiles += 1
        metrics.templates += 1
        metrics.compile_seconds += time.perf_counter() - start
        key = self._key(known.parts, options, device)
        if key:
            try:
                program = _plan.with_numbers(planned.program, unified)
                self._tiers.store.put(key, stored_form(program, planned.fallbacks, planned.timings))
            except ProgramError as error:
                metrics.fallbacks[f"template is not stored: {str(error)[:200]}"] += 1
        return "compiled" if self._bind(known, trace, options) else ""

    def _submit(self, family: Family, options: CompileOptions, device: str, frame: str) -> str:
        try:
            texts = [trace_text.to_json(sample) for sample, _ in family.samples]
        except ProgramError as error:
            self._refuse(family, str(error), frame)
            return ""
        family.pending_key = key = self._key(family.samples[-1][1], options, device)
        family.pending = self._tiers.pool.submit(
            {
                "traces": texts,
                "language": options.language,
                "precision": options.precision,
                "recompute": options.recompute,
                "scalars": options.scalars,
                "target": triton_target(device) if options.language == "triton" else None,
                "folder": str(self._tiers.cache.folder),
                "key": key,
                "store": package_fingerprint() if key else "",
            }
        )
        return "tier 0: compiling for all sizes in the background"

    def _land(self, family: Family, options: CompileOptions, frame: str) -> None:
        assert family.pending is not None and family.pending.answer is not None
        answer: Answer = family.pending.answer
        family.pending = None
        if answer.kind != "compiled":
            self._refuse(family, answer.message or answer.kind, frame)
            return
        start = time.perf_counter()
        try:
            stored = from_text(family.pending_key, answer.program)
            with below_autograd():
                template = self._load_stored(stored, options, answer.timings)
        except Exception as error:
            self._refuse(family, f"{type(error).__name__}: {error}", frame)
            return
        family.templates.append(template)
        metrics.compiles += 1
        metrics.templates += 1
        metrics.compile_seconds += answer.seconds + time.perf_counter() - start

    def _refuse(self, family: Family, reason: str, frame: str) -> None:
        reason += f" (in the program cut at {frame})" if frame else ""
        family.failure = reason
        metrics.not_generalised[reason] += 1

    # ---- loading

    def _load(
        self, program: Any, unified: Unified, options: CompileOptions, fallbacks: Any, timings: dict[str, float]
    ) -> Template:
        preludes = languages.preludes(options.language)
        kernels = toolchain.load_kernels(program.kernels, cache=self._tiers.cache, preludes=preludes)
        run = executor.load(program, kernels)
        return Template(run, program, Matcher(unified), guard_function(program), tuple(fallbacks), dict(timings))

    def _load_stored(
        self, stored: StoredProgram, options: CompileOptions, timings: dict[str, float] | None = None
    ) -> Template:
        text = dict(stored.program.notes)[NUMBERS]
        fallbacks = tuple(Fallback(*facts) for facts in stored.fallbacks)
        return self._load(stored.program, Unified.from_json(text), options, fallbacks, dict(timings or {}))

    def _key(self, parts: Parts | None, options: CompileOptions, device: str) -> str:
        """The template's name on disk; empty where programs are not stored."""
        if config.store != "on" or parts is None:
            return ""
        facts = target_facts(options.language, triton_target(device))
        return program_key(facts, f"template, {options.precision}, recompute {options.recompute}", repr(parts.skeleton))

    def _load_from_store(self, family: Family, parts: Parts, options: CompileOptions, device: str) -> None:
        if config.store != "on" or not self._tiers.store.has_entries():
            return
        stored = self._tiers.store.get(self._key(parts, options, device))
        if stored is None:
            return
        try:
            with below_autograd():
                family.templates.append(self._load_stored(stored, options))
        except Exception as error:
            metrics.not_generalised[f"a stored template does not load: {type(error).__name__}: {error}"] += 1


def _is_refusal(error: Exception) -> bool:
    return type(error).__name__ in ("NoTemplate", "CannotUnify")
