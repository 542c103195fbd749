"""From a schedule to a `Program`: kernels as source, launches, extern calls, and the memory that they need.

Names of buffers become names of values. Every kernel output is allocated right before the kernel that writes it; a
donated output is a window (`Reinterpret`) on the input that it overwrites, and the program's `donations` say so. A
view is a window on its source. A kernel's indices count from the start of a buffer's memory, so a buffer with an
offset of its own is handed to kernels as a window that starts there (`<name>_memory`).

Equal sources are compiled once. Kernels of equal text that may run together become one `ForeachLaunch` (see
`grouping`); scalars that all rows share are arguments, the others columns of its table.

Invariant: each value is made by one step, before every step that reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchlazy.inductor.codegen.kernel import EmittedKernel
from torchlazy.inductor.fingerprint import EmitOnce
from torchlazy.inductor.grouping import HOISTED_BYTES, plan_slots
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, Kernel, LoopGraph, ViewNode
from torchlazy.inductor.scheduler import Schedule
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_int import integer_of
from torchlazy.runtime.program.memory_plan import plan_memory
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    KernelSource,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)


class EmitKernel(Protocol):
    """A language's code generator."""

    def __call__(
        self, kernel: Kernel, *, foreach: bool = False, row_scalars: frozenset[str] = frozenset()
    ) -> EmittedKernel:
        """The source of `kernel`, and this program's names to launch it with."""


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """`foreach=False` launches every kernel by itself. `hoisted_bytes`: see `plan_slots`."""

    foreach: bool = True
    plan_memory: bool = True
    hoisted_bytes: int = HOISTED_BYTES


def emit_program(
    plan: Schedule, graph: LoopGraph, emit_kernel: EmitKernel, options: EmitOptions | None = None
) -> Program:
    """The program that runs the schedule."""
    options = options or EmitOptions()
    writer = _ProgramEmitter(plan, graph, EmitOnce(emit_kernel))
    writer.emit_items(options)
    inputs = tuple((buffer.name, buffer.meta) for buffer in graph.inputs)
    steps: Sequence[Step] = writer.steps
    if options.plan_memory:
        steps = plan_memory(writer.steps, inputs=inputs, outputs=plan.outputs)
    position_of = {name: position for position, (name, _) in enumerate(inputs)}
    output_of = {name: position for position, name in reversed(list(enumerate(plan.outputs)))}
    return Program(
        inputs=inputs,
        scalars=graph.scalars,
        kernels=tuple(writer.sources),
        steps=tuple(steps),
        outputs=plan.outputs,
        output_metas=tuple(writer.buffers[name].meta for name in plan.outputs),
        donations=tuple((output_of[name], position_of[target]) for name, target in plan.donations.items()),
        notes=(("kernels", len(plan.kernels)), ("removed buffers", len(plan.removed))),
    )


