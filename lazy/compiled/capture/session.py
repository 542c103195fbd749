"""Capture: one call runs as it always does, recorded, and what it did is written down as a template.

The call's operators on lazy tensors go into the running trace as usual. Flushes are left out, so that the trace becomes
one program where no value of it is asked for. What happens to ordinary tensors on the way (an optimizer's step counts,
a batch that is brought over) and to numbers read from them is written down step by step.

Invariant: a capture never changes what the call does. What a template could not bring about again by itself is a
reason in `refused`, and then there is no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.host_values import (
    Blanks,
    Lengths,
    NumpyMemory,
    histories_before,
    made_anew,
    packed,
    tensors_in,
)
from torchlazy.lazy.compiled.capture.numbers import OperatorNumbers
from torchlazy.lazy.compiled.capture.ran_at_once import (
    are_new,
    can_run_again,
    drawn_by,
    listed,
    may_draw_from,
    positions_of_masks,
    storages_of,
    views_on_memory,
)
from torchlazy.lazy.compiled.capture.record import END, CaptureRecord
from torchlazy.lazy.compiled.capture.view_checks import record_sizes
from torchlazy.lazy.compiled.template.custom_ops import DRAWS, is_own, new_results, written_by
from torchlazy.lazy.compiled.template.template import (
    Host,
    HostCall,
    HostItem,
    HostKept,
    HostMade,
    HostNumber,
    LazyCall,
    LazyItem,
    Memory,
    Segment,
    ToHost,
)
from torchlazy.lazy.device.mode import USUAL, Operators
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.numbers.expr import Expression, SourceRef, places_in
from torchlazy.lazy.numbers.tracked import as_tracked, node_of
from torchlazy.lazy.ops.handlers import CHANGES_THE_TENSOR
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.subclasses import with_own_rules
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import handed_to, torch_is_tracing, uppermost_mode
from torchlazy.lazy.torch_private.distributed import any_distributed
from torchlazy.lazy.torch_private.patches import UnwrappedDispatchMode
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.op_schema import is_random
from torchlazy.lazy.trace.storage import LazyStorage

aten = torch.ops.aten
_INDEXED = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default,
     aten._index_put_impl_.default}
)  # fmt: skip
_WRITES_AT = _INDEXED - {aten.index.Tensor, aten._unsafe_index.Tensor}
_POSITIONS = (torch.int64, torch.int32)  # masks have a shape of their own, which depends on their numbers
_LIFTS = frozenset({aten.lift_fresh.default, aten.lift.default})  # what `torch.tensor(data)` ends with
_ITEM = aten._local_scalar_dense.default
_LIBRARY_CHECK = aten._linalg_check_errors.default


class Capture(OperatorNumbers, UnwrappedDispatchMode):
    """The mode under which the call runs; it sees the operators."""

    def __init__(
        self, recorder: Recorder, known: dict[int, Memory], hosts: dict[int, Host], *, fullgraph: bool = False
    ) -> None:
        UnwrappedDispatchMode.__init__(self)
        CaptureRecord.__init__(self, recorder, known, hosts, fullgraph=fullgraph)
        self._begin_numbers()
        self.lengths, self.blanks, self.arrays = Lengths(self), Blanks(self), NumpyMemory(self)
        self.places_of_masks: dict[Any, tuple[torch.Tensor, list[Any]]] = {}
        self.of_lists: set[int] = set()  # sources that are floats of `tolist()`
        self.begun: frozenset[int] = frozenset()  # leaves that it made and leaves behind, with a graph by them

    def __enter__(self) -> Capture:
        assert self.recorder.capture is None
        self.recorder.capture = self
        self.recorder.written_values = []
        self.generators.begin((None, *self.draws_from))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.recorder.capture = None
        self.recorder.written_values = None
        self._settle_escapes()
        self.generators.settle()
        self.listens = False

    def forget(self) -> None:
        """Let go of what leads back here: the call's memory would stay until Python's collector runs."""
        del self.lengths, self.blanks, self.arrays, self.generators

    # ---------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.recorder.busy or func.namespace == "profiler":
            return func(*args, **kwargs)
        if torch_is_tracing() or func.namespace == "prim":  # numbers and fake tensors are not recorded
            self.refuse("torch is tracing")
            return func(*args, **kwargs)
        others = [tensor for tensor in tensors_in((*args, *kwargs.values())) if type(tensor) not in USUAL]
        if others and any_distributed(others):
            return NotImplemented  # torch calls operators on its parts, which come here
        if others and (other := with_own_rules(others)) is not None:
            self.refuse(f"{func} on a {type(other).__name__}, which has rules of its own")
            found = func(*args, **kwargs)
            self.recorder.settle()
            return found
        self._depth += 1
        try:
            take = self._decomposed if self._is_made_of_others(func) else self._dispatch
            found = take(func, args, kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            self.recorder.settle()
            if DEVICE.target:
                DEVICE.mark_result(func, found, args, kwargs)
        return found

    def _is_made_of_others(self, func: Any) -> bool:
        """Composite operators come here only under `inference_mode`: `item`, `dropout`, `where` of a condition."""
        if func.namespace != "aten" or self.recorder.plan(func).kind != "composite":
            return False
        return func not in self.recorder.handlers and func.name() not in self.recorder.handlers_by_name

    def _decomposed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operators that it is made of come here one by one, as they do elsewhere."""
        UnwrappedDispatchMode.__enter__(self)  # torch disables a mode while it runs
        try:
            return func.decompose(*args, **kwargs)
        finally:
            UnwrappedDispatchMode.__exit__(self, None, None, None)

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        lazies, plains = _operands(args, kwargs)
        if func is _ITEM:
            return self._item(args[0])
        if func is _LIBRARY_CHECK and lazies:
            return self._library_check(args, kwargs)
        if func.namespace == "aten" and lazies | bool(self.recorder.mode_depth) and not kwargs:
            packs = packed(self, func, args)
            if packs is not NotImplemented:
                return packs
        of_numbers = not plains and bool(args) and func._schema.arguments[0].type.kind() == "TensorType"
        if not lazies and (self.recorder.mode_depth == 0 or of_numbers or self._is_host_only(plains, kwargs)):
            if func.namespace in ("c10d", "_c10d_functional"):  # a replay would not wait for it
                self.refuse(f"{func} is communication between processes")
                return func(*args, **kwargs)
            if plains:
                return self._host_call(func, args, kwargs)
            return self._factory(func, args, kwargs)
        if func is aten.copy_.default and isinstance(args[0], LazyTensor) and plains and not self.recorder.mode_depth:
            brought = self._host_call(aten._to_copy.default, (args[1],), {"device": args[0].device})
            return func(args[0], brought, *args[2:])
        if plains and func in _INDEXED and isinstance(args[0], LazyTensor) and not self.recorder.mode_depth:
            args = (args[0], [self._index_on(i, args[0].device) for i in args[1]], *args[2:])
            plains = _operands(args, kwargs)[1]
        if func in _WRITES_AT:
            args = (args[0], positions_of_masks(self._nonzero, args[0], args[1], args[2]), *args[2:])
        elif func is aten.index.Tensor and isinstance(args[0], LazyTensor):
            args = (args[0], self._positions_read(args[0], args[1]), *args[2:])
        given = self._own_numbers(func, args, kwargs)
        self.runs_now = func if given[-1] or DRAWS.run_at_once(func) else None
        if is_own(func) and self.runs_now is None:
            self.own_recorded[func] = None
        if given[-1]:
            args, kwargs = _plain_numbers(args), {name: _plain_numbers(value) for name, value in kwargs.items()}
        else:
            args, kwargs = self._numbers_in(func, args, kwargs)
        if plains and self.recorder.mode_depth:
            if func in _LIFTS:
                self.arrays.lifted(plains[0])
                self.bring_constant(plains[0])
            for tensor in plains:
                self.bring_made(tensor)
        result = self._call(func, args, kwargs)
        if self._ran_at_once:
            return self._at_once(func, *(given[:-1] if given[-1] else (args, kwargs)), result)
        if self._entered:
            self._see_entered()
        if self.asked is not None and self.recorder.plan(func).kind in ("view", "pure"):
            record_sizes(self.asked, self.recorder.plan(func), args, kwargs, result)
        if not plains and type(result) is LazyTensor:
            return result
        self._across(func, args, kwargs, result, plains)
        return result

    def _call(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the operator, which may run at once if a replay may run it so."""
        if self.generators.listens:
            for generator in may_draw_from(self.recorder, self.generators, op, args, kwargs):
                self.generators.draws(generator)
        self._may_run_at_once = op if can_run_again(op) else None
        try:
            below = uppermost_mode()
            if type(below) is Operators:
                found = handed_to(below, below.answer, op, args, kwargs)
                return found if found is not NotImplemented else op(*args, **kwargs)
            return op(*args, **kwargs)
        except BaseException:  # the code may catch it
            self._ran_at_once, self._entered = "", []
            raise
        finally:
            self._may_run_at_once = self.runs_now = None

    def _at_once(self, op: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """The operator ran for real: so it will in a replay, which continues if it gives the same sizes."""
        reason, self._ran_at_once = self._ran_at_once, ""
        for expression, value in self._entered:  # it was given the number, not the trace
            self._fix(expression, value)
        self._entered = []
        flat = new_results(op, result)
        windows = views_on_memory(self.recorder, args, kwargs, self.memory_read)
        written = storages_of(written_by(op, args, kwargs)) if op._schema.is_mutable else ()
        if windows is None or not are_new(flat, args, kwargs) or not self._brought.isdisjoint(written):
            self.refuse(f"{op} ran at once: {reason}")
            return result
        made: list[int | None] = []
        known: list[tuple[int, Any]] = []  # number sources and their values
        for item in flat:
            tensor = item if isinstance(item, LazyTensor) else None
            made.append(None if tensor is None else self._new_place(tensor._storage_))
            for value in (item,) if tensor is None else tensor._geometry.shape:
                known.append((self.sources, value))
                self._late.add(self.sources)
                if self._has_changed_nothing():
                    self._undoable.add(self.sources)
                self.sources += 1
        geometries = tuple([item._geometry for item in flat if isinstance(item, LazyTensor)])
        sources = tuple([source for source, _ in known])
        drawn = drawn_by(self.recorder, self.generators, op, args, kwargs)
        if DRAWS.saw(op, bool(drawn)):
            self.refuse(f"{op} turned out to draw no random numbers: it is part of programs again")
        if drawn and not self.generators.listens:
            self.refuse("a result needs a gradient, and its backward draws random numbers")
        self.steps.append(LazyCall(op, *windows, tuple(made), geometries, sources, drawn))
        for generator in drawn:
            self.generators.drew(generator)
        for source, value in known:
            self.values[source] = value
            self._check(SourceRef(source), value)
        return result

    def _is_host_only(self, plains: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Under `lazy_mode` ordinary tensors are recorded, but for single numbers that are not in the trace."""
        if not plains:
            return False
        return all(
            type(t) is torch.Tensor
            and t.dim() == 0
            and t.device.type == "cpu"
            and not t.requires_grad
            and not self.recorder.is_in_trace(t)
            for t in plains
        )

    def _nonzero(self, mask: torch.Tensor) -> list[Any]:
        """The positions where a mask is not zero, by dimension: found once for all readers, a backward among them."""
        known = self.places_of_masks.get(self._mask_key(mask))
        if known is None:
            places = self._dispatch(aten.nonzero.default, (mask,), {})
            found = [self._dispatch(aten.select.int, (places, 1, number), {}) for number in range(mask.dim())]
            known = self.places_of_masks[self._mask_key(mask)] = (mask, found)
        return known[1]

    def let_go(self) -> None:
        super().let_go()
        self.places_of_masks.clear()
        self.lengths.let_go()
        self.blanks.let_go()
        self.arrays.let_go()

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """An operator of the call itself."""
        return self._dispatch(op, args, kwargs)

    def memory_read(self, storage: LazyStorage) -> Memory:
        """What a step other than a program reads."""
        if storage.real is not None:
            self.arrays.taken(storage.real)
        return self._memory_of(storage)

    def host_read(self, tensor: torch.Tensor) -> Host:
        return self._host(tensor)

    def bring_kept(self, host: HostKept, storage: LazyStorage) -> None:
        self._bring_storage(None, host, (), storage)

    def know(self, tensor: torch.Tensor, host: Host) -> None:
        self._know(tensor, host)

    def fix_read(self, source: int, value: Any, *, late: bool) -> None:
        """The replay holds for this value of a source; `late`: it is known once a program has run."""
        self.values[source] = value
        if late:
            self._late.add(source)
            if self._has_changed_nothing():
                self._undoable.add(source)
        self._fix(SourceRef(source), value)

    def _mask_key(self, mask: torch.Tensor) -> Any:
        if isinstance(mask, LazyTensor):
            return id(mask._storage_), mask._storage_.version, mask._geometry
        return id(mask), mask._version

    def _positions_read(self, source: torch.Tensor, indices: Sequence[Any]) -> Sequence[Any]:
        """Positions in place of masks, where a backward will write at them or has them already."""
        masks = [index for index in indices if index is not None and index.dtype is torch.bool and index.dim()]
        if not masks or not (source.requires_grad or self._mask_key(masks[0]) in self.places_of_masks):
            return indices
        found: list[Any] = []
        for index in indices:
            found += self._nonzero(index) if any(index is mask for mask in masks) else [index]
        return found

    def _library_check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A factorisation says whether it went well: a replay continues where it did, as a branch on a value."""
        if self._item(args[0].ne(0).any()):
            _LIBRARY_CHECK(*args, **kwargs)  # raises

    def _host(self, tensor: torch.Tensor) -> Host:
        self.arrays.taken(tensor)
        return super()._host(tensor)

    def _item(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, LazyTensor):
            value = self.recorder.constant(tensor)
            if value is not None:
                return value
            found = self.recorder.read_apart(tensor, self.recorder.reading_as or "item")
            value = _ITEM(tensor) if found is None else found.value
            storage = tensor._storage_ if found is None else found.storage
            geometry = tensor._geometry if found is None else found.storage.base
            return self.item_of(storage, geometry, value)
        value = _ITEM(tensor)
        self.blanks.taken(_ITEM, (tensor,))
        host = self._host(tensor)
        history = self._history(tensor)
        source = self._items.get(history)
        if source is None:
            source, self.sources = self.sources, self.sources + 1
            self._items[history] = source
            self.steps.append(HostItem(host, source))
            if any(isinstance(step, Segment) for step in self.steps):
                self._late.add(source)
                if self._has_changed_nothing():
                    self._undoable.add(source)
        return self.number_of(value, source)

    def item_of(self, storage: LazyStorage, geometry: Geometry, value: Any) -> Any:
        """The one value of a view on memory that is there now, as the program gets it."""
        place, self.sources = self.sources, self.sources + 1
        self._late.add(place)
        if self._has_changed_nothing():
            self._undoable.add(place)
        self.steps.append(LazyItem(self.memory_read(storage), geometry, place))
        return self.number_of(value, place)

    def _fix(self, expression: Expression, value: Any) -> None:
        if type(value) is float and places_in(expression) & self.of_lists:
            self.refuse("its Python takes the plain values of a list of floats")
        super()._fix(expression, value)

    def listed(self, tensor: LazyTensor) -> Any:
        """`tolist()`; NotImplemented where the numbers are not tracked."""
        if self.recorder.busy:
            return NotImplemented
        return listed(self, tensor) if tensor.dim() else as_tracked(tensor.item())

    # ---------------------------------------------------------------- operators on ordinary tensors

    def _host_call(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if op in _LIFTS and id(args[0]) not in self._host_of:
            result = op(*args, **kwargs)
            self.arrays.lifted(result)
            made_anew(self, result)
            return result
        self._settle_escapes()
        plan = self.recorder.plan(op)
        self.blanks.taken(op, (*args, *kwargs.values()))
        histories = histories_before(args, self._history)
        hosts_args = _mapped(args, self._host)
        hosts_kwargs = {name: _mapped(value, self._host) for name, value in kwargs.items()}
        args, kwargs = _plain_numbers(args), {name: _plain_numbers(value) for name, value in kwargs.items()}
        if is_random(op):
            self.generators.draws(kwargs.get("generator"))
        if op._schema.is_mutable:
            self.recorder.on_host_write(op)
        # Where a tensor has dimensions such a change is no step: a replay makes it at the end.
        changes = op in CHANGES_THE_TENSOR and not isinstance(hosts_args[0], HostMade)
        if changes or not self.changed_forms.isdisjoint(map(id, args)):
            self.refuse(f"{op.name().removeprefix('aten::')} of a tensor from outside that has no dimensions")
        result = op(*args, **kwargs)
        made: list[int | None] = []
        returned = tensors_in(result)
        if isinstance(result, (bool, int, float)):
            self.refuse(f"{op} answers with a number")
        for item in returned:
            if isinstance(item, LazyTensor) or id(item) in self._host_of:
                made.append(None)
            else:
                self._know(item, HostMade(self.hosts))
                made.append(self.hosts)
                self.hosts += 1
        self.blanks.made(op, returned)
        lazies = [item for item in returned if isinstance(item, LazyTensor)]
        if lazies:
            if op is aten._to_copy.default and len(lazies) == 1:
                self._bring_storage(op, hosts_args[0], tuple(hosts_kwargs.items()), lazies[0]._storage_)
            else:
                self.refuse(f"{op} makes a lazy tensor of ordinary ones")
            return result
        written = [args[i] for i in plan.written if i < len(args)]
        flat = [t for value in written for t in (value if isinstance(value, (list, tuple)) else (value,))]
        for tensor in flat:
            if isinstance(tensor, torch.Tensor):
                self.arrays.taken(tensor, is_written=True)
        if any(isinstance(value, (list, tuple)) for value in written):  # under a mode torch does not
            torch.autograd.graph.increment_version(flat)
        for position, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor):
                self._histories[id(tensor)] = (op, repr(kwargs), *histories(position, len(flat)))
        self.steps.append(
            HostCall(
                op,
                hosts_args,
                tuple(hosts_kwargs.items()),
                tuple(made),
                tuple(self._host(t) for t in flat if isinstance(t, torch.Tensor)),
            )
        )
        if is_random(op):
            self.generators.drew(kwargs.get("generator"))
        return result

    def _index_on(self, index: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Bring positions on the host to the lazy tensor's device: the recorder would do so unseen."""
        if index is None or isinstance(index, LazyTensor) or index.dim() == 0 or index.dtype not in _POSITIONS:
            return index
        return self._host_call(aten._to_copy.default, (index,), {"device": device})

    def _factory(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """No tensor goes in: a lazy tensor is made in the trace, an ordinary one on the host."""
        plain_args, plain_kwargs = self._numbers_in(op, args, kwargs)
        result = self._call(op, plain_args, plain_kwargs)
        if self._ran_at_once:
            return self._at_once(op, plain_args, plain_kwargs, result)
        made = tensors_in(result)
        if self._entered and any(isinstance(item, LazyTensor) for item in made):
            self._see_entered()
        if made and not any(isinstance(item, LazyTensor) for item in made):
            for item in made:
                self._know(item, HostMade(self.hosts))
                self.hosts += 1
            self.blanks.made(op, made)
            places = tuple(range(self.hosts - len(made), self.hosts))
            hosts_kwargs = tuple((name, _mapped(value, self._host)) for name, value in kwargs.items())
            self.steps.append(HostCall(op, _mapped(tuple(args), self._host), hosts_kwargs, places, ()))
            if is_random(op):
                self.generators.drew(kwargs.get("generator"))
        return result

    def _across(self, op: Any, args: Any, kwargs: dict[str, Any], result: Any, plains: list[torch.Tensor]) -> None:
        """An operator on lazy tensors that got or gave ordinary ones too."""
        gives = [t for t in tensors_in(result) if not isinstance(t, LazyTensor)]
        if self.recorder.mode_depth:  # under lazy_mode ordinary tensors are what is recorded
            return
        if any(t.dim() for t in plains) and not (op is aten.copy_.default and plains[0] is args[0]):
            self.refuse(f"{op} takes a tensor on {plains[0].device} beside lazy ones")
            return
        if not gives:
            return
        source = args[0] if args else None
        if op is aten._to_copy.default and isinstance(source, LazyTensor) and len(gives) == 1:
            memory = self.memory_read(source._storage_)
            self.steps.append(ToHost(op, memory, source._geometry, tuple(kwargs.items()), self.hosts))
            self._know(gives[0], HostMade(self.hosts))
            self.hosts += 1
            return
        self.refuse(f"{op} gives an ordinary tensor")


def _operands(args: Any, kwargs: dict[str, Any]) -> tuple[bool, list[torch.Tensor]]:
    """Whether an operand is lazy, or the result will be; and the ordinary tensors among the operands."""
    lazies = False
    plains: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LazyTensor):
                lazies = True
            elif isinstance(item, torch.Tensor):
                plains.append(item)
    return lazies, plains


def _mapped(value: Any, host: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return host(value)
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(item, host) for item in value)
    node = node_of(value)
    return value if node is None else HostNumber(node.expression)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_numbers(item) for item in value)
    node = node_of(value)
    return value if node is None else node.value


__all__ = ["END", "Capture"]
