"""Triton launches on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchlazy.runtime.cuda.graph_memory import GraphMemory
from torchlazy.runtime.executor import load_program
from torchlazy.runtime.toolchains.kernel_cache import open_cache
from torchlazy.runtime.toolchains.toolchain import load_kernels

from .tiny_triton import triton_scale
from .triton_programs import check_launches, launches_program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_every_kind_of_launch(tmp_path: Path) -> None:
    executable = load_program(launches_program("cuda:0"), cache=open_cache(tmp_path / "cache"))
    check_launches(executable, "cuda:0")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        check_launches(executable, "cuda:0")


def test_aligned_and_unaligned_addresses(tmp_path: Path) -> None:
    (kernel,) = load_kernels([triton_scale()], cache=open_cache(tmp_path / "cache"))
    x = torch.randn(1025, device="cuda")
    for start, stop in ((0, 1024), (1, 1025), (1, 1000), (0, 3)):
        given = x[start:stop]
        out = torch.full_like(x, -1.0)
        kernel(given.data_ptr(), out.data_ptr(), 0.5, stop - start)
        torch.testing.assert_close(out[: stop - start], given * 2 + 0.5)
        assert (out[stop - start :] == -1).all()


def test_capture_in_a_cuda_graph(tmp_path: Path) -> None:
    executable = load_program(launches_program("cuda:0"), cache=open_cache(tmp_path / "cache"))
    inputs = [torch.randn(shape, device="cuda") for shape in ((40, 50), (1000,), (0,), (7,))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        executable.run(list(inputs), [0.5, 3])
    torch.cuda.synchronize()
    executable.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sums, *outs = executable.run(list(inputs), [0.5, 3])
    executable.fill_tables()
    for given in inputs:
        given.normal_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(sums, (inputs[0] * 2 + 0.5)[1:].sum(1))
    for out, given in zip(outs, inputs[1:], strict=True):
        torch.testing.assert_close(out, given * 0.5 + 3)


def test_a_capture_after_the_last_graph_is_gone_while_its_values_are_held() -> None:
    memory = GraphMemory(torch.device("cuda:0"))
    given = torch.arange(4.0, device="cuda")
    graph, first = memory.captured(lambda: given * 2)
    memory.replay(graph)
    del graph
    graph, second = memory.captured(lambda: given + 1)
    memory.replay(graph)
    assert (first.tolist(), second.tolist()) == ([0.0, 2.0, 4.0, 6.0], [1.0, 2.0, 3.0, 4.0])
    assert torch.randn(3, device="cuda").isfinite().all()  # a capture that fails to begin breaks the generator
