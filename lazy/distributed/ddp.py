"""`DistributedDataParallel` in recorded and compiled programs: averages gradients and sends buffers by operators.

The reducer's C++ keeps its state by address and by hooks. Compiled calls do without it: at the end of a backward
through the module's results the gradients of all parameters are divided by the number of processes and copied into flat
buckets, one all-reduce each, and back, in the dtype that torch's own communication hooks ask for. These are steps of a
replay. The reducer divides and sums alike, bucket for bucket; only which bucket a gradient is in differs. Where
parameters may be unused, the processes first sum who has a gradient, and one that has not all reads the sum: a gradient
that only another process has is made here, too.

A call with a module that keeps its reducer is not captured: it runs its Python, recorded. The reducer lays out buckets
and marks used parameters without calling an operator; gradients go into the buckets, and out of them, by operators,
which are recorded as usual, and each collective cuts. Communication hooks leave functions to futures, which run in
torch's threads, where no mode is open: hooks run outside of the mode too, on the buckets' memory.

Invariant: a module is reduced here in every call of a compiled callable whose Python runs, or in none: processes agree
on their collectives although one captures, one audits and one replays. Modules that ask for more (other communication
hooks, sparse gradients, `join`) keep their reducer, and their calls their Python. No operator on the reducer's own
memory is pending, and no mode of ours is open, while C++ or a hook runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torchlazy.lazy.compiled.template.objects import tensors_in
from torchlazy.lazy.device.outside_mode import outside_lazy_mode
from torchlazy.lazy.record.compiled_scope import runs_compiled
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.torch_private.dispatch import without_our_modes
from torchlazy.lazy.torch_private.distributed import remove_reducer_hooks, renew_reducer

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


# The dtype that a hook of torch's sends gradients in, None for the gradient's own.
_HOOKS: dict[Any, torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}


def _registered_hook(hook: Any) -> Any:
    """The hook that the user registered (`data_parallel` registers one that calls it)."""
    return getattr(hook, "hook_given", hook)


def kept_reducer(module: Any) -> str:
    """Why the module keeps its reducer: a feature that is not supported here; "" where there is none."""
    asks = (
        ("with a hook on communication that is none of allreduce_hook, fp16_compress_hook and bf16_compress_hook",
         len(module._comm_hooks) > 1 or any(_registered_hook(hook) not in _HOOKS for hook, _ in module._comm_hooks)),
        ("inside of join()", module._join_config.enable),
        ("with mixed_precision", module.mixed_precision),
        ("with delay_all_reduce_named_params", module._delay_all_reduce_params),
        ("with torch's Python reducer", module._use_python_reducer),
        ("with a hook on its buffers", hasattr(module, "buffer_hook")),
        ("with optimizers that step in the backward",
         any(hasattr(p, "_in_backward_optimizers") for p in module._module_parameters)),
        ("with skip_all_reduce_unused_params", getattr(module, "skip_all_reduce_unused_params", False)),
        ("with sparse gradients", any(getattr(m, "sparse", False) for m in module.module.modules())),
    )  # fmt: skip
    return next((what for what, is_asked in asks if is_asked), "")


_WITHOUT_HOOKS: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose reducer has no hooks on parameters now


def _with_hooks(module: Any, recorder: Recorder) -> Any:
    if module in _WITHOUT_HOOKS and torch.is_grad_enabled():
        _WITHOUT_HOOKS.discard(module)
        with outside_lazy_mode(recorder):
            renew_reducer(module)
    return module


_SET_ASIDE = ("reducer", "logger", "find_unused_parameters", "static_graph")


def reducing_forward(forward: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """`DistributedDataParallel.forward` that leaves the reducer out where a compiled call's Python runs."""

    @functools.wraps(forward)
    def reducing(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not runs_compiled():
            return forward(_with_hooks(self, recorder), *inputs, **kwargs)
        if kept := kept_reducer(self):
            if recorder.capture is not None:
                recorder.capture.refuse(f"DistributedDataParallel {kept} keeps torch's reducer")
            return forward(_with_hooks(self, recorder), *inputs, **kwargs)
        if (self.find_unused_parameters or self.static_graph) and self not in _WITHOUT_HOOKS:
            remove_reducer_hooks(self)
            _WITHOUT_HOOKS.add(self)
        own, idle = self.__dict__, _IdleReducer()
        was = {name: own[name] for name in _SET_ASIDE}
        own["reducer"] = own["logger"] = idle
        own["find_unused_parameters"] = own["static_graph"] = False  # else torch wraps the results in its own Function
        own["_default_broadcast_coalesced"] = functools.partial(_send_buffers, self)
        try:
            output = forward(self, *inputs, **kwargs)
        finally:
            own.update(was)
            del own["_default_broadcast_coalesced"]
        if idle.is_prepared:
            _await_backward(recorder, self, output)
        return output

    return reducing


def _await_backward(recorder: Recorder, module: Any, output: Any) -> None:
    found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if not found:  # no result needs a gradient: the reducer's own hooks see other gradients
        module.reducer.prepare_for_forward()
        module.reducer.prepare_for_backward([])
        return
    _AWAITED.begin(module)
    behind = weakref.ref(module)

    def arrived(gradient: torch.Tensor) -> None:
        recorder.on_host_write(_ALLREDUCE)  # while a backward is only being recorded, no collective may run
        if (awaited := behind()) is not None:
            _AWAITED.queue(awaited)

    for tensor in found:
        tensor.register_hook(arrived)


@torch.no_grad()
def average_gradients(module: Any) -> None:
    """Average each gradient over the processes, in place; make one that only other processes have."""
    parameters = [p for p in module._module_parameters if p.requires_grad]
    may_lack = module.find_unused_parameters or module.static_graph
    wanted = {id(parameter) for parameter in _lacking_here(module, parameters)} if may_lack else set()
    group, dtype = module.process_group, None
    for hook, state in module._comm_hooks:
        group, dtype = dist.group.WORLD if state is None else state, _HOOKS[_registered_hook(hook)]
    count = dist.get_world_size(group)
    for bucket in _buckets(parameters, module.bucket_bytes_cap):
        gradients = [p.grad for p in bucket]
        rows = [torch.zeros_like(p) if g is None else g for p, g in zip(bucket, gradients, strict=True)]
        flat = torch.cat([row.reshape(-1) for row in rows])
        if dtype is not None:
            flat = flat.to(dtype)
        flat = flat / count if module._comm_hooks else flat * (1.0 / count)
        dist.all_reduce(flat, group=group)
        parts = flat.split([row.numel() for row in rows])
        for parameter, gradient, part in zip(bucket, gradients, parts, strict=True):
            if gradient is not None:
                gradient.copy_(part.view(gradient.shape))
            elif id(parameter) in wanted:
                parameter.grad = part.view(parameter.shape).to(parameter.dtype, copy=True)


def _lacking_here(module: Any, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters that have a gradient in another process but not in this one."""
    if not parameters:
        return []
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(used, group=module.process_group)
    lacking = [i for i, p in enumerate(parameters) if p.grad is None]
    if not lacking:
        return []
    elsewhere = used[lacking] > 0
    if not bool(elsewhere.any()):
        return []
    if bool(elsewhere.all()):
        return [parameters[i] for i in lacking]
    return [parameters[i] for n, i in enumerate(lacking) if bool(elsewhere[n])]


@torch.no_grad()
def _send_buffers(module: Any, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0) -> None:
    """Broadcast the buffers of one process, as `DistributedDataParallel` does before a forward pass."""
    buffers = module.modules_buffers if bufs is None else bufs
    size = module.broadcast_bucket_size if bucket_size is None else bucket_size
    for bucket in _buckets(buffers, size):
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in bucket])
        dist.broadcast(flat, group=module.process_group, group_src=authoritative_rank)
        parts = flat.split([buffer.numel() for buffer in bucket])
        for buffer, part in zip(bucket, parts, strict=True):
            buffer.detach().copy_(part.view(buffer.shape))


def _buckets(tensors: Iterable[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Buckets of about `size` bytes, in order, one dtype and device each."""
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


def install(recorder: Recorder) -> None:
    """Make the reducer, and rebuild its buckets before a forward pass, outside of `lazy_mode`.

    Each forward pass with gradients asks for new buckets; so operators of the last backward on the map of used
    parameters (a fill that is still pending) have run before the next one marks parameters there by address.
    """
    if not torch.distributed.is_available():
        return

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with outside_lazy_mode(recorder):
                return function(*args, **kwargs)

        return call

    reducer: Any = torch.distributed.Reducer
    reducer._rebuild_buckets = outside(reducer._rebuild_buckets)
    kind: Any = DistributedDataParallel
    kind.__init__ = outside(kind.__init__)
    kind.forward = reducing_forward(kind.forward, recorder)
    register = kind.register_comm_hook

    def without_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            if not recorder.mode_depth:
                return hook(*args)
            recorder.cut("communication hook")
            with without_our_modes():  # other threads that continue the hook's work can use the recorder
                return hook(*args)

        call.hook_given = hook  # type: ignore[attr-defined]
        return call

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        register(self, state, without_mode(hook) if callable(hook) else hook)

    kind.register_comm_hook = register_comm_hook


__all__ = ["average_gradients", "kept_reducer", "reducing_forward"]
