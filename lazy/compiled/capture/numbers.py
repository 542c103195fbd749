"""The numbers among an operator's arguments in a captured call: inputs of the trace with an expression, or constants.

Invariant: a number with an expression is an input of the trace, or else the template holds for its value only (`_fix`).
It is the latter where a constant has the same value and the two cannot be distinguished.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.record import CaptureRecord
from torchlazy.lazy.compiled.capture.threads import is_passing
from torchlazy.lazy.compiled.template.custom_ops import is_own
from torchlazy.lazy.numbers import followed as follow
from torchlazy.lazy.numbers.expr import (
    Applied,
    Expression,
    SourceRef,
    TracedNumber,
    evaluator,
    place_behind,
    places_in,
)
from torchlazy.lazy.numbers.tracked import node_of, traced
from torchlazy.lazy.trace.nested import map_nested
from torchlazy.lazy.trace.op_schema import OpPlan

_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "add_", "sub_", "mul_", "div_"})
# Torch makes workspaces before it calls the operator that was given the number.
_EMPTY = torch.ops.aten.empty.memory_format
_NONE: frozenset[str] = frozenset()


class OperatorNumbers(CaptureRecord):
    """What the capture knows of numbers among its operators' arguments."""

    _again: dict[str, dict[str, Expression]]  # by a backward operator: the plain numbers that it will get again
    _constants_again: dict[str, set[str]]  # constants among these
    _entered: list[tuple[Expression, Any]]  # inputs of the operator that is being recorded

    def _begin_numbers(self) -> None:
        self._again, self._constants_again, self._entered = {}, {}, []

    def _fix(self, expression: Expression, value: Any) -> None:
        if type(value) is int:
            expression, value = self._size_behind(expression, value)
        super()._fix(expression, value)

    def _size_behind(self, expression: Expression, value: int) -> tuple[Expression, int]:
        """The size that was read, and its value, where the expression follows from it alone: a sum with a constant
        (`x[n - 1]`), and, where the size itself is checked, a remainder of it. The quotient is a branch then."""
        is_remainder = isinstance(expression, Applied) and expression.operation == "mod"
        inner, by = expression.operands if is_remainder else (expression, 1)  # type: ignore[union-attr]
        place = place_behind(inner)
        if place is None or not self._is_read(place):
            return expression, value
        if is_remainder:
            if type(by) is not int or (SourceRef(place), int, repr(self.values[place])) not in self._checked:
                return expression, value
            quotient = Applied("floordiv", (inner, by))
            self._check(Applied("taken", (quotient,)), repr(*evaluator([quotient])(self.values)))
        return SourceRef(place), self.values[place]

    def _numbers_in(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with plain numbers. What can be an input of the trace is in `_current` by its value."""
        plan = self.recorder.plan(op) if isinstance(op, torch._ops.OpOverload) else None
        self._current = {}
        self._entered = []
        base = "" if plan is None else plan.base
        is_again = follow.is_again(base)
        if not (self._escapes or is_again or follow.backward_of(base)) and not _has_numbers_of_ours(args, kwargs):
            return args, kwargs
        varying, followed = _NONE, _NONE
        wants_gradient = False
        if plan is not None:
            is_recorded = op not in self.recorder.handlers
            varying = plan.varying if is_recorded else _NONE
            if plan.followed and (is_recorded or follow.is_handled(base)) and _is_floating(args):
                wants_gradient = _wants_gradient(args)
                stays = [name for name in plan.followed if not wants_gradient or follow.stays_known(base, name)]
                followed = frozenset(stays) if follow.may_be_followed(base, args) else _NONE
        counts = plan is not None and _accepts_int_as_float(op, args)
        plains: list[tuple[str, float]] = []

        def number(name: str, value: Any) -> Any:
            node = node_of(value)
            may_enter = name in varying or name in followed
            if node is None:
                if may_enter and type(value) is float:
                    if is_again and name in followed:
                        found = self._again.get(base, {}).get(value.hex())
                        if found is not None and self._current.setdefault(value.hex(), found) == found:
                            self._entered.append((found, value))
                            return value
                    plains.append((name, value))
                return value
            if not places_in(node.expression):
                return node.value
            if may_enter and type(node.value) is int and counts:
                if not self._fits(node):
                    raise OverflowError("int too big to convert")
                node = TracedNumber(float(node.value), Applied("sym_float", (node.expression,)), self)
            if not (may_enter and type(node.value) is float) or not self._enter(
                node, base, name, name in followed, wants_gradient
            ):
                self._fix(node.expression, node.value)
            return node.value

        names = () if plan is None else plan.names
        if self._escapes and plan is not None and followed:
            args, kwargs = _with_defaults(plan, followed, args, kwargs)
        args = tuple(
            [map_nested(partial(number, names[i] if i < len(names) else ""), value) for i, value in enumerate(args)]
        )
        kwargs = {name: map_nested(partial(number, name), value) for name, value in kwargs.items()}
        if self._escapes:
            self._find_escapes(op, base, plains, followed, wants_gradient)
        self._note_constants(plan, base, plains, followed)
        return args, kwargs

    def _fits(self, node: TracedNumber) -> bool:
        """Whether torch takes the int as a number: it refuses those beyond 64 bits. What a tensor gave has no more."""
        if isinstance(node.expression, SourceRef) and places_in(node.expression) & self._late:
            return True
        return node.asked("is_c_int", (node.value, node.expression))

    def _own_numbers(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
        """The arguments of a custom operator with tracked numbers, though C++ has their plain values; and whether there
        are such. It then runs at once, in replays too: its results' sizes may depend on them.

        Not where a gradient may be wanted: what the operator's backward makes of the number is its own.
        """
        if not is_own(op) or self.recorder.plan(op).kind == "composite":
            return args, kwargs, False
        if any(x.requires_grad for x in _tensors((*args, *kwargs.values()))):
            return args, kwargs, False
        calling = _instructions()
        groups: dict[str, list[Any]] = {}
        for escape in self._escapes:
            if escape[1] in calling:
                groups.setdefault(repr(float(escape[0].value)), []).append(escape)
        found: dict[str, TracedNumber] = {}
        plains = [repr(float(x)) for x in (*args, *kwargs.values()) if type(x) in (int, float)]
        for text, escapes in groups.items():
            node = escapes[0][0]
            same = all(other.expression == node.expression for other, _ in escapes)
            if same and plains.count(text) == len(escapes):  # else a constant of the same value is among them
                found[text] = node
                self._escapes = [escape for escape in self._escapes if escape not in escapes]

        def followed(value: Any) -> Any:
            node = found.get(repr(float(value))) if type(value) in (int, float) else None
            return value if node is None else traced(node.value, node.expression, self)

        args, kwargs = tuple(map(followed, args)), {name: followed(value) for name, value in kwargs.items()}
        nodes = filter(None, map(node_of, (*args, *kwargs.values())))
        return args, kwargs, any(places_in(node.expression) for node in nodes)

    def _find_escapes(
        self, op: Any, base: str, plains: list[tuple[str, float]], followed: frozenset[str], wants_gradient: bool
    ) -> None:
        """Numbers that C code took the value of, to call this very operator with it."""
        calling = _instructions()
        waiting = []
        for escape in list(self._escapes):
            node, caller = escape
            if caller not in calling:
                continue
            found = next(((name, value) for name, value in plains if value == node.value), None)
            if found is None and self.takes_number_later:
                narrow = node.applied("to_float32", (node.value, node.expression)).node
                found = next(((name, value) for name, value in plains if value == narrow.value), None)
                node = narrow
            if found is not None and self._enter(node, base, found[0], found[0] in followed, wants_gradient):
                plains.remove(found)
                self._escapes.remove(escape)
            elif op is _EMPTY or self.takes_number_later:
                waiting.append(escape)
                self._escapes.remove(escape)
        self._settle_escapes()
        self._escapes += waiting

    def _note_constants(
        self, plan: OpPlan | None, base: str, plains: Sequence[tuple[str, float]], followed: frozenset[str]
    ) -> None:
        """A constant beside an expression of the same value: the two cannot be distinguished."""
        backward = follow.backward_of(base)
        for name, value in plains:
            found = self._current.pop(value.hex(), None)
            if backward and name in followed:
                self._constants_again.setdefault(backward, set()).add(value.hex())
                found = found or self._again.get(backward, {}).pop(value.hex(), None)
            if found is not None:
                self._fix(found, value)
                self.coincidences.add(found)

    def _enter(self, node: TracedNumber, base: str, name: str, is_followed: bool, wants_gradient: bool) -> bool:
        """Let the operator's argument of this value be the node's expression; False where another one is there, or
        where the value is a constant of the trace."""
        value, expression = float(node.value), node.expression
        if not math.isfinite(value):
            return False
        found = [(value, expression)]
        if is_followed:
            found += follow.derived(base, value, expression)
        if any(self._current.get(number.hex(), wanted) != wanted for number, wanted in found):
            return False
        backward = follow.backward_of(base) if is_followed and wants_gradient else ""
        if backward:
            again = self._again.setdefault(backward, {})
            constants = self._constants_again.get(backward, ())
            if any(n.hex() in constants or again.get(n.hex(), wanted) != wanted for n, wanted in found):
                return False
            again.update({number.hex(): wanted for number, wanted in found})
        self._current.update({number.hex(): wanted for number, wanted in found})
        self._entered.append((expression, node.value))
        if is_followed:
            for question, answer in follow.questions(base, name, value, expression):
                self._check(question, answer)
        return True

    def _see_entered(self) -> None:
        """After the operator: what the recorder did not make an input is a constant of the trace."""
        for expression, value in self._entered:
            if expression not in self.scalar_expressions.values():
                self._fix(expression, value)  # torch leaves out what has its default value
                self.coincidences.add(expression)
        self._entered = []


def _with_defaults(
    plan: OpPlan, followed: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments, and numbers that torch left out because they have their default value."""
    found = list(args)
    for position, argument in enumerate(plan.op._schema.arguments):
        if argument.kwarg_only:
            if argument.name in followed and argument.name not in kwargs and type(argument.default_value) is float:
                kwargs = {**kwargs, argument.name: argument.default_value}
        elif position >= len(found):
            if argument.name in kwargs or not argument.has_default_value():
                break
            found.append(argument.default_value)
    return (found if any(name in followed for name in plan.names[len(args) : len(found)]) else args), kwargs


def _wants_gradient(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args))


