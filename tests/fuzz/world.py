"""What a program finds: the state `S`, the kinds of arguments, and the classes that its lines name.

Invariant: the same seed and device give the same state and arguments; a window on larger memory is made on its device.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.lazy.random_programs import SPACE, tensor_of


@dataclass(repr=False)
class Box:
    """A container with fields. A `__repr__` that is made for it asks for identities, and its code would be reached."""

    t: Any
    k: float = 1.5


class Pair(NamedTuple):
    """A result with names."""

    first: Any
    second: Any


class Block(nn.Module):
    """A layer whose attributes and buffers change as it runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.factor, self.calls = nn.Linear(width, width), 1.5, 0
        self.register_buffer("mean", torch.zeros(width))
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.factor
        self.calls += 1
        if self.training:
            self.mean.lerp_(y.detach().reshape(-1, y.shape[-1]).mean(0), 0.25)
        self.cache = y.detach() if self.cache is None or self.cache.shape != y.shape else self.cache * 0.5 + y.detach()
        return y + self.mean


_OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.05),
    lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    lambda p: torch.optim.Adam(p, 0.02, foreach=True, amsgrad=True),
]


class World(nn.Module):
    """What calls find and leave: numbers, tensors, containers, modules, an optimizer. As a module it runs the step."""

    def __init__(self, device: str, seed: int, step: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def data(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.step = step
        self.k, self.n, self.flag, self.name = 1.25, 1, False, "a"
        self.register_buffer("a", data(4, 3))
        self.b, self.p = data(4), nn.Parameter(data(3))
        self.l, self.d = [data(3), data(3)], dict[str, torch.Tensor]()
        self.q = deque([data(3), data(3)])
        self.settings = type("Settings", (), {"scale": 1.5, "shifts": True})
        self.m, self.block = nn.Linear(3, 3), Block(3)
        for layer in (self.m, self.block.inner):
            layer.weight, layer.bias = nn.Parameter(data(3, 3)), nn.Parameter(data(3))
        self.block.mean = data(3)
        self.box = Box(data(3))
        self.base = data(6, 6)
        self.window = self.base[1:4, 2:5]
        self.o = _OPTIMIZERS[seed % len(_OPTIMIZERS)](list(self.parameters()))

    def forward(self, *args: Any) -> Any:
        return self.step(self, *args)

    def state(self) -> dict[str, Any]:
        """All of it, by name."""
        moments = [self.o.state.get(p, {}) for group in self.o.param_groups for p in group["params"]]
        plain = {
            n: v
            for n, v in vars(self).items()
            if not n.startswith("_") and n not in ("o", "step", "training", "settings")
        }
        groups = [{n: v for n, v in group.items() if n != "params"} for group in self.o.param_groups]
        block = {"calls": self.block.calls, "cache": self.block.cache}
        parts = {"module": dict(self.named_parameters()), "buffers": dict(self.named_buffers()), "block": block}
        return {"S": {**plain, "a": self.a}, **parts, "o": moments, "groups": groups, "training": self.training}


class Inputs(NamedTuple):
    """One argument: name, dtype, shape ("n" and "m" are the call's sizes), whether it needs a gradient, its memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]
    leaf: bool
    memory: str


class Call(NamedTuple):
    """The sizes of a call, its numbers, the seed of its tensors, and what happens before and after it."""

    n: int
    m: int
    numbers: tuple[Any, Any, Any]
    seed: int
    before: str = ""
    after: str = ""


MEMORY = (
    "", "", "", "turned", "expanded", "every other", "of the last", "rows", "columns", "one wide", "hooked", "computed",
    "moved", "same", "state", "overlapping", "at times turned", "at times same", "at times state", "at times frozen",
    "at times hooked",
)  # fmt: skip
MEMORY_OF_LEAVES = (*MEMORY, *["hooked", "at times hooked", "computed", "at times frozen"] * 3)


def read(storage: torch.UntypedStorage, dtype: torch.dtype) -> list[complex]:
    """The first numbers in a storage, of at most so many as are there."""
    return torch.empty(0, dtype=dtype).set_(storage)[:3].tolist()  # type: ignore[no-any-return]


def _in_memory(t: torch.Tensor, memory: str, last: torch.Tensor | None, S: World, call: Call) -> torch.Tensor:
    """The tensor, on its device, as it lies in memory."""
    match memory:
        case "turned" if t.dim() == 2:
            return t.t().contiguous().t()
        case "expanded":
            return t[None].expand(2, *t.shape)
        case "every other":
            return torch.cat([t.reshape(-1), t.reshape(-1)])[1::2]
        case "of the last" if last is not None and not last.requires_grad:
            return last.reshape(-1)[1:] if last.is_contiguous() else last.detach()
        case "same" if last is not None:
            return last
        case "state":
            return S.b
        case "at times state":
            return S.b if call.seed % 2 else S.b.detach().clone()
        case "at times same" if last is not None:
            return last if call.seed % 2 else last.detach().clone().requires_grad_(last.requires_grad)
        case "at times turned" if t.dim() == 2 and call.seed % 2:
            return t.t().contiguous().t()
        case "rows" if t.dim():
            return torch.cat([t, t, t])[t.shape[0] : 2 * t.shape[0]]
        case "moved" if t.dim():  # at another place of its memory in each call
            start = call.seed % 3
            return torch.cat([t, t, t, t])[start : start + t.shape[0]]
        case "columns" if t.dim() > 1:
            return torch.cat([t, t, t], 1)[:, 1 : 1 + t.shape[1]]
        case "one wide" if t.dim() > 1:
            return torch.cat([t, t], 1)[:, 1:2]
        case "overlapping" if t.dim() == 2 and t.shape[0] and t.numel() >= 2 * t.shape[1]:
            return t.as_strided((2, t.shape[1]), (1, 1))
    return t


def arguments(inputs: tuple[Inputs, ...], call: Call, device: str, S: World) -> dict[str, torch.Tensor]:
    """The tensors of a call by name; "leaf of" and "memory of" are there to be looked at, and are not passed."""
    generator = torch.Generator().manual_seed(call.seed)
    made: dict[str, torch.Tensor] = {}
    last: torch.Tensor | None = None
    for name, dtype, shape, leaf, memory in inputs:
        t = tensor_of(dtype, tuple({"n": call.n, "m": call.m}.get(size, size) for size in shape), generator).to(device)
        t = _in_memory(t, memory, last, S, call)
        if t._base is not None and not t._base.requires_grad:
            made[f"memory of {name}"] = t._base
        leaf = leaf and not (memory == "at times frozen" and call.seed % 2)
        if leaf and t.is_leaf and (t.is_floating_point() or t.is_complex()):
            t.requires_grad_()
            if memory == "computed":
                made[f"leaf of {name}"] = t
                t = t * 1.5
            if memory == "hooked" or (memory == "at times hooked" and call.seed % 2):
                t.register_hook(lambda grad: grad * (2 + call.seed % 3))
        made[name] = last = t
    return made


NAMES = {**SPACE, "read": read, "Box": Box, "Pair": Pair, "F": F, "copy": copy, "itertools": itertools, "np": np}
