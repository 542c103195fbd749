"""Gives convolutions channels-last operands and results: on a GPU, and on the CPU in inference with depthwise ones.

cuDNN's kernels for tensor cores read and write channels-last memory; around row-major operands it puts transposing
copies of its own: 3.4 of ResNet-50's 15.7 ms of kernels. A computed operand costs nothing: the loop that computes it
writes it so. Values that are computed from channels-last ones lie so too, and what reads them walks them in that order.

Seen on an H200 (cuDNN 9.19, batch 64, bfloat16, forward and both gradients, microseconds row-major / channels-last):
64 channels 3x3 at 56x56 271 / 125; 256 3x3 at 14x14 143 / 92; 256 to 1024 1x1 at 14x14 139 / 41, but 64 to 256 1x1 at
56x56 111 / 112; depthwise 96 7x7 at 56x56 2833 / 592; groups of 64 channels 160 / 79, but of 4 channels 681 / 1012.
float32 with tensor cores, 64 channels 3x3 at 56x56: 492 / 308.

On the CPU (oneDNN, float32, batch 8, one core, microseconds): depthwise 64 channels 3x3 at 48x48 748 / 284, 160 at
12x12 194 / 74; 3 to 16 channels 3x3 at 96x96 780 / 166; 1x1 81 / 119 to 381 / 296; dense 3x3 alike. So inference of a
network with depthwise convolutions gains (1.9 -> 2.2 times eager's speed, on two cores 2.6 -> 3.4), that of a ResNet-50
loses (1.2 -> 0.9), and training loses, whose batch statistics are summed over the outer dimensions.

Invariant: the same values, and outputs lie as the caller was promised. Layout is a property of memory: whoever needs
another one (an output, another library call) reads a copy.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import is_contiguous, is_same_layout
from torchlazy.prims.meta import Dim, TensorMeta
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE
from torchlazy.prims.plan_graph import PlanGraph
from torchlazy.prims.size_int import is_tracked

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_GROUP = 32  # channels of a group, where there are several and they are not single
_KEEP_ORDER = ("pad", "slice", "flip", "cat")  # beside elementwise primitives: what walks its operand in its own order
_BOUND = ("as_strided", "as_strided_scatter")  # these name places in the memory of their operand


def channels_last_convolutions(graph: fx.Graph, *, device: str = "") -> fx.Graph:
    """The graph with the convolutions that gain by it run channels-last; itself where there is none. `device`: those on
    it, as if it were a GPU."""
    devices = (device,) if device else ("cuda", "cpu") if _pays_on_the_cpu(graph) else ("cuda",)
    wanted = {node: None for node in graph.nodes if any(_is_wanted(node, on) for on in devices)}
    bound = {node for node in graph.nodes if _is_bound(node, wanted)} if wanted else set()
    wanted = {node: None for node in wanted if _is_worth_it(node, wanted, bound)}
    if not wanted:
        return graph
    return _Layout(wanted).run(graph)


def gains_channels_last(x: TensorMeta, weight: TensorMeta, y: TensorMeta, groups: Any, *, device: str = "cuda") -> bool:
    """Whether channels-last kernels on `device` serve the convolution of `x` that gives `y`, and its gradients, at
    least as well. The layout must also be plain to see from shape and strides, or ATen would take it for the other one:
    more than one channel, more than one position."""
    if x.rank != 4 or x.dtype not in _DTYPES or not x.device.startswith(device):
        return False
    sizes = (*x.shape[1:], *y.shape[1:], *weight.shape)
    if any(is_tracked(size) or not isinstance(size, int) for size in sizes) or 0 in (*x.shape, *y.shape):
        return False
    if any(meta.shape[1] == 1 or meta.shape[2] * meta.shape[3] == 1 for meta in (x, y)):
        return False
    inner: Any = min(x.shape[1], y.shape[1]) // groups
    return bool(groups == 1 or inner == 1 or inner >= _LEAST_GROUP)


def channels_last(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Strides of [batch, channels, height, width] with the channels innermost."""
    _, channels, height, width = shape
    return (height * width * channels, 1, width * channels, channels)


# --- which convolutions ---


