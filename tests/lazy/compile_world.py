"""Playing a random program: the same calls with the same happenings between them, plain or compiled, and what is seen.

Invariant: what is seen after a call is everything that the program could have changed: its results, its arguments, the
world with its optimizer's state, gradients, and torch's generator.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.lazy.compile_programs import WIDTH, Box, Program, World, scaled

Seen = dict[str, Any]
_HEAD = """
FACTOR = 0.75
def helper(x):
    return x * FACTOR + 1
def guarded(x):
    try:
        return x * {}["missing"]
    except KeyError:
        return x * FACTOR
def pairs(x):
    yield x
    yield x * FACTOR
def slope(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y * FACTOR).sin().sum(), y)[0]
def make(w, cell, held):
    def set_held(value):
        nonlocal held
        held = value
"""


class Pair(NamedTuple):
    """A result with names."""

    first: Any
    second: Any


class Player:
    """One run of a program. `compile` is what the function goes through before it is called."""

    def __init__(self, program: Program, device: str, compile: Callable[[Any], Any]) -> None:
        self.program, self.device = program, device
        self.random = random.Random(program.seed + 1)
        torch.manual_seed(program.seed)
        self.world, self.cell = World(device, program.optimizer), [0.5]
        self.space: dict[str, Any] = {
            "torch": torch, "F": F, "nn": nn, "WIDTH": WIDTH, "Pair": Pair, "__name__": "random_program",
        }  # fmt: skip
        inner = "\n".join("    " + line for line in program.source.splitlines())
        exec(compile_text(f"{_HEAD}{inner}\n    return run, set_held\n", program.seed), self.space)
        held = torch.randn(WIDTH).to(device)
        self.function, self.set_held = self.space["make"](self.world, self.cell, held)
        self.run = compile(self.function)
        self.compile = compile
        self.rows, self.keeps_graph = 6, program.trains

    def play(self) -> Iterator[Seen]:
        """What is seen after each call."""
        for number, happenings in enumerate(self.program.happenings):
            for name in happenings:
                self.happen(name)
            given, other, kwargs = self.arguments(number, happenings)
            backward = self.random.random() < 0.6
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.around(happenings))
                torch.manual_seed(1000 + number)
                try:
                    if "keywords" in happenings:
                        value = self.run(**kwargs, other=other, given=given)
                    else:
                        value = self.run(given, other, **kwargs)
                    if backward:
                        _backward(value)
                except Exception as error:
                    yield {"error": type(error).__name__, "text": str(error)}
                    return  # what an error leaves behind half done is not promised
            yield self.seen(value, given, other)

    # ---------------------------------------------------------------- arguments

    def arguments(self, number: int, happenings: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        generator = torch.Generator().manual_seed(self.program.seed * 100 + number)
        new = lambda *shape: torch.randn(*shape, generator=generator).to(self.device)  # noqa: E731
        rows = self.rows // 2 if "half the rows" in happenings else self.rows
        rows = 1 if "one row" in happenings else 0 if "no rows" in happenings else rows
        given, other = new(rows, WIDTH), new(rows, WIDTH)
        if "argument double" in happenings:
            other = other.double()
        if "argument transposed" in happenings:
            given = new(WIDTH, rows).t()
        if "same argument twice" in happenings:
            other = given
        if "overlapping arguments" in happenings:
            base = new(rows + 2, WIDTH)
            given, other = base[:rows], base[2:]
        if "argument is an item" in happenings:
            other = self.world.items[0]
        if "argument needs grad" in happenings:
            given.requires_grad_()
        kwargs: dict[str, Any] = {"option": True} if "option" in happenings else {}
        if "box" in happenings or "box of another scale" in happenings:
            kwargs["box"] = Box(1.5 if "box" in happenings else 2.5, new(WIDTH))
        return given, other, kwargs

    @contextlib.contextmanager
    def around(self, happenings: tuple[str, ...]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if "no_grad" in happenings:
                stack.enter_context(torch.no_grad())
            if "inference" in happenings:
                stack.enter_context(torch.no_grad())
            if "autocast" in happenings:
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            if "deterministic" in happenings:
                torch.use_deterministic_algorithms(True)
                stack.callback(torch.use_deterministic_algorithms, False)
            yield

    # ---------------------------------------------------------------- between the calls

    def happen(self, name: str) -> None:
        act = getattr(self, "do_" + name.replace(" ", "_"), None)
        if act is not None:
            act()

    def new(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1000))
        return torch.randn(*shape, generator=generator).to(self.device)

    def do_scale(self) -> None:
        self.world.scale = round(self.world.scale + 0.25, 2)

    def do_scale_is_an_int(self) -> None:
        self.world.scale = int(self.world.scale)

    def do_flag(self) -> None:
        self.world.flag = not self.world.flag

    def do_name(self) -> None:
        self.world.name = "b" if self.world.name == "a" else "a"

    def do_loops(self) -> None:
        self.world.loops = 3 - self.world.loops

    def do_item_replaced(self) -> None:
        self.world.items[self.random.randint(0, 1)] = self.new(WIDTH)

    def do_item_added(self) -> None:
        self.world.items.append(self.new(WIDTH))

    def do_item_removed(self) -> None:
        if len(self.world.items) > 2:
            self.world.items.pop()

    def do_item_is_an_item(self) -> None:
        self.world.items[1] = self.world.items[0]

    def do_key_renamed(self) -> None:
        if "b" in self.world.table:
            self.world.table["c"] = self.world.table.pop("b")
        else:
            self.world.table["b"] = self.world.table.pop("c")

    def do_key_added(self) -> None:
        self.world.table["d"] = self.new(WIDTH)

    def do_eval(self) -> None:
        self.world.model.eval()

    def do_train(self) -> None:
        self.world.model.train()

    def do_lr(self) -> None:
        for group in self.world.optimizer.param_groups:
            group["lr"] *= 0.5

    def do_weight_decay(self) -> None:
        self.world.optimizer.param_groups[0]["weight_decay"] = 0.1

    def do_requires_grad_off(self) -> None:
        self.world.model.first.requires_grad_(False)

    def do_requires_grad_on(self) -> None:
        self.world.model.first.requires_grad_(True)

    def do_tied(self) -> None:
        self.world.model.second.inner.weight = self.world.model.first.inner.weight

    def do_parameter_replaced(self) -> None:
        self.world.model.second.inner.weight = nn.Parameter(self.new(WIDTH, WIDTH))

    def do_parameter_data(self) -> None:
        self.world.model.weight.data = self.new(WIDTH, WIDTH)

    def do_data_transposed(self) -> None:
        self.world.model.weight.data = self.world.model.weight.data.t()

    def do_parameter_edited(self) -> None:
        with torch.no_grad():
            self.world.model.weight.mul_(1.1)
            self.world.model.first.inner.bias[0] = 0.5

    def do_buffer_replaced(self) -> None:
        self.world.model.first.mean = self.new(WIDTH)

    def do_buffer_resized(self) -> None:
        self.world.model.second.mean = self.new(1).expand(WIDTH).clone()
        self.world.model.second.register_buffer("extra", self.new(2))

    def do_forward_hook(self) -> None:
        self.world.handles.append(self.world.model.first.register_forward_hook(lambda module, args, out: out * 1.5))

    def do_tensor_hook(self) -> None:
        if self.world.model.weight.requires_grad:
            self.world.handles.append(self.world.model.weight.register_hook(lambda grad: grad * 2))

    def do_hooks_removed(self) -> None:
        for handle in self.world.handles:
            handle.remove()
        self.world.handles.clear()

    def do_cell(self) -> None:
        self.cell[0] += 0.5

    def do_global(self) -> None:
        self.space["FACTOR"] += 0.25

    def do_default(self) -> None:
        self.function.__kwdefaults__["factor"] += 0.5

    def do_rows(self) -> None:
        self.rows = 14 - self.rows

    def do_zero_grad(self) -> None:
        self.world.optimizer.zero_grad()

    def do_gradients_set(self) -> None:
        for parameter in self.world.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.01)

    def do_state_loaded(self) -> None:
        self.world.model.load_state_dict({n: t.clone() for n, t in self.world.model.state_dict().items()})
        self.world.optimizer.load_state_dict(self.world.optimizer.state_dict())

    def do_module_replaced(self) -> None:
        torch.manual_seed(7)
        self.world.model.first.inner = nn.Linear(WIDTH, WIDTH).to(self.device)

    def do_factor_of_a_block(self) -> None:
        self.world.model.second.factor += 0.5

    def do_flag_of_a_block(self) -> None:
        self.world.model.first.flag = not self.world.model.first.flag

    def do_forward_replaced(self) -> None:
        self.world.model.norm.forward = lambda x: x * 0.5

    def do_layer_swapped(self) -> None:
        self.world.layers[0], self.world.layers[1] = self.world.layers[1], self.world.layers[0]

    def do_part_replaced(self) -> None:
        torch.manual_seed(8)
        self.world.parts["a"] = nn.Linear(WIDTH, WIDTH).to(self.device)

    def do_parts_reordered(self) -> None:
        self.world.parts = dict(reversed(self.world.parts.items()))

    def do_spare_replaced(self) -> None:
        torch.manual_seed(9)
        self.world.spare[0] = nn.Linear(WIDTH, WIDTH, bias=False).to(self.device)

    def do_partial_replaced(self) -> None:
        self.world.partial = functools.partial(scaled, factor=self.world.partial.keywords["factor"] + 0.5)

    def do_inner_replaced(self) -> None:
        factor = self.random.choice((2.0, 3.0))
        self.world.inner = self.compile(lambda x: x * factor + self.world.scale)

    def do_held(self) -> None:
        self.set_held(self.new(WIDTH))

    def do_table_reordered(self) -> None:
        self.world.table = dict(reversed(self.world.table.items()))

    def do_gradient_of_a_layer(self) -> None:
        self.world.layers[0].inner.weight.grad = self.new(WIDTH, WIDTH)

    def do_factors(self) -> None:
        self.world.factors = [factor + 1 for factor in self.world.factors]

    # ---------------------------------------------------------------- seeing

    def seen(self, value: Any, given: torch.Tensor, other: torch.Tensor) -> Seen:
        world = self.world
        found: Seen = {f"result {i}": leaf for i, leaf in enumerate(tree_leaves(value))}
        found |= {"given": given, "other": other, "given.grad": given.grad if given.is_leaf else None}
        found |= {f"model.{name}": tensor for name, tensor in world.model.state_dict(keep_vars=True).items()}
        found |= {f"{name}.grad": parameter.grad for name, parameter in world.model.named_parameters()}
        others = {"layers": world.layers, **world.parts, "spare": world.spare[0]}
        for name, module in others.items():
            found |= {f"{name}.{key}": tensor for key, tensor in module.state_dict(keep_vars=True).items()}
            found |= {f"{name}.{key}.grad": parameter.grad for key, parameter in module.named_parameters()}
        found |= {f"items[{i}]": item for i, item in enumerate(world.items)}
        found |= {f"table[{key}]": item for key, item in world.table.items()}
        found |= {"scale": world.scale, "steps": world.steps, "flag": world.flag, "items": len(world.items)}
        found |= {"lr": world.optimizer.param_groups[0]["lr"], "generator": torch.get_rng_state()}
        for number, state in enumerate(world.optimizer.state.values()):
            found |= {f"optimizer {number} {key}": item for key, item in state.items()}
        return {name: _snapshot(item) for name, item in found.items()}


def compile_text(text: str, seed: int) -> Any:
    """Code with a file name of its own."""
    return compile(text, f"<random program {seed}>", "exec")


def _backward(value: Any) -> None:
    wanted = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if wanted:
        sum(leaf.float().square().sum() for leaf in wanted).backward()  # type: ignore[union-attr]


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        facts = (tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value.is_leaf)
        return (value.detach().cpu().clone(), facts)
    return value


def difference(have: Seen, want: Seen) -> str:
    """The first thing that differs, in words; empty where nothing does."""
    if "error" in have or "error" in want:
        texts = [f"{seen.get('error')}: {seen.get('text')}" for seen in (have, want)]
        return "" if have.get("error") == want.get("error") else f"{texts[0]} against {texts[1]}"
    if have.keys() != want.keys():
        return f"names {sorted(have.keys() ^ want.keys())}"
    for name, theirs in want.items():
        mine = have[name]
        if type(mine) is not type(theirs):
            return f"{name}: {mine} against {theirs}"
        if isinstance(theirs, tuple):
            if mine[1] != theirs[1]:
                return f"{name}: {mine[1]} against {theirs[1]}"
            if torch.equal(mine[0], theirs[0]):  # most are, and a closer look takes thirty times as long
                continue
            a, b = (x[0].to(torch.complex128 if x[0].is_complex() else torch.float64) for x in (mine, theirs))
            if not torch.allclose(a, b, rtol=2e-3, atol=2e-4, equal_nan=True):
                return f"{name}: {mine[0].tolist()} against {theirs[0].tolist()}"
        elif isinstance(theirs, float):
            if not abs(mine - theirs) <= 2e-3 * abs(theirs) + 2e-4:
                return f"{name}: {mine} against {theirs}"
        elif mine != theirs:
            return f"{name}: {mine} against {theirs}"
    return ""
