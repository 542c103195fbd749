"""Convolutions: the library's kernel, and the bias added separately on a GPU.

On a GPU ATen adds the bias, and sums its gradient, in kernels of their own behind cuDNN's. Here they are sums like any
other, which join the kernels around the convolution. On the CPU the library adds the bias as it writes.

Invariant: eager's numbers, lying as they do there. ATen, too, rounds the product before it adds the bias.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torchlazy.prims.attrs import Dims
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import value

aten = torch.ops.aten


def _has_separate_bias(b: Builder, x: Node) -> bool:
    return b.meta(x).device.startswith("cuda") and b.dtype(x).is_floating_point


@rule(aten.convolution.default, "_convolution.default")
def convolution(
    b: Builder, x: Node, weight: Node, bias: Node | None, stride: Dims, padding: Dims, dilation: Dims,
    transposed: bool, output_padding: Dims, groups: int, *_: bool,
) -> Node:  # fmt: skip
    """convolution(x, weight) + bias[:, 1, 1]; which library runs it is ATen's affair"""
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    if bias is None or not _has_separate_bias(b, x):
        return b.extern_laid(b.wanted, aten.convolution.default, x, weight, bias, *geometry)  # sizes stay tracked
    product = b.extern_laid(b.wanted, aten.convolution.default, x, weight, None, *geometry)
    channels = (1, b.shape(bias)[0], *(1,) * (len(b.shape(product)) - 2))
    return b.aten(aten.add.Tensor, product, b.reshape(bias, channels))


@rule(aten.convolution_backward.default)
def convolution_backward(
    b: Builder, grad: Node, x: Node, weight: Node, bias_sizes: Dims | None, stride: Dims, padding: Dims,
    dilation: Dims, transposed: bool, output_padding: Dims, groups: int, output_mask: tuple[bool, bool, bool],
) -> tuple[Node | None, ...]:  # fmt: skip
    """The library's gradients of x and weight; of the bias sum(grad) over all but the channels"""
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    if not output_mask[2] or not _has_separate_bias(b, grad):
        args = (grad, x, weight, bias_sizes, *geometry, output_mask)
        return b.extern_laid(b.wanted, aten.convolution_backward.default, *args)
    wide = value(b, grad, torch.float64 if b.dtype(grad) == torch.float64 else torch.float32)
    summed = wide.sum((0, *range(2, wide.rank))).to(b.dtype(grad)).node
    if not any(output_mask[:2]):
        return None, None, summed
    mask = (*output_mask[:2], False)
    laid = (*b.wanted[:2], None)
    parts = b.extern_laid(laid, aten.convolution_backward.default, grad, x, weight, None, *geometry, mask)
    return parts[0], parts[1], summed
