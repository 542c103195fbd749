"""Programs that two processes run together (`distributed_run`): collectives and `DistributedDataParallel`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchlazy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

_PLAIN = "cpu"  # where eager runs, and ordinary tensors are; a process with a GPU sets its own


def _start(t: torch.Tensor) -> torch.Tensor:
    return t * 1.5 + 1


def pending_reads(t: Any) -> Any:
    before = t * 2
    dist.all_reduce(t)
    return before, t, t * 2


def asynchronous(t: Any) -> Any:
    u = _start(t)
    before = t + u
    work = dist.all_reduce(u, async_op=True)
    meanwhile = t * 3
    work.wait()
    u.mul_(2)
    return before, meanwhile, u


def futures(t: Any) -> Any:
    u = _start(t)
    reduced = dist.all_reduce(u, async_op=True).get_future().wait()[0]
    u.mul_(2)
    reduced.add_(1)
    return u, reduced


def callbacks(t: Any) -> Any:
    u = _start(t)
    return u, dist.all_reduce(u, async_op=True).get_future().then(lambda done: done.value()[0].div(2)).wait()


def gathered(t: Any) -> Any:
    u = _start(t)
    parts = [torch.zeros_like(u) for _ in range(2)]
    before = parts[1] + 1
    dist.all_gather(parts, u)
    return *parts, before, parts[0] + parts[1]


def scattered(t: Any) -> Any:
    u = _start(t)
    half = torch.zeros(u.shape[0] // 2, *u.shape[1:], device=u.device)
    before = half + 1
    dist.reduce_scatter_tensor(half, u)
    return half, before, half * 2


def messages(t: Any) -> Any:
    u, v = _start(t), torch.zeros_like(t)
    before = v + 1
    other = 1 - dist.get_rank()
    calls = [lambda: dist.isend(u, other), lambda: dist.irecv(v, other)]
    for work in [call() for call in (calls if other else reversed(calls))]:  # NCCL runs one after the other
        work.wait()
    u.zero_()
    return u, v, before, v * 2


def windows(t: Any) -> Any:
    u = _start(t)
    part, before = u.view(-1)[2:6], u * 2
    dist.all_reduce(part)
    return u, part, before


def functional(t: Any) -> Any:
    import torch.distributed._functional_collectives as functions

    u = _start(t)
    y = functions.all_reduce(u, "sum", dist.group.WORLD)
    return y, y * 2, u, functions.all_gather_tensor(u, 0, dist.group.WORLD)


def functional_in_place(t: Any) -> Any:
    u = _start(t)
    before = u + 1
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce_(u, "sum", dist.group.WORLD.group_name))
    return before, u, u * 2


def differentiated(t: Any) -> Any:
    import torch.distributed.nn.functional as functions

    p = t.detach().clone().requires_grad_()
    y = functions.all_reduce(_start(p))
    (y * y).sum().backward()
    return y.detach(), p.grad


def on_the_host(t: Any) -> Any:
    counts = torch.arange(3.0) + dist.get_rank()
    dist.all_reduce(counts)
    dist.barrier()
    return _start(t), t + counts.to(t.device)


def in_and_out(t: Any) -> Any:
    """Several in a row, results that one process alone looks at, arguments and windows that are written."""
    u, rank = _start(t), dist.get_rank()
    dist.broadcast(u, 1)
    whole = torch.zeros(2 * u.shape[0], *u.shape[1:], device=u.device)
    dist.all_gather_into_tensor(whole, u * (rank + 1))
    unread = u.exp()
    dist.all_reduce(unread, op=dist.ReduceOp.MAX)
    if rank == 0:
        u = u + unread
    dist.all_reduce(t[1:3])
    return u, whole, t * 2


def branches(t: Any) -> Any:
    """Processes take ways of their own behind a collective: those before it run once, whoever has seen the way."""
    u = _start(t)
    dist.all_reduce(t[1:3])
    dist.all_reduce(u)
    if t[0, 0] > 0.5 + dist.get_rank():  # argument i begins with i
        u = u * 2
    dist.all_reduce(u)
    return u, t * 2


def branches_functionally(t: Any) -> Any:
    import torch.distributed._functional_collectives as functions

    y = functions.all_reduce(_start(t), "sum", dist.group.WORLD)
    if t[0, 0] + y.sum() * 0 > 0.5 + dist.get_rank():
        y = y * 2
    return functions.all_reduce(y, "sum", dist.group.WORLD), t


def averaged_by_hand(t: Any) -> Any:
    w = (t.detach()[:3] * 0.1).clone().requires_grad_()
    (t.detach() @ w).sin().sum().backward()
    dist.all_reduce(w.grad)
    w.grad /= dist.get_world_size()
    with torch.no_grad():
        w -= 0.5 * w.grad
    return w.detach(), w.grad


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    f.__name__: f
    for f in (
        pending_reads, asynchronous, futures, callbacks, gathered, scattered, messages, windows, functional,
        functional_in_place, differentiated, on_the_host, in_and_out, branches,
        branches_functionally, averaged_by_hand,
    )
}  # fmt: skip


REPLAYED = {
    "pending_reads", "asynchronous", "gathered", "windows", "functional", "in_and_out", "branches", "averaged_by_hand",
}  # fmt: skip
"""Cases that a compiled call replays; others take messages, futures' callbacks or tensors of the host."""


