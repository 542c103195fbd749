"""Which program serves a trace: none yet (tier 0), a stored one, or one that is compiled in the background.

First sight: tier 0, and a search for the program that an earlier process stored. Second sight: that one, or tier 0
again while a compile worker gets the trace. Programs are loaded in the background; the next sight of the trace after
that runs it.

Invariant: the user never sees a compiler error. What cannot be compiled runs operator by operator, is counted under
`fallbacks`, and warned of once. A trace that is seen once is never compiled (except with `config.tiers = "off"`).
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchlazy.inductor.codegen import languages
from torchlazy.lazy.config import config
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.plan.loaded import Compiled, CompileOptions, load_stored, stored_form
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.hot_sizes import HotSizes
from torchlazy.lazy.run.loading import BackgroundLoader, Load
from torchlazy.lazy.run.shape_families import ShapeFamilies, ShapeFamily
from torchlazy.lazy.run.straight_line import ByOperators
from torchlazy.lazy.run.workers import MANY_CORES, Answer, CompilePool, Job
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace import serialize
from torchlazy.lazy.trace.skeleton import DecomposedTrace
from torchlazy.lazy.trace.trace import CutTrace, Signature, compute_device
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.store import ProgramStore, from_text, program_key
from torchlazy.runtime.toolchains import toolchain_triton
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.target_facts import package_fingerprint, target_facts, triton_target
from torchlazy.runtime.toolchains.toolchain_cpp import available_cores

_pipeline = DeferredModule("torchlazy.lazy.plan.pipeline")
_LONG = 64  # operators
_MAX_KNOWN = 1024  # trace structures remembered; those seen least are forgotten first


@dataclass(eq=False)
class KnownTrace:
    """A trace structure that was seen: how often, and its program once there is one."""

    seen: int = 0
    compiled: Compiled | None = None
    failure: str = ""
    pending: _Pending | None = None
    family: ShapeFamily | None = None  # the traces that differ from it in numbers only, once looked up
    parts: DecomposedTrace | None = None
    signature: Signature | None = None
    waits: bool = False  # for a template planned from other traces, which may not serve it
    stored: Load | None = None  # its program is being looked for on disk
    by_operators: ByOperators | None = None  # what runs it without a program

    @property
    def is_awaited(self) -> bool:
        """Whether its program is on its way."""
        is_compiled = self.pending is not None and self.pending.job.answer is None
        return is_compiled or (self.stored is not None and not self.stored.is_done)


@dataclass(frozen=True, eq=False)
class _Pending:
    """A trace that a worker compiles."""

    job: Job
    key: str
    trace: CutTrace
    options: CompileOptions
    frame: str


class Tiers:
    """The traces known to this process. Calls come one at a time: the recorder's lock is held."""

    def __init__(self) -> None:
        self.pool = CompilePool()
        self.loads = BackgroundLoader()
        self._known: dict[tuple[Any, ...], KnownTrace] = {}
        self._pending: list[KnownTrace] = []
        self.families = ShapeFamilies(self)
        self.hot_sizes = HotSizes(self._compile_hot_size)
        self._cache: KernelCache | None = None
        self._store: ProgramStore | None = None
        self._warned: set[str] = set()
        self._triton_is_there = False  # or being imported
        self.sizes_vary = False  # current traces are looked up as if `config.dynamic` were on
        if hasattr(os, "register_at_fork"):
            reset = weakref.WeakMethod(self._reset_after_fork)
            os.register_at_fork(after_in_child=lambda: (method := reset()) and method())

    @property
    def cache(self) -> KernelCache:
        if self._cache is None:
            self._cache = open_cache()
        return self._cache

    @property
    def store(self) -> ProgramStore:
        if self._store is None:
            self._store = ProgramStore(self.cache.folder)
        return self._store

    def forget(self) -> None:
        """Drop every program of this process; what is on disk stays, what is in the background is not waited for."""
        self._known.clear()
        self._pending.clear()
        self.families.clear()
        self.hot_sizes.forget()

    def wait(self) -> None:
        """Return when nothing is compiled in the background."""
        self.loads.wait()
        self.pool.wait()
        self.hot_sizes.wait()

    def finish(self) -> None:
        """Load every program that has come back from a worker."""
        for known in [known for known in self._pending if _has_answer(known)]:
            self._land(known)

    def look_up(self, trace: CutTrace, device: str, frame: str, scalars: str = "arguments") -> tuple[KnownTrace, str]:
        """What is known of the trace, with its program if it has one by now; and the outcome in words.

        With `scalars` in memory, or for a half of a joined trace, the caller has run the trace before: its program is
        compiled at the first sight.
        """
        options = CompileOptions(languages.language_for(device), config.precision, config.recompute, scalars)
        identity = (options, trace.signature())
        known = self._known.get(identity)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known = {
                    k: v for k, v in self._known.items() if v.pending or (v.compiled is not None and v.seen > 2)
                }
            known = self._known[identity] = KnownTrace(signature=identity[1])
        elif known.signature is not identity[1] and known.signature is not None:
            trace.share_signature(known.signature)
        known.seen += 1
        if known.compiled is not None:
            metrics.hits += 1
            return known, "hit"
        outcome = self._find_program(known, trace, options, device, frame)
        if known.compiled is None or outcome == "compiled":
            metrics.misses += 1
        else:
            metrics.hits += 1
        return known, "compiled" if outcome == "swapped in" else outcome

    def _find_program(
        self, known: KnownTrace, trace: CutTrace, options: CompileOptions, device: str, frame: str
    ) -> str:
        if known.pending is not None:
            if config.tiers != "on":
                self.pool.wait()
            if not _has_answer(known):
                return "tier 0: compiling in the background"
            return self._land(known)
        if known.failure:
            return f"tier 0: {known.failure}"
        if not options.language:
            if known.seen == 1 and config.tiers != "off":
                return "tier 0: first sight"
            return self._fail(known, f"no code generator for {device}")
        is_replayed = options.in_memory or trace.half is not None
        if (config.dynamic == "on" or self.sizes_vary) and not is_replayed:
            outcome = self.families.find(known, trace, options, device, frame)
            if outcome:
                return outcome
        if known.stored is not None:
            if config.tiers != "on":
                self.loads.wait()
            if not known.stored.is_done:
                return "tier 0: loading its stored program"
            if self._take_stored(known):
                return "stored"
        elif known.seen <= 2 and self._seek_in_store(known, trace, options, device):
            return "stored"
        if known.seen == 1 and config.tiers != "off" and not is_replayed:
            self._expect_work(trace, options, device)
            return "tier 0: first sight"
        if config.tiers == "on":
            return self._submit(known, trace, options, device, frame)
        return self._compile_here(known, self._key(trace, options, device), trace, options, frame)

    def _key(self, trace: CutTrace, options: CompileOptions, device: str) -> str:
        """The program's name on disk; empty where programs are not stored."""
        if config.store != "on":
            return ""
        facts = target_facts(options.language, triton_target(device))
        chosen = f"{options.precision}, recompute {options.recompute}, scalars {options.scalars}"
        return program_key(facts, chosen, serialize.canonical_text(trace))

    def _seek_in_store(self, known: KnownTrace, trace: CutTrace, options: CompileOptions, device: str) -> bool:
        """Look for the trace's program on disk. Returns whether it was found and loaded; False while that goes on in
        the background."""
        if config.store != "on" or not self.store.has_entries():
            return False
        load = partial(self._load_stored, trace, options, device, self.cache)
        if config.tiers == "on":
            known.stored = self.loads.submit(load)
            return False
        known.stored = Load(load).run()
        return self._take_stored(known)

    def _load_stored(self, trace: CutTrace, options: CompileOptions, device: str, cache: KernelCache) -> Any:
        stored = self.store.get(self._key(trace, options, device))
        return None if stored is None else load_stored(stored, trace, options, cache)

    def _take_stored(self, known: KnownTrace) -> bool:
        """The program that was looked for, where one was found."""
        assert known.stored is not None
        load, known.stored = known.stored, None
        if load.error is not None:
            self._warn("stored", f"a stored program does not load and is compiled again: {_first_line(load.error)}")
        known.compiled = load.value
        if known.compiled is None:
            return False
        _count_fallbacks(known.compiled)
        return True

    def _import_triton(self, options: CompileOptions, device: str) -> None:
        """Once, in the background, before there is a program to load."""
        if options.language == "triton" and not self._triton_is_there:
            self._triton_is_there = True
            self.loads.submit(partial(toolchain_triton.import_triton, device))

    def _expect_work(self, trace: CutTrace, options: CompileOptions, device: str) -> None:
        """A trace as long as a model's may well come again: a worker is started where a core is free for that. On few
        cores it would take its seconds from the first step."""
        if config.tiers == "on" and len(trace.entries) >= _LONG:
            self._import_triton(options, device)
            if available_cores() >= MANY_CORES:
                self.pool.start_ahead()

    def _submit(self, known: KnownTrace, trace: CutTrace, options: CompileOptions, device: str, frame: str) -> str:
        try:
            text = serialize.to_json(trace)
        except ProgramError:  # a constant that has meaning in this process only
            return self._compile_here(known, "", trace, options, frame)
        key = self._key(trace, options, device)
        self._import_triton(options, device)
        load = partial(_load_answer, key, trace, options, self.cache)
        job = self.pool.submit(self._request(text, key, options, device), load=load)
        known.pending = _Pending(job, key, trace, options, frame)
        self._pending.append(known)
        return "tier 0: compiling in the background"

    def _request(self, text: str, key: str, options: CompileOptions, device: str) -> dict[str, Any]:
        return {
            "trace": text,
            "language": options.language,
            "precision": options.precision,
            "recompute": options.recompute,
            "scalars": options.scalars,
            "target": triton_target(device) if options.language == "triton" else None,
            "folder": str(self.cache.folder),
            "key": key,
            "store": package_fingerprint() if key else "",
        }

    def _compile_hot_size(self, trace: CutTrace, options: CompileOptions) -> Compiled:
        """The trace's own program, for `HotSizes`: in a thread that no step waits for."""
        device = compute_device(trace)
        key = self._key(trace, options, device)
        stored = self.store.get(key) if key else None
        timings: dict[str, float] = {}
        if stored is None:
            job = self.pool.submit(self._request(serialize.to_json(trace), key, options, device), is_urgent=False)
            answer = self.pool.wait_for(job)
            if answer.kind != "compiled":
                raise RuntimeError(answer.message or answer.kind)
            stored, timings = from_text(key, answer.program), answer.timings
        with below_autograd():
            return load_stored(stored, trace, options, self.cache, timings)

    def _land(self, known: KnownTrace) -> str:
        """Take what a worker answered: load the program, or say why there is none."""
        pending = known.pending
        assert pending is not None and pending.job.answer is not None
        known.pending = None
        if known in self._pending:
            self._pending.remove(known)
        answer = pending.job.answer
        if answer.kind == "compiled":
            return self._take_answer(known, pending, answer)
        if answer.kind == "unavailable":
            metrics.fallbacks["no compile worker: compiled in the foreground"] += 1
            self._warn("unavailable", f"no compile worker, programs are compiled in the foreground: {answer.message}")
            return self._compile_here(known, pending.key, pending.trace, pending.options, pending.frame)
        if answer.kind == "crashed":
            self._warn("crashed", f"a compile worker crashed, its program runs operator by operator: {answer.message}")
            return self._fail(known, "compile worker crashed")
        if config.strict:
            raise RuntimeError(f"the compile worker raised\n{answer.traceback}")
        return self._cannot_compile(known, pending.trace, pending.frame, answer.error, answer.message)

    def _take_answer(self, known: KnownTrace, pending: _Pending, answer: Answer) -> str:
        loaded = pending.job.loaded
        assert loaded is not None
        if loaded.error is not None:
            if config.strict:
                raise loaded.error
            return self._cannot_compile(
                known, pending.trace, pending.frame, type(loaded.error).__name__, str(loaded.error)
            )
        known.compiled = loaded.value
        _count_compile(loaded.value, answer.seconds + loaded.seconds)
        return "swapped in"

    def _compile_here(self, known: KnownTrace, key: str, trace: CutTrace, options: CompileOptions, frame: str) -> str:
        start = time.perf_counter()
        try:
            with below_autograd():
                known.compiled = _pipeline.compile_trace(trace, options, self.cache)
        except Exception as error:
            if config.strict:
                raise
            return self._cannot_compile(known, trace, frame, type(error).__name__, str(error))
        _count_compile(known.compiled, time.perf_counter() - start)
        if key:
            compiled = known.compiled
            try:
                self.store.put(key, stored_form(compiled.program, compiled.fallbacks, compiled.timings))
            except ProgramError as error:  # an argument without a form in JSON: the program serves this process only
                metrics.fallbacks[f"program is not stored: {_first_line(error)}"] += 1
        return "compiled"

    def _cannot_compile(self, known: KnownTrace, trace: CutTrace, frame: str, error: str, message: str) -> str:
        if trace.half is not None:  # the two traces have programs of their own
            return self._fail(known, f"cannot compile two traces as one: {error}")
        warnings.warn(
            f"torchlazy: a program of {len(trace.entries)} operators, cut at {frame or '?'}, cannot be compiled and "
            f"runs operator by operator: {error}: {message[:500]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return self._fail(known, f"cannot compile: {error}")

    def _fail(self, known: KnownTrace, failure: str) -> str:
        known.failure = failure
        metrics.fallbacks[failure] += 1
        return f"tier 0: {failure}"

    def _warn(self, about: str, text: str) -> None:
        """Warn once a process about each subject."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"torchlazy: {text}", RuntimeWarning, stacklevel=2)

    def _reset_after_fork(self) -> None:
        """The parent's workers are not this child's: pending requests are submitted again at the next sight."""
        self.pool = CompilePool()
        self.loads = BackgroundLoader()
        for known in self._known.values():
            known.pending = None
            if known.stored is not None and not known.stored.is_done:
                known.stored = None
        self._pending.clear()
        self.families.drop_pending()
        self.hot_sizes.drop_pending()


def _load_answer(key: str, trace: CutTrace, options: CompileOptions, cache: KernelCache, answer: Answer) -> Compiled:
    return load_stored(from_text(key, answer.program), trace, options, cache, answer.timings)


def _has_answer(known: KnownTrace) -> bool:
    return known.pending is not None and known.pending.job.answer is not None


def _count_compile(compiled: Compiled, seconds: float) -> None:
    metrics.compiles += 1
    metrics.compile_seconds += seconds
    _count_fallbacks(compiled)


def _count_fallbacks(compiled: Compiled) -> None:
    for fallback in compiled.fallbacks:
        if not fallback.by_choice:
            metrics.fallbacks[f"{fallback.op}: {fallback.reason}"] += 1


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
