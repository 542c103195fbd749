"""Bisects a wrong compiled cut: the kernel, the operator and the user's line behind a difference.

The program is compiled again and run with every value that it stores kept. Then each kernel is compared, on the very
inputs that it had, with the reference interpreter of loop graphs: a difference there is a wrong kernel, however little
it moved the result; no difference means that the kernel is right, however much rounding has added up. If every kernel
is right, each operator is decomposed and lowered by itself and compared.

Invariant: inputs are read only. A difference that no single step shows is called rounding, unless it is far too large
for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torchlazy.inductor import interpret, lowering
from torchlazy.inductor.codegen import backends
from torchlazy.inductor.ir import ExternNode, Kernel, LoopNode
from torchlazy.inductor.lowering import LINE
from torchlazy.lazy.inspect.compare import Mismatch, compare, defined_outputs, is_rounding
from torchlazy.lazy.plan.loaded import Compiled, CompileOptions, load_program
from torchlazy.lazy.plan.pipeline import Forms, compile_trace
from torchlazy.lazy.run.interpreter import evaluate_slots, run_entries
from torchlazy.lazy.trace.to_fx import needed_entries, trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace, Slot, slots_in
from torchlazy.prims import eager
from torchlazy.prims.decompose import decompose
from torchlazy.prims.passes import graph_passes
from torchlazy.runtime.program.program import Allocate, ExternCall, Free, Program, Reinterpret, Step
from torchlazy.runtime.toolchains.kernel_cache import KernelCache

Stage = Literal[
    "code generation", "decomposition", "lowering", "graph passes", "memory", "another program", "not located"
]
_TOO_MUCH = 1000.0  # times the tolerance: no rounding of a whole program adds up to that
_TRIED = 64  # at most so many different operators of a wrong kernel are compiled by themselves


@dataclass(frozen=True)
class Culprit:
    """What is wrong.

    `kernel` is the number of the kernel in the schedule (None: no kernel), `source` its generated text. `operator` and
    `frame` are the ATen operator and the user's line; `frames` all lines of the kernel. `part` is the smallest piece of
    the trace that shows the difference by itself, and `values` the inputs to show it with.
    """

    stage: Stage
    mismatch: Mismatch
    kernel: int | None
    source: str
    operator: str
    frame: str
    frames: tuple[str, ...]
    part: CutTrace
    values: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        where = f"kernel {self.kernel}" if self.kernel is not None else "no single kernel"
        name = self.operator or "only as these operators together"
        return f"{self.stage}: {where}, {name} at {self.frame or ', '.join(self.frames) or '?'}: {self.mismatch}"


@dataclass(frozen=True)
class Cut:
    """A cut to bisect: its trace (with the user's lines), its inputs before the run, and the outputs of tier 0."""

    trace: CutTrace
    memory: tuple[torch.Tensor, ...]
    scalars: tuple[Any, ...]
    expected: tuple[Any, ...]
    options: CompileOptions
    cache: KernelCache

    @cached_property
    def needed(self) -> list[int]:
        """Positions of the operators that some output depends on, in order."""
        return sorted(needed_entries(self.trace))

    @cached_property
    def values(self) -> dict[int, Any]:
        """The value that tier 0 computes for every slot that some operator reads."""
        operands = {found.number for position in self.needed for found in _operands(self.trace, position)}
        return evaluate_slots(self.trace, self.memory, self.scalars, operands)


def locate(cut: Cut, worst: Mismatch) -> Culprit | None:
    """What is wrong in a compiled cut whose outputs differ by `worst`; None for rounding that adds up."""
    try:
        return _locate(cut, worst)
    except Exception as error:  # a bisection that fails must not end the program: the difference is still reported
        about = f"the bisection failed with {type(error).__name__}: {error}"
        return Culprit("not located", worst, None, about, "", "", (), cut.trace, cut.memory)


def _locate(cut: Cut, worst: Mismatch) -> Culprit | None:
    whole = replace(cut.trace, donations=())
    compiled = compile_trace(whole, cut.options, cut.cache)
    stored = _stored_values(compiled, cut)
    found = _wrong_kernel(compiled, cut, stored)
    if found is not None:
        return _narrow(compiled.forms, cut, *found)
    single = _wrong_operator(compiled.forms, cut)
    if single is not None:
        return single
    return _wrong_as_a_whole(compiled, cut, stored, worst)


# ---------------------------------------------------------------- each kernel against the interpreter


def _stored_values(compiled: Compiled, cut: Cut) -> dict[str, torch.Tensor]:
    """Every value that the program stores in memory, from one run of its kernels, and its inputs."""
    program = _keeping_everything(compiled.program)
    kept = load_program(program, compiled.trace, cut.options, cut.cache, (), {})
    values = kept.run.run(list(cut.memory), list(cut.scalars))
    inputs = {name: tensor for (name, _), tensor in zip(program.inputs, cut.memory, strict=True)}
    return {**dict(zip(program.outputs, values, strict=True)), **inputs}


def _keeping_everything(program: Program) -> Program:
    """The program with the same launches; nothing is freed, no memory is reused, and every value is an output."""
    steps: list[Step] = []
    made: dict[str, Any] = {}
    donated = {program.outputs[output] for output, _ in program.donations}
    for step in program.steps:
        if isinstance(step, Free):
            continue
        if isinstance(step, Allocate) or (isinstance(step, Reinterpret) and step.name in donated):
            made[step.name] = step.meta
            steps.append(Allocate(step.name, step.meta))
            continue
        if isinstance(step, ExternCall):
            made |= {n: meta for n, meta in zip(step.outputs, step.metas, strict=True) if n is not None}
        steps.append(step)
    return replace(program, steps=tuple(steps), outputs=tuple(made), output_metas=tuple(made.values()), donations=())


def _wrong_kernel(compiled: Compiled, cut: Cut, stored: Mapping[str, torch.Tensor]) -> tuple[int, Mismatch] | None:
    """The first kernel, in execution order, that differs from the interpreter on its own inputs."""
    forms = compiled.forms
    memory = interpret.Memory()
    for buffer in forms.loops.inputs:
        memory.bind(buffer, _on_host(stored[buffer.name]))
    numbers = dict(zip((name for name, _ in forms.loops.scalars), cut.scalars, strict=True))
    nodes = {output.name: node for node in forms.loops.nodes if isinstance(node, LoopNode) for output in node.outputs}
    for number, item in enumerate(forms.schedule.items):
        if isinstance(item, Kernel):
            mismatch = _compare_kernel(item, nodes, memory, numbers, stored)
            if mismatch is not None:
                return number, mismatch
        elif isinstance(item, ExternNode):
            for output in item.outputs:
                if output is not None:
                    memory.bind(output, _on_host(stored[output.name]))
        else:
            memory.view(item.output, item.source)
    return None


def _compare_kernel(
    kernel: Kernel,
    nodes: Mapping[str, LoopNode],
    memory: interpret.Memory,
    numbers: Mapping[str, Any],
    stored: Mapping[str, torch.Tensor],
) -> Mismatch | None:
    """Interpret the kernel's nodes on what is in memory, then replace the results by those of the compiled kernel."""
    reads = {buffer.name: (memory.flat[buffer.name], memory.tensors[buffer.name]) for buffer in kernel.reads}
    inner = _nodes_of(kernel, nodes)
    for node in inner:
        interpret.run_node(node, memory, numbers)
    found: Mismatch | None = None
    exact: interpret.Memory | None = None
    for buffer in kernel.writes:
        actual = _on_host(stored[buffer.name])
        if buffer.name in nodes and found is None:
            expected = memory.tensors[buffer.name]
            found = compare(actual, expected)
            if found is not None and expected.dtype.is_floating_point:
                exact = exact or _run_wide(inner, reads, numbers)
                if is_rounding(actual, expected, exact.tensors[buffer.name]):
                    found = None
        memory.bind(buffer, actual)
    return found


def _run_wide(
    nodes: Sequence[LoopNode], reads: Mapping[str, tuple[torch.Tensor, torch.Tensor]], numbers: Mapping[str, Any]
) -> interpret.Memory:
    """The nodes computed with float64 throughout, on the values that the kernel read."""
    memory = interpret.Memory()
    for name, (flat, tensor) in reads.items():
        memory.flat[name], memory.tensors[name] = flat, tensor
    for node in nodes:
        outputs = tuple(
            replace(buffer, dtype=torch.float64) if buffer.dtype == torch.float32 else buffer for buffer in node.outputs
        )
        wide = torch.float64 if node.accumulate_dtype == torch.float32 else node.accumulate_dtype
        interpret.run_node(replace(node, outputs=outputs, accumulate_dtype=wide), memory, numbers, _WideHandler)
    return memory


class _WideHandler(interpret.EvalHandler):
    """The reference interpreter with float64 where bodies say float32; halves are still rounded where bodies say so."""

    def load(self, name: str, index: Any) -> torch.Tensor:
        return _widened(super().load(name, index))

    def scalar(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return super().scalar(name, torch.float64 if dtype.is_floating_point else dtype)

    def constant(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        return _widened(super().constant(value, dtype))

    def index_expr(self, expr: Any, dtype: torch.dtype) -> torch.Tensor:
        return _widened(super().index_expr(expr, dtype))

    def to_dtype(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.float32:
            return value.to(torch.float64)
        return _widened(super().to_dtype(value, dtype))

    def bitcast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        narrow = value.float() if value.dtype == torch.float64 and dtype.itemsize == 4 else value
        return _widened(super().bitcast(narrow, dtype))


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float64) if value.dtype == torch.float32 else value


def _nodes_of(kernel: Kernel, nodes: Mapping[str, LoopNode]) -> list[LoopNode]:
    """The loop nodes of a kernel, each once, in order. Copies into donated memory are no nodes of the graph."""
    names = {statement.node.outputs[0].name: None for sweep in kernel.sweeps for statement in sweep.statements}
    return [nodes[name] for name in names if name in nodes]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, with its strides."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return strided.copy_(tensor)


# ---------------------------------------------------------------- from the kernel to the operator


def _narrow(forms: Forms, cut: Cut, number: int, mismatch: Mismatch) -> Culprit:
    """The operator of a wrong kernel that is wrong by itself, or else those that are wrong together."""
    kernel = forms.schedule.items[number]
    assert isinstance(kernel, Kernel)
    nodes = {output.name: node for node in forms.loops.nodes if isinstance(node, LoopNode) for output in node.outputs}
    frames = tuple(dict.fromkeys(frame for node in _nodes_of(kernel, nodes) for frame in _frames_of(node)))
    candidates = [position for position in cut.needed if _line(cut.trace, position) in frames]
    source = _source_text(cut, kernel)
    for part, values, position in _single_operators(cut, candidates):
        wrong = _differs_compiled(cut, part, values)
        if wrong is not None:
            entry, frame = cut.trace.entries[position], _line(cut.trace, position)
            return Culprit("code generation", wrong, number, source, str(entry.op), frame, frames, part, values)
    for positions in (candidates, cut.needed):
        part, values = _part(cut, positions)
        wrong = _differs_compiled(cut, part, values)
        if wrong is not None:
            return Culprit("code generation", wrong, number, source, "", "", frames, part, values)
    part, values = replace(cut.trace, donations=()), cut.memory
    return Culprit("code generation", mismatch, number, source, "", "", frames, part, values)


def _frames_of(node: LoopNode) -> Iterator[str]:
    """The user's lines in a node's origins ("exp  # model.py:41")."""
    for origin in node.origins:
        _, found, frame = origin.partition(LINE)
        if found:
            yield frame


def _line(trace: CutTrace, position: int) -> str:
    return trace.frames[position] if position < len(trace.frames) else ""


def _source_text(cut: Cut, kernel: Kernel) -> str:
    """The generated source of a kernel of the schedule, as it is launched by itself."""
    return str(backends.backend(cut.options.language).emit(kernel).source.text)


def _single_operators(
    cut: Cut, positions: Sequence[int], limit: int = _TRIED
) -> Iterator[tuple[CutTrace, tuple[torch.Tensor, ...], int]]:
    """Each operator as a trace of its own on the values that tier 0 gives it; equal calls once."""
    seen: set[Any] = set()
    for position in positions:
        entry = cut.trace.entries[position]
        operands = [cut.trace.geometries[found.number] for found in _reads(cut.trace, (position,))]
        constants = repr([a for a in entry.args if type(a) is not Slot])
        key = (entry.op, constants, repr(entry.kwargs), tuple(operands))
        if key in seen or not slots_in(entry.outputs):
            continue
        seen.add(key)
        if len(seen) > limit:
            return
        part, values = _part(cut, (position,))
        yield part, values, position


def _part(cut: Cut, positions: Sequence[int]) -> tuple[CutTrace, tuple[torch.Tensor, ...]]:
    """These operators as a trace of their own, everything that leaves them an output; and its inputs, by tier 0."""
    trace = cut.trace
    reads = _reads(trace, positions)
    inside = set(positions)
    made = {s.number for position in positions for s in slots_in(trace.entries[position].outputs)}
    later = {s.number for position in cut.needed if position not in inside for s in _operands(trace, position)} | {
        number.number for number, _ in trace.outputs
    }
    outputs = [
        found
        for position in positions
        for found in slots_in(trace.entries[position].outputs)
        if found.number in later and found.number in made
    ]
    part = replace(
        trace,
        entries=tuple(trace.entries[position] for position in positions),
        inputs=tuple((found, trace.geometries[found.number]) for found in reads),
        outputs=tuple((found, trace.geometries[found.number]) for found in outputs),
        donations=(),
        frames=tuple(_line(trace, position) for position in positions),
        left_at=None,
    )
    return part, tuple(cut.values[found.number] for found in reads)


def _operands(trace: CutTrace, position: int) -> list[Slot]:
    entry = trace.entries[position]
    return [*slots_in(entry.args), *slots_in(tuple(value for _, value in entry.kwargs))]


def _reads(trace: CutTrace, positions: Sequence[int]) -> list[Slot]:
    """The slots that these operators read and do not make, each once."""
    made: set[int] = set()
    reads: dict[Slot, None] = {}
    for position in positions:
        reads |= {found: None for found in _operands(trace, position) if found.number not in made}
        made |= {found.number for found in slots_in(trace.entries[position].outputs)}
    return list(reads)


def _expected(cut: Cut, part: CutTrace, values: Sequence[torch.Tensor]) -> list[Any]:
    return run_entries(part, list(values), cut.scalars)


def _differs_compiled(cut: Cut, part: CutTrace, values: Sequence[torch.Tensor]) -> Mismatch | None:
    """How a part of the trace differs when it is compiled by itself; None where it does not, or does not compile."""
    if not part.outputs or any(isinstance(value, BaseException) for value in values):
        return None
    try:
        actual = compile_trace(part, cut.options, cut.cache).run.run(list(values), list(cut.scalars))
    except Exception:  # a part may need what only the whole has (an index that is checked elsewhere): no evidence
        return None
    return _first_mismatch(cut, part, values, actual, _expected(cut, part, values))


def _first_mismatch(
    cut: Cut, part: CutTrace, values: Sequence[torch.Tensor], actual: Sequence[Any], expected: Sequence[Any]
) -> Mismatch | None:
    """How the first output differs by more than rounding."""
    exact: list[Any] | None = None
    for position in defined_outputs(part):
        if isinstance(expected[position], BaseException):
            continue
        one, other = _on_host(actual[position]), _on_host(expected[position])
        found = compare(one, other)
        if found is None:
            continue
        exact = exact if exact is not None else _exact(cut, part, values)
        precise = exact[position]
        if isinstance(precise, torch.Tensor) and is_rounding(one, other, _on_host(precise)):
            continue
        return found
    return None


def _exact(cut: Cut, part: CutTrace, values: Sequence[torch.Tensor]) -> list[Any]:
    """The outputs with float64 in the place of float32; errors where ATen has no such kernel."""
    wide = [value.double() if value.dtype == torch.float32 else value for value in values]
    found = evaluate_slots(part, wide, cut.scalars, {number.number for number, _ in part.outputs})
    return [found[number.number] for number, _ in part.outputs]


# ---------------------------------------------------------------- each operator through the stages


def _wrong_operator(forms: Forms, cut: Cut) -> Culprit | None:
    """The first operator whose primitives or loops compute something different from ATen."""
    for part, values, position in _single_operators(cut, cut.needed, limit=10_000):
        if not part.outputs:
            continue
        found = _wrong_stage(cut, part, values)
        if found is None:
            continue
        stage, mismatch = found
        entry, frame = cut.trace.entries[position], _line(cut.trace, position)
        number = _kernel_at(forms, frame)
        source = ""
        if number is not None:
            kernel = forms.schedule.items[number]
            assert isinstance(kernel, Kernel)
            source = _source_text(cut, kernel)
        return Culprit(stage, mismatch, number, source, str(entry.op), frame, (frame,), part, values)
    return None


def _wrong_stage(cut: Cut, part: CutTrace, values: Sequence[torch.Tensor]) -> tuple[Stage, Mismatch] | None:
    """The first stage that changes what one operator computes. On the CPU, whatever device it ran on."""
    if any(isinstance(value, BaseException) for value in values):
        return None
    host = [_on_host(value) for value in values]
    given = [*host, *cut.scalars]
    expected = [
        value if isinstance(value, BaseException) else _on_host(value) for value in _expected(cut, part, values)
    ]
    aten = trace_to_graph(part)
    graph = decompose(aten)
    try:
        found = _first_mismatch(cut, part, values, eager.run(graph, given), expected)
    except Exception:  # no kernel for the CPU: the operator is a library call, which no stage changes
        return None
    if found is not None:
        return "decomposition", found
    graph = graph_passes.run_passes(graph, "eager" if cut.options.precision == "eager" else "fused")
    found = _first_mismatch(cut, part, values, eager.run(graph, given), expected)
    if found is not None:
        return "graph passes", found
    loops = lowering.lower(graph)
    found = _first_mismatch(cut, part, values, interpret.run(loops, host, list(cut.scalars)), expected)
    return None if found is None else ("lowering", found)


def _kernel_at(forms: Forms, frame: str) -> int | None:
    """The first kernel that computes something of a line."""
    nodes = {output.name: node for node in forms.loops.nodes if isinstance(node, LoopNode) for output in node.outputs}
    for number, item in enumerate(forms.schedule.items):
        if isinstance(item, Kernel) and any(frame in _frames_of(node) for node in _nodes_of(item, nodes)):
            return number
    return None


# ---------------------------------------------------------------- differences that only the whole cut shows


def _wrong_as_a_whole(
    compiled: Compiled, cut: Cut, stored: Mapping[str, torch.Tensor], worst: Mismatch
) -> Culprit | None:
    """Every step is right by itself: is it the memory, the passes over the whole graph, or rounding?"""
    positions = defined_outputs(cut.trace)

    def mismatch_of(values: Sequence[Any], factor: float = 1.0) -> Mismatch | None:
        pairs = (
            compare(_on_host(values[p]), _on_host(cut.expected[p]), factor)
            for p in positions
            if not isinstance(cut.expected[p], BaseException)
        )
        return next((found for found in pairs if found is not None), None)

    part, values = replace(cut.trace, donations=()), cut.memory
    kept = [stored.get(name) for name in compiled.forms.schedule.outputs]
    fresh = mismatch_of(compiled.run.run(list(cut.memory), list(cut.scalars)))
    if all(value is not None for value in kept) and mismatch_of(kept) is None:
        again = mismatch_of(_run_donating(cut)) if fresh is None else fresh
        stage: Stage = "another program" if again is None else "memory"
        return Culprit(stage, worst, None, "", "", "", (), cut.trace, values)
    try:
        plain = eager.run(decompose(trace_to_graph(part)), [*map(_on_host, cut.memory), *cut.scalars])
    except Exception:  # a library call that has no kernel for the CPU
        return None
    if mismatch_of(plain) is None and fresh is not None and mismatch_of(kept, _TOO_MUCH) is not None:
        return Culprit("graph passes", fresh, None, "", "", "", (), part, values)
    return None


def _run_donating(cut: Cut) -> list[Any]:
    """The outputs of the cut compiled as it is, on copies of the inputs that it overwrites."""
    return compile_trace(cut.trace, cut.options, cut.cache).run.run(copies(cut.trace, cut.memory), list(cut.scalars))


def copies(trace: CutTrace, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of a run that overwrites some: those are copies, with the same strides."""
    donated = {given for _, given in trace.donations}
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) if i in donated else t
        for i, t in enumerate(memory)
    ]
