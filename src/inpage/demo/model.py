"""A small Qwen3-Next hybrid with random weights and an offline tokenizer.

Random weights answer nonsense, but they exercise every byte of the states: the decay of the recurrence is
chosen for a long memory, so that a wrong state shows in the logits hundreds of tokens later. Ordinary
initialisation forgets within a few tokens, and a stale state would pass unnoticed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Tools come before the messages, as in the chat templates of the Qwen3 family.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class DemoModel:
    """Sizes; every fourth layer is full attention, as in Qwen3-Next.

    Small enough for processors without AVX-512, where bf16 products and the GDN kernel take slow paths. A float32
    state fills 54% of its page (87% on the 27B models).
    """

    layers: int = 4
    hidden: int = 32
    intermediate: int = 32
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 32
    key_heads: int = 1
    value_heads: int = 1
    state_dim: int = 64
    experts: int = 2
    vocab: int = 512
    conv_kernel: int = 4
    max_position: int = 65536
    seed: int = 0

    @property
    def conv_channels(self) -> int:
        """Channels of the conv window: q, k and v of the GDN layer."""
        return (2 * self.key_heads + self.value_heads) * self.state_dim

    @property
    def layer_types(self) -> list[str]:
        """GDN or attention, layer by layer."""
        return ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(self.layers)]


def make_model(folder: Path, model: DemoModel | None = None) -> Path:
    """Write config, tokenizer and weights into `folder`; the same sizes and seed give the same bytes."""
    from safetensors.torch import save_file

    model = model or DemoModel()
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder, model)
    _write_json(folder / "config.json", _config(model, ids))
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": [ids["<|im_end|>"]], "pad_token_id": ids["<|endoftext|>"], "do_sample": False},
    )
    save_file(dict(_weights(model)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _write_tokenizer(folder: Path, model: DemoModel) -> dict[str, int]:
    """One token a byte: texts have exact lengths and nothing needs to be downloaded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.max_position,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ids: dict[str, int] = tokenizer.get_vocab()
    return {token: ids[token] for token in SPECIAL_TOKENS}


def _config(model: DemoModel, ids: dict[str, int]) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": 2 * model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": model.conv_kernel,
        "linear_key_head_dim": model.state_dim,
        "linear_value_head_dim": model.state_dim,
        "linear_num_key_heads": model.key_heads,
        "linear_num_value_heads": model.value_heads,
        "layer_types": model.layer_types,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_parameters": rope,
        "num_experts": model.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": model.intermediate,
        "shared_expert_intermediate_size": model.intermediate,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": None,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def _weights(model: DemoModel) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(model.seed)

    def linear(out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        """Weights that keep the variance of their input: `[out_features, in_features]` bf16."""
        weight = torch.randn(out_features, in_features, generator=random) * gain / math.sqrt(in_features)
        return weight.to(torch.bfloat16)

    def norm(size: int, base: float = 0.0) -> torch.Tensor:
        """Qwen3-Next's norms are stored as offsets from 1 (`base` 0), the gated one plainly (`base` 1)."""
        return (base + 0.1 * torch.randn(size, generator=random)).to(torch.bfloat16)

    hidden, values = model.hidden, model.value_heads * model.state_dim
    yield "model.embed_tokens.weight", torch.randn(model.vocab, hidden, generator=random).to(torch.bfloat16)
    for index, kind in enumerate(model.layer_types):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", norm(hidden)
        yield layer + "post_attention_layernorm.weight", norm(hidden)
        if kind == "linear_attention":
            gdn = layer + "linear_attn."
            yield gdn + "in_proj_qkvz.weight", linear(model.conv_channels + values, hidden)
            yield gdn + "in_proj_ba.weight", linear(2 * model.value_heads, hidden)
            conv = torch.randn(model.conv_channels, 1, model.conv_kernel, generator=random) * 0.5
            yield gdn + "conv1d.weight", conv.to(torch.bfloat16)
            # The state decays by exp(-exp(A_log) * softplus(a + dt_bias)) a token: small, so that it remembers.
            yield gdn + "A_log", torch.log(torch.rand(model.value_heads, generator=random) * 0.2 + 0.002)
            yield gdn + "dt_bias", (torch.rand(model.value_heads, generator=random) * 2 - 4).to(torch.bfloat16)
            yield gdn + "norm.weight", norm(model.state_dim, base=1.0)
            yield gdn + "out_proj.weight", linear(hidden, values)
        else:
            attention = layer + "self_attn."
            # Twice the heads' width: the second half is the output gate.
            yield attention + "q_proj.weight", linear(2 * model.heads * model.head_dim, hidden)
            yield attention + "k_proj.weight", linear(model.kv_heads * model.head_dim, hidden)
            yield attention + "v_proj.weight", linear(model.kv_heads * model.head_dim, hidden)
            yield attention + "o_proj.weight", linear(hidden, model.heads * model.head_dim)
            yield attention + "q_norm.weight", norm(model.head_dim)
            yield attention + "k_norm.weight", norm(model.head_dim)
        yield layer + "mlp.gate.weight", linear(model.experts, hidden)
        experts = [f"experts.{expert}" for expert in range(model.experts)]
        for expert in [*experts, "shared_expert"]:
            yield f"{layer}mlp.{expert}.gate_proj.weight", linear(model.intermediate, hidden)
            yield f"{layer}mlp.{expert}.up_proj.weight", linear(model.intermediate, hidden)
            yield f"{layer}mlp.{expert}.down_proj.weight", linear(hidden, model.intermediate)
        yield layer + "mlp.shared_expert_gate.weight", linear(1, hidden)
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", linear(model.vocab, hidden, gain=2.0)
