"""Text generation with models of the transformers library: eager's tokens, and after the first prompts no compiles."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("sizes_vary")

_TOKENS = {"bos_token_id": 1, "eos_token_id": 40, "pad_token_id": 0}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 10, "temperature": 0.7},
    "beam": {"do_sample": False, "num_beams": 2},
    "static": {"do_sample": False, "cache_implementation": "static"},
}
LENGTHS = (5, 7, 9, 12)  # of prompts; after the first three nothing may be compiled


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=41, n_embd=16, n_layer=1, n_head=2, n_positions=64, **_TOKENS)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=41, num_key_value_heads=1, **sizes, **_TOKENS)
        return transformers.LlamaForCausalLM(config).eval()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=41, decoder_start_token_id=0, **sizes, **_TOKENS)
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("kind", "way", "where"),
    [("gpt2", "sample", "device"), ("gpt2", "beam", "mode"), ("llama", "greedy", "module"),
     ("llama", "static", "forward"), ("t5", "greedy", "device")],
)  # fmt: skip
def test_tokens_are_as_in_eager(kind: str, way: str, where: str) -> None:
    torchlazy.config.rng = "eager"  # the very numbers that eager draws
    plain, mine = model(kind), model(kind)
    device = "lazy" if where.startswith("device") else "cpu"
    mine.to(device)
    if where == "module":
        mine = torchlazy.compile(mine)
    elif where != "device" and where != "mode":
        mine.forward = torchlazy.compile(mine.forward)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 39, (2, length), generator=generator) for length in LENGTHS]
    told = {**WAYS[way], "max_new_tokens": 5, "min_new_tokens": 5}
    compiles = []
    for number, prompt in enumerate(prompts):
        want = tokens(plain, prompt, told, number)
        with torchlazy.lazy_mode() if where == "mode" else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = tokens(mine, prompt.to(device), told, number)
        assert torch.equal(got.cpu(), want), (number, got, want)
        compiles.append(torchlazy.metrics()["compiles"])
    assert compiles[3] == compiles[2], (compiles, torchlazy.metrics()["not_generalised"])


@torch.no_grad()
def tokens(made: Any, prompt: Tensor, told: dict[str, Any], seed: int) -> Tensor:
    torch.manual_seed(seed)
    found: Tensor = made.generate(prompt, **told)
    return found


@pytest.mark.parametrize(("train", "device"), [(False, "lazy"), (True, "cpu")])
def test_decoders_that_return_a_cache_are_replayed(train: bool, device: str) -> None:
    mine, plain = model("llama"), model("llama")
    run = torchlazy.compile(mine.to(device)).train(train)
    plain.train(train)
    for step in range(5):
        ids = torch.randint(1, 39, (2, 7), generator=torch.Generator().manual_seed(step))
        got, want = run(input_ids=ids.to(device), labels=ids.to(device)), plain(input_ids=ids, labels=ids)
        assert type(got) is type(want) and type(got.past_key_values) is type(want.past_key_values)
        torch.testing.assert_close(got.loss.cpu(), want.loss)
        keys = [found.past_key_values.layers[0].keys for found in (got, want)]
        torch.testing.assert_close(keys[0].cpu(), keys[1])
        got.loss.backward()
        want.loss.backward()
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
    report = run.report()
    assert report.captures == 1 and report.replays >= 1 and not report.alarm, report


# ---- loops as people write them, on a decoder of one attention layer

_WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(query @ keys.transpose(-1, -2) / 8**0.5, -1) @ values


def preallocated(x: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """The cache has room for all steps; each writes at its position, and attends up to it."""
    keys[:, position] = x @ _WEIGHT.to(x.device)
    values[:, position] = x
    return attend(x[:, None], keys[:, : position + 1], values[:, : position + 1])[:, 0]


def masked(x: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """As above with a mask instead of a slice: each step is the same program."""
    place = torch.tensor([position], device=x.device)
    keys.index_copy_(1, place, (x @ _WEIGHT.to(x.device))[:, None])
    values.index_copy_(1, place, x[:, None])
    scores = (x[:, None] @ keys.transpose(-1, -2)) / 8**0.5
    seen = torch.arange(keys.shape[1], device=x.device) <= position
    return (torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ values)[:, 0]


def generate(step: Any, x: Tensor, steps: int) -> list[Tensor]:
    keys, values = torch.zeros(2, 12, 8, device=x.device), torch.zeros(2, 12, 8, device=x.device)
    found = []
    for position in range(steps):
        x = torch.tanh(step(x, keys, values, position)) + x
        found.append(x)
    return found


def growing(step: Any, x: Tensor, steps: int) -> list[Tensor]:
    keys = values = torch.zeros(2, 0, 8, device=x.device)
    found = []
    for _ in range(steps):
        y, keys, values = step(x, keys, values)
        x = torch.tanh(y) + x
        found.append(x)
    return found


def concatenates(x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = torch.cat([keys, (x @ _WEIGHT.to(x.device))[:, None]], 1)
    values = torch.cat([values, x[:, None]], 1)
    return attend(x[:, None], keys, values)[:, 0], keys, values


@pytest.mark.parametrize("where", ["mode", "compile on the device"])
@pytest.mark.parametrize("step", [preallocated, masked, concatenates], ids=lambda step: step.__name__)
def test_caches_written_by_hand(step: Any, where: str) -> None:
    loop = growing if step is concatenates else generate
    run = torchlazy.compile(step) if where.startswith("compile") else step
    compiles = []
    for turn, steps in enumerate((8, 8, 10, 6, 10)):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(turn))
        want = loop(step, x, steps)
        with torchlazy.lazy_mode() if where == "mode" else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = loop(run, x.to("lazy") if where.endswith("device") else x, steps)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
        compiles.append(torchlazy.metrics()["compiles"])
    assert compiles[-1] == compiles[-2], compiles


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_lengths_of_a_cache_share_a_template(kind: str) -> None:
    mine, plain = model(kind), model(kind)
    run = torchlazy.compile(mine, audit=False)
    captures = []
    for _ in range(3):  # a cache that is new at each prompt is an argument from the second one on
        caches = [transformers.DynamicCache(config=plain.config) for _ in range(2)]
        ids = torch.randint(1, 39, (2, 5), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for _ in range(10):
                got = run(input_ids=ids, past_key_values=caches[0], use_cache=True)
                want = plain(input_ids=ids, past_key_values=caches[1], use_cache=True)
                torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
                ids = want.logits[:, -1:].argmax(-1)
        captures.append(run.report().captures)
    report = run.report()
    assert captures[0] <= 5 and captures[2] == captures[1] <= 10 and not report.verified and not report.alarm, report