def _pays_on_the_cpu(graph: fx.Graph) -> bool:
    """Whether there are depthwise convolutions there, and no gradients of convolutions, statistics of a batch, or
    operands that are kept for gradients."""
    has_depthwise = False
    results = {result for node in graph.nodes if node.op == "output" for result in node.all_input_nodes}
    for node in graph.nodes:
        prim = node.target
        if prim is ops.convolution_backward:
            return False
        if prim is ops.convolution:
            if node.args[0] in results:
                return False
            x: TensorMeta = node.args[0].meta["val"]
            has_depthwise |= x.device == "cpu" and x.rank == 4 and node.kwargs["groups"] == x.shape[1] != 1
        elif isinstance(prim, ops.Prim) and prim.is_kind(ops.Kind.REDUCTION):
            axes: Any = node.kwargs.get("axes", ())
            if 0 in axes and node.args[0].meta["val"].rank == 4:
                return False
    return has_depthwise


def _is_wanted(node: fx.Node, device: str) -> bool:
    """Whether this is a convolution, or the gradients of one, that gains."""
    if node.target is ops.convolution:
        x, weight = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
        grad = node.meta["val"]
    elif node.target is ops.convolution_backward:
        grad, x, weight = (operand.meta["val"] for operand in node.args)  # type: ignore[union-attr]
    else:
        return False
    return gains_channels_last(x, weight, grad, node.kwargs["groups"], device=device)


def _is_bound(node: fx.Node, wanted: dict[fx.Node, None]) -> bool:
    """Whether the layout that a value has is not ours to choose: somebody outside made it or relies on it."""
    if node.op == "placeholder":
        return True
    source = node.args[0] if node.target is operator.getitem else node
    if isinstance(source, fx.Node) and source not in wanted and _is_library_call(source):
        return True
    return any(_relies_on_layout(user, wanted) for user in node.users)


def _relies_on_layout(user: fx.Node, wanted: dict[fx.Node, None]) -> bool:
    if user.op == "output":
        return True
    prim = user.target
    return isinstance(prim, ops.Prim) and user not in wanted and (_is_library_call(user) or prim.name in _BOUND)


def _is_library_call(node: fx.Node) -> bool:
    return isinstance(node.target, ops.Prim) and node.target.is_kind(ops.Kind.EXTERN)


def _is_worth_it(node: fx.Node, wanted: dict[fx.Node, None], bound: set[fx.Node]) -> bool:
    """Not where copies on both sides would take the place of cuDNN's own, or of none: it has row-major kernels for
    products of single positions."""
    free = lambda value: value not in bound or _is_seen_channels_last(value.meta["val"])  # noqa: E731
    if node.target is ops.convolution:
        return free(node.args[0]) or free(node)
    results = [user for user in node.users if user.kwargs == {} and user.args[1:] == (0,)]
    return any(map(free, node.args[:2])) or any(map(free, results))


# --- the new graph ---


