"""Triton code generation: complete, compiled for Hopper without a GPU, right in the interpreter, and right on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch
from torchlazy.inductor.codegen.triton import emit
from torchlazy.inductor.codegen.triton_choices import LoopBody, choose_pointwise, choose_reduction, next_power_of_2
from torchlazy.inductor.codegen.triton_index import Access, contiguous_side
from torchlazy.inductor.codegen.triton_ops import FORMULAS
from torchlazy.inductor.codegen.triton_writer import TritonWriter
from torchlazy.inductor.index import axis
from torchlazy.inductor.ir import Axis, Sweep
from torchlazy.inductor.ops_handler import MEMORY_OPS, POINTWISE_OPS
from torchlazy.runtime.cuda.foreach_tables import foreach_block_table, foreach_blocks, scalar_bits

from tests.inductor.codegen.triton_case_list import (
    CHECKS,
    LOOP,
    adam_kernel,
    all_cases,
    column_sum_kernel,
    layer_norm_kernel,
    softmax_kernel,
    square_sum_kernel,
)
from tests.inductor.codegen.triton_cases import KernelBuilder, buffer, compile_source, f32, run_case

CASES = {case.name: case for case in all_cases()}
ROOT = Path(__file__).parents[3]
triton = pytest.importorskip("triton")
version = tuple(int(part) for part in triton.__version__.split(".")[:2])
old_interpreter = pytest.mark.skipif(version < (3, 9), reason="its interpreter cannot loop over a tensor's range")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing compiled before, nothing left behind."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    yield
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What each case said in the interpreter."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.inductor.codegen.triton_case_list"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_op_is_implemented() -> None:
    assert set(FORMULAS) == set(POINTWISE_OPS)
    assert [op for op in MEMORY_OPS if op not in vars(TritonWriter)] == []


@old_interpreter
@pytest.mark.parametrize("name", [*CASES, *CHECKS])
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper(name: str, tmp_path: Path) -> None:
    source = emit(CASES[name].kernel, blocks=CASES[name].blocks).source
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compile_source(source, tmp_path).asm["cubin"]


def test_wide_accesses(tmp_path: Path) -> None:
    """Contiguous memory is read 16 bytes a thread, in foreach kernels too."""
    sources = [
        emit(adam_kernel(4096).build(), foreach=True).source,
        emit(softmax_kernel(4096, 1000, torch.bfloat16)).source,
        emit(softmax_kernel(4096, 50264, torch.bfloat16)).source,
        emit(layer_norm_kernel(4096, 768, f32)).source,
    ]
    for source in sources:
        ptx = compile_source(source, tmp_path).asm["ptx"]
        assert "v4.b32" in ptx, source.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(name: str, tmp_path: Path) -> None:
    run_case(CASES[name], "cuda", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_foreach_on_gpu(name: str, tmp_path: Path) -> None:
    CHECKS[name]("cuda", tmp_path)


def negate(shape: tuple[int, ...]) -> KernelBuilder:
    """out = -a, contiguous."""
    k = KernelBuilder(shape)
    a = k.read("a", shape)
    k.sweep(False)
    k.point(buffer("out", shape), lambda ops, i: ops.neg(ops.load("a", a.element(i))))
    return k


def test_equal_structure_has_equal_text() -> None:
    first, second = emit(negate((300, 7)).build()), emit(negate((41, 5, 2)).build())
    assert first.source.text == second.source.text and first.source.key == second.source.key
    assert (first.sizes, second.sizes) == ((2100,), (410,))
    assert "//" not in first.source.text and "%" not in first.source.text


def test_symbols_of_axes_of_size_1_vanish() -> None:
    k = negate((5,))
    one = axis("one", 1)
    statement = replace(k.sweeps[0][1][0], index=(k.x[0] + 7 * one,))
    kernel = replace(k.build(), axes=(Axis(one, 1), *k.build().axes), sweeps=(Sweep(False, (statement,)),))
    assert emit(kernel).source.text == emit(negate((5,)).build()).source.text


def test_emission_is_deterministic() -> None:
    case = CASES["every_reduction_loop"]
    assert emit(case.kernel, blocks=LOOP).source == emit(case.kernel, blocks=LOOP).source


def test_64_bit_indices_only_where_needed(tmp_path: Path) -> None:
    small, large = emit(negate((2**20, 2**10)).build()).source, emit(negate((2**21, 2**10)).build()).source
    assert "int64" not in small.text and "int64" in large.text
    assert compile_source(large, tmp_path).asm["cubin"]


def test_persistent_rows_are_read_once() -> None:
    text = emit(CASES["softmax_persistent"].kernel).source.text
    assert text.count("tl.load(") == 1 and "for roffset" not in text


def test_looping_rows_hint_the_cache() -> None:
    text = emit(CASES["softmax_loop"].kernel, blocks=LOOP).source.text
    assert text.count('"evict_last"') == 2 and text.count('"evict_first"') == 1


def test_row_loads_stand_before_the_loop() -> None:
    """What depends on the row alone is loaded and computed once."""
    k = KernelBuilder((4,), (9,))
    a, b = k.read("a", (4, 9)), k.read("b", (4,))
    k.sweep(True)

    def body(ops, i, r):  # type: ignore[no-untyped-def]
        return ops.mul(ops.load("a", a.element((*i, *r))), ops.exp(ops.load("b", b.element(i))))

    k.reduce([buffer("out", (4,))], "sum", body)
    text = emit(k.build(), blocks=LOOP).source.text
    assert text.index("libdevice.exp") < text.index("for roffset")


def test_foreach_texts_tell_no_size_that_rows_may_differ_in(tmp_path: Path) -> None:
    """What decides which kernels of a program share a launch."""

    def key(k: KernelBuilder) -> str:
        return emit(k.build(), foreach=True).source.key

    assert key(negate((300, 7))) == key(negate((41, 5, 2)))
    assert key(square_sum_kernel(12)) == key(square_sum_kernel(4716))
    assert key(column_sum_kernel(32, 768)) != key(column_sum_kernel(32, 2304))  # the step from row to row
    for kernel in (square_sum_kernel(768), column_sum_kernel(32, 768), CASES["transpose_bias"]):
        built = kernel.build() if isinstance(kernel, KernelBuilder) else kernel.kernel
        assert compile_source(emit(built, foreach=True).source, tmp_path).asm["cubin"]


def chunk_sum_kernel(chunks: int) -> KernelBuilder:
    """The first stage of a gradient norm: chunks of 8192."""
    k = KernelBuilder((chunks,), (8192,))
    a = k.read("a", (chunks, 8192), torch.bfloat16)
    k.sweep(True)
    k.reduce([buffer("out", (chunks,))], "sum", lambda ops, i, r: ops.load("a", a.element((*i, *r))))
    return k


def test_first_stages_of_norms_are_one_text_with_wide_loads(tmp_path: Path) -> None:
    small, large = (emit(chunk_sum_kernel(chunks).build(), foreach=True) for chunks in (9, 4716))
    assert small.source.key == large.source.key and large.sizes == (4716, 8192)
    assert "ld.global.v4.b32" in compile_source(small.source, tmp_path).asm["ptx"].replace(".L1::evict_last", "")


def test_mixed_dtypes_are_refused() -> None:
    k = KernelBuilder((4,))
    a, b = k.read("a", (4,)), k.read("b", (4,), torch.int32)
    k.sweep(False)
    k.point(buffer("out", (4,)), lambda ops, i: ops.add(ops.load("a", a.element(i)), ops.load("b", b.element(i))))
    with pytest.raises(TypeError, match="one dtype"):
        emit(k.build())


def test_foreach_blocks_cover_rows() -> None:
    sizes = [5, 0, 16, 33]
    blocks = foreach_blocks(sizes, 16)
    assert blocks == [(0, 0), (2, 0), (3, 0), (3, 16), (3, 32)]
    assert [tuple(row) for row in foreach_block_table(sizes, 16).tolist()] == blocks
    assert scalar_bits(1.0, float) == 0x3FF0000000000000 and scalar_bits(-3, int) == -3


def test_choices_are_legal_blocks() -> None:
    for x in (1, 7, 132, 4096, 100_000):
        assert choose_pointwise(x).rblock == 0
        for r in (1, 2, 63, 768, 4096, 30522, 1 << 20):
            for contiguous in (True, False):
                for sweeps in (1, 3):
                    for body in (LoopBody(2), LoopBody(2, heavy=False), LoopBody(5, stores=True)):
                        blocks = choose_reduction(x, r, r_contiguous=contiguous, r_sweeps=sweeps, body=body)
                        tile = blocks.xblock * blocks.rblock
                        assert next_power_of_2(tile) == tile and 1 <= blocks.num_warps <= 16
                        assert tile // (32 * blocks.num_warps) <= 32, blocks
                        assert not blocks.persistent or blocks.rblock >= r
                        assert blocks.loop_stages * tile * 4 * body.live <= 160 << 10, "shared memory of a processor"


def test_statistics_of_rows_do_not_turn_a_sum_of_columns() -> None:
    """The gradient of a layer norm's weight, in chunks of rows: the tensors decide, not mean and rstd."""
    chunk, row, column = (
        Axis(sympy.Symbol(name, integer=True), size) for name, size in (("c", 4), ("r", 40), ("i", 64))
    )
    both = (chunk.symbol * 40 + row.symbol) * 64 + column.symbol
    rows = chunk.symbol * 40 + row.symbol
    accesses = [Access("dy", both, False, 0, True)] + [Access(n, rows, False, 0, True) for n in ("mean", "rstd", "w")]
    sizes = {"dy": 2, "mean": 4, "rstd": 4, "w": 4}
    assert contiguous_side((chunk, column), (row,), accesses, sizes) == "x"
    assert contiguous_side((chunk,), (row,), accesses[1:], sizes) == "r"
