"""Reading a config.json, and refusing what is not a hybrid."""

import json

import pytest

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import plan_pool
from inpage.layout.units import mib, parse_memory


def test_a_nested_vision_language_config_gives_the_text_models_shape(config_27b) -> None:
    shape = ModelShape.from_config(config_27b)
    assert (shape.attention_layers, shape.gdn_layers) == (16, 48)
    assert (shape.kv_heads, shape.head_dim, shape.key_heads, shape.value_heads) == (4, 256, 16, 48)
    assert (shape.ssm_dtype, shape.model_type) == ("float32", "qwen3_5_text")


def test_a_flat_qwen3_next_config_counts_layers_by_its_interval(config_next) -> None:
    shape = ModelShape.from_config(config_next)
    assert (shape.attention_layers, shape.gdn_layers) == (12, 36)
    del config_next["full_attention_interval"]
    assert ModelShape.from_config(config_next) == shape
    config_next["full_attention_interval"] = 6
    assert ModelShape.from_config(config_next).attention_layers == 8


def test_experts_do_not_change_the_shape(config_next) -> None:
    dense = {key: value for key, value in config_next.items() if key != "num_experts"}
    assert ModelShape.from_config(dense) == ModelShape.from_config(config_next)


def test_qwen3_next_ignores_mamba_ssm_dtype_as_vllm_does_and_an_override_wins(config_next) -> None:
    config_next["mamba_ssm_dtype"] = "float32"
    shape = ModelShape.from_config(config_next)
    assert shape.ssm_dtype == "bfloat16"
    # vLLM's well-known "Setting attention block size to 544 tokens" on CUDA.
    assert Geometry.of(shape, alignment=16).block_tokens == 544
    assert ModelShape.from_config(config_next, ssm_dtype="float32").ssm_dtype == "float32"


def test_a_file_and_its_folder_read_alike(tmp_path, config_27b) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_27b))
    shape = ModelShape.from_config(config_27b)
    assert ModelShape.from_file(tmp_path) == ModelShape.from_file(tmp_path / "config.json") == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None, "linear_key_head_dim": None}, r"lacks head_dim, linear_key_head_dim\."),
        ({"num_hidden_layers": None}, r"lacks num_hidden_layers\."),
        ({"linear_num_value_heads": "32"}, "linear_num_value_heads must be a positive whole number, not '32'"),
        ({"head_dim": 0}, "head_dim must be a positive whole number, not 0"),
        ({"head_dim": True}, "head_dim must be a positive whole number, not True"),
        ({"full_attention_interval": -4}, "full_attention_interval must be a positive whole number, not -4"),
        ({"full_attention_interval": 1}, "is not a hybrid: 48 of its 48 layers are full attention"),
        ({"layer_types": ["linear_attention"]}, "is not a hybrid: 0 of its 1 layers are full attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types may only name linear_attention and full_att"),
        ({"layer_types": "full_attention"}, "layer_types may only name linear_attention and full_attention"),
        ({"text_config": []}, r"text_config must be an object, not \[\]"),
        ({"model_type": "qwen3_5", "mamba_ssm_dtype": "int8"}, "the ssm dtype 'int8' is not one of float32"),
    ],
)
def test_a_bad_config_is_refused_with_its_key(config_next, change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config({**config_next, **change})


def test_a_model_without_linear_attention_is_not_a_hybrid() -> None:
    with pytest.raises(ConfigError, match=r"^llama\.json is not a Gated DeltaNet hybrid: it has no linear_"):
        ModelShape.from_config({"model_type": "llama", "num_hidden_layers": 32}, source="llama.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"config\.json is not JSON: "),
        (b"\xff\xfe", r"config\.json is not JSON: "),
        (b"[1]", r"config\.json must hold a JSON object, not a list\."),
        (None, r"Cannot read .*config\.json \(No such file or directory\): give a config\.json on this machine"),
    ],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path, content, message) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_file(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int4"}, "The KV dtype 'int4' is not one of auto, bf16, bfloat16, float16, fp8"),
        ({"tp": 0}, "The TP size and the alignment must be at least one"),
        ({"alignment": 0}, "The TP size and the alignment must be at least one"),
        ({"tp": 3}, "TP 3 does not divide the 16 key heads and 48 value heads"),
        ({"tp": 32}, "TP 32 does not divide the 16 key heads and 48 value heads"),
    ],
)
def test_a_geometry_vllm_cannot_have_is_refused(shape_27b, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Geometry.of(shape_27b, **options)


def test_kv_heads_that_tp_neither_divides_nor_repeats_are_refused(config_27b) -> None:
    config_27b["text_config"]["num_key_value_heads"] = 3
    with pytest.raises(ConfigError, match="TP 2 neither divides nor repeats the 3 KV heads"):
        Geometry.of(ModelShape.from_config(config_27b), tp=2)


def test_an_unknown_layout_is_refused(geometry_27b) -> None:
    with pytest.raises(ConfigError, match="The layout 'paged' is not one of off, native, per-block, in-page"):
        plan_pool("paged", geometry_27b, 1 << 30, max_model_len=1024, session_tokens=1024)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("18475MiB", 18475 << 20),
        (" 18.5 gib ", 37 << 29),
        ("19GB", 19 * 10**9),
        ("4096", 4096),
        ("4096B", 4096),
        ("0.1KiB", 102),
        ("1TiB", 1 << 40),
    ],
)
def test_memory_sizes_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "18,475MiB", "-1GiB", "18475M", "1e9", "nan", "1 GiB 2", "1GiBB"])
def test_a_memory_size_that_could_be_misread_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a memory size; write it like 18475MiB, 18\.04GiB or 1937"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1B"])
def test_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is nothing; give the bytes that the pool may use"):
        parse_memory(text)


def test_sizes_print_in_mib() -> None:
    assert mib(18475 << 20) == "18,475.00 MiB"
