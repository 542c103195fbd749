"""Tracked sizes: ints in every respect, whose decisions leave guards."""

from __future__ import annotations

import math

import pytest
from torchlazy.prims.size_expr import Symbol
from torchlazy.prims.size_int import (
    SizeFloat,
    SizeInt,
    SizeSpace,
    clamped,
    divides,
    hint,
    integer_of,
    is_tracked,
    markers_in,
    rename_markers,
    same_sizes,
    surely_at_least,
    surely_equal,
    surely_less,
    value_now,
)


@pytest.fixture
def space() -> SizeSpace:
    return SizeSpace([Symbol("a", 12, 20, 2), Symbol("b", 7, 9, 2)])


def guards(space: SizeSpace) -> list[tuple[str, object]]:
    return [(guard.kind, guard.expr) for guard in space.guards.values()]


def test_arithmetic_keeps_track(space: SizeSpace) -> None:
    a, b = space.symbol("a"), space.symbol("b")
    for size, value in ((a + b, 19), (a - 1, 11), (3 * a, 36), (a * b, 84), (a // 5, 2), (100 // a, 8), (-a, -12),
                        (divmod(a, 5)[1], 2), (a**2, 144), (sum([a, b]), 19), (math.prod([a, b, 2]), 168)):  # fmt: skip
        assert type(size) is SizeInt and value_now(size) == value
    assert type(a - a) is int and type(a * b // a) is SizeInt and a * b // a is b
    assert hint(a) == 20 and integer_of(a) is a
    assert not space.guards


def test_decisions_that_are_sure_leave_no_guard(space: SizeSpace) -> None:
    a, b = space.symbol("a"), space.symbol("b")
    assert a > 1 and a != 1 and bool(a) and a * b >= a and not a < 2 and a != 0
    assert (a, 5) == (a, 5) and a + 1 > a and a != a + 1
    assert abs(a) is a and max(a, 1) is a
    assert not space.guards


def test_other_decisions_leave_one(space: SizeSpace) -> None:
    a, b = space.symbol("a"), space.symbol("b")
    assert a > b and a != 13
    assert [kind for kind, _ in guards(space)] == ["ge", "ne"]
    assert a == 12
    assert guards(space)[-1][0] == "eq"
    assert space.guards and all("test_size_int" in guard.why for guard in space.guards.values())


def test_taking_the_plain_number_pins_it(space: SizeSpace) -> None:
    a = space.symbol("a")
    assert int(a) == 12 and a << 1 == 24 and float(a) == 12.0
    assert len(space.pins) == 3 and guards(space)[0][0] == "eq"


def test_predicates_that_must_be_sure_leave_no_guard(space: SizeSpace) -> None:
    a, b = space.symbol("a"), space.symbol("b")
    assert divides(b, a * b) and not divides(4, a) and divides(4, 8 * a)
    assert surely_less(a - 1, a) and not surely_less(b, a) and surely_at_least(a, 2)
    assert (
        surely_equal(a, a) and not surely_equal(a, 12) and same_sizes((a, 3), (a, 3)) and not same_sizes((a,), (a, 1))
    )
    assert clamped(a, 0) is a and clamped(2 * a // 2 - a - 3, 0) == 0 and clamped(5, 0, 3) == 3
    assert clamped((a - 1) // 2 * 2 + 2 - a, 0) is (a - 1) // 2 * 2 + 2 - a
    assert not space.guards


def test_floats_are_trees(space: SizeSpace) -> None:
    a = space.symbol("a")
    share = 1 / a
    assert type(share) is SizeFloat and is_tracked(share) and hint(share) == pytest.approx(1 / 12)
    assert eval(str(share * 2.0 + 1), {a.marker: 5}) == pytest.approx(1.4)
    assert not space.guards
    assert share < 0.5
    assert guards(space)[0][0] == "flt"


def test_text_holds_markers(space: SizeSpace) -> None:
    a, b = space.symbol("a"), space.symbol("b")
    text = f"for i in range({a * b}): x[{b} * i + {a * b}]"
    assert markers_in(text) == [a * b, b]
    names = {(a * b).marker: "size0", b.marker: "size1"}
    assert rename_markers(text, names) == "for i in range(size0): x[size1 * i + size0]"


def test_sizes_of_one_value_are_different_keys() -> None:
    space = SizeSpace([Symbol("a", 8, 8, 2), Symbol("b", 8, 8, 2)])
    a, b = space.symbol("a"), space.symbol("b")
    assert len({a: 1, b: 2, 8: 3}) == 3
    assert not space.guards
