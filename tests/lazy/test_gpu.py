"""The lazy device and lazy_mode on a CUDA GPU, through Triton: run with `pytest -m gpu`."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    torchlazy.set_target("cuda")
    yield
    torchlazy.set_target("cuda")


class Attention(nn.Module):
    """A transformer block with what GPT and BERT need: norms, fused attention, GELU."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(width: int = 128, layers: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, width), *[Attention(width, 4, causal=i % 2 == 0) for i in range(layers)], nn.Linear(width, 64)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),
        nn.BatchNorm2d(32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64),
    )  # fmt: skip


def train(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    steps: int,
    autocast: Callable[[], object] = contextlib.nullcontext,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        with autocast():  # type: ignore[attr-defined]
            loss = F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["transformer", "convnet"])
def test_training_equals_eager(kind: str) -> None:
    torch.manual_seed(0)
    model = transformer() if kind == "transformer" else convnet()
    x = torch.randint(0, 64, (4, 32)) if kind == "transformer" else torch.randn(8, 3, 12, 12)
    y = torch.randint(0, 64, (4, 32) if kind == "transformer" else (8,))
    eager = train(copy.deepcopy(model).cuda(), x.cuda(), y.cuda(), 5)
    lazy = train(copy.deepcopy(model).to("lazy"), x.to("lazy"), y.to("lazy"), 5)
    torch.testing.assert_close(torch.tensor(lazy), torch.tensor(eager), rtol=2e-4, atol=2e-4)
    assert torchlazy.metrics()["kernels"] > 0


def test_training_in_bfloat16_follows_eager() -> None:
    torch.manual_seed(0)
    model, x, y = transformer(), torch.randint(0, 64, (4, 32)), torch.randint(0, 64, (4, 32))
    eager = train(copy.deepcopy(model).cuda(), x.cuda(), y.cuda(), 5, lambda: torch.autocast("cuda", torch.bfloat16))
    lazy = train(
        copy.deepcopy(model).to("lazy"), x.to("lazy"), y.to("lazy"), 5, lambda: torch.autocast("lazy", torch.bfloat16)
    )
    torch.testing.assert_close(torch.tensor(lazy), torch.tensor(eager), rtol=2e-2, atol=2e-2)


def test_lazy_mode_trains_ordinary_cuda_tensors() -> None:
    torch.manual_seed(0)
    model, x, y = transformer().cuda(), torch.randint(0, 64, (4, 32)).cuda(), torch.randint(0, 64, (4, 32)).cuda()
    twin = copy.deepcopy(model)
    addresses = [p.data_ptr() for p in twin.parameters()]
    eager = train(model, x, y, 4)
    with torchlazy.lazy_mode():
        lazy = train(twin, x, y, 4)
    torch.testing.assert_close(torch.tensor(lazy), torch.tensor(eager), rtol=2e-4, atol=2e-4)
    assert addresses == [p.data_ptr() for p in twin.parameters()]


def test_peak_memory_of_a_step_is_at_most_eagers() -> None:
    def peak(device: str) -> int:
        torch.manual_seed(0)
        model = transformer(width=512, layers=4).to(device)
        x, y = torch.randint(0, 64, (8, 128)).to(device), torch.randint(0, 64, (8, 128)).to(device)
        train(model, x, y, 4)
        torchlazy.sync()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        train(model, x, y, 3)
        torchlazy.sync()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    base = torch.cuda.memory_allocated()
    eager = peak("cuda") - base
    lazy = peak("lazy") - base
    assert lazy <= eager * 1.02, f"lazy {lazy / 2**20:.1f} MiB, eager {eager / 2**20:.1f} MiB"


