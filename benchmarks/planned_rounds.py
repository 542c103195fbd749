"""What steps of several rounds hold on a GPU by their plans, where rounds read numbers on the host: nothing is run.

python benchmarks/planned_rounds.py                                  all jobs, GPT and ResNet-50: minutes
python benchmarks/planned_rounds.py --jobs accumulate --models gpt   a part of it
python benchmarks/planned_rounds.py --small                          small shapes: seconds

accumulate: four rounds of gradients, each loss read before its backward. gan: a judge and a maker with an optimizer
each, both losses read; the judge is the model, the maker a few convolutions or linear layers. rl: four steps of an
environment without gradients, each action read, then one training step whose loss is read. reinforce: four steps whose
actions are read, and one backward through all of them.

Four rows each: the step as one graph (nothing read), its segments planned apart, as compiled calls plan them (segments
taken apart between rounds, each forward together with its backward), and as the lazy device does without compile, where
an optimizer's step is a cut, too. Bytes are those that programs take for
themselves and hand on to each other; parameters, optimizer states and inputs come on top.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchlazy
from host_cost import ResNet50
from planned_peak import MIB, Cut, recorded_for_a_gpu
from tiny_gpt import GPT, GPTConfig
from torch import nn
from torch.nn import functional as F
from torchlazy.autograd.halves import HELD, RESULT
from torchlazy.lazy.api import recorder
from torchlazy.lazy.compiled.replay.pairs import CutPair, cut_pairs, memory_identity
from torchlazy.lazy.compiled.replay.split import split_by_forward, split_micro_batches
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.plan.pipeline import plan_trace
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.run.segments.watch import FoundPair, same_trace
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.program.memory_plan import held_bytes
from torchlazy.runtime.program.output_recipes import output_recipes
from torchlazy.runtime.program.program import ExternCall, ForeachLaunch, Free, Launch, Program
from torchlazy.runtime.program.steps import span_bytes

JOBS = ("accumulate", "gan", "rl", "reinforce")
MODELS = ("gpt", "resnet50")
_planned: dict[int, tuple[CutTrace, Program]] = {}  # by the trace's identity
WAYS = ("one graph", "apart", "together", "device")
ROUNDS = 4


# --- the jobs ---


def model_and_data(name: str, small: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The model, a maker of inputs for it, and one round's inputs; all without elements."""
    if name == "resnet50":
        size, rows = (32, 4) if small else (224, 16)
        maker = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1), nn.Tanh())
        return ResNet50(8 if small else 64, 10), maker, torch.empty(rows, 3, size, size)
    config = GPTConfig(layers=2, heads=2, width=64, block=64) if small else GPTConfig(12, 12, 768, 512)
    model = GPT(config)
    maker = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU(), nn.Linear(config.width, config.width))
    return _Blocks(model, config.width), maker, torch.empty(2, config.block, config.width)


