"""The fused kernels that a dense bf16 hybrid needs, in plain PyTorch with float32 inside."""

from __future__ import annotations

import enum
from typing import Any

import torch

from habana_frameworks.torch.products import attention, product


class RotaryPosEmbeddingMode(enum.IntEnum):
    """How the rotated halves lie: one after the other, or interleaved."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: Any = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """Rotate the last dimension of `x` by the angles of `cos` and `sin`, which are spread to its size already."""
    values = x.float()
    if mode == RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = values.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-values[..., 1::2], values[..., ::2]), dim=-1).flatten(-2)
    return (values * cos.float() + turned * sin.float()).to(x.dtype)


class FusedRMSNorm:
    """Root mean square norm."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *rest: Any) -> torch.Tensor:
        values = x.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
        return (values * weight.float()).to(x.dtype)


class FusedSDPA:
    """Attention, `[batch, heads, tokens, head_dim]`; KV heads may be fewer than heads.

    Masks are added, as on the device: minus infinity hides a number but not a NaN, so a page that was not zeroed
    shows up as NaN here too.
    """

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: Any = None,
        valid_sequence_lengths: torch.Tensor | None = None,
        padding_side: str = "left",
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        if any(option not in (None, False, (-1, -1)) for option in (*rest, *options.values())):
            raise NotImplementedError(f"the emulated FusedSDPA has no {rest} {options}")
        batch, heads, queries, head_dim = q.shape
        kv_heads, keys = k.shape[1:3]
        bias = torch.zeros(batch, 1, 1, queries, keys)
        if is_causal:
            later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
            bias = bias.masked_fill(later, float("-inf"))
        if valid_sequence_lengths is not None:
            lengths = valid_sequence_lengths.view(batch, 1, 1, 1, 1).long()
            bias = bias.masked_fill(torch.arange(keys) >= lengths, float("-inf"))
        if attn_mask is not None:
            bias = bias + FusedSDPA._spread(attn_mask, kv_heads, heads)
        grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
        out = attention(grouped, k, v, head_dim**-0.5 if scale is None else scale, bias)
        if valid_sequence_lengths is not None:
            out = out.masked_fill(lengths <= 0, 0.0)  # a row of padding sees no key at all
        return out.flatten(1, 2).to(q.dtype)

    @staticmethod
    def _spread(mask: torch.Tensor, kv_heads: int, heads: int) -> torch.Tensor:
        """The mask as numbers to add, `[batch, kv heads, heads of each, queries, keys]` or broadcast to it."""
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.unsqueeze(2) if mask.shape[1] in (1, kv_heads) else mask.unflatten(1, (kv_heads, heads // kv_heads))
        if mask.dtype == torch.bool:
            return torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        return mask.float()


OPERATORS = torch.library.Library("hpu", "DEF")
"""`torch.ops.hpu`; whatever is missing fails by name."""

OPERATORS.define(
    "mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, "
    "Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max, int chunk_size=0, "
    "int total_experts=0) -> Tensor"
)


def _mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w12: list[torch.Tensor],
    w3: list[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> torch.Tensor:
    """The experts of this rank, each applied to all tokens: `[tokens, hidden]`; weights `[out, in]` (permuted)."""
    if activation != "silu" or not permuted_weights:
        raise NotImplementedError(f"the emulated mixture of experts has no {activation}, {permuted_weights=}")
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert, (gate_up, down) in enumerate(zip(w12, w3, strict=True), start=experts_min):
        share = torch.where(expert_routing_table == expert, router_weights, 0).sum(-1, keepdim=True)
        gate, up = product(hidden_states, gate_up.T).chunk(2, dim=-1)
        out += share.float() * product(torch.nn.functional.silu(gate) * up, down.T).float()
    return out.to(hidden_states.dtype)


OPERATORS.impl("mixture_of_experts", _mixture_of_experts, "CPU")
