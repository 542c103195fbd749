"""Models that only answer: eval under `no_grad` and `inference_mode`, and decoding with a cache written in place."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

from tests.lazy.compare import data, ints
from tests.lazy.models import built, convnet, mlp, same

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": contextlib.nullcontext}


def transformer(device: str) -> nn.Module:
    layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
    return built(lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), device)


def recurrent(device: str) -> nn.Module:
    return built(lambda: nn.GRU(4, 6, batch_first=True), device)


MODELS = {
    "mlp": (mlp, (3, 4)),
    "convnet": (convnet, (2, 1, 8, 8)),
    "transformer": (transformer, (2, 5, 8)),
    "recurrent": (recurrent, (2, 5, 4)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_eval_model(name, mode, compiled):
    make, shape = MODELS[name]

    def run(device):
        model = make(device).eval()
        outs = []
        with MODES[mode]():
            for step in range(3):
                outs.append(model(data(device, *shape, seed=step)))
                torchlazy.flush()
        return outs

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)
    counts = torchlazy.metrics()
    assert counts["cuts"] == {"flush": 3} and (counts["hits"], counts["compiles"]) == (2, 1)


def test_train_and_eval_in_turn(compiled):
    def run(device):
        model = mlp(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        accuracies = []
        for epoch in range(3):
            model.train()
            for step in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(data(device, 6, 4, seed=step)), ints(device, 6, high=2)).backward()
                optimizer.step()
            model.eval()
            right = torch.zeros((), dtype=torch.int64, device=device)
            with torch.no_grad():
                for step in range(2):
                    right += (model(data(device, 6, 4, seed=step)).argmax(1) == ints(device, 6, high=2)).sum()
            accuracies.append(right.item())
            if epoch == 0:
                torchlazy.wait_for_compile()
        return accuracies, model.state_dict()

    have, want = run("lazy"), run("cpu")
    assert have[0] == want[0]
    same(have[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_weights_changed_between_calls(mode, compiled):
    def run(device):
        model = mlp(device).eval()
        x = data(device, 3, 4)
        with MODES[mode]():
            first = model(x)
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[1].running_mean.add_(1)
        with MODES[mode]():
            return first, model(x)

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """Causal attention that reads keys and values from a cache which each call extends in place."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("keys", torch.zeros(1, heads, length, width // heads), persistent=False)
        self.register_buffer("values", torch.zeros(1, heads, length, width // heads), persistent=False)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Slices known to Python."""
        end = start + k.size(2)
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        self.write(start, k, v)
        end = start + x.size(1)
        mask = torch.ones(x.size(1), end, dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, self.keys[:, :, :end], self.values[:, :, :end], mask)
        return self.out(y.transpose(1, 2).flatten(2))


class IndexedAttention(Attention):
    """The position is a tensor: every step has one form, so that one program serves them all."""

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        scores = q @ self.keys.transpose(-1, -2) / math.sqrt(q.size(-1))
        places = torch.arange(self.keys.size(2), device=x.device)
        scores = scores.masked_fill(places[None, :] > position[:, None], float("-inf"))
        y = scores.softmax(-1) @ self.values
        return self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, attention: type[Attention], length: int = 12, width: int = 8, vocabulary: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(attention(width, 2, length) for _ in range(2))

    def forward(self, codes: torch.Tensor, start: object) -> torch.Tensor:
        x = self.embed(codes)
        for layer in self.layers:
            x = x + layer(self.norm(x), start)
        return self.norm(x) @ self.embed.weight.t()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_decoding_with_a_cache_of_slices(mode, tiers):
    torchlazy.config.tiers, torchlazy.config.strict = tiers, True

    def run(device):
        model = built(lambda: Decoder(Attention), device).eval()
        codes, length = ints(device, 1, 4), 4
        logits = []
        with MODES[mode]():
            out = model(codes, 0)
            for _ in range(5):
                code = out[:, -1:].argmax(-1)
                codes = torch.cat([codes, code], 1)
                out = model(code, length)
                length += 1
                logits.append(out)
            whole = model(codes, 0)  # without the cache: the same
        return codes, logits, whole, model.layers[1].keys

    have, want = run("lazy"), run("cpu")
    assert have[0].tolist() == want[0].tolist()
    same(have[1:], want[1:], rtol=1e-4, atol=1e-5)
    same(torch.cat(have[1], 1), have[2][:, 4:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_decoding_by_index_is_one_program(mode, compiled):
    def run(device):
        model = built(lambda: Decoder(IndexedAttention), device).eval()
        codes = []
        with MODES[mode]():
            model(ints(device, 1, 4), torch.arange(4, device=device))
            position = torch.tensor([4], device=device)
            code = torch.tensor([[1]], device=device)
            for step in range(6):
                if step == 2 and device == "lazy":
                    torchlazy.reset_metrics()
                code = model(code, position)[:, -1:].argmax(-1)
                position += 1
                codes.append(code.item())
        return codes, model.layers[0].values

    have, want = run("lazy"), run("cpu")
    assert have[0] == want[0]
    same(have[1], want[1], rtol=1e-4, atol=1e-5)
    counts = torchlazy.metrics()
    assert counts["cuts"] == {"item": 4} and counts["compiles"] == 0


def test_cache_that_grows_by_concatenation(compiled):
    torchlazy.config.tiers = "on"

    def run(device):
        cache = torch.zeros(1, 0, 4, device=device)
        outs = []
        with torch.inference_mode():
            for step in range(5):
                cache = torch.cat([cache, data(device, 1, 1, 4, seed=step)], 1)
                outs.append(cache.softmax(1).sum(1))
        return outs, cache

    same(run("lazy"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_sampling_is_repeatable():
    model = mlp("lazy").eval()

    def draw():
        torch.manual_seed(5)
        with torch.inference_mode():
            probabilities = model(data("lazy", 6, 4)).softmax(-1)
            return torch.multinomial(probabilities, 3, replacement=True).tolist(), probabilities.argmax(-1).tolist()

    assert draw() == draw()


def test_static_cache_made_outside_inference_mode(compiled):
    """A buffer made as an ordinary tensor is written under inference_mode, and read and written after it."""

    def run(device):
        cache = torch.zeros(4, 3, device=device)
        with torch.inference_mode():
            cache[1] = data(device, 3)
            cache[2:].copy_(data(device, 2, 3, seed=1))
        cache[0] += 1
        cache.mul_(2)
        return cache, cache.is_inference()

    have, want = run("lazy"), run("cpu")
    assert have[1] == want[1]
    same(have[0], want[0])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_lazy_mode_inference(mode, compiled):
    def run(block):
        model = built(lambda: Decoder(Attention), "cpu").eval()
        x = ints("cpu", 1, 4)
        with block(), MODES[mode]():
            out = model(x, 0)
            code = out[:, -1:].argmax(-1)
            return model(code, 4).clone(), model.layers[0].keys.clone()

    same(run(torchlazy.lazy_mode), run(contextlib.nullcontext), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("door", ["mode", "mode in Python", "compiled", "compiled in mode"])
def test_a_tensor_made_in_inference_mode_is_written(door):
    """As a cache is: by a call, and by the block itself; then read outside of inference mode."""
    torchlazy.config.native = "off" if door == "mode in Python" else "on"

    def write(cache, x):
        cache[:, 1:].copy_(cache[:, :-1].clone())
        return cache.mul_(2).sum() + x

    call = torchlazy.compile(write) if "compiled" in door else write
    with torch.inference_mode():
        cache, want = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
        for turn in range(8):
            x = torch.full((2,), float(turn))
            with torchlazy.lazy_mode() if "mode" in door else contextlib.nullcontext():
                found = call(cache, x)
            torch.testing.assert_close(found, write(want, x))
            assert cache.is_inference() and found.is_inference()
    torch.testing.assert_close(cache, want)
