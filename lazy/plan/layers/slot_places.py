"""Maps slots of a trace to buffers of its loop graph: which buffer holds which value, and in which form.

A call of the trace becomes primitives. Intermediate values inside a call have no slot: they are named by the call and
by an expression over its operands.

Invariant: a buffer that is reported to hold a slot, or a value inside of a call, holds that value in the form reported;
most values have no buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import fx
from torchlazy.inductor.ir import Buffer
from torchlazy.inductor.lowerings.value import LoweredValue
from torchlazy.lazy.plan.layers.shorten import TraceCalls, scalar_value
from torchlazy.lazy.trace.trace import CutTrace, Slot
from torchlazy.prims.meta import ScalarMeta, TensorMeta


@dataclass(frozen=True, slots=True)
class Alone:
    """What a call with a list argument computes from one element of it: an expression, by number, of `slot`."""

    slot: int
    expression: int


Inside: TypeAlias = "int | tuple[int, int] | Alone"
"""A slot, or (a slot that a call makes, the number of an expression of that call's operands), or of one of these."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A buffer between the steps of a split reduction that makes `whole`: the `number`-th of the split that `how`
    describes, the primitive first."""

    whole: Inside
    number: int
    how: Hashable


Place: TypeAlias = "Inside | Partial"

_SLOT = "slot"
"""The key of `node.meta`; passes copy it to a node's replacement, which is the same value."""


@dataclass(frozen=True, slots=True)
class BufferValue:
    """What a buffer holds: all of a value and nothing else. `form` is None where its layout and rounding are the
    trace's, else it says how they differ: another order of dimensions, or rounded elsewhere (`precision="fused"`)."""

    place: Place
    form: Hashable

    @property
    def slot(self) -> int:
        """The slot itself, or one of the same call."""
        return slot_of(self.place)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Of several values in one buffer the one of least rank names it."""
        return not isinstance(self.place, int), self.form is not None, self.slot


@dataclass(frozen=True, slots=True)
class Expression:
    """What a value inside of a call is: a primitive `op` of other expressions, by number, or an operand, by place."""

    op: Hashable
    parts: tuple[int, ...]
    operand: int | None = None


def slot_of(place: Place) -> int:
    """The slot of a place, or one that the same call makes."""
    match place:
        case Partial(whole=inside):
            return slot_of(inside)
        case Alone(slot=number):
            return number
        case int():
            return place
    return place[0]


def moved(place: Place, slot: int) -> Place:
    """The same place with another slot instead of that of `slot_of`."""
    match place:
        case Partial(whole=inside):
            return replace(place, whole=moved(inside, slot))  # type: ignore[arg-type]
        case Alone():
            return replace(place, slot=slot)
        case int():
            return slot
    return slot, place[1]


class SlotPlaces:
    """Follows slots through the stages, by tables that each stage fills."""

    def __init__(self, trace: CutTrace, calls: TraceCalls) -> None:
        self.trace, self.calls = trace, calls
        self.aten: dict[int, fx.Node] = {}  # by slot
        self.prims: dict[fx.Node, Any] = {}  # by node of the ATen graph
        self.lowered: dict[fx.Node, Any] = {}  # by node of the final graph
        self.partials: dict[fx.Node, tuple[Buffer, ...]] = {}  # likewise
        self.expressions: dict[int, int] = {}
        """By slot the number of its expression of its call's operands, where the primitives give one."""
        self.parts: list[Expression] = []
        """By number."""
        self._bearers: Counter[Any] | None = None

    def count(self, graph: fx.Graph) -> None:
        """Before a graph is split: counts the nodes that claim each slot, over the whole of it."""
        self._bearers = Counter(node.meta.get(_SLOT) for node in graph.nodes if "copy_of" not in node.meta)

    @staticmethod
    def forget(node: fx.Node) -> None:
        """The node is not quite what it was copied from."""
        node.meta.pop(_SLOT, None)

    def mark(self) -> None:
        """After decomposition: marks the primitives' nodes with the slot, or the value inside a call, that they are."""
        for number in sorted(self.aten):
            node = self._primitive(number)
            if node is not None:
                node.meta.setdefault(_SLOT, number)
        numbers: dict[Expression, int] = {}
        for call, (refs, outs) in enumerate(zip(self.calls.calls.refs, self.calls.calls.outs, strict=True)):
            inside = _Inside(numbers, self.parts, [self._primitive(number) for number in refs], refs, outs)
            for slot in outs:
                node = self._primitive(slot)
                expression = None if node is None else inside.expression(node)
                if expression is not None:
                    self.expressions[slot] = expression
            takes_list = self._has_list_argument(call)
            for node, expression in list(inside.found.items()):
                if expression is not None and _SLOT not in node.meta and node.all_input_nodes:
                    of_one_element = inside.of_one_element(expression) if takes_list else None
                    node.meta[_SLOT] = (outs[0], expression) if of_one_element is None else of_one_element

    def _has_list_argument(self, call: int) -> bool:
        if self.calls.element[call] is not None:
            return False
        args = self.trace.entries[self.calls.entry[call]].args
        return any(type(value) is tuple and any(type(one) is Slot for one in value) for value in args)

    def _primitive(self, slot: int) -> fx.Node | None:
        """What a slot became in decomposition."""
        node = self.aten.get(slot)
        found = None if node is None else self.prims.get(node)
        return found if isinstance(found, fx.Node) else None

    def by_buffer(self) -> dict[str, BufferValue]:
        """After lowering: what each buffer holds."""
        found: dict[str, BufferValue] = {}
        bearers = self._bearers
        if bearers is None:
            bearers = Counter(node.meta.get(_SLOT) for node in self.lowered if "copy_of" not in node.meta)
        for node, value in self.lowered.items():
            place = node.meta.get(_SLOT)
            if place is None or not isinstance(value, LoweredValue) or value.window is None:
                continue
            if bearers[place] > 1:
                continue  # a pass made several nodes of one, of which only the last is the value
            meta, window = node.meta["val"], value.window
            if not isinstance(meta, TensorMeta) or not (window.is_whole or window.is_permuted_whole):
                continue
            form: Hashable = meta.dtype, window.shape, window.strides
            if isinstance(place, int):
                own = self.trace.geometries[place].meta
                if (meta.shape, meta.device) != (own.shape, own.device):
                    continue
                if window.is_whole and value.is_stored_as_described and meta.dtype == own.dtype:
                    form = None
            held, known = BufferValue(place, form), found.get(window.root.name)
            if known is None or held.rank < known.rank:
                found[window.root.name] = held
        for node, buffers in self.partials.items():
            place = node.meta.get(_SLOT)
            if place is None or bearers[place] > 1:
                continue
            how = node.target, tuple([(b.dtype, b.shape, b.strides) for b in buffers])
            for number, buffer in enumerate(buffers):
                found.setdefault(buffer.name, BufferValue(Partial(place, number, how), how))
        return found


class _Inside:
    """The primitives of one call, as expressions of its operands; `numbers` and `parts` are those of all calls."""

    def __init__(
        self,
        numbers: dict[Expression, int],
        parts: list[Expression],
        nodes: list[fx.Node | None],
        refs: tuple[int, ...],
        outs: tuple[int, ...],
    ) -> None:
        self.numbers, self.parts, self.refs, self.outs = numbers, parts, refs, outs
        self.given: dict[fx.Node, int] = {}
        self.scalars: dict[str, int] = {}
        for place, (node, number) in enumerate(zip(nodes, refs, strict=True)):
            if number < 0:
                self.scalars.setdefault(f"scalar{scalar_value(number)}", place)
            elif node is not None:
                self.given.setdefault(node, place)
        self.found: dict[fx.Node, int | None] = {}

    def expression(self, node: fx.Node) -> int | None:
        """The number of a value's expression; None where a rule used nodes of another call."""
        todo = [node]
        while todo:
            one = todo[-1]
            if not (one in self.found or one in self.given or self._is_beyond(one)):
                missing = [operand for operand in one.all_input_nodes if operand not in self.found]
                if missing:
                    todo.extend(missing)
                    continue
            todo.pop()
            if one not in self.found:
                self.found[one] = self._number(one)
        return self.found[node]

    def of_one_element(self, number: int) -> Alone | None:
        """An expression that depends on one operand only; None where it is of several."""
        places = self._operands(number)
        if len(places) != 1 or self.refs[next(iter(places))] < 0:
            return None
        return Alone(self.refs[next(iter(places))], self._of_first(number))

    def _operands(self, number: int) -> set[int]:
        one = self.parts[number]
        if one.operand is not None:
            return {one.operand}
        return {place for part in one.parts for place in self._operands(part)}

    def _of_first(self, number: int) -> int:
        """The expression where its only operand is the first."""
        one = self.parts[number]
        if one.operand is not None:
            return self._intern(replace(one, operand=0))
        return self._intern(replace(one, parts=tuple([self._of_first(part) for part in one.parts])))

    def _is_beyond(self, node: fx.Node) -> bool:
        """Whether another call has made the node."""
        place = node.meta.get(_SLOT)
        return isinstance(place, tuple) or (place is not None and place not in self.outs)

    def _number(self, node: fx.Node) -> int | None:
        if node in self.given:
            return self._intern(Expression(None, (), self.given[node]))
        if isinstance(node.meta["val"], ScalarMeta) and node.op == "placeholder":
            place = self.scalars.get(str(node.target))
            return None if place is None else self._intern(Expression(None, (), place))
        if node.op != "call_function" or (node.all_input_nodes and self._is_beyond(node)):
            return None
        numbers = {operand: self.found[operand] for operand in node.all_input_nodes}
        if None in numbers.values():
            return None
        places = {operand: place for place, operand in enumerate(numbers)}
        op = node.target, _shape(node.args, places), _shape(node.kwargs, places), node.meta["val"]
        return self._intern(Expression(op, tuple(numbers.values())))  # type: ignore[arg-type]

    def _intern(self, expression: Expression) -> int:
        number = self.numbers.setdefault(expression, len(self.numbers))
        if number == len(self.parts):
            self.parts.append(expression)
        return number


def _shape(value: Any, places: dict[fx.Node, int]) -> Hashable:
    """An argument of a primitive, with places for its operands."""
    if isinstance(value, fx.Node):
        return fx.Node, places[value]
    if isinstance(value, (tuple, list)):
        return tuple([_shape(item, places) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _shape(item, places)) for name, item in value.items()])
    return type(value), repr(value)
