"""Fusion: which loop nodes become one kernel, with a reason for every yes and no.

Nodes are taken in dependency order; each tries the groups that produce what it reads, then groups that read the same
large buffers. Two groups fuse where a common space exists (`axes`), every buffer that one writes and the other reads is
read at the point that writes it, no third node stands between them, and it pays.

Invariant: groups are disjoint, cover every loop node, and contracting them leaves the dependencies acyclic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from torchlazy.inductor.access import NodeFacts
from torchlazy.inductor.axes import Link, Match, Space, identity_match, map_coefs
from torchlazy.inductor.dependencies import Dependencies, node_writes
from torchlazy.inductor.fusion_group import (
    Group,
    compose,
    count_up,
    describe,
    match_links,
    match_readers,
    new_group,
    points_differ,
    reads_whole,
    reduces_innermost,
    union,
)
from torchlazy.inductor.index_form import Digits
from torchlazy.inductor.ir import LoopNode, Node, ViewNode
from torchlazy.prims.size_int import hint, same_sizes, surely_equal


@dataclass(frozen=True, slots=True)
class FusionDecision:
    """Whether `a` (the earlier) and `b` were put into one kernel, and why."""

    fused: bool
    reason: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.a} {'+' if self.fused else '|'} {self.b}: {self.reason}"


@dataclass(frozen=True, slots=True)
class FusionOptions:
    """Limits of fusion. Buffers and statements bound registers and compile time; see `_too_serial` for the rest."""

    max_buffers: int = 32
    max_statements: int = 128
    max_work: int = 1500  # additions a point; gelu forward and backward make 150, AdamW 60
    horizontal: bool = True
    horizontal_distance: int = 100  # nodes between two readers of one buffer; fusing far ones prolongs lifetimes
    serial_points: int = 16384  # below this many points a kernel may be as serial as it likes
    min_rows: int = 128  # parallel points (or tiles of columns) that a GPU kernel with full-size stores needs
    min_rows_cpu: int = 8
    column_tile: int = 32


def fuse(
    nodes: Sequence[Node],
    facts: Sequence[NodeFacts | None],
    dependencies: Dependencies,
    order: Sequence[int],
    outputs: Iterable[str],
    donations: dict[str, str],
    options: FusionOptions,
    late: Set[int] = frozenset(),
) -> tuple[list[Group], list[FusionDecision]]:
    """Group the loop nodes, those in `late` among themselves; `order` is a dependency order of all nodes."""
    fuser = _Fuser(nodes, facts, dependencies, order, frozenset(outputs), donations, options, late)
    fuser.run()
    groups = {id(group): group for group in fuser.groups if group is not None}
    return list(groups.values()), fuser.decisions


class _Fuser:
    """The working state: groups by node, and for each group the nodes before it, as bit masks.

    Of a group before another at least one node is in the other's mask, not always all of them.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        facts: Sequence[NodeFacts | None],
        dependencies: Dependencies,
        order: Sequence[int],
        outputs: frozenset[str],
        donations: dict[str, str],
        options: FusionOptions,
        late: Set[int],
    ) -> None:
        self.nodes = nodes
        self.facts = facts
        self.dependencies = dependencies
        self.order = order
        self.rank = {node: rank for rank, node in enumerate(order)}
        self.outputs = outputs
        self.donations = donations
        self.windows = _windows_of(nodes, set(donations.values()))
        self.options = options
        self.late = late
        self.groups: list[Group | None] = [None] * len(nodes)
        self.head: list[int] = list(range(len(nodes)))  # the node that stands for a node's group
        self.members: list[list[int]] = [[n] for n in range(len(nodes))]
        self.before: list[int] = [0] * len(nodes)  # by head: all nodes before the group
        self.after: list[list[int]] = [[] for _ in nodes]  # of what was placed so far: who needs this node at once
        self.decisions: list[FusionDecision] = []
        self.refused: set[tuple[int, int, int, int]] = set()

    def run(self) -> None:
        for node in self.order:
            self._enter(node)
            for producer in self._producers(node):
                self._try(self.head[producer], self.head[node])
        if self.options.horizontal:
            self._fuse_readers()
            self._fuse_second_stages()
        for group in {id(g): g for g in self.groups if g is not None}.values():
            group.nodes.sort(key=self.rank.__getitem__)

    def _enter(self, node: int) -> None:
        before = 0
        for source in self.dependencies.before[node]:
            head = self.head[source]
            before |= self.before[head] | self._mask(head)
            self.after[source].append(node)
        self.before[node] = before
        facts = self.facts[node]
        if facts is not None:
            self.groups[node] = new_group(node, facts)

    def _mask(self, head: int) -> int:
        group = self.groups[head]
        return group.mask if group is not None else 1 << head

    def _producers(self, node: int) -> list[int]:
        """The loop nodes whose buffers this one reads, the largest buffer first, then the nearest."""
        facts = self.facts[node]
        if facts is None:
            return []
        found: dict[int, int] = {}
        for name in facts.reads:
            producer = self.dependencies.producer.get(name)
            if producer is not None and self.facts[producer] is not None:
                found[producer] = max(found.get(producer, 0), self._bytes(producer, name))
        return sorted(found, key=lambda producer: (-found[producer], -self.rank[producer]))

    def _bytes(self, producer: int, name: str) -> int:
        node = self.nodes[producer]
        assert isinstance(node, LoopNode)
        buffer = next(b for b in node.outputs if b.name == name)
        return int(hint(buffer.meta.numel)) * buffer.dtype.itemsize

    def _fuse_readers(self) -> None:
        """Groups that walk one buffer whole, alike, read it once."""
        for name, readers in self.dependencies.readers.items():
            previous: int | None = None
            for reader in sorted(readers, key=self.rank.__getitem__):
                group = self.groups[self.head[reader]]
                if group is None or not reads_whole(group, name):
                    continue
                if previous is not None and self.head[previous] != self.head[reader]:
                    distance = self.rank[reader] - self.rank[previous]
                    if distance <= self.options.horizontal_distance:
                        self._try(self.head[previous], self.head[reader])
                previous = reader

    def _fuse_second_stages(self) -> None:
        """Sums whose partial results one kernel makes end in one kernel too: a launch takes longer than they do.

        Only where somebody waits for them: those of parameters' gradients share launches with other layers' later.
        """
        for group in list({id(group): group for group in self.groups if group is not None}.values()):
            previous: int | None = None
            for name in group.writes if group.is_reduction else ():
                for reader in sorted(self.dependencies.readers.get(name, ()), key=self.rank.__getitem__):
                    second = self.groups[self.head[reader]]
                    if second is None or not second.is_reduction or not reads_whole(second, name):
                        continue
                    if not any(self._is_read_outside(written, second.mask) for written in second.writes):
                        continue
                    if previous is not None:
                        self._try(self.head[previous], self.head[reader], are_second_stages=True)
                    previous = reader

    # ---- one pair

    def _try(self, a: int, b: int, *, are_second_stages: bool = False) -> None:
        """Fuse the groups headed by `a` and `b` if that is legal and pays; write down the decision."""
        if a == b:
            return
        first, second = self.groups[a], self.groups[b]
        assert first is not None and second is not None
        attempt = (a, len(first.nodes), b, len(second.nodes))
        if attempt in self.refused and not are_second_stages:
            return
        outcome = self._judge(a, b, first, second, are_second_stages)
        names = (node_writes(self.nodes[first.nodes[-1]])[0], node_writes(self.nodes[second.nodes[-1]])[0])
        if isinstance(outcome, str):
            self.refused.add(attempt)
            self.decisions.append(FusionDecision(False, outcome, *names))
            return
        reason = describe(first, second)
        decision = FusionDecision(True, reason, *names)
        self.decisions.append(decision)
        self._merge(a, b, outcome, str(decision))

    def _judge(self, a: int, b: int, first: Group, second: Group, are_second_stages: bool) -> Match | str:
        if first.device != second.device:
            return f"devices differ: {first.device} and {second.device}"
        if (first.nodes[0] in self.late) != (second.nodes[0] in self.late):
            return "one of them needs inputs that come late"
        reason = points_differ(first, second) or self._too_large(first, second)
        if reason:
            return reason
        required = self._required_links(first, second)
        if isinstance(required, str):
            return required
        if self._is_between(a, b):
            return "another node stands between them"
        match: Match | str | None = identity_match(first.space, second.space) if are_second_stages else None
        if match is None or required:
            match = match_links(first, second, required) if required else match_readers(first, second)
        if isinstance(match, str):
            return match
        if not self._keeps_order(first, match.first, match.space) or not self._keeps_order(
            second, match.second, match.space
        ):
            return "the loops would be reordered under an argmax or argmin"
        return self._too_serial(first, second, match) or match

    def _too_large(self, first: Group, second: Group) -> str:
        statements = len(first.nodes) + len(second.nodes)
        if statements > self.options.max_statements:
            return f"{statements} statements, more than {self.options.max_statements}"
        work = first.work + second.work
        if work > self.options.max_work:
            return f"{work} additions a point, more than {self.options.max_work}"
        inside = first.writes.keys() | second.writes.keys()
        reads = (first.reads.keys() | second.reads.keys() | first.scattered | second.scattered) - inside
        nodes = first.mask | second.mask
        buffers = len(reads) + sum(self._is_needed_outside(name, nodes) for name in inside)
        if buffers > self.options.max_buffers:
            return f"{buffers} buffers, more than {self.options.max_buffers}"
        return ""

    def _required_links(self, first: Group, second: Group) -> list[Link] | str:
        """What one writes and the other reads, or the reason why such a read is not at the point that is written."""
        links: dict[Link, None] = {}
        for writer, reader, swap in ((first, second, False), (second, first, True)):
            for name, place in writer.writes.items():
                for target in (name, self.donations.get(name)):
                    if target is None:
                        continue
                    if target in reader.scattered:
                        return f"{target} is read at points that depend on data or do not step evenly"
                    for window in self.windows.get(target, ()) if target != name else ():
                        if window in reader.scattered or window in reader.reads:
                            return f"{window} is a view of {target}, which {name} overwrites"
                    if target != name and writer.is_reduction and target in reader.reads:
                        return f"{name} overwrites {target}, which is still read"
                    for coefs, const in reader.reads.get(target, ()):
                        if not surely_equal(const, place[1]):
                            return f"{target} is read at a shift of {const - place[1]} to where it is written"
                        links[(coefs, place[0]) if swap else (place[0], coefs)] = None
        return list(links)

    def _is_between(self, a: int, b: int) -> bool:
        """Whether a path from one group to the other leaves both."""
        for one, other in ((a, b), (b, a)):
            target = self._mask(other)
            for member in self.members[one]:
                for source in self.dependencies.before[member]:
                    head = self.head[source]
                    if head not in (a, b) and self.before[head] & target:
                        return True
        return False

    def _keeps_order(self, group: Group, mapping: tuple[Digits, ...] | None, space: Space) -> bool:
        """The reduce atoms of an argmax must still count up its position."""
        for node in group.nodes:
            facts = self.facts[node]
            assert facts is not None
            if not facts.keeps_order:
                continue
            own = count_up(Space(facts.sizes, facts.reduced))
            place = compose(group.places[node], mapping)
            if not same_sizes(map_coefs(own, place, len(space.sizes)), count_up(space)):
                return False
        return True

    def _too_serial(self, first: Group, second: Group, match: Match) -> str:
        """A kernel whose few parallel points each walk a long reduction should not also write full-size results.

        Those are better written by a kernel of their own with every point in parallel. Column reductions run a tile of
        neighbouring columns together, so they have fewer parallel pieces still.
        """
        space, options = match.space, self.options
        points, reduce_points = hint(space.points), hint(space.reduce_points)
        if not space.has_reduce or points * reduce_points <= options.serial_points:
            return ""
        nodes = first.mask | second.mask
        rank = len(space.sizes)
        full = [
            name
            for group, mapping in ((first, match.first), (second, match.second))
            for name, (coefs, _) in group.writes.items()
            if any(c and r for c, r in zip(map_coefs(coefs, mapping, rank), space.reduced, strict=True))
            and self._is_needed_outside(name, nodes)
        ]
        if not full:
            return ""
        is_cpu = first.device == "cpu"
        rows = points if reduces_innermost(first, second, match) else points // options.column_tile
        least = options.min_rows_cpu if is_cpu else options.min_rows
        if rows >= least:
            return ""
        return f"{full[0]} is stored whole, and {points} points of {reduce_points} steps are too few to run in parallel"

    def _is_needed_outside(self, name: str, inside: int) -> bool:
        return name in self.outputs or self._is_read_outside(name, inside)

    def _is_read_outside(self, name: str, inside: int) -> bool:
        return any(not inside >> reader & 1 for reader in self.dependencies.readers.get(name, ()))

    def _merge(self, a: int, b: int, match: Match, decision: str) -> None:
        first, second = self.groups[a], self.groups[b]
        assert first is not None and second is not None
        merged = union(first, second, match, decision)
        mine, theirs = self.members[a], self.members[b]
        keep, drop = (a, b) if len(self.members[a]) >= len(self.members[b]) else (b, a)
        for node in self.members[drop]:
            self.head[node] = keep
            self.groups[node] = None
        self.groups[keep] = merged
        self.members[keep] = self.members[keep] + self.members[drop]
        self.members[drop] = []
        outside = ~merged.mask
        before_a, before_b = self.before[a] & outside, self.before[b] & outside
        self.before[keep] = before_a | before_b
        # One node of the merged group is before whatever either was before: only what the other knew beyond is news.
        for members, news in ((mine, before_b & ~before_a), (theirs, before_a & ~before_b)):
            if news:
                self._update_successors(keep, members, news)

    def _update_successors(self, merged: int, members: list[int], news: int) -> None:
        """`news` is before all that these members of `merged` are before; a group that knows has told those after it.

        A group is known as soon as one of its nodes is, so that a group that grows need not be told of anew: telling
        everyone after an early gradient that a parameter's update joined it made fusion quadratic in the layers.
        """
        stack = [members]
        while stack:
            for member in stack.pop():
                for reader in self.after[member]:
                    head = self.head[reader]
                    known = self.before[head]
                    if head != merged and known | news != known:
                        self.before[head] = known | news
                        stack.append(self.members[head])


def _windows_of(nodes: Sequence[Node], targets: set[str]) -> dict[str, tuple[str, ...]]:
    """The views, direct or not, of each donated input."""
    roots: dict[str, str] = {name: name for name in targets}
    windows: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ViewNode) and node.source in roots:
            root = roots[node.output.name] = roots[node.source]
            windows.setdefault(root, []).append(node.output.name)
    return {name: tuple(views) for name, views in windows.items()}
