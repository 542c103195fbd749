"""What checking the guards of a compiled call costs: microseconds before a replay begins.

python benchmarks/guard_cost.py                 GPT of 12 and of 48 layers, ResNet-50; forward and whole step
python benchmarks/guard_cost.py --processes 3   each row in three fresh processes, one after the other
python benchmarks/guard_cost.py --no-peer       leaves torch.compile's guards out
python benchmarks/guard_cost.py --by-value      without the native pass, as where there is no C++ compiler
python benchmarks/guard_cost.py --models gpt2 bert llama vit       models of transformers, of 12 layers
python benchmarks/guard_cost.py --cold          the caches are emptied before each check, too
python benchmarks/guard_cost.py --no-versions   every entry of every dict is looked at, as without versions and watchers

The models are those of host_cost.py: the modules, parameters and operators of a 12-layer GPT and of a ResNet-50 on tiny
tensors, on the lazy device or (--device cpu) as ordinary tensors. Forward is the module compiled and called in training
mode, under no_grad; a step is forward, loss, backward, AdamW and zero_grad in one compiled function.

The models of transformers (if that is installed) are as small, but all of their library's code is guarded: its
configuration objects, decorators, registries, and the functions that these lead to.

Columns: guarded values (attributes, entries of containers, cells, globals, facts of tensors and gradients); operators
in the replayed program; microseconds of the guards alone and of everything that is checked before a replay begins
(settings of torch, arguments taken apart, their facts, the variant's guards, its numbers): medians, in brackets the
least. "After a step" is the same of checks before each of which the whole compiled call ran, whose own work has taken
the caches. "Cold" (with --cold) is the same of checks before each of which 64 MiB were read, a word of each line, on
small pages, so that the table of pages is driven out, too: neither the data nor the code of a check is in a cache. The
peer's figures are warm ones. "Machine" is how long a fixed loop took in the median that is timed in turns with the
checks, the shortest of the whole run being 1: where it is above 1.2 others used the core, and the medians are theirs
too.

With --processes the medians are those of the processes' medians, with the highest behind them, and the least of all.

The peer is torch.compile(backend="eager") over the module's forward: its guards do not depend on the back end; the time
is that of its own C++ check of one cache entry. After the table: milliseconds that walking over what the code can read
and making guards of it took, of each capture. Exits with 1 where all checks of a model of at most 12 layers or of
ResNet-50 take more than 50 microseconds in the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import mmap
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.compiled.capture import call as capture_call
from torchlazy.lazy.compiled.guards import guards
from torchlazy.runtime.native import identity_check, object_layout

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


def of_transformers(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of 12 layers by its name in `TRANSFORMERS`."""
    import transformers

    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 12,
        "intermediate_size": 64,
    }
    small |= {"vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        small = {"n_embd": 32, "n_head": 2, "n_layer": 12, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        small |= {"vocab_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    elif name == "vit":
        small |= {"image_size": 16, "patch_size": 4, "num_labels": 8}
    model, config = TRANSFORMERS[name]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**small))
    if name == "vit":
        return made, torch.randn(2, 3, 16, 16), torch.randint(8, (2,))
    codes = torch.randint(64, (2, 16))
    return made, codes, codes.flatten()


TRANSFORMERS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "bert": ("BertForMaskedLM", "BertConfig"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "vit": ("ViTForImageClassification", "ViTConfig"),
}
DEFAULT = tuple(MODELS)
MODELS |= {name: functools.partial(of_transformers, name) for name in TRANSFORMERS}
UNDER_THE_GOAL = frozenset(MODELS) - {"gpt, 48 layers"}


@dataclass(frozen=True)
class Row:
    """Microseconds, each (median, least)."""

    model: str
    form: str
    values: int
    operators: int
    guards: tuple[float, float]
    everything: tuple[float, float]
    cooled: tuple[float, float]
    cold: tuple[float, float] | None
    loop: tuple[float, float]  # a fixed one
    walks: list[float]  # milliseconds
    making: list[float]
    peer: tuple[float, float] | None = None
    highest: float | None = None  # of several processes' medians of `everything`


