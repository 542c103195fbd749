"""Reading at computed positions: values and shapes against ATen eager."""

from __future__ import annotations

import pytest
import torch
from torchlazy.prims.builder import EXTERN_REASONS, RULES
from torchlazy.prims.decompose import decompose
from torchlazy.prims.ops import LIBRARY

from tests.prims.graphs import aten_graph, check, externs

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_index_select(dtype: torch.dtype) -> None:
    x = sample(5, 4, 3, dtype=dtype)
    if dtype.is_floating_point:
        check(aten.embedding.default, x[:, :, 0].contiguous(), torch.tensor([[0, 4], [1, 1]]))
        check(aten.embedding.default, x[:, 0], torch.tensor([3, 0], dtype=torch.int32), 1)
        check(aten.embedding.default, x[:, 0], torch.tensor(2))
    for index in (torch.tensor([2, 0, 0]), torch.tensor(1), torch.tensor([], dtype=torch.int64)):
        check(aten.index_select.default, x, -2, index)
        check(aten.index_select.default, x, 0, index.int())
    check(aten.index_select.default, sample(dtype=dtype), 0, torch.tensor([0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_take(dtype: torch.dtype) -> None:
    x = sample(3, 4, dtype=dtype)
    check(aten.gather.default, x, 1, torch.tensor([[0, 3], [1, 1]]))
    check(aten.gather.default, x, -2, torch.tensor([[0, 2, 1, 0]]))
    check(aten.gather.default, x, 0, torch.empty(0, 4, dtype=torch.int64))
    check(aten.gather.default, sample(dtype=dtype), 0, torch.tensor(0))
    check(aten.gather.default, sample(dtype=dtype), 0, torch.tensor([0, 0]))
    check(aten.take.default, x, torch.tensor([[0, 11], [-1, 5]]))
    check(aten.take_along_dim.default, x, torch.tensor([[1], [0], [2]]), 1)
    check(aten.take_along_dim.default, x, torch.tensor([5, 11, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_advanced_indexing(dtype: torch.dtype) -> None:
    x = sample(4, 5, 6, 3, dtype=dtype)
    i, j = torch.tensor([0, -1, 2]), torch.tensor([[1], [4]])
    check(aten.index.Tensor, x, [i])
    check(aten.index.Tensor, x, [None, i])
    check(aten.index.Tensor, x, [None, i, j])
    check(aten.index.Tensor, x, [i, None, j])
    check(aten.index.Tensor, x, [None, i, None, torch.tensor(2)])
    check(aten.index.Tensor, x, [None, None, None, torch.tensor(1)])
    check(aten.index.Tensor, x, [i.int(), j])
    check(aten.index.Tensor, x, [torch.empty(0, dtype=torch.int64)])
    check(aten._unsafe_index.Tensor, x, [None, i])


def test_masks_stay_with_aten() -> None:
    x = sample(4)
    graph, _, _ = aten_graph(aten.index.Tensor, x, [x > 0])
    assert externs(decompose(graph, strict=True)) == ["extern_aten_index_Tensor"]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
def test_writing_one_position_a_line_is_a_choice(dtype: torch.dtype) -> None:
    x, source = sample(4, 5, dtype=dtype), sample(4, 3, dtype=dtype, seed=1)
    index = torch.tensor([[0], [4], [2], [2]])
    check(aten.scatter.src, x, 1, index, source)
    check(aten.scatter.src, x.t(), -2, index.t(), source.t())
    check(aten.scatter.value, x, 1, index, 3)
    check(aten.scatter_add.default, x, -1, index, source)
    check(aten.scatter.value, torch.zeros(6, dtype=dtype), 0, torch.tensor([3]), 1)
    several, _, _ = aten_graph(aten.scatter_add.default, x, 1, torch.tensor([[0, 0]]), source)
    assert externs(decompose(several, strict=True)) == ["scatter_add"]


def test_writing_at_positions_stays_with_aten() -> None:
    arguments = (torch.zeros(4), 0, torch.tensor([1, 1]), torch.ones(2))
    graph, _, _ = aten_graph(aten.index_add.default, *arguments)
    assert externs(decompose(graph, strict=True)) == ["index_add"]


def test_what_is_listed_as_extern_has_no_rule() -> None:
    assert not [str(overload) for overload in EXTERN_REASONS if overload in RULES or overload in LIBRARY]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_under_a_mask_is_a_choice(dtype: torch.dtype) -> None:
    x = sample(3, 4, 5, dtype=dtype)
    masks = {0: x.ne(0), 1: sample(4, 5) > 0}
    one, row = torch.ones((), dtype=dtype), sample(5, dtype=dtype, seed=2)
    check(aten.index_put.default, x, [masks[0]], one)
    check(aten.index_put.default, x, [masks[0]], one.reshape(1))
    check(aten.index_put.default, x.transpose(0, 2), [masks[0].transpose(0, 2)], one)
    check(aten.index_put.default, x, [None, masks[1]], one)
    check(aten.index_put.default, x, [sample(3) > 0], one.reshape(1, 1, 1))
    check(aten.index_put.default, x, [sample(3, 4) > 0], row)
    check(aten.index_put.default, x, [sample(3) > 0], row.reshape(1, 1, 5))
    check(aten.index_put.default, x, [torch.zeros(3, 4, dtype=torch.bool)], row)
    if dtype != torch.bool:
        check(aten.index_put.default, x, [masks[0]], one, True)
        check(aten.index_put.default, x, [sample(3, 4) > 0], row, True)


def test_values_for_each_place_of_a_mask_stay_with_aten() -> None:
    x = sample(3, 4)
    graph, _, _ = aten_graph(aten.index_put.default, x, [x > 0], torch.arange(float((x > 0).sum())))
    assert externs(decompose(graph, strict=True)) == ["index_put"]
    mask = torch.tensor([True, False, False])
    graph, _, _ = aten_graph(aten.index_put.default, x, [None, torch.tensor([True, True, False, False])], x[:, :2])
    assert externs(decompose(graph, strict=True)) == ["index_put"]
    graph, _, _ = aten_graph(aten.index_put.default, x, [mask, torch.tensor([1])], torch.tensor(1.0))
    assert externs(decompose(graph, strict=True)) == ["index_put"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_at_few_positions_is_a_choice(dtype: torch.dtype) -> None:
    x, row = sample(4, 5, 3, dtype=dtype), sample(4, 1, 3, dtype=dtype, seed=1)
    one = torch.tensor([3])
    calls = [
        (aten.index_fill.int_Scalar, x, 1, torch.tensor([0, -1, 3, 3]), 1),
        (aten.index_fill.int_Scalar, x, -3, torch.tensor(2), 0),
        (aten.index_fill.int_Tensor, x, 0, one, sample(dtype=dtype)),
        (aten.index_copy.default, x, 1, one, row),
        (aten.index_copy.default, x[:, 0], -2, torch.tensor(3), row[:1, 0]),
    ]
    if dtype != torch.bool:
        calls.append((aten.index_add.default, x, 1, one, row))
    for overload, *args in calls:
        if overload is aten.index_fill.int_Tensor and dtype == torch.bool:
            continue
        check(overload, *args)
        graph, _, _ = aten_graph(overload, *args)
        assert externs(decompose(graph, strict=True)) == [], overload
    if dtype.is_floating_point:
        check(aten.index_add.default, x, 1, one, row, alpha=2.5)


def test_writing_at_many_positions_stays_with_aten() -> None:
    x = sample(20, 3)
    graph, _, _ = aten_graph(aten.index_fill.int_Scalar, x, 0, torch.arange(9), 1.0)
    assert [node.target.__name__ for node in decompose(graph, strict=True).nodes if node.op == "call_function"] == [
        "index_fill"
    ]
