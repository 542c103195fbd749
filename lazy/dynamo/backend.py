"""`torch.compile(model, backend="torchlazy")`: our tracing, joint tracing and compiler for graphs that Dynamo captures.

torch finds `torchlazy_backend` through the entry-point group `torch_dynamo_backends`. It hands over graphs of torch
calls; each is recorded here on twins of its inputs, forward and backward, for each kind of inputs that it is called
with (geometry, sharing of memory, numbers, what needs gradients, dispatch context), and runs as our programs.

A checkpointed region is one call of a higher-order operator in such a graph. torch leaves it to the back end that
dropout draws the same mask in the forward and when the region is computed again for the backward.

Invariant: results, their aliasing, written inputs and gradients are those of the graph run eagerly; what a region
computes again is what it computed. A graph that cannot be recorded, or is called with more than `_MAX_KINDS` kinds of
inputs, runs eagerly, with one warning that says why.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint
from torchlazy.lazy.config import config
from torchlazy.lazy.dynamo.kinds import DEVICES, CallKinds, is_plain, versions
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.export.record import WholeGraph
from torchlazy.lazy.joint.deeper import derived_again
from torchlazy.lazy.joint.function import JointHandles, each_its_own, new_seeds, run_joint
from torchlazy.lazy.joint.record import record_joint
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.plan.joint import CannotRecordJoint, Joint
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor, wrap
from torchlazy.lazy.report import metrics
from torchlazy.lazy.torch_private.dispatch import flatten_tree, unflatten_tree
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.trace.geometry import Geometry, geometry_like
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.user_frames import line_in

_HOOKED = "an input has a hook, which sees no gradient where only some of several results are differentiated"
_SETTINGS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def own_checkpoints(module: fx.GraphModule) -> bool:
    """Make the regions of the module's graphs calls of `torch.utils.checkpoint`; whether there are any."""
    region = getattr(torch.ops.higher_order, "tag_activation_checkpoint", None)
    found = False
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        calls = [node for node in part.graph.nodes if node.op == "call_function" and node.target is region]
        for call in calls:
            call.target = _region
        if calls:
            part.recompile()
            found = True
    return found


