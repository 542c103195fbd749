"""A small character-level GPT and the text it reads: the top-level source files of Python's own standard library.

Invariant: the alphabet is fixed and the files are read in sorted order, so one Python version gives one data set.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # 96 characters: a multiple of 8 keeps the last product aligned
CODES = {character: code for code, character in enumerate(ALPHABET)}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `dropout` is used on embeddings, attention weights and both residual branches."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    block: int = 128
    dropout: float = 0.1
    vocabulary: int = len(ALPHABET)


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each after its norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same, each position reading only those before it."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.attention_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and an output layer that shares the token embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._init_weights)
        for block in self.blocks:  # residual branches start small, so that depth does not grow the stream
            nn.init.normal_(block.proj.weight, std=0.02 / (2 * config.layers) ** 0.5)
            nn.init.normal_(block.mlp[2].weight, std=0.02 / (2 * config.layers) ** 0.5)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, codes: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits for every position and, with `targets`, the mean cross-entropy."""
        positions = torch.arange(codes.shape[1], device=codes.device)
        x = self.dropout(self.tokens(codes) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay matrices, spare biases and norms; a tied weight is named once."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def read_library_source(limit: int = 2_000_000) -> Tensor:
    """The first `limit` characters of the standard library's top-level modules, in name order, as codes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    if not files:
        raise FileNotFoundError(f"no Python source files in {folder}: this Python has a zipped or stripped library")
    codes: list[int] = []
    for path in files:
        codes += [CODES[c] for c in path.read_text(encoding="utf-8", errors="ignore") if c in CODES]
        if len(codes) >= limit:
            break
    return torch.tensor(codes[:limit], dtype=torch.int64)


def random_batch(data: Tensor, batch: int, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`batch` random windows of `block` codes, and the same windows one position later."""
    starts = torch.randint(len(data) - block - 1, (batch, 1), generator=generator)
    index = starts + torch.arange(block)
    return data[index], data[index + 1]


def decode(codes: list[int]) -> str:
    return "".join(ALPHABET[code] for code in codes)
