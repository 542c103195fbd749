"""The attributes of primitives that are one library call: one frozen dataclass for each form of call.

Invariant: the fields are the arguments of the ATen operator that are no tensors, under its schema's names (tests hold
it), beside `absent` and `places` of `prims/schema_form.py`. `dim` is a non-negative axis, 0 for rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchlazy.prims.attrs import Axes, Dims, Flags, Names, OptionalDims, OptionalInt, OptionalNumber, Scalar
from torchlazy.prims.meta import Dim


# --- products ---
@dataclass(frozen=True)
class ScaleAttrs:
    """beta * bias + alpha * product."""

    beta: Scalar
    alpha: Scalar


@dataclass(frozen=True)
class ActivationAttrs:
    """beta * bias + alpha * product, then relu or gelu."""

    beta: Scalar
    alpha: Scalar
    use_gelu: bool


@dataclass(frozen=True)
class OutDtypeAttrs:
    """The dtype of the product."""

    out_dtype: torch.dtype


@dataclass(frozen=True)
class ConvolutionAttrs:
    """The geometry of a convolution; `absent` names the bias where there is none."""

    stride: Dims
    padding: Dims
    dilation: Dims
    transposed: bool
    output_padding: Dims
    groups: Dim
    absent: Names


@dataclass(frozen=True)
class ConvolutionBackwardAttrs:
    """The geometry of the convolution, and which gradients are wanted: of input, weight, bias."""

    bias_sizes: OptionalDims
    stride: Dims
    padding: Dims
    dilation: Dims
    transposed: bool
    output_padding: Dims
    groups: Dim
    output_mask: Flags


@dataclass(frozen=True)
class CdistAttrs:
    """The order of the norm, and how ATen may compute it."""

    p: float
    compute_mode: OptionalInt


@dataclass(frozen=True)
class NormOrderAttrs:
    """The order of a norm."""

    p: float


@dataclass(frozen=True)
class AttentionAttrs:
    """softmax(query key^T scale + mask) value; scale None is 1 / sqrt(width)."""

    dropout_p: float
    is_causal: bool
    scale: OptionalNumber
    absent: Names


# --- scans and order ---
@dataclass(frozen=True)
class DimAttrs:
    """One axis."""

    dim: int


@dataclass(frozen=True)
class AccumulateAttrs:
    """One axis, and the operand's dtype: told, because ATen would widen integers otherwise."""

    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class SortAttrs:
    """Along one axis; stable keeps equal elements in order (None: ATen's default, not stable)."""

    stable: bool | None
    dim: int
    descending: bool


@dataclass(frozen=True)
class TopkAttrs:
    """The k largest or smallest along one axis, in order if sorted."""

    k: Dim
    dim: int
    largest: bool
    sorted: bool


@dataclass(frozen=True)
class KthAttrs:
    """The k-th smallest along one axis, counted from 1."""

    k: Dim
    dim: int
    keepdim: bool


@dataclass(frozen=True)
class KeptDimAttrs:
    """One axis, dropped or kept with size 1."""

    dim: int
    keepdim: bool


@dataclass(frozen=True)
class SearchAttrs:
    """Which end of a run of equal elements is meant, and the dtype of positions."""

    out_int32: bool
    right: bool
    side: str | None
    absent: Names


# --- writing at positions ---
@dataclass(frozen=True)
class DimValueAttrs:
    """One axis and the number that is written."""

    dim: int
    value: Scalar


@dataclass(frozen=True)
class ScatterReduceAttrs:
    """One axis; how what meets at one place is put together: sum, prod, mean, amax, amin; with the old value or not."""

    dim: int
    reduce: str
    include_self: bool


@dataclass(frozen=True)
class IndexAddAttrs:
    """One axis, and the factor of what is added."""

    dim: int
    alpha: Scalar


@dataclass(frozen=True)
class IndexPutAttrs:
    """Whether values are added instead of written; `places` are the indexed dimensions."""

    accumulate: bool
    places: Axes


@dataclass(frozen=True)
class PutAttrs:
    """Whether values are added instead of written."""

    accumulate: bool