_FIXED = list(range(1000))


def microseconds(
    check: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median and least of one call, and of the fixed loop."""
    gc.collect()
    gc.disable()
    now = time.perf_counter_ns
    try:
        times, loops = [], []
        for _ in range(repeats):
            if before is not None:
                before()
            started = now()
            held = check()
            times.append((now() - started) / 1e3)
            if not held:
                raise RuntimeError("the guards of a call that was just replayed do not hold")
            started = now()
            sum(_FIXED)
            loops.append((now() - started) / 1e3)
    finally:
        gc.enable()
    return (statistics.median(times), min(times)), (statistics.median(loops), min(loops))


def emptier() -> Callable[[], Any]:
    """What drives everything else out of the caches."""
    memory = mmap.mmap(-1, _EMPTYING)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    words = numpy.frombuffer(memory, dtype=numpy.uint64)
    words[:] = 1
    return words[::8].sum


_EMPTYING = 64 << 20  # bytes


def training_step(model: nn.Module, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Forward, loss, backward, AdamW and zero_grad."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(inputs: Tensor) -> Tensor:
        output = model(inputs)
        logits = output if isinstance(output, Tensor) else output[0].flatten(0, -2)
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def checks_of(run: Any, args: tuple[Any, ...]) -> tuple[Any, Callable[[], Any]]:
    """The variant that served the last call, and all that is checked before it is replayed."""
    compiled: Any = run._compiled_call if isinstance(run, nn.Module) else run
    recorder = compiled.recorder

    def check() -> Any:
        settings = compiled._ambience.known()
        if settings is None or recorder.capture is not None or recorder.mode_depth:
            return None
        alike = compiled._alike.known(args, {}, settings)
        given, leaves, _, _, signature = (
            alike.call_facts(args) if alike is not None else compiled._call_facts(args, {}, settings)
        )
        variant = signature.variants[0]
        return variant.serves(given, leaves, unaliased=alike is not None and alike.variant is variant)

    return compiled._call_facts(args, {}, compiled._ambience.known())[-1].variants[0], check


def measure(name: str, form: str, options: argparse.Namespace) -> Row:
    """One model in one form."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]()
    model.to(options.device).train()
    inputs, targets = inputs.to(options.device), targets.to(options.device)
    whole = training_step(model, targets) if form == "step" else None
    run: Any = torchlazy.compile(whole if whole is not None else model, audit=False)
    walks, making = timed(capture_call, "discover"), timed(capture_call, "Guards")
    with torch.set_grad_enabled(form == "step"):
        for _ in range(WARMUP):
            run(inputs)
        torchlazy.wait_for_compile()  # a step is its programs, and no worker takes a core
        for _ in range(2):
            run(inputs)
        report = run.report()
        if not report.replays:
            raise RuntimeError(f"{name}, {form}: no call was replayed: {report}")
        variant, check = checks_of(run, (inputs,))
        alone, _ = microseconds(variant.guards.holds, options.repeats)
        everything, loop = microseconds(check, options.repeats)
        cooled, _ = microseconds(check, options.steps, lambda: run(inputs))
        cold = microseconds(check, options.steps, emptier())[0] if options.cold else None
    peer = None
    if options.peer and form == "forward":
        peer = peer_guards(name, options)
    operators = variant.replay.template.operators
    return Row(name, form, len(variant.guards), operators, alone, everything, cooled, cold, loop, walks, making, peer)


def timed(module: Any, name: str) -> list[float]:
    """The milliseconds of each call of the module's function from now on."""
    found: list[float] = []
    function = getattr(module, name)
    function = getattr(function, "__wrapped__", function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            found.append(1e3 * (time.perf_counter() - started))

    setattr(module, name, call)
    return found


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
        return microseconds(lambda: manager.check(values), options.repeats)[0]


def in_processes(options: argparse.Namespace) -> list[Row]:
    """Each row in processes of its own, whose turns come one after the other."""
    given = ["--device", options.device, "--repeats", str(options.repeats), "--steps", str(options.steps)]
    given += [f"--{name.replace('_', '-')}" for name in ("by_value", "cold") if getattr(options, name)]
    given += [f"--no-{name}" for name in ("peer", "versions") if not getattr(options, name)]
    found: dict[tuple[str, str], list[Row]] = {}
    for _ in range(options.processes):
        for name in options.models:
            for form in options.forms:
                command = [sys.executable, __file__, "--models", name, "--forms", form, "--json", *given]
                text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                row = Row(**json.loads(text.splitlines()[-1]))
                print(f"{name}, {form}: {row.everything[0]:.1f}, loop {row.loop[0]:.1f}", file=sys.stderr, flush=True)
                found.setdefault((name, form), []).append(row)
    return [together(rows) for rows in found.values()]


def together(rows: list[Row]) -> Row:
    """The medians of the rows' medians, the least of all."""

    def both(name: str) -> Any:
        medians, least = zip(*(getattr(row, name) for row in rows), strict=True)
        return statistics.median(medians), min(least)

    return dataclasses.replace(
        rows[0], guards=both("guards"), everything=both("everything"), cooled=both("cooled"),
        cold=both("cold") if rows[0].cold else None, loop=both("loop"), peer=both("peer") if rows[0].peer else None,
        highest=max(row.everything[0] for row in rows),
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| model | form | guarded values | operators | guards alone, us | all checks, us | after a step, us | cold, us "
        "| machine | torch.compile, us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    shortest = min(row.loop[1] for row in rows)
    for row in rows:
        cells = [row.model, row.form, str(row.values), str(row.operators)]
        guards, everything, cooled = (f"{m:.1f} ({least:.1f})" for m, least in (row.guards, row.everything, row.cooled))
        if row.highest is not None:
            everything += f", highest {row.highest:.1f}"
        cold = "-" if row.cold is None else f"{row.cold[0]:.1f} ({row.cold[1]:.1f})"
        cells += [guards, everything, cooled, cold, f"{row.loop[0] / shortest:.2f}"]
        cells.append("-" if row.peer is None else f"{row.peer[0]:.1f} ({row.peer[1]:.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(DEFAULT))
    parser.add_argument("--forms", nargs="+", choices=("forward", "step"), default=["forward", "step"])
    parser.add_argument("--device", choices=("lazy", "cpu"), default="lazy")
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=60, help="checks that each follow a whole call")
    parser.add_argument("--cold", action="store_true", help="as many with emptied caches")
    parser.add_argument("--processes", type=int, default=0, help="fresh processes for each row; 0: all in this one")
    parser.add_argument("--json", action="store_true", help="prints one row, for the process that asked for it")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--by-value", action="store_true", help="guards as they are without a C++ compiler")
    parser.add_argument(
        "--no-versions", dest="versions", action="store_false", help="without versions and watchers of dicts"
    )
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    torchlazy.config.store = "on" if options.json else "off"  # the next process need not compile again
    if options.by_value:
        guards.is_ready = lambda: False
    if not options.versions:
        without = dataclasses.replace(object_layout.layout(), dict_version=None)
        identity_check.layout = lambda: without
        identity_check.watcher = lambda: None
    if options.processes:
        rows = in_processes(options)
    else:
        rows = [measure(name, form, options) for name in options.models for form in options.forms]
    if options.json:
        print(json.dumps(dataclasses.asdict(rows[0])))
        return 0
    way = "by value" if options.by_value else "native"
    print(f"\ntorch {torch.__version__}, {options.device}, 1 thread, {options.repeats} checks each, {way}", end="")
    print(f", {options.processes} processes\n" if options.processes else "\n")
    print(table(rows) + "\n")
    for row in rows:
        walks, making = (", ".join(f"{taken:.0f}" for taken in times) for times in (row.walks, row.making))
        print(f"{row.model}, {row.form}: walks {walks} ms, making guards {making} ms")
    late = [row for row in rows if row.model in UNDER_THE_GOAL and row.everything[0] > GOAL]
    for row in late:
        print(f"{row.model}, {row.form}: {row.everything[0]:.1f} us, above the goal of {GOAL:.0f}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
