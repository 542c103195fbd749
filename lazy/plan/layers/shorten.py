"""Shortens a trace of many equal layers by leaving most of them out; the shorter trace is planned instead.

Calls outside of the layers may read all of them (clipping gradients by the norm of all of them): values of layers that
are left out are then inputs of the shorter trace, each read by one call that stands for what makes it in the long one.

A foreach operator counts as one call for each element of its lists.

Invariant: the shorter trace is a legal trace. Whether the longer one is the same with more layers is not decided here
but in plan/layers/check.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchlazy.lazy.plan.layers.detect import Calls, Layers, find_layers, find_runs
from torchlazy.lazy.plan.layers.sums import without_sums
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.trace import CutTrace, Entry, Half, ScalarSlot, Slot, scalar_slot, slot
from torchlazy.prims.meta import contiguous_strides

KEPT_LAYERS = 3
"""Layers kept before those that are left out, and after: near the ends plans differ."""

_KEPT = ((1, KEPT_LAYERS, KEPT_LAYERS), (3, 6, 6))
"""(with how many layers the schedule is thought to repeat, layers kept before, and after)"""

_OFTEN = 6
"""Of several stacks of layers one may repeat with each second layer, another with each third: a multiple of so many is
left out there."""

FEWEST_LEFT_OUT = 8
"""Where the schedule turns out not to repeat, planning the shorter trace was for nothing: it must be half as long."""

_MOST_STACKS = 3
"""Stacks of layers that read nothing of each other's, such as an encoder and a decoder: layers of one number are left
out of all of them."""

_LEAST_REPETITIONS = 2 * KEPT_LAYERS + FEWEST_LEFT_OUT

_CONVERT = torch.ops.aten._to_copy.default
_HALVES = (torch.float16, torch.bfloat16)

# Opaque functions: no pass sees through them; the one of tensors is a library call, which is never fused.
_NUMBER_STAND_IN = torch.ops.aten.neg.default
_STAND_IN = torch.ops.aten.cumsum.default

# Not element by element: their factors are the elements of one tensor.
_JOINED = ("_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor")


@dataclass(frozen=True)
class TraceCalls:
    """A trace as calls over slot numbers. `entry` and `element` say where each call stands; element None: all of it."""

    calls: Calls
    entry: list[int]
    element: list[int | None]
    maker: dict[int, tuple[int, int]]  # slot -> (call, which of its results)


@dataclass(frozen=True)
class ShortTrace:
    """`short` is `long` without the layers from `first` on, `left_out` of them; `slots` maps its slots to long ones."""

    long: CutTrace
    short: CutTrace
    first: int
    left_out: int
    layers: Layers  # of the long trace's calls and slots
    long_calls: TraceCalls
    short_calls: TraceCalls
    slots: dict[int, int]
    extra: frozenset[int] = frozenset()
    """Inputs of `short` that stand for values of layers that are left out; the one call that reads such an input makes
    what `slots` has for the value."""
    least: int = 0
    """The schedule of `short` has at least so many equal periods."""
    single: tuple[int, int, Layers] | None = None
    """`first`, `left_out` and `layers`, where these count several layers as one: with each counted."""

    @property
    def period(self) -> int:
        """How many layers count as one."""
        return 1 if self.single is None else self.single[1] // self.left_out

    @property
    def kept(self) -> int:
        return (self.least + 1) * self.period

    def can_count_by(self, period: int) -> bool:
        left_out = self.left_out if self.single is None else self.single[1]
        return left_out % period == 0 and self.kept // period > KEPT_LAYERS

    def short_layer(self, layer: int) -> int:
        """The layer's number among those that are left."""
        return layer if layer < self.first else layer - self.left_out

    def single_layer(self, layer: int) -> int:
        """The same of layers that are counted one by one."""
        first, left_out, _ = self.single or (self.first, self.left_out, None)
        return layer if layer < first else layer - left_out


