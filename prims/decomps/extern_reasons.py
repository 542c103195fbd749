"""Why operators that have neither a rule nor a primitive of their own stay one ATen call, by choice.

Those that are a primitive of the set have their reason there (`prims/library/call.py`); rules that leave some calls to
ATen say why as they do (`ExternByChoice`).

Invariant: an operator that is listed here has no rule; each reason holds for all operators beside it.
"""

from __future__ import annotations

import torch
from torchlazy.prims import builder

_REASONS: dict[str, str] = {
    "a contraction: the vendor library's kernel, with scale and bias in its epilogue": (
        "_grouped_mm.default _scaled_dot_product_flash_attention.default conv_tbc.default "
        "_scaled_dot_product_flash_attention_backward.default _scaled_dot_product_efficient_attention.default "
        "_scaled_dot_product_efficient_attention_backward.default _scaled_dot_product_cudnn_attention.default "
        "_scaled_dot_product_cudnn_attention_backward.default _slow_conv2d_forward.default "
        "_slow_conv2d_backward.output_mask slow_conv3d_forward.default slow_conv_dilated2d.default "
        "slow_conv_dilated3d.default slow_conv_transpose2d.default slow_conv_transpose3d.default _trilinear.default "
        "addmm.dtype baddbmm.dtype bmm.dtype _euclidean_dist.default _compute_linear_combination.default "
        "_native_multi_head_attention.default _transformer_encoder_layer_fwd.default "
        "_transform_bias_rescale_qkv.default _masked_softmax.default _masked_softmax_backward.default"
    ),
    "a recurrent layer: oneDNN's kernel, one call a layer and direction": (
        "mkldnn_rnn_layer.default mkldnn_rnn_layer_backward.default"
    ),
    "distances of all pairs above the diagonal: rows of unequal length, ATen's kernel": (
        "_pdist_forward.default _pdist_backward.default"
    ),
    "several sources may meet in one target: needs atomics or a sort, which ATen's kernel has": (
        "scatter.reduce scatter.value_reduce _embedding_bag_backward.default "
        "_unsafe_masked_index_put_accumulate.default fractional_max_pool2d_backward.default "
        "fractional_max_pool3d_backward.default"
    ),
    "the number of elements moved depends on data": ("nonzero_static.default masked_scatter_backward.default"),
    "segments whose bounds are data: ATen's kernel": (
        "segment_reduce.default _segment_reduce_backward.default _pack_padded_sequence.default"
    ),
    "alignments of sequences whose lengths are on the host: ATen's recursion": (
        "_ctc_loss_backward.default _ctc_loss_backward.Tensor"
    ),
    "counts by value: many elements meet in one bin, ATen's kernel": (
        "histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges.default "
        "_histogramdd_from_bin_cts.default _histogramdd_from_bin_tensors.default"
    ),
    "an order of data: ATen's sort": "searchsorted.Scalar bucketize.Scalar isin.Scalar_Tensor",
    "overlapping windows, or positions that collide: ATen's kernel": (
        "_upsample_lanczos2d_aa.default _upsample_lanczos2d_aa_backward.default"
    ),
    "a factorization or transform: LAPACK's, MKL's or cuFFT's kernel": (
        "cholesky.default cholesky_solve.default triangular_solve.default linalg_pinv.atol_rtol_tensor"
    ),
    "a series or recurrence with branches that no scalar operation of ours covers: ATen's kernel": (
        "_standard_gamma_grad.default _dirichlet_grad.default kaiser_window.default kaiser_window.periodic "
        "kaiser_window.beta"
    ),
    "a constant that is made once: ATen's kernel": (
        "tril_indices.default triu_indices.default logspace.default linspace.Scalar_Tensor linspace.Tensor_Scalar "
        "linspace.Tensor_Tensor logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor"
    ),
    "complex numbers, and their lazy conjugation and negation, which loops do not have": (
        "polar.default _conj_copy.default _neg_view.default _neg_view_copy.default view_as_real_copy.default "
        "view_as_complex_copy.default"
    ),
    "draws from torch's own generators: ATen's kernel": "_philox_normal.default _philox_uniform.default",
    "a target list that ends at its first -1, read element by element: ATen's kernel": (
        "multilabel_margin_loss_forward.default multilabel_margin_loss_backward.default"
    ),
    "writes statistics that its result does not name: ATen's kernel": (
        "batch_norm_update_stats.default embedding_renorm.default"
    ),
    "called by torch's own passes and forward-mode derivatives only": (
        "glu_jvp.default glu_backward_jvp.default slice_inverse.default _unsafe_masked_index.default"
    ),
    "a hash over the bits of all elements, kept as torch defines it: ATen's kernel": "hash_tensor.default",
    "a sum of powers for one norm of a distributed tensor: ATen's kernel": "linalg__powsum.default",
}


def _lookup(text: str) -> torch._ops.OpOverload | None:
    name, _, overload = text.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload, None) if packet is not None else None


EXTERN_REASONS: dict[torch._ops.OpOverload, str] = {
    overload: reason for reason, names in _REASONS.items() for name in names.split() if (overload := _lookup(name))
}
builder.EXTERN_REASONS.update(EXTERN_REASONS)
