"""A captured call as data: the steps that bring about what the call did, without its Python.

Invariant: a template names every value by where it comes from (an argument, state that guards reach, a gradient, an
earlier step), never by an object that only the captured call held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.numbers.expr import Expression
from torchlazy.lazy.plan.joint import Joint
from torchlazy.lazy.torch_private.distributed import part_of
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace

# ---- where memory comes from


@dataclass(frozen=True, slots=True)
class FromArgument:
    """The storage of tensor argument number `leaf`."""

    leaf: int

    def tensor(self, leaves: Sequence[Any]) -> Any:
        """The tensor on that memory; `leaves` are the arguments."""
        return leaves[self.leaf]


@dataclass(frozen=True, slots=True, eq=False)
class FromState:
    """A storage that a guarded tensor holds."""

    storage: LazyStorage


@dataclass(frozen=True, slots=True, eq=False)
class FromData:
    """The storage of `owner`, a guarded tensor whose memory calls replace, when the call begins."""

    owner: torch.Tensor

    def tensor(self, leaves: Sequence[Any]) -> Any:
        return self.owner


@dataclass(frozen=True, slots=True, eq=False)
class FromGradient:
    """The storage of `owner.grad` at the time of the call; of this process's part of it, where it is distributed."""

    owner: torch.Tensor
    is_distributed: bool = False

    def tensor(self, leaves: Sequence[Any]) -> Any:
        return part_of(self.owner.grad) if self.is_distributed else self.owner.grad


@dataclass(frozen=True, slots=True)
class FromStep:
    """Memory that an earlier step made, by number."""

    place: int


Memory: TypeAlias = "FromArgument | FromState | FromData | FromGradient | FromStep"


# ---- host tensors: ordinary tensors among lazy ones, such as an optimizer's step counts


@dataclass(frozen=True, slots=True, eq=False)
class HostKept:
    """An ordinary tensor that guards reach, or (`constant`) one that the call makes anew each time."""

    tensor: torch.Tensor
    constant: bool = False


@dataclass(frozen=True, slots=True)
class HostArgument:
    """Tensor argument number `leaf`."""

    leaf: int


@dataclass(frozen=True, slots=True)
class HostMade:
    """A host tensor that an earlier step made, by number."""

    place: int


