"""Other people's back ends under our capture: any callable `(fx.GraphModule, example inputs) -> callable`.

`compile_with(backend, trace)` hands a trace over as a graph of ATen operators and returns a runner that keeps the
contract of `runtime.executor.Executable.run`: plain tensors in, plain tensors out, each output in memory of its own or
in the memory that it was donated, in exactly the strides that the trace promises.

Invariant: what the back end's callable returns is checked against the trace before anybody sees it. A number that
changes from run to run reaches it as a 0-dim tensor where the operators take one; where they do not, the back end is
asked once for each value (at most `_MAX_VARIANTS`): many back ends would bake a number in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata as _TensorMetadata
from torchlazy.lazy.foreign_scalars import bake_scalars, scalars_as_tensors
from torchlazy.lazy.fx_graph import trace_to_graph
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.torch_private import above_dispatch
from torchlazy.lazy.trace import CutTrace
from torchlazy.prims.meta import TensorMeta

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_MAX_VARIANTS = 8


class ForeignBackendError(RuntimeError):
    """A back end that the user named did not keep its contract.

    Cause: it raised, returned no callable, or its callable returned other values than the graph's outputs.
    Example: `torchlazy.compile(step, backend=lambda graph, inputs: None)`.
    Fix: return a callable that takes the graph's inputs and returns its outputs, a tensor for each, in order.
    """


def compile_with(backend: Backend, trace: CutTrace) -> ForeignProgram:
    """`trace` through the user's back end. ForeignBackendError where it raises or returns no callable."""
    return ForeignProgram(backend, trace)


def graph_module(trace: CutTrace) -> fx.GraphModule:
    """The trace as a module of ATen operators that runs as it is.

    Inputs `in0..`, then `scalar0..` as Python numbers. Each tensor node has `meta["tensor_meta"]` as FX's shape
    propagation leaves it, and `meta["frame"]`, the user's line.
    """
    return _as_module(trace_to_graph(trace))


