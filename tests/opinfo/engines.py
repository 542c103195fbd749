"""What may stand behind a cut: the compiler, the interpreter of loop IR, or the primitives' eager references.

Invariant: each engine has the recorder's driver interface and raises whatever goes wrong; none falls back.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchlazy
from torchlazy.inductor import interpret, lowering
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims import eager
from torchlazy.prims.decompose import decompose
from torchlazy.prims.passes import graph_passes
from torchlazy.prims.verify import ATEN, PRIMS, verify

ENGINES = ("prims", "loops", "compiler")


class _Interpreting:
    """A driver that keeps no programs: each cut is interpreted anew."""

    listeners = ()
    shadow = last_compiled = None

    def __init__(self, interpret: Callable[..., Any]) -> None:
        self.interpret = interpret
        self.tiers = types.SimpleNamespace(sizes_vary=False)

    def __call__(self, *cut: Any) -> Any:
        return self.interpret(*cut)


@contextlib.contextmanager
def engine(name: str, precision: str | None = None) -> Iterator[None]:
    """Cuts inside run through this engine, with eager's own random numbers, and with this `config.precision`."""
    config = torchlazy.config
    kept = recorder.driver, config.tiers, config.strict, config.rng, config.precision
    if not hasattr(torch, "_lazy"):  # torch.testing tells its own lazy backend of each seed that it sets
        torch._lazy = types.SimpleNamespace(mark_step=lambda: None)  # type: ignore[attr-defined]
    recorder.driver = driver if name == "compiler" else _Interpreting({"prims": _prims, "loops": _loops}[name])
    config.tiers, config.strict, config.rng, config.precision = "off", True, "eager", precision or config.precision
    try:
        yield
    finally:
        recorder.driver, config.tiers, config.strict, config.rng, config.precision = kept


def _graph(trace: CutTrace) -> torch.fx.Graph:
    aten = trace_to_graph(trace)
    verify(aten, ATEN)
    graph = decompose(aten, strict=True)
    verify(graph, PRIMS)
    return graph


def _prims(trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], cause: str, frame: str) -> Any:
    with below_autograd():
        return _own(trace, eager.run(_graph(trace), [*memory, *scalars]))


def _loops(trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], cause: str, frame: str) -> Any:
    with below_autograd():
        graph = graph_passes.run_passes(_graph(trace), torchlazy.config.precision)
        verify(graph, PRIMS)
        loops = lowering.lower(graph, donations={})
        return _own(trace, interpret.run(loops, memory, scalars))


def _own(trace: CutTrace, values: Any) -> list[torch.Tensor]:
    """Each value in memory of its own, laid out as the trace promises; another shape or dtype is an error."""
    results = []
    for value, (number, geom) in zip(values, trace.outputs, strict=True):
        if tuple(value.shape) != geom.shape or value.dtype != geom.dtype:
            raise AssertionError(f"{number} is {value.dtype}{list(value.shape)}, the trace promises {geom}")
        memory = torch.zeros(geom.span, dtype=geom.dtype)
        own = memory.as_strided(geom.shape, geom.strides)
        if any(stride < span for stride, span in _spans(geom.shape, geom.strides)):  # elements overlap
            places = torch.arange(geom.span).as_strided(geom.shape, geom.strides)
            memory[places.reshape(-1)] = value.reshape(-1)
        else:
            own.copy_(value)
        results.append(own)
    return results


def _spans(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Of each dimension, smallest stride first: its stride, and the elements that the dimensions before it span."""
    spans, span = [], 1
    for stride, size in sorted((t, n) for t, n in zip(strides, shape, strict=True) if n > 1):
        spans.append((stride, span))
        span += (size - 1) * stride
    return spans
