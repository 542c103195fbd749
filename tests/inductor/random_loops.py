"""Random loop graphs over 24 elements: reshapes, transposes, broadcasts, strided layouts, reductions and donations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import sympy
import torch
from torchlazy.inductor.index import reshape_index
from torchlazy.inductor.ir import Buffer, LoopGraph, LoopNode
from torchlazy.prims.meta import contiguous_strides

from tests.inductor.kernel_interpreter import buffer, pointwise, reduction

SHAPES = ((24,), (4, 6), (6, 4), (2, 3, 4), (2, 12), (4, 3, 2), (2, 2, 6))
Read = tuple[str, Callable[[Any], sympy.Expr]]


def random_graph(seed: int) -> tuple[LoopGraph, list[torch.Tensor]]:
    """A graph and inputs for it."""
    return _Maker(seed).make()


class _Maker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.buffers: dict[str, Buffer] = {}
        self.positions: list[str] = []  # outputs of argmax: read by nobody

    def make(self) -> tuple[LoopGraph, list[torch.Tensor]]:
        rng = self.rng
        inputs = []
        for number in range(3):
            shape = rng.choice(SHAPES)
            inputs.append(buffer(f"in{number}", *shape, strides=self._strides(shape)))
        inputs.append(buffer("in3", rng.choice((2, 3, 4, 6, 12))))
        self.buffers = {b.name: b for b in inputs}
        nodes = tuple(self._node(f"b{number}") for number in range(rng.randint(3, 12)))
        made = [name for name in self.buffers if name.startswith("b")]
        outputs = rng.sample(made, min(len(made), rng.randint(1, 3))) + self.positions
        donations: dict[str, str] = {}
        for output in outputs:
            if output in self.buffers and rng.random() < 0.6:
                fits = [
                    b.name for b in inputs
                    if b.shape == self.buffers[output].shape and b.name not in donations.values()
                ]  # fmt: skip
                if fits:
                    donations[output] = rng.choice(fits)
        if rng.random() < 0.1:
            for a, b in pairwise(inputs):
                if a.shape == b.shape and not {a.name, b.name} & set(donations.values()):
                    outputs += [a.name, b.name]
                    donations |= {a.name: b.name, b.name: a.name}
                    break
        torch.manual_seed(self.seed)
        data = [torch.randn(prod(b.shape)).as_strided(b.shape, b.strides) for b in inputs]
        return LoopGraph(tuple(inputs), (), nodes, tuple(dict.fromkeys(outputs)), donations), data

    def _strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        if len(shape) == 1 or self.rng.random() > 0.25:
            return contiguous_strides(tuple(shape))
        order = list(range(len(shape)))
        self.rng.shuffle(order)
        strides, step = [0] * len(shape), 1
        for axis in order:
            strides[axis] = step
            step *= shape[axis]
        return tuple(strides)

    def _node(self, name: str) -> LoopNode:
        rng = self.rng
        names = list(self.buffers)
        sources = [
            self.buffers[rng.choice(names[-6:] if rng.random() < 0.7 else names)] for _ in range(rng.randint(1, 3))
        ]
        return self._pointwise(name, sources) if rng.random() < 0.65 else self._reduction(name, sources)

    def _pointwise(self, name: str, sources: Sequence[Buffer]) -> LoopNode:
        shape = tuple(sources[0].shape)
        choice = self.rng.random()
        if choice < 0.4:
            shape = self.rng.choice([s for s in SHAPES if prod(s) == prod(shape)] or [shape])
        elif choice < 0.5:
            shape = self.rng.choice(SHAPES)
        reads = self._reads(sources, shape)
        out = self.buffers[name] = buffer(name, *shape, strides=self._strides(shape))
        constant = self.rng.random()
        return pointwise(out, lambda ops, index, _: _mix(ops, reads, index, constant))

    def _reduction(self, name: str, sources: Sequence[Buffer]) -> LoopNode:
        rng = self.rng
        shape = rng.choice(SHAPES)
        cut = rng.randint(0, len(shape) - 1)
        axes = list(range(len(shape)))
        reduced = axes[cut:] if rng.random() < 0.7 else axes[: max(1, len(shape) - cut)]
        kept = [axis for axis in axes if axis not in reduced]
        reads = self._reads(sources, shape)
        constant = rng.random()

        def body(ops, index, reduce_index):
            places = dict(zip((*kept, *reduced), (*index, *reduce_index), strict=True))
            return _mix(ops, reads, tuple(places[axis] for axis in axes), constant)

        kept_shape = [shape[axis] for axis in kept]
        reduce_shape = [shape[axis] for axis in reduced]
        kind = rng.choice(("sum", "max", "min", "welford", "argmax"))
        if kind == "argmax":
            self.positions.append(name)
            return reduction(kind, buffer(name, *kept_shape, dtype=torch.int64), reduce_shape, body)
        if kind == "welford":
            outputs = tuple(buffer(f"{name}{part}", *kept_shape) for part in ("mean", "m2", "count"))
            self.buffers |= {out.name: out for out in outputs[:2]}
            return reduction(kind, outputs, reduce_shape, body)
        out = self.buffers[name] = buffer(name, *kept_shape)
        return reduction(kind, out, reduce_shape, body)

    def _reads(self, sources: Sequence[Buffer], shape: tuple[int, ...]) -> list[Read]:
        found = [(source.name, self._read(source, shape)) for source in sources]
        return [(name, index) for name, index in found if index is not None]

    def _read(self, source: Buffer, shape: tuple[int, ...]) -> Callable[[Any], sympy.Expr] | None:
        """A way to read `source` from loops over `shape`: reshaped, turned, or broadcast from a run of the loops."""
        own = tuple(map(int, source.shape))
        if prod(own) == prod(shape):
            if self.rng.random() < 0.15 and len(shape) > 1:
                order = list(range(len(shape)))
                self.rng.shuffle(order)
                turned = tuple(shape[axis] for axis in order)
                return lambda i: source.element(reshape_index(tuple(i[axis] for axis in order), turned, own))
            return lambda i: source.element(reshape_index(tuple(i), shape, own))
        for low in range(len(shape) + 1):
            for high in range(low, len(shape) + 1):
                if prod(shape[low:high]) == prod(own):
                    if low == high:
                        return lambda i: source.element((sympy.Integer(0),) * len(own))
                    part = shape[low:high]
                    return (
                        lambda i, low=low, high=high, part=part: source.element(  # type: ignore[misc]
                            reshape_index(tuple(i[low:high]), part, own)
                        )
                    )
        return None


def _mix(ops: Any, reads: Sequence[Read], index: Any, constant: float) -> Any:
    value = ops.constant(constant, torch.float32)
    for name, element in reads:
        value = ops.add(ops.mul(value, ops.constant(0.5, torch.float32)), ops.load(name, element(index)))
    return value
