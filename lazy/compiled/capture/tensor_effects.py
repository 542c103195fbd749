"""Effects of a captured call on tensors from outside: raised versions, `requires_grad`, hooks, and the memory they
are on.

Arguments and tensors of the state are compared before and after the call; a replay leaves the same changes. Version
counters are those that autograd sees. A tensor may be left on other memory (`p.data = q`, `x.set_()`) or in another
form (`x.t_()`).

Invariant: a replay raises the versions that the call raised, no others: a batch norm changes its running mean behind
autograd's back, and a backward that holds it must not fail. Each tensor is looked at once, however it is reached, and
is named as a replay finds it. A flag is set when the values are there, so a result that needs a gradient of the tensor
is refused. After a replay a tensor is on the memory that it is on after the call, shared with the same tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.compiled.guards.reached import Reached
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.custom_ops import memory_written
from torchlazy.lazy.compiled.template.template import (
    FromArgument,
    FromData,
    FromState,
    HostArgument,
    HostCall,
    HostKept,
    HostMade,
    JointRun,
    LazyCall,
    Segment,
    Step,
)
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor, attributes_of
from torchlazy.lazy.torch_private.dispatch import flatten_tree
from torchlazy.lazy.trace.geometry import geometry_like, is_dense
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.compiled.capture.outcome import Outcome
    from torchlazy.lazy.compiled.capture.session import Capture
    from torchlazy.lazy.compiled.guards.reached import Reached
    from torchlazy.lazy.record.recorder import Recorder


class Versions:
    """The versions of all that a call can reach, when it begins."""

    def __init__(self, recorder: Recorder, reached: Reached, leaves: Sequence[Any]) -> None:
        state: list[tuple[torch.Tensor, torch.Tensor | int]] = [(t, t) for t, _ in reached.tensors.values()]
        passed = [(leaf, i) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._before = [
            (tensor, name, tensor._version, _storage(recorder, tensor))
            for tensor, name in (*state, *passed)
            if not tensor.is_inference()
        ]
        self._of_leaves = {name: storage for _, name, _, storage in self._before if isinstance(name, int)}
        self._of_state = {id(name): storage for _, name, _, storage in self._before if not isinstance(name, int)}
        self._moved: list[tuple[torch.Tensor | int, LazyStorage | None]] = []
        self._memories: set[LazyStorage | None] = set()  # that raised tensors are on

    def raised(self) -> tuple[torch.Tensor | int, ...]:
        """The tensors of the state whose version moved, and arguments by number, as often as it did."""
        self._moved = moved = [
            (name, storage) for tensor, name, version, storage in self._before for _ in range(tensor._version - version)
        ]
        self._memories = {storage for _, storage in moved}
        return tuple(name for name, _ in moved)

    def raised_by(self, steps: Sequence[Step], joint: JointRun) -> tuple[torch.Tensor | int, ...]:
        """Those of the raised ones that the programs of these steps write to, and those that nothing writes to, as
        `t_` does. Ask `raised` before."""
        ends = {self._storage_of(memory) for memory in _written_by(joint).values()}
        written = {storage for _, storage in self._moved} - ends
        for step in steps:
            targets = memory_written(step) if isinstance(step, LazyCall) else ()
            written.update(map(self._storage_of, step.targets if isinstance(step, Segment) else targets))
        return tuple(name for name, storage in self._moved if storage in written)

    def with_unraised(self, step: JointRun) -> JointRun:
        """The step that knows which of its inputs are written without raising a version. Ask `raised` before."""
        storages = {position: self._storage_of(memory) for position, memory in _written_by(step).items()}
        found = {at for at, storage in storages.items() if storage is not None and storage not in self._memories}
        return replace(step, unraised=frozenset(found))

    def _storage_of(self, memory: Any) -> LazyStorage | None:
        if isinstance(memory, FromState):
            return memory.storage
        if isinstance(memory, FromData):
            return self._of_state.get(id(memory.owner))
        return self._of_leaves.get(memory.leaf) if isinstance(memory, FromArgument) else None


def _written_by(step: JointRun) -> dict[int, Any]:
    """Numbers of the inputs that the joint writes to, with their memory."""
    numbers = [*(w.input for w in step.joint.writes), *(u.input for u in step.joint.updates)]
    return {number: step.inputs[number][0] for number in numbers}


def raised_apart(
    raised: Sequence[torch.Tensor | int], moved: Sequence[torch.Tensor | int], steps: Sequence[Step]
) -> tuple[tuple[torch.Tensor | int, ...], tuple[Step, ...]]:
    """The raised versions but those that steps on ordinary tensors raise by themselves; and the steps, which keep the
    versions of what the call wrote through `.data`. `moved`: all versions that the call raised."""
    times = Counter(one if isinstance(one, int) else id(one) for one in moved)
    found: list[Step] = []
    by_steps: Counter[int] = Counter()
    of_made: dict[int | None, int] = {}  # what the views that steps made are of
    for step in steps:
        if isinstance(step, HostCall):
            if step.op.is_view and (viewed := _number(step.args[0], of_made)) is not None:
                of_made.update(dict.fromkeys(step.made, viewed))
            written = [number for host in step.written if (number := _number(host, of_made)) is not None]
            if any(by_steps[number] >= times[number] for number in written):
                step = replace(step, keeps_versions=True)
            else:
                by_steps.update(written)
        found.append(step)
    left = []
    for one in raised:
        number = one if isinstance(one, int) else id(one)
        if by_steps[number]:
            by_steps[number] -= 1
        else:
            left.append(one)
    return tuple(left), tuple(found)


def _number(host: Any, of_made: dict[int | None, int]) -> int | None:
    """The argument's number or the identity of the tensor that was there before the call; None for others."""
    if isinstance(host, HostKept):
        return None if host.constant else id(host.tensor)
    if isinstance(host, HostMade):
        return of_made.get(host.place)
    return host.leaf if isinstance(host, HostArgument) else None


