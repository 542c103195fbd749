"""Third-party backends under this package's capture: any callable `(fx.GraphModule, example inputs) -> callable`.

`compile_with(backend, trace)` hands a trace over as a graph of ATen operators and returns a runner that keeps the
contract of `runtime.executor.Executable.run`: plain tensors in, plain tensors out, each output in memory of its own or
in the memory that it was donated, in exactly the strides that the trace states.

A number that changes from run to run reaches the backend as a 0-dim tensor where the operators accept one. Elsewhere
many backends would bake it in, so the backend compiles once for each value (at most `_MAX_VARIANTS`).

Invariant: what the backend's callable returns is checked against the trace before the program's caller gets it.
`scalars_as_tensors` rewrites a graph so that each scalar it names is a placeholder of a 0-dim CPU tensor (float64 or
int64), with the values and dtypes that the numbers gave; scalars with another use stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata as _TensorMetadata
from torchlazy.lazy.torch_private.dispatch import above_dispatch
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.meta import ScalarMeta, TensorMeta
from torchlazy.prims.random_bits import random_bits
from torchlazy.runtime.program.steps import CALLED_AS, RNN_LAYER

aten = torch.ops.aten
_library = torch.library.Library("torchlazy", "FRAGMENT")
_library.define("random_bits_of(SymInt[] size, Tensor seed, int stream, *, Device device) -> Tensor")


def _random_bits_of(size: Sequence[int], seed: torch.Tensor, stream: int, *, device: torch.device) -> torch.Tensor:
    return random_bits(size, int(seed.item()), stream, device=device)


def _random_bits_meta(size: Sequence[int], seed: torch.Tensor, stream: int, *, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


# The seed is on the CPU on every device.
_library.impl("random_bits_of", _random_bits_of, "CompositeExplicitAutograd")
torch.library.register_fake("torchlazy::random_bits_of", _random_bits_meta, lib=_library)

# Runs in the grad mode that it was recorded in; a back end calls its graph without gradients.
_library.define("rnn_layer" + str(RNN_LAYER._schema).removeprefix("aten::mkldnn_rnn_layer"))
_library.impl("rnn_layer", CALLED_AS[RNN_LAYER], "CompositeExplicitAutograd")
torch.library.register_fake("torchlazy::rnn_layer", RNN_LAYER, lib=_library)

# Overloads that take the number as a tensor, by those that take it as a number. Both round it to the same type.
_TENSOR_FORM: dict[Any, Any] = {
    getattr(packet, "Scalar"): packet.Tensor  # noqa: B009  (`packet.Scalar` is an overload of many packets)
    for packet in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub)
}
_ARITHMETIC = frozenset({*_TENSOR_FORM.values()})
_WIDE = (torch.float32, torch.float64)


def scalars_as_tensors(graph: fx.Graph) -> list[int]:
    """Turns scalars into 0-dim tensors where possible, in place; returns the numbers of those scalars, in order.

    The graph is the caller's own, as `trace_to_graph` made it.
    """
    scalars = [n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], ScalarMeta)]
    turned = []
    for number, scalar in enumerate(scalars):
        if not all(_takes_tensor(user, scalar) for user in scalar.users):
            continue
        kind = scalar.meta["val"].kind
        for user in list(scalar.users):
            _rewrite(graph, user, scalar)
        scalar.meta["val"] = TensorMeta((), torch.int64 if kind is int else torch.float64, (), "cpu")
        turned.append(number)
    return turned


def bake_scalars(graph: fx.Graph, values: Mapping[int, Any]) -> fx.Graph:
    """A copy of `graph` where the scalars numbered in `values` are constants; the other placeholders stay."""
    copied = fx.Graph()
    val_map: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(graph, val_map)
    copied.output(output)
    for node, new in val_map.items():
        new.meta = dict(node.meta)
    for node in list(copied.nodes):
        if node.op != "placeholder" or not node.target.startswith("scalar"):
            continue
        number = int(node.target.removeprefix("scalar"))
        if number not in values:
            continue
        for user in list(node.users):
            user.args = _replaced(user.args, node, values[number])
            user.kwargs = _replaced(user.kwargs, node, values[number])
        copied.erase_node(node)
    return copied


def _replaced(arguments: Any, node: fx.Node, value: Any) -> Any:
    return fx.map_arg(arguments, lambda argument: value if argument is node else argument)


def _takes_tensor(user: fx.Node, scalar: fx.Node) -> bool:
    if user.target is torch.ops.torchlazy.random_bits.default:
        return True
    if user.op != "call_function" or scalar.meta["val"].kind is not float:
        return False
    meta = user.meta.get("val")
    if not isinstance(meta, TensorMeta) or not meta.dtype.is_floating_point or not meta.shape:
        return False  # among 0-dim operands a tensor would take part in type promotion
    if user.target not in _TENSOR_FORM and user.target not in _ARITHMETIC:
        return False
    if len(user.args) < 2 or not _is_like(user.args[0], meta):
        return False
    if user.args[1] is scalar:
        return not any(a is scalar for a in (*user.args[2:], *user.kwargs.values()))
    # The product of y with alpha becomes a value of its own: only where it is rounded as the sum is.
    return user.target in (aten.add.Tensor, aten.sub.Tensor) and meta.dtype in _WIDE and _is_like(user.args[1], meta)


def _is_like(operand: Any, meta: TensorMeta) -> bool:
    """A tensor with dimensions and the result's dtype: a 0-dim tensor beside it does not affect promotion."""
    have = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    return isinstance(have, TensorMeta) and bool(have.shape) and have.dtype == meta.dtype


