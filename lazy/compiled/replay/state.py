"""The values of one replay: what its steps made, by number, and where memory of the state and the arguments is now.

Invariant: while checks are still to come, new values of the state are held back; `commit` stores them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.replay.pairs import PairCrossing
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.custom_ops import memory_written, new_results
from torchlazy.lazy.numbers.expr import Expression, evaluator
from torchlazy.lazy.ops.collective_log import COLLECTIVE_LOG, FinishedCollective
from torchlazy.lazy.record.bit_views import memory_as
from torchlazy.lazy.record.lent_memory import is_pinned
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.running_trace import storage_over
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.trace.geometry import Geometry, show_bits, with_bits
from torchlazy.lazy.trace.storage import LazyStorage, storage_of


class ReplayState:
    """The values of one run."""

    def __init__(
        self, recorder: Recorder, leaves: Sequence[Any], given: Sequence[Any], template: t.CallTemplate
    ) -> None:
        self.recorder = recorder
        self.given = given
        self.leaves = leaves
        self.containers: Sequence[Any] = ()  # among the arguments, by number
        self.structure: Any = None  # of the arguments
        self.places: list[Any] = [None] * template.places
        self.hosts: list[Any] = [None] * template.hosts
        self.sources: list[Any] = [None] * template.sources
        self.reads: list[tuple[int, Callable[[], Any]]] = []  # numbers that only the caller gets, by their source
        self.storages: dict[int, LazyStorage] = {}  # of new memory, by its place
        self.outputs: list[torch.Tensor] = []
        # New values of the state, by storage, and how the trace that made them sees it.
        self.held: dict[int, tuple[LazyStorage, t.Memory, torch.Tensor, Geometry | None]] = {}
        self.is_open = False  # whether the run may still be undone
        self.communicated: list[FinishedCollective] = []  # collectives that ran while it may
        self.crossing: list[PairCrossing] = []  # what first halves of pairs keep for the second, the last one last
        self.undos: list[Callable[[], None]] = []  # what undoes steps on the host, in the order in which they ran
        self.until: dict[int, list[Any]] = {}  # values of host tensors written ahead, by the segment that comes before
        self.back: list[Any] = []  # values of host tensors to go back to where the next program raises
        self.generators: dict[int, torch.Tensor] = {}  # states to go back to, by number
        self.made: dict[int, torch.Tensor] = {}  # results and new state, by their numbers
        self.numbers: Iterator[Any] = iter(())  # among the results, in order
        self.sizes: list[int] = []  # of a template for all sizes, as far as they are known
        self.now: dict[int, Any] = {}  # its steps at these sizes, by the identity of the recorded ones
        self.needs_binding = False  # whether such steps are to be made first
        self.ending: Any = None  # its results and effects at these sizes
        for number, read in enumerate(template.read_free):
            self.sources[number] = read(leaves)

    def storage(self, memory: t.Memory) -> LazyStorage:
        if type(memory) is t.FromState:
            return memory.storage
        tensor = memory.tensor(self.leaves)  # type: ignore[union-attr]
        if isinstance(tensor, LazyTensor):
            return tensor._storage_
        return self.recorder.storage_of_plain(tensor)

    def memory(self, memory: t.Memory, geom: Geometry | None = None) -> torch.Tensor:
        """The memory as a tensor; `geom`: how a trace sees it."""
        if type(memory) is t.FromStep:
            found: torch.Tensor = self.places[memory.place]
            return found
        storage = self.storage(memory)
        if self.held and id(storage) in self.held:
            return self.held[id(storage)][2]
        if storage.poison is not None:
            raise storage.poison
        assert storage.real is not None
        return storage.real if geom is None or not storage.pinned else seen_as(storage.real, geom)

    def hold(self, target: t.Memory, value: torch.Tensor, geom: Geometry | None = None) -> None:
        """The state will have this value, once it is certain that this template is the right one."""
        storage = self.storage(target)
        self.held[id(storage)] = storage, target, value, geom

    def commit(self) -> None:
        """Store the values that were held: the template is the right one."""
        self.is_open = False
        self.communicated.clear()
        held, self.held = self.held, {}
        for _, target, value, geom in held.values():
            self.put(target, value, geom)

    def undo(self) -> None:
        """Nothing was done, but that collectives ran: the next run of this call gets their results."""
        COLLECTIVE_LOG.keep(self.communicated)
        for undo in reversed(self.undos):
            undo()

    def take_form(self, template: t.CallTemplate) -> None:
        """Continue with a template that may have more values."""
        for values, count in (
            (self.places, template.places), (self.hosts, template.hosts), (self.sources, template.sources),
        ):  # fmt: skip
            values.extend([None] * (count - len(values)))

    def call_at_once(self, step: t.LazyCall) -> None:
        """Run the operator, note the sizes of what it gives, and lay that out."""
        self.run_operator(step)
        self.lay_out(step)

    def run_operator(self, step: t.LazyCall) -> None:
        """Run the operator, and note the sizes of what it gives. While the run may still be undone, what is written is
        held back."""
        written = [memory for memory in memory_written(step) if type(memory) is not t.FromStep]
        for memory in written if self.is_open else ():
            if id(self.storage(memory)) not in self.held:
                self.hold(memory, copied(self.memory(memory)))
        args = [self.operand(value) for value in step.args]
        result = step.op(*args, **{name: self.operand(value) for name, value in step.kwargs})
        for memory in written if not self.is_open else ():
            self.storage(memory).version += 1
        sources = iter(step.sources)
        for place, value in zip(step.made, new_results(step.op, result), strict=True):
            if place is None:
                self.sources[next(sources)] = value
                continue
            self.places[place] = value
            for size in value.shape:
                self.sources[next(sources)] = size

    def lay_out(self, step: t.LazyCall) -> None:
        """Give the operator's results the template's strides, where they have the template's sizes."""
        places = [place for place in step.made if place is not None]
        for place, geom in zip(places, step.geometries, strict=True):
            real = self.places[place]
            if real.shape == geom.shape and (real.stride() != geom.strides or real.storage_offset()):
                laid = torch.empty_strided(geom.shape, geom.strides, dtype=real.dtype, device=real.device)
                self.places[place] = laid.copy_(real)

    def operand(self, value: Any) -> Any:
        """An argument of a step with tensors in place of views, and lists in place of tuples."""
        if type(value) is t.TensorOperand:
            return view_over(self.memory(value.memory), value.geometry)
        if type(value) is tuple:
            return [self.operand(item) for item in value]
        if type(value) is torch.device and value.type == "lazy":
            return torch.device(self.recorder.target)
        if type(value) is t.HostNumber:
            return _number(value.expression)(self.sources)[0]
        return value

    def tensor(self, memory: t.Memory) -> torch.Tensor:
        """A tensor over the memory: the argument, the gradient, or a new one."""
        if type(memory) is not t.FromStep:
            found: torch.Tensor = memory.tensor(self.leaves)  # type: ignore[union-attr]
            return found
        real = self.places[memory.place]
        return real if real.device.type == "cpu" and real.dim() == 0 else self.recorder.new_real_tensor(real, LAZY)

    def put(self, target: t.Memory, value: torch.Tensor, geom: Geometry | None = None) -> None:
        """The memory has this value from now on; `geom`: how the trace that made it sees the memory."""
        if type(target) is t.FromStep:
            self.places[target.place] = value
            return
        storage = self.storage(target)
        storage.version += 1
        if storage.real is value:
            return
        if (is_pinned(storage) or storage.base.device != LAZY) and storage.real is not None:
            if value.data_ptr() != storage.real.data_ptr():
                (storage.real if geom is None else seen_as(storage.real, geom)).copy_(value)
        else:
            storage.real = value

    def storage_for(self, memory: t.Memory, geom: Any) -> LazyStorage:
        """The lazy storage of a result: that of the state, or one made for this run."""
        if type(memory) is not t.FromStep:
            return self.storage(memory)
        found = self.storages.get(memory.place)
        if found is None:
            real = self.places[memory.place]
            if _is_whole(real, geom):
                found = storage_of(with_bits(geom, 0), real)
            else:
                found = storage_over(real, geom.device)
            self.storages[memory.place] = found
        return found

    def host(self, host: t.Host) -> torch.Tensor:
        if type(host) is t.HostKept:
            return host.tensor
        found: torch.Tensor = self.leaves[host.leaf] if type(host) is t.HostArgument else self.hosts[host.place]  # type: ignore[union-attr]
        return found


