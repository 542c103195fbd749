"""The ways of one kind of call as a tree of what was asked of numbers: found by walking it, however many there are.

Templates of one callable ask the same of the same numbers until an answer differs. A node is what was asked and
answered so far; below it are the ways that have that in common.

Invariant: a way that would agree with the numbers known so far is among those found. Whether one that is found does,
is for who asks to check.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torchlazy.lazy.capture_scalars import Expression, evaluator, places_in

Checks = Sequence[tuple[Expression, Any]]


class Way(Protocol):
    """What is kept in the tree."""

    @property
    def checks(self) -> Checks:
        """What was asked of numbers, and the answers, in order."""


W = TypeVar("W", bound=Way)


class _Question(Generic[W]):
    """Something asked of numbers, and where each answer leads."""

    def __init__(self, expression: Expression) -> None:
        self._places = tuple(places_in(expression))
        self._value: Callable[[Any], list[Any]] = evaluator([expression])
        self.answers: dict[Hashable, _Node[W]] = {}

    def is_open(self, sources: Sequence[Any]) -> bool:
        """Whether it cannot be answered yet."""
        known = len(sources)
        return any(place >= known or sources[place] is None for place in self._places)

    def answered(self, sources: Sequence[Any]) -> _Node[W] | None:
        """Where the numbers lead, if a way goes there."""
        try:
            (value,) = self._value(sources)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return self.answers.get(_key(value))


class _Node(Generic[W]):
    def __init__(self) -> None:
        self.below: dict[W, None] = {}
        self.ends: dict[W, None] = {}
        self.questions: dict[Expression, _Question[W]] = {}


class WayTree(Generic[W]):
    """The ways of one kind of call."""

    def __init__(self) -> None:
        self._root: _Node[W] = _Node()

    def add(self, way: W) -> None:
        """One more."""
        node = self._root
        node.below[way] = None
        for expression, value in way.checks:
            question = node.questions.get(expression)
            if question is None:
                question = node.questions[expression] = _Question(expression)
            node = question.answers.setdefault(_key(value), _Node())
            node.below[way] = None
        node.ends[way] = None

    def remove(self, way: W) -> None:
        """It is no way any more."""
        node = self._root
        node.below.pop(way, None)
        for expression, value in way.checks:
            question = node.questions.get(expression)
            found = None if question is None else question.answers.get(_key(value))
            if question is None or found is None:
                return
            found.below.pop(way, None)
            if not found.below:
                del question.answers[_key(value)]
                if not question.answers:
                    del node.questions[expression]
                return
            node = found
        node.ends.pop(way, None)

    def find(self, sources: Sequence[Any]) -> Iterator[W]:
        """The ways that agree with the numbers known so far; None in `sources` is one that is not known."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from tuple(node.ends)
            for question in tuple(node.questions.values()):
                if question.is_open(sources):
                    for child in tuple(question.answers.values()):
                        yield from tuple(child.below)
                elif (found := question.answered(sources)) is not None:
                    nodes.append(found)


def _key(value: Any) -> Hashable:
    return type(value), value.hex() if type(value) is float else value


__all__ = ["WayTree"]
