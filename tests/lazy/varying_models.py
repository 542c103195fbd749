"""Programs as people write them, whose sizes or numbers are others at each call.

Invariant: a program is made by `make(device)`, which gives the callable and the arguments of its call number i; what it
computes depends on the seed and on i alone. Sizes of 0 and 1, which have programs of their own, do not occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Play = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]
Make = Callable[[str], Play]


def drawn(device: str, i: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device)


def codes(device: str, i: int, *shape: int, below: int = 20) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(i)).to(device)


def called(module: Callable[[], nn.Module], arguments: Callable[[str, int], tuple[Any, ...]]) -> Make:
    """The module without gradients."""

    def make(device: str) -> Play:
        made = module().to(device).eval()

        def call(*given: Any) -> Any:
            with torch.no_grad():
                return made(*given)

        return call, lambda i: arguments(device, i)

    return make


def trained(module: Callable[[], nn.Module], arguments: Callable[[str, int], tuple[Any, ...]]) -> Make:
    """A whole step: the module gives its loss."""

    def make(device: str) -> Play:
        made = module().to(device)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)

        def step(*given: Any) -> Tensor:
            optimizer.zero_grad()
            loss = made(*given)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, lambda i: arguments(device, i)

    return make


def function(call: Callable[..., Any], arguments: Callable[[str, int], tuple[Any, ...]]) -> Make:
    return lambda device: (call, lambda i: arguments(device, i))


def at(sizes: Sequence[Any]) -> Callable[[int], Any]:
    return lambda i: sizes[i % len(sizes)]


# ---- attention over two lengths


class Attention(nn.Module):
    """Two heads with a bias of relative positions, over itself or over a memory."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.bias = nn.Embedding(8, 2)
        self.causal = causal

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 2, 8).transpose(1, 2)
        k, v = self.kv(memory).view(batch, memory.shape[1], 2, 16).transpose(1, 2).chunk(2, -1)
        scores = q @ k.transpose(2, 3) / math.sqrt(8)
        rows, columns = (torch.arange(n, device=x.device) for n in (length, memory.shape[1]))
        apart = (rows[:, None] - columns).abs()
        near = torch.where(apart < 4, apart, 4 + (apart.clamp(min=1).float() / 4).log2().long()).clamp(max=7)
        scores = scores + self.bias(near).permute(2, 0, 1)
        if self.causal:
            scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 16))


class EncoderDecoder(nn.Module):
    """The loss of a target given a prompt, both with padding (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.encode, self.decode, self.cross = Attention(False), Attention(True), Attention(False)
        self.norm = nn.RMSNorm(16)

    def forward(self, prompt: Tensor, target: Tensor) -> Tensor:
        mask = prompt != 0
        memory = self.embed(prompt)
        memory = memory + self.encode(self.norm(memory), self.norm(memory), mask)
        before = F.pad(target[:, :-1], (1, 0))
        x = self.embed(before)
        x = x + self.decode(self.norm(x), self.norm(x))
        x = x + self.cross(self.norm(x), memory, mask)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


LENGTHS = at([(9, 5), (12, 7), (5, 11), (17, 6), (8, 8), (23, 3), (6, 19)])


def both_lengths(device: str, i: int) -> tuple[Any, ...]:
    a, b = LENGTHS(i)
    return codes(device, i, 3, a), codes(device, i + 100, 3, b)


# ---- recurrent, over time


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).square().mean()


TIMES = at([9, 12, 5, 17, 8, 23, 6])


def over_time(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, 3, TIMES(i), 6),)


def batches(device: str, i: int) -> tuple[Any, ...]:
    return (drawn(device, i, TIMES(i), 4, 6),)


# ---- convolutions over lengths and sizes


class Audio(nn.Module):
    """A stem of strided windows, gated, and a mean over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 8, 10, 5), nn.Conv1d(8, 16, 3, 2, padding=1)
        self.wide, self.norm, self.head = nn.Conv1d(8, 8, 3, padding=2, dilation=2), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.second(F.gelu(self.first(x[:, None]))), 1)
        y = y + self.norm(self.wide(y))
        return self.head(y.mean(2)).square().mean()


AUDIO = at([160, 200, 333, 121, 480, 275, 401])


