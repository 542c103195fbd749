"""A program as data and as text: a step over the state `S` and arguments, and what its calls are.

Invariant: `load(program.text())` is the program; its text alone is enough to run it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.world import NAMES, Call, Inputs

PACKINGS = ("plain", "plain", "plain", "list", "dict", "tuple", "box")


@dataclass(frozen=True)
class Program:
    """`source` is the function `step(S, dev, k0, k1, k2, args)` or `step(S, dev, k0, k1, k2, v1, v2, ...)`."""

    seed: int
    inputs: tuple[Inputs, ...]
    packing: str
    source: str
    calls: tuple[Call, ...]

    def text(self) -> str:
        """The program as Python."""
        inputs = "".join(f"\n    {tuple(item)!r}," for item in self.inputs)
        calls = "".join(f"\n    {tuple(call)!r}," for call in self.calls)
        head = f"SEED, PACKING = {self.seed}, {self.packing!r}\nINPUTS = ({inputs}\n)\nCALLS = ({calls}\n)"
        return f"{head}\n\n\n{self.source.strip()}\n"

    def step(self) -> Callable[..., Any]:
        """The function, its source known to tracebacks."""
        file = f"<fuzz {self.seed}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        names: dict[str, Any] = {**NAMES, "__name__": f"fuzz_{self.seed}"}
        exec(compile(self.source, file, "exec"), names)
        return names["step"]  # type: ignore[no-any-return]

    def packed(self, args: list[torch.Tensor]) -> list[Any]:
        """The arguments as they are passed."""
        match self.packing:
            case "list":
                return [args]
            case "tuple":
                return [tuple(args)]
            case "dict":
                return [{item.name: t for item, t in zip(self.inputs, args, strict=True)}]
            case "box":
                return [NAMES["Box"](args)]
        return args

    def opening(self) -> str:
        """The lines with which the step begins."""
        names = ", ".join(item.name for item in self.inputs)
        unpack = {
            "list": f"    {names}, = args\n", "tuple": f"    {names}, = args\n", "box": f"    {names}, = args.t\n",
            "dict": f"    {names}, = args.values()\n",
        }.get(self.packing, "")  # fmt: skip
        return f"def step(S, dev, k0, k1, k2, {'args' if unpack else names}):\n    told = []\n{unpack}"


def load(text: str) -> Program:
    """The program of a text."""
    names: dict[str, Any] = {"torch": torch, "nan": float("nan"), "inf": float("inf")}
    exec(text.split("def step(")[0], names)
    inputs, calls = tuple(Inputs(*item) for item in names["INPUTS"]), tuple(Call(*call) for call in names["CALLS"])
    return Program(names["SEED"], inputs, names["PACKING"], "def step(" + text.split("def step(")[1], calls)
