"""Primitives that are one ATen call each: products, scans, order, writing at positions.

A row: name, operator, kind, attributes, metadata rule, meaning. They are what no code generator of ours fuses.

Invariant: as in `prims/library/call.py`.
"""

from __future__ import annotations

from torchlazy.prims.attrs import NoAttrs
from torchlazy.prims.library import attrs as la
from torchlazy.prims.library import meta as lm
from torchlazy.prims.library.call import call_of
from torchlazy.prims.prim import Kind

_PRODUCT, _SCAN, _SORT, _PLACE = Kind.CONTRACTION, Kind.SCAN, Kind.SORT, Kind.INDEXING

# --- products ---
mm = call_of("mm", "mm", _PRODUCT, NoAttrs, lm.mm, "Matrix product.")
bmm = call_of("bmm", "bmm", _PRODUCT, NoAttrs, lm.bmm, "A matrix product for each of a batch.")
mv = call_of("mv", "mv", _PRODUCT, NoAttrs, lm.mv, "Matrix times vector.")
addmm = call_of("addmm", "addmm", _PRODUCT, la.ScaleAttrs, lm.addmm, "beta * bias + alpha * matrix product.")
baddbmm = call_of("baddbmm", "baddbmm", _PRODUCT, la.ScaleAttrs, lm.baddbmm, "beta * bias + alpha * batched product.")
addmv = call_of("addmv", "addmv", _PRODUCT, la.ScaleAttrs, lm.addmv, "beta * bias + alpha * matrix times vector.")
addmm_activation = call_of(
    "addmm_activation",
    "_addmm_activation",
    _PRODUCT,
    la.ActivationAttrs,
    lm.addmm,
    "relu or gelu of beta * bias + alpha * product.",
)
int_mm = call_of("int_mm", "_int_mm", _PRODUCT, NoAttrs, lm.int_mm, "Matrix product of int8, accumulated in int32.")
mm_out_dtype = call_of(
    "mm_out_dtype",
    "mm.dtype",
    _PRODUCT,
    la.OutDtypeAttrs,
    lm.mm_out_dtype,
    "Matrix product of halves in float32.",
)
convolution = call_of(
    "convolution",
    "convolution",
    _PRODUCT,
    la.ConvolutionAttrs,
    lm.convolution,
    "Cross-correlation in 1 to 3 dimensions, or its transpose; the bias is optional.",
)
convolution_backward = call_of(
    "convolution_backward",
    "convolution_backward",
    _PRODUCT,
    la.ConvolutionBackwardAttrs,
    lm.convolution_backward,
    "Gradients of a convolution.",
)
cdist = call_of("cdist", "_cdist_forward", _PRODUCT, la.CdistAttrs, lm.cdist, "p-norm distance of each pair of rows.")
cdist_backward = call_of(
    "cdist_backward",
    "_cdist_backward",
    _PRODUCT,
    la.NormOrderAttrs,
    lm.cdist_backward,
    "Gradient of cdist by its first operand.",
)
attention = call_of(
    "attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    _PRODUCT,
    la.AttentionAttrs,
    lm.attention,
    "softmax(query key^T scale + mask) value on the CPU; the mask is optional.",
)
attention_backward = call_of(
    "attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    _PRODUCT,
    la.AttentionAttrs,
    lm.attention_backward,
    "Gradients of attention.",
)

# --- scans ---
cumsum = call_of(
    "cumsum",
    "cumsum",
    _SCAN,
    la.AccumulateAttrs,
    lm.accumulate,
    "Sums of all elements up to each, along one axis.",
)
cumprod = call_of(
    "cumprod",
    "cumprod",
    _SCAN,
    la.AccumulateAttrs,
    lm.accumulate,
    "Products of all elements up to each, along one axis.",
)
cummax = call_of(
    "cummax",
    "cummax",
    _SCAN,
    la.DimAttrs,
    lm.scan_positions,
    "Largest element up to each and its last position; NaN wins.",
)
cummin = call_of(
    "cummin",
    "cummin",
    _SCAN,
    la.DimAttrs,
    lm.scan_positions,
    "Smallest element up to each and its last position; NaN wins.",
)
logcumsumexp = call_of(
    "logcumsumexp",
    "logcumsumexp",
    _SCAN,
    la.DimAttrs,
    lm.scan,
    "log of the sum of exponentials of all elements up to each.",
    (("_logcumsumexp", {}),),
)

