"""Fusion: which loop nodes become one kernel, with a reason for every yes and no.

Nodes are taken in dependency order; each tries the groups that produce what it reads, then groups that read the same
large buffers. Two groups fuse where a common space exists (`axes`), every buffer that one writes and the other reads is
read at the point that writes it, no third node stands between them, and it pays.

Invariant: groups are disjoint, cover every loop node, and contracting them leaves the dependencies acyclic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchlazy.inductor.access import NodeFacts
from torchlazy.inductor.axes import Coefs, Link, Match, Space, identity_match, map_coefs, match_spaces
from torchlazy.inductor.dependencies import Dependencies, node_writes
from torchlazy.inductor.index_form import Digits
from torchlazy.inductor.ir import LoopNode, Node, ViewNode
from torchlazy.prims.size_int import hint, same_sizes, surely_equal

Place = tuple[Coefs, int]  # element strides over a group's atoms, and the constant offset


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


@dataclass(slots=True)
class Group:
    """Loop nodes on one space. `places` are each node's atoms as digits of it (None: one to one)."""

    nodes: list[int]
    space: Space
    places: dict[int, tuple[Digits, ...] | None]
    reads: dict[str, dict[Place, None]]
    scattered: set[str]  # read at points that are not affine in the atoms
    writes: dict[str, Place]
    device: str
    is_reduction: bool
    mask: int
    work: int  # of one point, in additions
    decisions: list[str] = field(default_factory=list)


def fuse(
    nodes: Sequence[Node],
    facts: Sequence[NodeFacts | None],
    dependencies: Dependencies,
    order: Sequence[int],
    outputs: Iterable[str],
    donations: dict[str, str],
    options: FusionOptions,
) -> tuple[list[Group], list[FusionDecision]]:
    """Group the loop nodes; `order` is a dependency order of all nodes."""
    fuser = _Fuser(nodes, facts, dependencies, order, frozenset(outputs), donations, options)
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
            self.groups[node] = _new_group(node, facts)

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
                if group is None or not _reads_whole(group, name):
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
                    if second is None or not second.is_reduction or not _reads_whole(second, name):
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
        reason = _describe(first, second)
        decision = FusionDecision(True, reason, *names)
        self.decisions.append(decision)
        self._merge(a, b, outcome, str(decision))

    def _judge(self, a: int, b: int, first: Group, second: Group, are_second_stages: bool) -> Match | str:
        if first.device != second.device:
            return f"devices differ: {first.device} and {second.device}"
        reason = _points_differ(first, second) or self._too_large(first, second)
        if reason:
            return reason
        required = self._required_links(first, second)
        if isinstance(required, str):
            return required
        if self._is_between(a, b):
            return "another node stands between them"
        match: Match | str | None = identity_match(first.space, second.space) if are_second_stages else None
        if match is None or required:
            match = _match(first, second, required) if required else _match_readers(first, second)
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
        nodes = _mask_of_nodes(first, second)
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
                            return f"{window} is a window on {target}, which {name} overwrites"
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
            own = _count_up(Space(facts.sizes, facts.reduced))
            place = compose(group.places[node], mapping)
            if not same_sizes(map_coefs(own, place, len(space.sizes)), _count_up(space)):
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
        nodes = _mask_of_nodes(first, second)
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
        rows = points if _reduces_innermost(first, second, match) else points // options.column_tile
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
        merged = _union(first, second, match, decision)
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
                self._tell_those_after(keep, members, news)

    def _tell_those_after(self, merged: int, members: list[int], news: int) -> None:
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


def _new_group(node: int, facts: NodeFacts) -> Group:
    reads: dict[str, dict[Place, None]] = {}
    scattered: set[str] = set()
    for name, form in facts.loads:
        if form.is_affine:
            reads.setdefault(name, {})[form.coefs, form.const] = None
        else:
            scattered.add(name)
    return Group(
        nodes=[node],
        space=Space(facts.sizes, facts.reduced),
        places={node: None},
        reads=reads,
        scattered=scattered,
        writes={name: (form.coefs, form.const) for name, form in facts.stores},
        device=facts.device,
        is_reduction=facts.is_reduction,
        mask=1 << node,
        work=facts.work,
    )


def _windows_of(nodes: Sequence[Node], targets: set[str]) -> dict[str, tuple[str, ...]]:
    """The views, direct or not, of each donated input."""
    roots: dict[str, str] = {name: name for name in targets}
    windows: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ViewNode) and node.source in roots:
            root = roots[node.output.name] = roots[node.source]
            windows.setdefault(root, []).append(node.output.name)
    return {name: tuple(views) for name, views in windows.items()}


def _mask_of_nodes(first: Group, second: Group) -> int:
    return first.mask | second.mask


def _points_differ(first: Group, second: Group) -> str:
    a, b = (first.space.points, first.space.reduce_points), (second.space.points, second.space.reduce_points)
    if 0 in (*a, *b):
        return "a loop over no elements"
    if same_sizes(a, b):
        return ""
    if first.is_reduction and second.is_reduction:
        return f"reductions over different loops: {a[0]} points of {a[1]} steps against {b[0]} of {b[1]}"
    reduction, pointwise = (a, b[0]) if first.is_reduction else (b, a[0])
    if (first.is_reduction or second.is_reduction) and (
        surely_equal(pointwise, reduction[0]) or surely_equal(pointwise, reduction[0] * reduction[1])
    ):
        return ""
    return f"numbers of points differ: {a[0] * a[1]} and {b[0] * b[1]}"