def _rewrite(graph: fx.Graph, user: fx.Node, scalar: fx.Node) -> None:
    if user.target is torch.ops.torchlazy.random_bits.default:
        user.target = torch.ops.torchlazy.random_bits_of.default
        return
    meta: TensorMeta = user.meta["val"]
    source, other = user.args[0], user.args[1]
    alpha = user.args[2] if len(user.args) > 2 else user.kwargs.get("alpha")
    narrow = meta.dtype if meta.dtype == torch.float64 else torch.float32

    def call(overload: Any, *args: Any, val: TensorMeta, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(user):
            made = graph.call_function(overload, args, kwargs)
        made.meta["val"] = val
        made.meta["frame"] = user.meta.get("frame", "")
        return made

    number = scalar
    if narrow != torch.float64:
        number = call(aten._to_copy.default, scalar, dtype=narrow, val=TensorMeta((), narrow, (), "cpu"))
    if alpha is scalar:  # x + alpha * y
        assert isinstance(other, fx.Node)
        other = call(aten.mul.Tensor, other, number, val=other.meta["val"])
        user.args, user.kwargs = (source, other), {}
        return
    user.target = _TENSOR_FORM.get(user.target, user.target)
    rest: dict[str, Any] = {} if alpha is None or alpha == 1 else {"alpha": alpha}
    user.args, user.kwargs = (source, number), rest


Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_MAX_VARIANTS = 8


class ForeignBackendError(RuntimeError):
    """A backend that the user named did not keep its contract.

    Cause: it raised, returned no callable, or its callable returned other values than the graph's outputs.
    Example: `torchlazy.compile(step, backend=lambda graph, inputs: None)`.
    Fix: return a callable that takes the graph's inputs and returns its outputs, a tensor for each, in order.
    """


def compile_with(backend: Backend, trace: CutTrace) -> ForeignProgram:
    """`trace` through the user's backend. ForeignBackendError where it raises or returns no callable."""
    return ForeignProgram(backend, trace)


def graph_module(trace: CutTrace) -> fx.GraphModule:
    """The trace as a module of ATen operators that runs as it is.

    Inputs `in0..`, then `scalar0..` as Python numbers. Each tensor node has `meta["tensor_meta"]` as FX's shape
    propagation leaves it, and `meta["frame"]`, the user's line.
    """
    return _as_module(trace_to_graph(trace))


class ForeignProgram:
    """A trace that another backend compiled. `calls` counts the graphs that the backend compiled."""

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
                return _as_module(graph).forward  # a number that always differs: run the operators uncompiled
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
        """The results as the trace states them: right in number, shape, dtype and strides, each in its own memory."""
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
            if memory.shape != value.shape:  # a whole storage may be held as one flat dimension
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
    """Zeros for every input: backends look at shapes, strides, dtypes and devices."""
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
        if new.target is RNN_LAYER:
            new.target = torch.ops.torchlazy.rnn_layer.default
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
