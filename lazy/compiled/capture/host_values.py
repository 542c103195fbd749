"""Values of ordinary tensors in a captured call: lengths, their histories, memory of C++ and of NumPy arrays.

Lengths are numbers of small tensors on which the shapes of packed sequences depend. torch's C++ code reads them by
address, and its Python one by one. In a captured call they are one number source, whose value is all of them as text;
packing and its backward are then slices of known sizes.

A history is what the values of an ordinary tensor come from: equal histories are equal values.

What the call makes of a NumPy array (`torch.from_numpy`, `torch.tensor`) is a constant of the template, with the values
that the array has where an operator reads it: Python writes to arrays without a word to torch.

Blanks are ordinary tensors that C++ makes empty and fills by their address, as `at::tensor(lengths)` does.

Invariant: a template holds for the very lengths that it was captured with. Two tensors have one history only where the
same operators gave their values, from values of one history. A blank that no operator wrote before one reads it was
filled by C++, or not at all: each replay puts into its memory what it held then. Operators that write to the
memory of an array, and an array on memory that the call reaches as a tensor, are reasons for no template.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torchlazy.lazy.compiled.template.template import HostCall, HostItem, HostKept, HostMade, LazyItem, Segment, Step
from torchlazy.lazy.numbers.tracked import node_of
from torchlazy.lazy.record.shared_memory import accepts_copies, copy_of_now
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import below_autograd, memory_key
from torchlazy.lazy.trace.geometry import Geometry, is_dense
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.session import Capture


aten = torch.ops.aten
_MOST_READ = 1024  # numbers of one tensor
_PACK, _PACK_BACKWARD = aten._pack_padded_sequence.default, aten._pack_padded_sequence_backward.default


def value_of(tensor: torch.Tensor) -> Any:
    """The value of the number source that reads a tensor: its one number, or all of them as text."""
    return tensor.item() if tensor.numel() == 1 else repr(tensor.tolist())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among what an operator took or gave, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += tensors_in(item)
    return found


class Lengths:
    """The tensors whose numbers one captured call has read."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._known: dict[int, tuple[torch.Tensor, list[int]]] = {}  # by memory; the tensors keep it

    def numbers(self, tensor: torch.Tensor) -> list[int] | None:
        """The numbers, which the template holds for; None where there are too many."""
        capture = self._capture
        if not isinstance(tensor, LazyTensor):
            known = self._known.get(tensor.untyped_storage()._cdata)
            if known is not None:
                return known[1]
        if tensor.numel() > _MOST_READ:
            return None
        tensor = self._recorded(tensor)
        place, capture.sources = capture.sources, capture.sources + 1
        step: Step
        if isinstance(tensor, LazyTensor):
            real = capture.recorder.real(tensor, "tolist")
            step = LazyItem(capture.memory_read(tensor._storage_), tensor._geometry, place)
        else:
            real, step = tensor, HostItem(capture.host_read(tensor), place)
        with below_autograd():
            values, found = real.tolist(), value_of(real)
        capture.steps.append(step)
        capture.fix_read(place, found, late=isinstance(step, LazyItem) or _has_run(capture.steps))
        return values  # type: ignore[no-any-return]

    def _recorded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Under `lazy_mode`, the lazy tensor for an ordinary one: writes to it may be pending."""
        recorder = self._capture.recorder
        of_host = isinstance(self._capture.host_of(tensor), HostMade)
        if isinstance(tensor, LazyTensor) or not recorder.mode_depth or of_host or not is_dense(tensor):
            return tensor
        return recorder.view_of_plain(tensor, recorder.storage_of_plain(tensor))

    def made(self, values: Sequence[int]) -> torch.Tensor:
        """An ordinary tensor of these numbers, new at each replay."""
        capture = self._capture
        with below_autograd():
            constant = torch.tensor(values, dtype=torch.int64)
            found = constant.clone()
        capture.steps.append(HostCall(aten.clone.default, (HostKept(constant, True),), (), (capture.hosts,), ()))
        capture.know(found, HostMade(capture.hosts))
        capture.hosts += 1
        self._known[found.untyped_storage()._cdata] = found, list(values)
        return found

    def known(self, tensor: torch.Tensor) -> list[int] | None:
        """The numbers of a tensor that was made here."""
        found = None if isinstance(tensor, LazyTensor) else self._known.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def let_go(self) -> None:
        self._known.clear()


def _has_run(steps: Sequence[Step]) -> bool:
    return any(isinstance(step, Segment) for step in steps)


def packed(capture: Capture, op: Any, args: Sequence[Any]) -> Any:
    """`_pack_padded_sequence` or its backward as slices; NotImplemented for others, and where torch has to refuse."""
    if op is _PACK and len(args) == 3:
        return _pack(capture, *args)
    return _pack_backward(capture, *args) if op is _PACK_BACKWARD and len(args) == 4 else NotImplemented


def _pack(capture: Capture, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    if lengths.dim() != 1 or padded.dim() < 2:
        return NotImplemented
    numbers = capture.lengths.numbers(lengths)
    run = capture.run
    steps, batch = (padded.shape[1], padded.shape[0]) if batch_first else padded.shape[:2]
    is_sorted = numbers is not None and numbers == sorted(numbers, reverse=True)
    if not numbers or not is_sorted or len(numbers) != batch or numbers[-1] <= 0 or numbers[0] > steps:
        return NotImplemented
    if batch_first:
        padded = run(aten.transpose.int, padded, 0, 1)
    sizes = [sum(length > step for length in numbers) for step in range(numbers[0])]
    parts = []
    for step, count, size in _groups(sizes):
        part = run(aten.slice.Tensor, run(aten.slice.Tensor, padded, 0, step, step + count), 1, 0, size)
        part = run(aten.clone.default, part, memory_format=torch.contiguous_format)
        parts.append(run(aten.view.default, part, [count * size, *padded.shape[2:]]))
    return run(aten.cat.default, parts) if len(parts) > 1 else parts[0], capture.lengths.made(sizes)


def _pack_backward(
    capture: Capture, gradient: torch.Tensor, shape: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> Any:
    sizes = capture.lengths.known(batch_sizes)
    if not sizes:
        return NotImplemented
    run = capture.run
    steps, batch, *rest = (shape[1], shape[0], *shape[2:]) if batch_first else shape
    parts, row = [], 0
    for _, count, size in _groups(sizes):
        rows = run(aten.slice.Tensor, gradient, 0, row, row + count * size)
        part = run(aten.view.default, run(aten.clone.default, rows, memory_format=torch.contiguous_format),
                   [count, size, *rest])  # fmt: skip
        parts.append(run(aten.constant_pad_nd.default, part, [0, 0] * len(rest) + [0, batch - size]))
        row += count * size
    if steps > len(sizes):
        parts.append(run(aten.new_zeros.default, gradient, [steps - len(sizes), batch, *rest]))
    whole = run(aten.cat.default, parts) if len(parts) > 1 else parts[0]
    return run(aten.transpose.int, whole, 0, 1) if batch_first else whole


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first step, number of steps, size) of steps of equal size."""
    step = 0
    for size, equal in itertools.groupby(sizes):
        count = len(list(equal))
        yield step, count, size
        step += count