def _storage(recorder: Recorder, tensor: torch.Tensor) -> LazyStorage | None:
    if isinstance(tensor, LazyTensor):
        return tensor._storage_
    return recorder.storage_of_plain(tensor) if is_dense(tensor) else None


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A tensor with another fact now. `position`: of the argument that it is, None for one of the state."""

    tensor: torch.Tensor
    position: int | None
    named: str
    now: Any

    @property
    def result(self) -> t.SameObject | t.SameArgument:
        return t.SameObject(self.tensor) if self.position is None else t.SameArgument(self.position)


class OutsideTensors:
    """The tensors that a call was given or reaches, and what `fact` gave for each."""

    def __init__(self, reached: Reached, leaves: Sequence[Any], fact: Callable[[torch.Tensor], Any]) -> None:
        self._leaves, self._reached, self._fact = leaves, reached, fact
        self._before = {id(tensor): fact(tensor) for tensor in self._tensors()}

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        yield from (tensor for tensor, _ in self._reached.tensors.values())

    def changed(self) -> Iterator[Changed]:
        positions = {id(leaf): at for at, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)}
        for tensor in {id(tensor): tensor for tensor in self._tensors()}.values():
            now = self._fact(tensor)
            if now == self._before[id(tensor)]:
                continue
            position = positions.get(id(tensor))
            named = f"argument {position}" if position is not None else self._reached.tensors[id(tensor)][1]
            yield Changed(tensor, position, named, now)


_LEAF = flatten_tree(0)[1]


class Flags:
    """`requires_grad` of the arguments and of the state before the call."""

    def __init__(self, reached: Reached, leaves: Sequence[Any]) -> None:
        self._outside = OutsideTensors(reached, leaves, lambda tensor: tensor.requires_grad)

    def effects(self, capture: Capture, needs_gradients: bool) -> list[t.Effect]:
        """One for each tensor whose flag is another one now; `needs_gradients`: a result of the call does."""
        found: list[t.Effect] = []
        for changed in self._outside.changed():
            named, flag = changed.named, changed.now
            if needs_gradients or not changed.tensor.is_leaf:
                capture.refuse(f"it changes requires_grad of {named}, which a result may need a gradient of")
            found.append(t.Effect(f"requires_grad of {named}: {flag}", SetFlag(flag), (changed.result,), _LEAF))
        return found


class SetFlag:
    """Sets the flag of a tensor."""

    def __init__(self, flag: bool) -> None:
        self._flag = flag

    def __call__(self, tensor: torch.Tensor) -> None:
        tensor.requires_grad_(self._flag)


class Marks:
    """What else there is on the tensors: hooks on all of them, and the attributes that somebody set on arguments.

    A replay does not run the Python that would set them: a call that leaves others is refused.
    """

    def __init__(self, reached: Reached, leaves: Sequence[Any]) -> None:
        self._outside = OutsideTensors(reached, leaves, _hooks)
        passed = [x for x in leaves if isinstance(x, torch.Tensor) and id(x) not in reached.tensors]
        self._attributes = [(tensor, _attributes(tensor)) for tensor in passed]

    def refuse_changed(self, refuse: Callable[[str], None]) -> None:
        """Refuse where the call left other ones."""
        for changed in self._outside.changed():
            refuse(f"it changes the hooks of {changed.named}, or whether it keeps its gradient")
        for tensor, before in self._attributes:
            now = _attributes(tensor)
            if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                refuse("it sets an attribute of a tensor among its arguments")


def _hooks(tensor: torch.Tensor) -> Any:
    """The tensor's hooks by the numbers that torch gave them, which it gives once."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    keeps = not tensor.is_leaf and tensor.retains_grad
    return type(tensor), keeps, *([(key, id(hook)) for key, hook in table.items()] for table in tables if table)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: tensor.__dict__[name] for name in attributes_of(tensor)}


