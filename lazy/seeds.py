"""Seeds of random operators, drawn from torch's generators.

Invariant: one seed takes what one `random_` of a whole number takes from the generator, whoever draws it.
"""

from __future__ import annotations

import torch
from torchlazy.lazy.torch_private import below_autograd


def draw_seed(generator: torch.Generator | None) -> int:
    """63 bits from the generator (None: the CPU's default one)."""
    device = generator.device if generator is not None else torch.device("cpu")
    with below_autograd():
        return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item())