class _Net(nn.Module):
    def __init__(self, may_skip: bool) -> None:  # one of the layers, for an odd number of rows
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.may_skip = may_skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x)).relu()
        if not self.may_skip or x.shape[0] % 2 == 0:
            h = h + self.b(h)
        return self.c(h)


def _torchs_own(name: str) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        model._check_comm_hook = lambda hook: None  # it wants NCCL for bfloat16; gloo sums it as well
        model.register_comm_hook(None, getattr(default_hooks, name))

    return register


def _low_rank(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)


def _by_hand(model: Any) -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the types, and wants no strings
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)


# What a case gives DistributedDataParallel; beside it: a hook, accumulation, a module made inside of lazy_mode.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets that are the gradients": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005, "turns": 2},
    "unused parameters": {"find_unused_parameters": True, "unused": "at times", "turns": 2},
    "unused parameters, views": {"find_unused_parameters": True, "unused": "at times", "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, unused parameters": {"static_graph": True, "unused": "always"},
    "hook that sums": {"hook": _torchs_own("allreduce_hook")},
    "hook in halves": {"hook": _torchs_own("fp16_compress_hook")},
    "hook in bfloat16": {
        "hook": _torchs_own("bf16_compress_hook"),
        "find_unused_parameters": True,
        "unused": "at times",
    },
    "static, every second step compiled": {"static_graph": True, "every": 2, "hook": _torchs_own("allreduce_hook")},
    "low rank": {"hook": _low_rank},
    "hook by hand": {"hook": _by_hand},
    "made inside": {"inside": True},
    "accumulated": {"turns": 2},
    "only the model compiled": {"compiled": "model", "broadcast_buffers": False},
    "only the loss compiled": {"compiled": "loss"},
    "every second step compiled": {"every": 2},
}  # fmt: skip
COMPILED = ("asynchronous", "in_and_out", "plain")
"""Cases whose cuts are compiled at once; those of others run operator by operator, which takes no compiler."""
STEPS_REPLAYED = {*MODELS} - {
    "low rank", "hook by hand", "only the model compiled", "only the loss compiled",
    "static, every second step compiled",  # the steps between need a new reducer each time, which guards see
}  # fmt: skip
"""Those whose steps a compiled call replays, without the reducer."""
REASONS = {"low rank": "hook on communication", "hook by hand": "hook on communication"}
"""Why the steps of others are not."""
ALONE = ("plain", "made inside")
"""Those that one process runs alone, too."""


