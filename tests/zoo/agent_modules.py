"""Hand-written training steps with more than one network or more than one update: agents, momentum twins, inner loops.

Invariant: noise is part of the batch; targets and averages are state of the model, written in place.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Batch, Case, Optimizers, adamw


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class QPlayers(nn.Module):
    """A network of action values, and the slowly moving copy that its targets come from."""

    def __init__(self) -> None:
        super().__init__()
        self.online = _mlp(4, 16, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def _transitions() -> Batch:
    return {
        "state": torch.randn(8, 4), "action": torch.randint(0, 3, (8,)), "reward": torch.randn(8),
        "next": torch.randn(8, 4), "done": torch.rand(8) < 0.2, "weight": torch.rand(8),
    }  # fmt: skip


def _q_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    values = model.online(batch["state"]).gather(1, batch["action"][:, None]).squeeze(1)
    with torch.no_grad():
        chosen = model.online(batch["next"]).argmax(1, keepdim=True)
        future = model.target(batch["next"]).gather(1, chosen).squeeze(1)
        wanted = batch["reward"] + 0.9 * future.masked_fill(batch["done"], 0.0)
    return (F.smooth_l1_loss(values, wanted, reduction="none") * batch["weight"]).mean()


def _q_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    loss = _q_loss(model, batch)
    optimizers[0].zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.online.parameters(), 0.5)
    optimizers[0].step()
    with torch.no_grad():
        for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    return loss.detach()


class SoftPlayers(nn.Module):
    """Soft actor-critic: a Gaussian policy, two critics with targets, a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = _mlp(4, 16, 4)
        self.critics = nn.ModuleList([_mlp(6, 16, 1) for _ in range(2)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.heat = nn.ParameterList([torch.zeros(())])


def _act(model: nn.Module, state: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, log_std = model.actor(state).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
    raw = normal.mean + normal.stddev * noise
    action = raw.tanh()
    return action, (normal.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(-1)


def _worst(critics: nn.ModuleList, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    both = torch.cat([state, action], -1)
    return torch.stack([critic(both).squeeze(-1) for critic in critics]).amin(0)


def _critic_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        action, log = _act(model, batch["next"], batch["noise"][0])
        future = _worst(model.targets, batch["next"], action) - model.heat[0].exp() * log
        wanted = batch["reward"] + 0.9 * future
    both = torch.cat([batch["state"], batch["action"]], -1)
    return sum(F.mse_loss(critic(both).squeeze(-1), wanted) for critic in model.critics)


def _soft_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    for_critics, for_actor, for_heat = optimizers
    critic_loss = _critic_loss(model, batch)
    for_critics.zero_grad()
    critic_loss.backward()
    for_critics.step()
    model.critics.requires_grad_(False)
    action, log = _act(model, batch["state"], batch["noise"][1])
    actor_loss = (model.heat[0].exp().detach() * log - _worst(model.critics, batch["state"], action)).mean()
    for_actor.zero_grad()
    actor_loss.backward()
    for_actor.step()
    model.critics.requires_grad_(True)
    heat_loss = -(model.heat[0] * (log + 2.0).detach()).mean()
    for_heat.zero_grad()
    heat_loss.backward()
    for_heat.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(model.targets.parameters()), list(model.critics.parameters()), 0.05)
    return (critic_loss + actor_loss).detach()


def _soft_batch() -> Batch:
    return {
        "state": torch.randn(6, 4), "action": torch.rand(6, 2) * 2 - 1, "reward": torch.randn(6),
        "next": torch.randn(6, 4), "noise": torch.randn(2, 6, 2),
    }  # fmt: skip


def _soft_optimizers(model: nn.Module) -> Optimizers:
    return [adamw(model.critics.parameters()), adamw(model.actor.parameters()), adamw(model.heat.parameters())]


class Policy(nn.Module):
    """A policy and a value over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = _mlp(5, 16, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x).tanh()
        return self.actor(h), self.critic(h).squeeze(-1)


def _episodes() -> Batch:
    return {
        "state": torch.randn(12, 5), "action": torch.randint(0, 3, (12,)), "old": -torch.rand(12) - 0.5,
        "gain": torch.randn(12), "returns": torch.randn(12), "order": torch.randperm(12),
    }  # fmt: skip


def _clipped(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits, value = model(batch["state"])
    choice = torch.distributions.Categorical(logits=logits, validate_args=False)
    ratio = (choice.log_prob(batch["action"]) - batch["old"]).exp()
    gain = (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-8)
    clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return 0.5 * F.mse_loss(value, batch["returns"]) - clipped - 0.01 * choice.entropy().mean()


def _ppo_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    """Two passes over three minibatches each, drawn by a permutation."""
    losses = []
    for _ in range(2):
        for start in range(0, 12, 4):
            chosen = batch["order"][start : start + 4]
            loss = _clipped(model, {name: value[chosen] for name, value in batch.items() if name != "order"})
            optimizers[0].zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizers[0].step()
            losses.append(loss.detach())
    return torch.stack(losses).mean()


class MomentumTwins(nn.Module):
    """MoCo: an encoder, its momentum twin, and a ring of keys that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query = _mlp(6, 16, 8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("ring", F.normalize(torch.randn(8, 12), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))


def _contrast(model: nn.Module, batch: Batch) -> torch.Tensor:
    query = F.normalize(model.query(batch["x"]), dim=1)
    with torch.no_grad():
        key = F.normalize(model.key(batch["other"]), dim=1)
    positive, negative = (query * key).sum(1, keepdim=True), query @ model.ring.clone()
    logits = torch.cat([positive, negative], 1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def _moco_step(model: nn.Module, batch: Batch, optimizers: Optimizers) -> torch.Tensor:
    loss = _contrast(model, batch)
    optimizers[0].zero_grad()
    loss.backward()
    optimizers[0].step()
    with torch.no_grad():
        for slow, fast in zip(model.key.parameters(), model.query.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        places = (model.place + torch.arange(4, device=model.place.device)) % 12
        model.ring[:, places] = F.normalize(model.key(batch["other"]), dim=1).t()
        model.place[0] = (model.place[0] + 4) % 12
    return loss.detach()


class Learner(nn.Module):
    """MAML: the gradient through a gradient step on each task's own examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 12), nn.Linear(12, 1)


def _sines() -> Batch:
    phase = torch.rand(3, 1, 1) * 3
    x = torch.rand(3, 8, 1) * 4 - 2
    return {"x": x, "y": torch.sin(x + phase)}


def _adapted(model: nn.Module, batch: Batch) -> torch.Tensor:
    losses = []
    for x, y in zip(batch["x"].unbind(), batch["y"].unbind(), strict=True):
        weights = list(model.parameters())
        for _ in range(2):
            inner = F.mse_loss(_through(weights, x[:4]), y[:4])
            gradients = torch.autograd.grad(inner, weights, create_graph=True)
            weights = [w - 0.05 * g for w, g in zip(weights, gradients, strict=True)]
        losses.append(F.mse_loss(_through(weights, x[4:]), y[4:]))
    return torch.stack(losses).mean()


def _through(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, weights[0], weights[1]).tanh(), weights[2], weights[3])


CASES = (
    Case("double_dqn", QPlayers, _transitions, _q_loss, lambda m: [adamw(m.online.parameters())], _q_step),
    Case("soft_actor_critic", SoftPlayers, _soft_batch, _critic_loss, _soft_optimizers, _soft_step),
    Case("ppo_minibatches", Policy, _episodes, _clipped, step=_ppo_step),
    Case(
        "momentum_contrast", MomentumTwins, lambda: {"x": torch.randn(4, 6), "other": torch.randn(4, 6)}, _contrast,
        lambda m: [torch.optim.SGD(m.query.parameters(), 0.05, 0.9, weight_decay=1e-4)], _moco_step,
    ),
    Case("maml", Learner, _sines, _adapted, loss_needs_grad=True),
)  # fmt: skip
