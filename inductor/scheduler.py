"""From a loop graph to an ordered list of kernels, extern calls and views.

Invariant: running `Schedule.items` in order gives what running the graph's nodes in order gives; every buffer that an
item reads from memory is an input or stored by an earlier item; a donated output's kernel comes after all readers of
the input that it overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torchlazy.inductor.access import Known, NodeFacts, collect_facts
from torchlazy.inductor.arrival import late_nodes
from torchlazy.inductor.dependencies import (
    Dependencies,
    collect_dependencies,
    node_reads,
    node_writes,
    topological,
)
from torchlazy.inductor.donation import DonationPlan, plan_donations
from torchlazy.inductor.fusion import FusionDecision, FusionOptions, fuse
from torchlazy.inductor.fusion_group import Group
from torchlazy.inductor.ir import Buffer, ExternNode, Kernel, LoopGraph, LoopNode, Node, Statement, Sweep, ViewNode
from torchlazy.inductor.placement import PlacedNode, place_node, plan_axes, rewrite_node
from torchlazy.inductor.sweeps import Member, plan_sweeps

Item: TypeAlias = "Kernel | ExternNode | ViewNode"


@dataclass(frozen=True)
class ScheduleOptions:
    """What scheduling may do; `fuse=False` gives one kernel a node, `in_stages` none of nodes that need inputs which
    come late and of others."""

    fuse: bool = True
    in_stages: bool = False
    fusion: FusionOptions = field(default_factory=FusionOptions)


@dataclass(frozen=True)
class Schedule:
    """Items in execution order, and the program's outputs and donations as planned (a copy may have renamed one)."""

    items: tuple[Item, ...]
    decisions: tuple[FusionDecision, ...]
    removed: tuple[str, ...]  # buffers that never reach memory
    outputs: tuple[str, ...]
    donations: dict[str, str]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(item for item in self.items if isinstance(item, Kernel))


def schedule(graph: LoopGraph, options: ScheduleOptions | None = None) -> Schedule:
    """Fuse the graph's loops and put kernels, extern calls and views into a safe order."""
    options = options or ScheduleOptions()
    nodes, facts = _live_nodes(graph)
    plan = plan_donations(graph, nodes, facts)
    dependencies, order = _ordered(plan)
    fusion = options.fusion if options.fuse else FusionOptions(max_statements=1, horizontal=False)
    late = late_nodes(graph.inputs, plan.nodes, plan.facts) if options.in_stages else frozenset()
    groups, decisions = fuse(plan.nodes, plan.facts, dependencies, order, plan.outputs, plan.donations, fusion, late)
    builder = _KernelBuilder(graph, plan, dependencies)
    items = tuple(builder.build(unit) for unit in _ordered_units(plan.nodes, dependencies, groups))
    dropped = [FusionDecision(False, f"donation: {reason}", output, target) for output, target, reason in plan.dropped]
    stored = {buffer.name for item in items if isinstance(item, Kernel) for buffer in item.writes}
    removed = tuple(
        buffer.name
        for node in plan.nodes
        if isinstance(node, LoopNode)
        for buffer in node.outputs
        if buffer.name not in stored
    )
    return Schedule(items, (*decisions, *dropped), removed, plan.outputs, dict(plan.donations))


def _live_nodes(graph: LoopGraph) -> tuple[list[Node], list[NodeFacts | None]]:
    """The nodes that an output needs, with their facts."""
    known: Known = {}
    facts = [collect_facts(node, known) if isinstance(node, LoopNode) else None for node in graph.nodes]
    needed = set(graph.outputs)
    kept: list[int] = []
    for position in reversed(range(len(graph.nodes))):
        node = graph.nodes[position]
        if needed.isdisjoint(node_writes(node)):
            continue
        needed.update(node_reads(node, facts[position]))
        kept.append(position)
    kept.reverse()
    return [graph.nodes[position] for position in kept], [facts[position] for position in kept]


