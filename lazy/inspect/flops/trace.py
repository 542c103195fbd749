"""Records a call without running it: its operators with the geometry of every value, at any sizes of its inputs.

Invariant: nothing is computed and nothing stays: tensors keep their values, gradients, optimizer state and random
generators are restored. What the call left behind in its own Python objects has no value.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchlazy.lazy.config import config
from torchlazy.lazy.device.mode import RecordedBlock
from torchlazy.lazy.export.record import dense_strides
from torchlazy.lazy.record.paths import Paths
from torchlazy.lazy.record.recorder import current
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, wrap
from torchlazy.lazy.run.sync_policy import CAUSES, kind_of
from torchlazy.lazy.torch_private.dispatch import exporting_flags
from torchlazy.lazy.torch_private.patches import UnwrappedDispatchMode
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.geometry import geometry, indexed, is_dense
from torchlazy.lazy.trace.storage import storage_of
from torchlazy.lazy.trace.trace import CutTrace

_ENDLESS = 1 << 40
_SETTINGS = ("paths", "gate", "keep_frames", "has_mode_tensors", "ops_recorded")


class CannotCount(RuntimeError):
    """The call cannot be recorded without running it.

    Cause: it needs a value on the host, or an operator whose result depends on data, at the line that is named. Fix:
    count the part around that line.
    """


class WouldRaise(Exception):
    """At these sizes an operator would raise: eager's own error text, and the user's line."""


class Place(NamedTuple):
    """A size of a tensor among the call's arguments: "x_0" for dimension 0 of x."""

    name: str
    size: int


class UnrunCall:
    """A function and its arguments, to be recorded at several sizes of its tensor arguments.

    `places` are those sizes, in order; arguments without a name of their own are "arg0", "arg1", ...
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]):
        self.fn = fn
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._tensors = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor) and is_dense(leaf)]
        owners: list[str] = []  # by leaf
        for name, value in (*zip(chain(names, map("arg{}".format, count(len(names)))), args), *kwargs.items()):
            inner = len(tree_flatten(value)[0])
            owners += [name] if inner == 1 else [f"{name}{number}" for number in range(inner)]
        self.places = [
            Place(f"{owners[i]}_{dim}", size) for i in self._tensors for dim, size in enumerate(self._leaves[i].shape)
        ]
        self._uses_mode = not any(
            type(self._leaves[i]) is LazyTensor and self._leaves[i].device.type == "lazy" for i in self._tensors
        )
        self._leaf_tensors: list[torch.Tensor] = []  # whose gradients a call may set
        self.as_export = False  # torch.compiler.is_exporting() is True, so that libraries read no values

    def record(self, sizes: Sequence[int]) -> CutTrace:
        """The trace of the call with these sizes, one for each place.

        Raises WouldRaise, CannotCount, or what the function itself raises.
        """
        self._leaf_tensors = self._leaf_tensors or _leaf_tensors()
        recorder = current()
        given = iter(sizes)
        with _unrun(self._uses_mode, self._leaf_tensors):
            leaves = list(self._leaves)
            for i in self._tensors:
                leaves[i] = _twin(leaves[i], tuple(islice(given, leaves[i].dim())))
            args, kwargs = tree_unflatten(leaves, self._spec)
            with exporting_flags() if self.as_export else nullcontext():
                result = self.fn(*args, **kwargs)
            live = {id(s): s for s in (ref() for ref in recorder._written) if s is not None and s.dirty}
            trace, _, _ = recorder._snapshot(list(live.values()))
            del result
        return trace


def _leaf_tensors() -> list[torch.Tensor]:
    """Every tensor of the process that a backward could give a gradient to: which ones the call reaches is unknown."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]


def _twin(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor like this one in another shape, in the same order of memory, without data."""
    recorder = current()
    is_lazy = tensor.device.type == "lazy"
    device = LAZY if is_lazy else indexed(tensor.device)
    compute = recorder.target if is_lazy else str(device)
    geom = geometry(shape, dense_strides(shape, tensor.stride()), 0, tensor.dtype, device, compute)
    with recorder.apart():
        storage = storage_of(geom, torch.empty(0, dtype=tensor.dtype))
    return wrap(storage, geom, None, -1).requires_grad_(tensor.requires_grad)


@contextmanager
def _unrun(uses_mode: bool, leaf_tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Operators inside are recorded into a trace that is thrown away; settings are as before afterwards."""
    recorder = current()
    recorder.cut("flops window opens")
    state, limit = torch.get_rng_state(), config.max_trace_length
    kept = {name: getattr(recorder, name) for name in _SETTINGS}

    def restore() -> None:
        for name, value in kept.items():
            setattr(recorder, name, value)
        config.max_trace_length = limit
        recorder._start_trace()
        torch.set_rng_state(state)

    with ExitStack() as stack:
        stack.callback(restore)
        recorder.paths, recorder.gate, recorder.keep_frames = Paths(), _gate, True
        config.max_trace_length = _ENDLESS
        if uses_mode:
            stack.enter_context(RecordedBlock())
        undo = stack.enter_context(_Undo(leaf_tensors))
        stack.callback(_discard)
        stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: undo.keep_state(optimizer)).remove)
        recorder._start_trace()
        yield


def _gate(cause: str) -> bool:
    """Flushes are left out; whatever needs memory raises: CannotCount, or an operator's error at these sizes."""
    if cause in CAUSES and kind_of(cause) == "flush":
        return True
    frame = user_frames.user_frame()
    _, _, reason = cause.partition(": ")
    _, is_error, text = reason.partition(": ")
    if is_error:  # "mm: aten.mm.default: RuntimeError: ...", what the fake kernel said
        raise WouldRaise(f"{text} (at {frame or 'an unknown line'})")
    raise CannotCount(
        f"torchlazy.flops: {frame or 'an unknown line'} needs a value ({cause}), and nothing is computed; "
        "count the part of the program before or after that line"
    )


def _discard() -> None:
    """Forget what was recorded: storages that have memory hold its value again, others never get one."""
    recorder = current()
    lost = RuntimeError("torchlazy: this tensor was recorded by torchlazy.flops and never computed")
    written = [ref() for ref in recorder._written]
    for storage in (*(s for _, s in recorder.inputs), *(s for s in written if s is not None)):
        if storage.epoch == recorder.epoch:
            storage.epoch, storage.dirty, storage.slot = -1, False, None
            if storage.real is None:
                storage.poison = lost
    recorder._start_trace()


class _Undo(UnwrappedDispatchMode):
    """Remembers what the call changes outside the trace, and restores it."""

    def __init__(self, leaf_tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._gradients = [(tensor, tensor.grad) for tensor in leaf_tensors]
        self._numbers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, tuple[torch.optim.Optimizer, dict[Any, dict[Any, Any]]]] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for tensor, value in self._numbers.values():
            tensor.copy_(value)
        for optimizer, state in self._states.values():
            optimizer.state.clear()
            optimizer.state.update(state)

    def keep_state(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step."""
        if id(optimizer) not in self._states:
            self._states[id(optimizer)] = optimizer, {p: dict(state) for p, state in optimizer.state.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                # An ordinary 0-dim tensor on the CPU (a step count) is written at once, recorded or not.
                is_number = type(tensor) is torch.Tensor and tensor.dim() == 0 and tensor.device.type == "cpu"
                if is_number and id(tensor) not in self._numbers:
                    with current().apart():
                        self._numbers[id(tensor)] = tensor, tensor.detach().clone()
        return func(*args, **(kwargs or {}))
