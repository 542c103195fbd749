"""Common axes: how the atoms of two loop nests become one set of loops.

Two nests meet in the buffers they share. A buffer's element offsets are a mixed-radix number of each nest's atoms, so
the atoms that address the same element are found by refining both radix systems, innermost stride first: (4096, 768)
against (8, 512, 768) gives (8, 512, 768), and a transposed reader is matched atom by atom whatever its loop order.
Atoms that no shared buffer addresses (what a reader broadcasts over) are refined in loop order.

Invariant: a `Match` is a bijection. Each atom of either nest is the digits of distinct atoms of the common space, and
the space is covered by both, but for a nest that stands at the points of a reduction and leaves its reduce atoms out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from torchlazy.inductor.index_form import Digits
from torchlazy.prims.size_int import divides, hint, same_sizes, surely_equal, surely_less

Coefs: TypeAlias = "tuple[int, ...]"
Link: TypeAlias = "tuple[Coefs, Coefs]"  # element strides of one buffer over either nest's atoms


@dataclass(frozen=True, slots=True)
class Space:
    """The atoms of a loop nest, outermost first; `reduced` marks those that a reduction runs over."""

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]

    @property
    def points(self) -> int:
        return prod(n for n, r in zip(self.sizes, self.reduced, strict=True) if not r)

    @property
    def reduce_points(self) -> int:
        return prod(n for n, r in zip(self.sizes, self.reduced, strict=True) if r)

    @property
    def has_reduce(self) -> bool:
        return any(self.reduced)


@dataclass(frozen=True, slots=True)
class Match:
    """The common space, and each nest's atoms as digits of it; None: its atoms are the space's, one to one."""

    space: Space
    first: tuple[Digits, ...] | None
    second: tuple[Digits, ...] | None


def map_coefs(coefs: Coefs, mapping: tuple[Digits, ...] | None, rank: int) -> Coefs:
    """Element strides over a nest's atoms told over the common space of `rank` atoms."""
    if mapping is None:
        return coefs
    result = [0] * rank
    for coef, places in zip(coefs, mapping, strict=True):
        if coef:
            for atom, multiplier in places:
                result[atom] += coef * multiplier
    return tuple(result)


@dataclass(slots=True, eq=False)
class _Piece:
    """`size` values of atom `atom` of one nest, worth `multiplier` each; `partner`: the same loop in the other nest."""

    atom: int
    multiplier: int
    size: int
    reduced: bool
    partner: _Piece | None = None


def match_spaces(first: Space, second: Space, links: Sequence[Link]) -> Match | str:
    """The common space of two nests, or the reason why there is none.

    `links` are tried in order: put those that must hold first. What holds is for the caller to check afterwards by
    comparing `map_coefs` of both sides, because a link that contradicts an earlier one is passed over.
    """
    left = [_Piece(k, 1, n, r) for k, (n, r) in enumerate(zip(first.sizes, first.reduced, strict=True))]
    right = [_Piece(k, 1, n, r) for k, (n, r) in enumerate(zip(second.sizes, second.reduced, strict=True))]
    both_reduce = first.has_reduce and second.has_reduce
    for coefs_left, coefs_right in links:
        attempt = _pair_by_strides(left, right, coefs_left, coefs_right, both_reduce)
        if attempt is not None:
            left, right = attempt
    free_left = [piece for piece in left if piece.partner is None]
    free_right = [piece for piece in right if piece.partner is None]
    if free_left and free_right:
        reason = _pair_in_order(left, right, both_reduce)
        if reason:
            return reason
    return _combine(first, second, left, right)


def identity_match(first: Space, second: Space) -> Match | None:
    """The match of two nests with equal atoms; None where they differ."""
    if not same_sizes(first.sizes, second.sizes):
        return None
    if first.reduced == second.reduced or not second.has_reduce:
        return Match(first, None, None)
    return Match(second, None, None) if not first.has_reduce else None


