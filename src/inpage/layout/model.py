"""The shape of a Gated DeltaNet hybrid, from its `config.json`.

Qwen3-Next keeps its keys at the top, Qwen3.5 and later nest them in the `text_config` of a vision-language
config. Experts do not matter here: a dense model and a MoE with equal attention have equal pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpage.errors import ConfigError

SSM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of the ssm matrix, by vLLM's `--mamba-ssm-cache-dtype`."""

_KEYS = {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True)
class ModelShape:
    """Heads and layers of the whole model, before tensor parallelism divides them."""

    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    attention_layers: int
    gdn_layers: int
    ssm_dtype: str
    model_type: str

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, ssm_dtype: str | None = None, source: str = "config.json"
    ) -> ModelShape:
        """Read a config; `ssm_dtype` overrides it, `source` names it in errors.

        Without an override the ssm dtype is what vLLM 0.30.0 takes: `mamba_ssm_dtype` for Qwen3.5 and
        later (models/config.py), the model's 16 bits for Qwen3-Next, which has no such hook.

        Raises ConfigError when the model is no hybrid, or a key is missing or not a positive number.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ConfigError(f"{source}: text_config must be an object, not {text!r}.")
        keys = list(_KEYS.values())
        if not any(key in text for key in keys if key.startswith("linear_")):
            raise ConfigError(f"{source} is not a Gated DeltaNet hybrid: it has no linear_* keys.")
        needed = keys if text.get("layer_types") else [*keys, "num_hidden_layers"]
        if missing := [key for key in needed if text.get(key) is None]:
            raise ConfigError(f"{source} lacks {', '.join(missing)}.")
        gdn_layers, attention_layers = _layer_counts(text, source)
        model_type = str(text.get("model_type", "unknown"))
        stated = None if model_type == "qwen3_next" else text.get("mamba_ssm_dtype")
        ssm_dtype = ssm_dtype or stated or "bfloat16"
        if ssm_dtype not in SSM_BYTES:
            raise ConfigError(f"{source}: the ssm dtype {ssm_dtype!r} is not one of {', '.join(SSM_BYTES)}.")
        heads: dict[str, Any] = {field: _positive(text, key, source) for field, key in _KEYS.items()}
        return cls(
            attention_layers=attention_layers,
            gdn_layers=gdn_layers,
            ssm_dtype=ssm_dtype,
            model_type=model_type,
            **heads,
        )

    @classmethod
    def from_file(cls, path: Path, *, ssm_dtype: str | None = None) -> ModelShape:
        """Read a `config.json`, or the one in a model's folder; raises ConfigError as `from_config`."""
        config, file = read_config(path)
        return cls.from_config(config, ssm_dtype=ssm_dtype, source=str(file))


def read_config(path: Path) -> tuple[Mapping[str, Any], Path]:
    """A `config.json`, or the one in a model's folder, and where it is; ConfigError when it is no JSON object."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"Cannot read {file} ({error.strerror}): give a config.json on this machine, or its folder."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}.") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(config).__name__}.")
    return config, file


def longest_length(config: Mapping[str, Any]) -> int | None:
    """The longest max-model-len that vLLM derives from a config, in tokens; None when the config does not say.

    As `_get_and_verify_max_len` (config/model.py, 0.30.0): rope types whose length is scaled already are not scaled
    again.
    """
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings") if isinstance(text, Mapping) else None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return None
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor") or 1.0
    return length if kind in _SCALED_ALREADY else int(length * factor)


def _layer_counts(text: Mapping[str, Any], source: str) -> tuple[int, int]:
    """GDN and attention layers; without `layer_types`, every fourth layer is attention unless stated."""
    if kinds := text.get("layer_types"):
        if not isinstance(kinds, list) or set(map(str, kinds)) - {"linear_attention", "full_attention"}:
            raise ConfigError(f"{source}: layer_types may only name linear_attention and full_attention.")
        layers, attention = len(kinds), kinds.count("full_attention")
    else:
        layers = _positive(text, "num_hidden_layers", source)
        interval = {"full_attention_interval": 4, **text}  # vLLM's default
        attention = layers // _positive(interval, "full_attention_interval", source)
    if attention in (0, layers):
        raise ConfigError(f"{source} is not a hybrid: {attention} of its {layers} layers are full attention.")
    return layers - attention, attention


def _positive(text: Mapping[str, Any], key: str, source: str) -> int:
    value = text[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{source}: {key} must be a positive whole number, not {value!r}.")
    return value
