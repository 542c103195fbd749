"""The record of a captured call: its steps, its number sources, and where its memory comes from.

Invariant: everything that a step names was there before the call (arguments, state that guards reach) or was made by an
earlier step; what is neither is a reason in `refused`, and then there is no template.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.escaped_numbers import EscapedNumbers
from torchlazy.lazy.compiled.capture.random import WatchedGenerators, set_state, state_of
from torchlazy.lazy.compiled.capture.threads import is_read_by_torch
from torchlazy.lazy.compiled.template.collective_step import collective_step
from torchlazy.lazy.compiled.template.custom_ops import DRAWS, changes_state
from torchlazy.lazy.compiled.template.template import (
    Collective,
    FromGradient,
    FromStep,
    Host,
    HostItem,
    HostKept,
    HostMade,
    LazyCall,
    LazyItem,
    Memory,
    Seed,
    Segment,
    Step,
    ToLazy,
)
from torchlazy.lazy.compiled.template.views import ArgumentView
from torchlazy.lazy.numbers.expr import Applied, Expression, SourceRef, TracedNumber, places_in
from torchlazy.lazy.numbers.questions import SizeQuestions
from torchlazy.lazy.numbers.tracked import traced
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.sliced_read import SlicedTrace
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.run.sync_policy import SyncInside
from torchlazy.lazy.torch_private.autograd_layout import have_one_version
from torchlazy.lazy.torch_private.dispatch import below_autograd, memory_key
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import is_dense
from torchlazy.lazy.trace.op_schema import draws_at_run_time
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace

aten = torch.ops.aten
# Cuts that wait for nothing: within a captured call they are not needed.
_SENDS_OFF = frozenset({"optimizer step", "flush", "leaving lazy_mode", "trace length limit", "sync", "synchronize"})
_FEW_READS, _WORTH_A_READ = 64, 8  # reads of values in a call, and operators for each
END = "end of a compiled call"


class CaptureRecord:
    """What one call does. `known` maps the storages that exist before it to where a replay finds them."""

    sources: int
    places: int
    hosts: int
    _draws = False  # the trace that was cut last, when it runs
    _current: dict[str, Expression]  # what the operator that is being recorded gets, by its value

    def __init__(
        self,
        recorder: Recorder,
        known: dict[int, Memory],
        hosts: dict[int, Host],
        *,
        fullgraph: bool = False,
    ) -> None:
        self.recorder = recorder
        self.fullgraph = fullgraph
        self.listens = True
        self.draws_from: Sequence[torch.Generator] = ()  # generators of its own that the call is known to draw from
        self.windows: list[ArgumentView] = []  # argument views that copies stand for
        self.taken: list[ArgumentView] = []  # and those that copies stood for at first
        self.changed_forms: set[int] = set()  # tensors from outside that are on other memory or in another form now
        self.themselves: Any = None  # the WindowsThemselves of this call, if it was given any
        self.asked: SizeQuestions | None = None  # records what the Python asks of sizes
        self.asked_of_views = False  # whether the program asked for the address of one of them
        self._may_run_at_once: Any = None  # the operator that the program has just called, if a replay may run it so
        self._ran_at_once = ""  # why it did
        self.runs_now: Any = None  # the operator that is to
        self.takes_number_later = False  # whether the function that runs uses its number once, after other operators
        self.needs_gradients = False  # whether an argument or a part of the state does
        self.follows = True  # whether numbers that are read are tracked; else each is fixed
        self.steps: list[Step] = []
        self.sliced_reads: set[int] = set()  # those of them, by identity, that are sliced reads
        self.own_recorded: dict[torch._ops.OpOverload, None] = {}  # custom operators, as entries of a trace
        self.generators = WatchedGenerators(self.steps, self.quietly, self._refuse_seeds)
        self.checks: list[tuple[Expression, Any]] = []
        self.values: dict[int, Any] = {}  # of number sources, as they were
        self._checked: set[Any] = set()
        self.refused = ""
        self.sources = 0
        self.places = 0
        self.hosts = 0
        self.operators = 0
        self.coincidences: set[Expression] = set()
        self._late: set[int] = set()  # sources known only once a program has run
        self._undoable: set[int] = set()  # of these: known before anything that existed before was changed
        self._known = known
        self.known_before = frozenset(known)
        self.holders: dict[int, torch.Tensor] = {}  # a guarded tensor over each storage of the state, the widest
        self._made: weakref.WeakKeyDictionary[LazyStorage, FromStep] = weakref.WeakKeyDictionary()
        self.outputs: list[weakref.ref[LazyStorage]] = []
        self.gradients_used = False  # whether a step reads or writes one, or it is a result
        self.gradients: dict[int, torch.Tensor] = {}  # whose gradient a tensor was when the call began, by identity
        self.gradients_on_host: dict[int, torch.Tensor] = {}  # of those, gradients that steps take as they are
        self._host_of = dict(hosts)  # by identity; `_alive` keeps the identities
        self._memory_of_made: dict[int, Any] = {}  # of those that operators on ordinary tensors made
        self._alive: list[Any] = []
        self._brought: set[int] = set()  # storages of ordinary tensors that host operators made
        self._histories: dict[int, Any] = {}
        self._items: dict[Any, int] = {}
        self.twins: dict[Any, list[torch.Tensor]] = {}
        self._current = {}
        self._depth = 0  # operators that the mode sees, one within another
        self._escapes: list[tuple[TracedNumber, tuple[int, int]]] = []
        self._lines: dict[Expression, str] = {}  # where the plain value of an expression was taken
        self.retaining: list[weakref.ref[torch.Tensor]] = []  # tensors that `retain_grad` was called of
        self.hooked = False  # whether a tensor got a hook in it
        self.numbers_left = EscapedNumbers()
        self._seeds: dict[int, Expression] = {}
        self.scalar_expressions: dict[int, Expression] = {}  # of the running trace, by scalar number

    def refuse(self, reason: str, frame: str = "") -> None:
        """There will be no template; the first reason is reported, with the user's line (`frame`, where given)."""
        if not self.refused:
            frame = frame or user_frames.user_frame()
            self.refused = f"{reason} ({frame})" if frame else reason

    def refuse_scattered_reads(self) -> None:
        """A replay that does little else than read values one by one is slower than the Python."""
        reads = sum(isinstance(step, (HostItem, LazyItem)) for step in self.steps)
        if reads > _FEW_READS and self.operators < _WORTH_A_READ * reads:
            self.refuse(f"it hardly does more than read values one by one: {reads} of them")

    def number_of(self, value: Any, source: int) -> Any:
        """The value of a number source, as the program gets it."""
        self.values[source] = value
        if type(value) is bool:
            self._check(SourceRef(source), value)
            return value
        if type(value) is complex or not (self.follows or is_read_by_torch()):
            self.taken_plain(TracedNumber(value, SourceRef(source), self))
            self._fix(SourceRef(source), value)
            return value
        return traced(value, SourceRef(source), self)

    def new_source(self, value: Any) -> Any:
        """The next number source, as the program sees it."""
        place, self.sources = self.sources, self.sources + 1
        self.values[place] = value
        return traced(value, SourceRef(place), self)

    # ---------------------------------------------------------------- called by the recorder

    def lets_cut(self, cause: str) -> bool:
        """Whether a cut is needed; one that only sends work off is not."""
        if cause in _SENDS_OFF:
            return False
        if self.fullgraph and cause != END:
            raise SyncInside(
                f"torchlazy.compile(fullgraph=True): the call needs a value on the host ({cause}) at "
                f"{user_frames.user_frame() or 'an unknown line'}; "
                "return the tensor instead, or compile without fullgraph"
            )
        return True

    def segment(
        self,
        trace: CutTrace,
        inputs: Sequence[LazyStorage],
        scalars: Sequence[Any],
        live: Sequence[LazyStorage],
        cause: str,
        frame: str,
    ) -> None:
        """A trace was cut."""
        self._draws = draws_at_run_time(trace)
        if self._draws:
            self.generators.before_program()
        sources = tuple(self._memory_of(storage) for storage in inputs)
        targets = tuple(self._target_of(storage) for storage in live)
        self.operators += len(trace.entries)
        expressions = self.expressions(scalars)
        self.scalar_expressions = {}
        self.steps.append(Segment(trace, sources, expressions, targets, cause, frame))
        self.outputs += [weakref.ref(storage) for storage in live]

    def segment_ran(self) -> None:
        """The trace that was cut last was run."""
        if self._draws:
            self.generators.after_program()

    def sliced_segment(self, found: SlicedTrace, made: LazyStorage, cause: str, frame: str) -> None:
        """A sliced read: what leads to the number ran separately, without a cut, and the running trace continues."""
        sources = tuple(self._memory_of(self.recorder.inputs[position][1]) for position in found.inputs)
        scalars = self.expressions(self.recorder.scalars)
        numbers = tuple(scalars[i] for i in found.scalars)
        step = Segment(found.trace, sources, numbers, (self._target_of(made),), cause, frame)
        self.steps.append(step)
        self.sliced_reads.add(id(step))

    def expressions(self, scalars: Sequence[Any]) -> tuple[Expression, ...]:
        """How a replay gets the scalars of the running trace."""
        return tuple(self.expression_of(number, value) for number, value in enumerate(scalars))

    def expression_of(self, number: int, value: Any) -> Expression:
        """The same of one of them."""
        found: Expression = self._seeds.get(value, value) if type(value) is int else value
        return self.scalar_expressions.get(number, found)

    def scalars_followed(self, first: int) -> tuple[int, ...]:
        """Numbers of the running trace's scalars from `first` on that a replay knows: they follow from its sources."""
        seeds = {n for n, v in enumerate(self.recorder.scalars) if type(v) is int and v in self._seeds}
        return tuple(sorted(n for n in {*seeds, *self.scalar_expressions} if n >= first))

    def fix_scalars_from(self, number: int, but: Sequence[int] = ()) -> None:
        """Scalars from `number` on are those of a backward, where they are constants, `but` those."""
        for later in [n for n in self.scalar_expressions if n >= number]:
            expression = self.scalar_expressions.pop(later)
            if later in but:
                continue
            self._fix(expression, self.recorder.scalars[later] if later < len(self.recorder.scalars) else None)

    def host_operand(self, tensor: torch.Tensor, storage: LazyStorage) -> None:
        """A 0-dim ordinary tensor among lazy operands became an input of the trace, by a copy."""
        self._bring(None, tensor, (), storage)

    def moved(self, source: torch.Tensor, storage: LazyStorage) -> None:
        """An ordinary tensor was brought to the compute device. `torch.tensor(data, device="lazy")` does so without an
        operator that a mode sees: its data is a constant of the call."""
        if not self._depth:
            constant = HostKept(source.detach().clone(), constant=True)
            self._bring_storage(aten._to_copy.default, constant, (), storage)

    def _refuse_seeds(self, reason: str) -> None:
        if DRAWS.suspect(self.own_recorded):
            reason = "a random generator moved where operators of the program ran: these run at once from now on"
        self.refuse(reason)

    def communicates(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """A collective on memory is about to run; whether replays run it too."""
        step = collective_step(op, args, kwargs, self._memory_of)
        if step is not None:
            self.steps.append(step)
        return step is not None

    def ran_eagerly(self, op: torch._ops.OpOverload, reason: str) -> None:
        if op is self._may_run_at_once:
            self._may_run_at_once, self._ran_at_once = None, reason
        else:
            self.refuse(f"{op} ran at once: {reason}")

    @contextlib.contextmanager
    def random_again(self) -> Iterator[None]:
        """Inside, a backward is recorded: seeds that its checkpoints draw again are those of the call, and generators
        stand afterwards where they stood."""
        states = [(generator, self.quietly(partial(state_of, generator))) for generator in self.generators.watched]
        self.generators.listens = False
        try:
            yield
        finally:
            self.generators.listens = True
            for generator, state in states:
                self.quietly(partial(set_state, generator, state))

    def drew_seed(self, generator: torch.Generator | None, value: int) -> None:
        if not self.generators.listens:
            if value not in self._seeds:
                self.refuse("a result needs a gradient, and its backward draws random numbers")
            return
        place, self.sources = self.sources, self.sources + 1
        self.steps.append(Seed(generator, place))
        self._seeds[value] = SourceRef(place)
        self.generators.drew(generator)

    def quietly(self, read: Callable[[], Any]) -> Any:
        """Run what the record itself needs, unrecorded."""
        busy, self.recorder.busy = self.recorder.busy, True
        try:
            return read()
        finally:
            self.recorder.busy = busy

    def expression_for(self, value: float) -> Expression | None:
        """The expression behind a float argument of the operator that is being recorded."""
        return self._current.get(value.hex())

    def followed_among(self, positions: frozenset[int], args: Sequence[Any]) -> frozenset[int]:
        """Those of the positions whose argument is a float with an expression."""
        return frozenset(i for i in positions if i < len(args) and self._is_followed(args[i]))

    def followed_named(self, names: frozenset[str], kwargs: dict[str, Any]) -> frozenset[str]:
        """The same of named arguments."""
        return frozenset(name for name in names if self._is_followed(kwargs.get(name)))

    def _is_followed(self, value: Any) -> bool:
        if type(value) in (list, tuple):
            return any(map(self._is_followed, value))
        return type(value) is float and value.hex() in self._current

    def read_on_host(self, cause: str) -> None:
        """Python reads memory in another way than by an operator."""
        if self.fullgraph:
            self.lets_cut(cause)
        self.refuse(
            f"its Python reads a value on the host ({cause}); return the tensor, and read it outside of the call"
        )

    def lends(self, tensor: torch.Tensor, cause: str) -> None:
        """Somebody gets its memory, who may keep it: where it is an argument view's, the argument's own."""
        self.read_on_host(cause)
        if self.themselves is not None:
            self.themselves.lend(tensor)

    def bring_made(self, tensor: torch.Tensor) -> None:
        """Under `lazy_mode`: a number that host operators made (a reciprocal of a scale) is an input of the trace."""
        host = self.host_of(tensor)
        if isinstance(host, HostMade):
            storage = self.recorder.storage_of_plain(tensor)
            if self.memory_of(storage) is None:
                self._alive.append(storage)
                self._brought.add(id(storage))
                self._bring_storage(None, host, (), storage)

    def handed_over(self, storage: LazyStorage) -> None:
        """Under `lazy_mode`: an ordinary tensor is on this memory from now on; it is known as long as the call runs."""
        self._alive.append(storage)

    def bring_constant(self, tensor: torch.Tensor) -> None:
        """Under `lazy_mode`: a tensor that is just being made of the program's data is made anew at each replay."""
        if id(tensor) in self._host_of:
            return
        storage = self.recorder.storage_of_plain(tensor)
        if self.memory_of(storage) is None:
            with below_autograd():
                constant = HostKept(tensor.detach().clone(), constant=True)
            self._alive.append(storage)
            self._bring_storage(None, constant, (), storage)

    def _bring(self, op: Any, tensor: torch.Tensor, kwargs: tuple[tuple[str, Any], ...], storage: LazyStorage) -> None:
        self._bring_storage(op, self._host(tensor), kwargs, storage)

    def _bring_storage(self, op: Any, host: Host, kwargs: tuple[tuple[str, Any], ...], storage: LazyStorage) -> None:
        place, self.places = self.places, self.places + 1
        self.steps.append(ToLazy(op, host, kwargs, place))
        self._made[storage] = FromStep(place)

    # ---------------------------------------------------------------- called by the tracked numbers

    def branched(self, node: TracedNumber, outcome: bool, asserted: bool) -> None:
        self._check(node.expression, outcome)

    def escaped(self, node: TracedNumber, caller: tuple[int, int]) -> None:
        self._escapes.append((node, caller))
        if places_in(node.expression) & self._late:
            self._lines.setdefault(node.expression, user_frames.user_frame())

    def taken_plain(self, node: TracedNumber) -> None:
        """An int that was read is a size to operators. What Python does by it is not seen, so each value is a branch of
        its own: other captures tell nothing of it."""
        if type(node.value) is int and any(map(self._is_read, places_in(node.expression))):
            self._check(Applied("taken", (node.expression,)), repr(node.value))

    def _is_read(self, place: int) -> bool:
        """Whether the source is what a tensor gave."""
        return place in self._late or place in self._items.values()

    def made(self, number: Any) -> None:
        if self.listens:
            self.numbers_left.made(number)

    def _fix(self, expression: Expression, value: Any) -> None:
        """The replay holds for this value of the expression only."""
        if type(value) is not int and places_in(expression) & self._late - self._undoable:  # a size may come again
            self.refuse(
                "its Python goes on with a value that the call computes after it has changed something; return the "
                "number, and format or use it outside of the call",
                self._lines.get(expression, ""),
            )
        self._check(expression, value)

    def _check(self, expression: Expression, value: Any) -> None:
        """Each expression is checked once for a value: all parameters of an optimizer ask the same."""
        key = (expression, type(value), repr(value))
        if key not in self._checked:
            self._checked.add(key)
            self.checks.append((expression, value))
            if places_in(expression) & self._late and any(map(_communicates, self.steps)):
                self.refuse(
                    "it goes on with a value behind a functional collective, which would run again where the value is "
                    "another one; use torch.distributed.all_reduce and the like, which do not"
                )

    def _settle_escapes(self) -> None:
        for node, _ in self._escapes:
            self._fix(node.expression, node.value)
        self._escapes.clear()

    def _has_changed_nothing(self) -> bool:
        """Whether the programs so far only made new values: a replay can still leave by a side exit, or be given up."""
        if any(isinstance(step, Collective) for step in self.steps):  # others would wait for this process
            return False
        if any(isinstance(step, LazyCall) and changes_state(step) for step in self.steps):
            return False
        return all(
            isinstance(target, FromStep) for step in self.steps if isinstance(step, Segment) for target in step.targets
        )

    # ---------------------------------------------------------------- host tensors

    def _host(self, tensor: torch.Tensor) -> Host:
        found = self.host_of(tensor)
        if found is None:
            found = HostKept(tensor)
            self.refuse("it reads an ordinary tensor that neither its arguments nor the names in its code lead to")
            self._know(tensor, found)
        if id(tensor) in self.gradients:
            self.gradients_on_host[id(tensor)] = tensor
        return found

    def _know(self, tensor: torch.Tensor, host: Host) -> None:
        self._host_of[id(tensor)] = host
        self._alive.append(tensor)
        if isinstance(host, HostMade) and is_dense(tensor):
            self._memory_of_made[id(tensor)] = memory_key(tensor)

    def _history(self, tensor: torch.Tensor) -> Any:
        """What the value of a host tensor came from: equal histories are equal values, now and in each replay."""
        found = self._histories.get(id(tensor))
        if found is None:
            host = self._host(tensor)
            if isinstance(host, HostKept) and tensor.dim() == 0:
                with below_autograd():
                    found = ("kept", tensor.dtype, repr(tensor.item()))
                self.twins.setdefault(found, []).append(tensor)
            else:
                found = ("alone", id(tensor))
            self._histories[id(tensor)] = found
        return found

    def argument_view_of(self, tensor: Any) -> torch.Tensor | None:
        """The argument view that the tensor is a copy of, or the same view of it that the tensor is of the copy."""
        for window in self.windows:
            if tensor is window.copy and not window.is_changed():
                return window.given
            if tensor is window.copy or (
                isinstance(tensor, LazyTensor) and tensor._storage_ is self.recorder.storage_of_plain(window.alias)
            ):
                found: torch.Tensor | None = self.quietly(partial(window.seen, tensor))
                self.asked_of_views |= found is None  # later calls are given the view itself
                return found
        return None

    def counts_with_copy(self, tensor: LazyTensor) -> bool:
        """Whether a write to the tensor counts as one to the argument view's copy whose memory it is on."""
        copies = (
            window.copy for window in self.windows if self.recorder.storage_of_plain(window.alias) is tensor._storage_
        )
        return tensor.is_inference() or any(copy.is_inference() or have_one_version(tensor, copy) for copy in copies)

    # ---------------------------------------------------------------- lazy memory

    def _memory_of(self, storage: LazyStorage) -> Memory:
        found = self.memory_of(storage)
        if found is None:
            found = self._unseen(storage)
        return found

    def _unseen(self, storage: LazyStorage) -> Memory:
        self.refuse(f"it reads a {storage.base.meta} that neither its arguments nor the names in its code lead to")
        place, self.places = self.places, self.places + 1
        return self._made.setdefault(storage, FromStep(place))

    def _target_of(self, storage: LazyStorage) -> Memory:
        if id(storage) in self._brought:
            self.refuse("it writes to an ordinary tensor that operators on ordinary tensors made")
        found = self.memory_of(storage)
        if found is None:
            place, self.places = self.places, self.places + 1
            found = self._made[storage] = FromStep(place)
        return found

    def _new_place(self, storage: LazyStorage) -> int:
        """For memory that a step makes, which the call may hold on to."""
        place, self.places = self.places, self.places + 1
        self._made[storage] = FromStep(place)
        self.outputs.append(weakref.ref(storage))
        return place

    def memory_of(self, storage: LazyStorage) -> Memory | None:
        """Where a storage comes from in a replay; None if it is not known."""
        found: Memory | None = self._known.get(id(storage)) or self._made.get(storage)
        self.gradients_used |= isinstance(found, FromGradient)
        return found

    def storages_made(self) -> set[int]:
        """The storages that steps made, by identity."""
        return set(map(id, self._made))

    def let_go(self) -> None:
        """The call is over: what it made lives only where it is held elsewhere."""
        self._alive.clear()

    def host_of(self, tensor: torch.Tensor) -> Host | None:
        """Where an ordinary tensor comes from in a replay; None if it is not known."""
        memory = self._memory_of_made.get(id(tensor))
        if memory is not None and memory != memory_key(tensor):
            self.refuse("it gives an ordinary tensor that it makes other memory (`.data = `, `swap_tensors`)")
        return self._host_of.get(id(tensor))


def _communicates(step: Step) -> bool:
    """Whether the step is a program with functional collectives inside."""
    return isinstance(step, Segment) and any(entry.op.namespace == "_c10d_functional" for entry in step.trace.entries)


__all__ = ["END", "CaptureRecord"]