def _copy(left: list[_Piece], right: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
    twins = {id(p): _Piece(p.atom, p.multiplier, p.size, p.reduced) for p in (*left, *right)}
    for piece in (*left, *right):
        if piece.partner is not None:
            twins[id(piece)].partner = twins[id(piece.partner)]
    return [twins[id(p)] for p in left], [twins[id(p)] for p in right]


def _split(pieces: list[_Piece], piece: _Piece, low: int) -> _Piece:
    """Keep the inner `low` values in `piece`; return the new outer piece, which stands before it."""
    high = _Piece(piece.atom, piece.multiplier * low, piece.size // low, piece.reduced)
    piece.size = low
    pieces.insert(pieces.index(piece), high)
    return high


def _pair_by_strides(
    left: list[_Piece], right: list[_Piece], coefs_left: Coefs, coefs_right: Coefs, both_reduce: bool
) -> tuple[list[_Piece], list[_Piece]] | None:
    """Pair the pieces that step alike through one buffer, innermost first; None where it is walked otherwise."""
    left, right = _copy(left, right)

    def stride(piece: _Piece, coefs: Coefs) -> int:
        return coefs[piece.atom] * piece.multiplier

    a = sorted((p for p in left if coefs_left[p.atom]), key=lambda p: -abs(hint(stride(p, coefs_left))))
    b = sorted((p for p in right if coefs_right[p.atom]), key=lambda p: -abs(hint(stride(p, coefs_right))))
    while a and b:
        x, y = a.pop(), b.pop()
        if not surely_equal(stride(x, coefs_left), stride(y, coefs_right)) or (both_reduce and x.reduced != y.reduced):
            return None
        if x.partner is not None or y.partner is not None:
            if x.partner is not y:
                return None
            continue
        if surely_less(y.size, x.size):
            if not divides(y.size, x.size):
                return None
            a.append(_split(left, x, y.size))
        elif surely_less(x.size, y.size):
            if not divides(x.size, y.size):
                return None
            b.append(_split(right, y, x.size))
        elif not surely_equal(x.size, y.size):
            return None
        x.partner, y.partner = y, x
    return None if a or b else (left, right)


def _pair_in_order(left: list[_Piece], right: list[_Piece], both_reduce: bool) -> str:
    """Pair what is left free in loop order, in place; the reason where the sizes have no common refinement."""
    kinds: tuple[tuple[bool, ...], ...] = ((False,), (True,)) if both_reduce else ((False, True),)
    for kind in kinds:
        a = [p for p in left if p.partner is None and p.reduced in kind]
        b = [p for p in right if p.partner is None and p.reduced in kind]
        sizes = f"({', '.join(str(p.size) for p in a)}) against ({', '.join(str(p.size) for p in b)})"
        if not surely_equal(prod(p.size for p in a), prod(p.size for p in b)):
            return f"loops differ: {sizes}"
        while a and b:
            x, y = a.pop(), b.pop()
            if surely_less(y.size, x.size):
                if not divides(y.size, x.size):
                    return f"loops have no common refinement: {sizes}"
                a.append(_split(left, x, y.size))
            elif surely_less(x.size, y.size):
                if not divides(x.size, y.size):
                    return f"loops have no common refinement: {sizes}"
                b.append(_split(right, y, x.size))
            elif not surely_equal(x.size, y.size):
                return f"loops have no common refinement: {sizes}"
            x.partner, y.partner = y, x
    return ""


def _combine(first: Space, second: Space, left: list[_Piece], right: list[_Piece]) -> Match | str:
    """The common space in the order of the nest that covers it."""
    only_left = [p for p in left if p.partner is None]
    only_right = [p for p in right if p.partner is None]
    if only_left and only_right:
        return "loops cover different points"
    outer, inner, covering = (left, right, first) if not only_right else (right, left, second)
    left_out = [p for p in outer if p.partner is None]
    if left_out and [id(p) for p in left_out] != [id(p) for p in outer if p.reduced]:
        return f"loops cover different points: ({', '.join(str(p.size) for p in left_out)}) stands on one side only"
    # Kinds come from the side that reduces; a nest without reduce atoms takes the other's.
    reduced = tuple(p.reduced or (p.partner is not None and p.partner.reduced) for p in outer)
    space = Space(tuple(p.size for p in outer), reduced)
    place = {id(p): number for number, p in enumerate(outer)}
    place |= {id(p): place[id(p.partner)] for p in inner}
    digits_outer = _digits(len(covering.sizes), outer, place)
    digits_inner = _digits(len((second if covering is first else first).sizes), inner, place)
    if covering is first:
        return Match(space, _or_identity(digits_outer, space), _or_identity(digits_inner, space))
    return Match(space, _or_identity(digits_inner, space), _or_identity(digits_outer, space))


def _digits(rank: int, pieces: list[_Piece], place: dict[int, int]) -> tuple[Digits, ...]:
    digits: list[list[tuple[int, int]]] = [[] for _ in range(rank)]
    for piece in pieces:
        digits[piece.atom].append((place[id(piece)], piece.multiplier))
    return tuple(tuple(places) for places in digits)


def _or_identity(digits: tuple[Digits, ...], space: Space) -> tuple[Digits, ...] | None:
    return None if digits == tuple(((k, 1),) for k in range(len(space.sizes))) else digits
