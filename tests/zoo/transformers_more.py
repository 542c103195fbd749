"""More tiny configurations of the transformers library's models: the less usual kinds of layers.

Invariant: as in `transformers_zoo`, which takes its entries from here too.
"""

from __future__ import annotations

from tests.zoo.entry import GPT, GROUPED, SEQ2SEQ, TEXT, VISION, VOCABULARY, WAVES, Entry

_CONV = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
_SERIES = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "scaling": "mean",
}  # fmt: skip

MORE: dict[str, Entry] = {
    # Text.
    "ibert": Entry("IBertForMaskedLM", "IBertConfig", TEXT),
    "esm": Entry("EsmForMaskedLM", "EsmConfig", {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "layoutlm": Entry("LayoutLMForMaskedLM", "LayoutLMConfig", TEXT),
    "mobilebert": Entry(
        "MobileBertForMaskedLM", "MobileBertConfig",
        {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    ),
    "xlm": Entry(
        "XLMWithLMHeadModel", "XLMConfig",
        {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40},
    ),
    "canine": Entry(
        "CanineForSequenceClassification", "CanineConfig",
        {**TEXT, "num_hash_functions": 2, "num_hash_buckets": 32, "downsampling_rate": 2, "local_transformer_stride": 4,
         "num_labels": 5},
        "long text class",
    ),
    "big_bird": Entry("BigBirdForMaskedLM", "BigBirdConfig", {**TEXT, "attention_type": "original_full"}),
    "yoso": Entry("YosoForMaskedLM", "YosoConfig", {**TEXT, "use_expectation": True}),
    "perceiver": Entry(
        "PerceiverForMaskedLM", "PerceiverConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2,
         "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "max_position_embeddings": 10,
         "qk_channels": 32,
         "v_channels": 32},
        "inputs",
    ),
    "ctrl": Entry(
        "CTRLLMHeadModel", "CTRLConfig",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 40},
    ),
    "codegen": Entry("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": Entry("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    "cohere": Entry("CohereForCausalLM", "CohereConfig", {**TEXT, **GROUPED}),
    "deepseek_v3": Entry(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
         "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 8,
         "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "gpt_oss": Entry(
        "GptOssForCausalLM", "GptOssConfig",
        {**TEXT, **GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "olmoe": Entry("OlmoeForCausalLM", "OlmoeConfig", {**TEXT, "num_key_value_heads": 4, "num_experts": 4,
    "num_experts_per_tok": 2}),
    "jamba": Entry(
        "JambaForCausalLM", "JambaConfig",
        {**TEXT, **GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4,
         "use_mamba_kernels": False},
    ),
    "mamba2": Entry(
        "Mamba2ForCausalLM", "Mamba2Config",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8,
         "head_dim": 8, "n_groups": 2, "chunk_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "full text",
    ),
    "rwkv": Entry(
        "RwkvForCausalLM", "RwkvConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2,
         "context_length": 16, "bos_token_id": 1, "eos_token_id": 2},
        "full text",
    ),
    "recurrent_gemma": Entry(
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
        {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8},
    ),
    "qwen3_next": Entry(
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**TEXT, **GROUPED, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "prophetnet": Entry(
        "ProphetNetForConditionalGeneration", "ProphetNetConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1,
         "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48,
         "max_position_embeddings": 40, "pad_token_id": 0, "decoder_start_token_id": 1},
        "translation",
    ),
    "longt5": Entry(
        "LongT5ForConditionalGeneration", "LongT5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global",
         "decoder_start_token_id": 0},
        "translation",
    ),
    "led": Entry(
        "LEDForConditionalGeneration", "LEDConfig",
        {**SEQ2SEQ, "attention_window": 4, "max_encoder_position_embeddings": 40,
         "max_decoder_position_embeddings": 40},
        "translation",
    ),
    # Images.
    "swinv2": Entry(
        "Swinv2ForImageClassification", "Swinv2Config",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
         "num_labels": 5},
        "large image",
    ),
    "convnextv2": Entry(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", {**_CONV, "num_stages": 2, "image_size": 32},
        "large image"
    ),
    "efficientnet": Entry(
        "EfficientNetForImageClassification", "EfficientNetConfig",
        {"image_size": 32, "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256, "num_labels": 5,
         "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 5], "strides": [1, 2],
         "num_block_repeats": [1, 2], "expand_ratios": [1, 6], "depthwise_padding": []},
        "images",
    ),
    "mobilenet_v2": Entry(
        "MobileNetV2ForImageClassification", "MobileNetV2Config",
        {"image_size": 64, "depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4, "initializer_range": 0.3,
         "num_labels": 5},
        "images", 1e-3,
    ),
    "regnet": Entry(
        "RegNetForImageClassification", "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "num_labels": 5}, "images",
    ),
    "levit": Entry(
        "LevitForImageClassification", "LevitConfig",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8], "initializer_range": 0.3, "num_labels": 5},
        "images", 1e-3,
    ),
    "focalnet": Entry(
        "FocalNetForImageClassification", "FocalNetConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16],
         "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": 5},
        "large image",
    ),
    "dpt": Entry(
        "DPTForSemanticSegmentation", "DPTConfig",
        {**VISION, "image_size": 32, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
         "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5]},
        "segmented",
    ),
    "vit_mae": Entry(
        "ViTMAEForPreTraining", "ViTMAEConfig",
        {**VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
         "decoder_intermediate_size": 16},
        "masked image",
    ),
    "videomae": Entry(
        "VideoMAEForVideoClassification", "VideoMAEConfig", {**VISION, "num_frames": 4, "tubelet_size": 2}, "video"
    ),
    "vilt": Entry(
        "ViltForTokenClassification", "ViltConfig",
        {**TEXT, **VISION, "num_labels": VOCABULARY}, "image of text",
    ),
    "blip": Entry(
        "BlipForConditionalGeneration", "BlipConfig",
        {"text_config": {**TEXT, "encoder_hidden_size": 32}, "vision_config": VISION, "projection_dim": 16},
        "image of text",
    ),
    # Sound and series.
    "sew": Entry("SEWForCTC", "SEWConfig", {**WAVES, "squeeze_factor": 2}, "wave"),
    "data2vec_audio": Entry(
        "Data2VecAudioForCTC", "Data2VecAudioConfig", {**WAVES, "num_conv_pos_embeddings": 2,
        "conv_pos_kernel_size": 3},
        "wave",
    ),
    "wav2vec2_conformer": Entry(
        "Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", {**WAVES, "conv_depthwise_kernel_size": 3}, "wave"
    ),
    "audio_spectrogram_transformer": Entry(
        "ASTForAudioClassification", "ASTConfig",
        {**VISION, "max_length": 16, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}, "spectrogram",
    ),
    "time_series_transformer": Entry(
        "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", _SERIES, "time series"
    ),
    "autoformer": Entry(
        "AutoformerForPrediction", "AutoformerConfig", {**_SERIES, "label_length": 2, "moving_average": 3},
        "time series",
    ),
}  # fmt: skip
