"""What a captured call gave back and left behind, named by where a replay gets it.

Invariant: everything that outlives the call is accounted for: results, gradients, values in guarded places and slots.
State that changed in a way that no effect describes is a reason for having no template.
"""

from __future__ import annotations

import enum
import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.compiled.capture.autograd_facts import UNKNOWN_GRAPH, graph_of
from torchlazy.lazy.compiled.capture.joint import JointCall, held_by_graph, is_freed
from torchlazy.lazy.compiled.capture.results import (
    SetDistributedGrad,
    SetGrad,
    as_leaf,
    bases_in,
    detached_from,
    plain_result,
    roots,
)
from torchlazy.lazy.compiled.capture.session import Capture
from torchlazy.lazy.compiled.capture.state import Change
from torchlazy.lazy.compiled.guards.growing import Appended
from torchlazy.lazy.compiled.guards.reached import Reached, without_traced
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.arguments import FunctionArguments, exchanged
from torchlazy.lazy.compiled.template.objects import flatten_open, is_held_elsewhere, is_named
from torchlazy.lazy.compiled.template.views import ArgumentView
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.numbers.questions import plain_size
from torchlazy.lazy.numbers.tracked import node_of
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private.autograd_layout import set_versions
from torchlazy.lazy.torch_private.dispatch import any_autocast, flatten_tree, memory_key, unflatten_tree
from torchlazy.lazy.torch_private.distributed import part_of, whole_of
from torchlazy.lazy.trace.geometry import Geometry, is_dense
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.call import CallToCapture

_ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type(...))
_CONSTANTS = (*_ATOMS, enum.Enum)


