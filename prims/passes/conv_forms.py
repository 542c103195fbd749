"""Rewrites half-precision convolutions on a GPU into equal sums that run faster.

- Patches: windows side by side over an image of few channels are one matrix product.
- Strided windows over an image of few channels: with stride s, the s x s pixels of a cell become channels, and a
  kernel of k by k pixels one of ceil(k / s) by ceil(k / s) cells with stride 1. Missing taps are zeros.
- The input's gradient of a depthwise convolution with stride 1 is the convolution of the gradient with the flipped
  weight: the library's forward kernels take half of the time of its backward ones.

Seen on an H200 (cuDNN 9.19, bfloat16, channels-last, microseconds forward and for the weight's gradient): 3 to 64
channels 7x7 by 2 on 64 x 224 x 224 447 and 295, in cells 172 and 238, as kernels for tensor cores want 8 channels; 3 to
16 3x3 by 2 on 128 x 224 x 224 234 and 259, in cells 129 and 93; 3 to 768 16x16 by 16 on 64 x 224 x 224 445 and 217.
Depthwise 96 7x7 at 56 x 56 forward 139, input's gradient 331; all of ConvNeXt tiny's: 2.3 ms less 1.1.

Invariant: the same products summed in another order; shapes, dtypes and recorded layouts stay.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.plan_graph import PlanGraph
from torchlazy.prims.promotion import HALVES
from torchlazy.prims.size_int import is_tracked

_FEW_CHANNELS = 4
_CHANNELS = 8  # what kernels for tensor cores want a multiple of
_LEAST_PIXELS = 1 << 18  # of a batch: smaller images are not worth a copy of them


def other_forms(graph: fx.Graph, *, device: str = "cuda", least_pixels: int = _LEAST_PIXELS) -> fx.Graph:
    """The graph with such convolutions on `device` in their other form; itself where there is none."""
    wanted = {node: form for node in graph.nodes if (form := _form_of(node, device, least_pixels))}
    if not wanted:
        return graph
    return _Forms(wanted).run(graph)


# --- which form ---


def _form_of(node: fx.Node, device: str, least_pixels: int) -> str:
    """ "patches", "cells", "flipped", or "" where the convolution stays."""
    if node.target not in (ops.convolution, ops.convolution_backward):
        return ""
    is_backward = node.target is ops.convolution_backward
    metas: list[TensorMeta] = [operand.meta["val"] for operand in node.args]  # type: ignore[union-attr]
    x, weight = metas[1:3] if is_backward else metas[:2]
    sizes = (*x.shape, *weight.shape)
    if x.rank != 4 or x.dtype not in HALVES or not x.device.startswith(device) or any(map(is_tracked, sizes)):
        return ""
    kind: Any = node.kwargs
    if kind["transposed"] or 0 in sizes:
        return ""
    mask = kind["output_mask"] if is_backward else (False, True, False)
    if is_backward and mask[2]:
        return ""
    if is_backward and mask[0] and _can_flip(x, weight, kind):
        return "flipped"
    if x.shape[1] > _FEW_CHANNELS or kind["groups"] != 1 or tuple(kind["dilation"]) != (1, 1) or mask[0]:
        return ""
    if x.shape[0] * x.shape[2] * x.shape[3] < least_pixels or (len(metas) == 3 and not is_backward):
        return ""
    kernel, stride, padding = weight.shape[2:], tuple(kind["stride"]), tuple(kind["padding"])
    if kernel == stride and padding == (0, 0) and all(n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True)):
        return "patches"
    is_square = stride[0] == stride[1] > 1 and all(k > stride[0] for k in kernel)
    return "cells" if is_square and all(cell.high >= 0 for cell in _cells(x, weight, kind)) else ""


def _can_flip(x: TensorMeta, weight: TensorMeta, kind: Any) -> bool:
    channels = x.shape[1]
    is_depthwise = kind["groups"] == channels == weight.shape[0] > 1 and weight.shape[1] == 1
    reach = [d * (k - 1) for d, k in zip(kind["dilation"], weight.shape[2:], strict=True)]
    return is_depthwise and tuple(kind["stride"]) == (1, 1) and all(p <= r for p, r in zip(kind["padding"], reach))


class _Cells:
    """The windows along one dimension in cells of `stride` pixels."""

    def __init__(self, size: int, kernel: int, stride: int, padding: int) -> None:
        self.stride, self.low = stride, padding
        self.taps = -(-kernel // stride)
        self.count = (size + 2 * padding - kernel) // stride + self.taps
        self.high = self.count * stride - size - padding
        self.more = self.taps * stride - kernel


def _cells(x: TensorMeta, weight: TensorMeta, kind: Any) -> list[_Cells]:
    rows = zip(x.shape[2:], weight.shape[2:], kind["stride"], kind["padding"], strict=True)
    return [_Cells(*row) for row in rows]


# --- the new graph ---


class _Forms:
    def __init__(self, wanted: dict[fx.Node, str]) -> None:
        self.wanted = wanted
        self.graph = PlanGraph()
        self.env: dict[fx.Node, Any] = {}
        self.made: dict[Any, fx.Node] = {}  # forward and backward read the same rearranged operands

    def run(self, graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            source = node.args[0] if node.target is operator.getitem else None
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.env.__getitem__))
            elif source in self.wanted:
                self.env[node] = self.env[source][node.args[1]]  # type: ignore[index]
            elif node in self.wanted:
                operands = [self.env[operand] for operand in node.args]
                self.env[node] = getattr(self, "_" + self.wanted[node])(node, operands)
            else:
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return self.graph

    # --- forms: the result of a convolution, or the results of its backward ---

    def _flipped(self, node: fx.Node, operands: list[fx.Node]) -> tuple[fx.Node | None, ...]:
        grad, x, weight = operands
        kind: Any = node.kwargs
        reach = [d * (k - 1) for d, k in zip(kind["dilation"], _shape(weight)[2:], strict=True)]
        geometry = {name: kind[name] for name in ("stride", "dilation", "transposed", "output_padding", "groups")}
        geometry |= {"padding": tuple(r - p for r, p in zip(reach, kind["padding"], strict=True)), "absent": ("bias",)}
        dx = self._call(node, ops.convolution, grad, self._once(node, ops.flip, weight, axes=(2, 3)), **geometry)
        dx.meta["val"] = node.meta["val"][0]
        dw = None
        if kind["output_mask"][1]:
            rest = {**kind, "output_mask": (False, True, False)}
            both = self._call(node, ops.convolution_backward, grad, x, weight, **rest)
            both.meta["val"] = (None, node.meta["val"][1], None)
            dw = self._part(both, 1)
        return dx, dw, None

    def _patches(self, node: fx.Node, operands: list[fx.Node]) -> Any:
        """result[(n, h, w), k] = sum over (i, j, c) of x[n, c, h * kh + i, w * kw + j] * weight[k, c, i, j]"""
        *grads, x, weight = operands
        (n, c, height, width), (k, _, kh, kw) = _shape(x), _shape(weight)
        rows, taps = n * (height // kh) * (width // kw), c * kh * kw
        cut = self._once(node, ops.reshape, x, shape=(n, c, height // kh, kh, width // kw, kw))
        cut = self._once(node, ops.permute, cut, dims=(0, 2, 4, 3, 5, 1))
        columns = self._once(node, ops.reshape, cut, shape=(rows, taps))
        if not grads:
            flat = self._once(node, ops.permute, weight, dims=(2, 3, 1, 0))
            product = self._call(node, ops.mm, columns, self._once(node, ops.reshape, flat, shape=(taps, k)))
            return self._laid(node, self._images(node, product, (n, height // kh, width // kw, k)), node.meta["val"])
        turned = self._call(node, ops.permute, grads[0], dims=(0, 2, 3, 1))
        flat = self._call(node, ops.reshape, turned, shape=(rows, k))
        product = self._call(node, ops.mm, self._window(node, flat), columns)
        dw = self._images(node, product, (k, kh, kw, c))
        return None, self._laid(node, dw, node.meta["val"][1]), None

    def _cells(self, node: fx.Node, operands: list[fx.Node]) -> Any:
        *grads, x, weight = operands
        c, (k, _, kh, kw) = _shape(x)[1], _shape(weight)
        kind: Any = node.kwargs
        down, along = _cells(x.meta["val"], weight.meta["val"], kind)
        s = down.stride
        more = -(c * s * s) % _CHANNELS

        def cells(value: fx.Node, counts: tuple[int, int], low: tuple[int, int], high: tuple[int, int]) -> fx.Node:
            outer = _shape(value)[0]
            value = self._once(node, ops.pad, value, low=(0, 0, *low), high=(0, 0, *high), value=0.0)
            value = self._once(node, ops.reshape, value, shape=(outer, c, counts[0], s, counts[1], s))
            value = self._once(node, ops.permute, value, dims=(0, 1, 3, 5, 2, 4))
            value = self._once(node, ops.reshape, value, shape=(outer, c * s * s, *counts))
            return self._once(node, ops.pad, value, low=(0,) * 4, high=(0, more, 0, 0), value=0.0)

        images = cells(x, (down.count, along.count), (down.low, along.low), (down.high, along.high))
        kernels = cells(weight, (down.taps, along.taps), (0, 0), (down.more, along.more))
        kind = {**kind, "stride": (1, 1), "padding": (0, 0)}
        if not grads:
            found = self._call(node, ops.convolution, images, kernels, **kind)
            found.meta["val"] = node.meta["val"]
            return found
        both = self._call(node, ops.convolution_backward, grads[0], images, kernels, **kind)
        dw = self._part(both, 1)
        dw = self._cut(node, dw, (k, c * s * s, down.taps, along.taps))
        dw = self._call(node, ops.reshape, dw, shape=(k, c, s, s, down.taps, along.taps))
        dw = self._call(node, ops.permute, dw, dims=(0, 1, 4, 2, 5, 3))
        dw = self._call(node, ops.reshape, dw, shape=(k, c, down.taps * s, along.taps * s))
        return None, self._laid(node, self._cut(node, dw, (k, c, kh, kw)), node.meta["val"][1]), None

    # --- nodes ---

    def _images(self, node: fx.Node, rows: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """[batch, channels, height, width] of rows of channels."""
        return self._call(node, ops.permute, self._call(node, ops.reshape, rows, shape=shape), dims=(0, 3, 1, 2))

    def _window(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """The transposed matrix, seen on the memory of `x`."""
        seen = self._call(node, ops.permute, x, dims=(1, 0))
        seen.meta["val"] = replace(seen.meta["val"], strides=x.meta["val"].strides[::-1])
        return seen

    def _cut(self, node: fx.Node, x: fx.Node, stops: tuple[int, ...]) -> fx.Node:
        if _shape(x) == stops:
            return x
        return self._call(node, ops.slice, x, starts=(0,) * len(stops), stops=stops, steps=(1,) * len(stops))

    def _laid(self, node: fx.Node, x: fx.Node, told: TensorMeta) -> fx.Node:
        """`x` with the recorded strides, should the caller look."""
        x.meta["val"] = told
        return x

    def _part(self, both: fx.Node, position: int) -> fx.Node:
        part = self.graph.call_function(operator.getitem, (both, position))
        part.meta = {**both.meta, "val": both.meta["val"][position]}
        return part

    def _once(self, like: fx.Node, prim: ops.Prim, x: fx.Node, **attrs: Any) -> fx.Node:
        """The same node for the same operand; `x` itself where nothing is to do."""
        if prim is ops.pad and not any((*attrs["low"], *attrs["high"])):
            return x
        key = (prim, x, tuple(attrs.items()))
        if key not in self.made:
            self.made[key] = self._call(like, prim, x, **attrs)
        return self.made[key]

    def _call(self, like: fx.Node, prim: ops.Prim, *operands: fx.Node, **attrs: Any) -> fx.Node:
        node = self.graph.call_function(prim, operands, attrs)
        node.meta.update({key: like.meta[key] for key in ("frame", "stage", "copy_of") if key in like.meta})
        node.meta["val"] = prim.meta(*(operand.meta["val"] for operand in operands), **attrs)
        return node


def _shape(node: fx.Node) -> tuple[int, ...]:
    return node.meta["val"].shape
