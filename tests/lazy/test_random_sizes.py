"""Random programs over many sizes: what programs for all sizes compute, against eager.

A seed chooses a chain of operators; the chain runs at sizes that grow by one, are odd, 0, 1 or 2, and jump far, so that
a number that only looked like an expression of the sizes, or a guard that is missing, shows as a wrong value. Each size
comes twice: a trace that a template serves runs once bound anew and once known. More seeds:
`TORCHLAZY_SIZE_SEEDS=300:600`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Step = Callable[[Tensor], Tensor]
_SIZES = (
    (5, 8),
    (9, 6),
    (6, 9),
    (2, 7),
    (1, 5),
    (0, 4),
    (7, 2),
    (13, 1),
    (3, 0),
    (64, 33),
    (257, 12),
    (12, 300),
    (8, 8),
)


pytestmark = pytest.mark.usefixtures("sizes_vary")


def _written(x: Tensor, start: int, number: float) -> Tensor:
    """Writes through a window of a copy."""
    y = x.clone()
    y[start:].mul_(number)
    y[:, ::2] += 1
    return y


def _halves(x: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return torch.cat([x[half:], x[:half]])


def _pooled(x: Tensor, window: int) -> Tensor:
    padded = F.pad(x, (window, window))
    return F.avg_pool1d(padded.unsqueeze(0), window, stride=window).squeeze(0)


def _image(x: Tensor) -> Tensor:
    return F.max_pool2d(F.pad(x, (1, 1, 1, 1))[None, None], 2, stride=1)[0, 0]


def _masked(x: Tensor, k: int) -> Tensor:
    return torch.where(torch.arange(x.shape[1], device=x.device) >= x.shape[1] - k, x, x * 0.5)


def _step(r: random.Random) -> Step:
    """One matrix to another, at any two sizes."""
    k, number = r.randint(1, 3), r.choice([0.5, -1.0, 2.0, 0.25])
    steps: list[Step] = [
        lambda x: x * number + k,
        lambda x: x.tanh(),
        lambda x: x.t(),
        lambda x: x[k:],
        lambda x: x[:, :-k],
        lambda x: x[:, ::k],
        lambda x: x.flip(0),
        lambda x: torch.cat([x, x * number], r_dim),
        lambda x: F.pad(x, (k, 0, 0, k), value=number),
        lambda x: x - x.sum(r_dim, keepdim=True),
        lambda x: x.softmax(r_dim),
        lambda x: x @ x.t(),
        lambda x: (x.t() @ x) * 0.1,
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x: _written(x, k, number),
        _halves,
        lambda x: _pooled(x, k),
        _image,
        lambda x: _masked(x, k),
        lambda x: x.cumsum(r_dim) * 0.1,
        lambda x: x.reshape(-1).reshape(x.shape[1], x.shape[0]),
        lambda x: x.unsqueeze(0).expand(2, -1, -1).reshape(-1, x.shape[1]),
        lambda x: x.roll(k, r_dim),
        lambda x: x.tril(k - 2),
        lambda x: x + x.mean() * x.shape[0],
        lambda x: x / (x.shape[1] + 1),
        lambda x: torch.stack([x, -x], 1).flatten(0, 1),
        lambda x: x.index_select(0, torch.arange(x.shape[0], device=x.device).flip(0)),
        lambda x: x.var(r_dim, keepdim=True, correction=0) + x,
    ]
    r_dim = r.randrange(2)
    return r.choice(steps)


def _run(steps: list[Step], x: Tensor) -> Tensor:
    for step in steps:
        x = step(x).clamp(-4, 4)
    return x


def _seeds() -> range:
    first, last = os.environ.get("TORCHLAZY_SIZE_SEEDS", "0:12").split(":")
    return range(int(first), int(last))


@pytest.mark.parametrize("seed", _seeds())
def test_a_chain_at_many_sizes(seed: int) -> None:
    r = random.Random(seed)
    steps = [_step(r) for _ in range(r.randint(2, 6))]
    sizes = list(_SIZES)
    r.shuffle(sizes)
    for size in sizes[:8]:
        values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        try:
            wanted = _run(steps, values)
        except (RuntimeError, IndexError) as refusal:
            with pytest.raises((RuntimeError, IndexError)):
                _run(steps, values.to("lazy")).cpu()
            del refusal
            continue
        for _ in range(2):
            found = _run(steps, values.to("lazy"))
            assert found.shape == wanted.shape and found.stride() == wanted.stride(), size
            torch.testing.assert_close(
                found.cpu(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, s=size: f"{s}: {m}"
            )
