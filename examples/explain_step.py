"""Ask torchlazy about one training step: why it cut, what was new, where it waits, how much it computes.

python examples/explain_step.py                  the account of a small GPT's steps, a changed batch size among them
python examples/explain_step.py --shadow out/    run each cut eagerly too and compare; scripts for differences in out/
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torchlazy
from tiny_gpt import GPT, GPTConfig
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shadow", metavar="FOLDER", help="compare each program with its operators run one by one")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = GPTConfig(layers=2, heads=2, width=32, block=32, dropout=0.0)
    model = GPT(sizes).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(codes: Tensor, targets: Tensor) -> Tensor:
        _, loss = model(codes, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(sizes.vocabulary, (rows, sizes.block))
        return codes.to("lazy"), codes.roll(-1, 1).to("lazy")

    print("--- flops: what one step computes, as formulas; nothing runs")
    count = torchlazy.flops(step, *batch(8))
    print(f"products {count.products}\nbytes    {count.bytes}")
    print(f"at codes_0=64: {count.at(codes_0=64).flops:,} flops; compiled, {count.fused(codes_0=64)}")
    print(f"with 9 rows of codes and 8 of targets: {count.raises_for(codes_0=9, targets_0=8)}")

    for _ in range(3):
        step(*batch(8))
    torchlazy.wait_for_compile()

    print("\n--- explain: a step of a batch size that is new")
    print(torchlazy.explain(step, *batch(6)))

    print("\n--- no_sync: a step must not wait for a value")
    try:
        with torchlazy.no_sync():
            print(f"loss {step(*batch(8)).item():.3f}")
    except torchlazy.SyncError as error:
        print(f"SyncError: {error}")
    with warnings.catch_warnings(record=True) as caught, torchlazy.sync_budget(1):
        warnings.simplefilter("always")
        for _ in range(3):
            step(*batch(8)).item()
    print(caught[0].message)

    if options.shadow:
        print("\n--- shadow: each cut runs both ways")
        with torchlazy.shadow(options.shadow) as window:
            for _ in range(2):
                step(*batch(8))
        print(f"{window.cuts} cuts compared, {len(window.differences)} programs wrong, {window.rounded} only rounded")

    print("\n--- report: the whole process")
    print(torchlazy.report())


if __name__ == "__main__":
    main()
