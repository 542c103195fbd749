"""Groups of loop nodes: one kernel in the making, and whether and how two of them share a space.

Invariant: nothing here changes a group, and nothing but the two groups is looked at; who depends on whom, and whether a
fusion pays, is for `fusion` to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchlazy.inductor.access import NodeFacts
from torchlazy.inductor.axes import Coefs, Link, Match, Space, identity_match, map_coefs, match_spaces
from torchlazy.inductor.index_form import Digits
from torchlazy.prims.size_int import same_sizes, surely_equal

Place = tuple[Coefs, int]  # element strides over a group's atoms, and the constant offset


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


def new_group(node: int, facts: NodeFacts) -> Group:
    """The group of one node."""
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


def union(first: Group, second: Group, match: Match, decision: str) -> Group:
    """Both groups as one, on the space of `match`; `decision` says why."""
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


def compose(inner: tuple[Digits, ...] | None, outer: tuple[Digits, ...] | None) -> tuple[Digits, ...] | None:
    """Digits of digits: `inner` over atoms that are themselves `outer` over others."""
    if inner is None or outer is None:
        return outer if inner is None else inner
    return tuple(tuple((atom, m * k) for old, m in places for atom, k in outer[old]) for places in inner)


# ---- whether two groups walk alike


def points_differ(first: Group, second: Group) -> str:
    """Why loops over so many points do not fit into one kernel; empty where they do."""
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


def match_links(first: Group, second: Group, required: list[Link]) -> Match | str:
    """A space in which both groups are at the same point wherever `required` links them, or why there is none."""
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


def match_readers(first: Group, second: Group) -> Match | str:
    """A space in which both walk a buffer that both read whole in the same way: that is what they gain by."""
    for link in _shared_links(first, second):
        if all(link[0]) or all(link[1]):
            match = match_links(first, second, [link])
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


def reads_whole(group: Group, name: str) -> bool:
    """Whether one read of the buffer steps along every atom of the group."""
    return any(all(coefs) for coefs, _ in group.reads.get(name, ())) and bool(group.space.sizes)


def reduces_innermost(first: Group, second: Group, match: Match) -> bool:
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


def count_up(space: Space) -> Coefs:
    """The strides of a flat position over the reduce atoms."""
    step = 1
    coefs = [0] * len(space.sizes)
    for atom in reversed(range(len(space.sizes))):
        if space.reduced[atom]:
            coefs[atom] = step
            step *= space.sizes[atom]
    return tuple(coefs)


def describe(first: Group, second: Group) -> str:
    """What a fusion of the two gains, as text."""
    kinds = tuple("reduction" if g.is_reduction else "pointwise" for g in (first, second))
    passed = [name for name in first.writes if name in second.reads] + [n for n in second.writes if n in first.reads]
    if passed:
        return f"{kinds[0]} -> {kinds[1]}: {', '.join(passed[:3])} stays in registers"
    shared = [name for name in first.reads if name in second.reads]
    if not shared:
        return f"{kinds[0]} beside {kinds[1]}: of partial results that one kernel makes"
    return f"{kinds[0]} beside {kinds[1]}: {', '.join(shared[:3])} is read once"
