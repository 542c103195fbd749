"""Hand-written models whose outputs have a structure: chains, alignments, graphs, trees, sets, memories, decoders.

Invariant: every length, edge and target is drawn with the batch, and in range.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.case import Batch, Case

_TAGS, _WORDS = 4, 20


class ChainField(nn.Module):
    """A linear-chain conditional random field over an LSTM; in eval mode its loss is that of the best path."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, 8)
        self.reader = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.score = nn.Linear(8, _TAGS)
        self.moves = nn.Parameter(0.1 * torch.randn(_TAGS, _TAGS))

    def forward(self, x: torch.Tensor, tags: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        emitted = self.score(self.reader(self.embed(x))[0])
        total, path = emitted[:, 0], emitted[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for step in range(1, x.shape[1]):
            alive = keep[:, step, None]
            reached = total[:, :, None] + self.moves + emitted[:, step, None]
            best = torch.logsumexp(reached, 1) if self.training else reached.max(1).values
            total = torch.where(alive, best, total)
            gain = self.moves[tags[:, step - 1], tags[:, step]] + emitted[:, step].gather(1, tags[:, step, None])[:, 0]
            path = path + gain * alive[:, 0]
        return ((torch.logsumexp(total, 1) if self.training else total.amax(1)) - path).mean()


def _tagged() -> Batch:
    lengths = torch.randint(3, 7, (4,))
    keep = torch.arange(6) < lengths[:, None]
    return {"x": torch.randint(0, _WORDS, (4, 6)), "tags": torch.randint(0, _TAGS, (4, 6)), "keep": keep}


class SpeechReader(nn.Module):
    """Convolutions and a GRU over frames, for a CTC loss over labels of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, 12, 3, 2, 1)
        self.norm = nn.BatchNorm1d(12)
        self.reader = nn.GRU(12, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.reader(F.gelu(self.norm(self.first(x))).transpose(1, 2))[0]).log_softmax(-1)


def _spoken() -> Batch:
    return {"x": torch.randn(3, 6, 24), "labels": torch.randint(1, 5, (3, 4)), "lengths": torch.randint(1, 5, (3,))}


def _ctc(model: nn.Module, batch: Batch) -> torch.Tensor:
    log = model(batch["x"]).transpose(0, 1)
    frames = torch.full((3,), log.shape[0], dtype=torch.long)
    return F.ctc_loss(log, batch["labels"], frames, batch["lengths"], zero_infinity=True)


class PackedReader(nn.Module):
    """An LSTM over packed sequences, the last states classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, 8, padding_idx=0)
        self.cells = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(x), torch.tensor([6, 5, 3]), batch_first=True)
        outputs, (last, _) = self.cells(packed)
        padded, lengths = pad_packed_sequence(outputs, batch_first=True)
        mean = padded.sum(1) / lengths.to(padded.device)[:, None]
        return self.head(torch.cat([last[-1], mean], -1))


