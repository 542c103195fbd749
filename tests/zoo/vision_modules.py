"""Hand-written models of images: convolutions, patches, capsules, generators of images.

Invariant: batch norm sees at least eight values a channel, so that its gradients are well conditioned.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Batch, Case


def images(channels: int = 3, size: int = 8, classes: int = 5, count: int = 4) -> Batch:
    """Normal images and class labels."""
    return {"x": torch.randn(count, channels, size, size), "y": torch.randint(0, classes, (count,))}


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the model's logits."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels down, two up, with skip connections; one level up by a transposed convolution, one by resampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _double_conv(3, 4), _double_conv(4, 8), _double_conv(8, 8)
        self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.merge1, self.merge2 = _double_conv(16, 8), _double_conv(12, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        low = self.up1(self.bottom(F.avg_pool2d(second, 2)))
        mid = self.merge1(torch.cat([low, second], 1))
        high = F.interpolate(mid, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.merge2(torch.cat([high, first], 1)))


def _unet_batch() -> Batch:
    return {"x": torch.randn(2, 3, 8, 8), "y": torch.randint(0, 2, (2, 8, 8))}


def _unet_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["x"])
    chance = logits.softmax(1)[:, 1]
    truth = batch["y"].float()
    dice = 1 - (2 * (chance * truth).sum((1, 2)) + 1) / (chance.sum((1, 2)) + truth.sum((1, 2)) + 1)
    return F.cross_entropy(logits, batch["y"]) + dice.mean()


class Residual(nn.Module):
    """A basic block; a strided one has a projection on its shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return F.relu(y, inplace=True)


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


class Inverted(nn.Module):
    """Expand, depthwise convolution, squeeze and excite, project."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
        )  # fmt: skip
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU(), nn.Conv2d(4, wide, 1), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return x + self.project(y * self.gate(y))


def _mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), Inverted(8), Inverted(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


class PatchTransformer(nn.Module):
    """A vision transformer: patches by a strided convolution, a class token, pre-norm attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class Capsules(nn.Module):
    """Capsules with two rounds of routing: einsum everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.weight = nn.Parameter(0.1 * torch.randn(64, 5, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.conv(x).reshape(len(x), 4, 4, 16).permute(0, 1, 3, 2).reshape(len(x), 64, 4)
        votes = torch.einsum("bid,iode->bioe", _squash(low), self.weight)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(2):
            high = _squash(torch.einsum("bio,bioe->boe", logits.softmax(-1), votes))
            logits = logits + torch.einsum("bioe,boe->bio", votes, high)
        return high.norm(dim=-1)


def _squash(x: torch.Tensor) -> torch.Tensor:
    square = x.square().sum(-1, keepdim=True)
    return x * square.sqrt() / (1 + square)


def _capsule_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    lengths, truth = model(batch["x"]), F.one_hot(batch["y"], 5)
    return (truth * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - truth) * F.relu(lengths - 0.1) ** 2).sum(1).mean()


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.PReLU(8), nn.Conv2d(8, 4, 3, 2, 1), nn.Tanh(),
        nn.ConvTranspose2d(4, 8, 3, 2, 1, output_padding=1), nn.InstanceNorm2d(8, affine=True), nn.ELU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip


class VariationalCoder(nn.Module):
    """A variational autoencoder of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.Softplus(), nn.Linear(24, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 16))


def _vae_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    mean, log_var = model.encoder(batch["x"]).chunk(2, -1)
    logits = model.decoder(mean + batch["noise"] * (0.5 * log_var).exp())
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
    return F.binary_cross_entropy_with_logits(logits, batch["x"], reduction="sum") / len(logits) + divergence


class Denoiser(nn.Module):
    """Predicts the noise in an image from the image and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.05, 50), 0))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(8, device=x.device) * (torch.log(torch.tensor(1000.0, device=x.device)) / 8))
        angles = t[:, None].float() * rates
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None].chunk(2, 1)
        return self.last(F.silu(self.norm(self.first(x)) * (1 + scale) + shift))


def _diffusion_batch() -> Batch:
    return {"x": torch.randn(4, 1, 8, 8), "t": torch.randint(0, 50, (4,)), "noise": torch.randn(4, 1, 8, 8)}


def _diffusion_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    kept = model.kept[batch["t"]].view(-1, 1, 1, 1)
    noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
    return F.mse_loss(model(noisy, batch["t"]), batch["noise"])


CASES = (
    Case("unet", UNet, _unet_batch, _unet_loss),
    Case("resnet", _resnet, images, classify),
    Case("mobilenet", _mobilenet, images, classify),
    Case("vit_patches", PatchTransformer, images, classify),
    Case("capsules", Capsules, images, _capsule_loss),
    Case("autoencoder", _autoencoder, images, lambda m, b: F.l1_loss(m(b["x"]), b["x"].sigmoid())),
    Case("vae", VariationalCoder, lambda: {"x": torch.rand(6, 16), "noise": torch.randn(6, 4)}, _vae_loss),
    Case("diffusion", Denoiser, _diffusion_batch, _diffusion_loss),
)
