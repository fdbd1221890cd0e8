"""The line that an engine logs at start: what a person needs to know before the first prompt."""

from __future__ import annotations

from typing import Any

from inpage.engines.scheduler import geometry_of
from inpage.layout.pool import printed_tokens
from inpage.state.mover import Mover


def start_line(
    mover: Mover, kv_cache_config: Any, max_model_len: int, slot_bytes: int, retention: int | str | None, also: str = ""
) -> str:
    """The line; `slot_bytes` of one slot, `retention` vLLM's interval in tokens or None, `also` what else is set."""
    if retention in (None, ""):
        kept = "dense, a checkpoint at every boundary"
    elif int(retention) == 0:
        kept = "sparse, a checkpoint at the last boundary of a prompt and where prompts part"
    else:
        kept = f"sparse, a checkpoint every {retention} tokens"
    blocks = kv_cache_config.num_blocks
    tokens = printed_tokens(blocks, geometry_of(kv_cache_config), max_model_len, "in-page")
    return (
        f"inpage: in-page layout, block {mover.block_tokens} tokens, shortest prefix that can hit "
        f"{mover.grid.mark_tokens} tokens, {blocks} blocks, pool of {tokens:,} tokens at "
        f"max_model_len {max_model_len}, "
        f"{mover.slots.count} slots of {slot_bytes / 2**20:.1f} MiB each beside the pool, {also}retention {kept}."
    )
