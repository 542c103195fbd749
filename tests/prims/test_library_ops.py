"""Primitives that are one ATen call: metadata against eager and on symbols, references, the way there and back."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import sympy
import torch
from torchlazy.inductor import interpret, lowering
from torchlazy.prims import ops, schema_form
from torchlazy.prims.decompose import decompose
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import TensorMeta, meta_of
from torchlazy.prims.verify import PRIMS, verify

from tests.prims.graphs import aten_graph, externs
from tests.prims.library_samples import samples

LIBRARY = {name: prim for name, prim in ops.PRIMS.items() if prim.overload is not None}
CALLS = [(name, i) for name, rows in samples().items() if name in LIBRARY for i in range(len(rows))]
GROUPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "wait_tensor")
LOCAL = [call for call in CALLS if call[0] not in GROUPS]


def parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def test_every_primitive_has_a_sample() -> None:
    assert LIBRARY.keys() - samples().keys() == {"mm_out_dtype"} & LIBRARY.keys()  # CUDA has it only
    assert 150 <= len(ops.PRIMS) <= 250


@pytest.mark.parametrize("name", LIBRARY)
def test_attributes_are_the_arguments_that_are_no_tensors(name: str) -> None:
    prim = LIBRARY[name]
    assert {field.name for field in fields(prim.attrs)} == set(schema_form.attribute_names(prim.overload))
    assert (
        prim.doc
        and "Source: " in prim.doc
        and prim.is_kind(ops.Kind.EXTERN)
        and len(prim.kinds - {ops.Kind.RANDOM}) == 2
    )


@pytest.mark.parametrize(("name", "number"), LOCAL)
def test_metadata_is_eagers(name: str, number: int) -> None:
    operands, attrs = samples()[name][number]
    prim = LIBRARY[name]
    metas = parts(prim.meta(*map(meta_of, operands), **attrs))
    results = parts(prim(*operands, **attrs))
    assert len(metas) == len(results)
    for meta, result in zip(metas, results, strict=True):
        if meta is None:
            assert result is None or result.numel() == 0
            continue
        want = meta_of(result)
        assert (meta.shape, meta.dtype) == (want.shape, want.dtype)
        dims = zip(meta.shape, meta.strides, want.strides, strict=True)
        assert 0 in meta.shape or all(size == 1 or a == b for size, a, b in dims), (meta, want)


def symbolic(metas: list[TensorMeta]) -> tuple[list[TensorMeta], dict[sympy.Symbol, int]]:
    """Every size above 1 as a symbol, equal sizes as one; strides follow where they are row-major."""
    names: dict[int, sympy.Symbol] = {}
    result = []
    for meta in metas:
        shape = tuple(
            size if size <= 1 else names.setdefault(size, sympy.Symbol(f"s{size}", positive=True, integer=True))
            for size in meta.shape
        )
        strides: list[Any] = []
        step: Any = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step = step * size
        result.append(replace(meta, shape=shape, strides=tuple(strides)))
    return result, {symbol: size for size, symbol in names.items()}


def at(value: Any, known: dict[sympy.Symbol, int]) -> Any:
    """A size with numbers for its symbols."""
    return int(value.subs(known)) if isinstance(value, sympy.Expr) else value


def plain(operands: list[torch.Tensor]) -> bool:
    return all(x.is_contiguous() for x in operands)


def symbolic_calls() -> Iterator[tuple[str, int]]:
    for name, number in CALLS:
        operands, attrs = samples()[name][number]
        if plain(operands) and not attrs.get("ceil_mode") and name not in ("view_as_complex", "int_mm"):
            yield name, number


@pytest.mark.parametrize(("name", "number"), list(symbolic_calls()))
def test_metadata_on_symbols(name: str, number: int) -> None:
    operands, attrs = samples()[name][number]
    metas = list(map(meta_of, operands))
    symbols, known = symbolic(metas)
    got = parts(LIBRARY[name].meta(*symbols, **attrs))
    for one, want in zip(got, parts(LIBRARY[name].meta(*metas, **attrs)), strict=True):
        if want is None:
            assert one is None
            continue
        assert tuple(at(size, known) for size in one.shape) == want.shape
        assert tuple(at(stride, known) for stride in one.strides) == want.strides


def test_ceil_mode_on_a_symbol_is_refused() -> None:
    x = TensorMeta((1, sympy.Symbol("n"), 8), torch.float32, (8, 8, 1))
    attrs = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "ceil_mode": True}
    with pytest.raises(MetaError, match="ceil_mode"):
        LIBRARY["max_pool2d"].meta(x, **attrs)


@pytest.mark.parametrize(("name", "number"), LOCAL)
def test_the_way_to_atens_form_and_back(name: str, number: int) -> None:
    operands, attrs = samples()[name][number]
    prim = LIBRARY[name]
    args, kwargs = prim.aten_call(operands, attrs)
    found = ops.library_form(prim.overload, args, kwargs)
    assert found is not None and found[0] is prim
    assert len(found[1]) == len(operands) and all(a is b for a, b in zip(found[1], operands, strict=True))
    assert found[2] == attrs
    assert pickle.loads(pickle.dumps(prim)) is prim


@pytest.mark.parametrize(("name", "number"), LOCAL)
def test_lowering_is_one_call_in_the_promised_layout(name: str, number: int) -> None:
    """From ATen's call to the primitive, through loop IR, to eager's values."""
    operands, attrs = samples()[name][number]
    prim = LIBRARY[name]
    args, kwargs = prim.aten_call(operands, attrs)
    graph, inputs, expected = aten_graph(prim.overload, *args, **kwargs)
    prims = decompose(graph, strict=True)
    verify(prims, PRIMS)
    assert all(called in ops.PRIMS for called in externs(prims))
    results = interpret.run(lowering.lower(prims), inputs, [])
    wanted = [x for x in (expected if isinstance(expected, (tuple, list)) else [expected]) if x is not None]
    for result, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, want, equal_nan=True)


def test_what_a_call_does_beyond_its_primitive_stays_an_anonymous_call() -> None:
    """Broadcasting of positions and values is ATen's own."""
    arguments = (torch.zeros(3, 4), [torch.tensor([0, 1]), torch.tensor([1])], torch.ones(()), False)
    graph, _, _ = aten_graph(torch.ops.aten.index_put.default, *arguments)
    assert externs(decompose(graph, strict=True)) == ["index_put"]
    graph, _, _ = aten_graph(torch.ops.aten.searchsorted.Scalar, torch.arange(5.0), 2.5)
    assert externs(decompose(graph, strict=True)) == ["extern_aten_searchsorted_Scalar"]
