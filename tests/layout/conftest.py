import os
from typing import Any

import pytest
from hypothesis import settings

from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
# A busy machine is no failure.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

QWEN3_8_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    },
    "vision_config": {"num_hidden_layers": 27},
}

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
}


@pytest.fixture
def config_27b() -> dict[str, Any]:
    return {**QWEN3_8_27B, "text_config": dict(QWEN3_8_27B["text_config"])}


@pytest.fixture
def config_next() -> dict[str, Any]:
    return dict(QWEN3_NEXT_80B)


@pytest.fixture
def shape_27b(config_27b: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(config_27b)


@pytest.fixture
def geometry_27b(shape_27b: ModelShape) -> Geometry:
    return Geometry.of(shape_27b)
