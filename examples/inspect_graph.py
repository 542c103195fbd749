"""Look inside one small training step: what was recorded, what it became, and where each cut came from.

    python examples/inspect_graph.py [--folder out/inspect] [--lines 14]

Trains a small network for four steps under `torchlazy.dump(folder)`, then prints the folders that were written and the
first lines of the main files of the last optimizer step. `dot -Tsvg` draws its graph.dot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

# Files to show, and the line to start from: the body of a printed graph.
SHOWN = {
    "00_cut.txt": "",
    "02_aten.py": "):",
    "03_prims.py": "):",
    "05_fusion.txt": "",
    "07_program.txt": "",
}


def train_steps(steps: int) -> list[float]:
    """A step with something of everything: products, a norm, a dropout, a reduction, an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, labels = torch.randn(64, 16).to("lazy"), torch.randint(4, (64,)).to("lazy")
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()  # a cut: the whole step is one graph
        optimizer.zero_grad()
        losses.append(loss.item())  # reads a value that is there already
        torchlazy.wait_for_compile()  # only so that a program shows after a few steps; training never waits
    return losses


def head(path: Path, start: str, lines: int) -> str:
    """`lines` lines of a file from the first that begins with `start`."""
    text = path.read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(text) if line.startswith(start)), 0)
    shown = [line[:118] for line in text[first : first + lines]]
    rest = len(text) - first - len(shown)
    return "\n".join([*shown, f"... {rest} more lines"] if rest > 0 else shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/inspect"))
    parser.add_argument("--lines", type=int, default=14, help="lines to print of each file")
    options = parser.parse_args()
    with torchlazy.dump(options.folder) as window:
        losses = train_steps(4)
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    for folder in window.written:
        print(f"\n{folder}/")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(f"    {path.relative_to(folder).as_posix():<28}{path.stat().st_size:>8} bytes")
    steps = [folder for folder in window.written if "optimizer" in folder.name]
    last = steps[-1] if steps else window.written[-1]
    for name, start in SHOWN.items():
        if (last / name).exists():
            print(f"\n--- {last / name}\n{head(last / name, start, options.lines)}")
    print(f"\nthe picture: {last / 'graph.dot'}")
    print("metrics:", {name: value for name, value in torchlazy.metrics().items() if value})


if __name__ == "__main__":
    main()
