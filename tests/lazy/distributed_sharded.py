"""Programs that two processes run together (`distributed_run`): modules under `fully_shard`, and parallel layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.lazy import distributed_cases

COMPILED: tuple[str, ...] = ()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def _plain() -> str:
    return distributed_cases._PLAIN


def _sharded(device: str) -> nn.Module:
    net = _net().to(device)
    mesh = init_device_mesh(torch.device(_plain()).type, (2,))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _parallel(device: str) -> nn.Module:
    mesh = init_device_mesh(torch.device(_plain()).type, (2,))
    return parallelize_module(_net().to(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _values(module: nn.Module) -> list[torch.Tensor]:
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [p.detach().cpu().clone() for p in found]


def trained(form: str, rank: int, make: Callable[[str], nn.Module]) -> list[Any]:
    device = "lazy" if "device" in form else _plain()
    if make is _sharded and device == "lazy":
        with pytest.raises(RuntimeError, match="for fully_shard, keep the module on the mesh's device"):
            make(device)
        return trained("eager", rank, make)
    net = make(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x * 2).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torchlazy.compile(step) if "compile" in form else step
    numbers = torch.Generator().manual_seed(rank if make is _sharded else 0)
    losses = []
    for _ in range(4):
        x = torch.randn(6, 8, generator=numbers).to(device)
        with torchlazy.lazy_mode() if form == "mode" else contextlib.nullcontext():
            loss = run(x)
        losses.append(loss.detach().cpu().clone())
    if run is not step and make is _sharded and "fully_shard" not in str(run.report()):
        raise AssertionError(f"not told: {run.report()}")
    return losses + _values(net)


PROGRAMS: dict[str, Callable[..., list[Any]]] = {
    "fully_shard": functools.partial(trained, make=_sharded),
    "parallel layers": functools.partial(trained, make=_parallel),
}


def cases_of(world: int) -> dict[str, Callable[[str, int], list[Any]]]:
    """What two processes run: (form, rank) -> values that are as eager's."""
    return PROGRAMS if world == 2 else {}
