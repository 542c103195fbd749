"""Random programs for `torchlazy.compile`: a world of state, a function over it, and what happens between its calls.

Invariant: a seed gives the same source text, the same world and the same happenings every time, on every device; what
the program draws from torch's generator comes after `torch.manual_seed`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 4


class Block(nn.Module):
    """A layer whose attributes its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor, self.flag = nn.Linear(WIDTH, WIDTH), 1.5, False
        self.register_buffer("mean", torch.zeros(WIDTH))

    @property
    def gain(self) -> float:
        return self.factor * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.factor
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.detach().mean(0).to(self.mean.dtype), 0.25)
        return y + self.mean if self.flag else y


class Model(nn.Module):
    """Two blocks and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))) @ self.weight)


def scaled(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    return x * factor


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@dataclass
class Box:
    """An argument with fields."""

    scale: float
    held: torch.Tensor


class World:
    """What a program reads and changes beside its arguments."""

    def __init__(self, device: str, optimizer: str) -> None:
        self.model = Model().to(device)
        self.scale, self.steps, self.flag, self.name, self.loops = 1.25, 0, False, "a", 2
        self.items = [torch.randn(WIDTH).to(device) for _ in range(3)]
        self.table = {"a": torch.randn(WIDTH).to(device), "b": torch.rand(WIDTH).to(device)}
        self.factors = [0.5, 2.0]
        self.layers = nn.ModuleList([Block(), Block()]).to(device)
        self.parts = {"a": nn.Linear(WIDTH, WIDTH).to(device), "b": Block().to(device)}  # no registered modules
        self.spare = [nn.Linear(WIDTH, WIDTH).to(device)]
        self.partial = functools.partial(scaled, factor=1.5)
        self.inner: Callable[..., Any] = doubled
        made: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, 0.01),
            "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
            "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
        }
        self.optimizer = made[optimizer](self.model.parameters())
        self.handles: list[Any] = []


@dataclass(frozen=True)
class Program:
    """A function as source text, and the names of what happens before each of its calls."""

    seed: int
    source: str
    optimizer: str
    draws: bool
    trains: bool
    happenings: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.optimizer}", self.source]
        return "\n".join(lines + [f"before call {i}: {', '.join(h) or '-'}" for i, h in enumerate(self.happenings)])


MATRICES = (
    "{m} + {n}", "{m} * w.scale", "torch.tanh({m})", "{m} @ w.model.weight", "w.model({m})", "w.model.first({m})",
    "{m} * factor", "{m}.t().contiguous().t()", "{m}.flip(0)", "torch.where({m} > 0, {m}, {n})", "{m}.clone()",
    "torch.cat([{m}[1:], {m}[:1]])", "{m} / (1 + {m}.abs())", "{m}.masked_fill({m} < 0, w.scale)", "{m} + {v}",
    "{m} * {v} - {v}", "{m}.detach()", "{m}.view(-1).reshape({m}.shape)", "F.layer_norm({m}, (WIDTH,))",
    "{m} - FACTOR", "{m}[torch.arange({m}.shape[0], device={m}.device).flip(0)]", "{m} * cell[0]",
    "helper({m})", "{m}.softmax(-1)", "{m} * {k}", "{m}.double().float()", "sum(t * {m} for t in w.items)",
    "{m} * w.factors[-1]", "{m} + len(w.table)", "F.linear({m}, w.model.second.inner.weight, w.table['a'])",
    "torch.clamp({m}, -{p}, {p})",
    "w.layers[{i}]({m})", "w.layers[-1]({m})", "w.parts['a']({m})", "w.parts['b']({m})", "w.spare[0]({m})",
    "{m} * w.model.first.gain", "w.partial({m})", "{m} + held", "w.inner({m})", "guarded({m})", "sum(pairs({m}))",
    "slope({m})", "torch.func.vmap(lambda row: row * w.scale)({m})", "torch.cat([{m}[:0], {m}])",
    "torch.func.grad(lambda x: (x * w.scale).sin().sum())({m})", "{m}.T.T",
    "torch.view_as_real(torch.complex({m}, {n}) * w.scale)[..., 0]", "({m} * 4).long().remainder(3).float() * {v}",
    "({m} > {n}).float()", "{m}[:, torch.tensor([1, 0, 3, 2], device={m}.device)]", "{m}.view_as({m})",
    "torch.utils.checkpoint.checkpoint(helper, {m}, use_reentrant=False)", "{m} * (1.0 if box is None else box.scale)",
    "{m} if box is None else {m} + box.held", "torch.stack([row * w.scale for row in {m}])", "{m}.cumsum(0)",
    "torch.einsum('ij,jk->ik', {m}, w.model.weight)", "max([{m}, {n}], key=lambda t: t.shape[0])",
    "torch.where({m}.isnan(), {n}, {m})", "F.gelu({m}).sort(-1).values", "{m}.abs().pow(w.scale)", "w.scale ** {m}",
)  # fmt: skip
RESULTS = (
    "Pair({m}, {v})", "(given, {m})", "(given[1:], {m})", "[{m}, {m}]", "{'a': {m}, 'b': {v}, 'c': {k}}",
    "({m}.t(), {m}[0])", "(w.items[0][1:3], {m})", "(w.model.weight, {m})", "({m}, None, 'text', {k})",
    "({m}.detach(), {m})", "({m}, {m}.view(-1))", "{m}.sum()",
)  # fmt: skip
DRAWN = (
    "{m} + torch.rand_like({m})", "F.dropout({m}, 0.5, w.model.training)",
    "torch.randn(WIDTH, device={m}.device) + {m}",
)  # fmt: skip
VECTORS = (
    "{m}.mean(0)", "w.items[{i}] * 1.5", "w.table['a'] + 0", "{m}[0] * 0.5", "{v} + {v}", "{m}.sum(0) * 0.1",
    "w.model.first.mean + {v}", "torch.stack(w.items).mean(0)", "{v}.sigmoid()", "sum(w.table.values())",
    "{m}.amax(0)", "{v} * w.model.count", "w.items[-1].clone()", "torch.ones(WIDTH, device={v}.device) * w.scale",
)  # fmt: skip
NUMBERS = (
    "w.scale * 2 + len(w.items)",
    "{k} + w.factors[0]",
    "w.loops * 0.5",
    "{m}.shape[0] * 0.25",
    "cell[0] + FACTOR",
)
WRITES = (
    "w.items[{i}].add_({v}.detach())", "w.table['b'].mul_(0.5).add_({v}.detach())", "w.model.count += 1",
    "w.items[{i}] = {v}.detach() * 0.5", "w.model.second.mean.copy_({v}.detach())", "w.table['a'] = {v}.detach()",
    "w.items[0][1:3] = {v}.detach()[:2]", "given.mul_(0.9)", "given[0] = 0.25", "w.model.norm.bias.data.add_(0.01)",
    "w.model.weight.mul_(0.99)", "w.items.reverse()", "w.steps += 1", "given.t()[1:3].sub_(0.5)",
    "w.items[{i}].view(2, 2).t().add_(1)", "w.optimizer.param_groups[0]['lr'] *= 0.9",
)  # fmt: skip
CONDITIONS = (
    "w.flag", "w.name == 'a'", "w.model.training", "{m}.shape[0] > 5", "w.scale > 1.3", "'b' in w.table", "{k} > 2",
    "bool({v}.sum() > 0)", "{m}.requires_grad", "torch.is_grad_enabled()", "w.model.count.item() > 1", "option",
    "isinstance(w.scale, float)", "other is given", "w.model.weight.grad is None", "box is not None",
    "{m}.numel() > 0", "list(w.table)[0] == 'a'", "{m}.dtype == torch.float32", "w.scale in (1.25, 1.5)",
)  # fmt: skip
BETWEEN = (
    "scale", "flag", "name", "loops", "item replaced", "item added", "item removed", "key renamed", "key added",
    "eval", "train", "lr", "requires_grad off", "requires_grad on", "tied", "parameter replaced", "parameter data",
    "buffer replaced", "buffer resized", "forward hook", "tensor hook", "hooks removed", "cell", "global", "default",
    "rows", "half the rows", "argument double", "argument transposed", "same argument twice", "overlapping arguments",
    "argument is an item", "no_grad", "autocast", "argument needs grad", "zero_grad", "gradients set", "state loaded",
    "module replaced", "parameter edited", "weight decay", "factor of a block", "flag of a block", "factors",
    "layer swapped", "part replaced", "parts reordered", "spare replaced", "partial replaced", "inner replaced", "held",
    "table reordered", "box", "box of another scale", "keywords", "one row", "no rows", "gradient of a layer",
    "deterministic", "option", "item is an item", "scale is an int", "inference", "forward replaced", "data transposed",
)  # fmt: skip


def make_program(seed: int) -> Program:
    """The program of this seed."""
    return _Writer(seed).program()


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.lines: list[str] = []
        self.matrices, self.vectors, self.numbers = ["given", "other"], ["w.items[0]"], ["1.5"]
        self.draws = self.random.random() < 0.25
        self.made = 0

    def program(self) -> Program:
        choose = self.random
        kind = choose.choice(("step", "forward", "state", "inference"))
        if kind == "step":
            self.line(1, choose.choice(("w.optimizer.zero_grad()", "w.optimizer.zero_grad(set_to_none=False)", "pass")))
        self.block(1, choose.randint(2, 6), writes=kind in ("state", "inference"))
        result = f"({self.fill('{m}')}, {self.fill('{v}')}, {self.fill('{k}')})"
        if kind == "step":
            self.line(1, f"loss = ({self.fill('{m}')} + w.model(given.float())).square().mean()")
            if choose.random() < 0.15:
                self.line(1, "loss.backward(retain_graph=True)")
            self.line(1, "loss.backward()")
            if choose.random() < 0.3:
                self.line(1, "nn.utils.clip_grad_norm_(w.model.parameters(), 0.5)")
            self.line(1, "w.optimizer.step()")
            if choose.random() < 0.5:
                self.line(1, "w.optimizer.zero_grad()")
            result = choose.choice(("loss.detach()", "{'loss': loss.detach(), 'k': w.scale}", "loss"))
        elif kind == "forward":
            result = choose.choice((f"{self.fill('{m}')} + w.model({self.fill('{m}')})", result))
        if kind != "step" and choose.random() < 0.4:
            result = self.fill(choose.choice(RESULTS))
        self.line(1, f"return {result}")
        body = "\n".join(self.lines)
        if kind == "inference":
            body = "    with torch.no_grad():\n" + "\n".join("    " + line for line in self.lines)
        source = f"def run(given, other, option=False, box=None, *, factor=2.0):\n{body}"
        optimizer = choose.choice(("sgd", "adam", "adamw", "rmsprop"))
        happenings: list[tuple[str, ...]] = [()]
        for _ in range(choose.randint(7, 12)):
            happenings.append(tuple(choose.sample(BETWEEN, choose.choice((0, 0, 0, 1, 1, 2)))))
        return Program(self.seed, source, optimizer, self.draws, kind in ("step", "forward"), tuple(happenings))

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def fill(self, pattern: str) -> str:
        choose = self.random
        values = {
            "m": choose.choice(self.matrices), "n": choose.choice(self.matrices), "v": choose.choice(self.vectors),
            "k": choose.choice(self.numbers), "i": choose.randint(0, 1), "p": choose.choice(("0.5", "w.scale")),
        }  # fmt: skip
        for name, value in values.items():
            pattern = pattern.replace("{" + name + "}", str(value))
        return pattern

    def block(self, depth: int, count: int, writes: bool) -> None:
        choose = self.random
        for _ in range(count):
            kind = choose.random()
            if kind < 0.45:
                patterns = MATRICES + (DRAWN * 4 if self.draws else ())
                self.assign(depth, self.matrices, "m", choose.choice(patterns))
            elif kind < 0.6:
                self.assign(depth, self.vectors, "v", choose.choice(VECTORS))
            elif kind < 0.68:
                self.assign(depth, self.numbers, "k", choose.choice(NUMBERS))
            elif kind < 0.8 and writes:
                self.line(depth, "with torch.no_grad():")
                self.line(depth + 1, self.fill(choose.choice(WRITES)))
            elif kind < 0.84 and self.matrices[2:]:
                name = choose.choice(self.matrices[2:])
                self.line(depth, f"{name} = {name}.clone()")
                write = choose.choice((f"{name}.mul_(0.5)", f"{name}[0] = {{v}}", f"{name}.add_({{n}})"))
                self.line(depth, self.fill(write))
            elif kind < 0.88:
                name = self.new("m")
                on = choose.choice(("True", "w.flag"))
                self.line(depth, f"with torch.autocast(given.device.type, torch.bfloat16, enabled={on}):")
                self.line(depth + 1, self.fill(f"{name} = ({{m}} @ w.model.weight).float()"))
                self.matrices.append(name)
            elif depth < 3:
                self.branch(depth, writes)

    def branch(self, depth: int, writes: bool) -> None:
        """A name that is bound inside of it is bound before as well."""
        choose = self.random
        name = self.new("m")
        self.line(depth, f"{name} = {self.fill('{m}')} * 1.0")
        loops = choose.random() < 0.25
        opening = "for _ in range(w.loops):" if loops else f"if {self.fill(choose.choice(CONDITIONS))}:"
        self.line(depth, opening)
        kept = [list(names) for names in (self.matrices, self.vectors, self.numbers)]
        self.matrices.append(name)
        self.block(depth + 1, choose.randint(0, 2), writes)
        self.line(depth + 1, f"{name} = {self.fill(choose.choice(MATRICES))}")
        self.matrices, self.vectors, self.numbers = kept
        if opening.startswith("if") and choose.random() < 0.4:
            self.line(depth, "else:")
            self.line(depth + 1, f"{name} = {self.fill(choose.choice(MATRICES))}")
        self.matrices.append(name)

    def assign(self, depth: int, names: list[str], letter: str, pattern: str) -> None:
        text = self.fill(pattern)
        name = self.new(letter)
        self.line(depth, f"{name} = {text}")
        names.append(name)

    def new(self, letter: str) -> str:
        self.made += 1
        return f"{letter}{self.made}"
