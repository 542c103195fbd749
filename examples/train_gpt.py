"""Train a small GPT on Python's own source code, eagerly or on the lazy device.

    python examples/train_gpt.py                      the lazy device
    python examples/train_gpt.py --device lazy_mode   ordinary tensors, recorded inside `torchlazy.lazy_mode()`
    python examples/train_gpt.py --compare            eager, then lazy, then both side by side

The model and the loop are plain PyTorch: what makes it lazy is the device of the tensors. With --no-dropout eager and
lazy must agree, and the comparison exits with 1 where they do not; with dropout they draw different random numbers.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from side_by_side import Placement, Run, add_arguments, chosen_placements, comparison_table, largest_difference, train
from tiny_gpt import GPT, GPTConfig, decode, parameter_groups, random_batch, read_library_source
from torch import Tensor

# Rounding differs between eager and fused kernels, and training amplifies it: on the default sizes, two eager runs with
# one and with two threads differ by 3e-6 after 200 steps. A wrong formula shows as 1e-2 and more.
LOSS_TOLERANCE = {"float32": 1e-4, "bf16": 5e-2}


def learning_rate_factor(step: int, steps: int) -> float:
    """Ten steps up, then half a cosine down to a tenth."""
    warmup = min(10, steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def train_gpt(placement: Placement, options: argparse.Namespace, data: Tensor) -> tuple[Run, GPT]:
    """One run from fixed weights and a fixed order of batches."""
    torch.manual_seed(options.seed)
    model = GPT(
        GPTConfig(
            layers=options.layers,
            heads=options.heads,
            width=options.width,
            block=options.block,
            dropout=0.0 if options.no_dropout else 0.1,
        )
    )
    model.to(placement.device)
    forward = placement.prepare(model)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    generator = torch.Generator().manual_seed(options.seed)

    def step(number: int) -> Tensor:
        codes, targets = random_batch(data, options.batch, options.block, generator)
        codes, targets = codes.to(placement.device), targets.to(placement.device)
        with placement.autocast(options.bf16):
            _, loss = forward(codes, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    return train(placement, options.steps, options.print_every, step), model


@torch.no_grad()
def sample(model: GPT, placement: Placement, prompt: Tensor, length: int, seed: int) -> str:
    """Continue `prompt` by `length` characters; the window always has the same length, so one program serves all."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    codes = prompt.tolist()
    for _ in range(length):
        window = torch.tensor([codes[-model.config.block :]]).to(placement.device)
        with placement.around_step():
            logits, _ = model(window)
        weights = torch.softmax(logits[0, -1].float().cpu() / 0.8, dim=0)
        codes.append(int(torch.multinomial(weights, 1, generator=generator)))
    model.train()
    return decode(codes[len(prompt) :])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT.")
    add_arguments(parser, steps=200, print_every=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--block", type=int, default=128, help="characters that the model sees at once")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="train under torch.autocast in bfloat16")
    parser.add_argument("--sample", type=int, default=160, metavar="N", help="characters to write at the end")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    data = read_library_source()
    prompt = data[: options.block]
    runs: list[Run] = []
    for placement in chosen_placements(options):
        run, model = train_gpt(placement, options, data)
        runs.append(run)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"\n{parameters:,} parameters, {len(data):,} characters, {run.total_seconds:.1f} s on {placement.way}")
    if options.sample:
        print(f"--- after {options.steps} steps it writes:\n{sample(model, placement, prompt, options.sample, 1)}\n---")
    print(comparison_table(runs))
    if not options.compare or not options.no_dropout:
        return 0
    tolerance = LOSS_TOLERANCE["bf16" if options.bf16 else "float32"]
    worst = max(largest_difference(runs[0], other) for other in runs[1:])
    print(f"losses {'agree' if worst <= tolerance else 'DIFFER'}: {worst:.1e} against a tolerance of {tolerance:.0e}")
    return 0 if worst <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
