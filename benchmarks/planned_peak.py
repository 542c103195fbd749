"""What a training step holds on a GPU by its plan, and what makes the peak: recorded and planned for one, never run.

python benchmarks/planned_peak.py --model resnet50                    the plan's peak, and what is alive there
python benchmarks/planned_peak.py --model gpt --budgets none 0.5 0.0  under memory budgets
python benchmarks/planned_peak.py --model gpt --read-loss             with the loss read before `backward()`, too:
                                              forward and backward planned apart, as the first steps are, and
                                              together, as the lazy device and compiled calls do from then on
python benchmarks/planned_peak.py --model gpt --small                 small shapes: seconds

No GPU is needed: memory of the recorded step has no elements. Bytes are those that the programs take for themselves;
parameters, optimizer states and inputs come on top, the same in every row. With the loss read, what the forward's
program hands to the backward's counts until that one frees it.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torchlazy
from host_cost import ResNet50
from models import GPT_SIZES
from tiny_gpt import GPT, GPTConfig
from torch import nn
from torch.nn import functional as F
from torchlazy.autograd.halves import HELD
from torchlazy.lazy.api import recorder
from torchlazy.lazy.config import parse_budget, recompute_text
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.plan.pipeline import plan_trace
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.run.segments.device import CutHalves
from torchlazy.lazy.run.segments.watch import FoundPair
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.program.memory_plan import held_bytes
from torchlazy.runtime.program.program import Allocate, ExternCall, ForeachLaunch, Free, Launch, Program
from torchlazy.runtime.program.steps import names_made, span_bytes

MIB = 1 << 20
TARGET = "cuda:0"


@dataclass(frozen=True)
class Cut:
    """A trace, and the identities of the memory that went in and came out."""

    trace: CutTrace
    given: tuple[int, ...]
    made: tuple[int, ...]


@contextmanager
def recorded_for_a_gpu() -> Iterator[list[Cut]]:
    """Every cut inside, recorded for `TARGET`; results are tensors without elements, the loss among them reads 0."""
    found: list[Cut] = []
    held: list[torch.Tensor] = []  # so that identities stay their own

    def catch(trace: CutTrace, memory: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
        metas = [geometry.meta for _, geometry in trace.outputs]
        made = [
            torch.zeros(m.shape, dtype=m.dtype)
            if not m.shape
            else torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta")
            for m in metas
        ]
        donated = dict(trace.donations)
        made = [memory[donated[i]] if i in donated else value for i, value in enumerate(made)]
        held.extend((*made, *memory))
        found.append(Cut(trace, tuple(map(id, memory)), tuple(map(id, made))))
        return made

    # What the lazy device plans together it finds as ever; it has no programs, so that each cut comes to `catch`.
    catch.listeners, catch.shadow = [], None  # type: ignore[attr-defined]
    catch.program_of_half = lambda *_: SimpleNamespace(pending=None, failure="", compiled=None)  # type: ignore[attr-defined]
    catch.halves = CutHalves(catch)  # type: ignore[attr-defined,arg-type]
    torchlazy.sync()
    kept = recorder.driver, recorder.target
    recorder.driver, recorder.target = catch, TARGET  # type: ignore[assignment]
    try:
        yield found
    finally:
        recorder.driver, recorder.target = kept


def step_of(model_name: str, small: bool, *, reads_loss: bool, layers: int | None = None) -> list[Cut]:
    """The cuts of one training step: forward, cross-entropy, backward, AdamW (foreach), zero_grad. `layers`: another
    number of them, for the GPT."""
    return _steps(model_name, small, reads_loss=reads_loss, layers=layers, steps=2)[0]  # states from the second on


def step_together(model_name: str, small: bool) -> list[Cut]:
    """The same with the loss read, as the lazy device plans it after it has seen a forward and its backward twice."""
    least, watch.LEAST_BYTES = watch.LEAST_BYTES, 0 if small else watch.LEAST_BYTES
    try:
        cuts, (pair,) = _steps(model_name, small, reads_loss=True, layers=None, steps=3)
    finally:
        watch.LEAST_BYTES = least
    return [Cut(pair.joined.first, cuts[0].given, ()), Cut(pair.joined.second, (), ())]


def _steps(
    model_name: str, small: bool, *, reads_loss: bool, layers: int | None, steps: int
) -> tuple[list[Cut], list[FoundPair]]:
    """The last step's cuts, and the pairs among them that the lazy device found."""
    with recorded_for_a_gpu() as cuts:
        with torch.device("meta"):
            model, *data = _model(model_name, small, layers)
        model.to_empty(device="lazy")
        inputs, targets = (torch.zeros_like(t, device="lazy") for t in data)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        for _ in range(steps):
            torchlazy.flush()
            cuts.clear()
            with torch.autocast("lazy", dtype=torch.bfloat16), _gelu_of(model_name):
                output = model(inputs)
                output = output[0] if isinstance(output, tuple) else output
                loss = F.cross_entropy(output.flatten(0, -2).float(), targets.flatten())
            del output
            if reads_loss:
                loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            torchlazy.flush()
        return list(cuts), recorder.driver.halves.found  # type: ignore[attr-defined]


