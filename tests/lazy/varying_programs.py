"""Ragged and data-dependent batches, numbers and steps that vary; the table of all such programs.

Invariant: as that of `varying_models`; each row of the table says how many programs may be compiled, on the lazy device
and by `torchlazy.compile`. That is two for each graph into which a call is cut: at the first sizes, and once for all
others; ragged lists are another structure for each place of the longest, optimizers another at their first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lazy.varying_models import (
    AUDIO,
    COUNTS,
    IMAGES,
    TIMES,
    VIEWS,
    Audio,
    Contrastive,
    EncoderDecoder,
    Graphs,
    Language,
    Make,
    Patches,
    Play,
    Policy,
    Recurrent,
    Replayed,
    Samples,
    Segments,
    UNetLoss,
    accepted,
    at,
    both_lengths,
    called,
    codes,
    detected,
    drawn,
    function,
    graphs,
    images,
    kept_boxes,
    neighbours,
    one_row,
    over_time,
    rollout,
    samples,
    searched,
    segments,
    speculated,
    suppressed,
    trained,
    views,
)
from tests.lazy.varying_sizes import FilledUp, Merged, Pyramid, Reconstructed, Windows, cropped, odd, tokens

# ---- ragged batches


class Bags(nn.Module):
    """Means of bags of words, each of its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 1)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets)).square().mean()


def bags(device: str, i: int) -> tuple[Any, ...]:
    words = COUNTS(i)[1]
    return codes(device, i, words), torch.tensor([0, 3, 4 + i, 4 + i, words - 3]).to(device)


class Ragged(nn.Module):
    """Sequences of a list, padded, embedded together, cut apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, parts: list[Tensor]) -> Tensor:
        lengths = [part.shape[0] for part in parts]
        joined = self.embed(torch.cat(parts)).tanh()
        pooled = torch.stack([part.mean(0) for part in joined.split(lengths)])
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return self.head(pooled).square().mean() + padded.square().mean()


def ragged(device: str, i: int) -> tuple[Any, ...]:
    a, b = COUNTS(i)
    return ([drawn(device, i, n, 6) for n in (a, b, a + 3 + i)],)


class Masked(Language):
    """The loss at the tokens that are hidden, however many there are."""

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens.masked_fill(hidden, 0))
        return F.cross_entropy(logits[hidden], tokens[hidden])


def masked(device: str, i: int) -> tuple[Any, ...]:
    tokens = codes("cpu", i, 3, TIMES(i))
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(i)) < 0.4
    hidden[:, 1] = True
    return tokens.to(device), hidden.to(device)


class Routed(nn.Module):
    """Two experts, each given the rows that a router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        chance, chosen = chances.max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero()[:, 0]
            made = made.index_add(0, where, expert(x[where]) * chance[where, None])
        return made.square().mean()


def routed(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, 3 * TIMES(i), 6),)


def distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    """A mean for each distinct code."""
    found, where, count = x.unique(return_inverse=True, return_counts=True)
    total = torch.zeros_like(count, dtype=torch.float32).index_add(0, where, x.float().sqrt())
    return found * 2, total / count


def above(x: Tensor) -> Tensor:
    chosen = x[x > 0]
    return (chosen - chosen.mean()).cumsum(0)


def written(x: Tensor) -> Tensor:
    made = x.clone()
    made[x > 0.5] *= 2
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return made.sum(1) + rows.sum()


# ---- numbers that vary


def noisy(x: Tensor, p: float) -> Tensor:
    """1 where what is kept is scaled as it should be."""
    kept = F.dropout(x * 0 + 1, p)
    return ((kept == 0) | ((kept * (1 - p) - 1).abs() < 1e-5)).float().mean(0)


class Denoiser(nn.Module):
    """Some steps of a sampler in a loop of Python, at any size and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, time: int, guidance: float) -> Tensor:
        waves = torch.exp(torch.arange(2, device=x.device) * -1.5) * time
        for part in range(2):
            noise = self.net(x + waves.sin()[:, None, None])
            x = x - guidance / (part + 1) * noise
        return x


def scheduled(device: str) -> Play:
    """AdamW under a cosine schedule and a clip, over batches that vary."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    return step, lambda i: (drawn(device, i, TIMES(i), 6), codes(device, i, TIMES(i), below=3))


