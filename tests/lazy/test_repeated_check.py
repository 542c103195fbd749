"""The check of a schedule whose layers were repeated passes what is right, and refuses each way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn
from torchlazy.inductor.codegen import backends
from torchlazy.inductor.fingerprint import EmitOnce
from torchlazy.inductor.scheduler import Schedule
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.layers.check import Values, check, values_of
from torchlazy.lazy.plan.layers.names import NotPeriodic, Stamped
from torchlazy.lazy.plan.layers.shorten import shorten
from torchlazy.lazy.plan.layers.slot_places import Partial, SlotPlaces
from torchlazy.lazy.plan.layers.stamp import Repeater

from tests.lazy.joined_traces import joined_step
from tests.lazy.recorded_traces import OPTIONS
from tests.lazy.test_repeated_layers import LAYERS, ROWS, WIDTH, adamw, norm_and_linear, sgd, trace_of, transformer

pytestmark = pytest.mark.usefixtures("device_in_python")

Parts = tuple[Repeater, list[Stamped], SlotPlaces, tuple[Values, Values]]


def in_parts() -> nn.Module:
    """Sums over its rows, for which there are many beside few columns, are taken in parts."""
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))


@pytest.fixture(scope="module", params=["whole sums, cpp", "sums in parts, cpp", "a norm of all, triton", "a cut, cpp"])
def parts(request: pytest.FixtureRequest) -> Parts:
    """A short schedule about to be repeated, and the values of its traces."""
    sums, language = request.param.split(", ")
    if sums == "sums in parts":
        trace = trace_of(nn.Sequential(nn.Linear(WIDTH, 128), *(in_parts() for _ in range(20))), adamw, rows=32)
    elif sums == "a norm of all":
        trace = trace_of(nn.Sequential(*(norm_and_linear() for _ in range(LAYERS))), sgd, clips=True)
    elif sums == "a cut":  # of what is read before the backward
        trace = joined_step(lambda: transformer(layers=18), (ROWS, 16, WIDTH), "cpu", sgd).first
    else:
        trace = trace_of(transformer(), adamw)
    traces = next(shorten(trace))
    places = SlotPlaces(traces.short, traces.short_calls)
    forms = pipeline._plan_schedule(traces.short, OPTIONS[language], {}, [], places)
    held = places.by_buffer()
    assert any(isinstance(one.place, Partial) for one in held.values()) or sums != "sums in parts"
    repeater = Repeater(traces, forms.schedule, EmitOnce(backends.backend(language).emit), held)
    return repeater, repeater.stamped(), places, values_of(repeater, places)


def schedule_and_check(parts: Parts, stamped: list[Stamped]) -> Schedule:
    repeater, _, places, values = parts
    schedule = repeater.long_schedule(stamped)
    check(repeater, stamped, schedule, places, values)
    return schedule


def test_the_check_passes_what_is_right(parts: Parts) -> None:
    schedule = schedule_and_check(parts, parts[1])
    assert len(schedule.items) > 2 * len(parts[0].schedule.items)


def test_no_read_can_be_of_another_layer(parts: Parts) -> None:
    repeater, stamped, places, _ = parts
    split = {name for name, held in places.by_buffer().items() if isinstance(held.place, Partial)}
    fellows: dict[tuple[int, int], list[str]] = {}
    for one in stamped:
        for place, name in enumerate(one.refs):
            fellows.setdefault((one.item, place), []).append(name)
    tried = of_parts = 0
    for number, one in enumerate(stamped):
        read = [repeater.short.names[value] for value in repeater.short.calls.refs[one.item]]
        # Every 31st item, by its first read that differs from layer to layer; of a part of a sum, every 5th.
        places_tried = [place for place, name in enumerate(read) if name in split and number % 5 == 0]
        for place in places_tried or (range(len(read)) if number % 31 == 0 else ()):
            other = next((n for n in fellows[one.item, place] if n != one.refs[place]), None)
            if other is None:
                continue
            refs = (*one.refs[:place], other, *one.refs[place + 1 :])
            with pytest.raises(NotPeriodic):
                schedule_and_check(parts, [*stamped[:number], replace(one, refs=refs), *stamped[number + 1 :]])
            tried += 1
            of_parts += place in places_tried
            if not places_tried:
                break
    assert tried > 10 and (of_parts > 3 or not split or repeater.schedule.cut is not None)


def test_what_reads_all_layers_reads_each_in_its_place(parts: Parts) -> None:
    repeater, stamped, *_ = parts
    for number, one in enumerate(stamped):
        if len(one.refs) > LAYERS:
            for at in range(0, len(one.refs) - 1, 7):
                refs = list(one.refs)
                refs[at], refs[at + 1] = refs[at + 1], refs[at]
                other = replace(one, refs=tuple(refs))
                with pytest.raises(NotPeriodic):
                    schedule_and_check(parts, [*stamped[:number], other, *stamped[number + 1 :]])
            return
    assert not repeater.stand_ins


def test_no_item_can_be_missing_or_early(parts: Parts) -> None:
    stamped = parts[1]
    for number in range(1, len(stamped), 97):
        with pytest.raises(NotPeriodic):
            schedule_and_check(parts, [*stamped[:number], *stamped[number + 1 :]])
    with pytest.raises(NotPeriodic):
        schedule_and_check(parts, stamped[::-1])


def test_no_output_and_no_donation_can_be_another(parts: Parts) -> None:
    repeater, stamped, places, values = parts
    schedule = repeater.long_schedule(stamped)
    first, *_, last = (place for place, name in enumerate(schedule.outputs) if name in schedule.donations)
    outputs = list(schedule.outputs)
    outputs[first], outputs[last] = outputs[last], outputs[first]
    with pytest.raises(NotPeriodic):
        check(repeater, stamped, replace(schedule, outputs=tuple(outputs)), places, values)
    outputs[first] = outputs[last]
    with pytest.raises(NotPeriodic, match="share memory"):
        check(repeater, stamped, replace(schedule, outputs=tuple(outputs)), places, values)
    names = list(schedule.donations)
    swapped = dict(zip(names, [*schedule.donations.values()][::-1], strict=True))
    with pytest.raises(NotPeriodic):
        check(repeater, stamped, replace(schedule, donations=swapped), places, values)
    with pytest.raises(NotPeriodic):
        check(repeater, stamped, replace(schedule, donations={}), places, values)


@pytest.mark.parametrize("change", ["operator", "operand", "result"])
def test_a_layer_that_differs_is_seen(parts: Parts, change: str) -> None:
    """Even where the schedule was repeated as if it did not."""
    repeater, stamped, places, _ = parts
    schedule = repeater.long_schedule(stamped)
    traces = repeater.traces
    seen = 0
    calls = traces.long_calls.calls
    all_calls = range(len(traces.long_calls.entry))
    tried = [call for call in all_calls if len(calls.outs[call]) > 1][::3] if change == "result" else all_calls[::101]
    for call in tried:
        layer = traces.layers.of_call[call]
        if layer is None or not traces.first <= layer < traces.first + traces.left_out:
            continue
        keys, refs, outs = list(calls.keys), list(calls.refs), list(calls.outs)
        if change == "operator":
            keys[call] = "another"
        elif change == "operand":
            moved = traces.layers.moved(refs[call][0], -1)
            refs[call] = ((refs[call][0] + 1 if moved is None else moved), *refs[call][1:])
        else:
            outs[call] = outs[call][::-1]
        other = replace(traces.long_calls, calls=replace(calls, keys=keys, refs=refs, outs=outs))
        repeater.traces = replace(traces, long_calls=other)
        try:
            with pytest.raises(NotPeriodic):
                check(repeater, stamped, schedule, places)
        finally:
            repeater.traces = traces
        seen += 1
    assert seen > 5
