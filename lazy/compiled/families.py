"""Shape families of calls: captures of one callable that differ in sizes only, and their dynamic template.

The first call of a family is captured like any other. From the second one on a capture also records what the Python
asks of sizes. Once there are enough captures to infer what follows from what, a template for all sizes is made. It is
trusted if those before the last capture predict the last one; otherwise the first call that it serves is audited.

Invariant: a family that was found wrong once (an audit that differs) serves nothing any more: its sizes are captured
one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchlazy.lazy.compiled.audit import AuditSchedule
from torchlazy.lazy.compiled.capture.call import Captured
from torchlazy.lazy.compiled.guards.guards import Guards
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.replay.unbacked_steps import CannotBind, UnbackedForm
from torchlazy.lazy.compiled.sizes.dynamic_template import NeedsMore, Sample, SizedCall, ints_among
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.argument_facts import facts_of
from torchlazy.lazy.compiled.template.numbers import CallSizes, sizes_of, unbacked_kind, unbacked_sizes
from torchlazy.lazy.compiled.variants import MAX_VARIANTS, MOST_OPERATORS, CallSignature, Variant
from torchlazy.lazy.config import config
from torchlazy.lazy.numbers.fit import MOST_UNBACKED, DoesNotFit
from torchlazy.lazy.numbers.questions import SizeQuestions
from torchlazy.lazy.record.recorder import Recorder

_MOST_KINDS = 128
_MOST_STATES = 4  # families of one kind of arguments, each for another state: train and eval
_MOST_SAMPLES = 5
_MOST_BRANCHES = 16  # families of one kind of arguments, with unbacked sizes that are 0 or 1 in different places
_MOST_TRIES = 5  # captures during which growth is no reason to stop
_MOST_ATTEMPTS = 6  # captures that did not fit those before
_OFTEN = 32  # uses of one size, after which its programs may become CUDA graphs
_MOST_BOUND = 512  # sizes for which a bound template is kept
_MOST_BINDING = 0.05  # of the time between two calls of new sizes, for the template of one


@dataclass(eq=False)
class CallFamily:
    """Calls with the same argument structure, dtypes and everything else but sizes."""

    at_once: bool  # questions about sizes are recorded from the first capture on
    samples: list[Sample] = field(default_factory=list)
    sized: SizedCall | None = None
    late_form: UnbackedForm | None = None  # of `sized`, where steps are bound once unbacked sizes are known
    schedule: AuditSchedule = field(default_factory=AuditSchedule)
    is_verified: bool = False
    attempts: int = 0
    tries: int = 0  # captures of this kind since the last template, in any state
    changes: int = 0  # how often the contents of slots were of another kind
    bound: dict[Any, SizedVariant] = field(default_factory=dict)  # by sizes and known unbacked ones
    misfits: dict[Any, None] = field(default_factory=dict)  # such keys that the template does not serve
    binding: float = 0.0  # seconds that the template took to be made for the last new sizes
    unbacked_kind: Any = None  # which of the unbacked sizes are 0 or 1
    branches: dict[Any, CallFamily] = field(default_factory=dict)  # by other such kinds

    @property
    def is_given_up(self) -> bool:
        return self.attempts >= _MOST_ATTEMPTS

    @property
    def is_hopeful(self) -> bool:
        """Whether some more captures may give a template for all sizes."""
        return not self.is_given_up and self.sized is None and self.tries <= _MOST_TRIES and self.changes < 2

    def is_of_now(self) -> bool:
        """Whether the state is as it was at the last capture."""
        return not self.samples or self.samples[-1].captured.guards.holds()

    def listener(self, leaves: Sequence[Any]) -> SizeQuestions | None:
        """What records the size questions of the next capture; None where none is needed. Integer arguments that had
        other values before are sizes too."""
        if self.is_given_up or not (self.samples or self.at_once):
            return None
        ints = [sample.ints for sample in self.samples if len(sample.ints) == len(leaves)]
        moved = {
            position
            for position, leaf in enumerate(leaves)
            if type(leaf) is int and leaf > 1 and any(then[position] != leaf for then in ints)
        }
        return SizeQuestions(frozenset(moved))


@dataclass(eq=False, kw_only=True)
class SizedVariant(Variant):
    """A variant that was not captured: its template was made for a call's sizes. The family schedules its audits."""

    replay: Replay
    family: CallFamily
    sized: SizedCall
    sizes: CallSizes
    make: Callable[[t.CallTemplate, bool], Replay]
    uses: int = 0  # of these sizes; a variant for all unbacked sizes has no CUDA graphs

    def serves(
        self, given: list[Any], leaves: list[Any], *, unaliased: bool = False
    ) -> tuple[list[Any], list[Any]] | None:
        """Like any variant, while the family keeps its template."""
        if self.is_given_up:
            return None
        self.uses += 1
        if self.uses == _OFTEN and not self.is_late:
            self.replay = self.make(self.replay.template, True)
        return super().serves(given, leaves, unaliased=unaliased)

    @property
    def is_given_up(self) -> bool:
        """Whether the family has another template now, or none."""
        return self.family.sized is not self.sized

    @property
    def needs_audit(self) -> bool:
        """Whether no call of the family was compared with its Python yet."""
        return not self.family.is_verified


