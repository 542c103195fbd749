"""Which operators of followed steps are walked to natively: all, but for those that the table names.

A step that is followed has the same operators as last time; one that goes the general way costs ten times as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.runtime.native import compiled_step

pytestmark = [
    pytest.mark.usefixtures("device_in_python"),
    pytest.mark.skipif(compiled_step._loaded() is None, reason="no C++ compiler here"),
]
Step = Callable[[], object]
Optimizer = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that were not walked to."""
    seen: list[str] = []
    original = Recorder.general

    def spy(self: Recorder, cls: object, op: object, *rest: Any) -> object:
        seen.append(str(op).removeprefix("aten."))
        return original(self, cls, op, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "general", spy)
    monkeypatch.setattr(recorder.away, "following", recorder.general)
    monkeypatch.setattr(recorder, "has_mode_tensors", False)  # of tests before
    recorder.forget_paths()
    yield seen
    recorder.forget_paths()


class Layer(nn.Module):
    """Attention and a feed-forward part, each with a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.dropout, self.mlp = nn.Dropout(dropout), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(8, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(2, 4, 8)))
        return x + self.dropout(self.mlp(x))


def language(dropout: float = 0.0) -> tuple[nn.Module, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    return nn.Sequential(nn.Embedding(9, 8), Layer(dropout), nn.Linear(8, 9)), (2, 4), lambda out: out.flatten(0, 1)


def image() -> tuple[nn.Module, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 9))
    return nn.Sequential(*layers), (3, 1, 5, 5), lambda out: out


def trained(
    made: tuple[nn.Module, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]],
    optimizer: Optimizer | None = None, clip: bool = False, autocast: bool = False, vary: bool = False,
) -> Step:  # fmt: skip
    model, shape, flat = made
    model = model.to("lazy")
    opt = (optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-3)))(model.parameters())
    x = (torch.randint(0, 9, shape) if len(shape) == 2 else torch.rand(shape)).to("lazy")
    target = torch.randint(0, 9, (8 if len(shape) == 2 else 3,)).to("lazy")

    def step() -> None:
        with torch.autocast("lazy", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(flat(model(x)).float(), target)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if vary:
            opt.param_groups[0]["lr"] *= 0.9
        opt.step()
        opt.zero_grad()

    return step


def inferred() -> Step:
    model = language()[0].to("lazy").eval()
    codes = torch.randint(0, 9, (2, 4)).to("lazy")

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(codes)  # type: ignore[no-any-return]

    return step


def drawn() -> Step:
    x = torch.rand(4, 5).to("lazy")

    def step() -> torch.Tensor:
        y = torch.rand_like(x) + torch.randn_like(x) + torch.bernoulli(torch.full_like(x, 0.5))
        y = y + torch.empty_like(x).bernoulli_(0.3) + torch.empty_like(x).normal_(0.5, 0.1)
        y = y + torch.rand(4, 5, device="lazy") + torch.randint(0, 9, (4, 5), device="lazy")
        return F.dropout(y, 0.2) + F.dropout(y, 0.5)

    return step


def indexed() -> Step:
    x, places = torch.rand(6, 8).to("lazy"), torch.tensor([1, 2, 0]).to("lazy")
    mask = (torch.rand(6, 8) > 0.5).to("lazy")

    def step() -> list[torch.Tensor]:
        y = x * 2
        y[places] = x[places]
        first, second = y.chunk(2, 1)
        parts = [first, *second.split([3, 1], 1), torch.stack([first, second]), y.view(6, 8).expand(6, 8)]
        chosen = torch.where(mask, y, 0.0) + torch.where(mask, 1.0, y).masked_fill(mask, -1e9)
        made = torch.arange(8, device="lazy") + torch.ones(8, 8, device="lazy").tril() + torch.zeros(8, device="lazy")
        return [part.sum() for part in (*parts, chosen, made)]

    return step


def windowed() -> Step:
    x, y = torch.rand(6, 8).to("lazy"), torch.rand(2, 8).to("lazy")

    def step() -> list[torch.Tensor]:
        z = x * 2
        z[1:3] = y
        z[:, 1] += 1.0
        z[4:] = 0.5
        z[0].mul_(2)
        flat = z.view(3, 16)
        flat[1] = 3.0
        return [z.sum(), flat]

    return step


def transferred() -> Step:
    x, target, model = torch.rand(6, 8), torch.randint(0, 4, (6,)), nn.Linear(8, 4).to("lazy")
    return lambda: F.cross_entropy(model(x.to("lazy")), target.to("lazy", non_blocking=True))


def scaled(made: tuple[nn.Module, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]], fused: bool) -> Step:
    """A fused optimizer asks for no number on the host."""
    model, shape, _ = made
    model = model.to("lazy")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("lazy", init_scale=8.0)
    x = torch.randint(0, 9, shape).to("lazy")

    def step() -> None:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    return step


def optimized(name: str, **options: Any) -> Optimizer:
    return lambda params: getattr(torch.optim, name)(params, lr=1e-3, **options)


COMPOSITE = {"linear.default": 5, "layer_norm.default": 1, "dropout.default": 2, "reshape.default": 1}
ATTENTION = {"scaled_dot_product_attention.default": 1}
PROGRAMS: dict[str, tuple[Callable[[], Step], dict[str, int]]] = {
    "dropout": (lambda: trained(language(0.1)), {}),
    "no dropout": (lambda: trained(language()), {}),
    "autocast": (lambda: trained(language(0.1), autocast=True), {}),
    "clipping": (lambda: trained(language(), clip=True), {}),
    "fused AdamW": (lambda: trained(language(), optimized("AdamW", fused=True), clip=True, vary=True), {}),
    "fused SGD": (lambda: trained(image(), optimized("SGD", momentum=0.9, fused=True)), {}),
    "a gradient scaler": (lambda: scaled(language(), fused=True), {}),
    # Gradients are windows on inputs of the second trace, which begins where a number was read.
    "a scaler that asks": (lambda: scaled(language(), fused=False), {"_local_scalar_dense.default": 1}),
    "a rate that varies": (lambda: trained(language(), vary=True), {}),
    "batch norm": (lambda: trained(image(), optimized("SGD", momentum=0.9)), {}),
    "SGD, one by one": (lambda: trained(image(), optimized("SGD", momentum=0.9, foreach=False)), {}),
    "RMSprop": (lambda: trained(image(), optimized("RMSprop")), {}),
    "Adam, one by one": (lambda: trained(image(), optimized("Adam", foreach=False)), {}),
    # Torch hands these over whole; what they are made of is walked to.
    "inference_mode": (inferred, COMPOSITE | ATTENTION),
    "windows": (windowed, {}),
    "a batch from the host": (transferred, {"_to_copy.default": 2}),  # nothing is recorded, and no walk is halted
    "random numbers": (drawn, {}),
    "indices": (indexed, {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_of_followed_steps_are_walked_to(name: str, general: list[str]) -> None:
    torch.manual_seed(0)
    prepare, expected = PROGRAMS[name]
    step = prepare()
    for turn in range(7):
        general.clear()
        kept = step()
        torchlazy.flush()
        del kept
        assert turn < 5 or Counter(general) == expected, turn
    assert recorder.left_at is None
