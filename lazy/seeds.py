"""Seeds of random operators, drawn from torch's generators.

Invariant: one seed takes what one `random_` of a whole number takes from the generator, whoever draws it.
"""

from __future__ import annotations

import torch
from torchlazy.lazy.torch_private import below_autograd
from torchlazy.lazy.torch_private_draws import random_number

_spare: list[torch.Tensor] = []  # memory to draw into; of which a thread takes one


def draw_seed(generator: torch.Generator | None) -> int:
    """63 bits from the generator (None: the CPU's default one)."""
    if generator is not None and generator.device.type != "cpu":
        with below_autograd():
            drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
            return int(drawn.item())
    try:
        memory = _spare.pop()
    except IndexError:
        with below_autograd():
            memory = torch.empty((), dtype=torch.int64, device="cpu")
    seed = random_number(memory, generator)
    _spare.append(memory)
    return seed