def calls_of(trace: CutTrace) -> TraceCalls:
    """The calls of a trace that some output needs; keys tell operators, constants and geometries."""
    geometries = trace.geometries
    keys: list[Hashable] = []
    refs: list[tuple[int, ...]] = []
    outs: list[tuple[int, ...]] = []
    entries: list[int] = []
    elements: list[int | None] = []
    maker: dict[int, tuple[int, int]] = {}
    needed = trace.needed

    def add(key: Hashable, arguments: Any, results: Any, position: int, element: int | None) -> None:
        read: list[int] = []
        structure = _structure(arguments, read, geometries)
        made: list[int] = []
        shape = _structure(results, made, geometries)
        for number, value in enumerate(made):
            maker[value] = len(keys), number
        keys.append((key, structure, shape))
        refs.append(tuple(read))
        outs.append(tuple(made))
        entries.append(position)
        elements.append(element)

    for position, entry in enumerate(trace.entries):
        if position not in needed:
            continue
        if is_elementwise(entry):
            for element, result in enumerate(entry.outputs):
                arguments = tuple(_element(value, element) for value in entry.args)
                keywords = tuple((name, _element(value, element)) for name, value in entry.kwargs)
                add((entry.op, "element"), (arguments, keywords), result, position, element)
        else:
            add(entry.op, (entry.args, entry.kwargs), entry.outputs, position, None)
    return TraceCalls(Calls(keys, refs, outs), entries, elements, maker)


def is_elementwise(entry: Entry) -> bool:
    """Whether the call is one of each element of its lists."""
    name = entry.op.name().removeprefix("aten::")
    if not name.startswith("_foreach_") or name in _JOINED or type(entry.outputs) is not tuple:
        return False
    lists = [value for value in (*entry.args, *(value for _, value in entry.kwargs)) if type(value) is tuple]
    return bool(lists) and all(len(values) == len(entry.outputs) for values in lists)


def scalar_value(number: int) -> int:
    """A runtime scalar as a value among slots."""
    return -1 - number


def _element(value: Any, element: int) -> Any:
    return value[element] if type(value) is tuple else value


def _structure(value: Any, found: list[int], geometries: tuple[Geometry, ...]) -> Hashable:
    """The value with geometries for its slots, which go to `found`."""
    kind = type(value)
    if kind is Slot:
        found.append(value.number)
        return geometries[value.number]
    if kind is ScalarSlot:
        found.append(scalar_value(value.number))
        return value.kind
    if kind is tuple:
        return tuple([_structure(item, found, geometries) for item in value])
    return kind, value


