"""State, page and block of a hybrid on one rank.

Mirrors vLLM 0.30.0: `MambaStateShapeCalculator.gated_delta_net_state_shape` for the state,
`Platform._align_hybrid_block_size` for the block, `_get_kv_cache_groups_uniform_page_size` for the groups.
Speculative decoding, which widens the conv window, is not covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from inpage.errors import ConfigError
from inpage.layout.model import SSM_BYTES, ModelShape

_SIXTEEN_BITS, _EIGHT_BITS = ("auto", "bf16", "bfloat16", "float16"), ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
KV_BYTES = dict.fromkeys(_SIXTEEN_BITS, 2) | dict.fromkeys(_EIGHT_BITS, 1)
"""Bytes of an element of K or V, by vLLM's `--kv-cache-dtype`; `auto` is the model's 16 bits."""

CONV_BYTES = 2
"""Bytes of an element of the conv window: the model's 16 bits, which the GDN kernels ask for."""


def state_shapes(shape: ModelShape, tp: int = 1) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of one GDN layer's conv window and ssm matrix on one of `tp` ranks."""
    channels = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
    conv = (shape.conv_kernel - 1, channels // tp)
    return conv, (shape.value_heads // tp, shape.value_dim, shape.key_dim)


def state_bytes(shapes: Iterable[Sequence[int]], itemsizes: Iterable[int]) -> int:
    """Bytes of a state whose parts have these shapes and element sizes."""
    return sum(prod(shape) * size for shape, size in zip(shapes, itemsizes, strict=True))


@dataclass(frozen=True)
class Geometry:
    """Bytes and tokens on one rank; an engine may fill it from its own cache specs.

    state_bytes: one GDN layer's state. kv_bytes_per_token: K and V of one token in one attention layer.
    block_tokens: tokens of a block, in every group.
    """

    state_bytes: int
    kv_bytes_per_token: int
    block_tokens: int
    attention_layers: int
    gdn_layers: int

    @classmethod
    def of(cls, shape: ModelShape, *, kv_dtype: str = "auto", tp: int = 1, alignment: int = 128) -> Geometry:
        """The geometry vLLM chooses; raises ConfigError for a dtype, TP size or alignment it cannot have.

        alignment: the block is the smallest multiple of it whose page holds a state. 128 tokens on Gaudi
        and on vLLM's CPU platform, unless `--block-size` says otherwise (platform.py, platforms/cpu.py).
        """
        if kv_dtype not in KV_BYTES:
            raise ConfigError(f"The KV dtype {kv_dtype!r} is not one of {', '.join(KV_BYTES)}.")
        if min(tp, alignment) < 1:
            raise ConfigError("The TP size and the alignment must be at least one.")
        if shape.key_heads % tp or shape.value_heads % tp:
            raise ConfigError(
                f"TP {tp} does not divide the {shape.key_heads} key heads and {shape.value_heads} value "
                "heads of the GDN layers."
            )
        if shape.kv_heads % tp and tp % shape.kv_heads:
            raise ConfigError(f"TP {tp} neither divides nor repeats the {shape.kv_heads} KV heads.")
        # With more ranks than KV heads, vLLM repeats a head on several ranks.
        kv_bytes_per_token = 2 * max(1, shape.kv_heads // tp) * shape.head_dim * KV_BYTES[kv_dtype]
        state = state_bytes(state_shapes(shape, tp), (CONV_BYTES, SSM_BYTES[shape.ssm_dtype]))
        block_tokens = alignment * _ceil_div(state, alignment * kv_bytes_per_token)
        return cls(state, kv_bytes_per_token, block_tokens, shape.attention_layers, shape.gdn_layers)

    @property
    def page_bytes(self) -> int:
        """One block in one attention layer, K and V."""
        return self.block_tokens * self.kv_bytes_per_token

    @property
    def padding_bytes(self) -> int:
        """What a checkpoint leaves unused of its page."""
        return self.page_bytes - self.state_bytes

    @property
    def group_size(self) -> int:
        """Layers that vLLM puts into a group at most.

        The fewer of attention and GDN layers; where the kinds differ by less than half, the more, which
        takes fewer padding layers.
        """
        fewer, more = sorted((self.attention_layers, self.gdn_layers))
        return more if more < fewer * 1.5 else fewer

    @property
    def attention_groups(self) -> int:
        """Groups of attention layers; one in every published model."""
        return _ceil_div(self.attention_layers, self.group_size)

    @property
    def gdn_groups(self) -> int:
        """Groups of GDN layers; each holds its checkpoints in blocks of its own."""
        return _ceil_div(self.gdn_layers, self.group_size)

    @property
    def gdn_layers_per_group(self) -> int:
        """Layer positions of the widest GDN group (vLLM deals the layers out evenly)."""
        return _ceil_div(self.gdn_layers, self.gdn_groups)

    @property
    def block_bytes(self) -> int:
        """One block in every layer of the widest group: what a shared pool pays for a block id."""
        attention_per_group = _ceil_div(self.attention_layers, self.attention_groups)
        return self.page_bytes * max(attention_per_group, self.gdn_layers_per_group)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