class UNet(nn.Module):
    """Two levels; what is one smaller at odd sizes is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.down(x))
        low = self.up(F.relu(self.low(F.max_pool2d(high, 2))))
        tall, wide = high.shape[2] - low.shape[2], high.shape[3] - low.shape[3]
        return self.last(torch.cat([high, F.pad(low, [wide // 2, wide - wide // 2, tall // 2, tall - tall // 2])], 1))


class UNetLoss(UNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


IMAGES = at([(16, 24), (20, 32), (17, 29), (33, 26), (21, 64), (9, 15), (30, 11)])


def images(sizes: Callable[[int], Any] = IMAGES, channels: int = 2) -> Callable[[str, int], tuple[Any, ...]]:
    return lambda device, i: (drawn(device, i, 2, channels, *sizes(i)),)


class Patches(nn.Module):
    """A vision transformer whose positions are stretched over the patches there are."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.patch, self.mode = nn.Conv2d(2, 16, 4, 4), mode
        self.positions = nn.Parameter(torch.randn(1, 16, 4, 4))
        self.token, self.mix, self.head = nn.Parameter(torch.randn(1, 1, 16)), Attention(False), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x)
        y = y + F.interpolate(self.positions, size=y.shape[2:], mode=self.mode, align_corners=False)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y.flatten(2).transpose(1, 2)], 1)
        return self.head((y + self.mix(y, y))[:, 0]).square().mean()


VIEWS = at([(16, 24), (24, 20), (32, 28), (20, 40), (28, 12), (12, 16), (36, 24)])


class Segments(nn.Module):
    """Coarse logits, enlarged to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, 2, 1), nn.Conv2d(8, 5, 3, 2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        coarse = self.second(F.relu(self.first(x)))
        return F.cross_entropy(F.interpolate(coarse, labels.shape[1:], mode="bilinear"), labels, ignore_index=0)


def segments(device: str, i: int) -> tuple[Any, ...]:
    return drawn(device, i, 2, 2, *IMAGES(i)), codes(device, i, 2, *IMAGES(i), below=5)


# ---- graphs, points


class Graphs(nn.Module):
    """Messages along edges, summed and at most; a mean for each graph of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(8, 4), nn.Linear(12, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges
        sent = F.relu(self.message(torch.cat([x[source], x[target]], 1)))
        total = torch.zeros_like(x).index_add(0, target, sent)
        most = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand(-1, 4), sent, "amax")
        x = self.update(torch.cat([x, total, most], 1)).tanh()
        count = torch.zeros(3, device=x.device).index_add(0, graph, torch.ones_like(x[:, 0]))
        pooled = torch.zeros(3, 4, device=x.device).index_add(0, graph, x) / count.clamp(min=1)[:, None]
        return self.head(pooled).square().mean()


COUNTS = at([(9, 20), (12, 31), (7, 25), (20, 17), (11, 50), (15, 15), (5, 40)])


def graphs(device: str, i: int) -> tuple[Any, ...]:
    nodes, edges = COUNTS(i)
    graph = codes("cpu", i, nodes, below=3).sort()[0].to(device)
    return drawn(device, i, nodes, 4), codes(device, i, 2, edges, below=nodes), graph


def neighbours(x: Tensor) -> Tensor:
    """The three nearest of a cloud of points, and the farthest of these."""
    near = torch.cdist(x, x).topk(4, largest=False)[1][:, 1:]
    return (x[near] - x[:, None]).norm(dim=2).amax(1)


# ---- detection


def overlaps(boxes: Tensor) -> Tensor:
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return shared / (area[:, None] + area - shared)


def suppressed(boxes: Tensor, scores: Tensor) -> Tensor:
    """Boxes that no better one covers, their scores, and 0 for the others: fixed rounds, no value is looked at."""
    order = scores.argsort(descending=True)
    boxes, scores = boxes[order], scores[order]
    over = (overlaps(boxes) > 0.3).triu(1)
    keep = torch.ones_like(scores, dtype=torch.bool)
    for _ in range(3):
        keep = ~(over & keep[:, None]).any(0)
    return (scores * keep).topk(4)[0]


def kept_boxes(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """As many as are above the threshold."""
    boxes = boxes[scores > 0.3]
    keep = ~(overlaps(boxes) > 0.3).triu(1).any(0)
    return boxes[keep] * 2, keep


def detected(device: str, i: int) -> tuple[Any, ...]:
    corner = drawn("cpu", i, COUNTS(i)[1], 2).abs() * 3
    boxes = torch.cat([corner, corner + 1 + drawn("cpu", i + 1, COUNTS(i)[1], 2).abs()], 1)
    return boxes.to(device), torch.rand(COUNTS(i)[1], generator=torch.Generator().manual_seed(i)).to(device)


# ---- decoding


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), Attention(True), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.mix(x, x))