def shorten(trace: CutTrace) -> Iterator[ShortTrace]:
    """The trace without most of its equal layers: first if the schedule is thought to repeat with each layer, then if
    with each third (of a chain of sums, say, only every third is kept for backward). Where layers convert to half
    precision, or there are several stacks of them, the other way round. None where it has too few."""
    if len(trace.entries) < 2 * _LEAST_REPETITIONS:
        return
    long = calls_of(trace)
    runs = find_runs(long.calls.keys, _LEAST_REPETITIONS)
    if not runs:
        return
    found = 0
    for stacks in range(1, _MOST_STACKS + 1):
        layers = without_sums(long.calls, long.maker, find_layers(long.calls, runs, stacks=stacks))
        if len(layers.runs) == found:
            return  # larger counts find none either
        found = len(layers.runs)
        is_enough = False
        rounds = _rounds(long, layers)
        is_by_several = rounds or stacks > 1
        for period, before, after in reversed(_KEPT) if is_by_several else _KEPT:
            first = max(run.lowest for run in layers.runs) + before
            left_out = min(run.highest for run in layers.runs) + 1 - after - first
            left_out -= left_out % (period if stacks == 1 or period == 1 else _OFTEN)
            is_out = [layer is not None and first <= layer < first + left_out for layer in layers.of_call]
            if left_out < FEWEST_LEFT_OUT or 2 * sum(is_out) < len(is_out):
                continue
            is_enough = True
            short = _Shortener(trace, long, layers, first, left_out).short_trace()
            if short is not None:
                yield _by_several(short, period, (before + after) // period - 1)
                if is_by_several:
                    break  # what does not repeat with each third does not with each
        if is_enough:
            return


def counted_by(traces: ShortTrace, period: int) -> ShortTrace:
    """The same with so many layers counted as one."""
    first, left_out, layers = traces.single or (traces.first, traces.left_out, traces.layers)
    single = replace(traces, first=first, left_out=left_out, layers=layers)
    return _by_several(single, period, traces.kept // period - 1)


def elsewhere(traces: ShortTrace) -> Iterator[ShortTrace]:
    """The same shorter trace, with layers left out of the longer one a period later, then a period earlier: near the
    ends of the trace a schedule may be another although the trace is not."""
    first, left_out, layers = traces.single or (traces.first, traces.left_out, traces.layers)
    period = left_out // traces.left_out
    for other in (first + period, first - period):
        found = _Shortener(traces.long, traces.long_calls, layers, other, left_out).short_trace()
        if found is not None and _are_alike(found.short, traces.short):
            found = replace(found, short=traces.short, short_calls=traces.short_calls)
            yield _by_several(found, period, traces.least)


def _are_alike(a: CutTrace, b: CutTrace) -> bool:
    """Whether two traces are one but for the user's lines."""
    return (a.entries, a.geometries, a.inputs, a.scalar_kinds, a.outputs, a.donations, a.half) == (
        b.entries, b.geometries, b.inputs, b.scalar_kinds, b.outputs, b.donations, b.half,
    )  # fmt: skip


def _rounds(calls: TraceCalls, layers: Layers) -> bool:
    """Whether layers convert to half precision, as under autocast: their schedule hardly ever repeats with each layer,
    since of a sum over layers every third is kept for backward."""
    return any(
        layer is not None and key[0] is _CONVERT and key[2].dtype in _HALVES  # type: ignore[index]
        for key, layer in zip(calls.calls.keys, layers.of_call, strict=True)
    )


def _by_several(traces: ShortTrace, period: int, least: int) -> ShortTrace:
    """The same with so many layers counted as one, such that a count begins with the first that is left out."""
    if period == 1:
        return replace(traces, least=least)
    zero = -(-traces.first // period)
    several = Layers(run_of_call=traces.layers.run_of_call, sums=traces.layers.sums)
    several.of_call = [None if n is None else (n - traces.first) // period + zero for n in traces.layers.of_call]
    for value, (role, layer) in traces.layers.of_value.items():
        number, place = divmod(layer - traces.first, period)
        several.assign(value, (role, place), number + zero)
    single = traces.first, traces.left_out, traces.layers
    left_out = traces.left_out // period
    return replace(traces, first=zero, left_out=left_out, layers=several, least=least, single=single)


class _Shortener:
    def __init__(self, trace: CutTrace, long: TraceCalls, layers: Layers, first: int, left_out: int) -> None:
        self.trace, self.long, self.layers = trace, long, layers
        self.first, self.left_out = first, left_out
        self.numbers: dict[int, int] = {}  # of the slots that are left
        self.extra: dict[int, int] = {}  # values of layers that are left out, and the inputs that stand for them

    def is_out(self, layer: int | None) -> bool:
        return layer is not None and self.first <= layer < self.first + self.left_out

    def short_trace(self) -> ShortTrace | None:
        trace, layers = self.trace, self.layers
        kept_inputs = [place for place, (name, _) in enumerate(trace.inputs) if not self._is_slot_out(name)]
        kept_outputs = [place for place, (name, _) in enumerate(trace.outputs) if not self._is_slot_out(name)]
        calls_at: dict[int, list[int]] = {}
        for call, position in enumerate(self.long.entry):
            calls_at.setdefault(position, []).append(call)
        kept_calls = [call for call in range(len(self.long.entry)) if not self.is_out(layers.of_call[call])]
        kept = {value for call in kept_calls for value in self.long.calls.outs[call]}
        kept.update(trace.inputs[place][0].number for place in kept_inputs)
        wanted = self._read_from_outside(kept_calls)
        if wanted is None:
            return None
        kept.update(wanted)
        self.extra = {value: len(kept) + number for number, value in enumerate(wanted)}
        scalars = [n for n in range(len(trace.scalar_kinds)) if not self.is_out(layers.layer(scalar_value(n)))]
        self.numbers = {value: number for number, value in enumerate(sorted(kept))}
        self.numbers |= {scalar_value(n): scalar_value(number) for number, n in enumerate(scalars)}
        waiting = self._first_reads(kept_calls)
        entries: list[Entry] = []
        frames: list[str] = []
        before = 0  # the cut of a trace that was joined
        for position, entry in enumerate(trace.entries):
            if trace.half is not None and position == trace.half.entries:
                before = len(entries)
            shorter = self._entry(entry, calls_at[position]) if position in calls_at else None
            if shorter is _NO:
                return None
            if shorter is not None:
                for found in waiting.pop(position, ()):
                    entries.append(self._stand_in(found))
                    frames.append("")
                entries.append(shorter)
                frames.append(trace.frames[position] if position < len(trace.frames) else "")
        input_at = {place: number for number, place in enumerate(kept_inputs)}
        output_at = {place: number for number, place in enumerate(kept_outputs)}
        donations = self._donations(output_at, input_at)
        if donations is None:
            return None
        half = trace.half
        if half is not None:
            shown = sum(place < half.outputs for place in kept_outputs)
            inputs = len(kept_inputs) + len(self.extra)
            half = Half(half.is_second, before, inputs, len(scalars), shown)
        outputs = [(self._name(trace.outputs[place][0]), trace.outputs[place][1]) for place in kept_outputs]
        if any(name is None for name, _ in outputs):
            return None
        short = CutTrace(
            entries=tuple(entries),  # type: ignore[arg-type]
            geometries=tuple(trace.geometries[value] for value in (*sorted(kept), *self.extra)),
            inputs=(
                *((self._name(trace.inputs[p][0]), trace.inputs[p][1]) for p in kept_inputs),  # type: ignore[arg-type]
                *((slot(number), trace.geometries[value]) for value, number in self.extra.items()),
            ),
            scalar_kinds=tuple(trace.scalar_kinds[n] for n in scalars),
            outputs=tuple(outputs),  # type: ignore[arg-type]
            donations=donations,
            frames=tuple(frames),
            half=half,
        )
        back = {number: value for value, number in self.numbers.items()}
        extra = frozenset(self.extra.values())
        return ShortTrace(trace, short, self.first, self.left_out, layers, self.long, calls_of(short), back, extra)

    def _stand_in(self, value: int) -> Entry:
        given, made = slot(self.extra[value]), slot(self.numbers[value])
        if not self.trace.geometries[value].meta.shape:
            return Entry(_NUMBER_STAND_IN, (given,), (), made)
        return Entry(_STAND_IN, (given, 0), (), made)

    def _read_from_outside(self, kept_calls: list[int]) -> list[int] | None:
        """The values of layers that are left out which calls without a layer read; None where nothing can stand for
        one of them."""
        found = self._first_reads(kept_calls)
        values = sorted(value for values in found.values() for value in values)
        metas = [self.trace.geometries[value].meta for value in values]
        can_stand = all(
            meta.dtype.is_floating_point and meta.strides == contiguous_strides(meta.shape) for meta in metas
        )
        return values if can_stand and all(value in self.long.maker for value in values) else None

    def _first_reads(self, kept_calls: list[int]) -> dict[int, list[int]]:
        """By position the values of left out layers that calls without a layer read there first."""
        found: dict[int, list[int]] = {}
        done: set[int] = set()
        for call in kept_calls:
            if self.layers.of_call[call] is None:
                for value in self.long.calls.refs[call]:
                    if value >= 0 and value not in done and self._is_out_of(value):
                        done.add(value)
                        found.setdefault(self.long.entry[call], []).append(value)
        return found

    def _is_out_of(self, value: int) -> bool:
        return self.is_out(self.layers.layer(value))

    def _donations(self, output_at: dict[int, int], input_at: dict[int, int]) -> tuple[tuple[int, int], ...] | None:
        """The donations of the outputs that are left, to inputs as many layers off as before."""
        trace = self.trace
        place_of = {name.number: place for place, (name, _) in enumerate(trace.inputs)}
        found: list[tuple[int, int]] = []
        for output, given in trace.donations:
            if output not in output_at:
                continue
            number = trace.inputs[given][0].number
            kept = self._kept(number, self.layers.layer(trace.outputs[output][0].number))
            place = None if kept is None else input_at.get(place_of[kept])
            if place is None:
                return None
            found.append((output_at[output], place))
        return tuple(found) if len({place for _, place in found}) == len(found) else None

    def _is_slot_out(self, name: Slot) -> bool:
        return self.is_out(self.layers.layer(name.number))

    def _name(self, name: Slot) -> Slot | None:
        number = self.numbers.get(name.number)
        return None if number is None else slot(number)

    def _kept(self, number: int, reader: int | None) -> int | None:
        """What a reader of a layer reads instead of a slot, which may be left out; it keeps its distance: a reader
        of the layer before it reads the one before it now."""
        layer = self.layers.layer(number)
        if layer is None or not self.is_out(layer):
            return number
        if reader is None:
            return number if number in self.extra else None
        wanted = layer - reader + (reader if reader < self.first else reader - self.left_out)
        wanted = wanted if wanted < self.first else wanted + self.left_out
        return self.layers.moved(number, wanted - layer)

    def _entry(self, entry: Entry, calls: list[int]) -> Any:
        """The entry over the slots that are left; None where it is left out, `_NO` where it needs a slot that is."""
        if not is_elementwise(entry):
            return None if self.is_out(self.layers.of_call[calls[0]]) else self._renamed(entry, calls[0])
        left = [(i, call) for i, call in enumerate(calls) if not self.is_out(self.layers.of_call[call])]

        def pick(value: Any) -> Any:
            if type(value) is not tuple:
                return self._value(value, self.layers.of_call[left[0][1]])
            return tuple(self._value(value[i], self.layers.of_call[call]) for i, call in left)

        if not left:
            return None
        args = tuple(map(pick, entry.args))
        kwargs = tuple((name, pick(value)) for name, value in entry.kwargs)
        outputs = tuple(self._value(entry.outputs[i], None) for i, _ in left)
        return _NO if _holds_no(args) or _holds_no(kwargs) else Entry(entry.op, args, kwargs, outputs)

    def _renamed(self, entry: Entry, call: int) -> Any:
        layer = self.layers.of_call[call]
        args = self._value(entry.args, layer)
        kwargs = self._value(entry.kwargs, layer)
        if _holds_no(args) or _holds_no(kwargs):
            return _NO
        return Entry(entry.op, args, kwargs, self._value(entry.outputs, None))

    def _value(self, value: Any, reader: int | None) -> Any:
        if type(value) is tuple:
            return tuple([self._value(item, reader) for item in value])
        if type(value) is not Slot and type(value) is not ScalarSlot:
            return value
        own_number = value.number if type(value) is Slot else scalar_value(value.number)
        number = self._kept(own_number, reader)
        found = None if number is None else self.numbers.get(number)
        if found is None:
            return _NO
        return scalar_slot(scalar_value(found), value.kind) if isinstance(value, ScalarSlot) else slot(found)


class _No:
    """A value that the shorter trace does not have."""


_NO = _No()


def _holds_no(value: Any) -> bool:
    return value is _NO or (type(value) is tuple and any(map(_holds_no, value)))


__all__ = ["ShortTrace", "TraceCalls", "calls_of", "counted_by", "elsewhere", "is_elementwise", "shorten"]