class GraphAttention(nn.Module):
    """Two rounds of attention over edges: the softmax of each node's edges by scatter_reduce and index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False)])
        self.scores = nn.ParameterList([0.3 * torch.randn(2, 8), 0.3 * torch.randn(2, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer, score in zip(self.layers, self.scores, strict=True):
            h = layer(x)
            weight = F.leaky_relu((h * score[0]).sum(-1)[source] + (h * score[1]).sum(-1)[target], 0.2)
            top = weight.new_full((len(x),), -1e9).scatter_reduce(0, target, weight, "amax")
            weight = torch.exp(weight - top[target])
            total = weight.new_zeros(len(x)).index_add_(0, target, weight)
            sent = h[source] * (weight / (total[target] + 1e-9))[:, None]
            x = F.elu(torch.zeros_like(h).index_add(0, target, sent) + h)
        return self.head(x)


def _citations() -> Batch:
    return {"x": torch.randn(8, 4), "edges": torch.randint(0, 8, (2, 24)), "y": torch.randint(0, 3, (8,))}


class TreeCells(nn.Module):
    """A recursive network over a tree that Python walks."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join, self.head = nn.Linear(4, 8), nn.Linear(16, 16), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self._state(x, 0, x.shape[1]))

    def _state(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if stop - start == 1:
            return torch.tanh(self.leaf(x[:, start]))
        middle = (2 * start + stop + 1) // 3 if stop - start > 2 else start + 1
        both = self.join(torch.cat([self._state(x, start, middle), self._state(x, middle, stop)], -1))
        value, gate = both.chunk(2, -1)
        return torch.tanh(value) * torch.sigmoid(gate)


class SetDetector(nn.Module):
    """DETR: image features, learned queries through a decoder, boxes matched to targets by the least distance."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 16, 4, 4)
        self.queries = nn.Parameter(torch.randn(5, 16))
        layer = nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.kind, self.box = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.features(x).flatten(2).transpose(1, 2)
        found = self.decoder(self.queries.expand(len(x), -1, -1), memory)
        return self.kind(found), self.box(found).sigmoid()


def _scenes() -> Batch:
    return {"x": torch.randn(2, 3, 8, 8), "boxes": torch.rand(2, 3, 4), "kinds": torch.randint(0, 3, (2, 3))}


def _matched(model: nn.Module, batch: Batch) -> torch.Tensor:
    kinds, boxes = model(batch["x"])
    with torch.no_grad():
        chance = kinds.softmax(-1).gather(2, batch["kinds"][:, None].expand(-1, 5, -1))
        cost = torch.cdist(boxes, batch["boxes"], p=1) - chance
        nearest = cost.argmin(1)  # of each target, one of the queries
    rows = torch.arange(2, device=nearest.device)[:, None]
    wanted = torch.full(kinds.shape[:2], 3, device=kinds.device)
    wanted[rows.expand_as(nearest)[:, :1], nearest[:, :1]] = batch["kinds"][:, :1]
    weight = torch.tensor([1.0, 1.0, 1.0, 0.2], device=kinds.device)
    return F.cross_entropy(kinds.transpose(1, 2), wanted, weight) + F.l1_loss(boxes[rows, nearest], batch["boxes"])


class Decoder(nn.Module):
    """A causal transformer with a cache that is written in place; in eval mode it decodes by a beam of two."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(_WORDS, width), nn.Embedding(12, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, _WORDS)

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None, start: int = 0) -> torch.Tensor:
        h = self.embed(x) + self.places.weight[start : start + x.shape[1]]
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(h).chunk(3, -1))
        if cache is None:
            read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            cache[0, :, :, start : start + x.shape[1]] = key
            cache[1, :, :, start : start + x.shape[1]] = value
            filled = cache[:, :, :, : start + x.shape[1]]
            read = F.scaled_dot_product_attention(query, filled[0], filled[1])
        return self.head(h + self.out(read.transpose(1, 2).flatten(2)))


def _decoding(model: nn.Module, batch: Batch) -> torch.Tensor:
    if model.training:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
    text, score = batch["x"][:1, :1].expand(2, 1), torch.tensor([0.0, -1e9], device=batch["x"].device)
    cache = torch.zeros(2, 2, 2, 8, 8, device=batch["x"].device)
    for step in range(6):
        log = model(text[:, -1:], cache, step)[:, -1].log_softmax(-1) + score[:, None]
        score, best = log.flatten().topk(2)
        parents = best // _WORDS
        text = torch.cat([text[parents], (best % _WORDS)[:, None]], 1)
        cache[:, :, :, : step + 1] = cache[:, parents][:, :, :, : step + 1]
    return score.amax() + 0.0 * text.sum()


def _lines() -> Batch:
    text = torch.randint(0, _WORDS, (3, 8))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def _sentences() -> Batch:
    text = torch.randint(1, _WORDS, (3, 6))
    text[1, 5:], text[2, 3:] = 0, 0
    return {"x": text, "y": torch.randint(0, 3, (3,))}


CASES = (
    Case("chain_field", ChainField, _tagged, lambda m, b: m(b["x"], b["tags"], b["keep"])),
    Case("speech_ctc", SpeechReader, _spoken, _ctc),
    Case("packed_lstm", PackedReader, _sentences, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])),
    Case("graph_attention", GraphAttention, _citations, lambda m, b: F.cross_entropy(m(b["x"], b["edges"]), b["y"])),
    Case(
        "tree_cells", TreeCells, lambda: {"x": torch.randn(3, 6, 4), "y": torch.randint(0, 3, (3,))},
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
    ),
    Case("set_detector", SetDetector, _scenes, _matched),
    Case("decoder_beam", Decoder, _lines, _decoding),
)  # fmt: skip