@functools.lru_cache(maxsize=4096)
def _number(expression: Expression) -> Callable[[Sequence[Any]], list[Any]]:
    return evaluator([expression])


def copied(real: torch.Tensor) -> torch.Tensor:
    """Other memory with the same contents, laid out alike."""
    span = real.untyped_storage().nbytes() // real.element_size()
    whole = real.as_strided((span,), (1,), 0).clone()
    return whole.as_strided(real.shape, real.stride(), real.storage_offset())


def memory_copied(host: torch.Tensor) -> torch.Tensor:
    """Other memory with the contents of the tensor's: of a number that was expanded, a single element."""
    held = host.untyped_storage().nbytes() // host.element_size()
    if held == host.numel() and not host.storage_offset():
        return host.detach().clone()
    return host.detach().as_strided((held,), (1,), 0).clone()


def view_over(real: torch.Tensor, geom: Any) -> torch.Tensor:
    if geom.bits:
        return show_bits([view_over(real, with_bits(geom, 0))], geom.bits)[0]
    if real.dtype != geom.dtype:
        real = memory_as(real, geom.dtype)
    elif real.shape == geom.shape and real.stride() == geom.strides and not geom.offset:
        return real.detach()
    return real.as_strided(geom.shape, geom.strides, real.storage_offset() + geom.offset)


def seen_as(real: torch.Tensor, geom: Geometry) -> torch.Tensor:
    """The whole memory of an ordinary tensor as a trace sees it: which tensor was first seen on it, and so how it is
    laid out, differs from call to call."""
    if real.shape == geom.shape and real.stride() == geom.strides and real.dtype == geom.dtype:
        return real
    return view_over(real, geom)


def _is_whole(real: torch.Tensor, geom: Any) -> bool:
    """Whether the geometry is that of `real`, and `real` all of its memory."""
    return bool(
        real.shape == geom.shape
        and real.stride() == geom.strides
        and real.dtype == geom.dtype
        and not geom.offset
        and not real.storage_offset()
        and real.untyped_storage().nbytes() == geom.span * real.element_size()
    )