@pytest.mark.parametrize("keys", [40, 37])  # a causal mask begins at the first key, rows of a mask need not be aligned
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "float mask", "position bias", "one number a query"])
def test_attention_forward_and_backward(kind: str, dtype: torch.dtype, keys: int, compiled: None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, length, 32, dtype=dtype) for length in (40, keys, keys)]
    mask = {
        "bool mask": torch.rand(40, keys) > 0.2,
        "float mask": torch.randn(2, 1, 40, keys, dtype=dtype),
        "position bias": torch.randn(40, keys, 4, dtype=dtype).permute(2, 0, 1)[None],  # as T5 makes it
        "one number a query": torch.randn(40, 1, dtype=dtype),
    }.get(kind)
    results = []
    # Eager's kernels on a GPU refuse a mask that is broadcast over keys, or read it at odd places.
    for device in ("cpu" if kind == "one number a query" else "cuda", "lazy"):
        q, k, v = (t.detach().to(device).requires_grad_() for t in tensors)
        given = mask.to(device) if mask is not None else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=kind == "causal")
        out.square().sum().backward()
        results.append([t.float().cpu() for t in (out.detach(), q.grad, k.grad, v.grad)])
    tolerance = 5e-2 if dtype == torch.bfloat16 else 2e-4
    for eager, lazy in zip(*results, strict=True):
        torch.testing.assert_close(lazy, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("keys", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_of_one_query(is_masked: bool, dtype: torch.dtype, keys: int, compiled: None) -> None:
    """As in generation: queries and the last key and value come from one product, the other keys from a cache."""
    torch.manual_seed(0)
    tensors = torch.randn(2, 1, 64), torch.randn(192, 64), torch.randn(2, 4, keys - 1, 16), torch.randn(2, 4, 1, keys)
    results = []
    for device in ("cuda", "lazy"):
        x, weight, kept, mask = (tensor.to(device, dtype) for tensor in tensors)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in F.linear(x, weight).split(64, -1))
        k, v = (torch.cat([kept, part], 2) for part in (k, v))
        results.append(F.scaled_dot_product_attention(q, k, v, mask if is_masked else None).float().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=3e-2, atol=3e-2 if dtype == torch.bfloat16 else 1e-3)


def test_same_seed_same_dropout() -> None:
    x = torch.ones(1000, device="lazy")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(F.dropout(x, 0.4).cpu())
    assert torch.equal(*runs)
    assert abs((runs[0] == 0).float().mean().item() - 0.4) < 0.06


def test_the_target_can_change_and_tensors_follow() -> None:
    x = torch.arange(4.0, device="lazy") + 1
    assert x.data_ptr() and x.tolist() == [1, 2, 3, 4]
    torchlazy.set_target("cpu")
    assert (x * 2).tolist() == [2, 4, 6, 8]
    torchlazy.set_target("cuda:0")
    assert (x * 3).tolist() == [3, 6, 9, 12]


def test_operators_that_run_at_once_and_attention_follow_the_target() -> None:
    torchlazy.set_target("cpu")
    values, heads = torch.tensor([3.0, 1.0, 3.0], device="lazy"), torch.rand(1, 2, 4, 8, device="lazy")
    places = torch.tensor([0, 2])
    torchlazy.sync()
    torchlazy.set_target("cuda:0")
    assert values.unique().tolist() == [1, 3]
    assert values[places.to("lazy")].tolist() == [3, 3]
    attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    expected = F.scaled_dot_product_attention(heads.cpu(), heads.cpu(), heads.cpu(), is_causal=True)
    torch.testing.assert_close(attended.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_as_target() -> None:
    torchlazy.set_target("cuda:1")
    model = transformer().to("lazy")
    x, y = torch.randint(0, 64, (4, 32)).to("lazy"), torch.randint(0, 64, (4, 32)).to("lazy")
    losses = train(model, x, y, 4)
    assert losses[-1] < losses[0]
    assert model[0].weight.untyped_storage().device.index == 1


@pytest.mark.parametrize("example", ["train_gpt.py", "train_convnet.py"])
def test_examples_run(example: str) -> None:
    steps = ["--steps", "8"] if example == "train_gpt.py" else []
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), "--compare", "--no-dropout", *steps]
        if example == "train_gpt.py"
        else [sys.executable, str(EXAMPLES / example), "--compare"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
