"""Primitives that are one ATen call each: pooling, unfolding, resampling.

A row: name, operator, kind, attributes, metadata rule, meaning. Most such operators decompose; these are for windows
that are too large, or that write where they collide.

Invariant: as in `prims/library/call.py`.
"""

from __future__ import annotations

from torchlazy.prims import window_meta as lw
from torchlazy.prims.attrs import NoAttrs
from torchlazy.prims.library import attrs as la
from torchlazy.prims.library.call import call_of
from torchlazy.prims.prim import Kind

_WINDOW = Kind.WINDOW

max_pool2d = call_of(
    "max_pool2d",
    "max_pool2d_with_indices",
    _WINDOW,
    la.MaxPoolAttrs,
    lw.max_pool(2),
    "Largest element of each window, and where it lies; NaN wins.",
)
max_pool3d = call_of(
    "max_pool3d",
    "max_pool3d_with_indices",
    _WINDOW,
    la.MaxPoolAttrs,
    lw.max_pool(3),
    "Largest element of each window, and where it lies; NaN wins.",
)
max_pool2d_backward = call_of(
    "max_pool2d_backward",
    "max_pool2d_with_indices_backward",
    _WINDOW,
    la.MaxPoolAttrs,
    lw.pool_backward,
    "Gradients added where the maxima lay.",
)
max_pool3d_backward = call_of(
    "max_pool3d_backward",
    "max_pool3d_with_indices_backward",
    _WINDOW,
    la.MaxPoolAttrs,
    lw.pool_backward,
    "Gradients added where the maxima lay.",
)
avg_pool2d = call_of("avg_pool2d", "avg_pool2d", _WINDOW, la.AvgPoolAttrs, lw.avg_pool(2), "Mean of each window.")
avg_pool3d = call_of("avg_pool3d", "avg_pool3d", _WINDOW, la.AvgPoolAttrs, lw.avg_pool(3), "Mean of each window.")
avg_pool2d_backward = call_of(
    "avg_pool2d_backward",
    "avg_pool2d_backward",
    _WINDOW,
    la.AvgPoolAttrs,
    lw.pool_backward,
    "Gradients shared out over each window.",
)
avg_pool3d_backward = call_of(
    "avg_pool3d_backward",
    "avg_pool3d_backward",
    _WINDOW,
    la.AvgPoolAttrs,
    lw.pool_backward,
    "Gradients shared out over each window.",
)
adaptive_max_pool2d = call_of(
    "adaptive_max_pool2d",
    "adaptive_max_pool2d",
    _WINDOW,
    la.OutputSizeAttrs,
    lw.adaptive_max_pool,
    "Largest element of each of a given number of windows, and where it lies.",
)
adaptive_max_pool3d = call_of(
    "adaptive_max_pool3d",
    "adaptive_max_pool3d",
    _WINDOW,
    la.OutputSizeAttrs,
    lw.adaptive_max_pool,
    "Largest element of each of a given number of windows, and where it lies.",
)
adaptive_max_pool2d_backward = call_of(
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool2d_backward",
    _WINDOW,
    NoAttrs,
    lw.pool_backward,
    "Gradients added where the maxima lay.",
)
adaptive_max_pool3d_backward = call_of(
    "adaptive_max_pool3d_backward",
    "adaptive_max_pool3d_backward",
    _WINDOW,
    NoAttrs,
    lw.pool_backward,
    "Gradients added where the maxima lay.",
)
fractional_max_pool2d = call_of(
    "fractional_max_pool2d",
    "fractional_max_pool2d",
    _WINDOW,
    la.FractionalPoolAttrs,
    lw.fractional_max_pool,
    "Largest element of windows at random places.",
)
fractional_max_pool3d = call_of(
    "fractional_max_pool3d",
    "fractional_max_pool3d",
    _WINDOW,
    la.FractionalPoolAttrs,
    lw.fractional_max_pool,
    "Largest element of windows at random places.",
)
max_unpool2d = call_of(
    "max_unpool2d",
    "max_unpool2d",
    _WINDOW,
    la.OutputSizeAttrs,
    lw.unpool,
    "Zeros with each element at its position.",
)
max_unpool3d = call_of(
    "max_unpool3d",
    "max_unpool3d",
    _WINDOW,
    la.UnpoolAttrs,
    lw.unpool,
    "Zeros with each element at its position.",
)
im2col = call_of("im2col", "im2col", _WINDOW, la.UnfoldAttrs, lw.unfold, "Each window as a column.")
col2im = call_of("col2im", "col2im", _WINDOW, la.FoldAttrs, lw.fold, "Columns added where their windows lie.")
grid_sample2d = call_of(
    "grid_sample2d",
    "grid_sampler_2d",
    _WINDOW,
    la.GridSampleAttrs,
    lw.grid_sample,
    "x read between its elements at the places of a grid.",
)
grid_sample3d = call_of(
    "grid_sample3d",
    "grid_sampler_3d",
    _WINDOW,
    la.GridSampleAttrs,
    lw.grid_sample,
    "x read between its elements at the places of a grid.",
)
grid_sample2d_backward = call_of(
    "grid_sample2d_backward",
    "grid_sampler_2d_backward",
    _WINDOW,
    la.GridSampleBackwardAttrs,
    lw.grid_sample_backward,
    "Gradients of grid_sample2d.",
)
grid_sample3d_backward = call_of(
    "grid_sample3d_backward",
    "grid_sampler_3d_backward",
    _WINDOW,
    la.GridSampleBackwardAttrs,
    lw.grid_sample_backward,
    "Gradients of grid_sample3d.",
)
resample_linear1d = call_of(
    "resample_linear1d",
    "upsample_linear1d",
    _WINDOW,
    la.Resample1dAttrs,
    lw.resample,
    "Read between elements, linearly.",
)
resample_linear2d = call_of(
    "resample_linear2d",
    "upsample_bilinear2d",
    _WINDOW,
    la.Resample2dAttrs,
    lw.resample,
    "Read between elements, linearly.",
)
resample_linear3d = call_of(
    "resample_linear3d",
    "upsample_trilinear3d",
    _WINDOW,
    la.Resample3dAttrs,
    lw.resample,
    "Read between elements, linearly.",
)
resample_cubic2d = call_of(
    "resample_cubic2d",
    "upsample_bicubic2d",
    _WINDOW,
    la.Resample2dAttrs,
    lw.resample,
    "Read between elements, by cubics.",
)
resample_linear1d_backward = call_of(
    "resample_linear1d_backward",
    "upsample_linear1d_backward",
    _WINDOW,
    la.Resample1dBackwardAttrs,
    lw.resample_backward,
    "Gradients added where elements were read.",
)
resample_linear2d_backward = call_of(
    "resample_linear2d_backward",
    "upsample_bilinear2d_backward",
    _WINDOW,
    la.Resample2dBackwardAttrs,
    lw.resample_backward,
    "Gradients added where elements were read.",
)
resample_linear3d_backward = call_of(
    "resample_linear3d_backward",
    "upsample_trilinear3d_backward",
    _WINDOW,
    la.Resample3dBackwardAttrs,
    lw.resample_backward,
    "Gradients added where elements were read.",
)
resample_cubic2d_backward = call_of(
    "resample_cubic2d_backward",
    "upsample_bicubic2d_backward",
    _WINDOW,
    la.Resample2dBackwardAttrs,
    lw.resample_backward,
    "Gradients added where elements were read.",
)
resample_linear2d_smooth = call_of(
    "resample_linear2d_smooth",
    "_upsample_bilinear2d_aa",
    _WINDOW,
    la.Resample2dAttrs,
    lw.resample,
    "Linear, with a filter as wide as the result's step.",
)
resample_cubic2d_smooth = call_of(
    "resample_cubic2d_smooth",
    "_upsample_bicubic2d_aa",
    _WINDOW,
    la.Resample2dAttrs,
    lw.resample,
    "Cubic, with a filter as wide as the result's step.",
)
resample_linear2d_smooth_backward = call_of(
    "resample_linear2d_smooth_backward",
    "_upsample_bilinear2d_aa_backward",
    _WINDOW,
    la.Resample2dBackwardAttrs,
    lw.resample_backward,
    "Gradients added where elements were read.",
)
resample_cubic2d_smooth_backward = call_of(
    "resample_cubic2d_smooth_backward",
    "_upsample_bicubic2d_aa_backward",
    _WINDOW,
    la.Resample2dBackwardAttrs,
    lw.resample_backward,
    "Gradients added where elements were read.",
)