_PAIR = flatten_tree((0, 0))[1]


class Memories:
    """Where the arguments and the tensors of the state lay before the call."""

    def __init__(self, recorder: Recorder, reached: Reached, leaves: Sequence[Any]) -> None:
        self._recorder = recorder
        self._outside = OutsideTensors(reached, leaves, _place)
        self.moved: frozenset[str] = frozenset()  # names of tensors of the state that lie elsewhere now

    def effects(self, capture: Capture, outcome: Outcome) -> list[t.Effect]:
        """One for each tensor that is on other memory now."""
        found: list[t.Effect] = []
        for changed in self._outside.changed():
            position, named = changed.position, changed.named
            stands_for_itself = position is None or outcome.call.given[position] is changed.tensor
            value = self._memory(changed.tensor, outcome) if stands_for_itself else None
            if value is None:
                capture.refuse(f"it gives {named} other memory, which is not followed")
                continue
            found.append(t.Effect(f"memory of {named}", set_memory, (changed.result, value), _PAIR))
            if position is None:
                self.moved |= {named}
        return found

    def _memory(self, tensor: torch.Tensor, outcome: Outcome) -> t.TensorResult | None:
        storage: LazyStorage
        if isinstance(tensor, LazyTensor):
            storage, geom = tensor._storage_, tensor._geometry
        elif is_dense(tensor) and outcome.call.plain:
            storage = self._recorder.storage_of_plain(tensor)
            geom = geometry_like(tensor.detach(), tensor.device, str(tensor.device))
        else:
            return None
        return outcome.on_memory(storage, geom)


def set_memory(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Let the first tensor be on the memory of the second."""
    tensor, value = pair
    if DEVICE.is_marked(tensor):
        DEVICE.mark(value)
    tensor.data = value


def _place(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, LazyTensor):
        return tensor._storage_, tensor._geometry
    if not is_dense(tensor):
        return None
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
