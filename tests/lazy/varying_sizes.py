"""Programs that fit one size to another: levels of pyramids, padding to multiples, windows of attention.

Invariant: as that of `varying_models`. Sizes fit without padding in some calls, and no call is another structure than
the others: torch records no slice of everything.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.lazy.varying_models import at, codes, drawn


class Pyramid(nn.Module):
    """Each level half as large as the one before, rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        total = self.net(x).square().mean()
        for _ in range(2):
            x = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
            total = total + self.net(x).square().mean()
        return total


class Merged(nn.Module):
    """Levels of strided convolutions, each enlarged to the one above it."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(n, 4, 3, 2, 1) for n in (2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for level in self.levels:
            made.append(x := level(x).relu())
        for lower, upper in ((2, 1), (1, 0)):
            made[upper] = made[upper] + F.interpolate(made[lower], size=made[upper].shape[2:], mode="nearest")
        return made[0].square().mean()


class Reconstructed(nn.Module):
    """Halved and doubled, against what of the image that covers."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 4, 2, 1), nn.ConvTranspose2d(4, 2, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x).relu())
        return F.mse_loss(y, x[..., : y.shape[2], : y.shape[3]])


class FilledUp(nn.Module):
    """Tokens filled up to a multiple of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = F.pad(tokens, (0, -tokens.shape[1] % 8))
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten(), ignore_index=0)


class Windows(nn.Module):
    """Attention in shifted windows of four by four patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv = nn.Conv2d(2, 8, 2, 2), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).permute(0, 2, 3, 1)
        batch, tall, wide, width = y.shape
        y = F.pad(y, (0, 0, 0, -wide % 4, 0, -tall % 4)).roll((-2, -2), (1, 2))
        rows, columns = y.shape[1] // 4, y.shape[2] // 4
        y = y.view(batch, rows, 4, columns, 4, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, width)
        q, k, v = self.qkv(y).chunk(3, -1)
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        y = y.view(batch, rows, columns, 4, 4, width).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(batch, 4 * rows, 4 * columns, width).roll((2, 2), (1, 2))
        return y[:, :tall, :wide].square().mean()


ODD = at([(17, 25), (21, 33), (15, 29), (33, 27), (21, 65), (9, 15)])
CROPPED = at([(18, 28), (26, 36), (22, 20), (34, 44), (20, 50), (52, 18)])
LONG = at([9, 20, 5, 16, 33, 8])


def odd(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, 2, 2, *ODD(i)),)


def cropped(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, 2, 2, *CROPPED(i)),)


def tokens(device: str, i: int) -> tuple[Any, ...]:
    return (codes(device, i, 3, LONG(i)),)