@dataclass(frozen=True)
class EmbeddingBackwardAttrs:
    """Rows of the table; the row without gradient (-1: none); whether rows are divided by how often they are read."""

    num_weights: Dim
    padding_idx: Dim
    scale_grad_by_freq: bool


@dataclass(frozen=True)
class EmbeddingBagAttrs:
    """mode: 0 sum, 1 mean, 2 maximum over each bag; include_last_offset: offsets end with the number of indices."""

    scale_grad_by_freq: bool
    mode: int
    sparse: bool
    include_last_offset: bool
    padding_idx: int
    absent: Names


@dataclass(frozen=True)
class EmbeddingBagDenseBackwardAttrs:
    """As the forward's, and the number of rows."""

    num_weights: Dim
    scale_grad_by_freq: bool
    mode: int
    padding_idx: int
    absent: Names


@dataclass(frozen=True)
class EmbeddingBagWeightsBackwardAttrs:
    """As the forward's."""

    mode: int
    padding_idx: int


@dataclass(frozen=True)
class HistcAttrs:
    """Equal bins between min and max; equal ends mean the data's own range."""

    bins: int
    min: Scalar
    max: Scalar


# --- windows ---
@dataclass(frozen=True)
class MaxPoolAttrs:
    """Windows; an empty stride is the kernel's size."""

    kernel_size: Dims
    stride: Dims
    padding: Dims
    dilation: Dims
    ceil_mode: bool


@dataclass(frozen=True)
class AvgPoolAttrs:
    """Windows, and what their sums are divided by; an empty stride is the kernel's size."""

    kernel_size: Dims
    stride: Dims
    padding: Dims
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: OptionalInt


@dataclass(frozen=True)
class OutputSizeAttrs:
    """The size of the spatial dimensions of the result."""

    output_size: Dims


@dataclass(frozen=True)
class FractionalPoolAttrs:
    """Window and result sizes."""

    kernel_size: Dims
    output_size: Dims


@dataclass(frozen=True)
class UnpoolAttrs:
    """Result size and the windows that it was pooled with."""

    output_size: Dims
    stride: Dims
    padding: Dims


@dataclass(frozen=True)
class UnfoldAttrs:
    """Windows over a plane."""

    kernel_size: Dims
    dilation: Dims
    padding: Dims
    stride: Dims


@dataclass(frozen=True)
class FoldAttrs:
    """Windows over a plane, and its size."""

    output_size: Dims
    kernel_size: Dims
    dilation: Dims
    padding: Dims
    stride: Dims


@dataclass(frozen=True)
class GridSampleAttrs:
    """interpolation_mode: 0 linear, 1 nearest, 2 cubic; padding_mode: 0 zeros, 1 border, 2 reflection."""

    interpolation_mode: int
    padding_mode: int
    align_corners: bool


@dataclass(frozen=True)
class GridSampleBackwardAttrs:
    """As the forward's, and which gradients are wanted: of input, grid."""

    interpolation_mode: int
    padding_mode: int
    align_corners: bool
    output_mask: Flags


@dataclass(frozen=True)
class Resample1dAttrs:
    """Result length; the scale that source positions are computed with (None: the ratio of sizes)."""

    output_size: Dims
    align_corners: bool
    scales: OptionalNumber


@dataclass(frozen=True)
class Resample2dAttrs:
    """Result size; the scales that source positions are computed with (None: the ratio of sizes)."""

    output_size: Dims
    align_corners: bool
    scales_h: OptionalNumber
    scales_w: OptionalNumber


@dataclass(frozen=True)
class Resample3dAttrs:
    """Result size; the scales that source positions are computed with (None: the ratio of sizes)."""

    output_size: Dims
    align_corners: bool
    scales_d: OptionalNumber
    scales_h: OptionalNumber
    scales_w: OptionalNumber


@dataclass(frozen=True)
class Resample1dBackwardAttrs(Resample1dAttrs):
    """As the forward's, and the size of its operand."""

    input_size: Dims


@dataclass(frozen=True)
class Resample2dBackwardAttrs(Resample2dAttrs):
    """As the forward's, and the size of its operand."""

    input_size: Dims


@dataclass(frozen=True)
class Resample3dBackwardAttrs(Resample3dAttrs):
    """As the forward's, and the size of its operand."""

    input_size: Dims
