"""Stamps the layers of a short trace's schedule as often as they repeat in the long trace.

    trace -> `shorten` -> all stages up to the schedule -> one layer's items stamped for each layer left out
    -> plan/layers/check.py -> `emit_program`, as usual

Items outside of the layers may read a value of each of them. In the short schedule, kernels of their own make what is
read of layers that are left out from inputs; they are dropped, and the reader is handed what these layers make.

Stamping renames buffers, inputs and scalars; the kernels' sources are those of the shorter schedule. Sharing of
launches and memory are planned for the whole program.

Invariant: the program is proved to compute the whole trace, or there is none and the whole trace is planned. Where the
schedule repeats with each layer it is the very program that planning the whole gives; where it repeats every few
layers, what stands between the layers and the rest of the step may be chosen differently.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchlazy.inductor.fingerprint import EmitOnce
from torchlazy.inductor.grouping import item_reads
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, Kernel, ViewNode
from torchlazy.inductor.scheduler import Item, Schedule
from torchlazy.lazy.plan.layers.detect import Layers, Run, find_layers, find_runs, without_foreign_calls
from torchlazy.lazy.plan.layers.items import item_calls, places_by_trace
from torchlazy.lazy.plan.layers.names import NotPeriodic, Stamped, new_numbers, numbers_in_order
from torchlazy.lazy.plan.layers.shorten import ShortTrace, scalar_value
from torchlazy.lazy.plan.layers.slot_places import BufferValue, moved
from torchlazy.lazy.plan.layers.sums import with_sums_early, with_sums_late


class Repeater:
    """One unrolling. `held` says what of the short trace a buffer of its schedule holds."""

    def __init__(
        self, traces: ShortTrace, schedule: Schedule, emit_once: EmitOnce, held: dict[str, BufferValue]
    ) -> None:
        self.traces, self.emit_once = traces, emit_once
        self.first, self.left_out, self.held = traces.first, traces.left_out, held
        self.stand_ins: dict[str, Buffer] = {}
        """By name what is made in the place of layers that are left out, by kernels that are dropped."""
        sums = {name for name, one in held.items() if traces.slots.get(one.slot) in traces.layers.sums}
        self.schedule, self.sums = with_sums_late(self._without_stand_ins(schedule), sums)
        self.short = item_calls(self.schedule.items, schedule.donations, emit_once)
        self.positions = {name.number: f"in{place}" for place, (name, _) in enumerate(traces.long.inputs)}
        self.positions |= {scalar_value(n): f"scalar{n}" for n in range(len(traces.long.scalar_kinds))}
        given = {f"in{place}": name.number for place, (name, _) in enumerate(traces.short.inputs)}
        given |= {f"scalar{n}": scalar_value(n) for n in range(len(traces.short.scalar_kinds))}
        # By the long trace's slots.
        self.given = {name: traces.slots[number] for name, number in given.items() if number in traces.slots}
        self.layers = self._find_layers(held)
        self.kinds = [self._relations(number, run) for number, run in enumerate(self.layers.runs)]
        self.wide: dict[Hashable, tuple[int, dict[int, int]]] = {}
        """By class of which there are stand-ins: how many layers further on they are by the trace, and the stand-in of
        each layer."""
        self.replaced = self._find_replaced(held)
        self.long_names = self._name()
        self.output_likes: tuple[int, ...] = ()

    def _without_stand_ins(self, schedule: Schedule) -> Schedule:
        """The schedule without the kernels that read what stands for layers that are left out."""
        inputs = enumerate(self.traces.short.inputs)
        extra = {f"in{place}" for place, (name, _) in inputs if name.number in self.traces.extra}
        if not extra:
            return schedule
        left: list[Item] = []
        for item in schedule.items:
            read = [name for name in item_reads(item) if name in extra]
            if not read:
                left.append(item)
            elif isinstance(item, Kernel) and len(item.reads) == len(item.writes) == 1 and not item.scalars:
                self.stand_ins[item.writes[0].name] = item.writes[0]
            elif isinstance(item, ExternNode) and len(item.outputs) == 1 and item.outputs[0] is not None:
                self.stand_ins[item.outputs[0].name] = item.outputs[0]
            else:
                raise NotPeriodic(f"{read[0]} of a layer that is left out is read together with others")
        cut = schedule.cut
        if cut is not None:
            kept = set(map(id, left))
            cut = sum(id(item) in kept for item in schedule.items[:cut])
        return replace(schedule, items=tuple(left), cut=cut)

    def _find_replaced(self, held: dict[str, BufferValue]) -> dict[str, tuple[int, int]]:
        """For each stand-in a value of its class, and the layer of the long schedule in which it is what is meant."""
        names = {(one.place, one.form): name for name, one in held.items()}
        slots, known = self.traces.slots, self.traces.layers
        numbers = {slot: number for number, slot in slots.items()}
        found: dict[str, tuple[int, int]] = {}
        for name in self.stand_ins:
            one = held.get(name)
            layer = None if one is None else known.layer(slots[one.slot])
            if one is None or layer is None or name not in self.short.numbers:
                raise NotPeriodic(f"what stands for {name} is unknown")
            fellow = known.moved(slots[one.slot], self.first - 1 - layer)
            like = None if fellow not in numbers else names.get((moved(one.place, numbers[fellow]), one.form))
            place = None if like is None else self.layers.of_value.get(self.short.numbers[like])
            if like is None or place is None:
                raise NotPeriodic(f"what stands for {name} has no counterpart")
            off = self.first - 1 - place[1]  # of the trace's layers against the schedule's
            found[name] = self.short.numbers[like], layer - off
            own = self.wide.setdefault(place[0], (off, {}))
            if own[0] != off:
                raise NotPeriodic(f"what stands for {name} is of another layer than the others")
            own[1][layer] = self.short.numbers[name]
        return found

    def _find_layers(self, held: dict[str, BufferValue]) -> Layers:
        numbers, known, keys = self.short.numbers, self.traces.layers, self.short.calls.keys
        inputs: dict[int, tuple[Hashable, int]] = {}
        hints: dict[int, int] = {}
        for name, slot in self.given.items():
            found = known.of_value.get(slot)
            if found is not None and name in numbers:
                inputs[numbers[name]] = ("given", found[0]), self.traces.short_layer(found[1])
        for name, one in held.items():
            held_slot = self.traces.slots.get(one.slot)
            layer = None if held_slot is None else known.layer(held_slot)
            if layer is not None and name in numbers and name not in self.stand_ins:
                hints[numbers[name]] = self.traces.short_layer(layer)
        roles = {number: found[0] for number, found in places_by_trace(self.traces, self.short, held).items()}
        runs = [without_foreign_calls(self.short.calls, run, roles) for run in find_runs(keys, self.traces.least)]
        while True:
            layers = find_layers(self.short.calls, runs, inputs, hints, within=self.first - 1)
            few = [run for run in layers.runs if not run.lowest < self.first <= run.highest]
            if not few:
                return layers
            runs = [run for run in runs if all(run.start != other.start for other in few)]

    def _relations(self, number: int, run: Run) -> list[list[int | None]]:
        """For each place of a period and each value read there: how many layers off it is, None for one that is the
        same in all layers."""
        found: list[list[int | None]] = []
        for before, after in zip(run.block(self.first - 1), run.block(self.first), strict=True):
            row: list[int | None] = []
            for a, b in zip(self.short.calls.refs[before], self.short.calls.refs[after], strict=True):
                here, there = self.layers.of_value.get(a), self.layers.of_value.get(b)
                if a == b:
                    row.append(None)
                elif here is None or there is None or here[0] != there[0] or there[1] - here[1] != 1:
                    raise NotPeriodic(f"item {before} reads {self.short.names[a]}, item {after} {self.short.names[b]}")
                else:
                    row.append(here[1] - (self.first - 1))
            found.append(row)
        return found

    # --- names ---

    def _name(self) -> dict[tuple[int, int], str]:
        """The long schedule's name of each value that an item makes, by the value and how many layers further on."""
        made: dict[int, tuple[Hashable, int] | None] = {}
        for outs in self.short.calls.outs:
            for value in outs:
                made[value] = self.layers.of_value.get(value)
        plain = {value: None if place is not None and place[0] in self.wide else place for value, place in made.items()}
        plain |= {self.short.numbers[name]: None for name in self.replaced}
        numbers = {value: _number(self.short.names[value]) for value in plain}
        try:
            found = new_numbers(numbers, plain, self.first, self.left_out)
        except NotPeriodic:
            if self.traces.period == 1 and not self.traces.layers.sums:
                raise
            found = numbers_in_order(numbers, plain, self.first, self.left_out)
        for role, (off, stand_ins) in self.wide.items():
            self._number_all(role, off, stand_ins, found)
        return {place: f"buf{number}" for place, number in found.items()}

    def _number_all(
        self, role: Hashable, off: int, stand_ins: dict[int, int], found: dict[tuple[int, int], int]
    ) -> None:
        """Where each layer that is left out has a stand-in all layers are numbered, though not as the values that the
        long schedule has there."""
        kept = {layer: value for (other, layer), value in self.layers.values.items() if other == role}
        given = {self.long_layer(layer + off): found[value, 0] for layer, value in kept.items()}
        given |= {layer: found.pop((value, 0)) for layer, value in stand_ins.items()}
        places = {self.long_layer(layer): (value, 0) for layer, value in kept.items()}
        if self.first - 1 in kept:
            places |= {self.first - 1 + by: (kept[self.first - 1], by) for by in range(1, self.left_out + 1)}
        if {layer + off for layer in places} != set(given):
            raise NotPeriodic("what is read of all layers is not numbered by layers")
        for layer, place in places.items():
            found[place] = given[layer + off]

    def long_layer(self, layer: int) -> int:
        return layer if layer < self.first else layer + self.left_out

    def name_at(self, value: int, long_layer: int | None) -> str:
        """The long schedule's name of the value of this class in another layer (None: of this one)."""
        found = self.layers.of_value.get(value)
        if found is None or long_layer is None:
            long_layer = None if found is None else self.long_layer(found[1])
        role = None if found is None else found[0]
        name = self.short.names[value]
        if name in self.replaced:
            return self.name_at(*self.replaced[name])
        if name in self.given:
            if found is None or long_layer is None:
                return self.positions[self.given[name]]
            slot = self.traces.layers.values.get((role[1], long_layer))  # type: ignore[index]
            if slot is None:
                raise NotPeriodic(f"{name} has no counterpart in layer {long_layer}")
            return self.positions[slot]
        if found is None or long_layer is None:
            return self.long_names[value, 0]
        if self.first <= long_layer < self.first + self.left_out:
            short_layer, by = self.first - 1, long_layer - (self.first - 1)
        else:
            short_layer, by = (long_layer if long_layer < self.first else long_layer - self.left_out), 0
        other = self.layers.values.get((role, short_layer))
        if other is None or (other, by) not in self.long_names:
            raise NotPeriodic(f"{name} has no counterpart in layer {long_layer}")
        return self.long_names[other, by]

    def _read_from_outside(self, value: int) -> str:
        """What an item without a layer reads: the value of the same layer by the trace."""
        role, layer = self.layers.of_value.get(value, (None, 0))
        if role not in self.wide:
            return self.name_at(value, None)
        off, _ = self.wide[role]
        return self.name_at(value, self.long_layer(layer + off) - off)

    # --- items ---

    def stamped(self) -> list[Stamped]:
        """The items of the long schedule, in order."""
        inserted: dict[int, list[tuple[range, int]]] = {}
        for run in self.layers.runs:
            template, later = run.block(self.first - 1), run.block(self.first)
            steps = range(1, self.left_out + 1) if run.sign > 0 else range(self.left_out, 0, -1)
            inserted[max(template.start, later.start)] = [(template, by) for by in steps]
        result: list[Stamped] = []
        for item in range(len(self.schedule.items)):
            for template, by in inserted.get(item, ()):
                result.extend(self._stamp(other, by) for other in template)
            result.append(self._stamp(item, 0))
        return with_sums_early(result, self.sums) if self.sums else result

    def _stamp(self, item: int, by: int) -> Stamped:
        layer = self.layers.of_call[item]
        refs, outs = self.short.calls.refs[item], self.short.calls.outs[item]
        if layer is None:
            read = [self._read_from_outside(value) for value in refs]
            return Stamped(item, 0, None, tuple(read), tuple(self.name_at(value, None) for value in outs))
        number = self.layers.run_of_call[item]
        assert number is not None
        run = self.layers.runs[number]
        own = layer + by if by else self.long_layer(layer)
        kinds = self.kinds[number][(item - run.start) % run.period]
        read = []
        for value, distance in zip(refs, kinds, strict=True):
            found = self.layers.of_value.get(value)
            is_usual = distance is not None and found is not None and found[1] - layer == distance
            read.append(self.name_at(value, own + distance if is_usual and distance is not None else None))
        return Stamped(item, by, own - layer, tuple(read), tuple(self.name_at(value, own) for value in outs))

    def long_schedule(self, stamped: Sequence[Stamped]) -> Schedule:
        """The schedule of the long trace."""
        donations: dict[str, str] = {}
        items = []
        for one in stamped:
            item, names = self._item(one)
            items.append(item)
            for old, new in zip(self.short.calls.outs[one.item], one.outs, strict=True):
                target = self.schedule.donations.get(self.short.names[old])
                if target is not None:
                    donations[new] = names[target] if target in names else self._donated(target, one)
        found = list(self._outputs())
        outputs = tuple(name for name, _ in found)
        self.output_likes = tuple(like for _, like in found)
        offered = {outputs[out]: f"in{given}" for out, given in self.traces.long.donations}
        if any(offered.get(name) != target for name, target in donations.items()):
            raise NotPeriodic("a donation is not the trace's")
        donations = {name: target for name, target in offered.items() if name in donations}
        return Schedule(tuple(items), (), self._removed(stamped), outputs, donations, self._cut(stamped))

    def _cut(self, stamped: Sequence[Stamped]) -> int | None:
        """How many items come before the cut, where the short schedule has one."""
        cut = self.schedule.cut
        if cut is None:
            return None
        early = [one.item < cut for one in stamped]
        if not all(early[: sum(early)]):
            raise NotPeriodic("what comes before the cut and after it is mixed")
        return sum(early)

    def _donated(self, target: str, one: Stamped) -> str:
        """An input that is overwritten without being read by the same kernel."""
        return self.positions[self.long_slot(self.given[target], one.ahead)]

    def long_slot(self, slot: int, ahead: int | None) -> int:
        """What `slot` of the short trace (by its number in the long one) is for an item that has so many layers more
        before it; None: for one without a layer."""
        known = self.traces.layers
        layer = known.layer(slot)
        if layer is None or ahead is None:
            return slot
        found = known.moved(slot, self.traces.short_layer(layer) + ahead - layer)
        if found is None:
            raise NotPeriodic(f"slot {slot} has no counterpart {ahead} layers on")
        return found

    def _removed(self, stamped: Sequence[Stamped]) -> tuple[str, ...]:
        gone = set(self.schedule.removed)
        own: dict[int, list[str]] = {}
        for number, item in enumerate(self.schedule.items):
            if isinstance(item, Kernel):
                names = dict.fromkeys(b.name for s in item.sweeps for x in s.statements for b in x.node.outputs)
                own[number] = [name for name in names if name in gone]
        more = [f"{name} of layer {one.by}" for one in stamped if one.by for name in own.get(one.item, ())]
        return (*self.schedule.removed, *more)

    def _item(self, one: Stamped) -> tuple[Item, dict[str, str]]:
        item = self.schedule.items[one.item]
        old = [self.short.names[v] for v in (*self.short.calls.refs[one.item], *self.short.calls.outs[one.item])]
        names = dict(zip(old, (*one.refs, *one.outs), strict=True))
        if isinstance(item, Kernel):
            kernel = replace(
                item,
                reads=tuple(_renamed(b, names) for b in item.reads),
                writes=tuple(_renamed(b, names) for b in item.writes),
                scalars=tuple((names[name], kind) for name, kind in item.scalars),
                aliases=tuple((names[a], names[b]) for a, b in item.aliases),
            )
            self.emit_once.adopt(kernel, item, names)
            return kernel, names
        if isinstance(item, ExternNode):
            args, kwargs = _replaced(item.args, names), _replaced(item.kwargs, names)
            outputs = tuple(None if b is None else _renamed(b, names) for b in item.outputs)
            return ExternNode(item.op, args, kwargs, outputs, item.origins), names
        return ViewNode(_renamed(item.output, names), names[item.source], item.origins), names

    def _outputs(self) -> Iterator[tuple[str, int]]:
        """The buffer of each output, and the output of the short schedule that it is like."""
        short, known = self.traces.short, self.traces.layers
        numbers = self.short.numbers
        place_of = {self.traces.slots[name.number]: place for place, (name, _) in enumerate(short.outputs)}
        for name, _ in self.traces.long.outputs:
            slot, layer = name.number, known.layer(name.number)
            like: int | None = slot
            if slot not in place_of and layer is not None:
                like = known.moved(slot, self.first - 1 - layer)
            if like is None or like not in place_of:
                raise NotPeriodic(f"output {slot} has no counterpart")
            place = place_of[like]
            buffer = self.schedule.outputs[place]
            if buffer in self.given:
                ahead = None if layer is None else layer - self.traces.short_layer(known.of_value[like][1])
                yield self.positions[self.long_slot(self.given[buffer], ahead)], place
                continue
            value = numbers[buffer]
            own = self.layers.layer(value)
            if own is None or layer is None:
                if like != slot:
                    raise NotPeriodic(f"output {buffer} has no layer")
                yield self.name_at(value, None), place
            else:
                yield self.name_at(value, own + layer - self.traces.short_layer(known.of_value[like][1])), place


def _number(name: str) -> int:
    number = name.removeprefix("buf")
    if not number.isdecimal():
        raise NotPeriodic(f"{name} is no numbered buffer")
    return int(number)


def _renamed(buffer: Buffer, names: dict[str, str]) -> Buffer:
    return Buffer(names[buffer.name], buffer.dtype, buffer.shape, buffer.strides, buffer.device, buffer.offset)


def _replaced(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, BufferRef):
        return BufferRef(names[value.name], value.scalar)
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(item, names) for item in value)
    if isinstance(value, dict):
        return {name: _replaced(item, names) for name, item in value.items()}
    return value
