"""`DistributedDataParallel` in compiled calls: buffers are sent and gradients averaged by operators and collectives,
which are steps of a replay, in place of the reducer, whose C++ keeps its state by address and by hooks.

At the end of a backward through the module's results the gradients of all parameters go, divided by the number of
processes, into flat buckets, one all-reduce each, and back. What the reducer would give: it divides and sums alike,
bucket for bucket; only which bucket a gradient is in differs.

Invariant: a module is reduced so in every call of a compiled callable whose Python runs, or nowhere: processes agree on
their collectives although one captures, one audits and one replays. Modules with more than that (unused parameters, a
static graph, hooks on communication, `join`) keep their reducer, and their calls their Python.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.running_compiled import runs_compiled

_ALLREDUCE = torch.ops.c10d.allreduce_.default


class _IdleReducer:
    """Stands in for the reducer, and its logger, during a forward pass; notes whether a backward was prepared."""

    def __init__(self) -> None:
        self.is_prepared = False

    def set_runtime_stats_and_log(self) -> None: ...

    def prepare_for_forward(self) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        self.is_prepared = True


class _Awaited:
    """Modules whose last forward pass with gradients has had no backward yet."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._queued: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, module: Any) -> None:
        self._modules.add(module)
        self._queued.discard(module)

    def queue(self, module: Any) -> None:
        """The backward goes through a result of the module: at its end the gradients are averaged, once."""
        if module not in self._modules or module in self._queued:
            return
        self._queued.add(module)

        def reduce() -> None:
            self._modules.discard(module)
            self._queued.discard(module)
            average_gradients(module)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(reduce)


_AWAITED = _Awaited()


def is_served(module: Any) -> bool:
    """Whether the module asks nothing of its reducer but the average of all gradients."""
    asks = (
        module.find_unused_parameters, module.static_graph, module._comm_hooks, module._join_config.enable,
        module.mixed_precision, module._delay_all_reduce_params, module._use_python_reducer,
        hasattr(module, "buffer_hook"),
        any(hasattr(p, "_in_backward_optimizers") for p in module._module_parameters),
        any(getattr(m, "sparse", False) for m in module.module.modules()),
    )  # fmt: skip
    return not any(asks)


def reducing_forward(forward: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """`DistributedDataParallel.forward` that leaves the reducer out where a compiled call's Python runs."""

    @functools.wraps(forward)
    def reducing(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not runs_compiled() or not is_served(self):
            return forward(self, *inputs, **kwargs)
        own = self.__dict__
        reducer, logger, idle = own["reducer"], own["logger"], _IdleReducer()
        own["reducer"] = own["logger"] = idle
        own["_default_broadcast_coalesced"] = functools.partial(_send_buffers, self)
        try:
            output = forward(self, *inputs, **kwargs)
        finally:
            own["reducer"], own["logger"] = reducer, logger
            del own["_default_broadcast_coalesced"]
        if idle.is_prepared:
            _await_backward(recorder, self, output)
        return output

    return reducing


def _await_backward(recorder: Recorder, module: Any, output: Any) -> None:
    found = [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]
    if not found:  # gradients come by another way than the results: the reducer's hooks see it
        module.reducer.prepare_for_forward()
        module.reducer.prepare_for_backward([])
        return
    _AWAITED.begin(module)
    behind = weakref.ref(module)

    def arrived(gradient: torch.Tensor) -> None:
        recorder.on_host_write(_ALLREDUCE)  # a backward that is only recorded may not communicate
        if (awaited := behind()) is not None:
            _AWAITED.queue(awaited)

    for tensor in found:
        tensor.register_hook(arrived)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))


@torch.no_grad()
def average_gradients(module: Any) -> None:
    """Each gradient becomes its average over the processes, in place."""
    group = module.process_group
    share = 1.0 / dist.get_world_size(group)
    parameters = [p for p in module._module_parameters if p.requires_grad]
    for bucket in _buckets(parameters, module.bucket_bytes_cap):
        gradients = [p.grad for p in bucket]
        rows = [torch.zeros_like(p) if g is None else g for p, g in zip(bucket, gradients, strict=True)]
        flat = torch.cat([row.reshape(-1) for row in rows]) * share
        dist.all_reduce(flat, group=group)
        parts = flat.split([row.numel() for row in rows])
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None:
                gradient.copy_(part.view(gradient.shape))


@torch.no_grad()
def _send_buffers(module: Any, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0) -> None:
    """Buffers become those of one process, as `DistributedDataParallel` has it before a forward pass."""
    buffers = module.modules_buffers if bufs is None else bufs
    size = module.broadcast_bucket_size if bucket_size is None else bucket_size
    for bucket in _buckets(buffers, size):
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in bucket])
        dist.broadcast(flat, group=module.process_group, group_src=authoritative_rank)
        parts = flat.split([buffer.numel() for buffer in bucket])
        for buffer, part in zip(bucket, parts, strict=True):
            buffer.detach().copy_(part.view(buffer.shape))


def _buckets(tensors: Iterable[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """In order, by dtype and device, each of about `size` bytes."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[int, list[torch.Tensor]]] = {}
    buckets: list[list[torch.Tensor]] = []
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        taken, bucket = open_buckets.get(key, (size, []))
        if taken >= size:
            taken, bucket = 0, []
            buckets.append(bucket)
        bucket.append(tensor)
        open_buckets[key] = taken + tensor.numel() * tensor.element_size(), bucket
    return buckets


__all__ = ["average_gradients", "is_served", "reducing_forward"]