def histories_before(args: Any, history: Callable[[torch.Tensor], Any]) -> Callable[[int, int], tuple[Any, ...]]:
    """A function from (element, number of elements) to the histories that a written element's new value comes from."""
    before = [
        [history(item) for item in value]
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value)
        else history(value) if isinstance(value, torch.Tensor) else ("constant", _mapped_text(value))
        for value in args
    ]  # fmt: skip

    def of(position: int, count: int) -> tuple[Any, ...]:
        return tuple(
            value[position] if isinstance(value, list) and len(value) == count else _frozen(value) for value in before
        )

    return of


def _mapped_text(value: Any) -> Any:
    """A constant in comparable form: tracked numbers by their expression, a list of equal items as one of them."""
    items = [_mapped_text(item) for item in value] if isinstance(value, (list, tuple)) else None
    if items is not None:
        return items[0] if items and all(item == items[0] for item in items) else tuple(items)
    node = node_of(value)
    return node.expression if node is not None else repr(value)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_EMPTY = frozenset({
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip
_OVERWRITING = frozenset(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "uniform", "normal", "random", "bernoulli", "exponential")
)
_MOST_WRITTEN = 4096  # elements: C++ fills what it got as a list of numbers


class Blanks:
    """The ordinary tensors of one captured call that no operator wrote or read yet, by their memory."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._known: dict[int, torch.Tensor] = {}

    def made(self, op: Any, tensors: Sequence[torch.Tensor]) -> None:
        """`op` made these."""
        if op in _EMPTY:
            small = [
                tensor for tensor in tensors if type(tensor) is torch.Tensor and 0 < tensor.numel() <= _MOST_WRITTEN
            ]
            self._known.update((tensor.untyped_storage()._cdata, tensor) for tensor in small)

    def taken(self, op: Any, args: Sequence[Any]) -> None:
        """An operator gets the arguments. Views read nothing yet; what is overwritten as a whole held nothing."""
        if not self._known or self._capture.recorder.plan(op).kind == "view":
            return
        for position, value in enumerate(args):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if type(item) is torch.Tensor and item.layout is torch.strided:
                    blank = self._known.pop(item.untyped_storage()._cdata, None)
                    is_whole = item is blank and not position and op._schema.name in _OVERWRITING
                    if blank is not None and not is_whole:
                        self._fill(blank)

    def _fill(self, tensor: torch.Tensor) -> None:
        host = self._capture.host_read(tensor)
        self._capture.steps.append(
            HostCall(aten.copy_.default, (host, _constant(self._capture, tensor)), (), (None,), (host,))
        )

    def let_go(self) -> None:
        self._known.clear()


def made_anew(capture: Capture, tensor: torch.Tensor) -> None:
    """Each replay makes the tensor anew, with what it holds now."""
    capture.steps.append(HostCall(aten.clone.default, (_constant(capture, tensor),), (), (capture.hosts,), ()))
    capture.know(tensor, HostMade(capture.hosts))
    capture.hosts += 1


def _constant(capture: Capture, tensor: torch.Tensor) -> HostKept:
    with below_autograd():
        constant = tensor.clone()
    kept = HostKept(constant, constant=True)
    capture.know(constant, kept)
    return kept


_WRITES = "it writes to memory of a NumPy array"


class NumpyMemory:
    """The memory of one captured call that arrays share with it."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by memory: made of an array, and a copy
        self._copies: dict[tuple[int, Geometry], tuple[LazyTensor, torch.Tensor]] = {}

    def reach(self, arrays: Iterable[tuple[Any, str]], storages: Iterable[LazyStorage], hosts: Iterable[Any]) -> None:
        """Before the call: arrays that its Python can reach, and memory of tensors that it may use."""
        reached = [(array, name) for array, name in arrays if isinstance(array, numpy.ndarray)]
        if not reached:
            return
        capture = self._capture
        known: list[tuple[Any, LazyStorage | None]] = [(t, None) for t in hosts if not isinstance(t, LazyTensor)]
        known += [(s.real, s) for s in storages if isinstance(s.real, torch.Tensor)]
        with capture.recorder.apart():
            for tensor, storage in known:
                if tensor.device.type != "cpu" or not is_dense(tensor):
                    continue
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
                for array, name in reached:
                    if numpy.may_share_memory(array, memory):
                        capture.refuse(f"{name} is a NumPy array on the memory of a tensor that it reaches")
                        if storage is not None:
                            capture.recorder.shared.add(storage)

    def lifted(self, tensor: torch.Tensor) -> None:
        """The tensor is just being made of the program's data, which may be the memory of an array."""
        if tensor.device.type == "cpu" and not tensor.untyped_storage().resizable():
            with below_autograd():
                self._lifted[memory_key(tensor)] = tensor, tensor.clone()

    def taken(self, tensor: torch.Tensor, is_written: bool = False) -> None:
        """A step on ordinary tensors, or the template, gets the tensor: a replay gives it what was lifted."""
        found = self._made_of(tensor)
        if found is not None and is_written:
            self._capture.refuse(_WRITES)
        elif found is not None and not _are_same(*found):
            self._capture.refuse("a NumPy array changes after a tensor was made of it")

    def kept(self, tensor: torch.Tensor) -> None:
        """The tensor outlives the call."""
        if self._made_of(tensor) is not None:
            self._capture.refuse("it returns or keeps a tensor on the memory of a NumPy array")

    def _made_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        real: Any = tensor._storage_.real if isinstance(tensor, LazyTensor) else tensor
        if not self._lifted or not isinstance(real, torch.Tensor) or not is_dense(real):
            return None
        return self._lifted.get(memory_key(real))

    def operand(self, tensor: LazyTensor, plan: OpPlan, place: int | str) -> LazyTensor | None:
        """Under `lazy_mode`: what an operator gets for a tensor on shared memory; None: as it does outside of calls."""
        capture, storage = self._capture, tensor._storage_
        if capture.refused:
            return None
        if id(storage) in capture.known_before:
            return tensor
        if self._made_of(tensor) is None:
            return None
        if not (accepts_copies(plan, place) or _only_reads(plan)):
            capture.refuse(_WRITES)
            return None
        place_of = (id(storage), tensor._geometry)  # the tensor that was lifted keeps the storage
        known = self._copies.get(place_of)
        now = copy_of_now(capture.recorder, tensor)
        with below_autograd():
            value = capture.quietly(lambda: capture.recorder.real(now, "shared memory"))
            if known is not None and _are_same(known[1], value):
                return known[0]
            constant = value.clone()
        capture.bring_kept(HostKept(constant, constant=True), now._storage_)
        self._copies[place_of] = now, constant
        return now

    def let_go(self) -> None:
        self._lifted.clear()
        self._copies.clear()


def _only_reads(plan: OpPlan) -> bool:
    """Whether an operator that runs at once gives new tensors and writes to none."""
    schema = plan.op._schema
    return plan.kind == "eager" and not schema.is_mutable and all(r.alias_info is None for r in schema.returns)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with below_autograd():
        a, b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(a, b)


__all__ = ["Lengths", "NumpyMemory", "packed", "value_of"]
