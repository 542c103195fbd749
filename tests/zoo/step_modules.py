"""Hand-written training steps that are more than a loss: two towers, two players, transforms, double backward.

Invariant: noise is part of the batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.case import Batch, Case, Optimizers, adamw


def _mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    """A policy over four actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = _mlp(6, 16, 4), _mlp(6, 16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x).squeeze(-1)


def _rollout() -> Batch:
    return {
        "state": torch.randn(8, 6), "action": torch.randint(0, 4, (8,)), "old": -torch.rand(8) - 0.5,
        "reward": torch.randn(8), "done": (torch.rand(8) < 0.2).float(),
    }  # fmt: skip


def _ppo_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _ppo_objective(model, dict(model.named_parameters()), batch)[0].mean()


def _ppo_objective(model: nn.Module, parameters: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, ...]:
    _, values = functional_call(model, parameters, (batch["state"],))
    values = values.detach()
    advantage, running = [], torch.zeros((), device=values.device)
    for step in reversed(range(8)):
        alive = 1 - batch["done"][step]
        following = values[step + 1] if step < 7 else values.new_zeros(())
        running = batch["reward"][step] + 0.99 * alive * following - values[step] + 0.9 * alive * running
        advantage.append(running)
    gain = torch.stack(advantage[::-1])
    target = gain + values
    gain = (gain - gain.mean()) / (gain.std() + 1e-6)

    def one(p: dict[str, torch.Tensor], state, action, old, gain_, target_) -> torch.Tensor:  # type: ignore[no-untyped-def]
        logits, value = functional_call(model, p, (state,))
        log = logits.log_softmax(-1)
        ratio = (log.gather(-1, action[None]).squeeze(-1) - old).exp()
        clipped = torch.minimum(ratio * gain_, ratio.clamp(0.8, 1.2) * gain_)
        entropy = -(log.exp() * log).sum(-1)
        return -clipped + 0.5 * (value - target_).square() - 0.01 * entropy

    each = vmap(grad_and_value(one), in_dims=(None, 0, 0, 0, 0, 0))
    gradients, losses = each(parameters, batch["state"], batch["action"], batch["old"], gain, target)
    return losses, gradients


def _ppo_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    """Gradients of every sample by torch.func, each clipped by its norm, then their mean."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    losses, gradients = _ppo_objective(model, parameters, batch)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("b,b...->...", scale, gradients[name]) / len(scale)
    optimizers[0].step()
    optimizers[0].zero_grad()
    return losses.mean().detach()


class TwoTowers(nn.Module):
    """CLIP: an image tower, a text tower, a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 8))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        left, right = F.normalize(self.image(images), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.temperature.exp() * left @ right.t()


def _pairs() -> Batch:
    return {"x": torch.randn(6, 3, 8, 8), "text": torch.randint(0, 20, (6, 5))}


def _contrast(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["x"], batch["text"])
    same = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2


class Players(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = _mlp(8, 16, 1, activation=nn.LeakyReLU)


def _generator_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.softplus(-model.discriminator(model.generator(batch["noise"]))).mean()


def _gan_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    for_generator, for_discriminator = optimizers
    with torch.no_grad():
        fake = model.generator(batch["noise"])
    loss = F.softplus(-model.discriminator(batch["x"])).mean() + F.softplus(model.discriminator(fake)).mean()
    for_discriminator.zero_grad()
    loss.backward()
    for_discriminator.step()
    for_generator.zero_grad()
    played = _generator_loss(model, batch)
    played.backward()
    for_generator.step()
    return (loss + played).detach()


def _gan_optimizers(model: nn.Module) -> Optimizers:
    return [adamw(model.generator.parameters()), torch.optim.SGD(model.discriminator.parameters(), 0.05, 0.9)]


def _triplets() -> Batch:
    return {name: torch.randn(5, 10) for name in ("anchor", "near", "far")}


def _triplet_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    anchor, near, far = (model(batch[name]) for name in ("anchor", "near", "far"))
    return F.triplet_margin_loss(anchor, near, far) + (1 - F.cosine_similarity(anchor, near)).mean()


def _critic() -> nn.Module:
    return nn.Sequential(
        weight_norm(nn.Linear(6, 12)),
        nn.SiLU(),
        weight_norm(nn.Linear(12, 12)),
        nn.Tanh(),
        weight_norm(nn.Linear(12, 1)),
    )


def _penalty_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    mixed = (batch["real"] * batch["share"] + batch["fake"] * (1 - batch["share"])).requires_grad_()
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return model(batch["fake"]).mean() - model(batch["real"]).mean() + 10 * penalty


CASES = (
    Case("ppo_torch_func", ActorCritic, _rollout, _ppo_loss, step=_ppo_step),
    Case("clip_towers", TwoTowers, _pairs, _contrast),
    Case(
        "gan", Players, lambda: {"x": torch.randn(8, 8), "noise": torch.randn(8, 4)}, _generator_loss,
        optimizers=_gan_optimizers, step=_gan_step,
    ),
    Case("siamese_triplet", lambda: _mlp(10, 16, 6, activation=nn.ReLU), _triplets, _triplet_loss),
    Case(
        "gradient_penalty", _critic,
        lambda: {"real": torch.randn(5, 6), "fake": torch.randn(5, 6), "share": torch.rand(5, 1)}, _penalty_loss,
        loss_needs_grad=True,
    ),
)  # fmt: skip
