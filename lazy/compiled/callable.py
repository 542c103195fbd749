"""`torchlazy.compile`: trace a call once, then replay it under guards without running its Python.

Invariant: a compiled callable gives what the callable itself would give. What cannot be replayed runs its
Python, recorded as usual, and `report()` says why.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.call import (
    CallToCapture,
    Captured,
    TrackedNumberSeen,
    UnfitSlots,
    ViewOnState,
    capture_call,
)
from torchlazy.lazy.compiled.capture.state import MAKES_STATE
from torchlazy.lazy.compiled.capture.threads import exclusive
from torchlazy.lazy.compiled.families import CallFamilies, SizedVariant
from torchlazy.lazy.compiled.front_door import CompileSettings
from torchlazy.lazy.compiled.gradient_orders import GradientOrders
from torchlazy.lazy.compiled.guards.discover import KEPT_ON_OWNER, TooMuch
from torchlazy.lazy.compiled.guards.growing import Growth, is_only_appended_to
from torchlazy.lazy.compiled.guards.reached import NotYet, is_replaceable
from torchlazy.lazy.compiled.inline_cache import IN_EAGER, CallFacts, InlineCache
from torchlazy.lazy.compiled.key import RememberedContext, why_intercepted
from torchlazy.lazy.compiled.module import (
    KEPT_BY_CLASSES,
    KeptMethods,
    called_of,
    compiled_module,
    name_of_decorated,
    original_of,
)
from torchlazy.lazy.compiled.ordinary import OrdinaryCalls, in_ordinary_tensors, optimizer_to_begin
from torchlazy.lazy.compiled.policy import CallNotes, CaptureWorth, VaryingNumbers, never_replayed
from torchlazy.lazy.compiled.replay.handle import ProgramHandle
from torchlazy.lazy.compiled.replay.replay import CheckFailed, Replay
from torchlazy.lazy.compiled.replay.shared_steps import SharedSteps
from torchlazy.lazy.compiled.replay.unbacked import UnbackedReplay
from torchlazy.lazy.compiled.replay.unbacked_steps import UnbackedForm
from torchlazy.lazy.compiled.side_exits import SideExits
from torchlazy.lazy.compiled.template.argument_facts import facts_of
from torchlazy.lazy.compiled.template.arguments import OpenKinds, Passed, containers_of, flatten_call
from torchlazy.lazy.compiled.template.difference import difference, serves, took_other_branch
from torchlazy.lazy.compiled.template.numbers import unbacked_sources
from torchlazy.lazy.compiled.template.template import JointRun, Segment, run_at_once
from torchlazy.lazy.compiled.template.views import copy_argument_views
from torchlazy.lazy.compiled.variants import (
    CallSignature,
    CallSignatures,
    CompileReport,
    Variant,
    has_replaced,
    short_text,
)
from torchlazy.lazy.config import config, with_dynamic
from torchlazy.lazy.device.block_hooks import HOOKS
from torchlazy.lazy.device.mode import lazy_mode
from torchlazy.lazy.device.outside_mode import outside_lazy_mode
from torchlazy.lazy.joint.graphs import GraphRooms
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.numbers.questions import SizeQuestions
from torchlazy.lazy.ops.collective_log import COLLECTIVE_LOG
from torchlazy.lazy.record.compiled_scope import running_compiled
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.report import diagnosed
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo

_TENSOR = torch.Tensor
_MAX_EVICTIONS = 8  # of variants whose parameters were replaced; after that the parameters may alternate
_NOT_SERVED = object()
_ANEW = object()  # state that the call reaches changed before its capture: the call starts over


class CompiledCallable:
    """What `torchlazy.compile` returns. Calls accept and return what the callable itself does."""

    def __init__(self, function: Callable[..., Any], settings: CompileSettings) -> None:
        self._function = function
        self._ordinary = OrdinaryCalls(function)
        self.settings = settings
        self.recorder: Recorder = LazyTensor.recorder
        self.driver: Any = self.recorder.driver
        self._signatures = CallSignatures()
        self._numbers = VaryingNumbers(settings.dynamic)
        self._counts = dict.fromkeys(("captures", "replays", "native", "verified", "audits"), 0)
        self._told_of = notes = CallNotes(function)
        self._note, self._warn, self._label = notes.note, notes.warn, notes.label
        self._alarm = ""
        self._evictions = 0
        self._orders = GradientOrders(function, self._label, self._forget_and_note)
        self._writes_views = self._has_begun = False
        self._graphs = GraphRooms()
        self._slots: set[str] = set()  # names of places whose values calls replace: slots
        self._appended: set[str] = set()  # names of lists that calls only append to
        self._moving: set[str] = set()  # names of tensors whose memory calls replace
        self._growth = Growth()
        self._families = CallFamilies(
            settings.dynamic, self.recorder, self._replay_of_sizes, self._late_replay, self._note
        )
        self._shared = SharedSteps()
        self._ambience = RememberedContext(self.recorder)
        self._alike = InlineCache(self.recorder, settings.audit, self._counts, self._note, self._ordinary)
        self._kinds = OpenKinds()  # classes of arguments whose objects come and go
        self._sizes_vary = False
        self._never = never_replayed(function)
        self._worth = CaptureWorth(self._note, self._warn)
        if self._never:
            self._note(f"not captured: {self._never}")
        if not isinstance(function, torch.nn.Module):
            functools.update_wrapper(self, function, updated=())

    def __getattr__(self, name: str) -> Any:
        """Attributes of a compiled module (`parameters`, `train`, `state_dict`, ...) are those of the module itself."""
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return f"torchlazy.compile({self._function if isinstance(self._function, torch.nn.Module) else self._label})"

    # ---------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if config.enabled == "off":
            return self._function(*args, **kwargs)
        if recorder.gate is not None:  # a gate watches each cut: no_sync, explain, shadow, flops
            return self._run_python(args, kwargs)
        settings = self._ambience.known()
        if self._never or (settings is None and self._is_intercepted()):
            return self._function(*args, **kwargs)
        if self._alarm or recorder.capture is not None or recorder.busy:
            return self._run_python(args, kwargs)
        replayed = self._alike.replayed(args, kwargs, settings)
        if replayed is not None:
            return replayed[0] if replayed[0] is not IN_EAGER else self._run_in_eager(args, kwargs)
        with with_dynamic(self._dynamic_programs), COLLECTIVE_LOG:
            if not recorder.mode_depth and not BLOCKS.may_record:
                found = self._served(args, kwargs, settings)
            else:
                with outside_lazy_mode(recorder):
                    known = self._ambience.known()
                    replayed = self._alike.replayed(args, kwargs, known)
                    found = self._served(args, kwargs, known) if replayed is None else replayed[0]
            if found is _NOT_SERVED:
                found = self._run_python(args, kwargs)
                if self._growth.name:  # flushed here, where programs are made for all sizes
                    recorder.cut("flush")
        if found is IN_EAGER:
            return self._run_in_eager(args, kwargs)
        return found if found is not _ANEW else self(*args, **kwargs)  # without the lock: a backward runs in threads

    @property
    def _dynamic_programs(self) -> str:
        """Whether programs are made for all sizes: "on", "off", or as the configuration says."""
        if self.settings.dynamic is None:
            return "on" if self._sizes_vary else ""
        return "on" if self.settings.dynamic else "off"

    def _served(self, args: Any, kwargs: Any, settings: Any = None) -> Any:
        """The call's value by a replay or a capture; _NOT_SERVED where its Python is to run."""
        recorder = self.recorder
        with recorder.lock:
            alike = self._alike.known(args, kwargs, settings)
            call_facts = (
                alike.call_facts(args, kwargs) if alike is not None else self._call_facts(args, kwargs, settings)
            )
            if call_facts is None:
                return _NOT_SERVED
            given, leaves, structure, key, signature = call_facts
            if not signature.variants and (left := self._left_to_python(signature, key)) is not None:
                return left
            audited, has_missed = None, False
            others = functools.partial(self._families.side_exits, signature, key, leaves)
            exits = SideExits(others, self._shared, (given, leaves), self.settings.audit)
            for variant in self._families.variants(signature, key, leaves):
                unaliased = alike is not None and alike.variant is variant
                served = None if exits.rules_out(variant) else variant.serves(given, leaves, unaliased=unaliased)
                if served is None:
                    continue
                if variant.needs_audit or (self.settings.audit and variant.schedule.due()):
                    audited = variant
                    break
                containers: list[Any] = []
                if variant.uses_containers:
                    containers = containers_of(args, kwargs, self._kinds.opens)
                    if not variant.accepts(containers):
                        continue
                try:
                    laid_out = None if variant.slot_names else structure
                    exits.begin(variant)
                    _, results = variant.replay.run(served[1], served[0], containers, laid_out, exits)
                except CheckFailed:
                    has_missed |= not variant.is_late
                    audited = exits.audited
                    if audited is not None:
                        break
                    continue
                self._counts["replays"] += 1
                self._growth.forget()
                assert exits.served is not None
                signature.served(exits.served, has_missed)
                self._alike.served(given, leaves, key, signature, exits.served)
                return exits.served.results(results)
            signature.misses += has_missed
            if signature.hardly_repeats():
                self._note("not captured for a while: its branches on values that it computes hardly ever repeat")
                signature.begin_anew()
            again = False
            if audited is None and self._growth.name and self._growth.goes_on(leaves):
                again = self._growth.is_argument and signature.comes_again()
                if not again:
                    return _NOT_SERVED
            elif audited is None and not self._worth.first_sights and not signature.variants:
                again = signature.comes_again()
                if not again:
                    return _NOT_SERVED
            if audited is None and self._begins_optimizer(leaves):
                return IN_EAGER if self._alike.runs_in_eager(given) else _NOT_SERVED
            if audited is not None or (self._worth.pause.is_over() and signature.pause.is_over()):
                passed = Passed(args, kwargs, structure, tuple(given), tuple(leaves), self._kinds.opens)
                with exclusive(recorder):
                    if audited is not None:
                        begun = time.perf_counter()
                        found = self._audit(audited, signature, passed, key)
                        audited.schedule.audited(begun)
                        return found
                    return self._capture(signature, passed, again, key)
        return _NOT_SERVED

    def _call_facts(self, args: Any, kwargs: Any, settings: Any) -> CallFacts | None:
        """What identifies the call: its leaves, structure, key and signature; None where an argument has no facts."""
        opens = self._kinds.opens
        given, structure = flatten_call(args, kwargs, opens)
        if self._kinds.learns(given, structure):
            self._forget()
            self._growth.forget()
            given, structure = flatten_call(args, kwargs, opens)
        leaves = self._compact(given)
        facts = facts_of(leaves, self._numbers.free)
        replaced = _replaced(given, leaves)
        if isinstance(facts, str):
            self._note(f"not captured: {facts}")
            return None
        settings = settings or self._ambience.learn()
        key = (structure, settings, *facts, *replaced)
        signature = self._signatures.get(key)
        if signature is None:
            if self._numbers.learn_arguments(leaves, structure):
                key = (structure, settings, *facts_of(leaves, self._numbers.free), *replaced)
            signature = self._signatures.of(key)
        return given, leaves, structure, key, signature

    def _left_to_python(self, signature: CallSignature, key: Any) -> Any:
        """How a call of sizes that come for the first time is left to its Python, where its template costs more; else
        None. Recorded where one program serves all sizes; a graph of its results keeps what a program would fuse."""
        if config.tiers != "on" or self.settings.fullgraph:
            return None
        template = self._families.too_dear(key)
        if template is None:
            return None
        has_graph = any(isinstance(step, JointRun) for step in template.steps)
        if not (has_graph or BLOCKS.serves(self.driver)) or signature.comes_again():
            return None
        self._note("ran its Python at sizes that came once: a template for them takes longer than it saves")
        return IN_EAGER if has_graph else _NOT_SERVED

    def _begins_optimizer(self, leaves: list[Any]) -> bool:
        """Whether this is the first call of a step whose optimizer has no state yet: it is to run its Python. Captured,
        it could not be replayed, as later calls find the state that it makes."""
        if self._has_begun or self.settings.fullgraph:
            return False
        self._has_begun = True
        if optimizer_to_begin(self._function, leaves) is None:
            return False
        self._note("ran its Python at first: its optimizer has no state yet")
        return True

    def _is_intercepted(self) -> bool:
        if why := why_intercepted():
            self._note(f"ran its Python: {why}")
        return bool(why)

    def _compact(self, leaves: list[Any]) -> list[Any]:
        """The arguments, with copies of argument views (parts of larger memory); not where the callable turned out to
        write to one, to return a view of one, or to read its address."""
        return leaves if self._writes_views else copy_argument_views(leaves)

    def _run_in_eager(self, args: Any, kwargs: Any) -> Any:
        self._counts["verified"] += 1
        with running_compiled():
            return self._function(*args, **kwargs)

    def _run_python(self, args: Any, kwargs: Any) -> Any:
        self._counts["verified"] += 1
        leaves = flatten_call(args, kwargs, self._kinds.opens)[0]
        if self.recorder.mode_depth or not self._ordinary.holds(leaves) or self._ordinary.are_on_lazy(args, kwargs):
            with running_compiled():
                return self._function(*args, **kwargs)
        with lazy_mode(), running_compiled():
            value = self._function(*args, **kwargs)
        for container in containers_of(args, kwargs, self._kinds.opens):
            in_ordinary_tensors(self.recorder, container, leaves)
        return in_ordinary_tensors(self.recorder, value, leaves)

    def _forget(self) -> None:
        """What was captured no longer holds for calls to come."""
        self._signatures.clear()
        self._families.clear()
        self._alike.forget()

    def _forget_and_note(self, reason: str) -> None:
        self._note(reason)
        self._forget()

    # ---------------------------------------------------------------- capturing

    def _capture(self, signature: CallSignature, passed: Passed, again: bool, key: Any) -> Any:
        if any([hooks.before_capture() for hooks in HOOKS]):
            return _ANEW
        self._learn(signature)
        of_kind = key[:2], key[2:], self._numbers.changed
        family = self._families.of(*of_kind) if self._families.are_made else None
        grows = not again and self._grows(passed, hopeful=family is not None and family.is_hopeful)
        if self._worth.begins_pause(self._counts, self._signatures) or grows:
            return _NOT_SERVED
        self._counts["captures"] += 1
        asked = None if family is None else family.listener(passed.leaves)
        try:
            with with_dynamic(self._dynamic_programs):  # sizes may just have been found to vary
                captured = self._run_captured(passed, self._numbers.free, asked=asked)
        except ViewOnState:
            self._counts["captures"] -= 1  # one call is counted once
            self._writes_views = True
            self._forget_and_note("a tensor argument is a view of memory that the call reaches in another way too")
            return self(*passed.args, **passed.kwargs)
        except TrackedNumberSeen:
            self._counts["captures"] -= 1
            self._numbers.let_stay()
            self._forget()
            self._note("numbers are not followed: its Python may distinguish a float from a tracked number")
            return self(*passed.args, **passed.kwargs)
        except UnfitSlots as why:
            self._note(f"captured without slots: {why}")
            self._slots.clear()
            captured = self._run_captured(passed, self._numbers.free)
        except TooMuch as why:
            if not isinstance(why, NotYet):
                signature.pause.begin()
            self._counts["captures"] -= 1
            self._note(f"not captured: {why}")
            return _NOT_SERVED
        except Exception as error:
            self._note(signature.raised(error))
            raise
        self._numbers.changed(captured.counts)
        appended = {name for name in captured.appends if is_only_appended_to(name, captured.reached.codes)}
        self._appended = (self._appended | appended) - captured.rewritten
        self._slots |= captured.replaces - self._appended
        self._moving |= captured.moves
        self._growth.captured(captured.reached, captured.slots, captured.sizes)
        if captured.template is None:
            begins = captured.refused.startswith(MAKES_STATE) and not signature.refusals
            self._note(f"{'to be captured again' if begins else 'not replayed'}: {captured.refused}")
            if signature.refuse():
                self._warn(f"runs its Python at each call: {captured.refused}")
            return captured.value
        self._add(signature, captured)
        if family is not None:
            self._families.record_capture(family, key[2:], passed.leaves, captured, asked)
        self._kinds.makes(captured.template.spec)
        self._orders.watch(captured)
        return captured.value

    def _grows(self, passed: Passed, *, hopeful: bool) -> bool:
        """Whether something has grown at each of the last captures, and will at the next. `hopeful`: a template for
        all sizes may be made of more captures."""
        name = self._growth.look(passed.leaves, self._appended)
        if hopeful:
            self._growth.name = name = ""
        if name:
            self._note(f"not captured while it grows: {name}")
            self._warn(
                f"runs its Python at each call, recorded: {name} has grown at each of the last captures. It is "
                "captured again where it has the size of the call before"
            )
        self._sizes_vary |= self._growth.sizes_vary
        return bool(name)

    def _add(self, signature: CallSignature, captured: Captured) -> None:
        assert captured.template is not None
        signature.refusals = 0
        self._numbers.captured(captured)
        replay = self._replay(captured.template, self._handle)
        variant = Variant(captured.guards, replay, captured.aliases, captured.slots, captured.slot_facts)
        self._families.insert(signature, variant)
        if at_once := run_at_once(captured.template):
            self._note(f"replays run operators at once, one by one: {at_once}")

    def _replay_of_sizes(self, template: Any, often: bool) -> Replay:
        """A replay of a template made for a call's sizes; it uses CUDA graphs once these come often."""
        handle = lambda segment, stays: self._handle(segment, stays and often)  # noqa: E731
        return self._replay(template, handle)

    @property
    def _wants_graphs(self) -> bool:
        """Whether programs on CUDA are to be CUDA graphs."""
        return config.cuda_graphs == "on" or (config.cuda_graphs == "auto" and self.settings.mode != "default")

    def _replay(self, template: Any, handle: Any) -> Replay:
        graphs = self._graphs if self._wants_graphs and self.settings.backend is None else None
        return Replay(self.recorder, template, handle, self._orders.deeper, self.settings.backend, graphs)

    def _late_replay(self, template: Any, late: UnbackedForm, symbols: Sequence[int]) -> Replay:
        return UnbackedReplay(
            self.recorder, template, self._handle, self._orders.deeper, late, symbols, self.settings.backend
        )

    def _run_captured(
        self, passed: Passed, free: Collection[str], like: Variant | None = None, asked: SizeQuestions | None = None
    ) -> Captured:
        """Capture the call, freely or (`like`) with the numbers and slots of a variant."""
        call = CallToCapture(
            self._function,
            passed,
            tuple(f"argument {i}" for i in range(len(passed.leaves))),
            frozenset(free),
            frozenset(self._numbers.fixed),
            like is None and self._numbers.vary,
            lambda reached: self._ordinary.holds(passed.leaves, reached) and not self.recorder.mode_depth,
            self.settings.fullgraph,
            self._orders.orders,
            frozenset(self._slots) if like is None else like.slot_names,
            not self._numbers.stay,
            like.replay.generators if like is not None else (),
            appended=frozenset(self._appended),
            asked=asked,
            moving=frozenset(self._moving) if like is None else like.guards.moving,
            writes=frozenset() if like is None else frozenset(e.name for e in like.replay.template.effects),
            like=None if like is None else like.guards,
        )
        with running_compiled():
            captured = capture_call(self.recorder, call)
        if captured.wrote_views:
            self._writes_views = True
            self._forget()
        if captured.error is not None:
            raise captured.error
        return captured

    def _handle(self, segment: Segment, stays: bool) -> ProgramHandle:
        mode, backend = self.settings.mode, self.settings.backend
        tunes = self._note if mode == "max-autotune" else None
        return ProgramHandle(self.driver, segment, backend, graphs=stays and self._wants_graphs, tunes=tunes)

    def _learn(self, signature: CallSignature) -> None:
        """Why no variant served, and which numbers vary from call to call."""
        replaced = False
        for variant in signature.variants:
            changed, replaced = variant.guards.broken(), replaced | has_replaced(variant.guards)
            for name, then, now in changed[:1]:
                was, is_now = (diagnosed("captured again", "?", short_text, value) for value in (then, now))
                self._note(f"captured again: {name} was {was}, is {is_now}")
            self._slots |= {name for name, then, now in changed if is_replaceable(then, now)}
            moved = variant.guards.changed_numbers()
            self._numbers.changed(moved)
            self._slots |= self._positions_among(changed, moved)
        if replaced and self._evictions < _MAX_EVICTIONS:
            self._evict()

    def _positions_among(self, changed: list[Any], moved: list[str]) -> set[str]:
        """Ints of the state that are positions or sizes: Python read their values, and they differ each time. As slots
        they are treated like arguments, and a template for all sizes computes what follows from them."""
        fixed = self._numbers.fixed.intersection(moved) if self._families.are_made else ()
        return {name for name, then, _ in changed if name in fixed and type(then) is int}

    def _evict(self) -> None:
        """Parameters were replaced (`load_state_dict(assign=True)`): drop variants on the old ones, which hold their
        memory and would serve again only if these came back. Where they do come back, variants are kept."""
        self._evictions += 1
        self._alike.forget()
        for signature in self._signatures.values():
            signature.keep(lambda variant: not has_replaced(variant.guards))
        self._families.evict(has_replaced)

    # ---------------------------------------------------------------- audits

    def _audit(self, variant: Variant, signature: CallSignature, passed: Passed, key: Any) -> Any:
        """Run the Python after all, recorded, and compare with the template."""
        self._counts["audits"] += 1
        asked, family = None, None
        if isinstance(variant, SizedVariant) and variant.needs_audit:
            asked = variant.family.listener(passed.leaves)
        elif self._families.are_made and unbacked_sources(variant.replay.template):
            family = self._families.of(key[:2], key[2:], self._numbers.changed)
            asked = family.listener(passed.leaves)
        try:
            captured = self._run_captured(passed, variant.replay.template.free, variant, asked)
        except TooMuch as why:
            self._counts["audits"] -= 1
            self._forget_and_note(f"not captured: {why}")
            return _NOT_SERVED
        template = variant.replay.template
        if isinstance(variant, SizedVariant):
            template = self._families.at_sizes_of(variant, captured, passed.leaves)
        if took_other_branch(template, captured):
            if (captured := captured.by_itself()).template is None:
                self._note(f"not replayed: {captured.refused}")
            elif not any(serves(other.replay.template, captured) for other in signature.variants):
                self._counts["captures"] += 1
                self._counts["audits"] -= 1
                if not self._worth.begins_pause(self._counts, self._signatures):
                    self._add(signature, captured)
                    if family is not None:
                        self._families.record_capture(family, key[2:], passed.leaves, captured, asked)
            return captured.value
        differs = difference(template, captured)
        if differs and isinstance(variant, SizedVariant):
            return self._audit_of_sizes(variant, captured, asked, signature, passed, differs)
        self._families.agreed(variant)
        if differs:
            self._alarm = differs
            self._forget()
            self._warn(
                f"does not do the same at each call, although everything that guards see is as it was: {differs}. "
                "From now on its Python runs at each call, and is recorded."
            )
        return captured.value

    def _audit_of_sizes(
        self,
        variant: SizedVariant,
        captured: Captured,
        asked: SizeQuestions | None,
        signature: CallSignature,
        passed: Passed,
        differs: str,
    ) -> Any:
        """The template for all sizes is not right for this one."""
        if variant in signature.variants:
            signature.remove(variant)
        self._note(f"captured, although its kind had a template for all sizes: {differs}")
        if self._families.differed(variant, passed.leaves, captured, asked):
            self._warn(
                f"does something else at some sizes: {differs}. Its sizes are captured one by one from now on; "
                "results of replays at other sizes since the last audit may be wrong. dynamic=False never replays a "
                "size that was not captured"
            )
        if captured.template is not None:
            self._add(signature, captured.by_itself())
        return captured.value

    # ---------------------------------------------------------------- reporting

    def report(self) -> CompileReport:
        """What became of the calls so far."""
        kept = [variant for signature in self._signatures.values() for variant in signature.variants]
        variants = len({id(one.sized if isinstance(one, SizedVariant) else one) for one in kept})
        return CompileReport(
            **self._counts,
            variants=variants,
            reasons=tuple(self._told_of.reasons),
            alarm=self._alarm,
            in_python=self._alike.in_python,
        )

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """A compiled method: one compiled callable for each object, kept by the object."""
        if owner is None or not hasattr(self._function, "__get__"):
            return self
        if isinstance(owner, type):  # `@classmethod` over a compiled callable
            kept = KEPT_BY_CLASSES.setdefault(owner, KeptMethods())
        else:
            kept = getattr(owner, "__dict__", {}).setdefault(KEPT_ON_OWNER, KeptMethods())
        found = kept.get(self)
        if found is None:
            found = kept[self] = CompiledCallable(self._function.__get__(owner, kind), self.settings)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledCallable:
        return CompiledCallable(copy.deepcopy(self._function, memo), self.settings)

    def __reduce__(self) -> Any:
        return name_of_decorated(self, self._function) or (CompiledCallable, (self._function, self.settings))


def _replaced(given: list[Any], leaves: list[Any]) -> tuple[Any, ...]:
    """Which leaves are copies of argument views: a template captured with whole tensors may write to them, return views
    of them, or depend on where they begin."""
    if given is leaves:
        return ()
    return (("argument views", tuple([n for n, (a, b) in enumerate(zip(given, leaves, strict=True)) if a is not b])),)


exclude_from_dynamo(CompiledCallable.__call__)


def compile_callable(function: Any, settings: CompileSettings) -> Any:
    """What `torchlazy.compile` returns for a callable."""
    function = original_of(function)
    if isinstance(function, CompiledCallable):
        function = function._function
    if isinstance(function, torch.nn.Module):
        return compiled_module(function, CompiledCallable(called_of(function), settings))
    return CompiledCallable(function, settings)
