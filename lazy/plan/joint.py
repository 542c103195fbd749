"""Data model of a joint: a function's forward and backward as two traces, and how their inputs and outputs connect.

Invariant: plain data over traces and geometries; a joint holds no memory and can be run any number of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchlazy.lazy.trace.geometry import Geometry, geometry
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.meta import contiguous_strides


class CannotRecordJoint(RuntimeError):
    """The backward of this function cannot be recorded ahead of time; the message says why.

    Run the function under the recorder as it is: its backward is then recorded when it happens.
    """


@dataclass(frozen=True)
class ForwardResult:
    """A tensor that the forward program returns: output `position` of it, with its geometry.

    `tangent` is the number of its gradient among the backward's tangents, None where it has none. `freed`: the nodes of
    the recorded graph, by number, that a backward by it frees for others; None where one by any result is the last.
    """

    position: int
    geometry: Geometry
    tangent: int | None
    freed: frozenset[int] | None = None


@dataclass(frozen=True)
class Output:
    """What the function returned: the view `geometry` of a result, or of an input's memory.

    `is_whole`: it is that tensor itself, no view of it. `requires_grad` as it was.
    """

    source: str  # "result" or "input"
    index: int
    geometry: Geometry
    is_whole: bool
    requires_grad: bool


@dataclass(frozen=True)
class Update:
    """An input that the forward overwrites under autograd: its view `geometry` becomes a result's value.

    `detached`: by an alias that autograd does not know as the input's. The output on this input is that alias."""

    input: int
    result: int
    geometry: Geometry
    detached: bool = False


@dataclass(frozen=True)
class Write:
    """An input whose whole memory becomes output `position` of a program, outside autograd (running statistics)."""

    position: int
    input: int


@dataclass(frozen=True)
class Source:
    """Where a tensor input of the backward comes from: "input" number, "result" number, "saved" value or "tangent"."""

    kind: str
    index: int


@dataclass(frozen=True)
class ScalarSource:
    """Where a scalar of the backward comes from: the forward's scalar of that number, a fresh seed, or a constant.

    The caller passes scalars of the backward that are none of these after the forward's own.
    """

    kind: str  # "forward", "seed" or "constant"
    value: Any


@dataclass(frozen=True)
class Joint:
    """A function's forward and backward, as two traces.

    The forward reads the inputs `forward_inputs`; its outputs are the results, the writes and the `saved` values.
    `gradients`: for each wanted input the backward's output, or None; `needs`: the tangents that this gradient depends
    on (where all of them are missing, so is the gradient). `double`: the joint of the backward half, if recorded.
    """

    forward: CutTrace
    forward_inputs: tuple[int, ...]
    results: tuple[ForwardResult, ...]
    outputs: tuple[Output, ...]
    updates: tuple[Update, ...]
    writes: tuple[Write, ...]
    saved: tuple[int, ...]  # positions in the forward's outputs
    backward: CutTrace | None
    backward_inputs: tuple[Source, ...]
    backward_scalars: tuple[ScalarSource, ...]
    backward_writes: tuple[Write, ...]
    gradients: tuple[int | None, ...]
    needs: tuple[frozenset[int], ...]
    saved_bytes: int
    reasons: tuple[str, ...]  # why each value that crosses is not rematerialized
    double: Double | None = None
    inner: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Double:
    """The joint of a backward half. Its results are the gradients that are not None; its wanted inputs are those of the
    outer joint, then the outer tangents; `inputs` and `scalars` say what its own are in terms of the outer joint."""

    joint: Joint
    inputs: tuple[Source, ...]
    scalars: tuple[ScalarSource, ...]


@dataclass(frozen=True)
class RecordedJoint:
    """A joint, and its inputs and scalars in the call that was recorded."""

    joint: Joint
    inputs: tuple[LazyStorage, ...]
    scalars: tuple[Any, ...]
    given: tuple[int, ...] = ()  # numbers of scalars of the backward that come after those, and their values
    given_scalars: tuple[Any, ...] = ()


def dense(geom: Geometry) -> Geometry:
    """The geometry at offset 0, without gaps and without overlapping elements."""
    expected = 1
    for size, stride in sorted(zip(geom.shape, geom.strides, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return geometry(geom.shape, contiguous_strides(geom.shape), 0, geom.dtype, geom.device, geom.compute)  # type: ignore[arg-type]
        expected *= size
    return geometry(geom.shape, geom.strides, 0, geom.dtype, geom.device, geom.compute)
