"""Choosing launch facts by measuring: what is tried, what is chosen, and what is remembered."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.program.program import Allocate, Launch, Program
from torchlazy.runtime.toolchains.kernel_cache import open_cache
from torchlazy.runtime.toolchains.kernel_tuning import candidates, choose
from torchlazy.runtime.toolchains.toolchain import LoadedKernel
from torchlazy.runtime.toolchains.toolchain_triton import _SM90, TritonKernel, has_triton, is_interpreting

from .tiny_triton import triton_scale

pytestmark = pytest.mark.skipif(not has_triton() or is_interpreting(), reason="needs Triton's compiler")
OPTIONS = (("XBLOCK", 1024), ("num_warps", 4), ("num_stages", 1))


def _program(elements: int, count: int = 1) -> Program:
    meta = TensorMeta((elements,), torch.float32, (1,), "cuda:0")
    sources = tuple(dataclasses.replace(triton_scale(float(i + 1)), options=OPTIONS) for i in range(count))
    steps = []
    for number in range(count):
        steps += [Allocate(f"y{number}", meta), Launch(number, ("x", f"y{number}"), ("s",), (elements,))]
    outputs = tuple(f"y{number}" for number in range(count))
    return Program((("x", meta),), (("s", float),), sources, tuple(steps), outputs, (meta,) * count)


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton-cache"))
    cache = open_cache(tmp_path / "cache")

    def load(program: Program) -> list[LoadedKernel]:
        return [LoadedKernel(s, triton=TritonKernel.from_source(s, "", cache, _SM90)) for s in program.kernels]

    return load


def test_candidates_keep_the_text_and_only_shrink_the_block():
    found = candidates(OPTIONS)
    assert len(found) == 3 and OPTIONS not in found
    assert all([name for name, _ in options] == ["XBLOCK", "num_warps", "num_stages"] for options in found)
    assert {dict(options)["XBLOCK"] for options in found} == {1024, 512}
    assert {dict(options)["num_warps"] for options in candidates((("XBLOCK", 1), ("num_warps", 1)))} == {2}


def test_the_fastest_is_chosen_and_remembered(loaded):
    program = _program(1 << 20)
    kernels = loaded(program)
    measured: list[int] = []

    def measure(kernel, launch):
        facts = dict(kernel.source.options)
        assert launch.sizes == (1 << 20,)
        measured.append(facts["num_warps"])
        return {8: 0.010, 4: 0.020, 2: 0.015}[facts["num_warps"]]

    chosen, (decision,) = choose(program, kernels, measure, "a device")
    assert sorted(measured) == [2, 2, 4, 8]
    assert dict(chosen[0].source.options) == {"XBLOCK": 1024, "num_warps": 8, "num_stages": 1}
    assert decision.kernel == "scale" and decision.reason == "num_warps 4 -> 8: 10.0 instead of 20.0 us"
    assert kernels[0].source.options == OPTIONS, "what is loaded already stays as it is"
    again, (told,) = choose(program, kernels, lambda *_: pytest.fail("measured again"), "a device")
    assert again[0].source.options == chosen[0].source.options and told.reason.endswith("(measured before)")
    measured.clear()
    choose(program, kernels, measure, "another device")
    assert measured


def test_the_rules_stay_where_nothing_is_clearly_faster(loaded):
    program = _program(1 << 20)
    kernels = loaded(program)
    chosen, (decision,) = choose(program, kernels, lambda kernel, _: 0.0199 if kernel is not kernels[0] else 0.02, "d")
    assert chosen[0] is kernels[0] and "the rules' choice stays" in decision.reason


def test_candidates_that_fail_are_no_candidates(loaded):
    program = _program(1 << 20)
    kernels = loaded(program)

    def measure(kernel, launch):
        if kernel is not kernels[0]:
            raise RuntimeError("out of resources")
        return 0.02

    chosen, _ = choose(program, kernels, measure, "d")
    assert chosen[0] is kernels[0]


def test_small_kernels_are_left_alone(loaded):
    program = _program(1 << 10, 3)
    kernels = loaded(program)
    chosen, decisions = choose(program, kernels, lambda *_: pytest.fail("measured"), "d")
    assert chosen == kernels and not decisions