class _Layout:
    def __init__(self, wanted: dict[fx.Node, None]) -> None:
        self.wanted = wanted
        self.graph = PlanGraph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.given_out: set[fx.Node] = set()  # results
        self.is_bound: set[fx.Node] = set()  # of the new graph: nodes whose layout must stay
        self.copies: dict[tuple[fx.Node, tuple[Dim, ...]], fx.Node] = {}

    def run(self, graph: fx.Graph) -> fx.Graph:
        output = next(iter(reversed(graph.nodes)))
        results = set(output.all_input_nodes)
        for node in graph.nodes:
            if node.op == "output":
                told: Any = node.args[0]
                self.graph.output(tuple(self._in_old_layout(self.env[result], result.meta["val"]) for result in told))
            else:
                self.env[node] = self._copied(node)
                if node in results:
                    self.given_out.add(self.env[node])
                if _is_bound(node, self.wanted):
                    self.is_bound.add(self.env[node])
        return self.graph

    def _copied(self, node: fx.Node) -> fx.Node:
        if node in self.wanted:
            given: Any = node.args
            laid = 2 if node.target is ops.convolution else 3  # not the bias
            operands = [self._channels_last(self.env[operand]) for operand in given[:laid]]
            operands += [self.env[operand] for operand in given[laid:]]
            made = self.graph.call_function(node.target, tuple(operands), dict(node.kwargs))  # type: ignore[arg-type]
            made.meta.update({**node.meta, "val": _restamped(node.meta["val"])})
            return made
        if node.target is ops.convert and (same := self._made_so(node)) is not None:
            return same
        if _relies_on_layout(node, self.wanted):
            return self.graph.node_copy(
                node, lambda operand: self._in_old_layout(self.env[operand], operand.meta["val"])
            )
        made = self.graph.node_copy(node, self.env.__getitem__)
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in self.wanted:
            made.meta["val"] = self.env[source].meta["val"][node.args[1]]
        elif self._follows(made, node):
            self._restamp(made)
        return made

    def _made_so(self, copy: fx.Node) -> fx.Node | None:
        """What this is a copy of in another layout, where that is made in this very layout now."""
        made = self.env[copy.args[0]]  # type: ignore[index]
        if made in self.given_out or made.op == "placeholder" or made.meta["val"] != copy.meta["val"]:
            return None
        self.given_out.add(made)  # another result has memory of its own
        return made

    def _follows(self, made: fx.Node, node: fx.Node) -> bool:
        """Whether a value is computed from one that lies channels-last, and nobody relies on another layout."""
        if not _can_lie_channels_last(made.meta.get("val")) or _is_bound(node, self.wanted):
            return False
        prim = made.target
        if not isinstance(prim, ops.Prim) or not (prim.is_kind(ops.Kind.POINTWISE) or prim.name in _KEEP_ORDER):
            return False
        return any(_is_seen_channels_last(operand.meta.get("val")) for operand in made.all_input_nodes)

    def _restamp(self, node: fx.Node) -> None:
        node.meta["val"] = replace(node.meta["val"], strides=channels_last(node.meta["val"].shape))

    def _channels_last(self, x: fx.Node) -> fx.Node:
        """The value channels-last: as it lies, or written so by what computes it, or copied."""
        meta = x.meta["val"]
        strides = channels_last(meta.shape)
        if _lies_channels_last(meta):
            return x
        if x in self.is_bound or not isinstance(x.target, ops.Prim) or _is_library_call(x):
            return self._copy(x, strides)
        self._restamp(x)
        if x.target is ops.convert:
            source = x.args[0]
            assert isinstance(source, fx.Node)
            if source not in self.is_bound and source.meta.get(MEMORY_DTYPE) == meta.dtype:
                self._restamp(source)  # it is what lies in memory
        return x

    def _in_old_layout(self, x: fx.Node, told: Any) -> fx.Node:
        """The value in the layout that the old graph gave it."""
        if not isinstance(told, TensorMeta) or is_same_layout(x.meta["val"], told):
            return x
        return self._copy(x, told.strides)

    def _copy(self, x: fx.Node, strides: tuple[Dim, ...]) -> fx.Node:
        key = (x, strides)
        if key not in self.copies:
            meta = x.meta["val"]
            copy = self.graph.call_function(ops.convert, (x,), {"dtype": meta.dtype})
            copy.meta = {name: x.meta[name] for name in ("frame", "stage", "copy_of") if name in x.meta}
            copy.meta["val"] = replace(meta, strides=strides)
            self.copies[key] = copy
        return self.copies[key]


def _restamped(value: Any) -> Any:
    """The results channels-last; those that lie so already keep their very strides, which tell of sizes of 1 too."""
    if isinstance(value, tuple):
        return tuple(_restamped(part) for part in value)
    if not _can_lie_channels_last(value) or _lies_channels_last(value):
        return value
    return replace(value, strides=channels_last(value.shape))


def _can_lie_channels_last(meta: Any) -> bool:
    return isinstance(meta, TensorMeta) and meta.rank == 4 and not any(map(is_tracked, meta.shape[1:]))


def _lies_channels_last(meta: TensorMeta) -> bool:
    return is_same_layout(meta, replace(meta, strides=channels_last(meta.shape)))


def _is_seen_channels_last(meta: Any) -> bool:
    """Whether it lies channels-last and not row-major as well."""
    return _can_lie_channels_last(meta) and _lies_channels_last(meta) and not is_contiguous(meta)