Host: TypeAlias = "HostKept | HostArgument | HostMade"


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A number among the arguments of a host call."""

    expression: Expression


# ---- steps


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Run the program of `trace`; its outputs go to `targets`, a new place each or existing memory. `goes_on`: it is a
    later part of a backward that was split."""

    trace: CutTrace
    inputs: tuple[Memory, ...]
    scalars: tuple[Expression, ...]
    targets: tuple[Memory, ...]
    cause: str
    frame: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HostCall:
    """Run an operator on ordinary tensors. `args` and `kwargs` hold Hosts and HostNumbers; `made` names
    new results, in flat order. `keeps_versions`: it writes through `.data`."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: tuple[int | None, ...]
    written: tuple[Host, ...]
    keeps_versions: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ToLazy:
    """Memory of the compute device from a host tensor: as `op` does it, or (None) an ordinary tensor used as it is."""

    op: torch._ops.OpOverload | None
    source: Host
    kwargs: tuple[tuple[str, Any], ...]
    place: int


@dataclass(frozen=True, slots=True, eq=False)
class ToHost:
    """A host tensor from lazy memory, read through the view `geometry`."""

    op: torch._ops.OpOverload
    source: Memory
    geometry: Geometry
    kwargs: tuple[tuple[str, Any], ...]
    made: int


@dataclass(frozen=True, slots=True, eq=False)
class HostItem:
    """Number source `source` is the one value of a host tensor."""

    tensor: Host
    source: int


@dataclass(frozen=True, slots=True, eq=False)
class LazyItem:
    """Number source `source` is the one value of lazy memory seen through `geometry`: this step waits for it."""

    memory: Memory
    geometry: Geometry
    source: int


@dataclass(frozen=True, slots=True)
class TensorOperand:
    """A tensor argument of a `LazyCall` or `Collective`: memory seen through `geometry`."""

    memory: Memory
    geometry: Geometry


@dataclass(frozen=True, slots=True, eq=False)
class LazyCall:
    """Run an operator at once, because the sizes of what it gives depend on the data. `args` and `kwargs` hold
    TensorOperands. For each result in flat order `made` has its place, or None for a number; `geometries` are those of
    the tensors; `sources` are the number sources of all their sizes, and of the numbers, in this order. `drawn_from`:
    the generators that it draws from (None: torch's default CPU generator)."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: tuple[int | None, ...]
    geometries: tuple[Geometry, ...]
    sources: tuple[int, ...]
    drawn_from: tuple[torch.Generator | None, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """Run a collective of `torch.distributed` on memory, in the order of the call, and wait for it. `args` and `kwargs`
    hold TensorOperands; `facts` are what else it depends on, in a form that compares."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    windows: tuple[TensorOperand, ...]
    facts: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Seed:
    """Number source `source` is a fresh seed from `generator` (None: torch's default CPU generator)."""

    generator: torch.Generator | None
    source: int


@dataclass(frozen=True, slots=True, eq=False)
class KeepState:
    """State number `number` is where `generator` (None: torch's default CPU generator) stands now."""

    generator: torch.Generator | None
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Rewind:
    """`generator` goes back to state number `number`: the end of `fork_rng`, a checkpoint's second forward."""

    generator: torch.Generator | None
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class JointRun:
    """Run a joint: results that a backward outside of the call may ask gradients through. Always the last step.

    `inputs`: for each input of the joint its memory and (state) the tensor that stands for it; `wanted`: the tensors
    that gradients flow to, arguments by number; `unraised`: inputs that the call writes to without raising a version.
    """

    joint: Joint
    inputs: tuple[tuple[Memory, torch.Tensor | None], ...]
    wanted: tuple[torch.Tensor | int, ...]
    scalars: tuple[Expression, ...]
    unraised: frozenset[int] = frozenset()


Step: TypeAlias = (
    "JointRun | Segment | HostCall | LazyCall | ToLazy | ToHost | HostItem | LazyItem | Collective | Seed"
    " | KeepState | Rewind"
)


# ---- what the caller sees


@dataclass(frozen=True, slots=True)
class TensorResult:
    """A new tensor over `memory`. `freed`: it carries a graph that its own backward already used up. Results and
    effects of one `number` are one tensor. `base` is what it is a view of, where the caller has that, too: a write
    under autograd to one of them has a graph, and a version, for both. `is_inference`: autograd is never to know it.
    `is_detached`: it is no view of `base` but detached from it, which has a version for both, too. `is_marked`: it is
    on the device "lazy" as the native recorder has it, a tensor of the ordinary class."""

    memory: Memory
    geometry: Geometry
    requires_grad: bool
    freed: bool
    number: int
    base: Result | None = None
    is_inference: bool = False
    is_detached: bool = False
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class JointResult:
    """Output number `index` of the joint; without its graph where the call's own tensor had none: with `requires_grad`
    as a leaf that the call made. `is_marked`: as in `TensorResult`."""

    index: int
    requires_grad: bool
    is_leaf: bool
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class HostResult:
    """An ordinary tensor."""

    source: Host


@dataclass(frozen=True, slots=True)
class SameArgument:
    """The very object that was passed as leaf `leaf`."""

    leaf: int


@dataclass(frozen=True, slots=True)
class SameContainer:
    """Container number `number` among the arguments: a list, a dictionary, an object of the caller's."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class SameObject:
    """A guarded object, or a plain constant."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class SameGradient:
    """The very object that was `owner.grad` when the call began."""

    owner: torch.Tensor


@dataclass(frozen=True, slots=True)
class NumberResult:
    """A Python number."""

    expression: Expression


Result: TypeAlias = (
    "TensorResult | JointResult | HostResult | SameArgument | SameContainer | SameObject | SameGradient | NumberResult"
)


@dataclass(frozen=True, slots=True)
class ArgumentGradient:
    """The `grad` of tensor argument number `leaf`."""

    leaf: int


@dataclass(frozen=True, slots=True)
class ArgumentContents:
    """What container number `number` among the arguments holds."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """After the steps: `store(value)`, the value being `results` in containers of the structure `spec`.

    `store` is a callable, an ArgumentGradient or ArgumentContents.
    """

    name: str
    store: Any
    results: tuple[Result, ...]
    spec: Any


@dataclass(frozen=True, slots=True, eq=False)
class CallTemplate:
    """A captured call. `free` are the names of guarded numbers that are sources 0, 1, ... and read at each call; they
    are of these `kinds`, since an int promotes dtypes differently from a float.

    `checks` are expressions over the sources with the outcome that the captured call had; those over seeds and items of
    host tensors are known after the steps before the first segment, which are undone where a check fails.
    `versions` are tensors whose version counter the call raises, arguments by number, but for what its joint raises;
    `twins` are groups of host tensors of one value each.
    """

    steps: tuple[Step, ...]
    free: tuple[str, ...]
    read_free: tuple[Any, ...]
    kinds: tuple[type, ...]
    sources: int
    checks: tuple[tuple[Expression, Any], ...]
    results: tuple[Result, ...]
    spec: Any
    effects: tuple[Effect, ...]
    versions: tuple[torch.Tensor | int, ...]
    twins: tuple[tuple[torch.Tensor, ...], ...]
    places: int
    hosts: int
    operators: int


def run_at_once(template: CallTemplate) -> str:
    """The operators that a replay runs outside of programs, by name with how often, the most frequent first. Those on
    ordinary tensors count where they are more than what programs run: step counts of optimizers are no news."""
    on_host = [str(step.op) for step in template.steps if isinstance(step, HostCall)]
    at_once = [str(step.op) for step in template.steps if isinstance(step, LazyCall)]
    count = Counter(at_once + (on_host if len(on_host) > template.operators else []))
    named = [name if times == 1 else f"{times} x {name}" for name, times in count.most_common(6)]
    return ", ".join([*named, f"and {len(count) - 6} others"] if len(count) > 6 else named)