def _model(name: str, small: bool, layers: int | None) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if name == "resnet50":
        size, rows = (32, 4) if small else (224, 64)
        model: nn.Module = ResNet50(8 if small else 64, 10 if small else 1000)
        return model, torch.empty(rows, 3, size, size), torch.zeros(rows, dtype=torch.long)
    config = GPTConfig(layers=2, heads=2, width=64, block=64) if small else GPT_SIZES
    if name in (
        "gpt2_head",
        "gpt2",
    ):  # what GPT-2 has besides: its vocabulary, and the float32 loss over it; "gpt2" with its gelu, too
        config = replace(config, vocabulary=4099 if small else 50257)
    config = config if layers is None else replace(config, layers=layers)
    rows = 4 if small else 8
    return GPT(config), *(torch.zeros(rows, config.block, dtype=torch.long) for _ in range(2))


@contextmanager
def _gelu_of(model_name: str) -> Iterator[None]:
    before = F.gelu
    if model_name == "gpt2":
        setattr(F, "gelu", _written_gelu)  # noqa: B010
    try:
        yield
    finally:
        setattr(F, "gelu", before)  # noqa: B010


def _written_gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The tanh form of gelu as GPT-2's code has it: operator by operator, each of which autograd holds something of."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@dataclass(frozen=True)
class Planned:
    """The programs of a step. `peak`: bytes at the worst moment, `at` program and step number; `carried`: bytes that
    cross to a later program at that moment. `held_on`: the peak if what crosses were held until the end."""

    programs: tuple[Program, ...]
    peak: int
    at: tuple[int, int]
    carried: int
    held_on: int

    @property
    def kernels(self) -> int:
        """Launches and library calls."""
        return sum(isinstance(s, (Launch, ForeachLaunch, ExternCall)) for p in self.programs for s in p.steps)

    @property
    def library_calls(self) -> Counter[str]:
        return Counter(str(s.op) for p in self.programs for s in p.steps if isinstance(s, ExternCall))


def planned(cuts: list[Cut], budget: str) -> Planned:
    """The step's programs under a memory budget ("none" for the default)."""
    recompute = recompute_text(None if budget == "none" else parse_budget(budget))
    programs = [plan_trace(cut.trace, CompileOptions("triton", "fused", recompute)).program for cut in cuts]
    if cuts[-1].trace.half is not None:
        return _planned_together(programs)
    best: tuple[int, tuple[int, int], int] = (0, (0, 0), 0)
    held_on = 0
    for number, (cut, program) in enumerate(zip(cuts, programs, strict=True)):
        earlier = {made: g for c in cuts[:number] for made, g in zip(c.made, c.trace.outputs, strict=True)}
        given = {f"in{i}": earlier[key][1].nbytes for i, key in enumerate(cut.given) if key in earlier}
        later = {key for c in cuts[number + 1 :] for key in c.given} - set(cut.given)
        beside = sum(g.nbytes for key, (_, g) in earlier.items() if key in later)
        carried = sum(given.values())
        held_on = max(held_on, carried + beside + max(held_bytes(program.steps), default=0))
        for position, (step, own) in enumerate(zip(program.steps, held_bytes(program.steps), strict=True)):
            now = own + carried + beside
            if now > best[0]:
                best = now, (number, position), carried + beside
            if isinstance(step, Free):
                carried -= sum(given.pop(name, 0) for name in step.names)
    return Planned(tuple(programs), *best, held_on)