def _is_floating(args: Sequence[Any]) -> bool:
    """Whether no tensor among the arguments holds whole numbers: what a fraction does to these is another thing."""
    return all(tensor.is_floating_point() or tensor.dtype is torch.bool for tensor in _tensors(args))


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [
        item
        for value in args
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, torch.Tensor)
    ]


def _accepts_int_as_float(op: Any, args: Sequence[Any]) -> bool:
    """Whether an int argument means what the float of its value means: arithmetic on floating values."""
    if op.overloadpacket.__name__ not in _ARITHMETIC or not args:
        return False
    first = args[0]
    return isinstance(first, torch.Tensor) and first.is_floating_point()


def _has_numbers_of_ours(args: Any, kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            if any([node_of(item) is not None for item in value]):
                return True
        elif node_of(value) is not None:
            return True
    return False


def _instructions() -> set[tuple[int, int]]:
    """The instructions that are being executed, innermost frames first, up to the first that is the program's: torch's
    parser asks for a number's value while the very instruction runs that calls the operator. Behind the program's own
    frame there is a call whose Python (of an operator defined there) may do anything with the number."""
    found = set()
    frame: FrameType | None = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            break
        found.add((id(frame), frame.f_lasti))
        if not is_passing(frame):
            break
        frame = frame.f_back
    return found


__all__ = ["OperatorNumbers"]
