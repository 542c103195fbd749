"""Shape families: traces of one skeleton, and the templates (programs for all sizes) that serve them.

The first trace of a skeleton gets a program of its own, as usual. When a second one comes that differs in numbers only,
a template is planned from the two (in a compile worker, or here); whatever it serves afterwards compiles nothing. A
trace that no template serves joins the samples, and the next template is planned to serve it too. A trace is analysed
only once another one with the same operators came: programs of fixed sizes pay nothing.

Invariant: a trace runs a template only if all of its numbers are what the template says (`run/dynamic_program.py`);
where there is no template, `metrics()["not_generalised"]` says why and traces are compiled one by one as without it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torchlazy.inductor.codegen import languages
from torchlazy.lazy.config import config
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.numbers.matcher import Matcher, UnifiedTrace
from torchlazy.lazy.numbers.unify import as_sample_of
from torchlazy.lazy.plan.loaded import Compiled, CompileOptions, stored_form
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.dynamic_program import BoundRun, Template
from torchlazy.lazy.run.hot_sizes import Tally
from torchlazy.lazy.run.loading import Load
from torchlazy.lazy.run.workers import Answer, Job
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace import serialize
from torchlazy.lazy.trace.skeleton import DecomposedTrace, decompose_trace, skeleton_digest
from torchlazy.lazy.trace.trace import CutTrace, slots_in
from torchlazy.prims.fallback import Fallback
from torchlazy.runtime import executor
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.store import StoredProgram, from_text, program_key
from torchlazy.runtime.program.symbolic import guard_function
from torchlazy.runtime.toolchains import toolchain
from torchlazy.runtime.toolchains.target_facts import package_fingerprint, target_facts, triton_target

if TYPE_CHECKING:
    from torchlazy.lazy.run.programs import KnownTrace, Tiers

_plan = DeferredModule("torchlazy.lazy.run.plan_dynamic")

_MOST_FAMILIES = 512
_MOST_UNMATCHED = 256  # traces kept because another one may have the same operators
_MOST_SAMPLES = 4
_MOST_ATTEMPTS = 6  # templates tried for one skeleton
_LOADING = "tier 0: loading a stored template"
NUMBERS, SKELETON = "numbers", "skeleton"  # notes of a stored template: its `UnifiedTrace`; whose template it is
SmallSizes: TypeAlias = "tuple[tuple[int, int, int], ...]"  # input, dimension, size: those of 0 and 1


@dataclass(eq=False)
class ShapeFamily:
    """What is known of one skeleton."""

    samples: list[tuple[CutTrace, DecomposedTrace]] = field(default_factory=list)
    templates: list[Template] = field(default_factory=list)
    pending: Job | None = None
    attempts: int = 0
    unserved: int = 0  # traces since the last attempt that no template served
    failure: str = ""
    was_looked_up: bool = False
    stored: Load | None = None  # a template is being looked for on disk
    small: SmallSizes = ()  # of its inputs, where other traces of the skeleton differ in these


class ShapeFamilies:
    """The skeletons known to this process."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._families: dict[tuple[Any, ...], ShapeFamily] = {}
        self._unmatched: dict[
            Any, tuple[KnownTrace, CutTrace] | None
        ] = {}  # by operators; None from the second trace on

    def clear(self) -> None:
        """Forget all."""
        self._families.clear()
        self._unmatched.clear()

    def drop_pending(self) -> None:
        """In a forked child: requests to the parent's workers are submitted again."""
        for family in self._families.values():
            family.pending = None
            if family.stored is not None and not family.stored.is_done:
                family.stored = None

    def find(self, known: KnownTrace, trace: CutTrace, options: CompileOptions, device: str, frame: str) -> str:
        """Give `known` a template's program where one serves the trace, or work on one. Returns the outcome in words;
        empty where the trace is to be compiled by itself."""
        is_new = known.family is None
        if is_new:
            if not trace.entries or self._is_unmatched(known, trace, options, device):
                return ""
            known.parts = decompose_trace(trace)
            known.family = self._family(known.parts, options)
            if trace.scalar_kinds and not known.family.samples:
                self._join_constant_sample(known.family, trace, known.parts, options)
        family, parts = known.family, known.parts
        assert family is not None and parts is not None
        if self._is_served(known, family, trace, options, device, is_new, frame):
            return "generalised"
        if family.stored is not None:
            known.waits |= is_new
            return _LOADING
        if is_new and not self._join(family, trace, parts, options, frame):
            family = known.family = self._family(parts, options, small_sizes(trace))
            if self._is_served(known, family, trace, options, device, is_new, frame):
                return "generalised"
            if family.stored is not None:
                known.waits = True
                return _LOADING
            self._join(family, trace, parts, options, frame)
        if family.pending is not None:
            known.waits |= is_new
            return "tier 0: compiling for all sizes in the background"
        if not is_new and known.waits:
            known.waits, is_new = False, self._join(family, trace, parts, options, frame)
        if not is_new or not self._is_worth_trying(family):
            return ""
        family.attempts += 1
        family.unserved = 0
        if config.tiers == "off":
            return self._make_here(known, family, trace, options, device, frame)
        return self._submit(family, options, device, frame)

    def _is_unmatched(self, known: KnownTrace, trace: CutTrace, options: CompileOptions, device: str) -> bool:
        """Whether no other trace has the same operators, in this process or among stored templates. Once one has, the
        first is a sample of its skeleton."""
        operators = (options, len(trace.inputs), tuple([entry.op for entry in trace.entries]))
        if operators not in self._unmatched:
            if len(self._unmatched) >= _MOST_UNMATCHED:
                self._unmatched = {key: found for key, found in self._unmatched.items() if found is None}
            self._unmatched[operators] = (known, trace)
            if self._is_stored(trace, options, device):
                self._unmatched[operators] = None
                return False
            return True
        first = self._unmatched[operators]
        if first is None:
            return False
        if first[0] is known:
            return True
        self._unmatched[operators] = None
        other, trace = first
        if other.family is None:
            other.parts = decompose_trace(trace)
            other.family = self._family(other.parts, options)
            self._join(other.family, trace, other.parts, options, "")
        return False

    def _join_constant_sample(
        self, family: ShapeFamily, trace: CutTrace, parts: DecomposedTrace, options: CompileOptions
    ) -> None:
        """What was seen of the same operators before their numbers were inputs is a sample of a new skeleton."""
        for (other, *_), found in reversed(self._families.items()):
            sample = as_sample_of(found.samples[-1][0], trace) if other == options and found.samples else None
            if sample is not None and (taken := decompose_trace(sample)).skeleton == parts.skeleton:
                self._join(family, sample, taken, options, "")
                return

    def _is_served(
        self,
        known: KnownTrace,
        family: ShapeFamily,
        trace: CutTrace,
        options: CompileOptions,
        device: str,
        is_new: bool,
        frame: str,
    ) -> bool:
        """Whether a template of the family serves the trace, including one just finished or found on disk."""
        assert known.parts is not None
        if family.pending is not None:
            if config.tiers != "on":
                self._tiers.pool.wait()
            if family.pending.answer is not None:
                self._land(family, frame)
        if is_new and not family.was_looked_up:
            family.was_looked_up = True
            self._seek_in_store(family, trace, known.parts, options, device)
        if family.stored is not None:
            self._take_stored(family)
        return self._bind(known, trace, options)

    def _join(
        self, family: ShapeFamily, trace: CutTrace, parts: DecomposedTrace, options: CompileOptions, frame: str
    ) -> bool:
        """Make a trace that no template serves a sample; not where a size of 0 or 1 makes it another program: such
        traces are a family of their own."""
        place = mixed_small_size(family.samples[0][0], trace) if family.samples else None
        if place is not None:
            before = family.samples[0][0]
            reason = small_size_reason(trace, before, *place)
            if family.templates or len(family.samples) > 1 or not has_small_size(before):
                if not self._family(parts, options, small_sizes(trace)).samples:
                    metrics.not_generalised[_in_program(reason, frame)] += 1
                return False
            odd = self._family(family.samples[0][1], options, small_sizes(before))  # it came first
            odd.samples, family.samples = family.samples, []
            metrics.not_generalised[_in_program(reason, frame)] += 1
        family.unserved += 1
        family.samples = [*family.samples[-_MOST_SAMPLES + 1 :], (trace, parts)]
        return True

    def _family(self, parts: DecomposedTrace, options: CompileOptions, small: SmallSizes | None = None) -> ShapeFamily:
        key = (options, parts.skeleton) if small is None else (options, parts.skeleton, small)
        family = self._families.get(key)
        if family is None:
            if len(self._families) >= _MOST_FAMILIES:
                self._families = {k: f for k, f in self._families.items() if f.pending or f.templates}
                while len(self._families) >= _MOST_FAMILIES:
                    self._families.pop(next(iter(self._families)))
            family = self._families[key] = ShapeFamily(small=small or ())
        return family

    def _is_worth_trying(self, family: ShapeFamily) -> bool:
        """From the second sample on; after each attempt it takes twice as many traces that nothing serves."""
        if len(family.samples) < 2 or family.attempts >= _MOST_ATTEMPTS:
            return False
        return family.unserved >= (1 if not family.attempts or family.templates else 2**family.attempts)

    def _bind(self, known: KnownTrace, trace: CutTrace, options: CompileOptions) -> bool:
        family, parts = known.family, known.parts
        assert family is not None and parts is not None
        for template in reversed(family.templates):
            extra = template.bind(parts)
            if extra is not None:
                count = self._tiers.hot_sizes.count(template.tally, trace, options)
                run: Any = BoundRun(template.run, extra, count)
                known.compiled = Compiled(run, template.program, trace, options, template.fallbacks, template.timings)
                metrics.generalised += 1
                return True
        return False

    # ---- making

    def _make_here(
        self, known: KnownTrace, family: ShapeFamily, trace: CutTrace, options: CompileOptions, device: str, frame: str
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
        key = self._key(trace, options, device, family.small)
        parts = known.parts
        if key and parts is not None:
            try:
                program = _plan.with_numbers(planned.program, unified, parts)
                self._tiers.store.put(key, stored_form(program, planned.fallbacks, planned.timings))
            except ProgramError as error:
                metrics.fallbacks[f"template is not stored: {str(error)[:200]}"] += 1
        return "compiled" if self._bind(known, trace, options) else ""

    def _submit(self, family: ShapeFamily, options: CompileOptions, device: str, frame: str) -> str:
        try:
            texts = [serialize.to_json(sample) for sample, _ in family.samples]
        except ProgramError as error:
            self._refuse(family, str(error), frame)
            return ""
        key = self._key(family.samples[-1][0], options, device, family.small)
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
            },
            load=lambda answer: self._load_stored(from_text(key, answer.program), options, answer.timings),
        )
        return "tier 0: compiling for all sizes in the background"

    def _land(self, family: ShapeFamily, frame: str) -> None:
        pending, family.pending = family.pending, None
        assert pending is not None and pending.answer is not None
        answer: Answer = pending.answer
        if answer.kind != "compiled":
            self._refuse(family, answer.message or answer.kind, frame)
            return
        loaded = pending.loaded
        assert loaded is not None
        if loaded.error is not None:
            self._refuse(family, f"{type(loaded.error).__name__}: {loaded.error}", frame)
            return
        family.templates.append(loaded.value)
        metrics.compiles += 1
        metrics.templates += 1
        metrics.compile_seconds += answer.seconds + loaded.seconds

    def _refuse(self, family: ShapeFamily, reason: str, frame: str) -> None:
        reason = _in_program(reason, frame)
        family.failure = reason
        metrics.not_generalised[reason] += 1

    # ---- loading

    def _load(
        self, program: Any, unified: UnifiedTrace, options: CompileOptions, fallbacks: Any, timings: dict[str, float]
    ) -> Template:
        preludes = languages.preludes(options.language)
        kernels = toolchain.load_kernels(program.kernels, cache=self._tiers.cache, preludes=preludes)
        run = executor.load(program, kernels)
        tally = Tally(compile_seconds=sum(timings.values()))
        facts = tuple(fallbacks), dict(timings), tally
        return Template(run, program, Matcher(unified), guard_function(program), *facts)

    def _load_stored(
        self, stored: StoredProgram, options: CompileOptions, timings: dict[str, float] | None = None
    ) -> Template:
        text = dict(stored.program.notes)[NUMBERS]
        fallbacks = tuple(Fallback(*facts) for facts in stored.fallbacks)
        return self._load(stored.program, UnifiedTrace.from_json(text), options, fallbacks, dict(timings or {}))

    def _key(self, trace: CutTrace, options: CompileOptions, device: str, small: SmallSizes = ()) -> str:
        """The name on disk of templates for such operators and inputs, which is cheap; empty where programs are not
        stored. The notes of a template with this name say whether it is of the trace's skeleton."""
        if config.store != "on":
            return ""
        facts = target_facts(options.language, triton_target(device))
        inputs = [(number.number, geom.dtype, len(geom.shape)) for number, geom in trace.inputs]
        operators = [(entry.op._name, entry.op._overloadname) for entry in trace.entries]
        text = repr((operators, inputs, trace.scalar_kinds, trace.donations, *small))
        return program_key(facts, f"template, {options.precision}, recompute {options.recompute}", text)

    def _is_stored(self, trace: CutTrace, options: CompileOptions, device: str) -> bool:
        """Whether there may be a template for it on disk."""
        if config.store != "on" or not self._tiers.store.has_entries():
            return False
        return self._tiers.store.get(self._key(trace, options, device)) is not None

    def _seek_in_store(
        self, family: ShapeFamily, trace: CutTrace, parts: DecomposedTrace, options: CompileOptions, device: str
    ) -> None:
        if config.store != "on" or not self._tiers.store.has_entries():
            return
        load = partial(self._load_from_store, trace, parts, options, device, family.small)
        family.stored = self._tiers.loads.submit(load) if config.tiers == "on" else Load(load).run()

    def _load_from_store(
        self, trace: CutTrace, parts: DecomposedTrace, options: CompileOptions, device: str, small: SmallSizes
    ) -> Template | None:
        stored = self._tiers.store.get(self._key(trace, options, device, small))
        if stored is None or dict(stored.program.notes).get(SKELETON) != skeleton_digest(parts):
            return None
        return self._load_stored(stored, options)

    def _take_stored(self, family: ShapeFamily) -> None:
        """The template that was looked for, once that is known."""
        load = family.stored
        assert load is not None
        if config.tiers != "on":
            self._tiers.loads.wait()
        if not load.is_done:
            return
        family.stored = None
        if load.error is not None:
            reason = f"a stored template does not load: {type(load.error).__name__}: {load.error}"
            metrics.not_generalised[reason] += 1
        elif load.value is not None:
            family.templates.append(load.value)