# --- order ---
sort = call_of(
    "sort",
    "sort.stable",
    _SORT,
    la.SortAttrs,
    lm.sort,
    "Elements in order along one axis; NaN counts as the largest.",
    (("sort", {"stable": False}),),
)
topk = call_of("topk", "topk", _SORT, la.TopkAttrs, lm.topk, "The k largest or smallest along one axis.")
kthvalue = call_of("kthvalue", "kthvalue", _SORT, la.KthAttrs, lm.select, "The k-th smallest along one axis.")
median = call_of(
    "median", "median.dim", _SORT, la.KeptDimAttrs, lm.select, "The lower median along one axis; NaN wins."
)
nanmedian = call_of(
    "nanmedian",
    "nanmedian.dim",
    _SORT,
    la.KeptDimAttrs,
    lm.select,
    "The lower median along one axis without NaN.",
)
median_all = call_of(
    "median_all", "median", _SORT, NoAttrs, lm.select_all, "The lower median of all elements; NaN wins."
)
nanmedian_all = call_of(
    "nanmedian_all",
    "nanmedian",
    _SORT,
    NoAttrs,
    lm.select_all,
    "The lower median of all elements without NaN.",
)
mode = call_of(
    "mode",
    "mode",
    _SORT,
    la.KeptDimAttrs,
    lm.select,
    "The most frequent element along one axis, the smallest of several.",
)
searchsorted = call_of(
    "searchsorted",
    "searchsorted.Tensor",
    _SORT,
    la.SearchAttrs,
    lm.search,
    "Where each element would stand in a sorted sequence; the sorter is optional.",
)
histc = call_of("histc", "histc", _SORT, la.HistcAttrs, lm.histogram, "Counts in bins of equal width.")

# --- writing at positions ---
scatter = call_of("scatter", "scatter.src", _PLACE, la.DimAttrs, lm.scatter, "x with x[index] = src along one axis.")
scatter_value = call_of(
    "scatter_value",
    "scatter.value",
    _PLACE,
    la.DimValueAttrs,
    lm.scatter,
    "x with x[index] = a number along one axis.",
)
scatter_add = call_of(
    "scatter_add",
    "scatter_add",
    _PLACE,
    la.DimAttrs,
    lm.scatter,
    "x with x[index] += src along one axis.",
)
scatter_reduce = call_of(
    "scatter_reduce",
    "scatter_reduce.two",
    _PLACE,
    la.ScatterReduceAttrs,
    lm.scatter,
    "x with x[index] = reduction of what meets there.",
)
index_add = call_of(
    "index_add",
    "index_add",
    _PLACE,
    la.IndexAddAttrs,
    lm.scatter,
    "x with whole slices added: x[:, index] += alpha * source.",
)
index_copy = call_of(
    "index_copy",
    "index_copy",
    _PLACE,
    la.DimAttrs,
    lm.scatter,
    "x with whole slices replaced: x[:, index] = source.",
)
index_fill = call_of(
    "index_fill",
    "index_fill.int_Scalar",
    _PLACE,
    la.DimValueAttrs,
    lm.scatter,
    "x with whole slices set to a number: x[:, index] = value.",
)
index_reduce = call_of(
    "index_reduce",
    "index_reduce",
    _PLACE,
    la.ScatterReduceAttrs,
    lm.scatter,
    "x with whole slices reduced into.",
)
index_put = call_of(
    "index_put",
    "index_put",
    _PLACE,
    la.IndexPutAttrs,
    lm.index_put,
    "x with x[indices] = values, or += values.",
    (("index_put.hacked_twin", {}), ("_unsafe_index_put", {})),
)
put = call_of("put", "put", _PLACE, la.PutAttrs, lm.scatter, "x with flattened x[index] = source, or += source.")
masked_scatter = call_of(
    "masked_scatter",
    "masked_scatter",
    _PLACE,
    NoAttrs,
    lm.masked_scatter,
    "x with the elements under a mask replaced by the source's, one after the other.",
)
embedding_backward = call_of(
    "embedding_backward",
    "embedding_dense_backward",
    _PLACE,
    la.EmbeddingBackwardAttrs,
    lm.embedding_backward,
    "Rows added at the positions that they were read from.",
)
embedding_bag = call_of(
    "embedding_bag",
    "_embedding_bag",
    _PLACE,
    la.EmbeddingBagAttrs,
    lm.embedding_bag,
    "Sum, mean or maximum of the rows of each bag; weights of samples are optional.",
    (("_embedding_bag_forward_only", {}),),
)
embedding_bag_backward = call_of(
    "embedding_bag_backward",
    "_embedding_bag_dense_backward",
    _PLACE,
    la.EmbeddingBagDenseBackwardAttrs,
    lm.embedding_bag_backward,
    "Gradient of embedding_bag by its table.",
)
embedding_bag_weights_backward = call_of(
    "embedding_bag_weights_backward",
    "_embedding_bag_per_sample_weights_backward",
    _PLACE,
    la.EmbeddingBagWeightsBackwardAttrs,
    lm.embedding_bag_weights_backward,
    "Gradient of embedding_bag by the samples' weights.",
)
