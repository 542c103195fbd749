"""What an entry of the transformers zoo is, and the settings that entries share: 2 layers of width 32.

Invariant: settings that a configuration's class does not know are attributes without effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 64
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
WAVES = {
    "vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (16, 16, 16), "conv_stride": (4, 2, 2), "conv_kernel": (8, 3, 3), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
    "ctc_loss_reduction": "mean", "pad_token_id": 0,
}  # fmt: skip


GPT = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TWO_TOWERS = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}


@dataclass(frozen=True)
class Entry:
    """A model class, its configuration's class and arguments, the kind of batch it trains on, and the learning rate.

    Deep stacks of batch norm over few values double a rounding error at every layer: they want a small rate.
    """

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    batch: str = "text"
    rate: float = 1e-2
