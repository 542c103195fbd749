"""Programs that two processes run together (`distributed_run`): modules under `fully_shard`, and parallel layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from tests.lazy import distributed_cases

COMPILED: tuple[str, ...] = ()
# Before torch 2.13 distributed tensors ask their rules by fake tensors in each call, which ends a capture.
_IS_REPLAYED = TorchVersion(torch.__version__) >= "2.13"


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def _plain() -> str:
    return distributed_cases._PLAIN


def _mesh() -> Any:
    return init_device_mesh(torch.device(_plain()).type, (2,))


def _sharded(device: str) -> nn.Module:
    net = _net().to(device)
    fully_shard(net[0], mesh=_mesh())
    return fully_shard(net, mesh=_mesh())


def _uneven(device: str) -> nn.Module:
    """Shards of unequal lengths, one of them empty; halves are computed with, float32 is summed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 1), nn.Linear(1, 8)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=_mesh(), mp_policy=policy)
    return fully_shard(net, mesh=_mesh(), mp_policy=replace(policy, output_dtype=torch.float32))


def _kept_whole(device: str) -> nn.Module:
    """Whole from the forward pass to the backward; one layer is cut along its other dimension, one is frozen."""
    net = _net().to(device)
    net[2].bias.requires_grad_(False)
    along = {(16, 8): 1}
    placed = lambda p: Shard(along.get(tuple(p.shape), 0))  # noqa: E731
    fully_shard(net[0], mesh=_mesh(), reshard_after_forward=False, shard_placement_fn=placed)
    return fully_shard(net, mesh=_mesh(), reshard_after_forward=False)


class _Blocks(nn.Module):
    """A layer that is used twice, one that is computed again in the backward, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.again, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(x).relu())
        return checkpoint(self.again, x, use_reentrant=False).sin()


def _blocks(device: str) -> nn.Module:
    torch.manual_seed(0)
    net = _Blocks().to(device)
    for layer in (net.twice, net.again, net.never):
        fully_shard(layer, mesh=_mesh())
    return fully_shard(net, mesh=_mesh())


def _parallel(device: str) -> nn.Module:
    mesh = init_device_mesh(torch.device(_plain()).type, (2,))
    return parallelize_module(_net().to(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _values(module: nn.Module) -> list[torch.Tensor]:
    return list(map(_whole, module.parameters()))


def _whole(tensor: Any) -> torch.Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu().clone()  # type: ignore[no-any-return]


def trained(form: str, rank: int, make: Callable[[str], nn.Module]) -> list[Any]:
    """A whole step, its gradients gone at its end."""
    return _run(form, rank, make, _step)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = net(x * 2).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _accumulating(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Gradients of two backwards are added, and are there behind the step."""
    optimizer.zero_grad()
    loss = torch.zeros((), device=x.device)
    for part in x.chunk(2):
        one = net(part).square().mean()
        one.backward()
        loss = loss + one.detach()
    optimizer.step()
    return loss


def _unreduced(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """The gradients of the first backward are added in whole, as `no_sync()` of others has it."""
    net.set_requires_gradient_sync(False)
    net(x).square().mean().backward()
    net.set_requires_gradient_sync(True)
    return _step(net, optimizer, x)


_SEEN: dict[Any, list[Any]] = {}  # eager's values, by program and process


def _run(form: str, rank: int, make: Callable[[str], nn.Module], step_of: Any, told: str = "") -> list[Any]:
    device = "lazy" if "device" in form else _plain()
    if make is not _parallel and device == "lazy":
        with pytest.raises(RuntimeError, match="for fully_shard, keep the module on the mesh's device"):
            make(device)
        return _SEEN[make, step_of, rank]
    net = make(device)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    step = functools.partial(step_of, net, optimizer)
    run = torchlazy.compile(step) if "compile" in form else step
    numbers = torch.Generator().manual_seed(rank if make is not _parallel else 0)
    losses = []
    for turn in range(7):
        x = torch.randn(6, 8, generator=numbers).to(device)
        if turn == 3:
            with torch.no_grad():
                losses.append(net(x).detach().cpu().clone())
        with torchlazy.lazy_mode() if form == "mode" else contextlib.nullcontext():
            loss = run(x)
        losses.append(loss.detach().cpu().clone())
    if run is not step:
        counts = str(run.report())
        if told and told not in counts:
            raise AssertionError(f"not told: {counts}")
        if not told and form == "compile" and " 0 replayed" in counts and _IS_REPLAYED:
            raise AssertionError(counts)
    grads = [None if p.grad is None else _whole(p.grad) for p in net.parameters()]
    _SEEN[make, step_of, rank] = found = losses + _values(net) + grads
    return found


def _left_by_an_error(form: str, rank: int) -> list[Any]:
    """A forward pass that raises leaves the modules with their shards, and what autograd keeps as it was."""
    if "device" in form:
        return _SEEN[_left_by_an_error, rank]
    net = _sharded(_plain())
    x = torch.ones(6, 8, device=_plain())

    def step(x: torch.Tensor, fails: bool) -> torch.Tensor:
        handle = net[2].register_forward_hook(lambda *_: 1 / 0) if fails else None
        try:
            loss = net(x).square().mean()
        finally:
            if handle is not None:
                handle.remove()
        loss.backward()
        return loss

    run = torchlazy.compile(step) if "compile" in form else step
    losses = [run(x, False).detach().cpu().clone() for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        run(x, True)
    net.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in net.parameters())
    y = torch.ones(2, requires_grad=True)
    (y * y).sum().backward()
    losses += [run(x, False).detach().cpu().clone() for _ in range(2)]
    _SEEN[_left_by_an_error, rank] = found = losses + [_whole(p.grad) for p in net.parameters()]
    return found


PROGRAMS: dict[str, Callable[..., list[Any]]] = {
    "fully_shard": functools.partial(trained, make=_sharded),
    "fully_shard, uneven, in halves": functools.partial(trained, make=_uneven),
    "fully_shard, kept whole": functools.partial(trained, make=_kept_whole),
    "fully_shard, blocks": functools.partial(trained, make=_blocks),
    "fully_shard, accumulating": functools.partial(_run, make=_sharded, step_of=_accumulating),
    "fully_shard, unreduced": functools.partial(_run, make=_sharded, step_of=_unreduced),
    "parallel layers": functools.partial(trained, make=_parallel),
}
if hasattr(FSDPModule, "reset_iter_state"):  # newer than torch 2.11
    PROGRAMS["fully_shard, left by an error"] = _left_by_an_error


def cases_of(world: int) -> dict[str, Callable[[str, int], list[Any]]]:
    """What two processes run: (form, rank) -> values that are as eager's."""
    return PROGRAMS if world == 2 else {}
