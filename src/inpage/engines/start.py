"""The line that an engine logs at start: what a person needs to know before the first prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inpage.engines.scheduler import geometry_of
from inpage.layout.pool import printed_tokens
from inpage.state.mover import Mover
from inpage.state.pages import WORD, LayerStates


def start_line(
    mover: Mover,
    layers: Iterable[LayerStates],
    kv_cache_config: Any,
    max_model_len: int,
    retention: int | str | None,
    also: str = "",
) -> str:
    """The line; a slot holds the states of `layers`, `retention` is vLLM's interval, `also` what else is set."""
    if retention in (None, ""):
        kept = "dense, a checkpoint at every boundary"
    elif int(retention) == 0:
        kept = "sparse, a checkpoint at the last boundary of a prompt and where prompts part"
    else:
        kept = f"sparse, a checkpoint every {retention} tokens"
    slot_bytes, blocks = sum(layer.words * WORD for layer in layers), kv_cache_config.num_blocks
    tokens = printed_tokens(blocks, geometry_of(kv_cache_config), max_model_len, "in-page")
    return (
        f"inpage: in-page layout, block {mover.block_tokens} tokens, shortest prefix that can hit "
        f"{mover.grid.mark_tokens} tokens, {blocks} blocks, pool of {tokens:,} tokens at max_model_len "
        f"{max_model_len}, {mover.slots.count} slots of {slot_bytes / 2**20:.1f} MiB each beside the pool, "
        f"{also}retention {kept}."
    )
