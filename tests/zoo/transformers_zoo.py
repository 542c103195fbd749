"""Tiny configurations of the transformers library's models, with random weights, by name.

Invariant: nothing is read from disk or network: a model is its configuration, 2 layers of width 32, every dropout 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.zoo.batches import BATCHES
from tests.zoo.case import Batch, Case, one_optimizer
from tests.zoo.entry import GPT, GROUPED, SEQ2SEQ, TEXT, TWO_TOWERS, VISION, VOCABULARY, WAVES, Entry
from tests.zoo.transformers_more import MORE

ENTRIES: dict[str, Entry] = {
    # Encoders of text.
    "bert": Entry("BertForMaskedLM", "BertConfig", TEXT),
    "roberta": Entry("RobertaForMaskedLM", "RobertaConfig", TEXT),
    "xlm_roberta": Entry("XLMRobertaForMaskedLM", "XLMRobertaConfig", TEXT),
    "distilbert": Entry(
        "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
         "max_position_embeddings": 40},
    ),
    "albert": Entry("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    "electra": Entry("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    "deberta": Entry(
        "DebertaForMaskedLM", "DebertaConfig",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
    ),
    "deberta_v2": Entry(
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    ),
    "mpnet": Entry("MPNetForMaskedLM", "MPNetConfig", TEXT),
    "convbert": Entry("ConvBertForMaskedLM", "ConvBertConfig", {**TEXT, "embedding_size": 16, "head_ratio": 2}),
    "funnel": Entry(
        "FunnelForMaskedLM", "FunnelConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1],
         "num_decoder_layers": 1, "initializer_std": 0.02},
    ),
    "xlnet": Entry(
        "XLNetLMHeadModel", "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    "squeezebert": Entry("SqueezeBertForMaskedLM", "SqueezeBertConfig", {**TEXT, "embedding_size": 32}),
    "roformer": Entry("RoFormerForMaskedLM", "RoFormerConfig", {**TEXT, "embedding_size": 32}),
    "rembert": Entry(
        "RemBertForMaskedLM", "RemBertConfig", {**TEXT, "input_embedding_size": 16, "output_embedding_size": 16}
    ),
    "fnet": Entry("FNetForMaskedLM", "FNetConfig", TEXT, "full text"),
    "nystromformer": Entry(
        "NystromformerForMaskedLM", "NystromformerConfig", {**TEXT, "num_landmarks": 4, "segment_means_seq_len": 16},
        "full text",
    ),
    "modernbert": Entry("ModernBertForMaskedLM", "ModernBertConfig", {**TEXT, "sep_token_id": 2, "cls_token_id": 1}),
    "longformer": Entry("LongformerForMaskedLM", "LongformerConfig", {**TEXT, "attention_window": 4}),
    "megatron_bert": Entry("MegatronBertForMaskedLM", "MegatronBertConfig", TEXT),
    # Decoders of text.
    "gpt2": Entry("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt_neo": Entry(
        "GPTNeoForCausalLM", "GPTNeoConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 40,
         "attention_types": [[["global", "local"], 1]], "window_size": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gptj": Entry("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    "gpt_neox": Entry("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "opt": Entry("OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Entry("BloomForCausalLM", "BloomConfig", {**TEXT, "n_layer": 2, "n_head": 4}),
    "llama": Entry("LlamaForCausalLM", "LlamaConfig", {**TEXT, **GROUPED}),
    "mistral": Entry("MistralForCausalLM", "MistralConfig", {**TEXT, **GROUPED, "sliding_window": 6}),
    "qwen2": Entry("Qwen2ForCausalLM", "Qwen2Config", {**TEXT, **GROUPED}),
    "qwen3": Entry("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, **GROUPED, "head_dim": 8}),
    "gemma": Entry("GemmaForCausalLM", "GemmaConfig", {**TEXT, **GROUPED, "head_dim": 8}),
    "gemma2": Entry("Gemma2ForCausalLM", "Gemma2Config", {**TEXT, **GROUPED, "head_dim": 8, "sliding_window": 6}),
    "phi": Entry("PhiForCausalLM", "PhiConfig", TEXT),
    "phi3": Entry("Phi3ForCausalLM", "Phi3Config", {**TEXT, **GROUPED}),
    "falcon": Entry("FalconForCausalLM", "FalconConfig", {**TEXT, "alibi": False, "new_decoder_architecture": False}),
    "stablelm": Entry("StableLmForCausalLM", "StableLmConfig", {**TEXT, "num_key_value_heads": 4}),
    "olmo": Entry("OlmoForCausalLM", "OlmoConfig", TEXT),
    "mpt": Entry(
        "MptForCausalLM", "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 40},
    ),
    "mixtral": Entry("MixtralForCausalLM", "MixtralConfig", {**TEXT, **GROUPED, "num_local_experts": 4}),
    "qwen2_moe": Entry(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {**TEXT, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "mamba": Entry(
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
        "full text",
    ),
    # Encoders and decoders of text.
    "t5": Entry(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        "translation",
    ),
    "bart": Entry("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, "translation"),
    "pegasus": Entry("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, "translation"),
    "marian": Entry("MarianMTModel", "MarianConfig", SEQ2SEQ, "translation"),
    "mbart": Entry("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, "translation"),
    "blenderbot": Entry("BlenderbotForConditionalGeneration", "BlenderbotConfig", SEQ2SEQ, "translation"),
    "m2m_100": Entry("M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ, "translation"),
    "switch_transformers": Entry(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 4, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "router_jitter_noise": 0.0, "decoder_start_token_id": 0},
        "translation",
    ),
    # Images.
    "vit": Entry("ViTForImageClassification", "ViTConfig", VISION, "image"),
    "deit": Entry("DeiTForImageClassification", "DeiTConfig", VISION, "image"),
    "beit": Entry("BeitForImageClassification", "BeitConfig", {**VISION, "use_relative_position_bias": True}, "image"),
    "dinov2": Entry("Dinov2ForImageClassification", "Dinov2Config", {**VISION, "mlp_ratio": 2}, "image"),
    "swin": Entry(
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
         "num_labels": 5},
        "large image",
    ),
    "convnext": Entry(
        "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5, "image_size": 32},
        "large image",
    ),
    "resnet": Entry(
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
        "large image",
    ),
    "segformer": Entry(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "patch_sizes": [7, 3],
         "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
         "num_labels": 5},
        "segmented",
    ),
    "poolformer": Entry(
        "PoolFormerForImageClassification", "PoolFormerConfig",
        {"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
         "padding": [2, 1], "num_labels": 5},
        "large image",
    ),
    "mobilevit": Entry(
        "MobileViTForImageClassification", "MobileViTConfig",
        {"image_size": 64, "hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 12, 12, 16, 16],
         "num_attention_heads": 2, "initializer_range": 0.3,
         "num_labels": 5},
        "images", 1e-3,
    ),
    "clip": Entry("CLIPModel", "CLIPConfig", TWO_TOWERS, "image and text"),
    "siglip": Entry("SiglipModel", "SiglipConfig", TWO_TOWERS, "image and text"),
    # Sound and series.
    "wav2vec2": Entry("Wav2Vec2ForCTC", "Wav2Vec2Config", WAVES, "wave"),
    "hubert": Entry("HubertForCTC", "HubertConfig", WAVES, "wave"),
    "wavlm": Entry("WavLMForCTC", "WavLMConfig", {**WAVES, "num_buckets": 8, "max_bucket_distance": 16}, "wave"),
    "whisper": Entry(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 10, "max_target_positions": 20}, "spectrum",
    ),
    "speech_to_text": Entry(
        "Speech2TextForConditionalGeneration", "Speech2TextConfig",
        {**SEQ2SEQ, "input_feat_per_channel": 16, "num_conv_layers": 2, "conv_channels": 16,
         "conv_kernel_sizes": (3, 3),
         "max_source_positions": 20, "max_target_positions": 20},
        "rows",
    ),
    "patchtst": Entry(
        "PatchTSTForPrediction", "PatchTSTConfig",
        {"num_input_channels": 2, "context_length": 24, "patch_length": 4, "patch_stride": 4, "prediction_length": 8,
         "num_hidden_layers": 2, "d_model": 32, "num_attention_heads": 4, "ffn_dim": 48,
         "do_mask_input": False, "loss": "mse"},
        "series",
    ),
}  # fmt: skip


def _without_dropout(config: Any) -> Any:
    """Set every dropout of a configuration, and of those within it, to zero."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    return config


def _make(entry: Entry) -> nn.Module:
    import transformers

    config = _without_dropout(getattr(transformers, entry.config)(**entry.settings))
    model = getattr(transformers, entry.model)(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # a few models have one that no setting tells
            module.p = 0.0
    return model


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    extra = {"return_loss": True} if "labels" not in batch and "pixel_values" in batch else {}
    return model(**batch, **extra).loss


TRANSFORMERS: dict[str, Case] = {
    f"hf_{name}": Case(
        f"hf_{name}",
        functools.partial(_make, entry),
        BATCHES[entry.batch],
        _loss,
        functools.partial(one_optimizer, rate=entry.rate),
    )
    for name, entry in {**ENTRIES, **MORE}.items()
}