def _trained(
    form: str, rank: int, name: str, turns: int = 1, hook: Any = None, inside: bool = False, compiled: str = "step",
    every: int = 1, unused: str = "", **how: Any,
) -> list[Any]:  # fmt: skip
    torch.manual_seed(0)
    device = "lazy" if "device" in form else _PLAIN

    def mode(wanted: bool = True) -> Any:
        return torchlazy.lazy_mode() if form == "mode" and wanted else contextlib.nullcontext()

    with mode(inside):
        net = _Net(bool(unused)).to(device)
        model = DistributedDataParallel(net, **how)
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def part(which: str, function: Any) -> Any:
        return torchlazy.compile(function, audit=False) if "compile" in form and which == compiled else function

    called = part("model", model)
    loss_of = part("loss", lambda x: called(x).square().mean())

    def step(*batches: torch.Tensor) -> torch.Tensor:
        for x in batches[:-1]:
            with model.no_sync():
                loss_of(x).backward()
        loss = loss_of(batches[-1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = part("step", step)
    numbers = torch.Generator().manual_seed(rank)
    losses = []
    for i in range(8 if unused else 4 * every):
        rows = 7 if unused == "always" or (unused and (i + rank) // 2 % 2) else 6
        batches = [torch.randn(rows, 8, generator=numbers).to(device) for _ in range(turns)]
        with mode():
            loss = (step if i % every else run)(*batches)
        losses.append(loss.detach().cpu().clone())
    if run is not step and name in STEPS_REPLAYED and not run.report().replays:
        raise AssertionError(f"not replayed: {run.report()}")
    if run is not step and name in REASONS and REASONS[name] not in str(run.report()):
        raise AssertionError(f"not told: {run.report()}")
    return losses + [p.detach().cpu().clone() for p in (*net.parameters(), *net.buffers())]


def _called(form: str, rank: int, function: Callable[[Any], Any]) -> list[Any]:
    run = torchlazy.compile(function, audit=False) if "compile" in form else function
    found = []
    for i in range(3):
        t = (torch.arange(12.0).reshape(4, 3) * (rank + 1) + i).to("lazy" if "device" in form else _PLAIN)
        with torchlazy.lazy_mode() if form == "mode" else contextlib.nullcontext():
            results = run(t)
        found += [value.detach().cpu().clone() for value in (*results, t)]
    if "compile" in form and function.__name__ in REPLAYED and not run.report().replays:  # type: ignore[attr-defined]
        raise AssertionError(f"not replayed: {run.report()}")  # type: ignore[attr-defined]
    return found


GONE = "a peer that is gone"


def _peer_gone(form: str, rank: int) -> list[Any]:
    """The last case: one process ends, and a replay of the other, which waits for it, says where."""
    if form != "device compiled":
        return []
    run = torchlazy.compile(pending_reads, audit=False)
    for _ in range(3):
        run(torch.ones(4, 3, device="lazy"))
    if rank:
        os._exit(0)
    try:
        run(torch.ones(4, 3, device="lazy"))
    except RuntimeError as error:
        if "c10d::allreduce_ of tensors of [(4, 3)]" not in str(error):
            raise
        return []
    raise AssertionError("no error")


def set_plain(device: str) -> None:
    """Where eager runs from now on."""
    global _PLAIN
    _PLAIN = device


def cases_of(world: int) -> dict[str, Callable[[str, int], list[Any]]]:
    """What processes of a world of that size run: (form, rank) -> values that are as eager's."""
    cases: dict[str, Callable[[str, int], list[Any]]] = {}
    if world == 2:
        cases |= {name: functools.partial(_called, function=f) for name, f in COLLECTIVES.items()}
    return (
        cases
        | {
            name: functools.partial(_trained, name=name, **how)
            for name, how in MODELS.items()
            if world > 1 or name in ALONE
        }
        | ({GONE: _peer_gone} if world == 2 else {})
    )
