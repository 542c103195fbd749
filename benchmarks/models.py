"""The models that the training table measures: random weights, fixed inputs, sizes of DESIGN's table.

Invariant: a job is built from a seed alone, so every way of running it starts from the same weights and reads the same
batch. timm and transformers are imported when one of their models is built: the GPT example needs neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tiny_gpt import GPT, GPTConfig

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Job:
    """`build()` makes the model, `inputs(batch)` the arguments of its call and the targets, `logits(output)` picks
    (rows, classes) from what the model returns."""

    name: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Tensor, ...], Tensor]]
    logits: Callable[[Any], Tensor]
    about: str

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """Cross-entropy in float32, as training scripts write it."""
        return F.cross_entropy(self.logits(output).float(), targets)


def _optional(name: str) -> Any:
    """A package that only some jobs need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed: pip install -c constraints.txt '.[bench]'") from error


def _image_model(name: str) -> Callable[[], nn.Module]:
    return lambda: _optional("timm").create_model(name, pretrained=False, num_classes=1000)


def _images(batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
    return (torch.randn(batch, 3, 224, 224),), torch.randint(1000, (batch,))


def _tokens(vocabulary: int, length: int) -> Callable[[int], tuple[tuple[Tensor, ...], Tensor]]:
    def inputs(batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
        codes = torch.randint(vocabulary, (batch, length))
        return (codes,), torch.randint(vocabulary, (batch * length,))

    return inputs


def _masked_tokens(vocabulary: int, length: int) -> Callable[[int], tuple[tuple[Tensor, ...], Tensor]]:
    """As a tokenizer hands them over: with a mask, here of ones."""

    def inputs(batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
        (codes,), targets = _tokens(vocabulary, length)(batch)
        return (codes, torch.ones_like(codes)), targets

    return inputs


def _bert() -> nn.Module:
    transformers = _optional("transformers")
    return transformers.BertForMaskedLM(transformers.BertConfig())


def _gpt2() -> nn.Module:
    transformers = _optional("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def _llama() -> nn.Module:
    transformers = _optional("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=16, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    transformers = _optional("transformers")
    return transformers.T5ForConditionalGeneration(transformers.T5Config(use_cache=False, decoder_start_token_id=0))


def _text_pairs(vocabulary: int, length: int) -> Callable[[int], tuple[tuple[Tensor, ...], Tensor]]:
    """The encoder's tokens and mask, and the decoder's tokens."""

    def inputs(batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
        given, targets = _masked_tokens(vocabulary, length)(batch)
        return (*given, torch.randint(vocabulary, (batch, length))), targets

    return inputs


def _rows(output: Any) -> Tensor:
    return output.logits.flatten(0, 1)


GPT_SIZES = GPTConfig(layers=12, heads=12, width=768, block=512)

JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        Job(
            "gpt_example",
            8,
            lambda: GPT(GPT_SIZES),
            _tokens(GPT_SIZES.vocabulary, GPT_SIZES.block),
            lambda output: output[0].flatten(0, 1),
            "examples/tiny_gpt.py, 12 layers x 768, block 512, dropout 0.1",
        ),
        Job("resnet50", 64, _image_model("resnet50"), _images, lambda output: output, "timm, 224 x 224"),
        Job("bert", 16, _bert, _masked_tokens(30522, 512), _rows, "transformers, base, masked LM, length 512"),
        Job("gpt2", 8, _gpt2, _tokens(50257, 512), _rows, "transformers, small, length 512"),
        Job("llama", 4, _llama, _tokens(32000, 1024), _rows, "transformers, 16 layers x 1024, length 1024"),
        Job("t5", 8, _t5, _text_pairs(32128, 512), _rows, "transformers, small, both lengths 512"),
        Job("vit", 64, _image_model("vit_base_patch16_224"), _images, lambda output: output, "timm, base, 224 x 224"),
        Job("convnext", 64, _image_model("convnext_tiny"), _images, lambda output: output, "timm, tiny, 224 x 224"),
        Job("mobilenet", 128, _image_model("mobilenetv3_large_100"), _images, lambda output: output, "timm, 224 x 224"),
    )
}
DEFAULT_JOBS = ("gpt_example", "resnet50", "bert", "gpt2", "vit")


def small_gpt_job() -> Job:
    """The demo's own sizes, for a machine without a GPU."""
    sizes = GPTConfig()
    return Job(
        "gpt_demo",
        16,
        lambda: GPT(sizes),
        _tokens(sizes.vocabulary, sizes.block),
        lambda output: output[0].flatten(0, 1),
        "examples/tiny_gpt.py, 4 layers x 128, block 128, dropout 0.1",
    )


JOBS["gpt_demo"] = small_gpt_job()
