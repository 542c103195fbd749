"""Triton sources without a GPU: compiled for Hopper, run in the interpreter, compiled by child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.toolchains import triton_crew, triton_worker
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.toolchain import has_triton, load_kernels
from torchlazy.runtime.toolchains.toolchain_triton import (
    _SM90,
    TritonKernel,
    _compile_side_by_side,
    compile_for_sm90,
    is_interpreting,
)

from .tiny_triton import triton_broken, triton_foreach, triton_row_sum, triton_scale

pytestmark = pytest.mark.skipif(not has_triton() or is_interpreting(), reason="needs Triton's compiler")


@pytest.fixture(autouse=True)
def own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton-cache"))


def test_compiles_for_hopper_without_a_gpu() -> None:
    assert "sm_90" in compile_for_sm90(triton_scale()).asm["ptx"]
    assert compile_for_sm90(triton_row_sum()).asm["cubin"]
    assert compile_for_sm90(triton_foreach()).asm["cubin"]


def test_sizes_and_alignment_decide_the_variant() -> None:
    whole = compile_for_sm90(triton_scale(), sizes=(1 << 20,)).asm["ptx"]
    ragged = compile_for_sm90(triton_scale(), sizes=((1 << 20) + 1,)).asm["ptx"]
    assert "ld.global.v" in whole and "ld.global.v" not in ragged
    assert ".param .u64" in compile_for_sm90(triton_scale(), sizes=(1 << 32,)).asm["ptx"]


def test_a_broken_source_says_what_is_wrong() -> None:
    with pytest.raises(KernelCompileError, match="no_such_value"):
        compile_for_sm90(triton_broken())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_remedies_are_told(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissing, match="TRITON_INTERPRET"):
        load_kernels([triton_scale()], cache=open_cache(tmp_path / "cache"))


def test_child_processes_fill_the_cache_that_the_parent_reads(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    kernels = [TritonKernel.from_source(triton_scale(factor), "", cache, _SM90) for factor in range(4)]
    _compile_side_by_side([(kernel, [(64,)]) for kernel in kernels])
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: nothing is done side by side")
    before = sorted((tmp_path / "triton-cache").iterdir())
    assert len(before) >= 4  # and what Triton builds for itself
    for kernel in kernels:
        kernel.compile((64,), aligned=True)
    assert sorted((tmp_path / "triton-cache").iterdir()) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing is done side by side")
def test_a_crew_that_starts_ahead_compiles_and_ends(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    kernels = [TritonKernel.from_source(triton_scale(factor), "", cache, _SM90) for factor in range(10, 14)]
    with triton_crew.crew_ahead(1000):
        crew = triton_crew._ahead
        assert crew is not None
        children = list(crew.children)
        assert len(children) >= 2 and all(child.poll() is None for child in children)
        children[0].kill()
        children[0].wait()  # the jobs that it would have taken are the others'
        _compile_side_by_side([(kernel, [(64,)]) for kernel in kernels])
        assert any(child.poll() is None for child in children), "the crew lives as long as its block"
    assert triton_crew._ahead is None and all(child.poll() is not None for child in children)
    before = sorted((tmp_path / "triton-cache").iterdir())
    for kernel in kernels:
        kernel.compile((64,), aligned=True)
    assert sorted((tmp_path / "triton-cache").iterdir()) == before


def test_a_crew_grows_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small program of many kernels (a convolutional network's) is not left to two children."""
    monkeypatch.setattr(triton_crew, "available_cores", lambda: 6)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: object())
    sizes: list[int] = []
    monkeypatch.setattr(triton_crew.TritonCrew, "compile", lambda crew, jobs: sizes.append(len(crew.children)))
    monkeypatch.setattr(triton_crew.TritonCrew, "close", lambda crew: None)
    for kernels in (4, 20, 56):
        with triton_crew.crew_ahead(65):
            triton_crew.compile_with_crew([{}] * kernels)
    assert sizes == [2, 5, 6]


def test_a_crew_without_children_left_leaves_the_work_to_its_parent(tmp_path: Path) -> None:
    crew = triton_crew.TritonCrew(2)
    for child in crew.children:
        child.kill()
        child.wait()
    source = triton_scale(20)
    kernel = TritonKernel.from_source(source, "", open_cache(tmp_path / "cache"), _SM90)
    crew.compile([kernel.job((64,), aligned=True)] * 3)
    crew.close()
    assert "ptx" in kernel.compile((64,), aligned=True).asm


def test_a_program_in_the_interpreter() -> None:
    root = Path(__file__).resolve().parents[2]
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('checks', {str(root / 'tests/runtime/__init__.py')!r}, "
        f"submodule_search_locations=[{str(root / 'tests/runtime')!r}])\n"
        "sys.modules['checks'] = importlib.util.module_from_spec(spec)\n"
        "from checks.triton_programs import main\n"
        "main('cpu')\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.stdout.strip() == "checked", done.stderr


def test_other_warps_and_larger_blocks_are_tried_where_the_compiler_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some passes of Triton 3.6 fail on a reduction for some numbers of warps and some blocks, and not for others."""
    source = triton_row_sum()
    kernel = TritonKernel.from_source(source, "", KernelCache(tmp_path), _SM90)
    xblock, compiled = kernel.constexprs["XBLOCK"], triton_worker.compile_job
    tried: list[tuple[int, int]] = []

    def compile_job(job: dict[str, Any], function: Any = None) -> Any:
        tried.append((job["constexprs"]["XBLOCK"], job["options"].get("num_warps", 4)))
        if job["constexprs"]["XBLOCK"] == xblock or job["options"].get("num_warps") != 8:
            raise RuntimeError("PassManager::run failed")
        return compiled(job, function)

    monkeypatch.setattr(triton_worker, "compile_job", compile_job)
    found = kernel.compile((64, 64), aligned=True)
    assert found.metadata.num_warps == 8 and kernel.constexprs["XBLOCK"] == 2 * xblock
    assert len(tried) == len(set(tried))
    assert kernel.compile((64, 64), aligned=False).metadata.num_warps == 8
    monkeypatch.setattr(triton_worker, "compile_job", lambda job, function: tried.append(job) or 1 / 0)
    fresh = TritonKernel.from_source(source, "", KernelCache(tmp_path), _SM90)
    with pytest.raises(KernelCompileError, match="division by zero"):
        fresh.compile((64, 64), aligned=True)