@dataclass
class _ProgramEmitter:
    plan: Schedule
    graph: LoopGraph
    emit_once: EmitOnce
    steps: list[Step] = field(default_factory=list)
    sources: list[KernelSource] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)  # by content
    buffers: dict[str, Buffer] = field(default_factory=dict)
    memory_names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = {buffer.name: buffer for buffer in self.graph.inputs}
        for item in self.plan.items:
            if isinstance(item, Kernel):
                made: Sequence[Buffer | None] = item.writes
            else:
                made = (item.output,) if isinstance(item, ViewNode) else item.outputs
            self.buffers |= {buffer.name: buffer for buffer in made if buffer is not None}

    def emit_items(self, options: EmitOptions) -> None:
        """Write the steps of all items, slot by slot."""
        keys = [
            self._family(item) if options.foreach and isinstance(item, Kernel) else None for item in self.plan.items
        ]
        for slot in plan_slots(self.plan, keys, options.hoisted_bytes):
            items = [self.plan.items[number] for number in slot.items]
            if len(items) == 1:
                self._emit_item(items[0])
                continue
            for kernels in self._of_one_source([item for item in items if isinstance(item, Kernel)]):
                if len(kernels) == 1:
                    self._emit_item(kernels[0])
                    continue
                for kernel in kernels:
                    self._make_outputs(kernel)
                self._emit_foreach(kernels)

    def _family(self, kernel: Kernel) -> Hashable | None:
        """What kernels of one launch have in common for all that is known without their text; None for no launch."""
        if not _has_points(kernel) or not kernel.writes:
            return None
        return self.emit_once.fingerprint(kernel).family

    def _of_one_source(self, kernels: Sequence[Kernel]) -> list[list[Kernel]]:
        """Kernels that do not depend on each other, parted by what is the text of a foreach launch."""
        parts: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            try:
                key = self.emit_once(kernel, foreach=True).source.key
            except ValueError:  # the language has no such form of this kernel
                key = f"alone {kernel.writes[0].name}"
            parts.setdefault(key, []).append(kernel)
        return list(parts.values())

    def _emit_item(self, item: Kernel | ExternNode | ViewNode) -> None:
        if isinstance(item, Kernel):
            self._make_outputs(item)
            if _has_points(item) and item.writes:
                emitted = self.emit_once(item)
                buffers = tuple(map(self._memory_name, emitted.buffers))
                self.steps.append(Launch(self._number(emitted.source), buffers, emitted.scalars, emitted.sizes))
        elif isinstance(item, ExternNode):
            self._emit_extern(item)
        else:
            self._emit_view(item)

    def _emit_foreach(self, kernels: Sequence[Kernel]) -> None:
        """One launch; a scalar whose name differs between rows becomes a column of the table."""
        rows = [self.emit_once(kernel, foreach=True) for kernel in kernels]
        first = rows[0]
        varying = {
            place for place in range(len(first.scalars)) if len({emitted.scalars[place] for emitted in rows}) > 1
        }
        source, shared = first.source, first.scalars
        places: list[int] = []
        if varying:
            place_of = {name: place for place, name in enumerate(first.scalars)}
            names = frozenset(first.scalars[place] for place in varying)
            emitted = self.emit_once(kernels[0], foreach=True, row_scalars=names)
            source, shared = emitted.source, emitted.scalars
            places = [place_of[name] for name in emitted.row_scalars]
        self.steps.append(
            ForeachLaunch(
                self._number(source),
                tuple(
                    (
                        tuple(map(self._memory_name, row.buffers)),
                        row.sizes,
                        tuple(row.scalars[place] for place in places),
                    )
                    for row in rows
                ),
                shared,
            )
        )

    def _make_outputs(self, kernel: Kernel) -> None:
        for buffer in kernel.writes:
            target = self.plan.donations.get(buffer.name)
            if target is None:
                self.steps.append(Allocate(buffer.name, _ints(buffer.meta)))
            else:
                self.steps.append(Reinterpret(buffer.name, target, _ints(buffer.meta), 0))

    def _emit_extern(self, node: ExternNode) -> None:
        self.steps.append(
            ExternCall(
                op=str(node.op),
                args=_resolve(node.args),
                kwargs=tuple((name, _resolve(value)) for name, value in node.kwargs.items()),
                outputs=tuple(None if buffer is None else buffer.name for buffer in node.outputs),
                metas=tuple(None if buffer is None else _ints(buffer.meta) for buffer in node.outputs),
            )
        )

    def _emit_view(self, node: ViewNode) -> None:
        source, output = self.buffers[node.source], node.output
        start, rest = divmod(integer_of(source.offset) * source.dtype.itemsize, output.dtype.itemsize)
        if rest:
            raise ValueError(
                f"view {output.name}: {node.source} starts {source.offset} elements of {source.dtype} into its "
                f"memory, which is no whole number of {output.dtype}; lowering must copy such a source first"
            )
        self.steps.append(Reinterpret(output.name, node.source, _ints(output.meta), integer_of(output.offset) - start))

    def _memory_name(self, name: str) -> str:
        """The value whose element 0 is the start of the buffer's memory."""
        buffer = self.buffers[name]
        if buffer.offset == 0:
            return name
        if name not in self.memory_names:
            span = integer_of(buffer.offset) + 1
            span += sum((integer_of(n) - 1) * integer_of(s) for n, s in zip(buffer.shape, buffer.strides, strict=True))
            meta = TensorMeta((span,), buffer.dtype, (1,), buffer.device)
            self.memory_names[name] = f"{name}_memory"
            self.steps.append(Reinterpret(f"{name}_memory", name, meta, -integer_of(buffer.offset)))
        return self.memory_names[name]

    def _number(self, source: KernelSource) -> int:
        number = self.numbers.setdefault(source.key, len(self.sources))
        if number == len(self.sources):
            self.sources.append(source)
        return number


def _has_points(kernel: Kernel) -> bool:
    """Whether there is anything to compute; a reduction over nothing still writes its identity."""
    return all(axis.size != 0 for axis in kernel.axes)


def _ints(meta: TensorMeta) -> TensorMeta:
    return replace(meta, shape=tuple(map(integer_of, meta.shape)), strides=tuple(map(integer_of, meta.strides)))


def _resolve(value: Any) -> Any:
    if isinstance(value, BufferRef):
        return ValueRef(value.name, value.scalar)
    if isinstance(value, (tuple, list)):
        return tuple(_resolve(item) for item in value)
    return value
