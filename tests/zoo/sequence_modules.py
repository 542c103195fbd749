"""Hand-written models of sequences, graphs and tables: recurrent cells, attention, scatter, routing, embedding bags.

Invariant: every index is in range and drawn with the batch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Batch, Case

_WORDS = 20


def words(count: int = 3, length: int = 7) -> Batch:
    """Sequences of word numbers, and the next words."""
    text = torch.randint(0, _WORDS, (count, length + 1))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def next_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next words."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


class LstmLanguageModel(nn.Module):
    """Two LSTM layers and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, 12)
        self.cells = nn.LSTM(12, 12, 2, batch_first=True)
        self.head = nn.Linear(12, _WORDS)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.embed(x))[0])


class GruSeq2Seq(nn.Module):
    """A bidirectional GRU reads; a GRU cell writes, attending to what was read and is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, 8)
        self.reader = nn.GRU(8, 4, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(16, 8)
        self.score = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, _WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, last = self.reader(self.embed(source))
        state = torch.cat([last[0], last[1]], -1)
        keep = source != 0
        outputs = []
        for word in self.embed(target).unbind(1):
            weights = torch.bmm(self.score(memory), state[:, :, None]).squeeze(-1)
            weights = weights.masked_fill(~keep, float("-inf")).softmax(-1)
            context = torch.bmm(weights[:, None], memory).squeeze(1)
            state = self.cell(torch.cat([word, context], -1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


def _translation() -> Batch:
    source = torch.randint(1, _WORDS, (3, 6))
    source[0, 4:] = 0
    return {"source": source, **words(3, 5)}


class GraphNet(nn.Module):
    """Two rounds of messages: mean by index_add, maximum by scatter_reduce; the graph is pooled with scatter_add."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.message1, self.message2 = nn.Linear(2 * 4, width), nn.Linear(2 * width, width)
        self.update = nn.Linear(4 + width, width)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        source, target = edges
        sent = F.relu(self.message1(torch.cat([x[source], x[target]], -1)))
        total = x.new_zeros(len(x), sent.shape[1]).index_add(0, target, sent)
        degree = torch.zeros(len(x), device=x.device).scatter_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        x = torch.tanh(self.update(torch.cat([x, total / degree.clamp(min=1)[:, None]], -1)))
        sent = self.message2(torch.cat([x[source], x[target]], -1))
        best = x.new_zeros(x.shape).scatter_reduce(0, target[:, None].expand_as(sent), sent, "amax")
        both = torch.cat([x, best], -1)
        pooled = both.new_zeros(2, both.shape[1])
        pooled.scatter_add_(0, graph[:, None].expand_as(both), both)
        return self.head(pooled)


def _graphs() -> Batch:
    return {
        "x": torch.randn(9, 4),
        "edges": torch.randint(0, 9, (2, 20)),
        "graph": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1]),
        "y": torch.randint(0, 3, (2,)),
    }


class ClickModel(nn.Module):
    """DLRM: bags of categories, dense features, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(30, 8, mode=mode) for mode in ("sum", "mean", "sum")])
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, codes: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        low = self.bottom(dense)
        found = [bag(codes[i], starts) for i, bag in enumerate(self.bags)]
        all_of_them = torch.stack([low, *found], 1)
        products = torch.bmm(all_of_them, all_of_them.transpose(1, 2))
        rows, columns = torch.triu_indices(4, 4, 1, device=dense.device)
        return self.top(torch.cat([low, products[:, rows, columns]], 1)).squeeze(1)


def _clicks() -> Batch:
    return {
        "dense": torch.randn(4, 5),
        "codes": torch.randint(0, 30, (3, 10)),
        "starts": torch.tensor([0, 3, 5, 9]),
        "y": torch.randint(0, 2, (4,)).float(),
    }


class Experts(nn.Module):
    """A mixture of experts: every token goes to its best two, found by boolean masks (their counts depend on data)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, width)
        self.router = nn.Linear(width, 4)
        make = lambda: nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, width))  # noqa: E731
        self.experts = nn.ModuleList([make() for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        flat = self.norm(h).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, weights[rows, ranks, None] * expert(flat[rows]))
        return self.head(h + out.view_as(h))


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates, residuals and skips."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.dilated = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(3)])
        self.residual = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(3)])
        self.head = nn.Conv1d(width, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for depth, (conv, mix) in enumerate(zip(self.dilated, self.residual, strict=True)):
            signal, gate = conv(F.pad(x, (2**depth, 0))).chunk(2, 1)
            y = mix(torch.tanh(signal) * torch.sigmoid(gate))
            skips.append(y)
            x = x + y
        return self.head(F.relu(sum(skips)))


def _sound() -> Batch:
    return {"x": torch.randn(2, 1, 16), "y": torch.randint(0, 10, (2, 16))}


class Translator(nn.Module):
    """`nn.Transformer` with a causal mask and padding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, width)
        self.body = nn.Transformer(width, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(width, _WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = torch.zeros_like(source, dtype=torch.float32).masked_fill(source == 0, float("-inf"))
        out = self.body(
            self.embed(source), self.embed(target), tgt_mask=causal, src_key_padding_mask=padding, tgt_is_causal=True
        )
        return self.head(out)


def _translate(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["source"], batch["x"]).transpose(1, 2), batch["y"], label_smoothing=0.1)


CASES = (
    Case("lstm_language_model", LstmLanguageModel, words, next_words),
    Case("gru_seq2seq_attention", GruSeq2Seq, _translation, _translate),
    Case(
        "gnn_scatter", GraphNet, _graphs,
        lambda m, b: F.cross_entropy(m(b["x"], b["edges"], b["graph"]), b["y"]),
    ),
    Case(
        "dlrm_embedding_bag", ClickModel, _clicks,
        lambda m, b: F.binary_cross_entropy_with_logits(m(b["dense"], b["codes"], b["starts"]), b["y"]),
    ),
    Case("mixture_of_experts", Experts, words, next_words),
    Case("wavenet", WaveNet, _sound, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])),
    Case("transformer_encoder_decoder", Translator, _translation, _translate),
)  # fmt: skip