class _Blocks(nn.Module):
    """The GPT's layers over inputs that have been embedded, and ten logits of each row: a GAN's judge of such."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def step_of(job: str, model: nn.Module, maker: nn.Module, data: torch.Tensor, reads: bool) -> Callable[[], None]:
    """One step of the job; `reads`: whether it reads its numbers. Each round has inputs of its own, as large as
    `data`: equal forwards would be computed once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    of_maker = torch.optim.AdamW(maker.parameters(), lr=1e-4, foreach=True)
    rounds = [torch.zeros_like(data, device="lazy") for _ in range(ROUNDS)]
    inputs = rounds[0]
    labels = torch.zeros(data.shape[0], dtype=torch.long, device="lazy")

    def look(value: torch.Tensor) -> None:
        if reads:
            value.item()

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("lazy", dtype=torch.bfloat16):
            logits: torch.Tensor = model(x)
            return logits.float()

    def accumulate() -> None:
        for x in rounds:
            loss = F.cross_entropy(logits_of(x), labels) / ROUNDS
            look(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def gan() -> None:
        with torch.autocast("lazy", dtype=torch.bfloat16):
            made = maker(inputs)
        loss = F.softplus(-logits_of(inputs)).mean() + F.softplus(logits_of(made.detach().float())).mean()
        look(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("lazy", dtype=torch.bfloat16):
            made = maker(inputs)
        loss = F.softplus(-logits_of(made.float())).mean()
        look(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        of_maker.step()
        of_maker.zero_grad()
        optimizer.zero_grad()

    def rl() -> None:
        with torch.no_grad():
            for x in rounds:
                look(logits_of(x).amax())
        loss = F.cross_entropy(logits_of(inputs), labels)
        look(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def reinforce() -> None:
        loss = torch.zeros((), device="lazy")
        for x in rounds:
            chances = F.log_softmax(logits_of(x), -1)
            look(chances.amax().detach())
            loss = loss - chances[:, 0].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return {"accumulate": accumulate, "gan": gan, "rl": rl, "reinforce": reinforce}[job]


def cuts_of(
    job: str, name: str, small: bool, *, reads: bool, is_device: bool = False
) -> tuple[list[Cut], list[FoundPair]]:
    """The cuts of one step as a compiled call has them: optimizers' steps are none. `is_device`: as the lazy device has
    them without compile, once it has seen the step a few times, and the pairs that it found."""
    with recorded_for_a_gpu() as cuts:
        with torch.device("meta"):
            model, maker, data = model_and_data(name, small)
        model.to_empty(device="lazy")
        maker.to_empty(device="lazy")
        step = step_of(job, model, maker, data, reads)
        for _ in range(4 if is_device else 2):  # with states from the second on
            torchlazy.flush()
            cuts.clear()
            before, recorder.gate = recorder.gate, lambda cause: cause == "optimizer step" and not is_device
            try:
                step()
            finally:
                recorder.gate = before
            torchlazy.flush()
        return list(cuts), recorder.driver.halves.found  # type: ignore[attr-defined]


# --- plans ---


def template_of(cuts: list[Cut]) -> t.CallTemplate:
    """The cuts as segments of a call: what an earlier one made is a step's, the rest is state."""
    known: dict[int, t.Memory] = {}
    places = 0
    steps: list[t.Step] = []
    for cut in cuts:
        for key in cut.given:
            known.setdefault(key, t.FromState(object()))  # type: ignore[arg-type]
        inputs = tuple(known[key] for key in cut.given)
        for key in cut.made:
            if key not in known:
                known[key] = t.FromStep(places)
                places += 1
        targets = tuple(known[key] for key in cut.made)
        scalars = (0.0,) * len(cut.trace.scalar_kinds)
        steps.append(t.Segment(cut.trace, inputs, scalars, targets, "", ""))
    return t.CallTemplate(tuple(steps), (), (), (), 0, (), (), None, (), (), (), places, 0, 0)


def pairs_on_the_device(template: t.CallTemplate, found: list[FoundPair]) -> list[CutPair]:
    """The segments that the lazy device plans together: each backward with the last forward that waits for it. Those
    whose forward's program is another one than the pair's that began it are none."""
    pairs: list[CutPair] = []
    waiting: list[tuple[t.Segment, int]] = []  # forwards, with how many others were waiting before
    begun: list[tuple[t.Segment, int, Program]] = []  # what a forward holds where it was begun so
    for step in template.steps:
        assert isinstance(step, t.Segment)
        theirs = [pair for pair in found if same_trace(pair.second, step.trace)]
        ours = [item for item in waiting if any(same_trace(pair.first, item[0].trace) for pair in theirs)]
        if ours:
            first, before = ours[-1]
            waiting.remove(ours[-1])
            pair = next(pair for pair in theirs if same_trace(pair.first, first.trace))
            held = _program(pair.joined.first)
            known = (program for s, n, program in begun if n == before and same_trace(s.trace, first.trace))
            if next(known, held) == held:
                pairs.append(CutPair(first, step, pair.joined, pair.hidden))
                begun.append((first, before, held))
        if any(same_trace(pair.first, step.trace) for pair in found):
            waiting.append((step, len(waiting)))
    return pairs


@dataclass(frozen=True)
class Run:
    """A program in the order of the step: for each input by name, and each output, what tells its memory."""

    program: Program
    given: dict[str, Any]
    made: tuple[Any, ...]


def runs_of(template: t.CallTemplate, pairs: list[CutPair], are_shared: bool = False) -> list[Run]:
    """The programs of a template, with these pairs planned together. `are_shared`: forwards that wait at the same time
    hold once what they make alike, as on the lazy device (a compiled call's template says so itself)."""
    first_of = {id(pair.first): pair for pair in pairs}
    second_of = {id(pair.second): pair for pair in pairs}
    shown_by: dict[int, tuple[Any, ...]] = {}
    held_by: dict[int, tuple[Any, ...]] = {}  # of forwards whose backward has yet to come
    alike: dict[Any, Any] = {}
    runs = []
    for step in template.steps:
        assert isinstance(step, t.Segment)
        inputs = {f"in{i}": memory_identity(source) for i, source in enumerate(step.inputs)}
        made = tuple(map(memory_identity, step.targets))
        if id(step) in first_of:
            pair = first_of[id(step)]
            program = _program(pair.joined.first)
            shown = tuple(made[output] for output in pair.joined.visible)
            shown_by[id(pair)] = shown
            held = [(HELD, id(pair), i) for i in range(len(program.outputs) - len(shown))]
            for number, recipe in output_recipes(program).items() if are_shared else ():
                if number >= len(shown):
                    made_of = recipe.key, tuple(inputs[f"in{place}"] for place in recipe.inputs)
                    known = alike.get(made_of)
                    if not any(known in waiting for waiting in held_by.values()):
                        known = alike[made_of] = held[number - len(shown)]
                    held[number - len(shown)] = known
            held_by[id(pair)] = tuple(held)
            runs.append(Run(program, inputs, shown + tuple(held)))
        elif id(step) in second_of:
            pair = second_of[id(step)]
            program = _program(pair.joined.second)
            given = {f"in{i}": memory_identity(source) for i, source in enumerate(pair.first.inputs)}
            for number, source in zip(pair.joined.second_inputs, step.inputs, strict=True):
                if number is not None:
                    given[f"in{number}"] = memory_identity(source)
            given |= {f"{RESULT}{i}": key for i, key in enumerate(shown_by[id(pair)])}
            names = [name for name, _ in program.inputs if name.startswith(HELD)]
            held_here = held_by.pop(id(pair))
            given |= {name: held_here[int(name.removeprefix(HELD))] for name in names}
            runs.append(Run(program, given, made))
        else:
            runs.append(Run(_program(step.trace), inputs, made))
    return runs


def _program(trace: CutTrace) -> Program:
    if id(trace) not in _planned:
        _planned[id(trace)] = trace, plan_trace(trace, CompileOptions("triton", "fused", "on")).program
    return _planned[id(trace)][1]


def peak_of(runs: list[Run]) -> int:
    """The most that the programs hold together: their own, and what was made for later ones, until its last reader
    frees it."""
    last: dict[Any, int] = {}
    for number, run in enumerate(runs):
        read = {name for name, _ in run.program.inputs}
        last |= {key: number for name, key in run.given.items() if name in read}
    alive: dict[Any, int] = {}
    peak = 0
    for number, run in enumerate(runs):
        peak = max(peak, sum(alive.values()))
        for step, own in zip(run.program.steps, held_bytes(run.program.steps), strict=True):
            peak = max(peak, own + sum(alive.values()))
            for name in step.names if isinstance(step, Free) else ():
                key = run.given.get(name)
                if key is not None and last[key] == number:
                    alive.pop(key, None)
        alive = {key: size for key, size in alive.items() if last[key] > number}
        metas = run.program.output_metas
        fresh = (key for key in run.made if key[0] in ("step", HELD) and last.get(key, -1) > number)
        alive |= {key: span_bytes(metas[run.made.index(key)]) for key in fresh}
    return peak


def calls_of(runs: list[Run]) -> int:
    """Launches and library calls."""
    return sum(isinstance(s, (Launch, ForeachLaunch, ExternCall)) for run in runs for s in run.program.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    if options.small:
        watch.LEAST_BYTES = 0
    for job in options.jobs:
        for name in options.models:
            first = 0
            for way in options.ways:
                runs, pairs = runs_by(way, job, name, options.small)
                peak = peak_of(runs)
                first = first or peak
                print(
                    f"{job:10} {name:9} {way:9} {len(runs):2} programs, peak {peak / MIB:7.1f} MiB "
                    f"({100 * (peak / first - 1):+.1f} %), {calls_of(runs)} kernels; {pairs} forwards planned with "
                    "their backward",
                    flush=True,
                )


def runs_by(way: str, job: str, name: str, small: bool) -> tuple[list[Run], int]:
    """The programs of one step, and how many pairs are among them."""
    cuts, found = cuts_of(job, name, small, reads=way != "one graph", is_device=way == "device")
    template = template_of(cuts)
    if way == "together":
        template = split_by_forward(split_micro_batches(template))
        pairs = cut_pairs(template)
    else:
        pairs = pairs_on_the_device(template, found) if way == "device" else []
    return runs_of(template, pairs, are_shared=way == "device"), len(pairs)


if __name__ == "__main__":
    main()