def _match(first: Group, second: Group, required: list[Link]) -> Match | str:
    identity = identity_match(first.space, second.space)
    if identity is not None and _holds(identity, required):
        return identity
    links = sorted(required, key=_steps, reverse=True)
    match = match_spaces(first.space, second.space, [*links, *_shared_links(first, second)])
    if isinstance(match, str):
        return match
    if not _holds(match, required):
        return "a value is read at another point than the one that computes it"
    return match


def _match_readers(first: Group, second: Group) -> Match | str:
    """A space in which both walk a buffer that both read whole in the same way: that is what they gain by."""
    for link in _shared_links(first, second):
        if all(link[0]) or all(link[1]):
            match = _match(first, second, [link])
            if not isinstance(match, str):
                return match
    return "they read one buffer, but not alike"


def _holds(match: Match, links: Iterable[Link]) -> bool:
    rank = len(match.space.sizes)
    return all(same_sizes(map_coefs(a, match.first, rank), map_coefs(b, match.second, rank)) for a, b in links)


def _steps(link: Link) -> int:
    return sum(1 for coef in link[0] if coef)


def _shared_links(first: Group, second: Group) -> list[Link]:
    """How both walk the buffers that both read, the walks over most atoms first."""
    links: dict[Link, None] = {}
    for name, places in first.reads.items():
        for coefs, const in places:
            for other, other_const in second.reads.get(name, ()):
                if surely_equal(const, other_const):
                    links[coefs, other] = None
    return sorted(links, key=_steps, reverse=True)


def _reads_whole(group: Group, name: str) -> bool:
    """Whether one read of the buffer steps along every atom of the group."""
    return any(all(coefs) for coefs, _ in group.reads.get(name, ())) and bool(group.space.sizes)


def _reduces_innermost(first: Group, second: Group, match: Match) -> bool:
    """Whether most accesses that cover the space step by one along a reduce atom."""
    votes = 0
    rank = len(match.space.sizes)
    for group, mapping in ((first, match.first), (second, match.second)):
        places = [place for places in group.reads.values() for place in places] + list(group.writes.values())
        for coefs, _ in places:
            for coef, reduced in zip(map_coefs(coefs, mapping, rank), match.space.reduced, strict=True):
                if surely_equal(coef, 1):
                    votes += 1 if reduced else -1
    return votes > 0


def _count_up(space: Space) -> Coefs:
    """The strides of a flat position over the reduce atoms."""
    step = 1
    coefs = [0] * len(space.sizes)
    for atom in reversed(range(len(space.sizes))):
        if space.reduced[atom]:
            coefs[atom] = step
            step *= space.sizes[atom]
    return tuple(coefs)


def compose(inner: tuple[Digits, ...] | None, outer: tuple[Digits, ...] | None) -> tuple[Digits, ...] | None:
    """Digits of digits: `inner` over atoms that are themselves `outer` over others."""
    if inner is None or outer is None:
        return outer if inner is None else inner
    return tuple(tuple((atom, m * k) for old, m in places for atom, k in outer[old]) for places in inner)


def _union(first: Group, second: Group, match: Match, decision: str) -> Group:
    rank = len(match.space.sizes)
    reads: dict[str, dict[Place, None]] = {}
    writes: dict[str, Place] = {}
    places: dict[int, tuple[Digits, ...] | None] = {}
    for group, mapping in ((first, match.first), (second, match.second)):
        for name, old in group.reads.items():
            into = reads.setdefault(name, {})
            for coefs, const in old:
                into[map_coefs(coefs, mapping, rank), const] = None
        for name, (coefs, const) in group.writes.items():
            writes[name] = (map_coefs(coefs, mapping, rank), const)
        for node, digits in group.places.items():
            places[node] = compose(digits, mapping)
    return Group(
        nodes=[*first.nodes, *second.nodes],
        space=match.space,
        places=places,
        reads=reads,
        scattered=first.scattered | second.scattered,
        writes=writes,
        device=first.device,
        is_reduction=first.is_reduction or second.is_reduction,
        mask=first.mask | second.mask,
        work=first.work + second.work,
        decisions=[*first.decisions, *second.decisions, decision],
    )


def _describe(first: Group, second: Group) -> str:
    kinds = tuple("reduction" if g.is_reduction else "pointwise" for g in (first, second))
    passed = [name for name in first.writes if name in second.reads] + [n for n in second.writes if n in first.reads]
    if passed:
        return f"{kinds[0]} -> {kinds[1]}: {', '.join(passed[:3])} stays in registers"
    shared = [name for name in first.reads if name in second.reads]
    if not shared:
        return f"{kinds[0]} beside {kinds[1]}: of partial results that one kernel makes"
    return f"{kinds[0]} beside {kinds[1]}: {', '.join(shared[:3])} is read once"
