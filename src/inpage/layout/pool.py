"""What each layout makes of the memory that is left for the pool of one rank.

`off`        caching off: a request has one running block in every GDN group
`native`     vLLM's align mode where state and K/V share pages (CPU, CUDA)
`per-block`  a state tensor row per block beside the attention pages (upstream vllm-gaudi)
`in-page`    checkpoints in the pages, running states in slots: the pool of `native`

The counting is vLLM 0.30.0's (kv_cache_utils.py: `get_kv_cache_config_from_groups`,
`get_max_concurrency_for_kv_cache_config`, `_check_enough_kv_cache_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry

Layout = Literal["off", "native", "per-block", "in-page"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
ENGINES = ("gaudi", "cpu")


def bytes_per_block(layout: Layout, geometry: Geometry) -> int:
    """Bytes of one block in all layers; `per-block` adds a state row at every layer position."""
    beside = geometry.gdn_layers_per_group * geometry.state_bytes if layout == "per-block" else 0
    return geometry.block_bytes + beside


def blocks_for(layout: Layout, geometry: Geometry, memory_bytes: int) -> int:
    """Blocks, the null block among them, that a pool of `memory_bytes` holds."""
    return memory_bytes // bytes_per_block(layout, geometry)


def per_block_equivalent(num_blocks: int, geometry: Geometry) -> int:
    """Blocks that per-block state tensors would leave from the memory of `num_blocks` shared ones."""
    return blocks_for("per-block", geometry, num_blocks * geometry.block_bytes)


def blocks_per_request(layout: Layout, geometry: Geometry, tokens: int) -> int:
    """Blocks that vLLM counts for one request of `tokens`.

    A GDN group has two with caching, the checkpoint resumed from and the block being written, and one
    without (`MambaSpec.max_memory_usage_bytes`).
    """
    attention = geometry.attention_groups * -(-tokens // geometry.block_tokens)
    return attention + geometry.gdn_groups * (1 if layout == "off" else 2)


def printed_tokens(num_blocks: int, geometry: Geometry, max_model_len: int, layout: Layout) -> int:
    """Tokens of the start-up line "KV cache size: N tokens", rounded through a float as vLLM does it."""
    return int(num_blocks / blocks_per_request(layout, geometry, max_model_len) * max_model_len)


def largest_max_model_len(num_blocks: int, geometry: Geometry, layout: Layout) -> int:
    """The largest max-model-len that vLLM starts with, 0 if none: one request beside the null block."""
    attention = num_blocks - 1 - blocks_per_request(layout, geometry, 0)
    return max(0, attention // geometry.attention_groups * geometry.block_tokens)


def sessions_kept(num_blocks: int, geometry: Geometry, session_tokens: int, layout: Layout) -> int:
    """Sessions of `session_tokens` that stay cached while they take turns.

    A session stays when its attention blocks and the newest checkpoint of every GDN group outlive a round
    of the others' turns; older checkpoints were freed earlier, so LRU takes them first. The next turn
    writes one more block a group. That is `blocks_per_request`, so as many stay as such requests fit.
    Checked on vLLM's own pool (tests/layout): exact for turns of up to four blocks with every checkpoint
    hashed, as in spec.txt; longer turns write more checkpoints a group and keep fewer sessions.
    """
    if layout == "off":
        return 0
    return max(0, num_blocks - 1) // blocks_per_request(layout, geometry, session_tokens)


def slots(layout: Layout, geometry: Geometry, engine: str, max_num_seqs: int) -> tuple[int, int]:
    """Slots of one state tensor, and the bytes of all tensors, which come on top of the pool.

    Gaudi: a tensor per layer position with a slot per request and group and two rows more
    (vllm-gaudi's compact mode, also with caching off). CPU: a tensor per GDN layer with a slot per request
    and one for padding; its other layouts run in the pages.
    """
    if engine == "gaudi" and layout in ("off", "in-page"):
        count, tensors = max_num_seqs * geometry.gdn_groups + 2, geometry.gdn_layers_per_group
    elif engine == "cpu" and layout == "in-page":
        count, tensors = max_num_seqs + 1, geometry.gdn_layers
    else:
        count, tensors = 0, 0
    return count, count * tensors * geometry.state_bytes


@dataclass(frozen=True)
class PoolPlan:
    """One layout's share of a memory budget.

    blocks_per_request: of a request of max-model-len. printed_tokens: None when vLLM would not start.
    slots, slot_bytes: as `slots` has them.
    """

    layout: Layout
    bytes_per_block: int
    num_blocks: int
    blocks_per_request: int
    printed_tokens: int | None
    largest_max_model_len: int
    sessions: int
    slots: int
    slot_bytes: int


def plan_pool(
    layout: Layout,
    geometry: Geometry,
    memory_bytes: int,
    *,
    max_model_len: int,
    session_tokens: int,
    engine: str = "gaudi",
    max_num_seqs: int = 4,
) -> PoolPlan:
    """All of a layout's numbers; raises ConfigError for counts below one and unknown names."""
    if layout not in LAYOUTS:
        raise ConfigError(f"The layout {layout!r} is not one of {', '.join(LAYOUTS)}.")
    if engine not in ENGINES:
        raise ConfigError(f"The engine {engine!r} is not one of {', '.join(ENGINES)}.")
    if min(memory_bytes, max_model_len, session_tokens, max_num_seqs) < 1:
        raise ConfigError("Memory, max-model-len, session tokens and max-num-seqs must be at least one.")
    if session_tokens > max_model_len:
        raise ConfigError(f"A session of {session_tokens:,} tokens exceeds max-model-len {max_model_len:,}.")
    blocks = blocks_for(layout, geometry, memory_bytes)
    largest = largest_max_model_len(blocks, geometry, layout)
    count, size = slots(layout, geometry, engine, max_num_seqs)
    return PoolPlan(
        layout,
        bytes_per_block(layout, geometry),
        blocks,
        blocks_per_request(layout, geometry, max_model_len),
        printed_tokens(blocks, geometry, max_model_len, layout) if max_model_len <= largest else None,
        largest,
        sessions_kept(blocks, geometry, session_tokens, layout),
        count,
        size,
    )
