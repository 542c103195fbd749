"""Capture: one call runs as it always does, recorded, and what it did is written down as a template.

The call's operators on lazy tensors go into the running trace as ever; cuts that only send work off are left out, so
that the trace becomes one program where nothing is asked of it. What happens to ordinary tensors on the way (an
optimizer's step counts, a batch that is brought over) and to numbers read from them is written down step by step.

Invariant: a capture never changes what the call does. What a template could not bring about again by itself is a
reason in `refused`, and then there is no template.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchlazy.lazy import frames
from torchlazy.lazy.call_template import (
    FromGradient,
    FromStep,
    Host,
    HostCall,
    HostItem,
    HostKept,
    HostMade,
    HostNumber,
    LazyItem,
    Memory,
    Seed,
    Segment,
    Step,
    ToHost,
    ToLazy,
)
from torchlazy.lazy.capture_scalars import Expression, Known, TracedNumber, node_of, places_in, traced
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private import below_autograd
from torchlazy.lazy.trace import CutTrace

aten = torch.ops.aten
# Cuts that wait for nothing: within a captured call they are not needed.
_SENDS_OFF = frozenset({"optimizer step", "flush", "leaving lazy_mode", "trace length limit", "sync", "synchronize"})
END = "end of a compiled call"
_ITEM = aten._local_scalar_dense.default


class SyncInside(RuntimeError):
    """`fullgraph=True`: the call needs a value on the host."""


class Capture(TorchDispatchMode):
    """What one call does. `known` maps the storages that exist before it to where a replay finds them."""

    def __init__(
        self,
        recorder: Recorder,
        known: dict[int, Memory],
        hosts: dict[int, Host],
        *,
        fullgraph: bool = False,
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.fullgraph = fullgraph
        self.steps: list[Step] = []
        self.checks: list[tuple[Expression, Any]] = []
        self.refused = ""
        self.sources = 0
        self.places = 0
        self.hosts = 0
        self.operators = 0
        self.coincidences: set[Expression] = set()
        self._late: set[int] = set()  # sources known only once a program has run
        self._undoable: set[int] = set()  # of these: known while nothing was changed that existed before
        self._known = known
        self.known_before = frozenset(known)
        self.holders: dict[int, torch.Tensor] = {}  # a guarded tensor over each storage of the state, the widest
        self._made: weakref.WeakKeyDictionary[LazyStorage, FromStep] = weakref.WeakKeyDictionary()
        self.outputs: list[weakref.ref[LazyStorage]] = []
        self._host_of = dict(hosts)  # by identity; `_alive` keeps the identities
        self._alive: list[Any] = []
        self._histories: dict[int, Any] = {}
        self._items: dict[Any, int] = {}
        self.twins: dict[Any, list[torch.Tensor]] = {}
        self._current: dict[str, Expression] = {}
        self._depth = 0  # operators that the mode sees, one within another
        self._escapes: list[tuple[TracedNumber, tuple[int, int]]] = []
        self._seeds: dict[int, Expression] = {}
        self.scalar_expressions: dict[int, Expression] = {}  # of the running trace, by scalar number

    # ---------------------------------------------------------------- beginning and end

    def __enter__(self) -> Capture:
        assert self.recorder.capture is None
        self.recorder.capture = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.recorder.capture = None
        self._settle_escapes()

    def refuse(self, reason: str) -> None:
        """There will be no template; the first reason is told, with the user's line."""
        if not self.refused:
            frame = frames.user_frame()
            self.refused = f"{reason} ({frame})" if frame else reason

    def new_source(self, value: Any) -> Any:
        """The next number source, as the program sees it."""
        place, self.sources = self.sources, self.sources + 1
        return traced(value, Known(place), self)

    # ---------------------------------------------------------------- told by the recorder

    def lets_cut(self, cause: str) -> bool:
        """Whether a cut is needed; one that only sends work off is not."""
        if cause in _SENDS_OFF:
            return False
        if self.fullgraph and cause != END:
            raise SyncInside(
                f"torchlazy.compile(fullgraph=True): the call needs a value on the host ({cause}) at "
                f"{frames.user_frame() or 'an unknown line'}; return the tensor instead, or compile without fullgraph"
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
        sources = tuple(self._memory_of(storage) for storage in inputs)
        targets = tuple(self._target_of(storage) for storage in live)
        self.operators += len(trace.entries)
        expressions = self.expressions(scalars)
        self.scalar_expressions = {}
        self.steps.append(Segment(trace, sources, expressions, targets, cause, frame))
        self.outputs += [weakref.ref(storage) for storage in live]

    def expressions(self, scalars: Sequence[Any]) -> tuple[Expression, ...]:
        """How a replay gets the scalars of the running trace."""
        return tuple(
            self.scalar_expressions.get(number, self._seeds.get(value, value) if type(value) is int else value)
            for number, value in enumerate(scalars)
        )

    def fix_scalars_from(self, number: int) -> None:
        """Scalars from `number` on are those of a backward, which takes them as constants."""
        for later in [n for n in self.scalar_expressions if n >= number]:
            expression = self.scalar_expressions.pop(later)
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

    def ran_eagerly(self, op: torch._ops.OpOverload, reason: str) -> None:
        self.refuse(f"{op} ran at once: {reason}")

    def drew_seed(self, generator: torch.Generator | None, value: int) -> None:
        place, self.sources = self.sources, self.sources + 1
        self.steps.append(Seed(generator, place))
        self._seeds[value] = Known(place)

    def expression_for(self, value: float) -> Expression | None:
        """The expression behind a float argument of the operator that is being recorded."""
        return self._current.get(value.hex())

    def read_on_host(self, cause: str) -> None:
        """Python looks at memory by another way than an operator."""
        if self.fullgraph:
            self.lets_cut(cause)
        self.refuse(f"its Python reads a value on the host ({cause})")

    # ---------------------------------------------------------------- told by the traced numbers

    def branched(self, node: TracedNumber, outcome: bool, asserted: bool) -> None:
        if places_in(node.expression) & self._late - self._undoable:
            self.refuse("its Python branches on a value that the call computes after it has changed something")
        self.checks.append((node.expression, outcome))

    def escaped(self, node: TracedNumber, caller: tuple[int, int]) -> None:
        self._escapes.append((node, caller))

    def _fix(self, expression: Expression, value: Any) -> None:
        """The replay holds for this value of the expression only."""
        if places_in(expression) & self._late - self._undoable:
            self.refuse("its Python goes on with a value that the call computes after it has changed something")
        self.checks.append((expression, value))

    def _settle_escapes(self) -> None:
        for node, _ in self._escapes:
            self._fix(node.expression, node.value)
        self._escapes.clear()

    # ---------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.recorder.busy or func.namespace == "profiler":
            return func(*args, **kwargs)
        self._depth += 1
        try:
            return self._dispatch(func, args, kwargs)
        finally:
            self._depth -= 1

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        lazies, plains = _operands(args, kwargs)
        if func is _ITEM:
            return self._item(args[0])
        if not lazies and (self.recorder.mode_depth == 0 or self._is_host_only(plains, kwargs)):
            if plains:
                return self._host_call(func, args, kwargs)
            args, kwargs = self._numbers_in(func, args, kwargs)
            return self._factory(func, args, kwargs)
        args, kwargs = self._numbers_in(func, args, kwargs)
        result = func(*args, **kwargs)
        if not plains and type(result) is LazyTensor:
            return result
        self._across(func, args, kwargs, result, plains)
        return result

    def _is_host_only(self, plains: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Under `lazy_mode` ordinary tensors are recorded, but for single numbers that the trace knows nothing of."""
        if not plains:
            return False
        return all(
            type(t) is torch.Tensor
            and t.dim() == 0
            and t.device.type == "cpu"
            and not t.requires_grad
            and not self.recorder.is_in_trace(t)
            for t in plains
        )

    def _numbers_in(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with plain numbers. What the trace can take as an input is in `_current` by its value."""
        plan = self.recorder.plan(op) if isinstance(op, torch._ops.OpOverload) else None
        may_vary = plan is not None and op not in self.recorder.handlers
        positions = plan.varying_positions if plan is not None and may_vary else frozenset()
        names = plan.varying if plan is not None and may_vary else frozenset()
        self._current = {}
        plains: list[float] = []
        symbolic = False

        def number(value: Any, varying: bool) -> Any:
            nonlocal symbolic
            kind = type(value)
            if kind is list or kind is tuple:
                return kind([number(item, varying) for item in value])
            node = node_of(value)
            if node is None:
                if varying and kind is float:
                    plains.append(value)
                return value
            if not places_in(node.expression):
                return node.value
            symbolic = True
            if not (varying and type(node.value) is float) or not self._enter(node):
                self._fix(node.expression, node.value)
            return node.value

        if not self._escapes and not _has_numbers_of_ours(args, kwargs):
            return args, kwargs
        args = tuple([number(value, i in positions) for i, value in enumerate(args)])
        kwargs = {name: number(value, name in names) for name, value in kwargs.items()}
        if self._escapes:
            calling = _instructions()
            for escape in list(self._escapes):
                node, caller = escape
                if caller in calling and node.value in plains and self._enter(node):
                    plains.remove(node.value)
                    self._escapes.remove(escape)
            self._settle_escapes()
        for value in plains:  # a constant beside an expression of the same value: which is which cannot be told
            found = self._current.pop(value.hex(), None)
            if found is not None:
                self._fix(found, value)
                self.coincidences.add(found)
        return args, kwargs

    def _enter(self, node: TracedNumber) -> bool:
        """Let the operator's argument of this value be the node's expression; False where another one is there."""
        return self._current.setdefault(float(node.value).hex(), node.expression) == node.expression

    def _item(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, LazyTensor):
            value = self.recorder.constant(tensor)
            if value is not None:
                return value
            value = _ITEM(tensor)
            storage = tensor._storage_
            place, self.sources = self.sources, self.sources + 1
            self._late.add(place)
            if self._has_changed_nothing():
                self._undoable.add(place)
            self.steps.append(LazyItem(self._memory_of(storage), tensor._geometry, place))
            if type(value) is bool or type(value) is complex:
                self._fix(Known(place), value)
                return value
            return traced(value, Known(place), self)
        value = _ITEM(tensor)
        host = self._host(tensor)
        history = self._history(tensor)
        source = self._items.get(history)
        if source is None:
            source, self.sources = self.sources, self.sources + 1
            self._items[history] = source
            self.steps.append(HostItem(host, source))
            if any(isinstance(step, Segment) for step in self.steps):
                self._late.add(source)
                if self._has_changed_nothing():
                    self._undoable.add(source)
        if type(value) is bool or type(value) is complex:
            self._fix(Known(source), value)
            return value
        return traced(value, Known(source), self)

    def _has_changed_nothing(self) -> bool:
        """Whether the programs so far only made new values: a replay that goes another way here can be given up."""
        return all(
            isinstance(target, FromStep) for step in self.steps if isinstance(step, Segment) for target in step.targets
        )

    # ---------------------------------------------------------------- host tensors

    def _host(self, tensor: torch.Tensor) -> Host:
        found = self._host_of.get(id(tensor))
        if found is None:
            found = HostKept(tensor)
            self.refuse("it reads an ordinary tensor that neither its arguments nor the names in its code lead to")
            self._know(tensor, found)
        return found

    def _know(self, tensor: torch.Tensor, host: Host) -> None:
        self._host_of[id(tensor)] = host
        self._alive.append(tensor)

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

    def _host_call(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if op in (aten.lift_fresh.default, aten.lift.default) and id(args[0]) not in self._host_of:
            with below_autograd():
                constant = args[0].clone()  # the program makes it anew at each call
            kept = HostKept(constant, constant=True)
            self._know(constant, kept)
            result = op(*args, **kwargs)
            self.steps.append(HostCall(aten.clone.default, (kept,), (), (self.hosts,), ()))
            self._know(result, HostMade(self.hosts))
            self.hosts += 1
            return result
        self._settle_escapes()
        histories = _histories_before(args, self._history)
        hosts_args = _mapped(args, self._host)
        hosts_kwargs = {name: _mapped(value, self._host) for name, value in kwargs.items()}
        args, kwargs = _plain_numbers(args), {name: _plain_numbers(value) for name, value in kwargs.items()}
        result = op(*args, **kwargs)
        made: list[int | None] = []
        returned = _tensors_in(result)
        if isinstance(result, (bool, int, float)):
            self.refuse(f"{op} answers with a number")
        for item in returned:
            if isinstance(item, LazyTensor) or id(item) in self._host_of:
                made.append(None)
            else:
                self._know(item, HostMade(self.hosts))
                made.append(self.hosts)
                self.hosts += 1
        lazies = [item for item in returned if isinstance(item, LazyTensor)]
        if lazies:
            if op is aten._to_copy.default and len(lazies) == 1:
                self._bring_storage(op, hosts_args[0], tuple(hosts_kwargs.items()), lazies[0]._storage_)
            else:
                self.refuse(f"{op} makes a lazy tensor of ordinary ones")
            return result
        plan = self.recorder.plan(op)
        written = [args[i] for i in plan.written if i < len(args)]
        flat = [t for value in written for t in (value if isinstance(value, (list, tuple)) else (value,))]
        for position, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor):
                self._histories[id(tensor)] = (op, repr(kwargs), *histories(position, len(flat)))
        self.steps.append(
            HostCall(
                op,
                hosts_args,
                tuple(hosts_kwargs.items()),
                tuple(made),
                tuple(self._host(t) for t in flat if isinstance(t, torch.Tensor)),
            )
        )
        return result

    def _factory(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """No tensor goes in: a lazy tensor is made in the trace, an ordinary one on the host."""
        result = op(*args, **kwargs)
        made = _tensors_in(result)
        if made and not any(isinstance(item, LazyTensor) for item in made):
            for item in made:
                self._know(item, HostMade(self.hosts))
                self.hosts += 1
            places = tuple(range(self.hosts - len(made), self.hosts))
            self.steps.append(HostCall(op, tuple(args), tuple(kwargs.items()), places, ()))
        return result

    def _bring(self, op: Any, tensor: torch.Tensor, kwargs: tuple[tuple[str, Any], ...], storage: LazyStorage) -> None:
        self._bring_storage(op, self._host(tensor), kwargs, storage)

    def _bring_storage(self, op: Any, host: Host, kwargs: tuple[tuple[str, Any], ...], storage: LazyStorage) -> None:
        place, self.places = self.places, self.places + 1
        self.steps.append(ToLazy(op, host, kwargs, place))
        self._made[storage] = FromStep(place)

    def _across(self, op: Any, args: Any, kwargs: dict[str, Any], result: Any, plains: list[torch.Tensor]) -> None:
        """An operator on lazy tensors that took or gave ordinary ones too."""
        gives = [t for t in _tensors_in(result) if not isinstance(t, LazyTensor)]
        if self.recorder.mode_depth:  # under lazy_mode ordinary tensors are what is recorded
            return
        if any(t.dim() for t in plains) and not (op is aten.copy_.default and plains[0] is args[0]):
            self.refuse(f"{op} takes a tensor on {plains[0].device} beside lazy ones")
            return
        if not gives:
            return
        source = args[0] if args else None
        if op is aten._to_copy.default and isinstance(source, LazyTensor) and len(gives) == 1:
            memory = self._memory_of(source._storage_)
            self.steps.append(ToHost(op, memory, source._geometry, tuple(kwargs.items()), self.hosts))
            self._know(gives[0], HostMade(self.hosts))
            self.hosts += 1
            return
        self.refuse(f"{op} gives an ordinary tensor")

    # ---------------------------------------------------------------- lazy memory

    @property
    def gradients_used(self) -> bool:
        """Whether a segment reads or writes a gradient."""
        return any(
            isinstance(memory, FromGradient)
            for step in self.steps
            if isinstance(step, Segment)
            for memory in (*step.inputs, *step.targets)
        )

    def _memory_of(self, storage: LazyStorage) -> Memory:
        found: Memory | None = self._known.get(id(storage)) or self._made.get(storage)
        if found is None:
            found = self._unseen(storage)
        return found

    def _unseen(self, storage: LazyStorage) -> Memory:
        self.refuse(f"it reads a {storage.base.meta} that neither its arguments nor the names in its code lead to")
        place, self.places = self.places, self.places + 1
        return self._made.setdefault(storage, FromStep(place))

    def _target_of(self, storage: LazyStorage) -> Memory:
        found: Memory | None = self._known.get(id(storage)) or self._made.get(storage)
        if found is None:
            place, self.places = self.places, self.places + 1
            found = self._made[storage] = FromStep(place)
        return found

    def memory_of(self, storage: LazyStorage) -> Memory | None:
        """Where a storage comes from in a replay, for results and effects; None if it is not known."""
        return self._known.get(id(storage)) or self._made.get(storage)

    def host_of(self, tensor: torch.Tensor) -> Host | None:
        return self._host_of.get(id(tensor))


def _has_numbers_of_ours(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(
        node_of(item) is not None
        for value in (*args, *kwargs.values())
        for item in (value if isinstance(value, (list, tuple)) else (value,))
    )


def _instructions() -> set[tuple[int, int]]:
    """The instructions that are being executed, innermost frames first: torch's parser asks for a number's value while
    the very instruction runs that calls the operator."""
    found = set()
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            break
        found.add((id(frame), frame.f_lasti))
        frame = frame.f_back
    return found


def _operands(args: Any, kwargs: dict[str, Any]) -> tuple[bool, list[torch.Tensor]]:
    """Whether an operand is lazy, or the result will be; and the ordinary tensors among the operands."""
    lazies = False
    plains: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LazyTensor):
                lazies = True
            elif isinstance(item, torch.Tensor):
                plains.append(item)
    return lazies, plains


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _tensors_in(item)]
    return []


def _mapped(value: Any, host: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return host(value)
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(item, host) for item in value)
    node = node_of(value)
    return value if node is None else HostNumber(node.expression)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_numbers(item) for item in value)
    node = node_of(value)
    return value if node is None else node.value


def _histories_before(args: Any, history: Any) -> Any:
    """A function from (element, number of elements) to the histories that a written element's new value comes from."""
    before = [
        [history(item) for item in value]
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value)
        else history(value) if isinstance(value, torch.Tensor) else ("constant", _mapped_text(value))
        for value in args
    ]  # fmt: skip

    def of(position: int, count: int) -> tuple[Any, ...]:
        return tuple(
            value[position] if isinstance(value, list) and len(value) == count else _frozen(value) for value in before
        )

    return of


def _mapped_text(value: Any) -> Any:
    """A constant in a form that compares. Numbers of one expression each are one; lists of equal numbers are one."""
    items = [_mapped_text(item) for item in value] if isinstance(value, (list, tuple)) else None
    if items is not None:
        return items[0] if items and all(item == items[0] for item in items) else tuple(items)
    node = node_of(value)
    return node.expression if node is not None else repr(value)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


__all__ = ["END", "Capture", "SyncInside"]