def _ordered(plan: DonationPlan) -> tuple[Dependencies, list[int]]:
    """The dependencies of the nodes, and an order that respects them.

    What is computed again for the sake of memory depends on the library call before it: fused with an earlier kernel it
    would be held from there on. Where that contradicts a donation, memory gives way.
    """
    late: list[tuple[int, int]] = []
    call: int | None = None
    for position, node in enumerate(plan.nodes):
        if isinstance(node, ExternNode):
            call = position
        elif isinstance(node, LoopNode) and node.is_late and call is not None:
            late.append((call, position))
    for edges in ((*plan.anti, *late), plan.anti) if late else (plan.anti,):
        dependencies = collect_dependencies(plan.nodes, plan.facts, edges)
        try:
            return dependencies, topological(dependencies.before, lambda position: position)
        except ValueError:
            if edges == plan.anti:
                raise
    raise AssertionError("the last attempt returns or raises")


def _ordered_units(
    nodes: Sequence[Node], dependencies: Dependencies, groups: Sequence[Group]
) -> list[Group | ExternNode | ViewNode]:
    """Groups and single nodes in the order of the graph, a group at the place of its first node or as soon as it can
    run.

    The recorded order keeps lifetimes as they were. A bias gradient that is fused with its parameter's update must not
    wait for the optimizer's place at the end: the activations' gradient that it reduces would live till then.
    """
    units: list[Group | ExternNode | ViewNode] = [*groups]
    unit_of: dict[int, int] = {node: unit for unit, group in enumerate(groups) for node in group.nodes}
    key = [min(group.nodes) for group in groups]
    for position, node in enumerate(nodes):
        if not isinstance(node, LoopNode):
            unit_of[position] = len(units)
            units.append(node)
            key.append(position)
    before: list[dict[int, None]] = [{} for _ in units]
    for position in range(len(nodes)):
        unit = unit_of[position]
        for source in dependencies.before[position]:
            if unit_of[source] != unit:
                before[unit][unit_of[source]] = None
    return [units[unit] for unit in topological([tuple(sources) for sources in before], key.__getitem__)]


class _KernelBuilder:
    """Turns groups into kernels; knows every buffer of the program."""

    def __init__(self, graph: LoopGraph, plan: DonationPlan, dependencies: Dependencies) -> None:
        self.plan = plan
        self.dependencies = dependencies
        self.outputs = set(plan.outputs)
        self.scalars = dict(graph.scalars)
        self.buffers: dict[str, Buffer] = {buffer.name: buffer for buffer in graph.inputs}
        for node in plan.nodes:
            outputs = (node.output,) if isinstance(node, ViewNode) else node.outputs
            self.buffers |= {buffer.name: buffer for buffer in outputs if buffer is not None}
        self.itemsize = {name: buffer.dtype.itemsize for name, buffer in self.buffers.items()}

    def build(self, unit: Group | ExternNode | ViewNode) -> Item:
        return self._kernel(unit) if isinstance(unit, Group) else unit

    def _kernel(self, group: Group) -> Kernel:
        placed = [self._place(node, group) for node in group.nodes]
        axes = plan_axes(group, placed, self.itemsize)
        members = self._members(group, placed)
        rewritten = [rewrite_node(member, axes) for member in placed]
        reads: dict[str, Buffer] = {}
        writes: dict[str, Buffer] = {}
        scalars: dict[str, None] = {}
        sweeps: list[Sweep] = []
        for sweep in plan_sweeps(members):
            statements: list[Statement] = []
            for place, stores in sweep.statements:
                member = placed[place]
                node, index, reduce_index = rewritten[place]
                names = self._stored(member.node, group) if stores else ()
                statements.append(Statement(node, index, reduce_index, names))
                reads |= {name: self.buffers[name] for name, _ in member.loads if name not in group.writes}
                writes |= {name: self.buffers[name] for name in names}
                scalars |= dict.fromkeys(member.facts.scalars)
            sweeps.append(Sweep(sweep.over_reduce, tuple(statements)))
        donations = self.plan.donations
        return Kernel(
            axes=axes.axes,
            reduce_axes=axes.reduce_axes,
            sweeps=tuple(sweeps),
            reads=tuple(reads.values()),
            writes=tuple(writes.values()),
            scalars=tuple((name, self.scalars[name]) for name in scalars),
            aliases=tuple((name, donations[name]) for name in writes if donations.get(name) in reads),
            reasons=tuple(group.decisions),
            is_late=any(member.node.is_late for member in placed),
        )

    def _place(self, position: int, group: Group) -> PlacedNode:
        node, facts = self.plan.nodes[position], self.plan.facts[position]
        assert isinstance(node, LoopNode) and facts is not None
        return place_node(node, facts, group.places[position], group.space)

    def _stored(self, node: LoopNode, group: Group) -> tuple[str, ...]:
        """The outputs of a node that someone outside its group reads."""

        def is_needed(name: str) -> bool:
            readers = self.dependencies.readers.get(name, ())
            return name in self.outputs or any(not group.mask >> reader & 1 for reader in readers)

        return tuple(buffer.name for buffer in node.outputs if is_needed(buffer.name))

    def _members(self, group: Group, placed: Sequence[PlacedNode]) -> list[Member]:
        place_of = {name: place for place, member in enumerate(placed) for name, _ in member.stores}
        touched = {name for member in placed for name, _ in member.loads}
        members = []
        for position, member in zip(group.nodes, placed, strict=True):
            needs = {place_of[name]: None for name, _ in member.loads if name in place_of}
            stored = self._stored(member.node, group)
            members.append(
                Member(
                    node=position,
                    over_reduce=member.facts.is_reduction or member.runs_over(group.space.reduced),
                    is_reduction=member.facts.is_reduction,
                    needs=tuple(needs),
                    is_stored=bool(stored),
                    overwrites=any(self.plan.donations.get(name) in touched for name in stored),
                )
            )
        return members