def accumulated(device: str) -> Play:
    """Three batches a step, of which the last is smaller."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        for part, wanted in zip(x.split(8), labels.split(8), strict=True):
            loss = F.cross_entropy(model(part), wanted, reduction="sum") / x.shape[0]
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    sizes = at([18, 19, 21, 20, 22, 23, 18])
    return step, lambda i: (drawn(device, i, sizes(i), 6), codes(device, i, sizes(i), below=3))


def last_smaller(device: str) -> Play:
    """An epoch of equal batches and a last one that is smaller, each epoch's another; a step of its own for each."""
    model = nn.Linear(6, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    sizes = at([8, 8, 5, 8, 8, 3, 8, 8, 6])
    return step, lambda i: (drawn(device, i, sizes(i), 6), codes(device, i, sizes(i), below=3))


def diffusion(device: str, i: int) -> tuple[Any, ...]:
    return drawn(device, i, 2, 2, *IMAGES(i)), 900 - 37 * i, 0.11 + 0.07 * i


def windows(x: Tensor) -> Tensor:
    """Windows of a series and what comes after each."""
    seen = x.unfold(0, 4, 1)[:-1]
    return ((seen.mean(1) - x[4:]) ** 2).cumsum(0)


def listed(device: str, i: int) -> tuple[Any, ...]:
    return drawn(device, i, 3, TIMES(i)), drawn(device, i + 1, 3, TIMES(i)).abs() + 0.1


def sounds(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, 2, AUDIO(i)),)


def edges(*shape: int) -> Callable[[str, int], tuple[Any, ...]]:
    """As many rows as a graph has edges."""
    return lambda device, i: (drawn(device, i, COUNTS(i)[1], *shape),)


# name: program, programs on the lazy device, programs of torchlazy.compile
TABLE: dict[str, tuple[Make, int, int]] = {
    "encoder-decoder, trained": (trained(EncoderDecoder, both_lengths), 2, 2),
    "audio, trained": (trained(Audio, sounds), 2, 2),
    "U-Net at odd sizes, trained": (trained(UNetLoss, images()), 2, 2),
    "patches, bicubic": (called(lambda: Patches("bicubic"), images(VIEWS)), 2, 2),
    "segments, trained": (trained(Segments, segments), 2, 2),
    "pyramid, trained": (trained(Pyramid, images()), 2, 2),
    "merged levels, trained": (trained(Merged, images()), 2, 2),
    "reconstructed, trained": (trained(Reconstructed, odd), 2, 2),
    "filled up, trained": (trained(FilledUp, tokens), 2, 2),
    "windows, trained": (trained(Windows, cropped), 2, 2),
    "graphs, trained": (trained(Graphs, graphs), 2, 2),
    "neighbours": (function(neighbours, lambda device, i: (drawn(device, i, TIMES(i), 3),)), 2, 2),
    "suppressed boxes": (function(suppressed, detected), 2, 2),
    "kept boxes": (function(kept_boxes, detected), 6, 6),
    "a whole search": (searched, 2, 2),
    "top-k and top-p": (called(Samples, samples), 2, 2),
    "accepted draft": (function(accepted, speculated), 4, 4),
    "contrastive, trained": (trained(Contrastive, views), 2, 2),
    "rollout, trained": (trained(Policy, rollout), 2, 2),
    "replay buffer, trained": (trained(lambda: Replayed(24), one_row), 2, 2),
    "bags, trained": (trained(Bags, bags), 2, 2),
    "ragged list, trained": (trained(Ragged, ragged), 4, 4),
    "masked tokens, trained": (trained(Masked, masked), 6, 2),
    "routed experts": (called(Routed, routed), 6, 6),
    "distinct codes": (function(distinct, lambda device, i: (codes(device, i, COUNTS(i)[1], below=12),)), 2, 2),
    "chosen values": (function(above, edges()), 4, 4),
    "written where a mask says": (function(written, edges(3)), 8, 6),
    "dropout": (function(noisy, lambda device, i: (drawn(device, i, 6, TIMES(i)), 0.11 + 0.083 * i)), 2, 2),
    "denoiser": (called(Denoiser, diffusion), 2, 2),
    "scheduled optimizer": (scheduled, 3, 3),
    "accumulated gradients": (accumulated, 2, 2),
    "a last smaller batch": (last_smaller, 2, 2),
}
ONLY_COMPILED: dict[str, tuple[Make, int]] = {  # on the lazy device LSTMs are a chain of steps, another at each length
    "LSTM over lengths": (called(lambda: Recurrent(nn.LSTM), over_time), 2),
    "LSTM over lengths, trained": (trained(lambda: Recurrent(nn.LSTM), over_time), 2),
}
