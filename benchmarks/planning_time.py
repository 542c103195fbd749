"""Processor seconds of planning a training step of a deep model against those of a shallow one; nothing is compiled.

    python benchmarks/planning_time.py                                   all models, 12 and 48 layers, target CPU
    python benchmarks/planning_time.py --models gpt vit --forms plain autocast --layers 12 24 48
    python benchmarks/planning_time.py --models encoder_decoder --whole  without lowering equal layers once
    python benchmarks/planning_time.py --target cuda:0                   as for a GPU; none is needed

The step is forward, cross-entropy, backward, AdamW (foreach) and zero_grad on 4 rows of 32 tokens, width 64. It is
recorded without running, as `planned_peak.py` does. `form`: `plain`; under bfloat16 `autocast`; with gradients
`clipped` to a norm under autocast; with the loss `read` before `backward()`, where the two programs are planned as one
schedule. "how" says whether equal layers were lowered once (`by layers`) or the whole was planned. Seconds are those of
this process alone, the least of `--turns`; the ratio is that of the deepest to the shallowest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import planned_peak
import torch
import torchlazy
from planned_peak import recorded_for_a_gpu
from tiny_gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.api import recorder
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.plan.pipeline import plan_by_layers, plan_trace
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.trace.trace import CutTrace

WIDTH, HEADS, VOCABULARY, LENGTH, ROWS = 64, 4, 96, 32, 4
FORMS = ("plain", "autocast", "clipped", "read")


class EncoderDecoder(nn.Module):
    """`nn.Transformer` with as many layers on each side."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(
            WIDTH, HEADS, layers, layers, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, codes: Tensor) -> Tensor:
        embedded = self.embed(codes)
        return self.head(self.body(embedded, embedded))


class Block(nn.Module):
    """A transformer's layer that attends within windows of 8, or everywhere."""

    def __init__(self, is_global: bool) -> None:
        super().__init__()
        self.is_global = is_global
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        windows = 1 if self.is_global else length // 8
        shape = (rows * windows, length // windows, 3, HEADS, width // HEADS)
        query, key, value = self.mix(self.first(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Windows(nn.Module):
    """Layers that attend within windows, every sixth one everywhere."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(number % 6 == 5) for number in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _gpt(layers: int, dropout: float = 0.0) -> nn.Module:
    sizes = GPTConfig(vocabulary=VOCABULARY, layers=layers, width=WIDTH, heads=HEADS, block=LENGTH, dropout=dropout)
    return GPT(sizes)


def _vit(layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            image_size=32,
            patch_size=8,
            num_labels=10,
        )
    )


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
        )
    )


def _bert(layers: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
        )
    )


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": _gpt,
    "gpt_dropout": lambda layers: _gpt(layers, 0.1),
    "bert": _bert,
    "llama": _llama,
    "vit": _vit,
    "encoder_decoder": EncoderDecoder,
    "windows": Windows,
}


def _logits(output: object) -> Tensor:
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def recorded_step(name: str, layers: int, form: str) -> tuple[CutTrace, ...]:
    """The trace of one step, states of the optimizer included; of `read` the joined traces of forward and backward."""
    with _pairs_of_any_size(), recorded_for_a_gpu() as cuts:
        recorder.target = planned_peak.TARGET
        with torch.device("meta"):
            model = MODELS[name](layers)
        model.to_empty(device="lazy")
        inputs = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="lazy")
        targets = inputs
        if name == "vit":
            inputs = torch.zeros(ROWS, 3, 32, 32, device="lazy")
            targets = torch.zeros(ROWS, dtype=torch.long, device="lazy")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        for _ in range(3 if form == "read" else 2):
            torchlazy.flush()
            cuts.clear()
            with torch.autocast("lazy", dtype=torch.bfloat16, enabled=form in ("autocast", "clipped")):
                output = _logits(model(inputs))
                loss = F.cross_entropy(output.flatten(0, -2).float(), targets.flatten())
            del output
            if form == "read":
                loss.item()
            loss.backward()
            if form == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            torchlazy.flush()
        if form != "read":
            return (max((cut.trace for cut in cuts), key=lambda trace: len(trace.entries)),)
        (pair,) = recorder.driver.halves.found  # type: ignore[attr-defined]
        return pair.joined.first, pair.joined.second


@contextmanager
def _pairs_of_any_size() -> Iterator[None]:
    """A forward and its backward are planned together however small they are."""
    least, watch.LEAST_BYTES = watch.LEAST_BYTES, 0
    try:
        yield
    finally:
        watch.LEAST_BYTES = least


@dataclass(frozen=True)
class Planned:
    """`seconds` of processor time; `how`: "by layers" or "whole"; `operators` of the trace, `steps` planned."""

    seconds: float
    how: str
    operators: int
    steps: int


def plan(traces: tuple[CutTrace, ...], options: CompileOptions, *, whole: bool) -> Planned:
    """Plan each trace once."""
    ways: list[str] = []
    steps = 0
    started = time.process_time()
    for trace in traces:
        found = None if whole else plan_by_layers(trace, options)
        ways.append("whole" if found is None else "by layers")
        steps += len((found or plan_trace(trace, options)).program.steps)
    seconds = time.process_time() - started
    how = ways[0] if len(set(ways)) == 1 else ", ".join(ways)
    return Planned(seconds, how, len({id(entry) for trace in traces for entry in trace.entries}), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["plain"])
    parser.add_argument("--layers", nargs="+", type=int, default=[12, 48])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--whole", action="store_true", help="plan the whole, however many layers are equal")
    options = parser.parse_args()
    planned_peak.TARGET = options.target
    compile_options = CompileOptions("cpp" if options.target == "cpu" else "triton", "fused", "on")
    print(f"torch {torch.__version__}, planned for {options.target}\n")
    heads = " | ".join(f"{layers} layers, s" for layers in options.layers)
    print(f"| model | form | {heads} | ratio | how | operators |\n|---|---|{'---|' * len(options.layers)}---|---|---|")
    for name in options.models:
        for form in options.forms:
            plan(recorded_step(name, 2, form), compile_options, whole=True)  # first uses
            found = []
            for layers in options.layers:
                traces = recorded_step(name, layers, form)
                turns = [plan(traces, compile_options, whole=options.whole) for _ in range(options.turns)]
                found.append(min(turns, key=lambda one: one.seconds))
            cells = " | ".join(f"{one.seconds:.2f}" for one in found)
            ratio, last = found[-1].seconds / found[0].seconds, found[-1]
            print(f"| {name} | {form} | {cells} | {ratio:.2f} | {last.how} | {last.operators} |", flush=True)


if __name__ == "__main__":
    main()
