"""Side exits: where a call does not continue like its template, the replay continues in another one that begins alike.

Templates of one callable that begin alike are a tree: they branch where a number read from the data, or the size of
what `nonzero` gave, was another one. A replay that finds such a number continues in the template that has it, with what
its own steps made so far. Nothing of the state has changed by then (compiled/replay/replay.py holds it back until the
last such number), so that where no template has it, all is undone and the Python runs.

Invariant: the steps that ran are, one by one, those of the template in which the replay continues; whatever this one
reads later is still there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torchlazy.lazy.compiled.replay.pairs import memory_read
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.difference import plain, step_difference

_MOST_SHARED = 4096


class SharedSteps:
    """How many steps two replays have in common at their beginning; remembered, weakly, by their `Steps`."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Steps, weakref.WeakKeyDictionary[Steps, int]] = (
            weakref.WeakKeyDictionary()
        )

    def count(self, first: Steps, second: Steps) -> int:
        """The number of equal steps at the beginning."""
        known = self._known.setdefault(first, weakref.WeakKeyDictionary())
        found = known.get(second)
        if found is None:
            found = known[second] = _shared(first, second)
        return found


class Steps:
    """The steps of a replay in the order in which they run."""

    def __init__(self, template: t.CallTemplate, steps: Sequence[t.Step]) -> None:
        self.template = template
        self.steps = tuple(steps)
        results = (*template.results, *(r for effect in template.effects for r in effect.results))
        self._read_at_end = {
            r.memory.place for r in results if isinstance(r, t.TensorResult) and type(r.memory) is t.FromStep
        }
        self._reads_from: dict[int, frozenset[int]] = {}

    def read_from(self, number: int) -> frozenset[int]:
        """The places made before step `number` that it, or what comes after it, reads."""
        found = self._reads_from.get(number)
        if found is None:
            later = {m.place for step in self.steps[number:] for m in memory_read(step) if type(m) is t.FromStep}
            made = {place for step in self.steps[:number] for place in _places_made(step)}
            found = self._reads_from[number] = frozenset((later | self._read_at_end) & made)
        return found


def _shared(first: Steps, second: Steps) -> int:
    a, b = first.template, second.template
    if a.free != b.free or a.kinds != b.kinds or a.twins != b.twins:
        return 0
    count = 0
    for old, new in zip(first.steps, second.steps, strict=False):
        if not is_same_step(old, new):
            break
        count += 1
    return count


def is_same_step(old: t.Step, new: t.Step) -> bool:
    """Whether two steps do the same. A `LazyCall` may give another size: this is where templates branch."""
    if old is new:
        return True
    if isinstance(old, t.LazyCall) and isinstance(new, t.LazyCall):
        return (old.op, old.made, old.sources, plain((old.args, old.kwargs))) == (
            new.op, new.made, new.sources, plain((new.args, new.kwargs)),
        )  # fmt: skip
    calls = isinstance(old, t.HostCall) and isinstance(new, t.HostCall)
    if calls and (old.made, plain(old.written)) != (new.made, plain(new.written)):  # type: ignore[union-attr]
        return False
    return not isinstance(old, t.JointRun) and not step_difference(old, new)


def _places_made(step: t.Step) -> list[int]:
    if isinstance(step, t.Segment):
        return [target.place for target in step.targets if isinstance(target, t.FromStep)]
    if isinstance(step, t.LazyCall):
        return [place for place in step.made if place is not None]
    return [step.place] if isinstance(step, t.ToLazy) else []


__all__ = ["SharedSteps", "Steps", "is_same_step"]