def _planned_together(programs: list[Program]) -> Planned:
    """The same where the second program's inputs name what it has of the first."""
    first, second = programs
    best = max((own, (0, i), 0) for i, own in enumerate(held_bytes(first.steps)))
    given = {name: span_bytes(meta) for name, meta in second.inputs if name.startswith(HELD)}
    carried = sum(given.values())
    held_on = max(best[0], carried + max(held_bytes(second.steps), default=0))
    for position, (step, own) in enumerate(zip(second.steps, held_bytes(second.steps), strict=True)):
        best = max(best, (own + carried, (1, position), carried))
        if isinstance(step, Free):
            carried -= sum(given.pop(name, 0) for name in step.names)
    return Planned(tuple(programs), *best, held_on)


def alive_at_peak(found: Planned) -> list[tuple[int, str]]:
    """(bytes, what it is) of everything that the program holds at its peak, largest first."""
    number, position = found.at
    steps = found.programs[number].steps
    alive: dict[str, tuple[int, str]] = {}
    for name, meta in found.programs[number].inputs:
        if name.startswith(HELD):
            alive[name] = span_bytes(meta), f"{_text(meta)} from the program before"
    for step in steps[: position + 1]:
        if isinstance(step, Allocate):
            if step.reuse is not None:
                alive.pop(step.reuse, None)
            alive[step.name] = (span_bytes(step.meta), _text(step.meta))
        elif isinstance(step, ExternCall):
            for name, meta in zip(step.outputs, step.metas, strict=True):
                if name in names_made(step) and meta is not None and name not in alive:
                    alive[name] = (span_bytes(meta), f"{_text(meta)} of {step.op}")
        elif isinstance(step, Free):
            for name in step.names:
                alive.pop(name, None)
    return sorted(alive.values(), reverse=True)


def _text(meta: TensorMeta) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')} {'x'.join(map(str, meta.shape))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "gpt2_head", "gpt2", "resnet50"), default="gpt")
    parser.add_argument("--budgets", nargs="+", default=["none"])
    parser.add_argument("--read-loss", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=12, help="lines of the table of what is alive at the peak")
    options = parser.parse_args()
    for way in ("", ", loss read, planned apart", ", loss read") if options.read_loss else ("",):
        if way == ", loss read":
            cuts = step_together(options.model, options.small)
        else:
            cuts = step_of(options.model, options.small, reads_loss=bool(way))
        for budget in options.budgets:
            found = planned(cuts, budget)
            number, position = found.at
            what = f"{options.model}, budget {budget}{way}"
            where = f"program {number + 1} of {len(cuts)}, step {position} of {len(found.programs[number].steps)}"
            print(
                f"{what}: peak {found.peak / MIB:.1f} MiB in {where}, {found.carried / MIB:.1f} MiB of it from earlier "
                f"programs ({found.held_on / MIB:.1f} MiB if those stayed until the end); {found.kernels} kernels, "
                f"{sum(found.library_calls.values())} of them library calls"
            )
            table = Counter[str]()
            count = Counter[str]()
            for size, kind in alive_at_peak(found):
                table[kind] += size
                count[kind] += 1
            for kind, size in table.most_common(options.rows):
                print(f"  {size / MIB:9.1f} MiB  {count[kind]:4d} x {kind}")


if __name__ == "__main__":
    main()