class Beams(Language):
    """One step of a search: the best three of all continuations, and the rows that they continue."""

    def forward(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)[:, -1].log_softmax(-1)
        scores, best = (scores[:, None] + logits).flatten().topk(3)
        return torch.cat([tokens[best // 20], (best % 20)[:, None]], 1), scores


class Samples(Language):
    """The token at a given height of the cumulated probabilities, of the likeliest k, and of those up to p."""

    def forward(self, tokens: Tensor, k: int, p: float, temperature: float, height: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens)[:, -1] / temperature
        logits = logits.masked_fill(logits < logits.topk(k)[0][:, -1:], float("-inf"))
        sorted_logits, order = logits.sort(descending=True)
        passed = sorted_logits.softmax(-1).cumsum(-1) - sorted_logits.softmax(-1) > p
        logits = logits.masked_fill(torch.zeros_like(passed).scatter(1, order, passed), float("-inf"))
        return torch.cat([tokens, (logits.softmax(-1).cumsum(-1) < height).sum(-1, keepdim=True)], 1)


def samples(device: str, i: int) -> tuple[Any, ...]:
    height = torch.rand(3, 1, generator=torch.Generator().manual_seed(i)).to(device)
    return codes(device, i, 3, TIMES(i)), at([3, 5, 4, 6, 9, 7, 8])(i), 0.6 + 0.03 * i, 0.7 + 0.11 * i, height


def searched(device: str) -> Play:
    """A whole search, by steps: what a step returns is the next one's argument."""
    model = Beams().to(device).eval()
    kept = [codes(device, 0, 3, 4), torch.zeros(3).to(device)]

    @torch.no_grad()
    def step(tokens: Tensor, scores: Tensor) -> Any:
        kept[:] = model(tokens, scores)
        return tuple(kept)

    return step, lambda i: tuple(kept)


def accepted(draft: Tensor, logits: Tensor) -> Tensor:
    """The tokens of a draft up to the first that the model would not have chosen, and its own there."""
    chosen = logits.argmax(-1)
    right = int((chosen[:-1] == draft).long().cumprod(0).sum())
    return torch.cat([draft[:right], chosen[right : right + 1]])


def speculated(device: str, i: int) -> tuple[Any, ...]:
    logits, right = drawn("cpu", i, 12, 20), at([3, 5, 2, 7, 4, 9, 6])(i)
    draft = logits.argmax(-1)[:-1]
    draft[right] += 1
    return draft.to(device), logits.to(device)


# ---- losses over batches that vary


class Contrastive(nn.Module):
    """Pairs of two views, each against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(6, 8), nn.Linear(6, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits = self.scale.exp() * F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T
        labels = torch.arange(a.shape[0], device=a.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def views(device: str, i: int) -> tuple[Any, ...]:
    return drawn(device, i, TIMES(i), 6), drawn(device, i + 1, TIMES(i), 6)


class Policy(nn.Module):
    """A rollout of any length: discounted sums, advantages, a clipped surrogate."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.value = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, states: Tensor, actions: Tensor, rewards: Tensor, old: Tensor, discount: float) -> Tensor:
        steps = torch.arange(rewards.shape[0], device=rewards.device)
        ahead = (steps - steps[:, None]).clamp(min=0)
        returns = (discount**ahead).triu() @ rewards
        values = self.value(states)[:, 0]
        advantage = returns - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        chances = self.act(states).log_softmax(-1)
        ratio = (chances.gather(1, actions[:, None])[:, 0] - old).exp()
        gained = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.mse_loss(values, returns) - gained - 0.01 * (chances.exp() * -chances).sum(-1).mean()


def rollout(device: str, i: int) -> tuple[Any, ...]:
    n = TIMES(i)
    return (drawn(device, i, n, 6), codes(device, i, n, below=3), drawn(device, i + 1, n), drawn(device, i + 2, n) - 1,
            0.9 + 0.01 * i)  # fmt: skip


class Replayed(nn.Module):
    """A buffer that is filled a row after another, from the beginning again when it is full, and drawn from."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(places, 6))
        self.places, self.position, self.count = places, 3, 3
        self.value = nn.Linear(6, 1)

    def forward(self, new: Tensor, share: Tensor) -> Tensor:
        self.rows[self.position] = new
        self.position = (self.position + 1) % self.places
        self.count = min(self.count + 1, self.places)
        return self.value(self.rows[(share * self.count).long()]).square().mean()


def one_row(device: str, i: int) -> tuple[Any, ...]:
    return drawn(device, i, 6), torch.rand(5, generator=torch.Generator().manual_seed(i)).to(device)