def _region(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """`body(*args)`, computed again for the backward, under the settings that the program gave its checkpoint."""
    settings = {name: kwargs.pop(name) for name in _SETTINGS if name in kwargs}
    settings["use_reentrant"] = False
    if "_checkpoint_context_fn" in body.meta:  # which operators' results are kept is the program's own choice
        settings["context_fn"] = body.meta["_checkpoint_context_fn"]
    errors: list[Exception] = []
    forward = True

    def run(*given: Any, **named: Any) -> Any:
        """The body. torch 2.11 leaves the region's hooks open where its forward raises, as a recording may that gives
        way to an eager run: the error comes after the region."""
        try:
            return body(*given, **named)
        except Exception as error:
            if not forward:
                raise
            errors.append(error)
            return None

    result = checkpoint(run, *args, **settings, **kwargs)
    forward = False
    if errors:
        raise errors[0]
    return result


_MAX_KINDS = 32
_MAX_SIZES = 512  # kinds of a graph that gets sizes: the least recently used are dropped
_PURPOSE = 'torch.compile(backend="torchlazy")'
_GENERATED = re.compile(r"(<eval_with_key>\.\d+):(\d+)")


def torchlazy_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """A callable that computes what `graph_module` does. `example_inputs` are not used: inputs are examined when it
    is called. Programs are compiled in the background as usual (`torchlazy.config.tiers`).

    Raises ValueError for a `mode` other than "default" and for `options`, which belong to another back end.
    """
    if mode not in (None, "default") or options:
        raise ValueError(
            f"{_PURPOSE}: mode={mode!r}, options={options!r}: settings of torch's own back end; set torchlazy.config.* "
            "instead, or use torchlazy.compile(model, mode=...)"
        )
    if config.enabled == "off":
        return graph_module
    return GraphCall(LazyTensor.recorder, graph_module)


@dataclass(frozen=True)
class _Recorded:
    """The graph for one kind of inputs.

    `places`: for each input of the joint the position of the tensor whose memory it is, or the storage of a constant.
    `wanted`: positions of the tensors that gradients flow to. `same`: results that are an input itself.
    """

    joint: Joint
    places: tuple[int | LazyStorage, ...]
    wanted: tuple[int, ...]
    scalars: tuple[Any, ...]
    spec: Any
    handles: JointHandles
    unraised: frozenset[int]  # inputs of the joint that it writes to by `.data` alone
    has_several: bool  # results that gradients come to
    leaves: tuple[Any, ...]  # results: ("output", n), ("input", position) or ("constant", value)


class GraphCall:
    """One graph that torch captured, with a recording for each kind of inputs."""

    def __init__(self, recorder: Recorder, graph_module: fx.GraphModule) -> None:
        self.recorder = recorder
        self.graph_module = graph_module
        self._has_checkpoints = own_checkpoints(graph_module)
        self.kinds: dict[Any, _Recorded] = {}
        self.why_eager = ""
        self.orders = 1  # of gradients that are recorded: grows when a caller needs more
        self._known = CallKinds()
        self._last: tuple[Any, _Recorded | None] = (None, None)
        self._numbers = _read_as_numbers(graph_module)
        self._sizes_vary = _has_sizes(graph_module)
        self._has_state = bool(_own_tensors(graph_module))

    def __call__(self, *args: Any) -> Any:
        if self.why_eager or self.recorder.mode_depth or BLOCKS.is_open_here():
            return self.graph_module.forward(*args)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if self._has_state:
            tensors += _own_tensors(self.graph_module)
        key = self._known.key(args, tensors, [args[i] for i in self._numbers])
        last, found = self._last
        if found is None or key is None or key != last:
            found = self.kinds.get(key)
            if found is None:
                if key is None or not all(is_plain(t) for t in tensors):
                    return self.graph_module.forward(*args)
                if len(self.kinds) >= _MAX_KINDS and not self._sizes_vary:
                    return self._eager(args, f"it is called with more than {_MAX_KINDS} kinds of inputs")
                try:
                    found = self._record(args, tensors)
                except (ExportError, CannotRecordJoint) as why:
                    told = str(why).partition("\nremedy")[0].replace("\nwhere:", ", at").removeprefix(f"{_PURPOSE}: ")
                    return self._eager(args, _GENERATED.sub(lambda at: self._user_line(at) or at.group(), told))
                except Exception as error:  # the program's own error, as in eager, or a call that cannot be recorded
                    return self._eager(args, f"{type(error).__name__}: {error}", once=True)
                if len(self.kinds) >= (_MAX_SIZES if self._sizes_vary else _MAX_KINDS):
                    del self.kinds[next(iter(self.kinds))]
            else:
                del self.kinds[key]
            self.kinds[key] = found  # most recently used last
            self._last = key, found
        if found.has_several and any(tensors[i]._backward_hooks for i in found.wanted):
            metrics.fallbacks[f"{_PURPOSE}: {_HOOKED}"] += 1
            return self.graph_module.forward(*args)
        return self._run(found, tensors, args)

    def _eager(self, args: Sequence[Any], why: str, once: bool = False) -> Any:
        result = self.graph_module.forward(*args)  # the program's own errors are raised here
        metrics.fallbacks[f"{_PURPOSE}: {why}"] += 1
        if not self.why_eager:
            warnings.warn(f"{_PURPOSE}: a graph runs eagerly: {why}", RuntimeWarning, stacklevel=4)
        if not once or len(self.kinds) == 0:
            self.why_eager = why
        return result

    def _user_line(self, at: re.Match[str]) -> str:
        """The user's line behind a line of code that torch generated, or ""."""
        made = linecache.getline(at[1], int(at[2])).split("=")[0].split(":")[0].strip()
        traces = [node.meta.get("stack_trace") for node in self.graph_module.graph.nodes if node.name == made]
        return line_in("".join(filter(None, traces)))

    # ---------------------------------------------------------------- recording

    def _record(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> _Recorded:
        recorder = self.recorder
        whole = WholeGraph(recorder, _PURPOSE, on_lazy=False)
        whole.may_draw = (
            not self._has_checkpoints and config.rng != "eager"
        )  # its order of draws, not again in backward
        with whole.recording():
            twins = _Twins(whole, tensors)
            number = {id(t): i for i, t in enumerate(tensors)}
            given = [twins.entered[number[id(a)]] if isinstance(a, torch.Tensor) else a for a in args]
            for position in self._numbers:  # real values: they are read while recording, and are part of the kind
                given[position] = args[position]
            with _module_tensors(self.graph_module, lambda t: twins.entered[number[id(t)]]):
                value = self.graph_module.forward(*given)
            if twins.are_moved():
                raise CannotRecordJoint("an input gets another shape or other memory (`set_`, `t_`, `x.data = y`)")
            leaves, spec = flatten_tree(value)
            outputs, described = _results(whole, leaves, twins)
            changed = [t for t in twins.entered if twins.is_changed(t) and all(t is not o for o in outputs)]
            raised = twins.raised()
            wanted = [i for i, t in enumerate(tensors) if t.requires_grad] if torch.is_grad_enabled() else []
            recorded = record_joint(
                recorder,
                [*outputs, *changed],
                [twins.leaves[i] for i in wanted],
                arguments=list(twins.leaves),
                orders=self.orders,
                known={id(t) for t in (*twins.leaves, *twins.entered)},
            )
            if twins.shares_memory(changed):
                raise CannotRecordJoint("an input that is changed under autograd shares memory with another input")
            places = tuple(twins.place_of(storage) for storage in recorded.inputs)
            handles = JointHandles(self._sizes_vary, same_inputs=True)
            unraised = frozenset(i for i, storage in enumerate(recorded.inputs) if id(storage) not in raised)
            has_several = sum(result.tangent is not None for result in recorded.joint.results) > 1
            return _Recorded(
                recorded.joint,
                places,
                tuple(wanted),
                recorded.scalars,
                spec,
                handles,
                unraised,
                has_several,
                tuple(described),
            )

    # ---------------------------------------------------------------- running

    def _run(self, found: _Recorded, tensors: list[torch.Tensor], args: Sequence[Any]) -> Any:
        deeper = (
            _RecomputedGradients(self, found, tensors, args).gradients if found.joint.backward is not None else None
        )
        inputs = [tensors[place] if type(place) is int else _real(place) for place in found.places]
        results = each_its_own(
            run_joint(
                self.recorder,
                found.joint,
                inputs,
                [tensors[i] for i in found.wanted],
                new_seeds(found.joint, found.scalars),
                cause=_PURPOSE,
                handles=found.handles,
                deeper=deeper,
                unraised=found.unraised,
            )
        )
        leaves = [
            results[value] if kind == "output" else tensors[value] if kind == "input" else value
            for kind, value in found.leaves
        ]
        return unflatten_tree(leaves, found.spec)


class _RecomputedGradients:
    """Computes the gradients of one call again, by the graph itself: for the first `create_graph=True` of an order that
    is not recorded.

    Holds no input alive, and gives up where one is gone or changed, or the graph would compute other values.
    """

    def __init__(self, call: GraphCall, found: _Recorded, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> None:
        self._call = call
        self._found = found
        self._tensors, self._versions = call._known.refs, versions(tensors)
        self._args = [None if isinstance(a, torch.Tensor) else a for a in args]
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in DEVICES if torch.is_autocast_enabled(kind)}

    def gradients(self, levels: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Those of the recorded backward of the last level, in its order, differentiable."""
        call, joint = self._call, self._found.joint
        if call.orders <= len(levels):
            call.orders = len(levels) + 1
            call.kinds.clear()
            call._last = (None, None)
        tensors = [ref() for ref in self._tensors]
        held = [t for t, v in zip(tensors, self._versions, strict=True) if t is not None and t._version == v]
        places = {o.index: n for n, o in enumerate(joint.outputs) if o.source == "result" and o.is_whole}
        sources = [i for i, result in enumerate(joint.results) if result.tangent is not None]
        repeats = not (joint.updates or joint.writes or int in joint.forward.scalar_kinds)
        if len(held) < len(tensors) or not repeats or any(i not in places for i in sources):
            raise RuntimeError(
                f"{_PURPOSE}: gradients of order {len(levels)} are asked for with create_graph=True, and this call was "
                "recorded without those beyond / call the model again: from now on they are recorded too"
            )
        outputs = [places[i] for i in sources]
        wanted = [held[i] for i in self._found.wanted]
        return derived_again(lambda given: self._results(held, given, outputs), joint, wanted, levels)

    def _results(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], outputs: Sequence[int]
    ) -> list[torch.Tensor]:
        """The joint's outputs of these numbers, from other tensors in place of the wanted inputs."""
        module, found = self._call.graph_module, self._found
        given = [t.detach() for t in tensors]
        for position, tensor in zip(found.wanted, wanted, strict=True):
            given[position] = tensor
        number = {id(t): i for i, t in enumerate(tensors)}
        following = iter(given)
        args = [next(following) if a is None else a for a in self._args]
        with ExitStack() as modes, _module_tensors(module, lambda t: given[number[id(t)]]):
            for kind in DEVICES:
                if kind in self._autocast or torch.is_autocast_enabled(kind):
                    dtype = self._autocast.get(kind)
                    modes.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            leaves, _ = flatten_tree(module.forward(*args))
        of_output = {value: leaf for leaf, (kind, value) in zip(leaves, found.leaves, strict=True) if kind == "output"}
        return [of_output[n] for n in outputs]


class _Twins:
    """Twins of the tensors: views of twins of their memory, so that inputs that share memory do so here.

    `leaves`: what gradients are taken by. `entered`: what the graph gets; results of an operator where the tensor is
    one, so that it may be changed in place as there.
    """

    def __init__(self, whole: WholeGraph, tensors: Sequence[torch.Tensor]) -> None:
        recorder = whole.recorder
        self.leaves: list[torch.Tensor] = []
        self.entered: list[Any] = []
        self._storages: dict[int, LazyStorage] = {}
        self._positions: dict[int, list[int]] = {}
        self._recorder = recorder
        self._real: list[LazyStorage] = []
        self._before: list[tuple[LazyStorage, Geometry]] = []
        for position, tensor in enumerate(tensors):
            with recorder.apart():  # inspected, not recorded
                real = recorder.storage_of_plain(tensor)
                geom = geometry_like(tensor.detach(), tensor.device, str(tensor.device))
            self._real.append(real)  # held, so that its identity stays its own
            storage = self._storages.get(id(real))
            if storage is None:
                storage = self._storages[id(real)] = whole.own_storage(real.base, str(position))
            self._positions.setdefault(id(storage), []).append(position)
            twin: torch.Tensor = wrap(storage, geom, None, -1)
            if isinstance(tensor, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, tensor.requires_grad)
            else:
                twin.requires_grad_(tensor.requires_grad)
            self.leaves.append(twin)
            self.entered.append(twin if tensor.is_leaf else _Enter.apply(twin))
            self._before.append((storage, geom))
        self._versions = [0 if t.is_inference() else t._version for t in self.entered]
        self._nodes = {id(t): t.grad_fn for t in self.entered}

    def are_moved(self) -> bool:
        """Whether some input has another geometry or memory than at the beginning."""
        return any(
            (twin._storage_, twin._geometry) != was for twin, was in zip(self.entered, self._before, strict=True)
        )

    def raised(self) -> frozenset[int]:
        """The memory of those whose version the graph raised, by identity."""
        seen = zip(self.entered, self._versions, strict=True)
        return frozenset(id(t._storage_) for t, was in seen if t.is_inference() or t._version != was)

    def is_changed(self, twin: Any) -> bool:
        """Whether the graph wrote to it under autograd."""
        storage = twin._storage_
        is_written = storage.dirty and storage.epoch == self._recorder.epoch
        return is_written and twin.requires_grad and twin.grad_fn is not self._nodes[id(twin)]

    def shares_memory(self, changed: Sequence[Any]) -> bool:
        """Whether one of these is not the only input over its memory."""
        return any(len(self._positions[id(t._storage_)]) > 1 for t in changed)

    def place_of(self, storage: LazyStorage) -> int | LazyStorage:
        """The first tensor over this memory; the storage itself where no input has it: a constant of the graph."""
        found = self._positions.get(id(storage))
        return found[0] if found is not None else storage


class _Enter(torch.autograd.Function):
    """The identity: makes a leaf the result of an operator."""

    @staticmethod
    def forward(ctx: Any, leaf: LazyTensor) -> torch.Tensor:
        return wrap(leaf._storage_, leaf._geometry, None, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _real(place: Any) -> torch.Tensor:
    """The memory of a constant."""
    found: torch.Tensor = place.real
    return found


def _results(whole: WholeGraph, leaves: Sequence[Any], twins: _Twins) -> tuple[list[Any], list[tuple[str, Any]]]:
    """The lazy tensors among the results, and what each result is."""
    given = {id(t): i for i, t in enumerate(twins.entered)}
    outputs: list[Any] = []
    numbers: dict[int, int] = {}
    described: list[tuple[str, Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(("constant", leaf))
        elif id(leaf) in given:
            described.append(("input", given[id(leaf)]))
        else:
            if not isinstance(leaf, LazyTensor):
                raise whole.error(f"a result is an ordinary {leaf.layout} tensor", "return what the graph computes")
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(outputs)
                outputs.append(leaf)
            described.append(("output", numbers[id(leaf)]))
    return outputs, described


def _own_tensors(module: fx.GraphModule) -> list[torch.Tensor]:
    """The graph's own parameters and buffers, each once."""
    return [*module.parameters(), *module.buffers()]


@contextmanager
def _module_tensors(module: fx.GraphModule, twin_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, the module's parameters and buffers are their twins."""
    changed: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for part in module.modules():
            tables: list[dict[str, Any]] = [part._parameters, part._buffers]
            for table in tables:
                for name, tensor in list(table.items()):
                    if tensor is not None:
                        changed.append((table, name, tensor))
                        table[name] = twin_of(tensor)
        yield
    finally:
        for table, name, tensor in changed:
            table[name] = tensor


def _read_as_numbers(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of inputs that the graph reads on the host: Python floats, which torch's capture hands over as 0-dim
    tensors where they may vary."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(
        i
        for i, node in enumerate(inputs)
        if any(user.op == "call_method" and user.target in ("item", "tolist") for user in node.users)
    )


def _has_sizes(module: fx.GraphModule) -> bool:
    """Whether sizes are among the graph's inputs: it is called with many."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return any(isinstance(node.meta.get("example_value", node.meta.get("val")), torch.SymInt) for node in inputs)


exclude_from_dynamo(GraphCall.__call__, _Enter.backward)