def format_schedule(plan: Schedule) -> str:
    """The schedule as text: kernels with their axes, sweeps and reasons, then what was not fused and why."""
    lines: list[str] = []
    for number, item in enumerate(plan.items):
        if isinstance(item, Kernel):
            lines.extend(_format_kernel(number, item, plan.donations))
        elif isinstance(item, ExternNode):
            outputs = ", ".join("None" if b is None else f"{b.name}: {b.meta}" for b in item.outputs)
            lines.append(f"{number}: extern {item.op} -> {outputs}")
        else:
            view = item.output
            lines.append(f"{number}: view {view.name}: {view.meta} of {item.source} + {view.offset}")
    lines.append(f"removed: {', '.join(plan.removed) or 'none'}")
    lines.extend(f"not fused: {decision}" for decision in plan.decisions if not decision.fused)
    return "\n".join(lines)


def _format_kernel(number: int, kernel: Kernel, donations: dict[str, str]) -> list[str]:
    axes = ", ".join(f"{a.symbol}:{a.size}" for a in kernel.axes) or "one point"
    reduce = ", ".join(f"{a.symbol}:{a.size}" for a in kernel.reduce_axes)
    lines = [f"{number}: kernel [{axes}]" + (f" reduce [{reduce}]" if reduce else "")]
    lines.append("    reads " + (", ".join(f"{b.name}: {b.meta}" for b in kernel.reads) or "nothing"))
    for sweep in kernel.sweeps:
        lines.append("    for each reduce point:" if sweep.over_reduce_axes else "    for each point:")
        for statement in sweep.statements:
            node = statement.node
            names = ", ".join(b.name for b in node.outputs)
            kind = node.reduction or "pointwise"
            stored = "".join(
                f", store {name}" + (f" into {donations[name]}" if name in donations else "")
                for name in statement.stored
            )
            more = " ..." if len(node.origins) > 4 else ""
            origin = f"  # {'; '.join(node.origins[:4])}{more}" if node.origins else ""
            lines.append(f"        {names} = {kind}{stored}{origin}")
    lines.extend(f"    because {reason}" for reason in kernel.reasons)
    return lines
