"""A small Qwen3.5 as its releases describe themselves: language and vision, dense, no weights (vLLM makes dummies)."""

from __future__ import annotations

import json
from pathlib import Path

ENGINE_OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
}
"""What it is served with."""

_TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(8)],
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    },
    "partial_rotary_factor": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
_VISION = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}


def write_config(folder: Path) -> Path:
    """Blocks of 384 tokens with a float32 ssm state: 256 bytes of K and V a token, a state of 68,608 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": _TEXT,
        "vision_config": _VISION,
        "image_token_id": 500,
        "video_token_id": 501,
        "vision_start_token_id": 502,
        "vision_end_token_id": 503,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    return folder
