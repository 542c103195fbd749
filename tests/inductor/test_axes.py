"""Common spaces of two loop nests, and index forms."""

from __future__ import annotations

import sympy
import torch
from torchlazy.inductor.access import collect_facts
from torchlazy.inductor.axes import Match, Space, identity_match, map_coefs, match_spaces
from torchlazy.inductor.index import FloorDiv, Mod, axis, reshape_index
from torchlazy.inductor.index_form import Form, to_expr, to_form
from torchlazy.prims.meta import contiguous_strides

from tests.inductor.kernel_interpreter import buffer, pointwise


def flat(*sizes: int) -> Space:
    return Space(sizes, (False,) * len(sizes))


def test_refinement_through_a_contiguous_buffer() -> None:
    a, b = flat(8, 512, 768), flat(4096, 768)
    match = match_spaces(a, b, [(contiguous_strides(a.sizes), contiguous_strides(b.sizes))])
    assert isinstance(match, Match)
    assert match.space.sizes == (8, 512, 768)
    assert match.first is None
    assert match.second == (((0, 512), (1, 1)), ((2, 1),))


def test_refinement_splits_both_sides() -> None:
    match = match_spaces(flat(6, 4), flat(2, 12), [((4, 1), (12, 1))])
    assert isinstance(match, Match)
    assert match.space.sizes == (2, 3, 4)


def test_no_common_refinement() -> None:
    reason = match_spaces(flat(6, 4), flat(4, 6), [])
    assert isinstance(reason, str) and "no common refinement" in reason


def test_a_transposed_reader_is_matched_atom_by_atom() -> None:
    match = match_spaces(flat(3, 5), flat(5, 3), [((5, 1), (1, 5))])
    assert isinstance(match, Match)
    assert match.second == (((1, 1),), ((0, 1),))


def test_point_level_nest_leaves_the_reduce_atoms_out() -> None:
    reduction = Space((6, 8), (False, True))
    match = match_spaces(reduction, flat(6), [((1, 0), (1,))])
    assert isinstance(match, Match)
    assert match.space == reduction
    assert match.second == (((0, 1),),)


def test_reduce_kinds_come_from_the_reduction() -> None:
    match = match_spaces(flat(6, 8), Space((6, 8), (False, True)), [((8, 1), (8, 1))])
    assert isinstance(match, Match)
    assert match.space.reduced == (False, True)
    swapped = match_spaces(flat(6, 8), Space((8, 6), (False, True)), [((8, 1), (1, 8))])
    assert isinstance(swapped, Match)
    assert swapped.space.reduced == (True, False)


def test_row_and_column_reductions_do_not_match() -> None:
    rows, columns = Space((6, 6), (False, True)), Space((6, 6), (False, True))
    match = match_spaces(rows, columns, [((6, 1), (1, 6))])
    # Matched in loop order: the shared buffer is then walked differently, and the caller sees that.
    assert isinstance(match, Match)
    assert map_coefs((6, 1), match.first, 2) != map_coefs((1, 6), match.second, 2)


def test_a_broadcast_over_part_of_the_points_is_no_match() -> None:
    assert isinstance(match_spaces(flat(6, 8), flat(8), [((0, 1), (1,))]), str)


def test_identity() -> None:
    assert identity_match(flat(2, 3), flat(3, 2)) is None
    match = identity_match(flat(2, 3), Space((2, 3), (False, True)))
    assert match is not None and match.space.reduced == (False, True)


def test_forms_decide_divisions_by_size() -> None:
    i, j = axis("i", 8), axis("j", 12)
    plain = sympy.Symbol("k", integer=True, nonnegative=True)
    digits = {i: ((0, 1),), j: ((1, 1),), plain: ((2, 4), (3, 1))}
    sizes = (8, 12, 3, 4)
    assert to_form(12 * i + j, digits, sizes) == Form((12, 1, 0, 0))
    assert to_form(FloorDiv(plain, 4), digits, sizes) == Form((0, 0, 1, 0))
    assert to_form(Mod(plain, 4), digits, sizes) == Form((0, 0, 0, 1))
    rest = to_form(FloorDiv(plain, 2), digits, sizes)
    assert rest.coefs == (0, 0, 2, 0) and len(rest.terms) == 1


def test_a_division_of_a_negative_number_is_left_alone() -> None:
    i = sympy.Symbol("i", integer=True, nonnegative=True)
    form = to_form(FloorDiv(8 * i + 7 - sympy.Symbol("n", integer=True), 8), {i: ((0, 1),)}, (4,))
    assert form.terms


def test_forms_come_back_as_expressions() -> None:
    i, j = axis("i", 8), axis("j", 12)
    form = to_form(12 * i + j + 3, {i: ((0, 1),), j: ((1, 1),)}, (8, 12))
    assert to_expr(form, (i, j)) == 12 * i + j + 3
    assert to_expr(form, (2, 5)) == 32


def test_ranges_split_where_an_index_divides_them() -> None:
    """What a reshape of (B, H, S, D) permuted to (B, S, H*D) leaves behind becomes affine."""
    source = buffer("x", 2, 12, 5, 64)
    out = buffer("y", 2, 5, 768)

    def body(ops, index, _):
        b, s, h, d = reshape_index(index, (2, 5, 768), (2, 5, 12, 64))
        return ops.load("x", source.element((b, h, s, d)))

    facts = collect_facts(pointwise(out, body))
    assert facts.sizes == (2, 5, 12, 64)
    assert facts.loads == (("x", Form((12 * 5 * 64, 64, 5 * 64, 1))),)
    assert facts.stores == (("y", Form((5 * 768, 768, 64, 1))),)


def test_facts_of_sizes_one_and_masked_loads() -> None:
    source = buffer("x", 4)
    out = buffer("y", 1, 6)

    def body(ops, index, _):
        i = index[1]
        inside = ops.lt(ops.index_expr(i, torch.int64), ops.constant(4, torch.int64))
        return ops.masked(inside, lambda: ops.load("x", source.element((i,))), 0.0)

    facts = collect_facts(pointwise(out, body))
    assert facts.sizes == (6,)
    assert facts.values == (Form((1,)),)
    assert facts.reads == ("x",)
