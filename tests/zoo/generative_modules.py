"""Hand-written models of distributions, functions and dynamics: flows, codebooks, diffusion, operators, processes.

Invariant: noise is part of the batch.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.zoo.case import Batch, Case, Optimizers, adamw


class Codebook(nn.Module):
    """VQ-VAE: the nearest code, gradients straight through, codes that are running means written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("count", torch.ones(6))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.flatten(0, 2)
        nearest = torch.cdist(flat, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, 6).type_as(flat)
                self.count.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hits.t() @ flat, alpha=0.1)
                self.codes.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
        code = F.embedding(nearest, self.codes).view_as(z)
        commitment = F.mse_loss(z, code.detach())
        straight = z + (code - z).detach()
        return self.decoder(straight.permute(0, 3, 1, 2)), commitment


def _coded(model: nn.Module, batch: Batch) -> torch.Tensor:
    made, commitment = model(batch["x"])
    return F.mse_loss(made, batch["x"]) + 0.25 * commitment


class Coupling(nn.Module):
    """RealNVP: affine couplings with alternating masks, and their log-determinants; in eval mode it is inverted too."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(4)])
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, volume = x, x.new_zeros(len(x))
        for depth, net in enumerate(self.nets):
            keep = self.mask if depth % 2 == 0 else 1 - self.mask
            scale, shift = net(z * keep).chunk(2, -1)
            scale = scale.tanh() * (1 - keep)
            z, volume = z * scale.exp() + shift * (1 - keep), volume + scale.sum(-1)
        normal = torch.distributions.Independent(
            torch.distributions.Normal(torch.zeros_like(z), 1.0, validate_args=False), 1, validate_args=False
        )
        loss = -(normal.log_prob(z) + volume).mean()
        return loss if self.training else loss + (self.inverse(z) - x).abs().max()

    def inverse(self, z: torch.Tensor) -> torch.Tensor:
        for depth in reversed(range(len(self.nets))):
            keep = self.mask if depth % 2 == 0 else 1 - self.mask
            scale, shift = self.nets[depth](z * keep).chunk(2, -1)
            z = torch.where(keep.bool(), z, (z - shift) * (-scale.tanh()).exp())
        return z


class TimedUNet(nn.Module):
    """A diffusion model's network: residual blocks with a time embedding, self-attention at the bottom, skips."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.shifts = nn.ModuleList([nn.Linear(16, width), nn.Linear(16, 2 * width)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, width), nn.GroupNorm(4, 2 * width), nn.GroupNorm(4, 2 * width)])
        self.heart = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.attention = nn.Conv2d(2 * width, 6 * width, 1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.1, 20), 0))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(4, device=x.device) * (-math.log(1000.0) / 4))
        angles = t[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skip = F.silu(self.norms[0](self.first(x)) + self.shifts[0](time)[:, :, None, None])
        low = F.silu(self.norms[1](self.down(skip)) + self.shifts[1](time)[:, :, None, None])
        low = low + self.heart(low)
        query, key, value = self.attention(self.norms[2](low)).flatten(2).transpose(1, 2).chunk(3, -1)
        read = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None]).squeeze(1)
        low = low + read.transpose(1, 2).view_as(low)
        return self.last(torch.cat([self.up(low), skip], 1))


class Averaged(nn.Module):
    """A network and the running mean of its weights, which is what is used in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TimedUNet()
        self.mean = TimedUNet().requires_grad_(False)
        self.mean.load_state_dict(self.net.state_dict())

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (self.net if self.training else self.mean)(x, t)


def _noisy() -> Batch:
    return {"x": torch.randn(3, 1, 8, 8), "t": torch.randint(0, 20, (3,)), "noise": torch.randn(3, 1, 8, 8)}


def _denoised(model: nn.Module, batch: Batch) -> torch.Tensor:
    kept = model.net.kept[batch["t"]].view(-1, 1, 1, 1)
    noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
    if model.training:
        return F.mse_loss(model(noisy, batch["t"]), batch["noise"])
    for step in (15, 10, 5, 0):  # DDIM
        now, then = model.net.kept[step], model.net.kept[step - 5] if step else torch.ones_like(model.net.kept[0])
        noise = model(noisy, torch.full_like(batch["t"], step))
        clean = (noisy - (1 - now).sqrt() * noise) / now.sqrt()
        noisy = then.sqrt() * clean + (1 - then).sqrt() * noise
    return noisy.square().mean()


def _averaging_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    loss = _denoised(model, batch)
    loss.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    with torch.no_grad():
        torch._foreach_mul_(list(model.mean.parameters()), 0.8)
        torch._foreach_add_(list(model.mean.parameters()), list(model.net.parameters()), alpha=0.2)
    return loss.detach()


class Dynamics(nn.Module):
    """A neural ordinary differential equation by Runge and Kutta's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path, step = [x], 0.1
        for i in range(5):
            t = x.new_full((len(x), 1), i * step)
            slope = lambda z, t: self.field(torch.cat([z, t], -1))  # noqa: E731
            a = slope(x, t)
            b = slope(x + step / 2 * a, t + step / 2)
            c = slope(x + step / 2 * b, t + step / 2)
            d = slope(x + step * c, t + step)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
            path.append(x)
        return torch.stack(path, 1)