class Outcome:
    """What a call gave back and left behind."""

    def __init__(
        self,
        recorder: Recorder,
        call: CallToCapture,
        reached: Reached,
        capture: Capture,
        value: Any,
        grads: dict[int, torch.Tensor | None],
        joint: JointCall | None,
        raised: tuple[torch.Tensor | int, ...],
        handed: FunctionArguments,
    ) -> None:
        self._joint, self._raised = joint, raised
        self.recorder, self.call, self.reached, self.capture = recorder, call, reached, capture
        self._grads = grads
        self._owners = capture.gradients
        self._handed = handed
        self._kept = {id(kept) for kept in reached.keep}
        self.flat, self.spec = flatten_open(value, is_leaf=self._stays)
        self._accounted: set[int] = set()
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._gave_windows = False
        self._bases: dict[int, t.Result] | None = None
        self._by_memory: dict[int, list[torch.Tensor]] | None = None
        self._windows = {id(window.copy): window.given for window in (*capture.windows, *capture.taken)}
        self._on_copies: list[LazyTensor] = []  # given away with their graphs, perhaps on memory of copies
        self._plain: dict[int, torch.Tensor] = {}  # ordinary tensors for lazy ones, by identity
        self._positions: dict[int, int] = {}
        for position, leaf in enumerate(call.leaves):
            if isinstance(leaf, torch.Tensor):
                self._positions.setdefault(id(leaf), position)

    def refuse_held(self, value: Any) -> None:
        """No template where something else holds an object in the call's value: a replay makes a new one. (The
        constructor, whose arguments hold the value, does not count.)"""
        if is_held_elsewhere(value, {*self._kept, *self._handed.numbers}, self._handed.holders()):
            self.capture.refuse("it returns an object that is held elsewhere too")

    # ---------------------------------------------------------------- results

    def results(self) -> list[t.Result]:
        return [self._result(leaf, f"it returns an object of type {type(leaf).__name__}") for leaf in self.flat]

    def _result(self, leaf: Any, otherwise: str) -> t.Result:
        node = node_of(leaf)
        if node is not None:
            return t.NumberResult(node.expression)
        leaf = plain_size(leaf)
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._positions:
                return t.SameArgument(self._positions[id(leaf)])
            if id(leaf) in self.reached.tensors:
                return t.SameObject(leaf)
            if id(leaf) in self._owners and not leaf.requires_grad:
                return t.SameGradient(self._owners[id(leaf)])
            self.capture.arrays.kept(leaf)
            if isinstance(leaf, torch.nn.Parameter):
                self.capture.refuse("it makes a parameter")
            if self._joint is not None and id(leaf) in self._joint.numbers:
                if isinstance(leaf, LazyTensor):
                    self._accounted.add(id(leaf._storage_))
                number, is_leaf = self._joint.numbers[id(leaf)], graph_of(leaf) is None
                return t.JointResult(number, leaf.requires_grad, is_leaf, DEVICE.is_marked(leaf))
            if isinstance(leaf, LazyTensor):
                return self._lazy(leaf, "a result")
            host = self.capture.host_of(leaf)
            if host is None or leaf.requires_grad:
                self.capture.refuse("it returns or keeps an ordinary tensor that its operators did not make")
                host = t.HostKept(leaf)
            return t.HostResult(host)
        if id(leaf) in self._handed.numbers:
            return t.SameContainer(self._handed.numbers[id(leaf)])
        if not isinstance(leaf, _CONSTANTS) and id(leaf) not in self._kept and not is_named(leaf):
            self.capture.refuse(otherwise)
        return t.SameObject(leaf)

    def _stays(self, item: Any) -> bool:
        """Whether it is a container or object that was there before the call."""
        return id(item) in self._kept or id(item) in self._handed.numbers

    def _lazy(self, tensor: LazyTensor, what: str) -> t.TensorResult:
        memory = self.capture.memory_of(tensor._storage_)
        if memory is None:
            self.capture.refuse(f"{what} is a tensor that the call did not make")
            memory = t.FromStep(0)
        self._accounted.add(id(tensor._storage_))
        requires_grad = tensor.requires_grad
        freed = False
        graph = graph_of(tensor)
        if graph not in (None, UNKNOWN_GRAPH):
            freed = is_freed(graph)
            if not freed:
                self.capture.refuse(f"{what} needs a gradient")
            self._accounted |= {id(held._storage_) for held in held_by_graph(graph)}
        elif graph is None and requires_grad and tensor.grad is not None:
            self.capture.refuse(f"{what} is a leaf with a gradient")
        number = self._numbers.setdefault(id(tensor), len(self._numbers))
        base = None if freed or requires_grad else self._base_of(tensor)
        origin = None
        if base is None and not freed and not isinstance(memory, t.FromStep):
            origin = self._origin_of(tensor)
        return t.TensorResult(
            memory, tensor._geometry, requires_grad, freed, number, base or origin, tensor.is_inference(),
            origin is not None, DEVICE.is_marked(tensor),
        )  # fmt: skip

    def _origin_of(self, tensor: LazyTensor) -> t.Result | None:
        """What the tensor is detached from: an argument, or state."""
        storage, recorder = tensor._storage_, self.capture.recorder

        def is_on(other: torch.Tensor) -> bool:
            if isinstance(other, LazyTensor):
                return other._storage_ is storage
            return is_dense(other) and other.device.type != "meta" and recorder.storage_of_plain(other) is storage

        found = detached_from(tensor, self._outside(), is_on)
        position = self._positions.get(id(found))
        return None if found is None else t.SameObject(found) if position is None else t.SameArgument(position)

    def _outside(self) -> list[Any]:
        return [*self.call.leaves, *(x for x, _ in self.reached.tensors.values())]

    def _outside_on(self, real: torch.Tensor) -> Sequence[Any]:
        """Those of them that are ordinary tensors on this memory, which they do not leave while the call ends."""
        if self._by_memory is None:
            self._by_memory = {}
            for tensor in self._outside():
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, LazyTensor) and is_dense(tensor):
                    with suppress(RuntimeError):  # a subclass without memory of its own
                        self._by_memory.setdefault(memory_key(tensor), []).append(tensor)
        return self._by_memory.get(memory_key(real), ())

    def _base_of(self, tensor: LazyTensor) -> t.Result | None:
        """What the tensor is a view of: an argument, state, or what the call gives back another view of."""
        base = tensor._base if tensor._is_view() else None
        if base is None or base.dtype != tensor.dtype or tensor.is_inference():
            return None
        if self._bases is None:
            self._bases = bases_in(self.call.leaves, [x for x, _ in self.reached.tensors.values()])
            self._seen = Counter(id(x) for leaf in self.flat if isinstance(leaf, torch.Tensor) for x in roots(leaf))
        found = self._bases.get(id(base))
        held = base._storage_ if isinstance(base, LazyTensor) else self.capture.recorder.storage_of_plain(base)
        if held is not tensor._storage_:  # a view to torch, and on other memory since
            return None
        if found is not None:
            return found
        if isinstance(base, LazyTensor) and (self._seen[id(base)] > 1 or self._origin_of(base) is not None):
            return None if base.requires_grad else self._lazy(base, "a result")
        return None

    def on_memory(self, storage: LazyStorage, geom: Geometry) -> t.TensorResult | None:
        """A new tensor of this geometry over memory that the template knows; None where it does not."""
        memory = self.capture.memory_of(storage)
        if memory is None:
            return None
        self._accounted.add(id(storage))
        number = len(self._numbers)
        self._numbers[-1 - number] = number  # no object of the call has this number
        return t.TensorResult(memory, geom, False, False, number)

    def handed_out(self, value: Any) -> Any:
        """The call's value for its caller: numbers are plain ones; ordinary programs get ordinary tensors."""
        for window in self.capture.windows:
            window.take_over_graph(window.copy)
        for window in self.capture.taken:
            window.take_over_graph(window.given)
        back = {id(leaf): given for leaf, given in self.call.paired} | self._handed.back

        def leaf_of(leaf: Any) -> Any:
            if id(leaf) in back:
                return back[id(leaf)]
            return leaf if id(leaf) in self._kept and not isinstance(leaf, torch.Tensor) else self._plainly(leaf)

        return exchanged(value, leaf_of, {*self._kept, *self._handed.numbers})

    def _plainly(self, leaf: Any) -> Any:
        if id(leaf) in self._windows:
            return self._windows[id(leaf)]
        if not isinstance(leaf, LazyTensor) or id(leaf) in self.capture.begun:
            return plain_size(without_traced(leaf))
        if leaf._geometry.device != LAZY and graph_of(leaf) is None:
            found = self._plain.get(id(leaf))
            if found is None:
                found = self._of_window(leaf)
            if found is None:
                real = self.recorder.hand_out(leaf, "result of a compiled call")
                found = self._plain[id(leaf)] = plain_result(leaf, real, self._plainly, self._outside_on(real))
                if DEVICE.is_marked(leaf):
                    DEVICE.mark(found)
            return found
        return self._with_graph(leaf)

    def _with_graph(self, tensor: LazyTensor) -> torch.Tensor:
        """A tensor that has a graph; where that is one of an argument view's copy, the same view of the argument."""
        if tensor._base is not None and any(tensor._base is window.copy for window in self.capture.windows):
            found = self.capture.argument_view_of(tensor)
            if found is not None:
                self._gave_windows = True
                return found
        self._on_copies.append(tensor)
        return tensor

    def _of_window(self, tensor: LazyTensor) -> torch.Tensor | None:
        """For a view of an argument view's copy: the same view of the argument, which the caller may write to."""
        found = self.capture.argument_view_of(tensor)
        if found is not None:
            self._gave_windows = True
            if not self.capture.counts_with_copy(tensor):
                found = found.data
            found = self._plain[id(tensor)] = as_leaf(tensor, found, self._plainly)
        return found

    def write_back_views(self) -> bool:
        """Copy what the call wrote to copies of argument views back to the views; whether there was any, or a view of a
        copy was given away."""
        found = self._gave_windows
        if self.capture.themselves is not None:
            self.capture.themselves.raise_versions()
        for window in self.capture.windows:
            if window.copy.is_leaf:
                window.take_over_gradient(self._plainly)
            seen = self._seen_on(window)
            found |= window.take_over_writes(self.capture.windows) or bool(seen)
            for tensor, view in seen:
                tensor._become(self.recorder.view_of_plain(view, self.recorder.storage_of_plain(view)))
        return found

    def _seen_on(self, window: ArgumentView) -> list[tuple[LazyTensor, torch.Tensor]]:
        """What was given away of the copy's memory with a graph of its own, and the argument's view that each is."""
        memory = self.recorder.storage_of_plain(window.alias)
        there = {id(tensor): tensor for tensor in self._on_copies if tensor._storage_ is memory}
        seen = [(tensor, self.capture.quietly(partial(window.seen, tensor))) for tensor in there.values()]
        return [(tensor, view) for tensor, view in seen if view is not None]

    # ---------------------------------------------------------------- effects

    def effects(self, changes: Sequence[Change]) -> list[t.Effect]:
        """What the call left in places that are guarded, in slots and as gradients."""
        found = []
        for change in changes:
            otherwise = f"it changes {change.name}: -> {_short(change.value)}"
            if change.store is None:
                self.capture.refuse(otherwise)
                continue
            leaves, spec = self._flat(change.value)
            results = tuple([self._result(leaf, otherwise) for leaf in leaves])
            found.append(t.Effect(change.name, change.store, results, spec))
        return found + self._gradients()

    def contents(self, changes: Sequence[tuple[int, Any]]) -> list[t.Effect]:
        """What the call left in containers among its arguments."""
        if changes and not self._kept.isdisjoint(self._handed.numbers):
            self.capture.refuse("it changes a list, dictionary or object among its arguments that its state holds too")
        found = []
        for number, value in changes:
            name = f"container {number} of its arguments"
            leaves, spec = flatten_open(value, is_leaf=self._stays)
            otherwise = f"it leaves an object in {name}: a {{}}"
            results = tuple([self._result(leaf, otherwise.format(type(leaf).__name__)) for leaf in leaves])
            found.append(t.Effect(name, t.ArgumentContents(number), results, spec))
        return found

    def show(self, changes: Sequence[tuple[int, Any]]) -> None:
        """Let the caller's containers hold what the function's do, as a replay leaves them."""
        self._handed.show(changes, self._plainly)

    def _flat(self, value: Any) -> tuple[list[Any], Any]:
        """The leaves of what is new in the value: objects that were there before are leaves."""
        return flatten_tree(value, lambda item: id(item) in self._kept)

    def _gradients(self) -> list[t.Effect]:
        found = []
        for tensor, name in self.reached.tensors.values():
            if not tensor.is_leaf:
                continue
            before, after = self._grads.get(id(tensor)), tensor.grad
            if after is before:
                continue
            part = part_of(after)
            if not self._is_storable(part):
                self.capture.refuse(f"{name}.grad is an ordinary tensor")
            store = SetGrad(tensor) if part is after else SetDistributedGrad(tensor, after)
            found.append(self._gradient(f"{name}.grad", store, part))
        for position, leaf in enumerate(self.call.leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf:
                after = leaf.grad
                if after is self._grads.get(id(leaf)) or id(leaf) in self.reached.tensors:
                    continue
                if not self._is_storable(after):
                    self.capture.refuse(f"it changes the gradient of argument {position}")
                    continue
                found.append(self._gradient(f"argument {position}.grad", t.ArgumentGradient(position), after))
        return found

    def _gradient(self, name: str, store: Any, after: torch.Tensor | None) -> t.Effect:
        result: t.Result = t.SameObject(None)
        if self._is_known(after):
            result = self._result(after, name)
        elif isinstance(after, LazyTensor):
            result = self._lazy(after, name)
        return t.Effect(name, store, (result,), _LEAF)

    def _is_storable(self, gradient: torch.Tensor | None) -> bool:
        return gradient is None or isinstance(gradient, LazyTensor) or self._is_known(gradient)

    def _is_known(self, tensor: torch.Tensor | None) -> bool:
        """Whether it was there before the call, and a replay finds it."""
        return any(id(tensor) in known for known in (self._positions, self.reached.tensors, self._owners))

    def _in_windows(self, leaf: Any) -> Any:
        """Views of the argument in place of views of its copy; everything else stays."""
        if isinstance(leaf, LazyTensor) and (graph_of(leaf) is not None or id(leaf) in self.capture.begun):
            self._on_copies.append(leaf)
            return leaf
        if isinstance(leaf, LazyTensor) and id(leaf) not in self._plain:
            found = self._of_window(leaf)
            return leaf if found is None else found
        return self._windows.get(id(leaf), self._plain.get(id(leaf), leaf))

    def settle(self, changes: Sequence[Change]) -> None:
        """Leave plain numbers in the state, and (a call on ordinary tensors) ordinary tensors, as a replay does. What a
        joint is to give is computed later: it stays as it is."""
        plainly = self._plainly if self._joint is None else self._in_windows
        for change in changes:
            if change.store is None:
                continue
            leaves, spec = self._flat(change.value)
            settled = [exchanged(leaf, plainly, self._kept) for leaf in leaves]
            if any(a is not b for a, b in zip(settled, leaves, strict=True)):
                store = change.store.settle if isinstance(change.store, Appended) else change.store
                store(unflatten_tree(settled, spec))
        if self.call.plain and self._joint is None:
            given = (window.given for window in self.capture.taken)
            for tensor in (*(x for x, _ in self.reached.tensors.values()), *self.call.leaves_lazy(), *given):
                part = part_of(tensor.grad) if tensor.is_leaf and not isinstance(tensor, LazyTensor) else None
                if isinstance(part, LazyTensor):
                    plain = self._plainly(part)
                    tensor.grad = plain if part is tensor.grad else whole_of(tensor.grad)(plain)

    def settle_new(self, tensors: Sequence[LazyTensor]) -> None:
        """Let new state (an optimizer's at its first step), which is no change of a known place, be of ordinary
        tensors: the very objects, since anything may hold them."""
        for tensor in tensors if self.call.plain else ():
            is_new = tensor._geometry.device != LAZY and id(tensor) not in self.reached.tensors
            is_left = DEVICE.is_marked(tensor) or is_new  # guards know what was there before
            if is_left and id(tensor) not in self._plain and graph_of(tensor) is None:
                found = self._plainly(tensor)
                if type(found) is torch.Tensor and not (
                    found.requires_grad or found._is_view() or found.is_inference()
                ):
                    found = found.data  # else what the recorder writes to its memory counts, too
                    set_versions([found], [tensor._version])
                with suppress(RuntimeError):  # a weak reference to it
                    torch.utils.swap_tensors(tensor, found)
                    self._by_memory = self._by_memory if is_new else None

    # ---------------------------------------------------------------- what else is alive

    def account(self) -> None:
        """Refuse where memory that the call made is still alive and nothing known holds it."""
        self.capture.let_go()
        if not self._unaccounted():
            return
        if self._joint is not None:
            if self._joint.held is None:
                return
            self._accounted |= self._joint.held
            self._accounted |= {id(storage) for _, storage in self.recorder.inputs}  # its results are pending
        if any_autocast():
            torch.clear_autocast_cache()  # a block outside keeps the call's casts of weights; a replay makes its own
        for generation in range(3):  # what the call left in cycles is young, mostly: the whole heap is scanned last
            gc.collect(generation)
            if not self._unaccounted():
                return
        self.capture.refuse("a tensor that it made outlives it, held by something that guards do not see")

    def _unaccounted(self) -> bool:
        known = self._accounted | set(self.capture.known_before)
        return any((storage := ref()) is not None and id(storage) not in known for ref in self.capture.outputs)

    def versions(self) -> tuple[torch.Tensor | int, ...]:
        """Tensors of the state, and arguments by number, whose version a replay raises: at its end, or before its
        joint, which raises those that it writes itself."""
        return self._raised


_LEAF = flatten_tree(0)[1]


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, _ATOMS) else f"a {type(value).__name__}"
    return text if len(text) < 60 else text[:57] + "..."


__all__ = ["Outcome"]