class CallFamilies:
    """The families of one callable.

    `dynamic` as the user gave it. `make`: a replay of a template, given whether its sizes come often; `make_late`: one
    for all unbacked sizes, given the steps and the symbols. `note` receives the reason why sizes are captured one by
    one.
    """

    def __init__(
        self,
        dynamic: bool | None,
        recorder: Recorder,
        make: Callable[[t.CallTemplate, bool], Replay],
        make_late: Callable[[t.CallTemplate, UnbackedForm, Sequence[int]], Replay],
        note: Callable[[str], None],
    ) -> None:
        self._dynamic, self._recorder, self._make, self._note = dynamic, recorder, make, note
        self._make_late = make_late
        self._has_late_forms = False
        self._last_new = 0.0  # when a call of new sizes came
        self._families: dict[Any, list[CallFamily]] = {}

    @property
    def are_made(self) -> bool:
        """Whether captures that differ in sizes may become one template."""
        return config.dynamic == "on" if self._dynamic is None else self._dynamic

    def clear(self) -> None:
        """Forget all."""
        self._families.clear()

    def evict(self, is_gone: Callable[[Guards], bool]) -> None:
        """Forget families of a state that was replaced, whose memory they would hold."""
        for known in self._families.values():
            known[:] = [f for f in known if not any(is_gone(sample.captured.guards) for sample in f.samples)]

    def of(self, key: Any, facts: Sequence[Any], changed: Callable[[list[str]], None]) -> CallFamily:
        """The family of a call that is about to be captured. `facts`: those of the arguments; `key`: what else
        distinguishes calls; `changed` receives numbers of the state that differ from those at such captures."""
        known = self._families.setdefault((key, sizes_of(facts).kind), [])
        found = next((family for family in known if family.is_of_now()), None)
        if found is None:
            for family in known:
                changed(family.samples[-1].captured.guards.changed_numbers())
            found = CallFamily(at_once=self._dynamic is True, tries=known[0].tries if known else 0)
            known.insert(0, found)
            del known[_MOST_STATES:]
            while len(self._families) > _MOST_KINDS:
                self._families.pop(next(iter(self._families)))
        found.tries += 1
        return found

    def too_dear(self, key: Any) -> t.CallTemplate | None:
        """A template that would serve a call of new sizes, where making it for them takes much of the time between two
        such calls: sizes that do not come again then cost less in eager."""
        now = time.perf_counter()
        since, self._last_new = now - self._last_new, now
        for family in self._families.get((key[:2], sizes_of(key[2:]).kind), ()):
            is_ready = family.sized is not None and family.is_verified and not family.sized.has_unbacked_sizes
            if is_ready and family.binding > _MOST_BINDING * since:
                return family.sized.last.captured.template  # type: ignore[union-attr]
        return None

    def variants(self, signature: CallSignature, key: Any, leaves: list[Any]) -> Iterator[Variant]:
        """Those that may serve the call; after them the one made for its sizes, where there is a template for all.
        Those that serve all unbacked sizes come first."""
        first: list[SizedVariant] = []
        if self._has_late_forms and not signature.has_unbacked:
            first = [made for made in self.serving(key[:2], key[2:], leaves) if made.is_late]
            for made in first:
                self._keep_for(signature, made)
                yield made
        yield from signature.in_order()
        if self.are_made:
            for made in self.serving(key[:2], key[2:], leaves):
                if made not in signature.variants and made not in first:
                    self._keep_for(signature, made)
                    yield made

    def side_exits(
        self, signature: CallSignature, key: Any, leaves: list[Any], sources: Sequence[Any], late: Sequence[int]
    ) -> Iterator[Variant]:
        """Side exits: variants in which a call with these numbers so far may continue; after them the one made for its
        sizes, and for the `late` (unbacked) ones that are known."""
        yield from signature.tree.find(sources)
        if self.are_made:
            for made in self.serving(key[:2], key[2:], leaves, late):
                if made not in signature.variants:
                    yield made

    def _keep_for(self, signature: CallSignature, made: SizedVariant) -> None:
        if not made.slot_names:  # slots hold other sizes at each call of one signature
            self.insert(signature, made)

    def insert(self, signature: CallSignature, variant: Variant) -> None:
        """A variant of a signature, to be tried first."""
        if signature.add(variant):
            self._note(
                f"more than {MAX_VARIANTS} variants, or {MOST_OPERATORS} operators in these, for one kind of arguments:"
                " those that serve most calls are kept"
            )

    def serving(
        self, key: Any, facts: Sequence[Any], leaves: list[Any], late: Sequence[int] = ()
    ) -> Iterator[SizedVariant]:
        """Variants made for the sizes of this call. `late`: the first of its unbacked sizes."""
        sizes = sizes_of(facts)
        for known in self._families.get((key, sizes.kind), ()):
            for family in (known, *known.branches.values()):
                if family.sized is not None and (family.sized.has_unbacked_sizes or not late):
                    found = self._serving(family, family.sized, facts, sizes, leaves, tuple(late))
                    if found is not None:
                        yield found

    def at_sizes_of(self, variant: SizedVariant, captured: Captured, leaves: Sequence[Any]) -> t.CallTemplate:
        """The template of the variant with the unbacked sizes of a captured call; its own where there is none."""
        if captured.template is None or not variant.sized.has_unbacked_sizes:
            return variant.replay.template
        held = captured.slots.now() or []
        late = unbacked_sizes(captured.template)
        found = variant.sized.template_for(variant.sizes, [*leaves, *held], late)
        return variant.replay.template if isinstance(found, str) else found

    def _serving(
        self,
        family: CallFamily,
        sized: SizedCall,
        facts: Sequence[Any],
        sizes: CallSizes,
        leaves: list[Any],
        late: tuple[int, ...],
    ) -> SizedVariant | None:
        captured = sized.last.captured
        held: list[Any] = []
        if captured.slots.slots:
            now = captured.slots.now()
            if now is None:
                return None
            held = now
            told = facts_of(leaves + held, _free_arguments(sized))
            if isinstance(told, str):
                return None
            facts, sizes = told, sizes_of(told)
        if sizes.kind != sized.last.sizes.kind or (sizes, late) in family.misfits:
            return None
        if late and family.late_form is not None:
            return None  # the variant for all unbacked sizes has been tried
        if (sizes, late) in family.bound:
            return family.bound[sizes, late]
        if not captured.guards.holds():
            return None
        start = time.perf_counter()
        made = sized.template_for(sizes, leaves + held, late)
        if isinstance(made, str):
            if not late:
                self._note(f"captured, although its kind has a template for all sizes: {made}")
            while len(family.misfits) >= _MOST_BOUND:
                family.misfits.pop(next(iter(family.misfits)))
            family.misfits[sizes, late] = None
            return None
        found = self._bind(family, sizes, made, facts)
        family.binding = time.perf_counter() - start
        while len(family.bound) >= _MOST_BOUND:
            family.bound.pop(next(iter(family.bound)))
        family.bound[sizes, late] = found
        return found

    def _bind(
        self, family: CallFamily, sizes: CallSizes, template: t.CallTemplate, facts: Sequence[Any]
    ) -> SizedVariant:
        assert family.sized is not None
        captured = family.sized.last.captured
        slot_facts = facts if captured.slots.slots else None
        variant = SizedVariant(
            guards=captured.guards,
            replay=self._replay(family, sizes, template),
            aliases=captured.aliases,
            slots=captured.slots,
            slot_facts=slot_facts,
            schedule=family.schedule,
            family=family,
            sized=family.sized,
            sizes=sizes,
            make=self._make,
        )
        return variant

    def _replay(self, family: CallFamily, sizes: CallSizes, template: t.CallTemplate) -> Replay:
        assert family.sized is not None
        if family.late_form is not None:
            symbols = family.sized.symbols_at(sizes)
            try:
                if symbols is not None:
                    return self._make_late(template, family.late_form, symbols)
            except CannotBind:
                family.late_form = None
        return self._make(template, False)

    # ---------------------------------------------------------------- learning

    def record_capture(
        self, family: CallFamily, facts: Sequence[Any], leaves: Sequence[Any], captured: Captured, asked: Any
    ) -> None:
        """A call was captured that no template served."""
        if family.is_given_up or captured.template is None:
            return
        kind = unbacked_kind(captured.template)
        if family.unbacked_kind is None:
            family.unbacked_kind = kind
        elif family.unbacked_kind != kind:
            if kind not in family.branches and len(family.branches) >= _MOST_BRANCHES:
                return
            family = family.branches.setdefault(kind, CallFamily(family.at_once, unbacked_kind=kind))
            if family.is_given_up:
                return
        sizes = sizes_of(facts if captured.slot_facts is None else captured.slot_facts)
        if any(sample.sizes.kind != sizes.kind for sample in family.samples):
            family.samples.clear()  # the contents of slots are of another kind
            family.changes += 1
        self._keep(family, Sample(sizes, captured, asked, ints_among(leaves)))
        self._make_template(family)

    def _keep(self, family: CallFamily, sample: Sample) -> None:
        sample = replace(sample, captured=replace(sample.captured, value=None))  # it is the caller's, and holds memory
        before = [known for known in family.samples if (known.sizes, known.late) != (sample.sizes, sample.late)]
        most = _MOST_SAMPLES + min(len(sample.late), MOST_UNBACKED)
        family.samples = [*before[1 - most :], sample]

    def _make_template(self, family: CallFamily) -> None:
        """From all samples, or else from the last ones: those before may have taken another branch."""
        reason = ""
        for first in range(max(1, len(family.samples) - 1)):
            try:
                samples = family.samples[first:]
                sized = SizedCall(samples, self._recorder)
                is_verified = _foretells(samples, self._recorder)
            except NeedsMore:
                break
            except DoesNotFit as why:
                reason = str(why)
                continue
            family.sized, family.schedule, family.is_verified = sized, AuditSchedule(), is_verified
            family.tries = 0
            family.late_form = _late_form(sized)
            self._has_late_forms |= family.late_form is not None
            family.bound.clear()
            family.misfits.clear()
            return
        if reason:
            family.attempts += 1
            family.samples = family.samples[-2:]
            self._note(f"each size is captured by itself: {reason}")

    # ---------------------------------------------------------------- audits

    def agreed(self, variant: Variant) -> None:
        """An audit found that a call did what its template does."""
        if isinstance(variant, SizedVariant):
            variant.family.is_verified = True

    def differed(self, variant: SizedVariant, leaves: Sequence[Any], captured: Captured, asked: Any) -> bool:
        """An audit found a difference; whether calls were replayed before that."""
        family = variant.family
        was_trusted = family.is_verified
        family.sized = None
        family.bound.clear()
        family.attempts = _MOST_ATTEMPTS if was_trusted else family.attempts + 1
        if captured.template is not None and not was_trusted:
            self._keep(family, Sample(variant.sizes, captured, asked, ints_among(leaves)))
        return was_trusted


def _late_form(sized: SizedCall) -> UnbackedForm | None:
    try:
        return UnbackedForm(sized) if sized.has_unbacked_sizes else None
    except CannotBind:
        return None


def _foretells(samples: Sequence[Sample], recorder: Recorder) -> bool:
    """Whether the samples before the last predict it, so that no call need be audited first."""
    try:
        return SizedCall(samples[:-1], recorder, listens=False).predicts(samples[-1])
    except (NeedsMore, DoesNotFit):
        return False


def _free_arguments(sized: SizedCall) -> set[str]:
    return {f"argument {read.leaf}" for read in sized.last.template.read_free if hasattr(read, "leaf")}


__all__ = ["CallFamilies", "SizedVariant"]
