"""Sizes, kinds and prices of single nodes."""

from __future__ import annotations

import pytest
import sympy
import torch
from torchlazy.autograd import cost
from torchlazy.autograd.cost import Recompute, bytes_of, flops, has_effect, recompute_kind, storage_of, work_of
from torchlazy.prims import ops
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE

from tests.autograd.small_graphs import Maker, aten


def test_bytes_count_every_result_symbols_by_their_hint_and_halves_as_halves():
    g = Maker()
    x = g.input(8, 4)
    assert bytes_of(x) == 128
    assert bytes_of(g(ops.welford, x, axes=(1,))) == 3 * 8 * 4
    assert bytes_of(g.scalar()) == 0
    assert bytes_of(g.input(sympy.Symbol("s0"), 4, dtype=torch.bool)) == cost.SYMBOL_HINT * 4
    y = g(ops.exp, x)
    y.meta[MEMORY_DTYPE] = torch.bfloat16
    assert bytes_of(y) == 64


def test_every_primitive_has_a_kind():
    g = Maker()
    x, i = g.input(4, 4), g.input(4, 4, dtype=torch.int64)
    seed = g.scalar()
    welford = g(ops.welford, x, axes=(1,))
    mean = g.part(welford, 0)
    nodes = {
        x: Recompute.GIVEN,
        g(ops.full, shape=(4,), value=1.0, dtype=torch.float32, device="cuda:0"): Recompute.CONSTANT,
        g(ops.permute, x, dims=(1, 0)): Recompute.VIEW,
        g(ops.flip, x, axes=(0,)): Recompute.FUSED,
        g(ops.random_bits, shape=(4,), seed=seed, stream=0, device="cuda:0"): Recompute.FUSED,
        g(ops.gather, x, i, axis=0): Recompute.INDEXED,
        welford: Recompute.PASS,
        mean: Recompute.PASS,
        g.mm(x, x): Recompute.PRODUCT,
        g.extern(aten.cumsum.default, g.input(3), 0): Recompute.NEVER,
    }
    assert {node: recompute_kind(node) for node in nodes} == nodes


def test_views_share_the_storage_of_their_base():
    g = Maker()
    base = g(ops.exp, g.input(4, 1))
    view = g(ops.reshape, g(ops.expand, g(ops.permute, base, dims=(0, 1)), shape=(4, 6)), shape=(24,))
    assert storage_of(view) is base
    assert storage_of(g(ops.flip, base, axes=(0,))) is not base


def test_operations_of_library_products():
    g = Maker("cpu")
    a, b, bias = g.input(4, 8), g.input(8, 16), g.input(16)
    assert flops(g.mm(a, b)) == 2 * 4 * 8 * 16
    assert flops(g.extern(aten.addmm.default, bias, a, b)) == 2 * 4 * 8 * 16
    image, weight = g.input(2, 3, 8, 8), g.input(5, 3, 3, 3)
    convolution = g.extern(aten.convolution.default, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert flops(convolution) == 2 * (2 * 5 * 8 * 8) * 3 * 3 * 3
    assert flops(g.extern(aten.cumsum.default, a, 0)) is None


@pytest.mark.parametrize(("dropout", "effect"), [(0.0, False), (0.1, True)])
def test_attention_may_be_called_twice_without_dropout_only(dropout, effect):
    g = Maker("cpu")
    q = g.input(2, 3, 8, 4)
    node = g.extern(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, dropout, True)
    assert has_effect(node) is effect
    assert recompute_kind(node) is (Recompute.NEVER if effect else Recompute.PRODUCT)
    assert flops(node) == 2 * (2 * 3) * 8 * 8 * (4 + 4) // 2


def test_work_grows_with_the_operation_and_the_size():
    g = Maker()
    x = g.input(10)
    assert work_of(g(ops.add, x, x)) == 10
    assert work_of(g(ops.exp, x)) > work_of(g(ops.sqrt, x)) > work_of(g(ops.neg, x))
    assert work_of(g(ops.reshape, x, shape=(5, 2))) == 0
    bits = g(ops.random_bits, shape=(10,), seed=1, stream=0, device="cuda:0")
    assert work_of(bits) == 10 * cost.RANDOM_WORK