def has_small_size(trace: CutTrace) -> bool:
    """Whether an input has a size of 0 or 1."""
    return any(size < 2 for _, geom in trace.inputs for size in geom.shape)


def small_sizes(trace: CutTrace) -> SmallSizes:
    """Where the inputs have sizes of 0 and 1."""
    return tuple(
        (position, dim, size)
        for position, (_, geom) in enumerate(trace.inputs)
        for dim, size in enumerate(geom.shape)
        if size < 2
    )


def mixed_small_size(a: CutTrace, b: CutTrace) -> tuple[int, int] | None:
    """The first input, and its dimension, that is of size 0 or 1 in one of the traces only: broadcasting and emptiness
    make these different programs."""
    for position, ((_, one), (_, other)) in enumerate(zip(a.inputs, b.inputs, strict=True)):
        if one is not other:
            for dim, (x, y) in enumerate(zip(one.shape, other.shape, strict=True)):
                if x != y and min(x, y) < 2:
                    return position, dim
    return None


def small_size_reason(trace: CutTrace, before: CutTrace, position: int, dim: int) -> str:
    """Why a trace gets a program of its own: which size of 0 or 1, its reader and line, and what to do."""
    number, geom = trace.inputs[position]
    size, other = geom.shape[dim], before.inputs[position][1].shape[dim]
    for place, entry in enumerate(trace.entries):
        if number in slots_in((entry.args, tuple(value for _, value in entry.kwargs))):
            frame = trace.frames[place] if place < len(trace.frames) else ""
            reader = f"read by {entry.op}" + (f" at {frame}" if frame else "")
            break
    else:
        reader = "which no operator reads"
    return (
        f"size {size} in dimension {dim} of an input of {len(geom.shape)} dimensions, {reader}, was {other} before: "
        "sizes of 0 and 1 have programs of their own, since operators broadcast them or have nothing to do; each is "
        "compiled once, or pad such a size to 2"
    )


def _in_program(reason: str, frame: str) -> str:
    return f"{reason} (in the program cut at {frame})" if frame else reason


def _is_refusal(error: Exception) -> bool:
    return type(error).__name__ in ("NoTemplate", "CannotUnify")
