"""Memory plans: hand-made cases, and random programs in which no two live values may share memory."""

from __future__ import annotations

import random

import pytest
import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.runtime.program import memory_plan
from torchlazy.runtime.program.memory_plan import PlanReport, plan_memory, plan_report
from torchlazy.runtime.program.program import Allocate, ExternCall, Free, Launch, Reinterpret, Step, ValueRef
from torchlazy.runtime.program.steps import names_made, names_read, span_bytes


def meta(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TensorMeta:
    return TensorMeta(shape, dtype, contiguous_strides(shape), device)


def launch(*names: str) -> Launch:
    return Launch(0, names, (), ())


def frees(steps: tuple[Step, ...]) -> dict[str, int]:
    """For each freed name the position of its Free."""
    return {name: position for position, step in enumerate(steps) if isinstance(step, Free) for name in step.names}


def test_a_chain_of_three_needs_two_buffers() -> None:
    size = meta(100_000)
    steps: list[Step] = []
    for number in range(6):
        steps += [Allocate(f"b{number}", size), launch(f"b{number - 1}" if number else "x", f"b{number}")]
    planned = plan_memory(steps, inputs=[("x", size)], outputs=["b5"])
    reuse = {step.name: step.reuse for step in planned if isinstance(step, Allocate)}
    assert reuse == {"b0": None, "b1": None, "b2": "b0", "b3": "b1", "b4": "b2", "b5": None}
    # The last is an output: it gets fresh memory while b3 and b4 are still held, or free already.
    assert plan_report(planned) == PlanReport(peak_bytes=800_000, total_bytes=2_400_000, reused=3)


def test_inputs_are_freed_after_their_last_reader_and_outputs_never() -> None:
    steps = [Allocate("a", meta(4)), launch("x", "a"), Allocate("out", meta(4)), launch("a", "out")]
    planned = plan_memory(steps, inputs=[("x", meta(4)), ("unused", meta(4))], outputs=["out"])
    assert planned[1] == Free(("unused",))
    assert planned[3] == Free(("x",))
    assert planned[-1] == Free(("a",))


def test_windows_keep_their_source_alive() -> None:
    steps = [
        Allocate("a", meta(1 << 16)),
        launch("x", "a"),
        Reinterpret("v", "a", meta(1 << 15), 0),
        Reinterpret("w", "v", meta(1 << 14), 0),
        Allocate("b", meta(1 << 16)),
        launch("w", "b"),
        Allocate("out", meta(1)),
        launch("b", "out"),
    ]
    planned = plan_memory(steps, inputs=[("x", meta(1))], outputs=["out"])
    assert all(step.reuse is None for step in planned if isinstance(step, Allocate))
    positions = frees(planned)
    assert positions["a"] >= planned.index(launch("w", "b"))


def test_a_window_as_output_keeps_its_source_out_of_the_pool() -> None:
    steps = [
        Allocate("a", meta(1 << 16)),
        launch("x", "a"),
        Reinterpret("out", "a", meta(1 << 16), 0),
        Allocate("b", meta(1 << 16)),
        launch("x", "b"),
    ]
    planned = plan_memory(steps, inputs=[("x", meta(1))], outputs=["out"])
    assert "a" not in frees(planned) and "out" not in frees(planned)
    assert all(step.reuse is None for step in planned if isinstance(step, Allocate))


def test_views_made_by_aten_and_collectives_keep_their_arguments_alive() -> None:
    steps = [
        Allocate("a", meta(1 << 16)),
        launch("x", "a"),
        ExternCall("aten.split.Tensor", (ValueRef("a"), 1 << 15), (), ("l", "r"), (meta(1 << 15), meta(1 << 15))),
        Allocate("b", meta(1 << 16)),
        launch("l", "r", "b"),
        Allocate("out", meta(1)),
        launch("b", "out"),
    ]
    planned = plan_memory(steps, inputs=[("x", meta(1))], outputs=["out"])
    assert all(step.reuse is None for step in planned if isinstance(step, Allocate))
    assert frees(planned)["a"] > planned.index(launch("l", "r", "b"))


def test_results_of_aten_calls_are_donors_but_other_devices_and_small_ones_are_not() -> None:
    steps = [
        ExternCall("aten.mm.default", (ValueRef("x"), ValueRef("x")), (), ("m",), (meta(256, 256),)),
        Allocate("a", meta(256, 256)),
        launch("m", "a"),
        Allocate("elsewhere", meta(256, 256, device="cuda:0")),
        Allocate("larger", meta(256, 257)),
        Allocate("fits", meta(65536)),
        launch("a", "elsewhere", "larger", "fits"),
    ]
    planned = plan_memory(steps, inputs=[("x", meta(256, 256))], outputs=[])
    reuse = {step.name: step.reuse for step in planned if isinstance(step, Allocate)}
    assert reuse == {"a": None, "elsewhere": None, "larger": None, "fits": "m"}
    assert "m" not in frees(planned)


def test_planning_twice_changes_nothing() -> None:
    steps, inputs, outputs = random_steps(random.Random(1))
    once = plan_memory(steps, inputs=inputs, outputs=outputs)
    assert plan_memory(once, inputs=inputs, outputs=outputs) == once


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_share_no_live_memory(seed: int) -> None:
    steps, inputs, outputs = random_steps(random.Random(seed))
    planned = plan_memory(steps, inputs=inputs, outputs=outputs)
    check(planned, [name for name, _ in inputs], outputs)
    baseline = tuple(
        Allocate(step.name, step.meta) if isinstance(step, Allocate) else step
        for step in plan_memory(steps, inputs=inputs, outputs=outputs)
    )
    unshared = plan_without_sharing(baseline, inputs, outputs)
    assert plan_report(planned).peak_bytes <= plan_report(unshared).peak_bytes


@pytest.mark.parametrize("seed", range(40))
def test_memory_goes_to_the_first_that_fits(seed: int) -> None:
    """Looked for by bisection; here by trying one dead memory after the other, on many values of few sizes."""
    rng = random.Random(seed)
    sizes = [rng.choice([4, 64, 256, 300, 16384, 20000, 24576, 65536, 70000]) for _ in range(4)]
    values = []
    for made in range(rng.randint(20, 150)):
        dead = made + rng.choice([0, 1, 3, 40, 200])
        size = rng.choice(sizes)
        gives, takes = rng.random() < 0.9, rng.random() < 0.8
        values.append(memory_plan._PlannedValue(f"v{made}", "cpu", size, size, made, dead, gives, takes))
    steps = max(value.dead for value in values) + 1
    assert memory_plan._choose_donors(values, steps) == plainly_chosen(values, steps)


def plainly_chosen(values: list[memory_plan._PlannedValue], steps: int) -> dict[str, str]:
    held = [sum(value.size for value in values if value.made <= at <= value.dead) for at in range(steps)]
    peak = max(held)
    memory = {value.name: value.size for value in values}
    given: dict[str, str] = {}
    for value in values:
        dead = [one for one in values if one.gives and one.dead < value.made and one.name not in given.values()]
        for one in sorted(dead, key=lambda one: (memory[one.name], one.dead, one.name)) if value.takes else ():
            size = memory[one.name]
            waiting = [held[at] + size for at in range(one.dead + 1, value.made)]
            using = [held[at] + size - value.size for at in range(value.made, value.dead + 1)]
            if value.size <= size <= max(2 * value.size, 1 << 14) and max(waiting + using) <= peak:
                held = [
                    now + size * (one.dead < at < value.made) + (size - value.size) * (value.made <= at <= value.dead)
                    for at, now in enumerate(held)
                ]
                given[value.name], memory[value.name] = one.name, size
                break
    return given


def plan_without_sharing(
    steps: tuple[Step, ...], inputs: list[tuple[str, TensorMeta]], outputs: list[str]
) -> tuple[Step, ...]:
    """The baseline: frees only, placed by the simplest rule."""
    bare = [step for step in steps if not isinstance(step, Free)]
    owner = {name: name for name, _ in inputs}
    last: dict[str, int] = {}
    for position, step in enumerate(bare):
        for name in names_made(step):
            owner[name] = owner[step.source] if isinstance(step, Reinterpret) else name
        for name in (*names_read(step), *names_made(step)):
            last[owner[name]] = position
    kept = {owner[name] for name in outputs}
    result: list[Step] = []
    for position, step in enumerate(bare):
        result.append(step)
        result += [Free((name,)) for name, end in last.items() if end == position and name not in kept]
    return tuple(result)


def random_steps(rng: random.Random) -> tuple[list[Step], list[tuple[str, TensorMeta]], list[str]]:
    """Allocations, launches, windows and ATen calls on what happens to be there."""
    inputs = [(f"in{number}", meta(rng.randint(1, 5000))) for number in range(3)]
    metas = dict(inputs)
    steps: list[Step] = []
    for number in range(rng.randint(5, 120)):
        reads = rng.sample(sorted(metas)[-12:], k=min(len(metas), rng.randint(1, 3)))
        kind = rng.random()
        name = f"v{number:03}"
        if kind < 0.6:
            metas[name] = meta(rng.choice([1, 10, 1000, 5000, 20000, rng.randint(1, 20000)]))
            steps += [Allocate(name, metas[name]), launch(*reads, name)]
        elif kind < 0.8:
            source = metas[reads[0]]
            metas[name] = meta(max(1, int(source.numel) // 2))
            steps.append(Reinterpret(name, reads[0], metas[name], 0))
        else:
            metas[name] = meta(rng.randint(1, 20000))
            steps.append(ExternCall("aten.neg.default", (ValueRef(reads[0]),), (), (name,), (metas[name],)))
    outputs = rng.sample(sorted(metas), k=min(len(metas), 4))
    return steps, inputs, outputs


def check(steps: tuple[Step, ...], inputs: list[str], outputs: list[str]) -> None:
    """Run the plan over labelled memory: each block remembers which value was written last."""
    block_of: dict[str, int] = {name: number for number, name in enumerate(inputs)}
    owner: dict[str, str] = {name: name for name in inputs}
    content: dict[int, str] = dict(enumerate(inputs))
    size: dict[int, int] = {}
    freed: set[str] = set()
    for step in steps:
        for name in names_read(step):
            assert name not in freed, f"{name} is read after it was freed"
            if not (isinstance(step, Allocate) and step.reuse == name):
                assert content[block_of[name]] == owner[name], f"{name} lost its memory to {content[block_of[name]]}"
        if isinstance(step, Allocate):
            block = len(content) if step.reuse is None else block_of[step.reuse]
            if step.reuse is not None:
                assert size[block] >= span_bytes(step.meta)
                assert owner[step.reuse] == step.reuse, "only owners give memory"
                assert step.name not in outputs
                freed.add(step.reuse)
            else:
                size[block] = span_bytes(step.meta)
            block_of[step.name], content[block], owner[step.name] = block, step.name, step.name
        elif isinstance(step, Reinterpret):
            block_of[step.name], owner[step.name] = block_of[step.source], owner[step.source]
        elif isinstance(step, ExternCall):
            (name,) = names_made(step)
            block = len(content)
            block_of[name], content[block], owner[name] = block, name, name
            assert step.metas[0] is not None
            size[block] = span_bytes(step.metas[0])
        elif isinstance(step, Free):
            assert freed.isdisjoint(step.names)
            freed.update(step.names)
    for name in outputs:
        assert name not in freed and content[block_of[name]] == owner[name]
        assert owner[name] not in freed
