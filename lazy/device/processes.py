"""Lazy tensors between processes (`torch.multiprocessing`): arguments of `spawn`, items of queues, results of pools.

Invariant: as ordinary ones do, they share their memory with the other process: what one writes there the other reads.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.record import subclasses
from torchlazy.lazy.record.lent_memory import keep_lent, storage_on
from torchlazy.lazy.record.recorder import Recorder, current
from torchlazy.lazy.record.tensor import LAZY, OWN_ATTRIBUTES, LazyTensor, wrap
from torchlazy.lazy.trace.geometry import geometry_like


def install(recorder: Recorder) -> None:
    """Let lazy tensors go to other processes."""
    ForkingPickler.register(LazyTensor, _reduce)
    ForkingPickler.register(torch.Tensor, _reduce_ordinary)
    ForkingPickler.register(torch.nn.Parameter, _reduce_ordinary)
    subclasses.on_new_class.append(lambda kind: ForkingPickler.register(kind, _reduce_of_users))


def _check_leaf(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a lazy tensor that is no leaf and requires a gradient cannot go to another process, where its graph is "
            "not / send tensor.detach()"
        )


def _reduce_ordinary(tensor: torch.Tensor) -> Any:
    """Of a tensor of torch's own classes; one on the native lazy device, too."""
    if not DEVICE.is_marked(tensor):
        return reductions.reduce_tensor(tensor)
    _check_leaf(tensor)
    return _rebuild, (reductions.reduce_tensor(DEVICE.lent(tensor)), type(tensor), tensor.requires_grad, True)


def _reduce(tensor: LazyTensor) -> Any:
    recorder = tensor.recorder
    _check_leaf(tensor)
    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    on_lazy = tensor.device == LAZY
    with torch.no_grad():
        alias = tensor.detach()
        assert isinstance(alias, LazyTensor)
        memory = alias._lent("share_memory_")
    with recorder.apart():
        reduced = reductions.reduce_tensor(memory)  # which moves the memory, to where others can have it too
    if on_lazy:
        keep_lent(tensor._storage_)
    else:
        recorder.shared.add(tensor._storage_)
    return _rebuild, (reduced, kind, tensor.requires_grad, on_lazy)


def _rebuild(reduced: tuple[Any, Any], kind: type, requires_grad: bool, on_lazy: bool) -> torch.Tensor:
    recorder = current()
    make, given = reduced
    with recorder.apart():
        memory = make(*given)
        if on_lazy and memory.device.type == DEVICE.computes():
            DEVICE.mark(memory)
            DEVICE.lent(memory)
        elif on_lazy:
            storage = storage_on(recorder, memory.untyped_storage(), memory.dtype, LAZY)
            keep_lent(storage)
            memory = wrap(storage, geometry_like(memory, LAZY, storage.base.compute), None, -1)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(memory, requires_grad)
    return memory.requires_grad_(requires_grad)


def _reduce_of_users(tensor: LazyTensor) -> Any:
    state = {name: value for name, value in tensor.__dict__.items() if name not in OWN_ATTRIBUTES}
    return _rebuild_of_users, (_reduce(tensor), subclasses.users_class(type(tensor)), state)


def _rebuild_of_users(reduced: tuple[Any, Any], kind: Any, state: dict[str, Any]) -> torch.Tensor:
    make, given = reduced
    found: torch.Tensor = make(*given).as_subclass(kind)
    for name, value in state.items():
        setattr(found, name, value)
    return found


__all__ = ["install"]
