"""Whole training steps as prims graphs, recorded on the lazy device, with the values that they ran on.

Invariant: a recorded step is one trace; its operators up to the loss are marked forward, the others backward.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torchlazy
from torch import Tensor, fx, nn
from torchlazy.autograd.step import BACKWARD, FORWARD, STAGE, Stages, split_point
from torchlazy.lazy.api import recorder
from torchlazy.lazy.run.interpreter import run_entries
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.to_fx import needed_entries, trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.decompose import decompose
from torchlazy.prims.passes.graph_passes import run_passes
from torchlazy.prims.verify import PRIMS, verify

Forward = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class RecordedStep:
    """The graph of one step, and real inputs for it (none where it was recorded for a device that is not here)."""

    graph: fx.Graph
    stages: Stages
    inputs: list[Any]


@contextmanager
def _traces(run: bool) -> Iterator[list[tuple[CutTrace, list[Any]]]]:
    found: list[tuple[CutTrace, list[Any]]] = []

    def catch(trace: CutTrace, memory: list[Tensor], scalars: list[Any], cause: str, frame: str) -> list[Any]:
        found.append((trace, [*(value.clone() for value in memory), *scalars] if run else []))
        if not run:
            metas = [geometry.meta for _, geometry in trace.outputs]
            return [torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device="meta") for meta in metas]
        with below_autograd():
            return run_entries(trace, memory, scalars)

    before = recorder.driver
    recorder.driver = catch
    try:
        yield found
    finally:
        recorder.driver = before


def record(model: nn.Module, forward: Forward, batch: Any) -> RecordedStep:
    """The second training step of `model` with AdamW: the optimizer's state exists by then."""
    model.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count = 0
    for _ in range(2):
        torchlazy.sync()
        with _traces(run=True) as found:
            loss = forward(model, batch)
            count = len(recorder.entries)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            torchlazy.flush()
    assert len(found) == 1, f"the step was cut into {len(found)} traces"
    return marked(found[0][0], count, found[0][1])


def record_for_cuda(make: Callable[[], nn.Module], forward: Forward, batch: Callable[[], Any]) -> RecordedStep:
    """A step as on a GPU, under bfloat16 autocast: never run, so no GPU is needed. Parameters are inputs."""
    before, count = recorder.target, 0
    torchlazy.sync()
    recorder.target = "cuda:0"
    with _traces(run=False) as found:
        try:
            with torch.no_grad():
                model = make().to("meta").to_empty(device="lazy")
            values = batch()
            torchlazy.flush()
            with torch.autocast("lazy", dtype=torch.bfloat16):
                loss = forward(model, values)
            count = len(recorder.entries)
            loss.backward()
            torchlazy.flush()
        finally:
            recorder.target = before
    assert len(found) == 2, f"the step was cut into {len(found) - 1} traces"
    return marked(found[1][0], count, [])


def marked(trace: CutTrace, forward_entries: int, inputs: list[Any]) -> RecordedStep:
    """The prims graph of a trace of which the first entries are the forward."""
    needed = needed_entries(trace)
    left = sum(position < forward_entries for position in needed)
    aten = trace_to_graph(trace)
    for node in aten.nodes:
        if node.op != "call_function":
            continue
        if node.target is not operator.getitem:
            left -= 1
        node.meta[STAGE] = FORWARD if left >= 0 else BACKWARD
    graph = run_passes(decompose(aten))
    verify(graph, PRIMS)
    return RecordedStep(graph, split_point(graph), inputs)


def example(name: str) -> ModuleType:
    """A file of examples/ as a module."""
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def gpt(layers: int = 2, width: int = 64, block: int = 32, batch: int = 4, dropout: float = 0.1) -> RecordedStep:
    """A step of the small GPT of the examples."""
    tiny = example("tiny_gpt")
    torch.manual_seed(0)
    model = tiny.GPT(tiny.GPTConfig(layers=layers, heads=2, width=width, block=block, dropout=dropout))
    codes = torch.randint(96, (batch, block + 1))
    x, y = codes[:, :-1].contiguous().to("lazy"), codes[:, 1:].contiguous().to("lazy")
    return record(model, lambda m, b: m(*b)[1], (x, y))


def gpt_for_cuda(layers: int, width: int, heads: int, block: int, batch: int, dropout: float = 0.0) -> RecordedStep:
    """The same on a GPU in bfloat16."""
    tiny = example("tiny_gpt")
    config = tiny.GPTConfig(layers=layers, heads=heads, width=width, block=block, dropout=dropout)

    def codes() -> Tensor:
        return torch.empty(batch, block, dtype=torch.int64, device="lazy")

    return record_for_cuda(lambda: tiny.GPT(config), lambda m, b: m(*b)[1], lambda: (codes(), codes()))


def mlp() -> RecordedStep:
    """Linear layers with a tanh and a mean squared error: most of what backward reads is read by products."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    return record(model, lambda m, x: (m(x) - 1.0).square().mean(), torch.randn(64, 16).to("lazy"))


def normed_blocks() -> RecordedStep:
    """Residual blocks of layer norm, gelu and dropout."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
            self.drop = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    return record(model, lambda m, x: m(x).square().mean(), torch.randn(8, 16, 32).to("lazy"))


mlp_once = cache(mlp)
normed_blocks_once = cache(normed_blocks)
gpt_once = cache(partial(gpt, layers=2))
gpt_on_cuda_once = cache(partial(gpt_for_cuda, layers=2, width=256, heads=4, block=256, batch=4, dropout=0.1))
