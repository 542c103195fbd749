"""What checking the guards of a compiled call costs: microseconds before a replay begins.

python benchmarks/guard_cost.py                 GPT of 12 and of 48 layers, ResNet-50; forward and whole step
python benchmarks/guard_cost.py --no-peer       leaves torch.compile's guards out
python benchmarks/guard_cost.py --by-value      without the native pass, as where there is no C++ compiler

The models are those of host_cost.py: the modules, parameters and operators of a 12-layer GPT and of a ResNet-50 on tiny
tensors, on the lazy device or (--device cpu) as ordinary tensors. Forward is the module compiled and called in training
mode, under no_grad; a step is forward, loss, backward, AdamW and zero_grad in one compiled function.

Columns: guarded values (attributes, entries of containers, cells, globals, facts of tensors and gradients); operators
in the replayed program; microseconds of the guards alone and of everything that is checked before a replay begins
(arguments taken apart, their facts, torch's modes, the variant's guards, its numbers): medians, in brackets the least.
The peer is torch.compile(backend="eager") over the module's forward: its guards do not depend on the back end; the time
is that of its own C++ check of one cache entry. Exits with 1 where all checks of a 12-layer GPT or of ResNet-50 take
more than 50 microseconds in the median.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy import guards

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from host_cost import resnet50
from tiny_gpt import GPT, GPTConfig

GOAL = 50.0  # microseconds
WARMUP = 4


def gpt(layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, input and targets of a GPT of that depth."""
    sizes = GPTConfig(layers=layers, heads=2, width=32, block=16, dropout=0.0)
    codes = torch.randint(sizes.vocabulary, (2, sizes.block))
    return GPT(sizes), codes, codes.flatten()


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "gpt, 12 layers": lambda: gpt(12),
    "gpt, 48 layers": lambda: gpt(48),
    "resnet50": resnet50,
}
UNDER_THE_GOAL = ("gpt, 12 layers", "resnet50")


@dataclass(frozen=True)
class Row:
    """Microseconds, each (median, least)."""

    model: str
    form: str
    values: int
    operators: int
    guards: tuple[float, float]
    everything: tuple[float, float]
    peer: tuple[float, float] | None = None


def microseconds(check: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median and least of one call."""
    gc.collect()
    gc.disable()
    try:
        times = []
        for _ in range(repeats):
            started = time.perf_counter_ns()
            held = check()
            times.append((time.perf_counter_ns() - started) / 1e3)
            if not held:
                raise RuntimeError("the guards of a call that was just replayed do not hold")
    finally:
        gc.enable()
    return statistics.median(times), min(times)


def training_step(model: nn.Module, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Forward, loss, backward, AdamW and zero_grad."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(inputs: Tensor) -> Tensor:
        output = model(inputs)
        logits = output[0].flatten(0, 1) if isinstance(output, tuple) else output
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def checks_of(run: Any, args: tuple[Any, ...]) -> tuple[Any, Callable[[], Any]]:
    """The variant that served the last call, and all that is checked before it is replayed."""
    from torchlazy.lazy.call_arguments import flatten_call
    from torchlazy.lazy.call_key import ambient, facts_of, stands_alone

    compiled = run._compiled_call if isinstance(run, nn.Module) else run
    recorder, signatures, free = compiled.recorder, compiled._signatures, compiled._numbers.free

    def check() -> Any:
        if stands_alone() or recorder.capture is not None or recorder.mode_depth:
            return None
        given, structure = flatten_call(args, {})
        leaves = compiled._compact(given)
        facts = facts_of(leaves, free)
        signature = signatures[(structure, ambient(recorder), *facts)]
        return signature.variants[0].serves(given, leaves)

    given, structure = flatten_call(args, {})
    leaves = compiled._compact(given)
    signature = signatures[(structure, ambient(recorder), *facts_of(leaves, free))]
    return signature.variants[0], check


def measure(name: str, form: str, options: argparse.Namespace) -> Row:
    """One model in one form."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]()
    model.to(options.device).train()
    inputs, targets = inputs.to(options.device), targets.to(options.device)
    whole = training_step(model, targets) if form == "step" else None
    run: Any = torchlazy.compile(whole if whole is not None else model, audit=False)
    with torch.set_grad_enabled(form == "step"):
        for _ in range(WARMUP):
            run(inputs)
        report = run.report()
        if not report.replays:
            raise RuntimeError(f"{name}, {form}: no call was replayed: {report}")
        variant, check = checks_of(run, (inputs,))
        alone = microseconds(variant.guards.holds, options.repeats)
        everything = microseconds(check, options.repeats)
    peer = None
    if options.peer and form == "forward":
        peer = peer_guards(name, options)
    return Row(name, form, len(variant.guards), variant.replay.template.operators, alone, everything, peer)


def peer_guards(name: str, options: argparse.Namespace) -> tuple[float, float] | None:
    """torch.compile's check of the forward's one cache entry; None where this torch does not let it be called."""
    try:
        import torch._dynamo as dynamo
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    except ImportError:
        return None
    dynamo.reset()
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name]()
    model.train()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(inputs)
        code = type(model).forward.__code__
        entries = _debug_get_cache_entry_list(code)
        if len(entries) != 1:
            return None
        names = dict.fromkeys(code.co_varnames[: code.co_argcount])
        values = {**names, "self": model, code.co_varnames[1]: inputs}
        manager = entries[0].guard_manager
        return microseconds(lambda: manager.check(values), options.repeats)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| model | form | guarded values | operators | guards alone, us | all checks, us | torch.compile, us |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.model, row.form, str(row.values), str(row.operators)]
        cells += [f"{m:.1f} ({least:.1f})" for m, least in (row.guards, row.everything)]
        cells.append("-" if row.peer is None else f"{row.peer[0]:.1f} ({row.peer[1]:.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=("forward", "step"), default=["forward", "step"])
    parser.add_argument("--device", choices=("lazy", "cpu"), default="lazy")
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--by-value", action="store_true", help="guards as they are without a C++ compiler")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    torchlazy.config.store = "off"
    if options.by_value:
        guards.is_available = lambda: False
    rows = [measure(name, form, options) for name in options.models for form in options.forms]
    way = "by value" if options.by_value else "native"
    print(f"\ntorch {torch.__version__}, {options.device}, 1 thread, {options.repeats} checks each, {way}\n")
    print(table(rows))
    late = [row for row in rows if row.model in UNDER_THE_GOAL and row.everything[0] > GOAL]
    for row in late:
        print(f"{row.model}, {row.form}: {row.everything[0]:.1f} us, above the goal of {GOAL:.0f}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