class FourierOperator(nn.Module):
    """A Fourier neural operator: complex weights on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.head = nn.Conv1d(1, 6, 1), nn.Conv1d(6, 6, 1), nn.Conv1d(6, 1, 1)
        self.real, self.imaginary = (nn.Parameter(0.2 * torch.randn(6, 6, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x)
        waves = torch.fft.rfft(h)
        mixed = torch.zeros_like(waves)
        mixed[..., :4] = torch.einsum("bik,iok->bok", waves[..., :4], torch.complex(self.real, self.imaginary))
        return self.head(F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.skip(h)))


class Transformed(nn.Module):
    """A spatial transformer: the image is read at an affine grid that a small network chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6))
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eye = torch.tensor([[1.0, 0, 0], [0, 1, 0]], device=x.device)
        grid = F.affine_grid(eye + 0.1 * self.where(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.body(F.grid_sample(x, grid, padding_mode="border", align_corners=False))


class Process(nn.Module):
    """The marginal likelihood of a Gaussian process, by a Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        length, scale, noise = self.log.exp()
        kernel = scale * torch.exp(-0.5 * torch.cdist(x, x).square() / length.square())
        factor = torch.linalg.cholesky(kernel + (0.1 + noise) * torch.eye(len(x), device=x.device))
        solved = torch.cholesky_solve(y[:, None], factor).squeeze(1)
        return 0.5 * (y @ solved) + factor.diagonal().log().sum()


class Smooth(nn.Module):
    """A generator, and a discriminator under spectral norm with a penalty on its gradient at real images."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.Unflatten(1, (2, 4, 4)), nn.ConvTranspose2d(2, 1, 4, 2, 1))
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Conv2d(1, 4, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), spectral_norm(nn.Linear(64, 1))
        )


def _fooled(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.softplus(-model.discriminator(model.generator(batch["noise"]))).mean()


def _penalised_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    for_generator, for_discriminator = optimizers
    real = batch["x"].detach().requires_grad_()
    judged = model.discriminator(real)
    (slope,) = torch.autograd.grad(judged.sum(), real, create_graph=True)
    loss = F.softplus(-judged).mean() + slope.square().sum((1, 2, 3)).mean()
    loss = loss + F.softplus(model.discriminator(model.generator(batch["noise"]).detach())).mean()
    for_discriminator.zero_grad()
    loss.backward()
    for_discriminator.step()
    for_generator.zero_grad()
    played = _fooled(model, batch)
    played.backward()
    for_generator.step()
    return (loss + played).detach()


class SelectiveScan(nn.Module):
    """Mamba: a scan of states whose decay and input depend on the position."""

    def __init__(self, width: int = 8, states: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.inner, self.conv = nn.Linear(width, 2 * width), nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.choose, self.rate = nn.Linear(width, 2 * states), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.direct = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = self.inner(self.embed(x)).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        enter, leave = self.choose(h).chunk(2, -1)
        rate = F.softplus(self.rate(h))
        keep = torch.exp(rate[..., None] * -self.decay.exp())
        given = rate[..., None] * enter[:, :, None] * h[..., None]
        state, outputs = torch.zeros_like(given[:, 0]), []
        for step in range(x.shape[1]):
            state = keep[:, step] * state + given[:, step]
            outputs.append((state * leave[:, step, None]).sum(-1))
        y = torch.stack(outputs, 1) + self.direct * h
        return self.head(y * F.silu(gate))


def _words() -> Batch:
    text = torch.randint(0, 20, (2, 8))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def _images() -> Batch:
    return {"x": torch.randn(3, 1, 8, 8), "y": torch.randint(0, 3, (3,)), "noise": torch.randn(3, 4)}


CASES = (
    Case("vq_autoencoder", Codebook, lambda: {"x": torch.randn(2, 1, 8, 8)}, _coded),
    Case("coupling_flow", Coupling, lambda: {"x": torch.randn(5, 6)}, lambda m, b: m(b["x"])),
    Case(
        "diffusion_unet_averaged", Averaged, _noisy, _denoised, lambda m: [adamw(m.net.parameters())], _averaging_step
    ),
    Case(
        "neural_ode", Dynamics, lambda: {"x": torch.randn(4, 2), "y": torch.randn(4, 6, 2)},
        lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    ),
    Case(
        "fourier_operator", FourierOperator, lambda: {"x": torch.randn(2, 1, 12), "y": torch.randn(2, 1, 12)},
        lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    ),
    Case("spatial_transformer", Transformed, _images, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])),
    Case(
        "gaussian_process", Process, lambda: {"x": torch.randn(7, 2), "y": torch.randn(7)},
        lambda m, b: m(b["x"], b["y"]),
    ),
    Case(
        "spectral_gan", Smooth, _images, _fooled,
        lambda m: [adamw(m.generator.parameters()), adamw(m.discriminator.parameters())], _penalised_step,
    ),
    Case(
        "selective_scan", SelectiveScan, _words,
        lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()),
    ),
)  # fmt: skip
