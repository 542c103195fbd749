"""Training steps with a new length at each step: eager and `lazy_mode`, from a cold start.

python benchmarks/lengths.py                                  on a GPU GPT-2, 8 x (97 to 512), bfloat16 autocast
python benchmarks/lengths.py --models gpt2 bert --steps 150

Both ways live in one process and take turns at each length, so that a slow minute falls on both. Columns: the median of
the second half, the longest step and all steps together, compilation included; then how many of the mode's operators
were deferred, and why sizes were not generalised, if so. Without a GPU the models are small ones.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable

import torch
import torchlazy
from torch import Tensor
from torchlazy.runtime.native.recorder_library import LIBRARY

Step = Callable[[int], Tensor]


def _model(name: str, device: str) -> tuple[torch.nn.Module, int]:
    import transformers as t

    small = {} if device == "cuda" else {"vocab_size": 500}
    width, layers, heads = (768, 12, 12) if device == "cuda" else (64, 4, 2)
    torch.manual_seed(0)
    if name == "gpt2":
        kind = t.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, **small)
        return t.GPT2LMHeadModel(kind), kind.vocab_size
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if name == "bert":
        kind = t.BertConfig(intermediate_size=4 * width, **sizes, **small)
        return t.BertForMaskedLM(kind), kind.vocab_size
    kind = t.LlamaConfig(intermediate_size=3 * width, **sizes, **(small or {"vocab_size": 32000}))
    return t.LlamaForCausalLM(kind), kind.vocab_size


def _step(name: str, device: str, batch: int) -> Step:
    model, words = _model(name, device)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(length: int) -> Tensor:
        codes = torch.randint(words, (batch, length), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss: Tensor = model(input_ids=codes, labels=codes).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _timed(step: Step, length: int, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step(length)
    wait()
    return 1e3 * (time.perf_counter() - start)


def _inside(block: Callable[[], contextlib.AbstractContextManager[object]], step: Step) -> Step:
    def stepped(length: int) -> Tensor:
        with block():
            return step(length)

    return stepped


def measure(name: str, options: argparse.Namespace) -> str:
    """One line of the table."""
    blocks = {"eager": contextlib.nullcontext, "mode": torchlazy.lazy_mode}
    steps = {way: _step(name, options.device, options.batch) for way in blocks}
    times: dict[str, list[float]] = {way: [] for way in blocks}
    chance = random.Random(0)
    for turn in range(options.steps):
        length = chance.randint(options.least, options.most)
        for way in blocks if turn % 2 else reversed(blocks):
            torch.manual_seed(turn)
            times[way].append(_timed(_inside(blocks[way], steps[way]), length, options.device))
    half = options.steps // 2
    columns = []
    for found in times.values():
        columns.append(f"{statistics.median(found[half:]):.1f} | {max(found):.0f} | {sum(found) / 1e3:.1f}")
    counts, metrics = LIBRARY.module.counts(), torchlazy.metrics()
    share = counts["deferred"] / max(1, counts["deferred"] + counts["logged"])
    LIBRARY.module.forget()
    LIBRARY.module.reset_counts()
    return f"| {name} | {' | '.join(columns)} | {share:.2f} | {'; '.join(metrics['not_generalised'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("gpt2", "bert", "llama"), default=["gpt2"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--least", type=int, default=97)
    parser.add_argument("--most", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if LIBRARY.wait() is None:
        raise SystemExit(f"there is no native recorder: {LIBRARY.reason}")
    print(f"torch {torch.__version__}, {options.device}; ms: second half's median, longest; seconds of all steps")
    print("| model | eager | longest | all | mode | longest | all | deferred | not generalised |")
    print("|---" * 9 + "|")
    for name in options.models:
        print(measure(name, options), flush=True)


if __name__ == "__main__":
    main()