class ForeignProgram:
    """A trace that another back end compiled. `calls` counts what the back end was asked to compile."""

    def __init__(self, backend: Backend, trace: CutTrace) -> None:
        self.name = getattr(backend, "__name__", type(backend).__name__)
        self.calls = 0
        self._backend = backend
        self._graph = trace_to_graph(trace)
        self._outputs = [geom for _, geom in trace.outputs]
        self._donations = dict(trace.donations)
        self._inputs = [geom for _, geom in trace.inputs]
        self._as_tensors = scalars_as_tensors(self._graph)
        self._kinds = trace.scalar_kinds
        self._variants: dict[tuple[Any, ...], Callable[..., Any]] = {}
        if len(self._as_tensors) == len(trace.scalar_kinds):
            self._variants[()] = self._compile(self._graph, ())

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[float] = ()) -> list[torch.Tensor]:
        """The outputs for these inputs, in the trace's order; `inputs` is empty afterwards."""
        tensors = list(inputs)
        inputs.clear()
        with above_dispatch():
            compiled = self._variant(scalars)
            numbers = [
                torch.tensor(scalars[i], dtype=torch.int64 if self._kinds[i] is int else torch.float64)
                for i in self._as_tensors
            ]
            with self._blamed("while it ran"):
                results = compiled(*tensors, *numbers)
            return self._checked(results, tensors)

    __call__ = run

    def _variant(self, scalars: Sequence[float]) -> Callable[..., Any]:
        fixed = {i: value for i, value in enumerate(scalars) if i not in self._as_tensors}
        key = tuple((type(value), value.hex() if isinstance(value, float) else value) for value in fixed.values())
        found = self._variants.get(key)
        if found is None:
            graph = bake_scalars(self._graph, fixed)
            if len(self._variants) >= _MAX_VARIANTS:
                return _as_module(graph).forward  # a number that always differs: the operators as they are
            found = self._variants[key] = self._compile(graph, tuple(fixed.values()))
        return found

    def _compile(self, graph: fx.Graph, fixed: tuple[Any, ...]) -> Callable[..., Any]:
        module = _as_module(graph)
        with above_dispatch(), self._blamed("while it compiled" + (f" for the numbers {fixed}" if fixed else "")):
            self.calls += 1
            compiled = self._backend(module, _examples(graph))
        if not callable(compiled):
            raise ForeignBackendError(
                f"back end {self.name} returned a {type(compiled).__name__}, not a callable; return a function of the "
                f"graph's {len(self._inputs) + len(self._as_tensors)} inputs (`gm.forward` is one)"
            )
        return compiled

    @contextmanager
    def _blamed(self, when: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise ForeignBackendError(
                f"back end {self.name} raised {type(error).__name__} {when}: {error}\n"
                f"where: a graph of {len(self._graph.nodes)} nodes; remedy: mend the back end, or compile without it"
            ) from error

    def _checked(self, results: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results as the trace promises them: right in number, shape, dtype and strides, each in its own memory."""
        if isinstance(results, torch.Tensor):
            results = [results]
        if not isinstance(results, (list, tuple)) or len(results) != len(self._outputs):
            found = f"{len(results)} values" if isinstance(results, (list, tuple)) else type(results).__name__
            raise ForeignBackendError(
                f"back end {self.name}: its callable returned {found}, the graph has {len(self._outputs)} outputs; "
                "return all of them in order"
            )
        for position, (value, geom) in enumerate(zip(results, self._outputs, strict=True)):
            self._check(position, value, geom)
        taken = {value.untyped_storage()._cdata for value in inputs}
        own: list[torch.Tensor] = []
        for value, geom in zip(results, self._outputs, strict=True):
            value = _resolved(value.detach())
            held = value.untyped_storage()
            whole = held.nbytes() == geom.nbytes and value.storage_offset() == 0
            if value.stride() != geom.strides or held._cdata in taken or not whole:
                fresh = torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute)
                value = fresh.copy_(value)
            taken.add(value.untyped_storage()._cdata)
            own.append(value)
        for position, given in self._donations.items():
            memory = inputs[given]
            value = own[position]
            if memory.shape != value.shape:  # a whole storage may be held as one dimension
                memory = memory.as_strided(value.shape, value.stride(), memory.storage_offset())
            own[position] = memory.copy_(value)
        return own

    def _check(self, position: int, value: Any, geom: Geometry) -> None:
        where = f"back end {self.name}: output {position} of its callable"
        if not isinstance(value, torch.Tensor):
            raise ForeignBackendError(f"{where} is a {type(value).__name__}; a tensor of {geom.meta} was asked for")
        have = (tuple(value.shape), value.dtype, value.device)
        if have != (geom.shape, geom.dtype, torch.device(geom.compute)):
            raise ForeignBackendError(
                f"{where} is {value.dtype} of shape {have[0]} on {value.device}; the graph says {geom.dtype} of shape "
                f"{geom.shape} on {geom.compute}; return the graph's outputs unchanged and in order"
            )


def _resolved(value: torch.Tensor) -> torch.Tensor:
    """`value` without the lazy conjugation and negation bits, which the trace does not know."""
    return value.resolve_conj().resolve_neg()


def _examples(graph: fx.Graph) -> list[Any]:
    """Zeros for every input: back ends look at shapes, strides, dtypes and devices."""
    found: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            meta: TensorMeta = node.meta["val"]
            example = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device)
            found.append(example.zero_())
    return found


def _as_module(graph: fx.Graph) -> fx.GraphModule:
    """A module around a copy of the graph, its metadata in the form that FX passes of torch write."""
    copied = fx.Graph()
    val_map: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(graph, val_map)
    for node, new in val_map.items():
        meta = new.meta.pop("val", None)
        frame = node.meta.get("frame", "")
        if isinstance(meta, TensorMeta):
            new.meta["tensor_meta"] = _tensor_metadata(meta)
        if frame:
            new.meta["stack_trace"] = f'  File "{frame.rpartition(":")[0]}", line {frame.rpartition(":")[2]}'
    copied.output(output)
    module = fx.GraphModule(torch.nn.Module(), copied)
    module.recompile()
    return module


def _tensor_metadata(meta: TensorMeta) -> Any:
    shape = torch.Size([int(n) for n in meta.shape])
    return _TensorMetadata(shape, meta.dtype, False, tuple(int(n) for n in meta.strides), None, False, {})
