"""The operators of torch that an exported file may name without being asked for, written by
tests/runtime/test_exported_operators.py: what a recording can hold (torchlazy.prims.coverage), and a few more.

Invariant: each is functional, takes tensors, numbers, dtypes, devices and modes, and gives tensors: no file, no memory
by address, no generator, no name.
"""

from __future__ import annotations

_NAMES = """
aten.__and__.Scalar aten.__and__.Tensor aten.__lshift__.Scalar aten.__lshift__.Tensor aten.__or__.Scalar
aten.__or__.Tensor aten.__rshift__.Scalar aten.__rshift__.Tensor aten.__xor__.Scalar aten.__xor__.Tensor
aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._adaptive_avg_pool3d.default
aten._adaptive_avg_pool3d_backward.default aten._add_relu.Scalar aten._add_relu.Tensor aten._addmm_activation.default
aten._aminmax.default aten._aminmax.dim aten._amp_foreach_non_finite_check_and_unscale.default
aten._amp_update_scale.default aten._batch_norm_no_update.default aten._batch_norm_with_update_functional.default
aten._cdist_backward.default aten._cdist_forward.default aten._cholesky_solve_helper.default aten._chunk_cat.default
aten._compute_linear_combination.default aten._conj.default aten._conj_copy.default aten._conj_physical.default
aten._convolution.default aten._ctc_loss_backward.Tensor aten._ctc_loss_backward.default aten._dirichlet_grad.default
aten._efficientzerotensor.default aten._embedding_bag.default aten._embedding_bag_backward.default
aten._embedding_bag_dense_backward.default aten._embedding_bag_forward_only.default
aten._embedding_bag_per_sample_weights_backward.default aten._euclidean_dist.default
aten._fake_quantize_learnable_per_channel_affine.default
aten._fake_quantize_learnable_per_channel_affine_backward.default
aten._fake_quantize_learnable_per_tensor_affine.default aten._fake_quantize_learnable_per_tensor_affine_backward.default
aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default aten._fft_c2c.default aten._fft_c2r.default
aten._fft_r2c.default aten._foreach_abs.default aten._foreach_acos.default aten._foreach_add.List
aten._foreach_add.Scalar aten._foreach_add.ScalarList aten._foreach_add.Tensor aten._foreach_addcdiv.Scalar
aten._foreach_addcdiv.ScalarList aten._foreach_addcdiv.Tensor aten._foreach_addcmul.Scalar
aten._foreach_addcmul.ScalarList aten._foreach_addcmul.Tensor aten._foreach_asin.default aten._foreach_atan.default
aten._foreach_ceil.default aten._foreach_clamp_max.List aten._foreach_clamp_max.Scalar
aten._foreach_clamp_max.ScalarList aten._foreach_clamp_min.List aten._foreach_clamp_min.Scalar
aten._foreach_clamp_min.ScalarList aten._foreach_clone.default aten._foreach_copy.default aten._foreach_cos.default
aten._foreach_cosh.default aten._foreach_div.List aten._foreach_div.Scalar aten._foreach_div.ScalarList
aten._foreach_div.Tensor aten._foreach_erf.default aten._foreach_erfc.default aten._foreach_exp.default
aten._foreach_expm1.default aten._foreach_floor.default aten._foreach_frac.default aten._foreach_lerp.List
aten._foreach_lerp.Scalar aten._foreach_lerp.ScalarList aten._foreach_lgamma.default aten._foreach_log.default
aten._foreach_log10.default aten._foreach_log1p.default aten._foreach_log2.default aten._foreach_max.default
aten._foreach_maximum.List aten._foreach_maximum.Scalar aten._foreach_maximum.ScalarList aten._foreach_minimum.List
aten._foreach_minimum.Scalar aten._foreach_minimum.ScalarList aten._foreach_mm.default aten._foreach_mul.List
aten._foreach_mul.Scalar aten._foreach_mul.ScalarList aten._foreach_mul.Tensor aten._foreach_neg.default
aten._foreach_norm.Scalar aten._foreach_pow.List aten._foreach_pow.Scalar aten._foreach_pow.ScalarAndTensor
aten._foreach_pow.ScalarList aten._foreach_powsum.Scalar aten._foreach_reciprocal.default aten._foreach_round.default
aten._foreach_rsqrt.default aten._foreach_sigmoid.default aten._foreach_sign.default aten._foreach_sin.default
aten._foreach_sinh.default aten._foreach_sqrt.default aten._foreach_sub.List aten._foreach_sub.Scalar
aten._foreach_sub.ScalarList aten._foreach_tan.default aten._foreach_tanh.default aten._foreach_trunc.default
aten._foreach_zero.default aten._fused_adagrad.default aten._fused_adagrad.tensor_lr aten._fused_adam.default
aten._fused_adam.tensor_lr aten._fused_adamw.default aten._fused_adamw.tensor_lr aten._fused_rms_norm.default
aten._fused_rms_norm_backward.default aten._fused_sgd.default aten._fused_sgd.tensor_lr aten._grouped_mm.default
aten._histogramdd_bin_edges.default aten._histogramdd_from_bin_cts.default aten._histogramdd_from_bin_tensors.default
aten._int_mm.default aten._is_all_true.default aten._is_any_true.default aten._linalg_det.default
aten._linalg_eigh.default aten._linalg_eigvals.default aten._linalg_slogdet.default aten._linalg_solve_ex.default
aten._linalg_svd.default aten._log_softmax.default aten._log_softmax_backward_data.default aten._logcumsumexp.default
aten._masked_softmax.default aten._masked_softmax_backward.default aten._native_batch_norm_legit.no_stats
aten._native_batch_norm_legit_functional.default aten._native_batch_norm_legit_no_training.default
aten._native_multi_head_attention.default aten._neg_view.default aten._neg_view_copy.default
aten._pack_padded_sequence.default aten._pdist_backward.default aten._pdist_forward.default aten._philox_normal.default
aten._philox_uniform.default aten._prelu_kernel.default aten._prelu_kernel_backward.default aten._reshape_alias.default
aten._reshape_alias_copy.default aten._reshape_copy.default aten._safe_softmax.default
aten._scaled_dot_product_cudnn_attention.default aten._scaled_dot_product_cudnn_attention_backward.default
aten._scaled_dot_product_efficient_attention.default aten._scaled_dot_product_efficient_attention_backward.default
aten._scaled_dot_product_flash_attention.default aten._scaled_dot_product_flash_attention_backward.default
aten._scaled_dot_product_flash_attention_for_cpu.default
aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._scaled_grouped_mm.default
aten._scaled_grouped_mm_v2.default aten._scaled_mm.default aten._scaled_mm_v2.default
aten._segment_reduce_backward.default aten._slow_conv2d_backward.output_mask aten._slow_conv2d_forward.default
aten._softmax.default aten._softmax_backward_data.default aten._stack.default aten._standard_gamma_grad.default
aten._thnn_fused_gru_cell.default aten._thnn_fused_lstm_cell.default aten._to_copy.default
aten._transform_bias_rescale_qkv.default aten._transformer_encoder_layer_fwd.default aten._trilinear.default
aten._unsafe_index.Tensor aten._unsafe_index_put.default aten._unsafe_masked_index.default
aten._unsafe_masked_index_put_accumulate.default aten._unsafe_view.default aten._upsample_bicubic2d_aa.default
aten._upsample_bicubic2d_aa_backward.default aten._upsample_bilinear2d_aa.default
aten._upsample_bilinear2d_aa_backward.default aten._upsample_lanczos2d_aa.default
aten._upsample_lanczos2d_aa_backward.default aten._upsample_nearest_exact1d.default
aten._upsample_nearest_exact1d_backward.default aten._upsample_nearest_exact2d.default
aten._upsample_nearest_exact2d_backward.default aten._upsample_nearest_exact3d.default
aten._upsample_nearest_exact3d_backward.default aten._weight_int4pack_mm.default
aten._weight_int4pack_mm_for_cpu.default aten._weight_int4pack_mm_with_scales_and_zeros.default
aten._weight_int8pack_mm.default aten._weight_norm_interface.default aten._weight_norm_interface_backward.default
aten.abs.default aten.acos.default aten.acosh.default aten.adaptive_max_pool2d.default
aten.adaptive_max_pool2d_backward.default aten.adaptive_max_pool3d.default aten.adaptive_max_pool3d_backward.default
aten.add.Scalar aten.add.Tensor aten.addbmm.default aten.addcdiv.default aten.addcmul.default aten.addmm.default
aten.addmm.dtype aten.addmv.default aten.addr.default aten.affine_grid_generator.default aten.alias.default
aten.alias_copy.default aten.all.default aten.all.dim aten.all.dims aten.amax.default aten.amin.default
aten.aminmax.default aten.angle.default aten.any.default aten.any.dim aten.any.dims aten.arange.default
aten.arange.start aten.arange.start_step aten.argmax.default aten.argmin.default aten.as_strided.default
aten.as_strided_copy.default aten.as_strided_scatter.default aten.asin.default aten.asinh.default aten.atan.default
aten.atan2.default aten.atanh.default aten.avg_pool2d.default aten.avg_pool2d_backward.default aten.avg_pool3d.default
aten.avg_pool3d_backward.default aten.baddbmm.default aten.baddbmm.dtype aten.bartlett_window.default
aten.bartlett_window.periodic aten.batch_norm_backward.default aten.batch_norm_update_stats.default
aten.binary_cross_entropy.default aten.binary_cross_entropy_backward.default
aten.binary_cross_entropy_with_logits.default aten.bitwise_and.Scalar aten.bitwise_and.Scalar_Tensor
aten.bitwise_and.Tensor aten.bitwise_left_shift.Scalar_Tensor aten.bitwise_left_shift.Tensor
aten.bitwise_left_shift.Tensor_Scalar aten.bitwise_not.default aten.bitwise_or.Scalar aten.bitwise_or.Scalar_Tensor
aten.bitwise_or.Tensor aten.bitwise_right_shift.Scalar_Tensor aten.bitwise_right_shift.Tensor
aten.bitwise_right_shift.Tensor_Scalar aten.bitwise_xor.Scalar aten.bitwise_xor.Scalar_Tensor aten.bitwise_xor.Tensor
aten.blackman_window.default aten.blackman_window.periodic aten.block_diag.default aten.bmm.default aten.bmm.dtype
aten.bucketize.Scalar aten.bucketize.Tensor aten.cat.default aten.ceil.default aten.celu.default
aten.channel_shuffle.default aten.cholesky.default aten.cholesky_inverse.default aten.cholesky_solve.default
aten.chunk.default aten.clamp.Tensor aten.clamp.default aten.clamp_max.Tensor aten.clamp_max.default
aten.clamp_min.Tensor aten.clamp_min.default aten.clip.Tensor aten.clip.default aten.clone.default aten.col2im.default
aten.complex.default aten.concat.default aten.concatenate.default aten.conj_physical.default
aten.constant_pad_nd.default aten.conv_tbc.default aten.convolution.default aten.convolution_backward.default
aten.copy.default aten.copysign.Scalar aten.copysign.Tensor aten.cos.default aten.cosh.default
aten.count_nonzero.default aten.count_nonzero.dim_IntList aten.cudnn_batch_norm.default
aten.cudnn_batch_norm_backward.default aten.cummax.default aten.cummin.default aten.cumprod.default aten.cumsum.default
aten.deg2rad.default aten.detach.default aten.detach_copy.default aten.diag_embed.default aten.diagonal.default
aten.diagonal_backward.default aten.diagonal_copy.default aten.diagonal_scatter.default aten.digamma.default
aten.dist.default aten.div.Scalar aten.div.Scalar_mode aten.div.Tensor aten.div.Tensor_mode aten.divide.Scalar
aten.divide.Tensor aten.dot.default aten.elu.default aten.elu_backward.default aten.embedding.default
aten.embedding_dense_backward.default aten.embedding_renorm.default aten.empty.memory_format aten.empty_like.default
aten.empty_permuted.default aten.empty_strided.default aten.eq.Scalar aten.eq.Tensor aten.erf.default aten.erfc.default
aten.erfinv.default aten.exp.default aten.exp2.default aten.expand.default aten.expand_copy.default aten.expm1.default
aten.eye.default aten.eye.m aten.fake_quantize_per_channel_affine.default
aten.fake_quantize_per_channel_affine_cachemask.default aten.fake_quantize_per_channel_affine_cachemask_backward.default
aten.fake_quantize_per_tensor_affine.default aten.fake_quantize_per_tensor_affine.tensor_qparams
aten.fake_quantize_per_tensor_affine_cachemask.default aten.fake_quantize_per_tensor_affine_cachemask_backward.default
aten.fft_fftfreq.default aten.fft_rfftfreq.default aten.fill.Scalar aten.fill.Tensor aten.flatten.using_ints
aten.flip.default aten.float_power.Scalar aten.float_power.Tensor_Scalar aten.float_power.Tensor_Tensor
aten.floor.default aten.floor_divide.Scalar aten.floor_divide.default aten.fmax.default aten.fmin.default
aten.fmod.Scalar aten.fmod.Tensor aten.frac.default aten.fractional_max_pool2d.default
aten.fractional_max_pool2d_backward.default aten.fractional_max_pool3d.default
aten.fractional_max_pool3d_backward.default aten.frexp.Tensor aten.full.default aten.full_like.default
aten.gather.default aten.gcd.default aten.ge.Scalar aten.ge.Tensor aten.gelu.default aten.gelu_backward.default
aten.geqrf.default aten.glu.default aten.glu_backward.default aten.glu_backward_jvp.default aten.glu_jvp.default
aten.grid_sampler_2d.default aten.grid_sampler_2d_backward.default aten.grid_sampler_3d.default
aten.grid_sampler_3d_backward.default aten.gt.Scalar aten.gt.Tensor aten.hamming_window.default
aten.hamming_window.periodic aten.hamming_window.periodic_alpha aten.hamming_window.periodic_alpha_beta
aten.hann_window.default aten.hann_window.periodic aten.hardshrink.default aten.hardshrink_backward.default
aten.hardsigmoid.default aten.hardsigmoid_backward.default aten.hardswish.default aten.hardswish_backward.default
aten.hardtanh.default aten.hardtanh_backward.default aten.hash_tensor.default aten.heaviside.default aten.histc.default
aten.histogram.bin_ct aten.histogram.bins_tensor aten.huber_loss.default aten.huber_loss_backward.default
aten.hypot.default aten.i0.default aten.igamma.default aten.igammac.default aten.im2col.default aten.index.Tensor
aten.index_add.default aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor
aten.index_put.default aten.index_reduce.default aten.index_select.default aten.isfinite.default aten.isin.Scalar_Tensor
aten.isin.Tensor_Scalar aten.isin.Tensor_Tensor aten.isinf.default aten.isnan.default aten.isneginf.default
aten.isposinf.default aten.kaiser_window.beta aten.kaiser_window.default aten.kaiser_window.periodic aten.kl_div.default
aten.kthvalue.default aten.l1_loss.default aten.lcm.default aten.ldexp.Tensor aten.le.Scalar aten.le.Tensor
aten.leaky_relu.default aten.leaky_relu_backward.default aten.lerp.Scalar aten.lerp.Tensor aten.lgamma.default
aten.lift.default aten.lift_fresh.default aten.lift_fresh_copy.default aten.linalg__powsum.default
aten.linalg_cholesky_ex.default aten.linalg_cross.default aten.linalg_eig.default
aten.linalg_householder_product.default aten.linalg_inv_ex.default aten.linalg_ldl_factor_ex.default
aten.linalg_ldl_solve.default aten.linalg_lu.default aten.linalg_lu_factor_ex.default aten.linalg_lu_solve.default
aten.linalg_matrix_exp.default aten.linalg_pinv.atol_rtol_tensor aten.linalg_qr.default
aten.linalg_solve_triangular.default aten.linalg_vector_norm.default aten.linspace.Scalar_Tensor
aten.linspace.Tensor_Scalar aten.linspace.Tensor_Tensor aten.linspace.default aten.log.default aten.log10.default
aten.log1p.default aten.log2.default aten.log_sigmoid.default aten.log_sigmoid_backward.default
aten.log_sigmoid_forward.default aten.logaddexp.default aten.logaddexp2.default aten.logcumsumexp.default
aten.logical_and.default aten.logical_not.default aten.logical_or.default aten.logical_xor.default aten.logit.default
aten.logit_backward.default aten.logspace.Scalar_Tensor aten.logspace.Tensor_Scalar aten.logspace.Tensor_Tensor
aten.logspace.default aten.logsumexp.default aten.lt.Scalar aten.lt.Tensor aten.lu_unpack.default
aten.masked_fill.Scalar aten.masked_fill.Tensor aten.masked_scatter.default aten.masked_scatter_backward.default
aten.max.default aten.max.dim aten.max.other aten.max_pool2d_with_indices.default
aten.max_pool2d_with_indices_backward.default aten.max_pool3d_with_indices.default
aten.max_pool3d_with_indices_backward.default aten.max_unpool2d.default aten.max_unpool3d.default aten.maximum.default
aten.mean.default aten.mean.dim aten.median.default aten.median.dim aten.min.default aten.min.dim aten.min.other
aten.minimum.default aten.mish.default aten.mish_backward.default aten.mkldnn_rnn_layer.default
aten.mkldnn_rnn_layer_backward.default aten.mm.default aten.mm.dtype aten.mode.default aten.mse_loss.default
aten.mse_loss_backward.default aten.mul.Scalar aten.mul.Tensor aten.multi_margin_loss.default
aten.multi_margin_loss_backward.default aten.multilabel_margin_loss_backward.default
aten.multilabel_margin_loss_forward.default aten.mv.default aten.mvlgamma.default aten.nan_to_num.default
aten.nanmedian.default aten.nanmedian.dim aten.nansum.default aten.narrow.default aten.narrow_copy.default
aten.native_batch_norm.default aten.native_batch_norm_backward.default aten.native_channel_shuffle.default
aten.native_dropout.default aten.native_dropout_backward.default aten.native_group_norm.default
aten.native_group_norm_backward.default aten.native_layer_norm.default aten.native_layer_norm_backward.default
aten.ne.Scalar aten.ne.Tensor aten.neg.default aten.new_empty.default aten.new_empty_strided.default
aten.new_full.default aten.new_ones.default aten.new_zeros.default aten.nextafter.default
aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default aten.nll_loss_backward.default
aten.nll_loss_forward.default aten.nonzero_static.default aten.norm.Scalar aten.norm.ScalarOpt_dim
aten.norm.ScalarOpt_dim_dtype aten.norm.ScalarOpt_dtype aten.ones.default aten.ones_like.default aten.ormqr.default
aten.outer.default aten.permute.default aten.permute_copy.default aten.pixel_shuffle.default
aten.pixel_unshuffle.default aten.polar.default aten.polygamma.default aten.positive.default aten.pow.Scalar
aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.prod.default aten.prod.dim_int aten.put.default aten.rad2deg.default
aten.range.default aten.range.step aten.real.default aten.reciprocal.default aten.reflection_pad1d.default
aten.reflection_pad1d_backward.default aten.reflection_pad2d.default aten.reflection_pad2d_backward.default
aten.reflection_pad3d.default aten.reflection_pad3d_backward.default aten.relu.default aten.relu6.default
aten.remainder.Scalar aten.remainder.Scalar_Tensor aten.remainder.Tensor aten.renorm.default aten.repeat.default
aten.replication_pad1d.default aten.replication_pad1d_backward.default aten.replication_pad2d.default
aten.replication_pad2d_backward.default aten.replication_pad3d.default aten.replication_pad3d_backward.default
aten.reshape.default aten.resolve_conj.default aten.resolve_neg.default aten.rms_norm.default aten.roll.default
aten.rot90.default aten.round.decimals aten.round.default aten.rrelu_with_noise_backward.default aten.rsqrt.default
aten.rsub.Scalar aten.rsub.Tensor aten.scalar_tensor.default aten.scatter.reduce aten.scatter.src aten.scatter.value
aten.scatter.value_reduce aten.scatter_add.default aten.scatter_reduce.two aten.searchsorted.Scalar
aten.searchsorted.Tensor aten.segment_reduce.default aten.select.int aten.select_backward.default aten.select_copy.int
aten.select_scatter.default aten.selu.default aten.sgn.default aten.sigmoid.default aten.sigmoid_backward.default
aten.sign.default aten.signbit.default aten.silu.default aten.silu_backward.default aten.sin.default aten.sinc.default
aten.sinh.default aten.slice.Tensor aten.slice_backward.default aten.slice_copy.Tensor aten.slice_inverse.default
aten.slice_scatter.default aten.slow_conv3d_forward.default aten.slow_conv_dilated2d.default
aten.slow_conv_dilated3d.default aten.slow_conv_transpose2d.default aten.slow_conv_transpose3d.default
aten.smooth_l1_loss.default aten.smooth_l1_loss_backward.default aten.soft_margin_loss.default
aten.soft_margin_loss_backward.default aten.softplus.default aten.softplus_backward.default aten.softshrink.default
aten.softshrink_backward.default aten.sort.default aten.sort.stable aten.special_airy_ai.default
aten.special_bessel_j0.default aten.special_bessel_j1.default aten.special_bessel_y0.default
aten.special_bessel_y1.default aten.special_chebyshev_polynomial_t.default aten.special_chebyshev_polynomial_t.n_scalar
aten.special_chebyshev_polynomial_t.x_scalar aten.special_chebyshev_polynomial_u.default
aten.special_chebyshev_polynomial_u.n_scalar aten.special_chebyshev_polynomial_u.x_scalar
aten.special_chebyshev_polynomial_v.default aten.special_chebyshev_polynomial_v.n_scalar
aten.special_chebyshev_polynomial_v.x_scalar aten.special_chebyshev_polynomial_w.default
aten.special_chebyshev_polynomial_w.n_scalar aten.special_chebyshev_polynomial_w.x_scalar aten.special_entr.default
aten.special_erfcx.default aten.special_hermite_polynomial_h.default aten.special_hermite_polynomial_h.n_scalar
aten.special_hermite_polynomial_h.x_scalar aten.special_hermite_polynomial_he.default
aten.special_hermite_polynomial_he.n_scalar aten.special_hermite_polynomial_he.x_scalar aten.special_i0e.default
aten.special_i1.default aten.special_i1e.default aten.special_laguerre_polynomial_l.default
aten.special_laguerre_polynomial_l.n_scalar aten.special_laguerre_polynomial_l.x_scalar
aten.special_legendre_polynomial_p.default aten.special_legendre_polynomial_p.n_scalar
aten.special_legendre_polynomial_p.x_scalar aten.special_log_ndtr.default aten.special_modified_bessel_i0.default
aten.special_modified_bessel_i1.default aten.special_modified_bessel_k0.default aten.special_modified_bessel_k1.default
aten.special_ndtri.default aten.special_scaled_modified_bessel_k0.default aten.special_scaled_modified_bessel_k1.default
aten.special_shifted_chebyshev_polynomial_t.default aten.special_shifted_chebyshev_polynomial_t.n_scalar
aten.special_shifted_chebyshev_polynomial_t.x_scalar aten.special_shifted_chebyshev_polynomial_u.default
aten.special_shifted_chebyshev_polynomial_u.n_scalar aten.special_shifted_chebyshev_polynomial_u.x_scalar
aten.special_shifted_chebyshev_polynomial_v.default aten.special_shifted_chebyshev_polynomial_v.n_scalar
aten.special_shifted_chebyshev_polynomial_v.x_scalar aten.special_shifted_chebyshev_polynomial_w.default
aten.special_shifted_chebyshev_polynomial_w.n_scalar aten.special_shifted_chebyshev_polynomial_w.x_scalar
aten.special_spherical_bessel_j0.default aten.special_xlog1py.default aten.special_xlog1py.other_scalar
aten.special_xlog1py.self_scalar aten.special_zeta.default aten.special_zeta.other_scalar aten.special_zeta.self_scalar
aten.split.Tensor aten.split.sizes aten.split_copy.Tensor aten.split_with_sizes.default
aten.split_with_sizes_copy.default aten.sqrt.default aten.square.default aten.squeeze.default aten.squeeze.dim
aten.squeeze.dims aten.squeeze_copy.default aten.squeeze_copy.dim aten.squeeze_copy.dims aten.stack.default
aten.std.correction aten.std.default aten.std.dim aten.std_mean.correction aten.std_mean.default aten.std_mean.dim
aten.sub.Scalar aten.sub.Tensor aten.sum.default aten.sum.dim_IntList aten.swapaxes.default aten.swapdims.default
aten.t.default aten.t_copy.default aten.take.default aten.take_along_dim.default aten.tan.default aten.tanh.default
aten.tanh_backward.default aten.threshold.default aten.threshold_backward.default aten.tile.default aten.topk.default
aten.trace.default aten.transpose.int aten.transpose_copy.int aten.triangular_solve.default aten.tril.default
aten.tril_indices.default aten.triu.default aten.triu_indices.default aten.true_divide.Scalar aten.true_divide.Tensor
aten.trunc.default aten.unbind.int aten.unbind_copy.int aten.unflatten.int aten.unfold.default
aten.unfold_backward.default aten.unfold_copy.default aten.unsafe_chunk.default aten.unsafe_split.Tensor
aten.unsafe_split_with_sizes.default aten.unsqueeze.default aten.unsqueeze_copy.default aten.upsample_bicubic2d.default
aten.upsample_bicubic2d_backward.default aten.upsample_bilinear2d.default aten.upsample_bilinear2d_backward.default
aten.upsample_linear1d.default aten.upsample_linear1d_backward.default aten.upsample_nearest1d.default
aten.upsample_nearest1d_backward.default aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default
aten.upsample_nearest3d.default aten.upsample_nearest3d_backward.default aten.upsample_trilinear3d.default
aten.upsample_trilinear3d_backward.default aten.var.correction aten.var.default aten.var.dim aten.var_mean.correction
aten.var_mean.default aten.var_mean.dim aten.vdot.default aten.view.default aten.view.dtype aten.view_as_complex.default
aten.view_as_complex_copy.default aten.view_as_real.default aten.view_as_real_copy.default aten.view_copy.default
aten.view_copy.dtype aten.where.Scalar aten.where.ScalarOther aten.where.ScalarSelf aten.where.self
aten.xlogy.Scalar_Other aten.xlogy.Scalar_Self aten.xlogy.Tensor aten.zero.default aten.zeros.default
aten.zeros_like.default torchlazy.checked.default torchlazy.random_bits.default
"""

OPERATORS = frozenset(_NAMES.split())
